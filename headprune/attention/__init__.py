"""Our own multi-head attention with a gate on every head, and functions that cut projections.

Every name loads when it is first used; importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.core.lazy import lazy

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

__getattr__, __dir__ = lazy(__name__, _HOME)

if TYPE_CHECKING:
    from headprune.attention.cache import KVCache
    from headprune.attention.compatibility import Additive, Compatibility, ScaledDotProduct
    from headprune.attention.linear import cut_features, feature_count, replace_features_
    from headprune.attention.multi_head import MultiHeadAttention
