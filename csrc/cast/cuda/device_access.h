// How the tile reaches the memory of a CUDA device, and the instructions it converts with. Compiled for the host too,
// where CUDA's headers compute what the instructions do: tests run it there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "../tile.h"

namespace lite_ext::cast::cuda {

// Agrees with convert_element in all but the bits of NaN.
struct DeviceAccess {
    // Evicted first from the caches: a source is read once.
    template <class Value>
    LITE_EXT_HOST_DEVICE static Value load(const Value* from) {
#ifdef __CUDA_ARCH__
        return std::bit_cast<Value>(__ldcs(reinterpret_cast<const Word<sizeof(Value)>*>(from)));
#else
        return *from;
#endif
    }

    // An ordinary store, for a result is read next; written out, because compilers cut some vectors into elements.
    template <class Value>
    LITE_EXT_HOST_DEVICE static void store(Value* to, const Value& value) {
#ifdef __CUDA_ARCH__
        const auto whole = std::bit_cast<Word<sizeof(Value)>>(value);
        if constexpr (sizeof(Value) == 16) {
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(whole.x),
                         "r"(whole.y), "r"(whole.z), "r"(whole.w));
        } else if constexpr (sizeof(Value) == 8) {
            asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(whole.x),
                         "r"(whole.y));
        } else if constexpr (sizeof(Value) == 4) {
            asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(whole));
        } else {
            *to = value;
        }
#else
        *to = value;
#endif
    }

    template <DType Source, DType Target, std::uint32_t Count>
    LITE_EXT_HOST_DEVICE static Vector<storage_t<Target>, Count> convert(const Vector<storage_t<Source>, Count>& from) {
        Vector<storage_t<Target>, Count> to;
        if constexpr (Target == DType::float64) {
            LITE_EXT_UNROLL
            for (std::uint32_t i = 0; i < Count; ++i) to.items[i] = static_cast<double>(widen<Source>(from.items[i]));
        } else if constexpr (Target == DType::float32) {
            LITE_EXT_UNROLL
            for (std::uint32_t i = 0; i < Count; ++i) to.items[i] = widen<Source>(from.items[i]);
        } else if constexpr (Count == 1) {
            to.items[0] = narrow<Target>(widen<Source>(from.items[0]), 0.0F).items[0];
        } else {
            LITE_EXT_UNROLL
            for (std::uint32_t i = 0; i < Count; i += 2) {
                const auto pair = narrow<Target>(widen<Source>(from.items[i]), widen<Source>(from.items[i + 1]));
                to.items[i] = pair.items[0];
                to.items[i + 1] = pair.items[1];
            }
        }
        return to;
    }

   private:
    // What one instruction moves.
    template <std::size_t Bytes>
    using Word =
        std::tuple_element_t<std::countr_zero(Bytes) - 1, std::tuple<unsigned short, unsigned int, uint2, uint4>>;

    template <DType Source>
    LITE_EXT_HOST_DEVICE static float widen(storage_t<Source> value) {
        if constexpr (Source == DType::float16) {
            return __half2float(__ushort_as_half(value));
        } else if constexpr (Source == DType::bfloat16) {
            return bits::bfloat16_to_float(value);
        } else {
            return static_cast<float>(value);
        }
    }

    // Two at once, which is one instruction from compute capability 8.0 on.
    template <DType Target>
    LITE_EXT_HOST_DEVICE static Vector<std::uint16_t, 2> narrow(float first, float second) {
        if constexpr (Target == DType::float16) {
            const __half2 both = __floats2half2_rn(first, second);
            return {{__half_as_ushort(__low2half(both)), __half_as_ushort(__high2half(both))}};
        } else {
            const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
            return {{__bfloat16_as_ushort(__low2bfloat16(both)), __bfloat16_as_ushort(__high2bfloat16(both))}};
        }
    }
};

}  // namespace lite_ext::cast::cuda
