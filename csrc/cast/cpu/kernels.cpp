#include "kernels.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "../tile.h"

#if defined(__x86_64__) || defined(_M_X64)
#define LITE_EXT_X86 1
#include <immintrin.h>
#else
#define LITE_EXT_X86 0
#endif

namespace lite_ext::cast::cpu {

namespace {

template <DType Source, DType Target>
void run_baseline(const void* source, void* target, std::int64_t count) {
    const auto* from = static_cast<const storage_t<Source>*>(source);
    auto* to = static_cast<storage_t<Target>*>(target);
    for (std::int64_t i = 0; i < count; ++i) to[i] = convert_element<Source, Target>(from[i]);
}

#if LITE_EXT_X86

// Eight elements as float32 (float64 keeps its own path where neither side is narrower).
constexpr std::int64_t kLanes = 8;

template <DType Source>
[[gnu::target("avx2,f16c")]] inline __m256 load(const storage_t<Source>* from) {
    if constexpr (Source == DType::float32) {
        return _mm256_loadu_ps(from);
    } else if constexpr (Source == DType::float64) {
        return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(from + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(from)));
    } else {
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        if constexpr (Source == DType::float16) {
            return _mm256_cvtph_ps(words);
        } else {
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
        }
    }
}

template <DType Target>
[[gnu::target("avx2,f16c")]] inline void store(storage_t<Target>* to, __m256 values) {
    if constexpr (Target == DType::float32) {
        _mm256_storeu_ps(to, values);
    } else if constexpr (Target == DType::float64) {
        _mm256_storeu_pd(to, _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
        _mm256_storeu_pd(to + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
    } else if constexpr (Target == DType::float16) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                         _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
        const __m256i words = _mm256_castps_si256(values);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(words, 16), _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(words, bias), 16);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
        const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(bits::kBFloatQuietNan), nan);
        // Packing works within each half of the register; the permutation puts the two halves in order.
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0b1000);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
    }
}

// Converts fewer than kLanes elements through a full register as well, so that all elements are converted by the same
// instructions.
template <DType Source, DType Target>
[[gnu::target("avx2,f16c")]] inline void run_rest(const storage_t<Source>* from, storage_t<Target>* to,
                                                  std::int64_t count) {
    storage_t<Source> rest_from[kLanes] = {};
    storage_t<Target> rest_to[kLanes];
    std::memcpy(rest_from, from, static_cast<std::size_t>(count) * sizeof(storage_t<Source>));
    store<Target>(rest_to, load<Source>(rest_from));
    std::memcpy(to, rest_to, static_cast<std::size_t>(count) * sizeof(storage_t<Target>));
}

// Past the caches: of what is larger than they are, nothing is left in them when it is read again.
template <DType Source, DType Target>
[[gnu::target("avx2,f16c")]] void run_streaming(const void* source, void* target, std::int64_t count) {
    const auto* from = static_cast<const storage_t<Source>*>(source);
    auto* to = static_cast<storage_t<Target>*>(target);
    constexpr std::uintptr_t kAligned = 32;
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(target) % kAligned;
    const auto head = static_cast<std::int64_t>((kAligned - past) % kAligned / sizeof(storage_t<Target>));
    std::int64_t i = 0;
    for (; i + kLanes <= std::min(head, count); i += kLanes) store<Target>(to + i, load<Source>(from + i));
    if (i < std::min(head, count)) {
        run_rest<Source, Target>(from + i, to + i, std::min(head, count) - i);
        i = std::min(head, count);
    }
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
        alignas(kAligned) storage_t<Target> block[2 * kLanes];
        store<Target>(block, load<Source>(from + i));
        store<Target>(block + kLanes, load<Source>(from + i + kLanes));
        const auto* words = reinterpret_cast<const __m256i*>(block);
        auto* lines = reinterpret_cast<__m256i*>(to + i);
        for (std::size_t word = 0; word < sizeof(block) / kAligned; ++word) {
            _mm256_stream_si256(lines + word, _mm256_load_si256(words + word));
        }
    }
    _mm_sfence();
    for (; i + kLanes <= count; i += kLanes) store<Target>(to + i, load<Source>(from + i));
    if (i < count) run_rest<Source, Target>(from + i, to + i, count - i);
}

template <DType Source, DType Target>
[[gnu::target("avx2,f16c")]] void run_avx2(const void* source, void* target, std::int64_t count) {
    const auto* from = static_cast<const storage_t<Source>*>(source);
    auto* to = static_cast<storage_t<Target>*>(target);
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store<Target>(to + i, load<Source>(from + i));
    if (i < count) run_rest<Source, Target>(from + i, to + i, count - i);
}

#endif

using Row = std::array<Kernel, kKernelDTypes>;
using Table = std::array<Row, kKernelDTypes>;

template <Level L, std::size_t Source, std::size_t Target>
constexpr Kernel pick() {
    constexpr auto kSource = static_cast<DType>(Source);
    constexpr auto kTarget = static_cast<DType>(Target);
    if constexpr (Source == Target) {
        return nullptr;
#if LITE_EXT_X86
    } else if constexpr (L == Level::avx2) {
        return run_avx2<kSource, kTarget>;
    } else if constexpr (L == Level::avx2_streaming) {
        return run_streaming<kSource, kTarget>;
#endif
    } else {
        return run_baseline<kSource, kTarget>;
    }
}

template <Level L, std::size_t Source, std::size_t... Targets>
constexpr Row make_row(std::index_sequence<Targets...> /*targets*/) {
    return {pick<L, Source, Targets>()...};
}

template <Level L, std::size_t... Sources>
constexpr Table make_table(std::index_sequence<Sources...> all) {
    return {make_row<L, Sources>(all)...};
}

constexpr auto kAll = std::make_index_sequence<kKernelDTypes>();
constexpr Table kBaseline = make_table<Level::baseline>(kAll);
constexpr Table kAvx2 = make_table<Level::avx2>(kAll);
constexpr Table kAvx2Streaming = make_table<Level::avx2_streaming>(kAll);

}  // namespace

Kernel kernel(DType source, DType target, Level level) {
    const Table& table = level == Level::avx2 ? kAvx2 : level == Level::avx2_streaming ? kAvx2Streaming : kBaseline;
    return table[static_cast<std::size_t>(source)][static_cast<std::size_t>(target)];
}

}  // namespace lite_ext::cast::cpu
