"""Which gates a setting changes, decided on the CPU, and facts about batches of one form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headprune.core.units import by_site
from headprune.gating.rows import Path
from headprune.gating.tape import CannotReplay, Key
from headprune.model.transfers import in_main_memory


@dataclass
class ReplayFacts:
    """Results of the proof for batches of one form.

    Args:
        rows: Paths of the tensors that have a row for every example.
        examples: Examples that the proof ran on.
        axes: The example axis of every tensor on the tape; None where it has none.
        kept: Bytes per example on the tape.
        work: Bytes per example that a pass holds at once, an estimate.
        largest: Numbers per example in the largest tensor of the batch.
        exact: Whether played passes have the losses of whole passes.
        compared: Whether a setting of a whole batch was compared with a whole pass.
    """

    rows: frozenset[Path]
    examples: int
    axes: dict[tuple[Key, int], int | None] = field(default_factory=dict)
    kept: int = 0
    work: int = 0
    largest: int = 1
    exact: bool = True
    compared: bool = False


def on_cpu(settings: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return settings and base on the CPU; the base is ones by default."""
    if base is None:
        base = settings.new_ones(settings.shape[-1])
    settings, base = in_main_memory([settings, base])
    return settings, base


def worst(losses: Tensor, base: Tensor) -> Tensor:
    """Return one loss per example, ``[batch]``: one that is not finite if there is any."""
    every = torch.cat([base[None], losses])
    highest = every.amax(0)
    # The highest is NaN or inf where any loss is; only -inf needs the lowest.
    return torch.where(highest.isfinite(), every.amin(0), highest)


def first_sites(
    sizes: Sequence[int], order: Sequence[int], settings: Tensor, base: Tensor
) -> list[tuple[int, int]]:
    """Return ``(site, setting)`` sorted by the first called gate that each setting changes.

    Settings that change no called gate are not in it.
    """
    first = []  # (place in the order of calls, setting)
    for setting, row in enumerate((settings != base).tolist()):
        changed = [any(heads) for heads in by_site(row, sizes)]
        places = [place for place, site in enumerate(order) if changed[site]]
        if places:
            first.append((places[0], setting))
    return [(order[place], setting) for place, setting in sorted(first)]


def crowded(firsts: Sequence[tuple[int, int]]) -> int:
    """Return a setting of the site that most settings change first: it has the largest batch."""
    counts = Counter(site for site, _ in firsts)
    most = max(counts.values())
    return next(setting for site, setting in firsts if counts[site] == most)


def batch_axis(once: tuple[int, ...] | None, twice: tuple[int, ...]) -> int | None:
    """Return the axis that is twice as long for a batch twice as large, or None."""
    if once == twice:
        return None
    shapes = f"{once} and {twice}"
    if once is None or len(once) != len(twice):
        must = "one per call, whatever the batch"
        raise CannotReplay("a recorded tensor", must, shapes)
    differ = [axis for axis in range(len(once)) if once[axis] != twice[axis]]
    if len(differ) != 1 or twice[differ[0]] != 2 * once[differ[0]]:
        must = "longer on one axis for more examples"
        raise CannotReplay("a recorded tensor", must, shapes)
    return differ[0]
