#include "autocast.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>

namespace lite_ext::autocast {

namespace {

constexpr unsigned kByte = 8;

// device | dtype | enabled | cache enabled, a byte each.
Saved pack(c10::DeviceType device, c10::ScalarType dtype, bool enabled, bool cache) {
    return static_cast<Saved>(static_cast<std::uint8_t>(device)) |
           static_cast<Saved>(static_cast<std::uint8_t>(dtype)) << kByte | static_cast<Saved>(enabled) << (2 * kByte) |
           static_cast<Saved>(cache) << (3 * kByte);
}

std::uint8_t byte(Saved saved, unsigned index) { return static_cast<std::uint8_t>(saved >> (index * kByte)); }

}  // namespace

bool mode_watches() { return at::impl::torch_function_mode_enabled(); }

Saved enter(c10::DeviceType device, c10::ScalarType dtype) {
    const Saved saved = pack(device, at::autocast::get_autocast_dtype(device),
                             at::autocast::is_autocast_enabled(device), at::autocast::is_autocast_cache_enabled());
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::increment_nesting();
    return saved;
}

void leave(Saved saved) {
    const auto device = static_cast<c10::DeviceType>(byte(saved, 0));
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device, byte(saved, 2) != 0);
    at::autocast::set_autocast_dtype(device, static_cast<c10::ScalarType>(byte(saved, 1)));
    at::autocast::set_autocast_cache_enabled(byte(saved, 3) != 0);
}

}  // namespace lite_ext::autocast
