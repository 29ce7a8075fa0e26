"""Losses of many gate settings, as exact as one pass per setting but much cheaper.

Two savings. (1) Everything before the first gate that differs is played back from the tape of one
pass (module ``tape``). (2) Several settings run as one batch.

A proof on two examples comes first. Where a model cannot be played back, or where the proof fails,
every setting gets a whole pass of its own, and ``notes`` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.core.units import by_site
from headprune.gating.changes import (
    ReplayFacts,
    batch_axis,
    crowded,
    first_sites,
    on_cpu,
    worst,
)
from headprune.gating.context import multiplied, spread
from headprune.gating.projections import Stand, output_gated
from headprune.gating.rows import form, largest_row, over_rows, repeated_along, with_rows
from headprune.gating.tape import CannotReplay, GateCall, Key, Tape
from headprune.model.contexts import first_input
from headprune.model.exposed import exposed
from headprune.model.losses import Loss, check_finite, shaped_losses
from headprune.model.precision import full_precision
from headprune.model.running import batch_size, device_of, tensors
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory, sent

_T = TypeVar("_T")

#: ``see(number of the batch, losses [batch])``
See: TypeAlias = Callable[[int, Tensor], None]

# Tokens that a pass should have at least, to keep all arithmetic units busy, by device.
_TOKENS = {"cpu": 1024}
_TOKENS_ELSEWHERE = 32768
# Examples that the proof runs on.
_EXAMPLES = 2
# A pass holds about so many tensors of the largest recorded size at once.
_AT_WORK = 8
# The mark in a saved replay state for a batch whose form is not played back. It is on disk.
_INEXACT = "inexact"
# Largest gap between two losses that count as equal; other dtypes: 1e-2.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5}
# Factor on the tolerance for the largest gap of many examples.
_WIDER = 10.0


class CandidateLosses:
    """Losses of gate settings of one model.

    ``notes`` says why passes are not played back, where they are not.

    Args:
        model: The model, in evaluation mode.
        bound: Its sites.
        loss: Per-example loss.
        max_bytes: Bound on the bytes of the tape and on the bytes that several settings need at
            once, estimated from the outputs of modules. A batch that needs more is split.
        replay: False runs a pass for every setting.
        see: Takes the number of a batch and losses ``[batch]`` and must refuse losses that are not
            finite. The default checks at once, which waits for an accelerator.
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
        self.model = model
        self.bound = list(bound)
        self.loss = loss
        self.max_bytes = max_bytes
        self.sizes = [len(b.site.heads) for b in bound]
        self.notes: tuple[str, ...] = ()
        self.tape = Tape(model, self.bound)
        self.replay = replay
        self.see = see or _check_now
        self._facts: dict[Any, ReplayFacts] = {}

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
        """Compute the losses of every setting and of the base.

        Args:
            batch: A batch on the model's device.
            settings: ``[settings, heads]``, gates of all present heads, site after site. They
                decide which passes run, so they should be on the CPU.
            base: ``[heads]``, gates that most settings differ from at few sites; default ones.
            fill: By site number, the values that replace the output of a closed gate. A gate g
                gives ``g * context + (1 - g) * fill``. ``[heads * width]``; or per example
                ``[tokens, heads * width]``.
            number: The batch's number, for messages.

        Returns:
            ``[settings, batch]`` and ``[batch]``.
        """
        settings, base = on_cpu(settings, base)
        with exposed(self.bound):
            passes = self._proven(batch, base, fill, number)
            losses = None
            if self.replay and passes.facts.exact:
                losses = self._guarded(passes, functools.partial(passes.checked, settings))
            if losses is None:
                losses = passes.naive(settings)
        self.see(number, worst(*losses))
        return losses

    def replay_state(self, batch: Any) -> list[str]:
        """Return, after a batch, what later batches depend on; ``restore_replay`` takes it."""
        marks = [] if self._facts[form(batch)].exact else [_INEXACT]
        return [*marks, *self.notes]

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore_replay(
        self,
        batch: Any,
        state: Sequence[str],
        base: Tensor,
        fill: Mapping[int, Stand] | None = None,
        number: int = 0,
    ) -> None:
        """Treat a batch as done without running its settings, so that later batches run alike.

        Args:
            batch: The batch, as in a call.
            state: The ``replay_state`` after the batch.
            base: As in a call.
            fill: As in a call.
            number: As in a call.
        """
        base = in_main_memory([base])[0]
        with exposed(self.bound):
            passes = self._proven(batch, base, fill, number)
        passes.facts.exact = _INEXACT not in state
        self.notes = tuple(note for note in state if note != _INEXACT)

    def _proven(
        self, batch: Any, base: Tensor, fill: Mapping[int, Stand] | None, number: int
    ) -> _Pass:
        """Return the passes of a batch; prove first that its form can be played back, if new."""
        size = batch_size(batch)
        kind = form(batch)
        rows = with_rows(batch, size)
        examples = min(_EXAMPLES, size)
        facts = self._facts.get(kind)
        is_new = facts is None or not facts.rows <= rows or facts.examples < examples
        if facts is None or is_new:
            # A tensor can be as long as one batch by chance. Only what has rows in every batch of
            # this form counts.
            common = rows if facts is None else rows & facts.rows
            facts = ReplayFacts(common, examples)
            self._facts[kind] = facts
        passes = _Pass(self, batch, size, facts, base, dict(fill or {}), number)
        if is_new and self.replay:
            self._guarded(passes, passes.prove)
        return passes

    def _guarded(self, passes: _Pass, run: Callable[[], _T]) -> _T | None:
        """Run a replay; if it fails, note why, fall back to whole passes and return None."""
        try:
            return run()
        # A model that is not made for parts or copies of a batch may raise anything.
        except Exception as error:
            # A loss that is not finite here is not finite in a whole pass either.
            if isinstance(error, InvalidValue) and error.must == "finite":
                raise
            passes.facts.exact = False
            since = f" from batch {passes.number} on" if passes.number else ""
            why = str(error) or type(error).__name__
            note = (
                f"Each setting of the gates took a whole pass{since}: recorded outputs could not be"
                f" reused ({why})"
            )
            self.notes = tuple(dict.fromkeys((*self.notes, note)))
            return None


def _check_now(number: int, losses: Tensor) -> None:
    check_finite([(number, losses)])


@dataclass(eq=False, repr=False)
class _Pass:
    """Passes of one batch under gates."""

    of: CandidateLosses
    batch: Any
    size: int
    facts: ReplayFacts
    base: Tensor  # [heads]
    fill: dict[int, Stand]
    number: int

    # ------------------------------------------------------------- parts and copies of the batch

    def part(self, start: int, stop: int) -> _Pass:
        """Some of its examples."""
        if (start, stop) == (0, self.size):
            return self
        batch = over_rows(self.batch, self.facts.rows, lambda t: t[start:stop])
        fill = dict(self.fill)
        for site, values in self.fill.items():
            if not isinstance(values, Tensor):  # one tensor per example
                fill[site] = values[start:stop]
        return replace(self, batch=batch, size=stop - start, fill=fill)

    def twice(self) -> _Pass:
        """All of its examples, and all again."""
        fill = dict(self.fill)
        for site, values in self.fill.items():
            if not isinstance(values, Tensor):
                fill[site] = values * 2
        return replace(self, batch=self._copied(2), size=2 * self.size, fill=fill)

    def _copied(self, copies: int) -> Any:
        return over_rows(self.batch, self.facts.rows, lambda t: repeated_along(t, copies, 0))

    # ------------------------------------------------------------- the proof

    @full_precision()
    def prove(self) -> None:
        """Show on two examples that replayed losses are those of whole passes.

        Raises:
            CannotReplay: they are not.
        """
        small = self.part(0, self.facts.examples)

        # 1. Record the examples twice over, then once: shapes that differ have an example axis.
        doubled = small.twice().record()
        # At once, because after a loss that is not finite no pass is worth its time.
        check_finite([(self.number, doubled)])
        twice = self._recorded_shapes()
        losses = small.record()
        check_finite([(self.number, losses)])
        once = self._recorded_shapes()

        # 2. Batching changes no loss: not with other examples, not with copies.
        no_settings = losses.new_zeros(0, len(self.base))
        alone = []
        for i in range(small.size):
            _, base_loss = small.part(i, i + 1).naive(no_settings)
            alone.append(base_loss)
        small.compare(losses, torch.cat(alone), "the losses of two examples")
        small.compare(doubled, torch.cat([losses, losses]), "the losses of a batch taken twice")

        # 3. Write down the facts, while the tape holds the two examples.
        self.facts.axes = {}
        for place, shape in twice.items():
            self.facts.axes[place] = batch_axis(once.get(place), shape)
        self._estimate_memory(small.size)

        # 4. Passes from the middle on give the losses of whole passes, for every site.
        small._prove_playing()

    def _estimate_memory(self, n_examples: int) -> None:
        """Store the bytes per example, from a tape of ``n_examples``."""
        distinct: dict[int, Tensor] = {}
        for output in self.of.tape.outputs.values():
            for tensor in tensors(output):
                distinct[tensor.data_ptr()] = tensor
        n_bytes = [t.numel() * t.element_size() // n_examples for t in distinct.values()]
        self.facts.kept = sum(n_bytes)
        self.facts.work = _AT_WORK * max(n_bytes, default=0)
        self.facts.largest = largest_row(self.batch, self.facts.rows)

    def _prove_playing(self) -> None:
        """Compare one played setting per site with a whole pass."""
        played = []
        settings = []
        for number, site in enumerate(self.of.tape.order()):
            # Two settings run as one batch, because one could be wrong because of the other.
            # Sites alternate in which of the two is compared.
            two = self._flipped(site)
            played.append(self._play(site, two)[number % 2])
            settings.append(two[number % 2])
        if settings:
            expected, _ = self.naive(torch.stack(settings))
            got = torch.stack(played)
            self.compare(got, expected.to(got.dtype), "losses from the middle of a pass on")

    def compare(self, got: Tensor, expected: Tensor, what: str, wider: float = 1.0) -> None:
        """Check that two tensors of losses agree.

        Raises:
            InvalidValue: a loss that is not finite, which no other way to run the passes changes.
            CannotReplay: losses that differ.
        """
        gap = 0.0
        if got.numel():
            relative = (got - expected).abs() / expected.abs().clamp(min=1)
            gap = float(relative.max())
        if gap <= wider * _TOLERANCE.get(got.dtype, 1e-2):
            return
        # A NaN gap comes here too.
        for losses in (expected, got):
            check_finite([(self.number, losses.reshape(-1, self.size).amax(0))])
        raise CannotReplay(what, "those of whole passes of each example alone", f"{gap:.1e} off")

    def _flipped(self, site: int) -> Tensor:
        """``[2, heads]``: the base with one head of a site changed, another head in each row."""
        start = sum(self.of.sizes[:site])
        last = start + self.of.sizes[site] - 1
        two = self.base.repeat(2, 1)
        two[0, start] = 1 - two[0, start]
        if last > start:
            two[1, last] = 1 - two[1, last]
        else:  # the only head: the second row gets a gate of 1/2
            two[1, last] = (two[1, last] + two[0, last]) / 2
        return two

    def _recorded_shapes(self) -> dict[tuple[Key, int], tuple[int, ...]]:
        """Shapes of all tensors on the tape."""
        shapes = {}
        for key, output in self.of.tape.outputs.items():
            for i, tensor in enumerate(tensors(output)):
                shapes[key, i] = tuple(tensor.shape)
        return shapes

    # ------------------------------------------------------------- losses of settings

    def checked(self, settings: Tensor) -> tuple[Tensor, Tensor]:
        """Compute losses by ``in_parts``; once, compare one setting with a whole pass.

        The proof ran on two examples. A loss that couples more examples shows only here.

        Raises:
            CannotReplay: the losses differ.
        """
        losses, base = self.in_parts(settings)
        firsts = first_sites(self.of.sizes, self.of.tape.order(), settings, self.base)
        if firsts and not self.facts.compared and self.size > self.facts.examples:
            chosen = crowded(firsts)
            whole = self._run(settings[chosen])
            self.compare(losses[chosen], whole, "losses of a whole batch", _WIDER)
            self.facts.compared = True
        return losses, base

    def in_parts(self, settings: Tensor) -> tuple[Tensor, Tensor]:
        """Replay the settings on as many examples at once as the memory allows."""
        facts = self.facts
        # Attention maps grow with the square of the length.
        longer = max(1.0, largest_row(self.batch, facts.rows) / facts.largest)
        growth = longer**2
        rows = int(self.of.max_bytes / max(1.0, growth * (facts.kept + facts.work)))
        rows = max(1, min(self.size, rows))
        room = int(self.of.max_bytes / max(1.0, growth * facts.work * rows))
        losses = []
        base = []
        for start in range(0, self.size, rows):
            part = self.part(start, min(start + rows, self.size))
            of_settings, of_base = part.replayed(settings, max(1, room))
            losses.append(of_settings)
            base.append(of_base)
        return torch.cat(losses, 1), torch.cat(base)

    def naive(self, settings: Tensor) -> tuple[Tensor, Tensor]:
        """Run a whole pass for every setting."""
        base = self._run(self.base)
        rows = list(map(self._run, settings))
        if not rows:
            return base.new_zeros(0, self.size), base
        return torch.stack(rows), base

    def record(self) -> Tensor:
        """Record the base pass and return its losses, ``[batch]``."""
        run = functools.partial(self._losses, self.batch)
        losses: Tensor = self.of.tape.record(run, self._caller(self.base[None], 1))
        return losses

    def replayed(self, settings: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Run only what each setting changes, up to ``room`` settings at once."""
        base = self.record()
        tape = self.of.tape
        # A setting that changes no gate has the losses of the base.
        losses = base.expand(len(settings), -1).clone()
        firsts = first_sites(self.of.sizes, tape.order(), settings, self.base)
        for site, group in groupby(firsts, key=lambda first: first[0]):
            places = [index for _, index in group]
            context = tape.gates[site].given[0]  # [batch, tokens, heads * width]
            tokens = max(1, context.numel() // context.shape[-1])
            enough = _TOKENS.get(context.device.type, _TOKENS_ELSEWHERE)
            width = max(1, min(-(-enough // tokens), room))  # settings per pass, rounded up
            for start in range(0, len(places), width):
                chosen = places[start : start + width]
                played = self._play(site, settings[chosen]).to(losses.dtype)
                losses.index_copy_(0, sent(chosen, losses.device), played)
        return losses, base

    def _play(self, site: int, settings: Tensor) -> Tensor:
        """Play settings that all differ from the base first at ``site``: ``[settings, batch]``."""
        copies = len(settings)
        axes = self.facts.axes
        tape = self.of.tape

        def repeat(key: Key, tensor: Tensor) -> Tensor:
            places = [i for i, t in enumerate(tensors(tape.outputs[key])) if t is tensor]
            if (key, places[0]) not in axes:
                raise CannotReplay("a call", "made for the first examples too", "a new one")
            axis = axes[key, places[0]]
            copied = tensor if axis is None else repeated_along(tensor, copies, axis)
            if copied is tensor and key in tape.mutable:
                # The model changes it in place, and the tape must keep it.
                return copied.clone()
            return copied

        caller = self._caller(settings, copies)
        changed = functools.partial(self._changed, site, settings, caller)
        run = functools.partial(self._losses, self._copied(copies))
        losses: Tensor = tape.play(run, site, changed, caller, repeat)
        return losses.view(copies, self.size)

    def _losses(self, batch: Any) -> Tensor:
        return shaped_losses(self.of.loss, self.of.model, batch, self.number)

    def _run(self, gates: Tensor) -> Tensor:
        run = functools.partial(self._losses, self.batch)
        losses: Tensor = self.of.tape.run(run, self._caller(gates[None], 1))
        return losses

    # ------------------------------------------------------------- calls of gates

    def _caller(self, settings: Tensor, copies: int) -> Callable[..., Any]:
        """Make the function that calls a gate under ``settings [copies, heads]``."""
        rows = settings.split(self.of.sizes, 1)
        changed = (settings != 1).any(0).tolist()
        closed = [any(heads) for heads in by_site(changed, self.of.sizes)]

        def call(site: int, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not closed[site]:
                return original(*args, **kwargs)
            bound = self.of.bound[site]
            gates = sent(rows[site], device_of(bound.module))  # [copies, heads]
            if copies > 1:  # one row per example
                gate = spread(gates.repeat_interleave(self.size, 0), bound)
            else:
                gate = spread(gates[0], bound)
            if not bound.layout.gate:
                return output_gated(original(*args, **kwargs), gate, bound, self.fill.get(site))
            context = first_input(args, bound.site.name)
            given = multiplied(context, [gate])
            if site in self.fill:
                given = given + multiplied(self._filled(site, context, copies), [1 - gate])
            return original(given, *args[1:], **kwargs)

        return call

    def _filled(self, site: int, context: Tensor, copies: int) -> Tensor:
        """Return the values that replace closed heads, in the shape of the context."""
        fill = self.fill[site]
        if isinstance(fill, Tensor):
            return fill.to(context).expand_as(context)
        return repeated_along(torch.stack(fill).to(context), copies, 0)

    def _changed(
        self, site: int, settings: Tensor, caller: Callable[..., Any], call: GateCall
    ) -> Tensor:
        """Return the output projection's output under each setting, one copy after the other."""
        copies = len(settings)
        bound = self.of.bound[site]
        context = repeated_along(call.given[0], copies, bound.layout.batch_axis)
        projection = bound.gate.__dict__["forward"].__wrapped__
        output: Tensor = caller(site, projection, (context, *call.given[1:]), {})
        return output
