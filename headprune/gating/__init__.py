"""Gates on heads: a multiplier on every head of a model inside a ``with`` block.

``hp.gated`` sets given gates. ``hp.learned_gates`` trains them; ``HardConcrete`` and ``SubsetTopk``
are their distributions.
"""

from typing import TYPE_CHECKING

from headprune.core.lazy import lazy

_HOME = {
    "GateDistribution": "headprune.gating.stochastic",
    "HardConcrete": "headprune.gating.stochastic",
    "LearnedGates": "headprune.gating.learned",
    "SubsetTopk": "headprune.gating.stochastic",
}

__all__ = ["GateDistribution", "HardConcrete", "LearnedGates", "SubsetTopk"]
__getattr__, __dir__ = lazy(__name__, _HOME)

if TYPE_CHECKING:
    from headprune.gating.learned import LearnedGates
    from headprune.gating.stochastic import GateDistribution, HardConcrete, SubsetTopk
