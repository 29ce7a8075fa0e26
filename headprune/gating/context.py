"""``gated``: a context manager that multiplies every head's output, at the output projection's
input.

Multiplying there equals multiplying the head's attention probabilities and works with every
attention kernel.

For as long as the block lasts, the projection's class is a subclass of its own that multiplies its
input before anything else happens. Forward hooks would be simpler, but ``torch.compile`` ignores
hooks that are added after a model was compiled and run; it does check classes, so the gates take
effect there too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.layout import GATES_ATTRIBUTE, STATE_ATTRIBUTE, HeadState
from headprune.core.mixin import remade
from headprune.core.plan import PruningPlan
from headprune.model.exposed import exposed
from headprune.model.fingerprint import check_plan
from headprune.model.refusals import check_unshared
from headprune.model.running import device_of
from headprune.model.sites import BoundSite, bind
from headprune.model.transfers import sent

Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"
Gates: TypeAlias = "PruningPlan | HeadMask | Mapping[str, Array] | Array"


@contextmanager
def gated(
    model: nn.Module, gates: Gates, sites: Iterable[AttentionSite] | None = None
) -> Iterator[nn.Module]:
    """Runs ``model`` with a gate on every head; leaves no trace behind, also after an exception.
    Nests: gates multiply.

    Args:
        model: Any model with sites.
        gates: A plan or a mask (kept heads 1, others 0); or a mapping from site name to a tensor
            ``[heads]`` or, one row an example, ``[batch, heads]`` (``[batch, tokens, heads]`` gates
            every token); or one tensor ``[layers, heads]`` for all sites in model order. Heads are
            the present ones, in order. Sites that a mapping leaves out are not gated. NumPy arrays
            and booleans are taken, too.
        sites: Where; default ``find_sites(model)``.

    Gates are differentiable: the gradient at gates of 1 is the head's first-order importance. With
    gradient checkpointing, run the backward pass inside the block too, because it runs the forward
    again. A copy of the model that is made inside has no gates.

    Raises:
        InvalidValue: a tensor of a wrong shape.
        UnknownName: a name that is no site.
        PlanMismatch: a plan for a model of another structure.
        UnsupportedModel: an output projection that is also somewhere else.

    >>> import torch
    >>> from headprune import MultiHeadAttention
    >>> x, attention = torch.randn(1, 3, 8), MultiHeadAttention(8, 2)
    >>> off = torch.zeros(1, 2, requires_grad=True)
    >>> with gated(attention, off):
    ...     attention(x, x, x).sum().backward()
    >>> off.grad.shape
    torch.Size([1, 2])
    """
    with installed(model, gate_tensors(model, gates, bind(model, sites))):
        yield model


@contextmanager
def installed(
    model: nn.Module, gates: list[tuple[BoundSite, Tensor]]
) -> Iterator[list[Callable[[Tensor], None]]]:
    """Puts a gate on every given site that has heads, for the length of the block.

    Yields:
        For every such site, in order, what puts another gate of its shape in the place of the
        present one.
    """
    with ExitStack() as stack:
        wanted = [(site, gate) for site, gate in gates if site.site.heads]
        check_unshared(model, ((site, site.layout.gate) for site, _ in wanted))
        stack.enter_context(exposed(site for site, _ in wanted))
        puts: list[Callable[[Tensor], None]] = []
        for site, gate in wanted:
            kind = _Gated if site.layout.gate else _GatedOutput
            put = stack.enter_context(_gated(site.gate, kind, spread(gate, site)))
            puts.append(partial(_put_spread, put, site))
        yield puts


def _put_spread(put: Callable[[Tensor], None], site: BoundSite, gate: Tensor) -> None:
    put(spread(gate, site))


def gate_tensors(
    model: nn.Module, gates: Gates, bound: list[BoundSite]
) -> list[tuple[BoundSite, Tensor]]:
    """Any accepted form of gates as one tensor ``[..., present heads]`` a site, checked."""
    if isinstance(gates, (PruningPlan, HeadMask)):
        for note in check_plan(model, [b.site for b in bound], gates):
            warnings.warn(note, UserWarning, stacklevel=4)
        mask = gates.mask if isinstance(gates, PruningPlan) else gates
        return [(b, _from_mask(b, mask)) for b in bound]
    if isinstance(gates, (Tensor, np.ndarray)):
        return _from_table(_as_tensor(gates), bound)
    if isinstance(gates, Mapping):
        by_name = {b.site.name: b for b in bound}
        for name in gates:
            if name not in by_name:
                raise UnknownName(
                    "gates", "keyed by site names", repr(name), did_you_mean(str(name), by_name)
                )
        return [(by_name[name], _checked(gate, by_name[name])) for name, gate in gates.items()]
    must = (
        "a plan, a mask, a mapping from site name to tensor, or a tensor or array [layers, heads]"
    )
    raise InvalidValue("gates", must, type(gates).__name__)


def _as_tensor(gates: Any) -> Any:
    """A NumPy array as a tensor, booleans as 0 and 1; anything else as it is."""
    if isinstance(gates, np.ndarray):
        gates = torch.tensor(gates)
    boolean = isinstance(gates, Tensor) and gates.dtype == torch.bool
    return gates.float() if boolean else gates


def _from_mask(bound: BoundSite, mask: HeadMask) -> Tensor:
    kept = mask.kept(bound.site.name)
    device = device_of(bound.module)
    known = (
        None if device.type == "meta" else device
    )  # a module around it may fetch its weights: then gates follow
    gates = [float(h in kept) for h in bound.site.heads]
    return sent(gates, known or torch.device("cpu"), torch.float32)


def _from_table(table: Tensor, bound: list[BoundSite]) -> list[tuple[BoundSite, Tensor]]:
    counts = [len(b.site.heads) for b in bound]
    if len(set(counts)) != 1:
        hint = "Give a mapping from site name to a tensor [heads]."
        raise InvalidValue(
            "gates", "a mapping, because the layers have different head counts", str(counts), hint
        )
    if tuple(table.shape) != (len(bound), counts[0]):
        must = f"of shape [layers, heads] = [{len(bound)}, {counts[0]}]"
        raise InvalidValue("gates", must, list(table.shape))
    return [(b, _checked(row, b)) for b, row in zip(bound, table, strict=True)]


def _checked(gate: Any, bound: BoundSite) -> Tensor:
    n_heads = len(bound.site.heads)
    must = f"a floating-point tensor [{n_heads}], [batch, {n_heads}] or [batch, tokens, {n_heads}]"
    where = f"gates[{bound.site.name!r}]"
    gate = _as_tensor(gate)
    if not isinstance(gate, Tensor):
        raise InvalidValue(where, must, type(gate).__name__)
    if not gate.is_floating_point():
        raise InvalidValue(where, must, gate.dtype)
    if gate.ndim not in (1, 2, 3) or gate.shape[-1] != n_heads:
        raise InvalidValue(where, must, f"shape {list(gate.shape)}")
    return gate


def spread(gate: Tensor, bound: BoundSite) -> Tensor:
    """The gate in the shape in which it multiplies ``[batch, tokens, heads, width]`` (or its
    sequence-first twin)."""
    if gate.ndim == 2:
        gate = gate.unsqueeze(1)
    if bound.layout.batch_axis == 1 and gate.ndim == 3:
        gate = gate.transpose(0, 1)
    if (
        bound.layout.windows and gate.ndim == 3
    ):  # one dimension more: examples x tokens of all windows x 1
        gate = gate.unsqueeze(2)
    return gate.unsqueeze(-1)


def multiplied(x: Tensor, gates: Iterable[Tensor]) -> Tensor:
    """``x``, ``[..., heads * width]``, with every head multiplied by its gates."""
    for gate in gates:
        heads = x.unflatten(-1, (gate.shape[-2], -1))
        if gate.ndim > heads.ndim:  # windows of an example lie on the batch axis, one after another
            examples, tokens = gate.shape[0], heads.shape[0] * heads.shape[1] // gate.shape[0]
            if heads.shape[0] % examples or gate.shape[1] not in (1, tokens):
                must = (
                    f"for the {heads.shape[0]} windows of {heads.shape[1]} tokens that the model"
                    " runs on"
                )
                raise InvalidValue(
                    "gates", must, f"gates of {examples} examples x {gate.shape[1]} tokens"
                )
            heads = heads.unflatten(0, (examples, -1))
            if gate.shape[1] != 1:
                gate = gate.flatten(1, 2).unflatten(1, heads.shape[1:3])
        rows, given = heads.shape[:-2], gate.shape[:-2]
        # Checked by hand: broadcasting would let a gate an example fit another axis by chance.
        if given and (
            len(given) != len(rows)
            or any(g not in (1, n) for g, n in zip(given, rows, strict=True))
        ):
            must = f"for the {' x '.join(map(str, rows))} rows that the model runs on"
            raise InvalidValue("gates", must, f"gates of shape {list(gate.shape[:-1])}")
        # A gradient of a gate is a long sum: where it is asked for, products and sum are as wide as
        # the gate.
        asked = gate.requires_grad and torch.is_grad_enabled()
        kind = torch.promote_types(heads.dtype, gate.dtype) if asked else heads.dtype
        x = (heads.to(kind) * gate.to(heads.device, kind)).to(x.dtype).view(x.shape)
    return x


class _Gated(nn.Module):
    """Mixed into a projection's class: multiplies the heads in its input, then calls it as it
    was."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(multiplied(x, getattr(self, GATES_ATTRIBUTE)), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Gates belong to the block: a copy or a pickle made inside would carry them out of it for
        # ever.
        state = {k: v for k, v in self.__dict__.items() if k != GATES_ATTRIBUTE}
        return remade(ungated_class(type(self)), state)


class _GatedOutput(_Gated):
    """Mixed into an attention without an output projection: multiplies the heads in what it
    returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super(_Gated, self).__call__(*args, **kwargs)
        return multiplied_output(
            out, getattr(self, GATES_ATTRIBUTE), getattr(self, STATE_ATTRIBUTE, None)
        )


def multiplied_output(out: Any, gates: Iterable[Tensor], state: HeadState | None) -> Any:
    """What an attention without an output projection returns, with every head multiplied by its
    gates."""
    gates = [for_all_heads(gate, state) for gate in gates]
    return (
        multiplied(out, gates) if isinstance(out, Tensor) else (multiplied(out[0], gates), *out[1:])
    )


def for_all_heads(gate: Tensor, state: HeadState | None) -> Tensor:
    """Gates ``[..., heads, 1]`` for the width that such an attention keeps: one, times zeros, where
    heads have left."""
    if state is None:
        return gate
    every = gate.new_ones(*gate.shape[:-2], state.n_query_heads, gate.shape[-1])
    return every.index_copy(-2, sent(state.heads, gate.device), gate)


def ungated_class(kind: type) -> type:
    """The class that a module had before gates, or what draws them, were put in front of it."""
    while "headprune_ungated" in kind.__dict__:
        kind = kind.__dict__["headprune_ungated"]
    return kind


@cache
def gated_class(kind: type[nn.Module], original: type) -> type[Any]:
    """A module's class with ``kind`` in front of it; ``ungated_class`` is the way back."""
    body = {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "headprune_ungated": original,
    }
    return type(original.__name__, (kind, original), body)


@contextmanager
def _gated(
    projection: nn.Module, kind: type[_Gated], gate: Tensor
) -> Iterator[Callable[[Tensor], None]]:
    """Yields what puts another gate in the place of this one."""
    before, own = type(projection), [gate]
    outer: tuple[Tensor, ...] = getattr(projection, GATES_ATTRIBUTE, ())
    if not outer:
        projection.__class__ = gated_class(kind, before)  # type: ignore[arg-type]
    projection.__dict__[GATES_ATTRIBUTE] = (*outer, gate)

    def put(other: Tensor) -> None:
        now = projection.__dict__[GATES_ATTRIBUTE]
        projection.__dict__[GATES_ATTRIBUTE] = tuple(other if g is own[0] else g for g in now)
        own[0] = other

    try:
        yield put
    finally:
        # By identity, not by position: blocks that overlap may be left in any order.
        left = tuple(g for g in projection.__dict__[GATES_ATTRIBUTE] if g is not own[0])
        if left:
            projection.__dict__[GATES_ATTRIBUTE] = left
        else:
            del projection.__dict__[GATES_ATTRIBUTE]
            projection.__class__ = type(projection).headprune_ungated  # type: ignore[attr-defined]
