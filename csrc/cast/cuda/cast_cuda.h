// Launches the cast on a CUDA device. Knows the CUDA runtime and nothing of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "../../plan/tiles.h"

namespace lite_ext::cast::cuda {

// Whether `device` takes launches of more than 4,096 bytes of arguments. The device is asked once.
bool takes_large_arguments(int device);

// Enqueues the conversion of all leaves on `stream`: one launch for up to 1,150 leaves with elements (146
// where large arguments are not taken), none where there are none. `device` is the current one, of the leaves
// and of the stream. Nothing is allocated on the device, copied to it or waited for. Returns the first error;
// what is enqueued stays so.
cudaError_t enqueue(std::span<const plan::CastLeaf> leaves, int device, cudaStream_t stream);

}  // namespace lite_ext::cast::cuda
