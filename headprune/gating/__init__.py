"""Gates on heads: a multiplier on every head of a model inside a ``with`` block.

``hp.gated`` sets given gates. ``hp.learned_gates`` trains them; ``HardConcrete`` and ``SubsetTopk``
are their distributions.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "GateDistribution": "headprune.gating.stochastic",
    "HardConcrete": "headprune.gating.stochastic",
    "LearnedGates": "headprune.gating.learned",
    "SubsetTopk": "headprune.gating.stochastic",
}

__all__ = ["GateDistribution", "HardConcrete", "LearnedGates", "SubsetTopk"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headprune.gating' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from headprune.gating.learned import LearnedGates
    from headprune.gating.stochastic import GateDistribution, HardConcrete, SubsetTopk
