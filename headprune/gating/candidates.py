"""Losses of many gate settings, exactly as from a pass for each, at a fraction of the cost.

Three savings: what comes before the first gate that differs is played back from a tape of one pass
(``tape``); that site's output projection is corrected by what the changed heads wrote, instead of
computed again; several settings run as one batch. Where a model cannot be played back, or the proof
on two examples fails, every setting has a pass of its own, and ``notes`` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.gating.changes import Known, batch_axis, by_site, crowded, first_sites, on_cpu, worst
from headprune.gating.context import multiplied, spread
from headprune.gating.projections import Stand, output_gated, plain_weight
from headprune.gating.rows import form, largest_row, over_rows, repeated_along, with_rows
from headprune.gating.tape import CannotReplay, GateCall, Key, Tape
from headprune.model.exposed import exposed
from headprune.model.losses import Loss, check_finite, shaped_losses
from headprune.model.precision import full_precision
from headprune.model.running import batch_size, device_of, tensors
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory, sent

_T = TypeVar("_T")

#: ``see(number of the batch, losses [batch])``
See: TypeAlias = Callable[[int, Tensor], None]

#: Tokens that a pass should have at least, to keep all arithmetic units busy, by device.
_TOKENS = {"cpu": 1024}
_TOKENS_ELSEWHERE = 32768
_EXAMPLES = 2  # that the proof runs on
_AT_WORK = 8  # tensors of the largest recorded size that a pass holds at once, about
_INEXACT = "inexact"
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5}
_WIDER = 10.0  # times that, for the largest gap of many examples


class CandidateLosses:
    """Losses of gate settings of one model.

    Args:
        model: The model, in evaluation mode.
        bound: Its sites.
        loss: Per-example loss.
        max_bytes: Bound on what is kept of a pass and on what several settings need at once, as far
            as the outputs of modules tell. A batch that needs more is cut into smaller ones.
        replay: False runs a pass for every setting.
        see: Takes the number of a batch and losses ``[batch]`` that must be finite, and refuses
            them; default at once, which waits for an accelerator.

    ``notes`` says why passes are not played back, where they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        bound: Sequence[BoundSite],
        loss: Loss,
        max_bytes: int = 2**30,
        replay: bool = True,
        see: See | None = None,
    ) -> None:
        self.model, self.bound, self.loss, self.max_bytes = model, list(bound), loss, max_bytes
        self.sizes = [len(b.site.heads) for b in bound]
        self.notes: tuple[str, ...] = ()
        self.tape = Tape(model, self.bound)
        self.replay = replay
        self.see = see or (lambda number, losses: check_finite([(number, losses)]))
        self._known: dict[Any, Known] = {}

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
            settings: ``[settings, heads]``, gates of all present heads, site after site. What is
                run is decided by them, so that they should be on the CPU.
            base: ``[heads]``, gates that most settings differ from at few sites; default ones.
            fill: By site number, what a closed gate lets through instead of nothing: a gate g gives
                ``g * context + (1 - g) * fill``. ``[heads * width]``; or for each example
                ``[tokens, heads * width]``.
            number: The batch's number, for messages.

        Returns:
            ``[settings, batch]`` and ``[batch]``.
        """
        settings, base = on_cpu(settings, base)
        with exposed(self.bound):
            whole = self._proven(batch, base, fill, number)
            found = None
            if self.replay and whole.known.exact:
                found = self._guarded(whole, functools.partial(whole.checked, settings))
            found = whole.naive(settings) if found is None else found
        self.see(number, worst(*found))
        return found

    def told(self, batch: Any) -> list[str]:
        """What a batch that is through leaves for later ones, in words; see ``catch_up``."""
        return [*([] if self._known[form(batch)].exact else [_INEXACT]), *self.notes]

    @torch.inference_mode(False)
    @torch.no_grad()
    def catch_up(
        self,
        batch: Any,
        told: Sequence[str],
        base: Tensor,
        fill: Mapping[int, Stand] | None = None,
        number: int = 0,
    ) -> None:
        """Takes a batch for one that is through, without running its settings; how later ones run
        depends on it.

        Args:
            told: What ``told`` gave after the batch.
        """
        base = in_main_memory([base])[0]
        with exposed(self.bound):
            whole = self._proven(batch, base, fill, number)
        whole.known.exact = _INEXACT not in told
        self.notes = tuple(note for note in told if note != _INEXACT)

    def _proven(
        self, batch: Any, base: Tensor, fill: Mapping[int, Stand] | None, number: int
    ) -> _Pass:
        """A pass of the batch, after the proof where its form is a new one."""
        size, kind = batch_size(batch), form(batch)
        rows, examples = with_rows(batch, size), min(_EXAMPLES, size)
        known = self._known.get(kind)
        new = known is None or not known.rows <= rows or known.examples < examples
        if known is None or new:
            known = self._known[kind] = Known(
                rows if known is None else rows & known.rows, examples
            )
        whole = _Pass(self, batch, size, known, base, dict(fill or {}), number)
        if new and self.replay:
            self._guarded(whole, whole.prove)
        return whole

    def _guarded(self, whole: _Pass, run: Callable[[], _T]) -> _T | None:
        """Runs what goes back to whole passes, with a note, where it fails."""
        try:
            return run()
        except (
            Exception
        ) as error:  # a model that is not made for parts or copies of a batch may raise anything
            if (
                isinstance(error, InvalidValue) and error.must == "finite"
            ):  # of a loss: no way to run it would help
                raise
            whole.known.exact = False
            since = f" from batch {whole.number} on" if whole.number else ""
            why = str(error) or type(error).__name__
            note = (
                f"Every setting had a whole pass of its own{since}, as passes could not be played"
                f" back: {why}"
            )
            self.notes = tuple(dict.fromkeys((*self.notes, note)))
            return None


class _Pass:
    """One batch under gates."""

    def __init__(
        self,
        of: CandidateLosses,
        batch: Any,
        size: int,
        known: Known,
        base: Tensor,
        fill: dict[int, Stand],
        number: int,
    ) -> None:
        self.of, self.batch, self.size, self.known = of, batch, size, known
        self.base, self.fill, self.number = base, fill, number

    def part(self, start: int, stop: int) -> _Pass:
        """Some of its examples."""
        if (start, stop) == (0, self.size):
            return self
        batch = over_rows(self.batch, self.known.rows, lambda t: t[start:stop])
        fill = {
            site: f if isinstance(f, Tensor) else f[start:stop] for site, f in self.fill.items()
        }
        return _Pass(self.of, batch, stop - start, self.known, self.base, fill, self.number)

    def twice(self) -> _Pass:
        """All of its examples, and all again."""
        fill = {site: f if isinstance(f, Tensor) else f * 2 for site, f in self.fill.items()}
        return _Pass(
            self.of, self._copied(2), 2 * self.size, self.known, self.base, fill, self.number
        )

    def _copied(self, copies: int) -> Any:
        return over_rows(self.batch, self.known.rows, lambda t: repeated_along(t, copies, 0))

    @full_precision()
    def prove(self) -> None:
        """Shows on two examples that parts, copies and passes from the middle on give the losses of
        whole passes.

        Raises:
            CannotReplay: they do not.
        """
        small, known, tape = self.part(0, self.known.examples), self.known, self.of.tape
        doubled = small.twice().record()
        check_finite(
            [(self.number, doubled)]
        )  # at once: after a loss that is not finite no pass is worth its time
        twice = self._recorded()
        losses = small.record()
        check_finite([(self.number, losses)])
        once = self._recorded()
        alone = [
            small.part(i, i + 1).naive(losses.new_zeros(0, len(self.base)))[1]
            for i in range(small.size)
        ]
        small.compare(losses, torch.cat(alone), "the losses of two examples")
        small.compare(doubled, torch.cat([losses, losses]), "the losses of a batch taken twice")
        known.axes = {place: batch_axis(once.get(place), shape) for place, shape in twice.items()}
        kept = {t.data_ptr(): t for out in tape.outputs.values() for t in tensors(out)}.values()
        n_bytes = [t.numel() * t.element_size() // small.size for t in kept]
        known.kept, known.work = sum(n_bytes), _AT_WORK * max(n_bytes, default=0)
        known.largest = largest_row(self.batch, known.rows)
        played, settings = [], []
        for number, site in enumerate(tape.order()):
            two = self._flipped(
                site
            )  # they run as one batch: were one wrong because of the other, both would be
            played.append(small._play(site, two)[number % 2])
            settings.append(two[number % 2])
        if settings:
            expected = small.naive(torch.stack(settings))[0]
            small.compare(
                torch.stack(played),
                expected.to(played[0].dtype),
                "losses from the middle of a pass on",
            )

    def compare(self, got: Tensor, expected: Tensor, what: str, wider: float = 1.0) -> None:
        """Raises:
        InvalidValue: a loss that is not finite, which no other way to run the passes would help.
        CannotReplay: losses that are apart.
        """
        gap = (
            float(((got - expected).abs() / expected.abs().clamp(min=1)).max())
            if got.numel()
            else 0.0
        )
        if gap <= wider * _TOLERANCE.get(got.dtype, 1e-2):
            return
        check_finite(
            (self.number, losses.reshape(-1, self.size).amax(0)) for losses in (expected, got)
        )
        raise CannotReplay(what, "those of whole passes of each example alone", f"{gap:.1e} off")

    def _flipped(self, site: int) -> Tensor:
        """Two settings that differ from the base in a head of one site, another one if it has
        two."""
        start, count = sum(self.of.sizes[:site]), self.of.sizes[site]
        two = self.base.repeat(2, 1)
        two[0, start] = 1 - two[0, start]
        last = start + count - 1
        two[1, last] = 1 - two[1, last] if count > 1 else (two[1, last] + two[0, last]) / 2
        return two

    def _recorded(self) -> dict[tuple[Key, int], tuple[int, ...]]:
        """Shapes of all tensors on the tape."""
        outputs = self.of.tape.outputs.items()
        return {
            (key, i): tuple(t.shape)
            for key, output in outputs
            for i, t in enumerate(tensors(output))
        }

    def checked(self, settings: Tensor) -> tuple[Tensor, Tensor]:
        """``in_parts``; of the first batch, a setting against a whole pass, for the proof has seen
        two examples.

        Raises:
            CannotReplay: they are apart, as where the loss couples examples that were not in the
                proof.
        """
        found = self.in_parts(settings)
        firsts = first_sites(self.of.sizes, self.of.tape.order(), settings, self.base)
        if firsts and not self.known.compared and self.size > self.known.examples:
            some = crowded(firsts)
            whole = self._run(settings[some])
            self.compare(found[0][some], whole, "losses of a whole batch", _WIDER)
            self.known.compared = True
        return found

    def in_parts(self, settings: Tensor) -> tuple[Tensor, Tensor]:
        """Only what each setting changes, of as many examples at once as the memory allows."""
        known = self.known
        growth = (
            max(1.0, largest_row(self.batch, known.rows) / known.largest) ** 2
        )  # maps of attention grow so
        rows = int(self.of.max_bytes / max(1.0, growth * (known.kept + known.work)))
        rows = max(1, min(self.size, rows))
        room = int(self.of.max_bytes / max(1.0, growth * known.work * rows))
        starts = range(0, self.size, rows)
        parts = [
            self.part(start, min(start + rows, self.size)).replayed(settings, max(1, room))
            for start in starts
        ]
        return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])

    def naive(self, settings: Tensor) -> tuple[Tensor, Tensor]:
        """A pass for every setting."""
        base = self._run(self.base)
        rows = [self._run(gates) for gates in settings]
        return torch.stack(rows) if rows else base.new_zeros(0, self.size), base

    def record(self) -> Tensor:
        run = functools.partial(self._losses, self.batch)
        losses: Tensor = self.of.tape.record(run, self._caller(self.base[None], 1))
        return losses

    def replayed(self, settings: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Only what each setting changes, up to ``room`` settings at once."""
        base = self.record()
        tape = self.of.tape
        losses = base.expand(len(settings), -1).clone()
        firsts = first_sites(self.of.sizes, tape.order(), settings, self.base)
        for site, group in groupby(firsts, key=lambda first: first[0]):
            places = [index for _, index in group]
            context = tape.gates[site].given[0]
            tokens = max(1, context.numel() // context.shape[-1])
            width = max(
                1, min(-(-_TOKENS.get(context.device.type, _TOKENS_ELSEWHERE) // tokens), room)
            )
            for start in range(0, len(places), width):
                some = places[start : start + width]
                played = self._play(site, settings[some]).to(losses.dtype)
                losses.index_copy_(0, sent(some, losses.device), played)
        return losses, base

    def _play(self, site: int, settings: Tensor) -> Tensor:
        copies, axes, tape = len(settings), self.known.axes, self.of.tape

        def repeat(key: Key, tensor: Tensor) -> Tensor:
            places = [i for i, t in enumerate(tensors(tape.outputs[key])) if t is tensor]
            if (key, places[0]) not in axes:
                raise CannotReplay("a call", "made for the first examples too", "a new one")
            axis = axes[key, places[0]]
            found = tensor if axis is None else repeated_along(tensor, copies, axis)
            return found.clone() if found is tensor and key in tape.mutable else found

        caller = self._caller(settings, copies)
        run = functools.partial(self._losses, self._copied(copies))
        found: Tensor = tape.play(
            run, site, functools.partial(self._changed, site, settings, caller), caller, repeat
        )
        return found.view(copies, self.size)

    def _losses(self, batch: Any) -> Tensor:
        return shaped_losses(self.of.loss, self.of.model, batch, self.number)

    def _run(self, gates: Tensor) -> Tensor:
        losses: Tensor = self.of.tape.run(
            functools.partial(self._losses, self.batch), self._caller(gates[None], 1)
        )
        return losses

    def _caller(self, settings: Tensor, copies: int) -> Callable[..., Any]:
        """Calls a gate with every copy's gates, a row of ``settings`` for all examples of a
        copy."""
        rows = settings.split(self.of.sizes, 1)
        closed = [any(part) for part in by_site((settings != 1).any(0).tolist(), self.of.sizes)]

        def call(site: int, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not closed[site]:
                return original(*args, **kwargs)
            bound = self.of.bound[site]
            gates = sent(rows[site], device_of(bound.module))
            gate = spread(gates.repeat_interleave(self.size, 0) if copies > 1 else gates[0], bound)
            if not bound.layout.gate:
                return output_gated(original(*args, **kwargs), gate, bound, self.fill.get(site))
            context = args[0]
            given = multiplied(context, [gate])
            if site in self.fill:
                given = given + multiplied(self._stand(site, context, copies), [1 - gate])
            return original(given, *args[1:], **kwargs)

        return call

    def _stand(self, site: int, context: Tensor, copies: int) -> Tensor:
        """What stands in for closed heads, in the shape of the context."""
        fill = self.fill[site]
        if isinstance(fill, Tensor):
            return fill.to(context).expand_as(context)
        return repeated_along(torch.stack(fill).to(context), copies, 0)

    def _changed(
        self, site: int, settings: Tensor, caller: Callable[..., Any], call: GateCall
    ) -> Tensor:
        """What the output projection returns under each setting: its recorded output and what
        changed heads add."""
        bound, copies = self.of.bound[site], len(settings)
        gates = settings.split(self.of.sizes, 1)[site]
        before = self.base.split(self.of.sizes)[site]
        moved = gates != before
        count = int(moved[0].sum())
        axis, context = bound.layout.batch_axis, call.given[0]
        weight = plain_weight(bound) if axis == 0 and context.dtype in _TOLERANCE else None
        if weight is None or not bool((moved.sum(1) == count).all()) or 2 * count > len(before):
            given = (repeated_along(context, copies, axis), *call.given[1:])
            whole: Tensor = caller(site, bound.gate.__dict__["forward"].__wrapped__, given, {})
            return whole
        changed = moved.nonzero()[:, 1].view(copies, count)
        delta = sent((gates - before).gather(1, changed), context.device, context.dtype)
        index = sent(changed, context.device)
        heads = context.reshape(-1, len(before), context.shape[-1] // len(before))
        if site in self.fill:
            heads = heads - self._stand(site, context, 1).reshape(heads.shape)
        read = (
            heads[:, index].transpose(0, 1) * delta[:, None, :, None]
        )  # [copies, tokens, changed heads, width]
        write = weight.unflatten(1, (len(before), -1)).movedim(0, -1)[
            index
        ]  # [copies, changed heads, width, out]
        base = call.output.reshape(1, -1, call.output.shape[-1]).expand(copies, -1, -1)
        out = torch.baddbmm(base, read.flatten(2), write.flatten(1, 2))
        return out.view(copies * call.output.shape[0], *call.output.shape[1:])
