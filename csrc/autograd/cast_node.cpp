#include "cast_node.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace lite_ext::autograd {

namespace {

using CastBackward = torch::autograd::generated::ToCopyBackward0;

// How torch holds a node: c10::intrusive_ptr in newer releases, std::shared_ptr with its own deleter before.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class Pointer>
Pointer make_node(CastBackward*& made) {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
        // The deleter is found by its argument when this is instantiated: newer releases have none.
        std::shared_ptr<CastBackward> node(new CastBackward(), [](auto* dead) { deleteNode(dead); });
        made = node.get();
        return node;
    } else {
        auto node = c10::make_intrusive<CastBackward>();
        made = node.get();
        return node;
    }
}

}  // namespace

bool needs_node(const at::Tensor& source) { return source.requires_grad() && at::GradMode::is_enabled(); }

void attach_node(const at::Tensor& source, const at::Tensor& output) {
    CastBackward* node = nullptr;
    const NodePtr owner = make_node<NodePtr>(node);
    node->set_next_edges(torch::autograd::collect_next_edges(source));
    node->self_options = source.options();
    torch::autograd::set_history(output, owner);
}

}  // namespace lite_ext::autograd
