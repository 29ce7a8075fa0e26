"""Passes over the batches of a call, which must be the same batches in every pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headprune.core.bars import bar
from headprune.core.errors import InvalidValue
from headprune.model.batches import EMPTY, Batches
from headprune.model.mistakes import refuse_caches
from headprune.model.running import DataDigest, batch_size
from headprune.scoring._checks import DeferredChecks

#: Bytes of a short digest (``DataDigest.short``).
_SHORT = 8


class BatchReader:
    """Read the batches of a call, pass by pass, and refuse passes that differ.

    Args:
        batches: The batches; None where no scorer needs any.
        checks: Run where a pass ends.
        progress: Show a bar; None shows it on a terminal only.
        before: Batches of the user's that came before these, which are numbered after them.
    """

    def __init__(
        self,
        batches: Batches | None,
        checks: DeferredChecks,
        progress: bool | None = None,
        before: int = 0,
    ) -> None:
        self.batches = batches
        self.before = before
        #: The batch of the pass that runs, as the user gave it.
        self.given: Any = None
        #: The first batch of a pass, as the user gave it.
        self.first: Any = None
        #: Digest of all batches of this pass so far.
        self.mark = ""
        #: Digest and number of examples of the last whole pass.
        self.data: str | None = None
        self.examples = 0
        self._checks = checks
        self._progress = progress
        # The short digests of a whole pass, one after the other.
        self._order: bytes | None = None

    def read(self, what: str) -> Iterator[tuple[int, Any]]:
        """Yield ``(number, batch as the user gave it)`` for one pass.

        Args:
            what: What the pass is for; shown at the progress bar and in errors.

        Raises:
            InvalidValue: no data, no batch, other batches than in an earlier pass, or a failed
                check.
        """
        if self.batches is None:
            raise InvalidValue("batches", f"given, because {what} needs data", None)
        self._checks.begin_pass()
        digest = DataDigest()
        # The digest of all batches so far, after each batch. Bytes, because there may be millions.
        order = bytearray()
        examples = 0

        # 1. Hand out every batch.
        for number, batch in enumerate(bar(self.batches, what, self._progress), self.before):
            examples += batch_size(batch, f"batch {number}")
            refuse_caches(batch, number)
            if number == self.before:
                self.first = batch
            digest.add(batch)
            order += digest.short()
            self.mark = order[-_SHORT:].hex()
            if self._differs(order):
                raise _other_batches(what, f"others from batch {number} on")
            yield number, batch

        # 2. Check the whole pass.
        self._checks.run()
        if not order:
            raise InvalidValue(*EMPTY)
        if self._order is not None and len(order) < len(self._order):
            got = f"{len(order) // _SHORT} batches after {len(self._order) // _SHORT}"
            raise _other_batches(what, got)

        # 3. Remember it for the next pass.
        self.data = digest.hexdigest()
        self.examples = examples
        self._order = bytes(order)

    def _differs(self, order: bytearray) -> bool:
        """Whether the last batch is another one than in the earlier pass."""
        if self._order is None:
            return False
        return self._order[len(order) - _SHORT : len(order)] != order[-_SHORT:]


def _other_batches(what: str, got: str) -> InvalidValue:
    # Rows of one example would be combined with those of another.
    hint = "Pass a list, or a DataLoader that does not shuffle or augment."
    must = "the same in every pass, in the same order"
    return InvalidValue("batches", must, f"{got} in the pass for {what}", hint)
