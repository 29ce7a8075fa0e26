"""What all layouts of feed-forwards share: units are neurons, each one row up and one column down.

A neuron is a head of width 1. The gate multiplies the input of the projection down, so everything
that works on heads works on neurons. The layouts describe library code; other code is compared
under masks when it is cut. Activations are run: each must treat every neuron by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import Mixin, mix_in


def feed_forward(
    name: str,
    down: str,
    up: Mapping[str, str | tuple[str, ...]],
    *,
    optional: tuple[str, ...] = (),
    untouched: tuple[str, ...] = (),
    check: Callable[[Any], None] | None = None,
    **fields: Any,
) -> AttentionLayout:
    """Return the layout of a feed-forward, or of a layer that holds its projections itself.

    Args:
        name: The layout's name.
        down: Path of the projection whose input is the neurons.
        up: By path of a projection whose output is the neurons, its units: ``head`` for one row per
            neuron, ``("head", "head")`` for a fused pair of gate and value.
        optional: Those of them that a module may lack.
        untouched: Paths of parts that have nothing to do with the neurons.
        check: Refuses modules by raising.
        fields: Others of ``AttentionLayout``.
    """
    slabs = [HeadSlab(path, "out", unit, optional=path in optional) for path, unit in up.items()]
    return AttentionLayout(
        name=name,
        gate=down,
        slabs=(*slabs, HeadSlab(down, "in", "context")),
        head_dim=NeuronWidth(down, (down, *up, *untouched), check),
        untouched=untouched,
        kind="feed_forward",
        empty=WithoutNeurons(down),
        **fields,
    )


# Classes and not closures: sites carry their layouts, and are copied, compared and pickled.
@dataclass(frozen=True)
class NeuronWidth:
    """Return the width of a neuron, 1, for feed-forwards whose activations treat each alone.

    Args:
        down: Path of the projection down.
        others: Paths of parts that are no activations.
        check: Refuses modules by raising.

    Raises:
        UnsupportedModel: an activation whose values depend on other neurons, as of a softmax.
    """

    down: str
    others: tuple[str, ...]
    check: Callable[[Any], None] | None = None

    def __call__(self, module: Any) -> int:
        if self.check is not None:
            self.check(module)
        from headprune.attention.linear import base_of  # loads torch

        down = base_of(module.get_submodule(self.down))
        for activation in self._activations(module):
            check_neurons_alone(type(module).__name__, activation, down)
        return 1

    def _activations(self, module: Any) -> Iterator[Any]:
        """Modules without parts and parameters: activations, dropout and the like."""
        beside = tuple(f"{path}." for path in self.others)
        for path, part in module.named_modules():
            has_more = [*part.children(), *part.parameters(), *part.buffers()]
            if path and not has_more and not f"{path}.".startswith(beside):
                yield part


def check_neurons_alone(where: str, activation: Any, down: Any) -> None:
    """Refuse an activation, which may be the user's own, that does not give some neurons the same.

    Args:
        where: For the error.
        activation: Called with the neurons on the last axis.
        down: The projection that reads the neurons.

    Raises:
        UnsupportedModel: their values depend on other neurons.
    """
    import torch

    weight = getattr(down, "weight", None)
    n = getattr(down, "in_features", getattr(down, "nx", 0))
    if not n or not isinstance(weight, torch.Tensor) or weight.is_meta:
        return
    kind = weight.dtype if weight.is_floating_point() else torch.float32
    # Values in no order, and a subset without a period whose mean is another one.
    places = torch.arange(n, device=weight.device)
    scattered = (places * 0.618) % 1
    row = (5 * scattered - 2).to(kind)
    kept = places[(places * 0.414) % 1 + 0.5 * scattered < 0.75]
    # Vectorised and scalar code round apart; types of 16 bits hide that.
    error = (4 if kind.itemsize == 2 else 64) * torch.finfo(kind).eps
    run = activation
    if isinstance(activation, torch.nn.Module):
        activation = copy.copy(activation)
        activation.training = False  # no dropout
        run = activation.forward  # no hooks
    try:
        with torch.no_grad():
            whole, part = run(row), run(row[kept])
            alone = whole.shape == row.shape and torch.allclose(whole[kept], part, error, error)
    # Code that knows its number of neurons may raise anything.
    except Exception:
        alone = False
    if not alone:
        must = "a feed-forward whose activation treats every neuron by itself"
        raise UnsupportedModel(where, must, repr(activation))


@dataclass(frozen=True)
class WithoutNeurons:
    """Turn a feed-forward without neurons into one that adds a bias.

    Linear layers do so by themselves; only Transformers' ``Conv1D`` cannot run without inputs.

    Args:
        down: Path of the projection down.
    """

    down: str

    def __call__(self, module: Any) -> None:
        from headprune.attention.linear import base_of, is_conv1d  # loads torch

        # An adapter around it runs without inputs: it consists of linear layers.
        projection = base_of(module.get_submodule(self.down))
        if is_conv1d(projection):
            mix_in(projection, BiasAlone)


class BiasAlone(Mixin):
    """Put in front of a Conv1D without inputs: return its bias for every token."""

    bias: Any

    def forward(self, x: Any) -> Any:
        return self.bias.expand(*x.shape[:-1], -1)
