"""Outputs of a low-precision PyTorch model in the dtype you chose, converted in one call.

``setup_module(model, "bf16-mixed")`` wraps a model; ``convert(tree, dtype)`` converts any nest of tensors.
"""

from lite_ext._interpreter import refuse_within_another

refuse_within_another()

import torch  # noqa: E402, F401  # its libraries must be loaded before ours

from lite_ext._build import build_info  # noqa: E402
from lite_ext.convert import cast_tensors, convert, register_node  # noqa: E402
from lite_ext.pool import empty_pool, pool_stats, set_pool_limit  # noqa: E402
from lite_ext.precision import Precision, precision  # noqa: E402
from lite_ext.wrapper import LiteModule, setup_module  # noqa: E402

__version__: str = build_info()["version"]

__all__ = [
    "LiteModule",
    "Precision",
    "__version__",
    "build_info",
    "cast_tensors",
    "convert",
    "empty_pool",
    "pool_stats",
    "precision",
    "register_node",
    "set_pool_limit",
    "setup_module",
]
