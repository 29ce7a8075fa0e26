"""What settings of gates change, decided on the CPU, what their losses and recorded tensors have in
common, and what is known of batches of one form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from headprune.gating.rows import Path
from headprune.gating.tape import CannotReplay, Key
from headprune.model.transfers import in_main_memory


@dataclass
class Known:
    """What the proof found out about batches of one form.

    Args:
        rows: Their tensors that have a row for every example.
        examples: Examples that the proof ran on.
        axes: The axis of every tensor on the tape that holds examples, None where none does.
        kept: Bytes of an example on the tape.
        work: Bytes of an example that a pass holds at once, about.
        largest: Numbers of an example in its largest tensor.
        exact: Whether playing back is.
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
    """Settings, and the base, which are ones by default."""
    base = settings.new_ones(settings.shape[-1]) if base is None else base
    settings, base = in_main_memory([settings, base])
    return settings, base


def worst(losses: Tensor, base: Tensor) -> Tensor:
    """``[batch]``: of each example one of its losses, one that is not finite if there is such a
    one."""
    every = torch.cat([base[None], losses])
    highest = every.amax(0)
    return torch.where(highest.isfinite(), every.amin(0), highest)


def first_sites(
    sizes: Sequence[int], order: Sequence[int], settings: Tensor, base: Tensor
) -> list[tuple[int, int]]:
    """``(site, setting)`` for every setting that changes a gate that is called, by the first such
    gate."""
    rows = [list(map(any, by_site(row, sizes))) for row in (settings != base).tolist()]
    places = [next((p for p, site in enumerate(order) if changed[site]), None) for changed in rows]
    found = sorted((place, setting) for setting, place in enumerate(places) if place is not None)
    return [(order[place], setting) for place, setting in found]


def crowded(firsts: Sequence[tuple[int, int]]) -> int:
    """A setting of the site with the most of ``first_sites``, whose settings run as the largest
    batch."""
    counts = Counter(site for site, _ in firsts)
    most = max(counts.values())
    return next(setting for site, setting in firsts if counts[site] == most)


def by_site(values: list[bool], sizes: Sequence[int]) -> list[list[bool]]:
    """One value a head, site after site, as a list a site."""
    rest = iter(values)
    return [list(islice(rest, size)) for size in sizes]


def batch_axis(once: tuple[int, ...] | None, twice: tuple[int, ...]) -> int | None:
    """The axis that is twice as long for a batch twice as large, None where none is."""
    if once == twice:
        return None
    if once is None or len(once) != len(twice):
        raise CannotReplay(
            "a recorded tensor", "one a call, whatever the batch", f"{once} and {twice}"
        )
    differ = [axis for axis, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
    if len(differ) != 1 or twice[differ[0]] != 2 * once[differ[0]]:
        raise CannotReplay(
            "a recorded tensor", "longer on one axis for more examples", f"{once} and {twice}"
        )
    return differ[0]
