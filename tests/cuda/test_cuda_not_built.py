"""CUDA tensors where lite_ext was built for the CPU alone."""

from __future__ import annotations

import warnings

import torch
from compare import fingerprint
from devices import NEEDS_A_BUILD_WITHOUT

import lite_ext

pytestmark = NEEDS_A_BUILD_WITHOUT


def test_results_are_right_and_one_warning_says_how_to_rebuild() -> None:
    tree = [torch.randn(5, device="cuda").to(torch.bfloat16)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            result = lite_ext.convert(tree, torch.float32)[0]
            assert fingerprint(result) == fingerprint(tree[0].to(torch.float32))
    ours = [str(one.message) for one in caught if "built without CUDA" in str(one.message)]
    assert len(ours) == 1
    assert "--no-build-isolation" in ours[0]
