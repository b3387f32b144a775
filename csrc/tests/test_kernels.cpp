// The vector kernels give what the scalar conversion gives, for every count, and write nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "../cast/cpu/kernels.h"
#include "../cast/tile.h"

namespace {

using lite_ext::DType;
using lite_ext::item_size;
using lite_ext::cast::convert_element;
using lite_ext::cast::storage_t;
using lite_ext::cast::cpu::kernel;
using lite_ext::cast::cpu::Level;

constexpr std::uint8_t kGuard = 0xA5;
constexpr std::size_t kGuardBytes = 64;
constexpr int kCounts = 70;  // past eight registers and every tail

bool processor_has(Level level) {
#if defined(__x86_64__)
    return level == Level::baseline || (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0);
#else
    return level == Level::baseline;
#endif
}

template <DType D>
bool is_nan(storage_t<D> value) {
    if constexpr (D == DType::float64) {
        return std::isnan(value);
    } else if constexpr (D == DType::float32) {
        return std::isnan(value);
    } else {
        return std::isnan(convert_element<D, DType::float32>(value));
    }
}

template <DType Source, DType Target>
void check_pair(Level level) {
    std::mt19937_64 random(static_cast<std::uint64_t>(Source) * 16 + static_cast<std::uint64_t>(Target));
    for (std::size_t count = 0; count <= kCounts; ++count) {
        for (std::size_t offset = 0; offset < 4; ++offset) {  // sources that no vector register is aligned to
            std::vector<storage_t<Source>> source(count + offset);
            std::vector<std::uint8_t> raw(source.size() * sizeof(storage_t<Source>));
            std::generate(raw.begin(), raw.end(), [&] { return static_cast<std::uint8_t>(random()); });
            if (!raw.empty()) std::memcpy(source.data(), raw.data(), raw.size());
            // Targets that no vector register is aligned to either: a thread's share may start anywhere.
            const std::size_t shift = (count + offset) % 9 * item_size(Target);
            std::vector<std::uint8_t> all(shift + count * item_size(Target) + kGuardBytes, kGuard);
            const std::span<std::uint8_t> target = std::span(all).subspan(shift);
            kernel(Source, Target, level)(source.data() + offset, target.data(), static_cast<std::int64_t>(count));
            const auto before = std::span(all).first(shift);
            ASSERT_TRUE(std::all_of(before.begin(), before.end(), [](std::uint8_t byte) { return byte == kGuard; }));
            for (std::size_t i = 0; i < count; ++i) {
                storage_t<Target> got;
                std::memcpy(&got, target.data() + i * sizeof(got), sizeof(got));
                const storage_t<Target> expected = convert_element<Source, Target>(source[offset + i]);
                ASSERT_EQ(is_nan<Target>(got), is_nan<Target>(expected));
                if (!is_nan<Target>(expected)) {
                    ASSERT_EQ(std::memcmp(&got, &expected, sizeof(got)), 0);
                }
            }
            const auto guard = target.end() - static_cast<std::ptrdiff_t>(kGuardBytes);
            ASSERT_TRUE(std::all_of(guard, target.end(), [](std::uint8_t byte) { return byte == kGuard; }));
        }
    }
}

template <DType Source>
void check_source(Level level) {
    if constexpr (Source != DType::float16) check_pair<Source, DType::float16>(level);
    if constexpr (Source != DType::bfloat16) check_pair<Source, DType::bfloat16>(level);
    if constexpr (Source != DType::float32) check_pair<Source, DType::float32>(level);
    if constexpr (Source != DType::float64) check_pair<Source, DType::float64>(level);
}

class Kernels : public testing::TestWithParam<Level> {};

TEST_P(Kernels, EveryPairEqualsTheScalarConversion) {
    if (!processor_has(GetParam())) GTEST_SKIP() << "this processor lacks the instructions";
    check_source<DType::float16>(GetParam());
    check_source<DType::bfloat16>(GetParam());
    check_source<DType::float32>(GetParam());
    check_source<DType::float64>(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Levels, Kernels, testing::Values(Level::baseline, Level::avx2, Level::avx2_streaming));

}  // namespace
