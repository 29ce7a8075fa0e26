"""What all layouts of feed-forwards share: units are neurons, each one row up and one column down.

A neuron is a head of width 1. The gate multiplies the input of the projection down, so everything
that works on heads works on neurons. The layouts describe library code; other code is compared
under masks when it is cut. Activations are run: each must treat every neuron by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.mixin import Mixin, mix_in

#: What a feed-forward must be, for errors.
ELEMENTWISE = "a feed-forward whose activation treats every neuron by itself"


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
        n_neurons = getattr(down, "in_features", getattr(down, "nx", 0))
        for activation in self._activations(module):
            check_elementwise(type(module).__name__, activation, n_neurons)
        return 1

    def _activations(self, module: Any) -> Iterator[Any]:
        """Parts without parameters, but for dropout: activations, and what consists of them."""
        from torch.nn import Dropout, Identity

        paths_apart = tuple(f"{path}." for path in self.others)
        for path, part in module.named_modules():
            if not path or f"{path}.".startswith(paths_apart):
                continue
            weight = next(chain(part.parameters(), part.buffers()), None)
            if weight is None and type(part) not in (Dropout, Identity):
                yield part


def check_elementwise(where: str, activation: Any, n_neurons: int, device: str = "cpu") -> None:
    """Refuse an activation whose output for a neuron depends on other neurons.

    It is run on a row of neurons and on some of them. What cannot run on a row, or returns
    something of another shape, is no activation, and passes.

    Args:
        where: For the error.
        activation: A module or a function, perhaps the user's own; a copy of it is run.
        n_neurons: Neurons that it is called with, on the last axis.
        device: Where its parameters are, if it has any.

    Raises:
        UnsupportedModel: outputs depend on other neurons.
    """
    import torch

    run = activation
    try:
        row, kept = _probe(n_neurons, device)
        if isinstance(activation, torch.nn.Module):
            activation = _without_hooks(activation)
            run = activation.forward
            # A learned activation runs in the type of its parameters.
            dtype = next((p.dtype for p in activation.parameters()), row.dtype)
            row = row.to(dtype)
        with torch.no_grad():
            whole = run(row.clone())  # it may work in place
    # Code that is not meant for this may raise anything.
    except Exception:
        return
    if type(whole) is not torch.Tensor or whole.shape != row.shape:
        return
    # Vectorised and scalar kernels round differently: a few steps of the type are allowed.
    n_steps = 4 if row.dtype.itemsize == 2 else 64
    error = n_steps * torch.finfo(row.dtype).eps
    try:
        with torch.no_grad():
            part = run(row[kept])
            alone = torch.allclose(whole[kept], part, error, error, equal_nan=True)
    # A part of the neurons alone is too few for it.
    except Exception:
        alone = False
    if not alone:
        raise UnsupportedModel(where, ELEMENTWISE, repr(activation))


def _probe(n_neurons: int, device: str) -> tuple[Any, Any]:
    """A row of test values, and the places of the neurons that are also run alone.

    Small values are chosen more often, so their mean differs from that of the row: an activation
    that normalises over neurons shows.
    """
    import torch

    places = torch.arange(n_neurons, dtype=torch.float32, device=device)
    # Fractional parts of multiples: scattered over [0, 1), the same in every call.
    scattered = (places * 0.618) % 1
    # Multiples of another number, so that the choice does not follow the values alone.
    is_kept = (places * 0.414) % 1 + 0.5 * scattered < 0.75
    return 5 * scattered - 2, is_kept.nonzero().flatten()


def _without_hooks(activation: Any) -> Any:
    """A copy in evaluation mode that runs no hooks, which may be the user's."""
    activation = copy.deepcopy(activation).eval()
    for part in activation.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return activation


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
