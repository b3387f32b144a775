#include "cast_cuda.h"

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "../tile.h"
#include "device_access.h"
#include "launch_args.h"

namespace lite_ext::cast::cuda {

namespace {

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
