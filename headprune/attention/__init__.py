"""Our own multi-head attention with a gate on every head, and functions that cut projections.

Every name loads when it is first used; importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Additive": "headprune.attention.compatibility",
    "Compatibility": "headprune.attention.compatibility",
    "KVCache": "headprune.attention.cache",
    "MultiHeadAttention": "headprune.attention.multi_head",
    "ScaledDotProduct": "headprune.attention.compatibility",
    "cut_features": "headprune.attention.linear",
    "feature_count": "headprune.attention.linear",
    "replace_features_": "headprune.attention.linear",
}

__all__ = [
    "Additive",
    "Compatibility",
    "KVCache",
    "MultiHeadAttention",
    "ScaledDotProduct",
    "cut_features",
    "feature_count",
    "replace_features_",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'headprune.attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from headprune.attention.cache import KVCache
    from headprune.attention.compatibility import Additive, Compatibility, ScaledDotProduct
    from headprune.attention.linear import cut_features, feature_count, replace_features_
    from headprune.attention.multi_head import MultiHeadAttention
