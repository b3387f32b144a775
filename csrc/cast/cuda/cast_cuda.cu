#include "cast_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "../tile.h"
#include "launch_args.h"

namespace lite_ext::cast::cuda {

namespace {

// Loads that do not displace what the caches hold, for a source is read once; plain stores, for the result is read
// next. The instructions that convert agree with convert_element in all but the bits of NaN.
struct DeviceAccess : PlainAccess {
#ifdef __CUDA_ARCH__
    template <class Value>
    __host__ __device__ static Value load(const Value* from) {
        if constexpr (sizeof(Value) == 2) {
            return std::bit_cast<Value>(__ldcs(reinterpret_cast<const unsigned short*>(from)));
        } else if constexpr (sizeof(Value) == 4) {
            return std::bit_cast<Value>(__ldcs(reinterpret_cast<const unsigned int*>(from)));
        } else if constexpr (sizeof(Value) == 8) {
            return std::bit_cast<Value>(__ldcs(reinterpret_cast<const uint2*>(from)));
        } else {
            static_assert(sizeof(Value) == 16);
            return std::bit_cast<Value>(__ldcs(reinterpret_cast<const uint4*>(from)));
        }
    }

    template <class Value>
    __host__ __device__ static void store(Value* to, const Value& value) {
        if constexpr (sizeof(Value) == 16) {
            *reinterpret_cast<uint4*>(to) = std::bit_cast<uint4>(value);
        } else if constexpr (sizeof(Value) == 8) {
            *reinterpret_cast<uint2*>(to) = std::bit_cast<uint2>(value);
        } else {
            *to = value;
        }
    }

    template <DType Source>
    __host__ __device__ static float widen(storage_t<Source> value) {
        if constexpr (Source == DType::float16) {
            return __half2float(__ushort_as_half(value));
        } else if constexpr (Source == DType::bfloat16) {
            return bits::bfloat16_to_float(value);
        } else {
            return static_cast<float>(value);
        }
    }

    template <DType Source, DType Target, std::uint32_t Count>
    __host__ __device__ static Vector<storage_t<Target>, Count> convert(const Vector<storage_t<Source>, Count>& from) {
        Vector<storage_t<Target>, Count> to;
        if constexpr (Target == DType::float64 || Target == DType::float32) {
            LITE_EXT_UNROLL
            for (std::uint32_t i = 0; i < Count; ++i) to.items[i] = widen<Source>(from.items[i]);
        } else if constexpr (Count == 1) {
            const float value = widen<Source>(from.items[0]);
            to.items[0] = Target == DType::float16 ? __half_as_ushort(__float2half_rn(value))
                                                   : __bfloat16_as_ushort(__float2bfloat16_rn(value));
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
    template <DType Target>
    __host__ __device__ static Vector<std::uint16_t, 2> narrow(float first, float second) {
        if constexpr (Target == DType::float16) {
            const __half2 both = __floats2half2_rn(first, second);
            return {{ __half_as_ushort(__low2half(both)), __half_as_ushort(__high2half(both)) }};
        } else {
            const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
            return {{ __bfloat16_as_ushort(__low2bfloat16(both)), __bfloat16_as_ushort(__high2bfloat16(both)) }};
        }
    }
#endif
};

// 40 registers a thread: six blocks, 1,536 threads, share the registers of one multiprocessor.
#if CUDART_VERSION >= 12040
#define LITE_EXT_BOUNDS __maxnreg__(40)
#else
#define LITE_EXT_BOUNDS __launch_bounds__(kThreads)
#endif

template <std::uint32_t Capacity>
__global__ void LITE_EXT_BOUNDS cast_kernel(const __grid_constant__ LaunchArgs<Capacity> args) {
    run_block<DeviceAccess>(args, blockIdx.x, threadIdx.x);
}

template <std::uint32_t Capacity>
cudaError_t launch(std::span<const plan::CastLeaf> leaves, const plan::TilePlan& plan, const plan::Launch& launch,
                   cudaStream_t stream) {
    LaunchArgs<Capacity> args;  // places beyond the leaves are never read, and stay as they are
    pack(leaves, std::span(plan.slots).subspan(launch.first_slot, launch.slots), args);
    // The arguments are copied before this returns, under graph capture too.
    std::array<void*, 1> parameters{&args};
    return cudaLaunchKernel(reinterpret_cast<const void*>(cast_kernel<Capacity>), dim3(launch.tiles), dim3(kThreads),
                            parameters.data(), 0, stream);
}

bool ask_for_large_arguments(int device) {
#if CUDART_VERSION >= 12010
    constexpr int kSince = 12010;
    int driver = 0;
    int runtime = 0;
    int major = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= kSince &&
           cudaRuntimeGetVersion(&runtime) == cudaSuccess && runtime >= kSince &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 7;
#else
    static_cast<void>(device);
    return false;
#endif
}

constexpr std::size_t kKnownDevices = 128;  // as many as torch's device index can name

}  // namespace

bool takes_large_arguments(int device) {
    struct Answer {
        std::once_flag asked;
        bool yes = false;
    };
    static std::array<Answer, kKnownDevices> answers;
    Answer& answer = answers.at(static_cast<std::size_t>(device));
    std::call_once(answer.asked, [&] { answer.yes = ask_for_large_arguments(device); });
    return answer.yes;
}

cudaError_t enqueue(std::span<const plan::CastLeaf> leaves, int device, cudaStream_t stream) {
    // Few leaves need not know what the device takes.
    const plan::TilePlan plan =
        plan::plan_tiles(leaves, limits(leaves.size() > kMedium && takes_large_arguments(device)));
    for (const plan::Launch& next : plan.launches) {
        cudaError_t error = cudaSuccess;
        switch (next.capacity) {
            case kSmall:
                error = launch<kSmall>(leaves, plan, next, stream);
                break;
            case kMedium:
                error = launch<kMedium>(leaves, plan, next, stream);
                break;
            default:
                error = launch<kLarge>(leaves, plan, next, stream);
        }
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace lite_ext::cast::cuda
