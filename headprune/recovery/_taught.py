"""What one pass of model and teacher over all batches found out, so that the many passes after it
do less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from headprune.model.masks import Visible
from headprune.model.running import digest_of

#: ``PaddingInfo.stream`` of a call.
Hidden: TypeAlias = tuple[Visible, ...]


class Taught:
    """The teacher's streams after each target, and how often each target runs, by batch.

    A batch is known by its contents, not by its place: a loader may shuffle. Streams, and how much
    the teacher's output feels their tokens, are not kept where there is no room, and the teacher
    runs again for them.

    Args:
        room: Bytes that they may take.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._calls: dict[str, list[int]] = {}
        self._streams: dict[int, dict[str, list[Tensor]]] = {}
        self._hidden: dict[str, list[list[Hidden]]] = {}
        self._felt: dict[int, dict[str, list[Tensor]]] = {}
        self.felt_means: list[
            Tensor
        ] = []  # by target: of how much a token is felt, over all tokens

    def learn(
        self,
        key: str | None,
        streams: Sequence[list[Tensor]],
        hidden: Sequence[list[Hidden]] = (),
        felt: Sequence[list[Tensor]] = (),
    ) -> None:
        """Notes the streams of a batch, for every target those of its calls, what attention hid at
        them, and how much the output feels their tokens, which takes longer to find and less
        room."""
        if key is None or key in self._calls:
            return
        self._calls[key] = [len(of_target) for of_target in streams]
        self._hidden[key] = list(hidden)
        for kept, found in ((self._felt, felt), (self._streams, streams)):
            for number, of_target in enumerate(found):
                size = sum(tensor.nbytes for tensor in of_target)
                if size <= self.room:
                    self.room -= size
                    kept.setdefault(number, {})[key] = of_target

    def calls(self, key: str | None, number: int) -> int | None:
        """How often a target runs on a batch; None where that is not known."""
        known = self._calls.get(key) if key is not None else None
        return None if known is None else known[number]

    def streams(self, key: str | None, number: int) -> list[Tensor] | None:
        """The teacher's streams after a target's calls; None where they were not kept."""
        return self._streams.get(number, {}).get(key) if key is not None else None

    def hidden(self, key: str | None, number: int) -> list[Hidden]:
        """What the teacher's attention hid at a target's calls on a batch whose streams are
        kept."""
        return self._hidden[key or ""][number]

    def felt(self, key: str | None, number: int) -> list[Tensor] | None:
        """How much the teacher's output feels the tokens of a target's calls; None where that was
        not kept."""
        return self._felt.get(number, {}).get(key) if key is not None else None

    def felt_mean(self, number: int) -> Tensor | None:
        """How much a token of a target is felt, over all tokens; None where that was not asked."""
        return self.felt_means[number] if self.felt_means else None

    def forget(self, number: int) -> None:
        """A target is done."""
        self._streams.pop(number, None)
        self._felt.pop(number, None)


def key_of(batch: Any) -> str | None:
    """A batch's fingerprint; None for one that holds more than tensors and plain values."""
    try:
        words = _words(batch)
    except TypeError:
        return None
    return f"{digest_of(batch)} {words}"


def _words(value: Any) -> str:
    """All of a batch but the tensors."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k!r}: {_words(v)}' for k, v in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_words, value))})"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    raise TypeError(type(value).__name__)
