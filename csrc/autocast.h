// Enters and leaves autocast with the very state changes of torch.autocast, without its Python.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace lite_ext::autocast {

// What to go back to, in one integer: it crosses into Python and back on every forward.
using Saved = std::uint64_t;

// Whether a __torch_function__ mode is active: the export of programs wants torch.autocast to tell it of both ends.
bool mode_watches();

// As torch.autocast(device, dtype).__enter__(): the cache keeps the setting it has.
Saved enter(c10::DeviceType device, c10::ScalarType dtype);

// As its __exit__(): leaving the outermost level drops the cached casts.
void leave(Saved saved);

}  // namespace lite_ext::autocast
