// The conversion of one element, held against the compiler's own _Float16 and against rounding done in
// double.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "../cast/tile.h"

namespace {

using lite_ext::DType;
using lite_ext::cast::convert_element;
namespace bits = lite_ext::cast::bits;

constexpr int kRandomWords = 2'000'000;

// The nearest bfloat16 by arithmetic: the significand rounded to 8 bits in double precision.
double nearest_bfloat16(float value) {
    if (value == 0.0F || !std::isfinite(value)) return value;
    int exponent = 0;
    std::frexp(value, &exponent);
    const int last_bit = std::max(exponent - 8, -133);  // 2^-133 is the least subnormal
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(value), -last_bit)), last_bit);
    const double largest = 0x1.FEp127;
    return std::fabs(rounded) > largest ? std::copysign(std::numeric_limits<double>::infinity(), rounded) : rounded;
}

TEST(Tile, EveryHalfWidensAsTheCompilerDoes) {
    for (std::uint32_t word = 0; word <= 0xFFFFU; ++word) {
        const auto half = static_cast<std::uint16_t>(word);
        const auto expected = static_cast<float>(std::bit_cast<_Float16>(half));
        const float got = bits::half_to_float(half);
        if (std::isnan(expected)) {
            EXPECT_TRUE(std::isnan(got)) << word;
        } else {
            EXPECT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(expected)) << word;
        }
    }
}

TEST(Tile, EveryBFloat16WidensToTheSameBits) {
    for (std::uint32_t word = 0; word <= 0xFFFFU; ++word) {
        const float got = bits::bfloat16_to_float(static_cast<std::uint16_t>(word));
        EXPECT_EQ(std::bit_cast<std::uint32_t>(got), word << 16);
    }
}

TEST(Tile, FloatNarrowsToHalfAsTheCompilerDoes) {
    std::mt19937 random(1);
    std::uniform_int_distribution<std::uint32_t> any;
    for (int i = 0; i < kRandomWords; ++i) {
        // Two thirds of the words are moved into the range of halves and their subnormals.
        const std::uint32_t word = any(random);
        float value = std::bit_cast<float>(word);
        if (i % 3 == 1) value = std::ldexp(static_cast<float>(word) - 0x1p31F, -18 - static_cast<int>(word % 40));
        if (i % 3 == 2) value = std::bit_cast<float>((word & 0x80FFFFFFU) | 0x33000000U);
        const std::uint16_t got = bits::float_to_half(value);
        if (std::isnan(value)) {
            EXPECT_GT(got & 0x7FFFU, bits::kHalfInfinity);
        } else {
            EXPECT_EQ(got, std::bit_cast<std::uint16_t>(static_cast<_Float16>(value))) << value;
        }
    }
}

TEST(Tile, FloatNarrowsToTheNearestBFloat16) {
    std::mt19937 random(2);
    std::uniform_int_distribution<std::uint32_t> any;
    for (int i = 0; i < kRandomWords; ++i) {
        std::uint32_t word = any(random);
        if (i % 2 == 0) word = (word & 0xFFFF0000U) | 0x8000U;  // exactly between two bfloat16
        const float value = std::bit_cast<float>(word);
        const float got = bits::bfloat16_to_float(bits::float_to_bfloat16(value));
        if (std::isnan(value)) {
            EXPECT_TRUE(std::isnan(got)) << std::hex << word;
        } else {
            EXPECT_EQ(static_cast<double>(got), nearest_bfloat16(value)) << std::hex << word;
            EXPECT_EQ(std::signbit(got), std::signbit(value));
        }
    }
}

TEST(Tile, NaNNeverBecomesInfinite) {
    for (const std::uint32_t word : {0x7F800001U, 0x7FFFFFFFU, 0xFF800001U, 0xFFFFFFFFU, 0x7FC00000U}) {
        const float nan = std::bit_cast<float>(word);
        EXPECT_TRUE(std::isnan(bits::bfloat16_to_float(bits::float_to_bfloat16(nan))));
        EXPECT_TRUE(std::isnan(bits::half_to_float(bits::float_to_half(nan))));
    }
}

TEST(Tile, DoubleReachesTheNarrowTypesThroughFloat) {
    // The nearest bfloat16 of this is 1 + 2^-7; rounded to float first, it lies on a tie and goes to even.
    const double value = 1.0 + 0x1p-8 + 0x1p-40;
    EXPECT_EQ((convert_element<DType::float64, DType::bfloat16>(value)), 0x3F80U);
    const double half_tie = 1.0 + 0x1p-11 + 0x1p-40;
    EXPECT_EQ((convert_element<DType::float64, DType::float16>(half_tie)), 0x3C00U);
}

TEST(Tile, WideningAndNarrowingAgain) {
    for (std::uint32_t word = 0; word < bits::kHalfInfinity; ++word) {
        const auto half = static_cast<std::uint16_t>(word);
        const double wide = convert_element<DType::float16, DType::float64>(half);
        EXPECT_EQ((convert_element<DType::float64, DType::float16>(wide)), half);
    }
}

}  // namespace
