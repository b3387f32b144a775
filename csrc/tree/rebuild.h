// Leaves become containers again: a loop over the nodes in post-order.
#pragma once

#include "flat.h"

namespace lite_ext::tree {

// Returns the new tree. `leaves` holds the converted leaves in the order of flat.leaves. An error names the
// path of the container, and all that was made is dropped.
Ref rebuild(Flat& flat, const std::vector<Ref>& leaves);

}  // namespace lite_ext::tree
