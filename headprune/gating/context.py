"""``gated``: a context manager that multiplies every head's output by a gate.

The gate multiplies the output projection's input. That equals multiplying the head's attention
probabilities, and it works with every attention kernel.

Inside the block the projection's class is replaced by a subclass that first multiplies its input.
Forward hooks would be simpler, but ``torch.compile`` ignores hooks that are added after a model was
compiled and run. It does check classes, so the gates take effect there too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from headprune.model.contexts import first_input
from headprune.model.exposed import exposed
from headprune.model.fingerprint import check_plan
from headprune.model.refusals import check_unshared
from headprune.model.running import device_of
from headprune.model.sites import BoundSite, bind, sites_for
from headprune.model.transfers import sent

Array: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[float]"
Gates: TypeAlias = "PruningPlan | HeadMask | Mapping[str, Array] | Array | Sequence[Array]"


@contextmanager
def gated(
    model: nn.Module, gates: Gates, sites: Iterable[AttentionSite] | None = None
) -> Iterator[nn.Module]:
    """Run ``model`` with a gate on every head inside a ``with`` block.

    Nothing stays on the model afterwards, also after an exception. Blocks nest: gates multiply.
    Gates are differentiable: the gradient at gates of 1 is the head's first-order importance. With
    gradient checkpointing, run the backward pass inside the block too, because it runs the forward
    again. A copy made inside has no gates.

    Args:
        model: Any model with sites.
        gates: A plan or a mask (kept heads 1, others 0). Or a mapping from site name to
            ``[heads]``, ``[batch, heads]`` or ``[batch, tokens, heads]``; other sites get no gate.
            Or ``[layers, heads]`` for all sites in model order. Heads are the present ones, in
            order. NumPy arrays, lists, booleans.
        sites: Where; default ``find_sites(model)`` and what ``gates`` names.

    Yields:
        The model.

    Raises:
        InvalidValue: a tensor of a wrong shape.
        UnknownName: a name that is no site.
        PlanMismatch: a plan for a model of another structure.
        UnsupportedModel: an output projection that is also used elsewhere.

    >>> import torch
    >>> from headprune import MultiHeadAttention
    >>> x, attention = torch.randn(1, 3, 8), MultiHeadAttention(8, 2)
    >>> off = torch.zeros(1, 2, requires_grad=True)
    >>> with gated(attention, off):
    ...     attention(x, x, x).sum().backward()
    >>> off.grad.shape
    torch.Size([1, 2])
    """
    if sites is None:
        sites = sites_for(model, site_names(gates))
    with installed(model, gate_tensors(model, gates, bind(model, sites))):
        yield model


def site_names(given: Any) -> tuple[str, ...]:
    """The sites that a plan, a mask or a mapping names; none for a table."""
    if isinstance(given, PruningPlan):
        return given.mask.sites
    if isinstance(given, HeadMask):
        return given.sites
    if isinstance(given, Mapping):
        return tuple(map(str, given))
    return ()


@contextmanager
def installed(
    model: nn.Module, gates: list[tuple[BoundSite, Tensor]]
) -> Iterator[list[Callable[[Tensor], None]]]:
    """Put a gate on every given site that has heads, inside a ``with`` block.

    Yields:
        For every such site, in order, a function that replaces its gate by another of its shape.
    """
    with ExitStack() as stack:
        with_heads = [(site, gate) for site, gate in gates if site.site.heads]
        check_unshared(model, ((site, site.layout.gate) for site, _ in with_heads))
        stack.enter_context(exposed(site for site, _ in with_heads))
        puts: list[Callable[[Tensor], None]] = []
        for site, gate in with_heads:
            kind = _Gated if site.layout.gate else _GatedOutput
            put = stack.enter_context(_gated(site.gate, kind, spread(gate, site)))
            puts.append(partial(_put_spread, put, site))
        yield puts


def _put_spread(put: Callable[[Tensor], None], site: BoundSite, gate: Tensor) -> None:
    put(spread(gate, site))


def gate_tensors(
    model: nn.Module, gates: Gates, bound: list[BoundSite]
) -> list[tuple[BoundSite, Tensor]]:
    """Check any accepted form of gates; return one tensor ``[..., present heads]`` per site."""
    if isinstance(gates, (PruningPlan, HeadMask)):
        for note in check_plan(model, [b.site for b in bound], gates):
            warnings.warn(note, UserWarning, stacklevel=4)
        mask = gates.mask if isinstance(gates, PruningPlan) else gates
        return [(b, _from_mask(b, mask)) for b in bound]
    if isinstance(gates, (Tensor, np.ndarray)):
        return _from_table(_as_tensor(gates), bound)
    if isinstance(gates, Mapping):
        return _from_mapping(gates, bound)
    if isinstance(gates, (list, tuple)):
        return _from_rows(gates, bound)
    must = (
        "a plan, a mask, a mapping from site name to tensor, or a tensor, array or list"
        " [layers, heads]"
    )
    raise InvalidValue("gates", must, type(gates).__name__)


def _as_tensor(gates: Any) -> Any:
    """Turn lists and NumPy arrays into tensors, and booleans or integers 0 and 1 into floats.

    Everything else is returned unchanged.
    """
    if isinstance(gates, (list, tuple)):
        try:
            gates = np.asarray(gates)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidValue(
                "gates", "numbers or booleans, as many per row", repr(gates)
            ) from error
    if isinstance(gates, np.ndarray):
        if gates.dtype.kind not in "biuf":
            raise InvalidValue("gates", "numbers or booleans", f"an array of {gates.dtype}")
        if gates.dtype.kind == "f" and not np.isfinite(gates).all():
            raise InvalidValue("gates", "finite", "NaN or infinite")
        gates = torch.tensor(gates)
    if not isinstance(gates, Tensor) or gates.is_floating_point() or gates.is_complex():
        return gates
    is_mask = gates.dtype == torch.bool or bool(((gates == 0) | (gates == 1)).all())
    return gates.float() if is_mask else gates


def _from_mapping(
    gates: Mapping[str, Array], bound: list[BoundSite]
) -> list[tuple[BoundSite, Tensor]]:
    by_name = {b.site.name: b for b in bound}
    # All names first: a wrong name explains more than a wrong shape.
    for name in gates:
        if name not in by_name:
            hint = did_you_mean(str(name), by_name)
            raise UnknownName("gates", "keyed by site names", repr(name), hint)
    return [(by_name[name], _checked(gate, by_name[name])) for name, gate in gates.items()]


def _from_mask(bound: BoundSite, mask: HeadMask) -> Tensor:
    kept = frozenset(mask.kept(bound.site.name))
    device = device_of(bound.module)
    if device.type == "meta":
        # Offloaded weights come to the module when it runs; the gates follow them then.
        device = torch.device("cpu")
    gates = [float(h in kept) for h in bound.site.heads]
    return sent(gates, device, torch.float32)


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


def _from_rows(rows: Sequence[Any], bound: list[BoundSite]) -> list[tuple[BoundSite, Tensor]]:
    """Read one row per site; sites may have different head counts."""
    if len(rows) != len(bound):
        raise InvalidValue("gates", f"one row per site, {len(bound)}", f"{len(rows)} rows")
    return [(b, _checked(row, b)) for b, row in zip(bound, rows, strict=True)]


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
    """Reshape a gate so that it multiplies ``[batch, tokens, heads, width]``.

    For a sequence-first module that is ``[tokens, batch, heads, width]``.
    """
    if gate.ndim == 2:
        gate = gate.unsqueeze(1)  # [batch, 1, heads]
    if bound.layout.batch_axis == 1 and gate.ndim == 3:
        gate = gate.transpose(0, 1)
    if bound.layout.windows and gate.ndim == 3:
        # [examples, tokens of all windows, 1, heads]: the extra axis marks windows
        gate = gate.unsqueeze(2)
    return gate.unsqueeze(-1)


def multiplied(x: Tensor, gates: Iterable[Tensor]) -> Tensor:
    """Multiply every head of ``x [..., heads * width]`` by its gates, as ``spread`` shapes them."""
    for gate in gates:
        heads = x.unflatten(-1, (gate.shape[-2], -1))
        if gate.ndim > heads.ndim == 3:
            heads = _by_example(heads, gate)
        elif gate.ndim > heads.ndim:
            heads, gate = _windows(heads, gate)
        elif 2 < gate.ndim < heads.ndim:
            gate = _over_axes(heads, gate)
        _check_rows(heads, gate)
        # A gradient of a gate is a long sum. Where one is needed, products and sum have at least
        # the precision of the gate.
        kind = heads.dtype
        if gate.requires_grad and torch.is_grad_enabled():
            kind = torch.promote_types(heads.dtype, gate.dtype)
        x = (heads.to(kind) * gate.to(heads.device, kind)).to(x.dtype).view(x.shape)
    return x


def _by_example(heads: Tensor, gate: Tensor) -> Tensor:
    """Divide tokens that lie one after another among the examples of the gates.

    Args:
        heads: ``[examples * tokens, heads, width]``.
        gate: ``[examples, 1 or tokens, heads, 1]``.

    Returns:
        ``[examples, tokens, heads, width]``.
    """
    n_rows = len(heads)
    examples, tokens = gate.shape[:2]
    if n_rows % examples or tokens not in (1, n_rows // examples):
        must = f"for the {n_rows} tokens that the model runs on"
        raise InvalidValue("gates", must, f"gates of {examples} examples x {tokens} tokens")
    by_example: Tensor = heads.unflatten(0, (examples, -1))
    return by_example


def _windows(heads: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Fit gates per example to windows, which lie on the batch axis one after another.

    Args:
        heads: ``[examples * windows, tokens of a window, heads, width]``.
        gate: ``[examples, 1 or tokens of all windows, 1, heads, 1]``.

    Returns:
        ``[examples, windows, tokens of a window, heads, width]`` and a gate that fits.
    """
    n_windows, per_window = heads.shape[:2]
    examples, tokens = gate.shape[:2]
    if n_windows % examples or tokens not in (1, n_windows * per_window // examples):
        must = f"for the {n_windows} windows of {per_window} tokens that the model runs on"
        raise InvalidValue("gates", must, f"gates of {examples} examples x {tokens} tokens")
    heads = heads.unflatten(0, (examples, -1))
    if tokens != 1:
        gate = gate.flatten(1, 2).unflatten(1, heads.shape[1:3])
    return heads, gate


def _over_axes(heads: Tensor, gate: Tensor) -> Tensor:
    """Fit gates per example to tokens on several axes, as those of images.

    Args:
        heads: ``[examples, height, width, heads, width of a head]``.
        gate: ``[examples, 1 or tokens, heads, 1]``.

    Returns:
        ``[examples, height, width, heads, 1]``, or 1 in place of height and width.
    """
    axes = heads.shape[1:-2]
    if gate.shape[1] == 1:
        axes = torch.Size([1] * len(axes))
    # Others do not fit.
    return gate.unflatten(1, axes) if gate.shape[1] == axes.numel() else gate


def _check_rows(heads: Tensor, gate: Tensor) -> None:
    """Refuse gates for other rows: broadcasting could fit them to a wrong axis by chance."""
    rows = heads.shape[:-2]
    given = gate.shape[:-2]
    if not given:
        return
    fits = len(given) == len(rows)
    if fits:
        fits = all(g in (1, n) for g, n in zip(given, rows, strict=True))
    if not fits:
        must = f"for the {' x '.join(map(str, rows))} rows that the model runs on"
        raise InvalidValue("gates", must, f"gates of shape {list(gate.shape[:-1])}")


class _Gated(nn.Module):
    """Mixed into a projection's class: multiplies the heads in its input, then calls it."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        x = multiplied(first_input(inputs, "a gated model"), getattr(self, GATES_ATTRIBUTE))
        return super().__call__(x, *inputs[1:], **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Gates belong to the block: a copy or a pickle made inside must not carry them out of it.
        state = {k: v for k, v in self.__dict__.items() if k != GATES_ATTRIBUTE}
        return remade(ungated_class(type(self)), state)


class _GatedOutput(_Gated):
    """Mixed into an attention without an output projection: multiplies the heads in its output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super(_Gated, self).__call__(*args, **kwargs)
        state = getattr(self, STATE_ATTRIBUTE, None)
        return multiplied_output(out, getattr(self, GATES_ATTRIBUTE), state)


def multiplied_output(out: Any, gates: Iterable[Tensor], state: HeadState | None) -> Any:
    """Multiply every head in the output of an attention without an output projection."""
    gates = [for_all_heads(gate, state) for gate in gates]
    if isinstance(out, Tensor):
        return multiplied(out, gates)
    return (multiplied(out[0], gates), *out[1:])


def for_all_heads(gate: Tensor, state: HeadState | None) -> Tensor:
    """Extend gates ``[..., heads, 1]`` to the heads before the cut.

    An attention without an output projection keeps its width: it returns zeros for removed heads,
    so their gates are ones.
    """
    if state is None:
        return gate
    every = gate.new_ones(*gate.shape[:-2], state.n_query_heads, gate.shape[-1])
    return every.index_copy(-2, sent(state.heads, gate.device), gate)


def ungated_class(kind: type) -> type:
    """Return the class that a module had before ``gated_class`` changed it."""
    while "headprune_ungated" in kind.__dict__:
        kind = kind.__dict__["headprune_ungated"]
    return kind


@cache
def gated_class(kind: type[nn.Module], original: type) -> type[Any]:
    """Return a module's class with ``kind`` mixed in; ``ungated_class`` is the inverse."""
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
    """Put one gate on a projection; yield a function that replaces it by another."""
    before = type(projection)
    own = gate
    outer: tuple[Tensor, ...] = getattr(projection, GATES_ATTRIBUTE, ())
    if not outer:
        projection.__class__ = gated_class(kind, before)  # type: ignore[arg-type]
    projection.__dict__[GATES_ATTRIBUTE] = (*outer, gate)

    def put(other: Tensor) -> None:
        nonlocal own
        present = projection.__dict__[GATES_ATTRIBUTE]
        projection.__dict__[GATES_ATTRIBUTE] = tuple(other if g is own else g for g in present)
        own = other

    try:
        yield put
    finally:
        # By identity, not by position: blocks that overlap may end in any order.
        others = tuple(g for g in projection.__dict__[GATES_ATTRIBUTE] if g is not own)
        if others:
            projection.__dict__[GATES_ATTRIBUTE] = others
        else:
            del projection.__dict__[GATES_ATTRIBUTE]
            projection.__class__ = type(projection).headprune_ungated  # type: ignore[attr-defined]
