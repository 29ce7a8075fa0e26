"""Batches without end out of a loader, pass after pass, which can begin again in the middle of a
pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from headprune.core.errors import CheckpointError, InvalidValue
from headprune.model.batches import Batches
from headprune.model.running import digest_of
from headprune.recovery._traces import random_states, set_random_states


class Stream:
    """The user's batches, pass after pass; each in a mapping, because the Trainer asks every batch
    for its labels.

    It has no length, so the Trainer sees one long epoch, and passes are counted here: a training
    that goes on in the middle of a pass draws that pass's order again and reads past what it has
    seen.

    Args:
        batches: The loader.
        length: Batches a pass.
        watched: Keep what it takes to continue, see ``state``.
    """

    def __init__(self, batches: Iterable[Any], length: int, watched: bool) -> None:
        self.batches, self.length, self.watched = Batches.of(batches), length, watched
        self.generators = generators_of(self.batches.source)
        self.taken = 0
        self.first = ""
        self.begun: dict[str, Any] | None = None
        self.saved: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.saved is not None:
            yield from self._rest(self.saved)
        while True:
            if self.watched:
                self.begun = random_states(self.generators)
            yield from self._handed(iter(self.batches), 0)

    def state(self) -> dict[str, Any]:
        """Where it stands: what ``continue_from`` needs."""
        now = random_states(self.generators)
        return {"taken": self.taken, "first": self.first, "begun": self.begun, "now": now}

    def continue_from(self, state: dict[str, Any]) -> None:
        """The next iteration begins there, with the random states that were there."""
        self.saved = state

    def _rest(self, saved: dict[str, Any]) -> Iterator[dict[str, Any]]:
        batches = self.past(saved)
        self.first = saved["first"]
        yield from self._handed(batches, saved["taken"])

    def past(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Reads past what was taken when ``state`` said so: what is left of that pass, with the
        random states of then.

        Raises:
            CheckpointError: the batches are others.
        """
        self.begun = saved["begun"]
        set_random_states(saved["begun"], self.generators)
        batches = iter(self.batches)
        for number, batch in enumerate(islice(batches, saved["taken"])):
            if number == 0 and digest_of(batch) != saved["first"]:
                must = "the ones that the checkpoint's training had, in the same order"
                raise CheckpointError(
                    "batches", must, "others", "Give another folder for another training."
                )
        set_random_states(saved["now"], self.generators)
        return batches

    def _handed(self, batches: Iterator[Any], taken: int) -> Iterator[dict[str, Any]]:
        self.taken = taken
        for batch in islice(batches, self.length - taken):
            if self.watched and self.taken == 0:
                self.first = digest_of(batch)
            self.taken += 1
            yield {"batch": batch}
        if self.taken < self.length:
            must = f"as many as len() says, {self.length}, in every pass"
            raise InvalidValue("batches", must, f"{self.taken} in one")


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of a DataLoader's own, which outlive a pass."""
    batched = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batched, getattr(batched, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
