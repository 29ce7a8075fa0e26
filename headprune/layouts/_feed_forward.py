"""What all layouts of feed-forwards share: units are neurons, each one row up and one column down.

A neuron is a head of width 1. The gate multiplies the input of the projection down, so everything
that works on heads works on neurons. The layouts describe library code whose activation treats
every neuron by itself; other code is compared under masks when it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import Mixin, mix_in


def feed_forward(
    name: str,
    down: str,
    up: Mapping[str, str | tuple[str, ...]],
    *,
    optional: tuple[str, ...] = (),
    head_dim: int | Callable[[Any], int] = 1,
    **fields: Any,
) -> AttentionLayout:
    """Return the layout of a feed-forward, or of a layer that holds its projections itself.

    Args:
        name: The layout's name.
        down: Path of the projection whose input is the neurons.
        up: By path of a projection whose output is the neurons, its units: ``head`` for one row per
            neuron, ``("head", "head")`` for a fused pair of gate and value.
        optional: Those of them that a module may lack.
        head_dim: Width of a neuron, 1; or a function that first refuses modules by raising.
        fields: Others of ``AttentionLayout``.
    """
    slabs = [HeadSlab(path, "out", unit, optional=path in optional) for path, unit in up.items()]
    return AttentionLayout(
        name=name,
        gate=down,
        slabs=(*slabs, HeadSlab(down, "in", "context")),
        head_dim=head_dim,
        kind="feed_forward",
        empty=WithoutNeurons(down),
        **fields,
    )


# A class and not a closure: sites carry their layouts, and are copied, compared and pickled.
@dataclass(frozen=True)
class WithoutNeurons:
    """Turn a feed-forward without neurons into one that adds a bias.

    Linear layers do so by themselves; only Transformers' ``Conv1D`` cannot run without inputs.

    Args:
        down: Path of the projection down.
    """

    down: str

    def __call__(self, module: Any) -> None:
        projection = module.get_submodule(self.down)
        from headprune.attention.linear import is_conv1d  # loads torch

        if is_conv1d(projection):
            mix_in(projection, BiasAlone)


class BiasAlone(Mixin):
    """Put in front of a Conv1D without inputs: return its bias for every token."""

    bias: Any

    def forward(self, x: Any) -> Any:
        return self.bias.expand(*x.shape[:-1], -1)
