"""Losses of many gate settings, exactly as from a pass for each, at a fraction of the cost.

Three savings: what comes before the first gate that differs is played back from a tape of one pass (``tape``); that
site's output projection is corrected by what the changed heads wrote, instead of computed again; several settings run
as one batch. Where a model cannot be played back, or the proof on two examples fails, every setting has a pass of its
own, and ``notes`` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.attention.linear import effective_weight, feature_count
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.layout import STATE_ATTRIBUTE
from headprune.gating.context import _for_all_heads, _multiplied, _spread
from headprune.gating.tape import CannotReplay, GateCall, Key, Tape, leaves
from headprune.model.expose import exposed
from headprune.model.losses import Loss, checked_losses
from headprune.model.running import batch_size
from headprune.model.sites import BoundSite

#: What stands in for the outputs of closed heads.
Stand: TypeAlias = "Tensor | tuple[Tensor, ...]"

#: Tokens that a pass should have at least, to keep all arithmetic units busy, by device.
_TOKENS = {"cpu": 2048}
_TOKENS_ELSEWHERE = 32768
_EXAMPLES = 2  # that the proof runs on
_AT_WORK = 8  # tensors of the largest recorded size that a pass holds at once, about
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class CandidateLosses:
    """Losses of gate settings of one model.

    Args:
        model: The model, in evaluation mode.
        bound: Its sites.
        loss: Per-example loss.
        max_bytes: Bound on what is kept of a pass and on what several settings need at once, as far as the outputs of
            modules tell. A batch that needs more is cut into smaller ones.
        replay: False runs a pass for every setting.

    ``notes`` says why no pass is played back, where none is.
    """

    def __init__(
        self, model: nn.Module, bound: Sequence[BoundSite], loss: Loss, max_bytes: int = 2**30, replay: bool = True
    ) -> None:
        self.model, self.bound, self.loss, self.max_bytes = model, list(bound), loss, max_bytes
        self.sizes = [len(b.site.heads) for b in bound]
        self.notes: tuple[str, ...] = ()
        self.tape = Tape(model, self.bound)
        self.replay = replay
        self._axes: dict[tuple[Key, int], int | None] | None = None
        self._bytes = (0, 0)  # of an example: kept of a pass, and at work in it

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        batch: Any,
        settings: Tensor,
        base: Tensor | None = None,
        fill: Mapping[int, Stand] | None = None,
        number: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Losses of every setting and of the base.

        Args:
            batch: A batch on the model's device.
            settings: ``[settings, heads]``, gates of all present heads, site after site.
            base: ``[heads]``, gates that most settings differ from at few sites; default ones.
            fill: By site number, what a closed gate lets through instead of nothing: a gate g gives
                ``g * context + (1 - g) * fill``. ``[heads * width]``; or for each example ``[tokens, heads * width]``,
                from the first token again where it has fewer than the example.
            number: The batch's number, for messages.

        Returns:
            ``[settings, batch]`` and ``[batch]``.
        """
        base = settings.new_ones(settings.shape[-1]) if base is None else base
        one = _Pass(self, batch, number, base, dict(fill or {}))
        with exposed(self.bound):
            if self.replay and self._axes is None:
                self._prove(one, settings)
            if not self.replay:
                return one.naive(settings)
            size = batch_size(batch)
            rows = max(1, min(size, self.max_bytes // max(1, sum(self._bytes))))
            parts = [one.part(start, min(start + rows, size)).replayed(settings) for start in range(0, size, rows)]
            return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])

    def _prove(self, one: _Pass, settings: Tensor) -> None:
        """Runs two examples once and twice over: which axes hold examples, and whether playing back is exact."""
        size = min(_EXAMPLES, batch_size(one.batch))
        small = one.part(0, size)
        try:
            losses = small.record()
            once = self._recorded()
            self._compare(small.twice().record(), torch.cat([losses, losses]), "the losses of a batch taken twice")
            self._axes = {place: _batch_axis(once.get(place), shape) for place, shape in self._recorded().items()}
            small.record()
            kept = {t.data_ptr(): t for out in self.tape.outputs.values() for t in leaves(out)}.values()
            n_bytes = [t.numel() * t.element_size() // size for t in kept]
            self._bytes = sum(n_bytes), _AT_WORK * max(n_bytes, default=0)
            tried = settings[_tried(self, self.tape.order(), settings, one.base)]
            self._compare(small.replayed(tried)[0], small.naive(tried)[0], "losses from the middle of a pass on")
        except (CannotReplay, RuntimeError, TypeError, ValueError, KeyError) as error:
            if isinstance(error, InvalidValue) and error.must == "finite":  # of a loss: nobody's batch size is at fault
                raise
            self.replay = False
            self.notes = (f"every setting had a whole pass of its own, as no pass could be played back: {error}",)

    def _recorded(self) -> dict[tuple[Key, int], tuple[int, ...]]:
        """Shapes of all tensors on the tape."""
        outputs = self.tape.outputs.items()
        return {(key, i): tuple(t.shape) for key, output in outputs for i, t in enumerate(leaves(output))}

    @staticmethod
    def _compare(got: Tensor, expected: Tensor, what: str) -> None:
        gap = float(((got - expected).abs() / expected.abs().clamp(min=1)).max()) if got.numel() else 0.0
        if not gap <= _TOLERANCE.get(got.dtype, 1e-2):
            raise CannotReplay(what, "those of whole passes of its examples alone", f"{gap:.1e} off")


class _Pass:
    """One batch under gates."""

    def __init__(self, of: CandidateLosses, batch: Any, number: int, base: Tensor, fill: dict[int, Stand]) -> None:
        self.of, self.batch, self.number, self.base, self.fill = of, batch, number, base, fill
        self.size = batch_size(batch)

    def part(self, start: int, stop: int) -> _Pass:
        """Some of its examples."""
        if (start, stop) == (0, self.size):
            return self
        batch = sliced(self.batch, start, stop, self.size)
        fill = {site: f if isinstance(f, Tensor) else f[start:stop] for site, f in self.fill.items()}
        return _Pass(self.of, batch, self.number, self.base, fill)

    def twice(self) -> _Pass:
        """All of its examples, and all again."""
        fill = {site: f if isinstance(f, Tensor) else f * 2 for site, f in self.fill.items()}
        return _Pass(self.of, repeated(self.batch, 2), self.number, self.base, fill)

    def naive(self, settings: Tensor) -> tuple[Tensor, Tensor]:
        """A pass for every setting."""
        base = self._run(self.base)
        rows = [self._run(gates) for gates in settings]
        return torch.stack(rows) if rows else base.new_zeros(0, self.size), base

    def record(self) -> Tensor:
        run = functools.partial(self._losses, self.batch)
        losses: Tensor = self.of.tape.record(run, self._caller(self.base[None], 1))
        return losses

    def replayed(self, settings: Tensor) -> tuple[Tensor, Tensor]:
        """Only what each setting changes."""
        base = self.record()
        tape = self.of.tape
        losses = base.expand(len(settings), -1).clone()
        firsts = _firsts(self.of, tape.order(), settings, self.base)
        for site, group in groupby(firsts, key=lambda first: first[0]):
            places = [index for _, index in group]
            width = self._width(tape.gates[site])
            for start in range(0, len(places), width):
                some = places[start : start + width]
                losses[some] = self._play(site, settings[some]).to(losses.dtype)
        return losses, base

    def _width(self, call: GateCall) -> int:
        """Settings that run as one batch."""
        context = call.given[0]
        tokens = max(1, context.numel() // context.shape[-1])
        wanted = _TOKENS.get(context.device.type, _TOKENS_ELSEWHERE)
        room = self.of.max_bytes // max(1, self.of._bytes[1] * self.size)
        return max(1, min(-(-wanted // tokens), room))

    def _play(self, site: int, settings: Tensor) -> Tensor:
        copies, axes, tape = len(settings), self.of._axes or {}, self.of.tape

        def repeat(key: Key, tensor: Tensor) -> Tensor:
            places = [i for i, t in enumerate(leaves(tape.outputs[key])) if t is tensor]
            if (key, places[0]) not in axes:
                raise CannotReplay("a call", "made for the first examples too", "a new one")
            axis = axes[key, places[0]]
            found = tensor if axis is None else repeated_along(tensor, copies, axis)
            return found.clone() if found is tensor and key in tape.mutable else found

        caller = self._caller(settings, copies)
        run = functools.partial(self._losses, repeated(self.batch, copies))
        found = tape.play(run, site, functools.partial(self._changed, site, settings, caller), caller, repeat)
        return found.view(copies, self.size)

    def _losses(self, batch: Any) -> Tensor:
        return checked_losses(self.of.loss, self.of.model, batch, self.number)

    def _run(self, gates: Tensor) -> Tensor:
        losses: Tensor = self.of.tape.run(functools.partial(self._losses, self.batch), self._caller(gates[None], 1))
        return losses

    def _caller(self, settings: Tensor, copies: int) -> Callable[..., Any]:
        """Calls a gate with every copy's gates, a row of ``settings`` for all examples of a copy."""
        rows = settings.split(self.of.sizes, 1)

        def call(site: int, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            gates = rows[site]
            if bool((gates == 1).all()) or not gates.shape[1]:
                return original(*args, **kwargs)
            bound = self.of.bound[site]
            spread = _spread(gates.repeat_interleave(self.size, 0) if len(gates) > 1 or copies > 1 else gates[0], bound)
            if not bound.layout.gate:
                return _output_gated(original(*args, **kwargs), spread, bound, self.fill.get(site))
            context = args[0]
            given = _multiplied(context, [spread])
            if site in self.fill:
                given = given + _multiplied(self._stand(site, context, copies), [1 - spread])
            return original(given, *args[1:], **kwargs)

        return call

    def _stand(self, site: int, context: Tensor, copies: int) -> Tensor:
        """What stands in for closed heads, in the shape of the context."""
        fill = self.fill[site]
        if isinstance(fill, Tensor):
            return fill.to(context).expand_as(context)
        tokens = torch.arange(context.shape[1], device=context.device)
        return repeated_along(torch.stack([x[tokens % len(x)] for x in fill]).to(context), copies, 0)

    def _changed(self, site: int, settings: Tensor, caller: Callable[..., Any], call: GateCall) -> Tensor:
        """What the output projection returns under each setting: its recorded output and what changed heads add."""
        bound, copies = self.of.bound[site], len(settings)
        gates = settings.split(self.of.sizes, 1)[site]
        before = self.base.split(self.of.sizes)[site]
        moved = gates != before
        count = int(moved[0].sum())
        axis, context = bound.layout.batch_axis, call.given[0]
        weight = _weight(bound) if axis == 0 and context.dtype in _TOLERANCE else None
        if weight is None or not bool((moved.sum(1) == count).all()) or 2 * count > len(before):
            given = (repeated_along(context, copies, axis), *call.given[1:])
            return caller(site, bound.gate.__dict__["forward"].__wrapped__, given, {})
        index = moved.nonzero()[:, 1].view(copies, count)
        heads = context.reshape(-1, len(before), context.shape[-1] // len(before))
        if site in self.fill:
            heads = heads - self._stand(site, context, 1).reshape(heads.shape)
        delta = (gates - before).gather(1, index).to(context.dtype)
        read = heads[:, index].transpose(0, 1) * delta[:, None, :, None]  # [copies, tokens, changed heads, width]
        write = weight.unflatten(1, (len(before), -1)).movedim(0, -1)[index]  # [copies, changed heads, width, out]
        base = call.output.reshape(1, -1, call.output.shape[-1]).expand(copies, -1, -1)
        out = torch.baddbmm(base, read.flatten(2), write.flatten(1, 2))
        return out.view(copies * call.output.shape[0], *call.output.shape[1:])


def _output_gated(out: Any, spread: Tensor, bound: BoundSite, fill: Stand | None) -> Any:
    """What an attention without an output projection returns; cut, it puts out zeros for heads that have left."""
    state = getattr(bound.module, STATE_ATTRIBUTE, None)
    gates = _for_all_heads(spread, state)
    first = out if isinstance(out, Tensor) else out[0]
    found = _multiplied(first, [gates])
    if isinstance(fill, Tensor):
        heads = fill.to(first).unflatten(0, (spread.shape[-2], -1))
        if state is not None:
            every = heads.new_zeros(state.n_query_heads, heads.shape[1])
            heads = every.index_copy(0, torch.tensor(state.heads, device=heads.device), heads)
        found = found + _multiplied(heads.flatten().expand_as(first), [1 - gates])
    return found if isinstance(out, Tensor) else (found, *out[1:])


def _weight(bound: BoundSite) -> Tensor | None:
    """The output projection's weight ``[out, heads * width]``, where it is one matrix."""
    try:
        feature_count(getattr(bound.gate, "base_layer", bound.gate), "in")
    except UnsupportedModel:
        return None
    if type(bound.gate)._compiled_call_impl is not None or bound.gate._forward_hooks or bound.gate._forward_pre_hooks:
        return None
    return effective_weight(bound.gate).detach()


def _firsts(of: CandidateLosses, order: list[int], settings: Tensor, base: Tensor) -> list[tuple[int, int]]:
    """``(site, setting)`` for every setting that changes a gate that is called, by the first such gate."""
    changed = [
        (part != was).any(1) for part, was in zip(settings.split(of.sizes, 1), base.split(of.sizes), strict=True)
    ]
    found = []
    for setting in range(len(settings)):
        place = next((p for p, site in enumerate(order) if bool(changed[site][setting])), None)
        if place is not None:
            found.append((place, setting))
    return [(order[place], setting) for place, setting in sorted(found)]


def _tried(of: CandidateLosses, order: list[int], settings: Tensor, base: Tensor) -> list[int]:
    """Settings for the proof: two of the first site of every layout, and of the last site."""
    by_site = {s: [i for _, i in group] for s, group in groupby(_firsts(of, order, settings, base), key=lambda f: f[0])}
    sites = {of.bound[site].layout.name: site for site in reversed(by_site)}
    return [i for site in {*sites.values(), *list(by_site)[-1:]} for i in by_site[site][:2]]


def _batch_axis(once: tuple[int, ...] | None, twice: tuple[int, ...]) -> int | None:
    """The axis that is twice as long for a batch twice as large, None where none is."""
    if once == twice:
        return None
    if once is None or len(once) != len(twice):
        raise CannotReplay("a recorded tensor", "one a call, whatever the batch", f"{once} and {twice}")
    differ = [axis for axis, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
    if len(differ) != 1 or twice[differ[0]] != 2 * once[differ[0]]:
        raise CannotReplay("a recorded tensor", "longer on one axis for more examples", f"{once} and {twice}")
    return differ[0]


def repeated_along(tensor: Tensor, copies: int, axis: int) -> Tensor:
    """All examples once, then all again, ...: ``copies`` times along an axis whose major order is examples."""
    return tensor if copies == 1 else torch.cat([tensor] * copies, axis)


def repeated(batch: Any, copies: int) -> Any:
    """A batch ``copies`` times; what has no row for each example stays."""
    size = batch_size(batch)
    return _over_rows(batch, size, lambda t: repeated_along(t, copies, 0))


def sliced(batch: Any, start: int, stop: int, size: int) -> Any:
    """Some examples of a batch of ``size``."""
    return _over_rows(batch, size, lambda t: t[start:stop])


def _over_rows(value: Any, size: int, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value) if value.ndim and value.shape[0] == size else value
    if isinstance(value, Mapping):
        return {k: _over_rows(v, size, function) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_over_rows(item, size, function) for item in value)
    return value
