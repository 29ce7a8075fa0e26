"""An endless stream of batches from a loader that can continue in the middle of a pass."""

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
    """The user's batches, pass after pass.

    It has no length, so the Trainer sees one long epoch, and passes are counted here. A training
    that continues in the middle of a pass draws that pass's order again and skips the batches that
    were taken.

    Args:
        batches: The loader.
        length: Batches per pass.
        watched: Whether to keep what it takes to continue, see ``state``.
    """

    def __init__(self, batches: Iterable[Any], length: int, watched: bool) -> None:
        self.batches = Batches.of(batches)
        self.length = length
        self.watched = watched
        self.generators = generators_of(self.batches.source)
        self.taken = 0  # batches of this pass
        self.first = ""  # digest of the pass's first batch
        self.begun: dict[str, Any] | None = None  # random states at the beginning of the pass
        self.saved: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # The rest of the pass that the checkpoint interrupted.
        if self.saved is not None:
            batches = self.past(self.saved)
            self.first = self.saved["first"]
            yield from self._in_mappings(batches, self.saved["taken"])
        while True:
            if self.watched:
                self.begun = random_states(self.generators)
            yield from self._in_mappings(iter(self.batches), 0)

    def state(self) -> dict[str, Any]:
        """Return the position in the pass, for ``continue_from``."""
        now = random_states(self.generators)
        return {"taken": self.taken, "first": self.first, "begun": self.begun, "now": now}

    def continue_from(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at this position, with the random states of then."""
        self.saved = state

    def past(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Skip the batches that were taken when ``state`` was called.

        Returns:
            The rest of that pass, with the random states of then.

        Raises:
            CheckpointError: the batches are not those of the checkpoint.
        """
        # The random states at the beginning of the pass draw its order again.
        self.begun = saved["begun"]
        set_random_states(saved["begun"], self.generators)
        batches = iter(self.batches)
        for number, batch in enumerate(islice(batches, saved["taken"])):
            # The first batch shows whether data and order are the same.
            if number == 0 and digest_of(batch) != saved["first"]:
                must = "the ones that the checkpoint's training had, in the same order"
                hint = "Give another folder for another training."
                raise CheckpointError("batches", must, "others", hint)
        set_random_states(saved["now"], self.generators)
        return batches

    def _in_mappings(self, batches: Iterator[Any], taken: int) -> Iterator[dict[str, Any]]:
        """Yield the rest of a pass, each batch in a mapping.

        The Trainer asks every batch for its labels, which needs a mapping.
        """
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
    """Return the generators that a DataLoader itself holds; they outlive a pass."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None)
    inner_sampler = getattr(batch_sampler, "sampler", None)
    generators = {}
    for holder in (loader, sampler, batch_sampler, inner_sampler):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generators[id(generator)] = generator
    return list(generators.values())
