"""Caches what one pass of model and teacher found, so that the many passes after it do less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from headprune.model.masks import Visible
from headprune.model.running import digest_of

#: Positions that attention hid in a call: ``stream`` of its padding info.
HiddenPositions: TypeAlias = tuple[Visible, ...]
#: By target the tensors of its calls on a batch.
_ByTarget: TypeAlias = dict[int, list[Tensor]]


class TeacherCache:
    """The teacher's streams after each target, and how often each target runs, by batch.

    A batch is known by its contents, not by its position: a loader may shuffle. Streams and
    sensitivities that do not fit are not kept; the teacher runs again for them.

    Args:
        room: Bytes that streams and sensitivities may take.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        #: By target the mean sensitivity of a token; empty if none were measured.
        self.mean_sensitivities: list[Tensor] = []
        # By batch; none has the key None.
        self._n_calls: dict[str | None, list[int]] = {}
        self._hidden: dict[str | None, list[list[HiddenPositions]]] = {}
        self._streams: dict[str | None, _ByTarget] = {}
        self._sensitivities: dict[str | None, _ByTarget] = {}

    def learn(
        self,
        key: str | None,
        streams: Sequence[list[Tensor]],
        hidden: Sequence[list[HiddenPositions]] = (),
        sensitivities: Sequence[list[Tensor]] = (),
    ) -> None:
        """Keep what was found on a batch, as far as there is room.

        Args:
            key: The batch's; None keeps nothing.
            streams: By target the streams after its calls.
            hidden: By target the positions that attention hid at its calls.
            sensitivities: By target those of its calls.
        """
        # A batch may come twice in one pass.
        if key is None or key in self._n_calls:
            return
        self._n_calls[key] = list(map(len, streams))
        self._hidden[key] = list(hidden)
        # Sensitivities come first: they take longer to compute and less room.
        self._sensitivities[key] = self._with_room(sensitivities)
        self._streams[key] = self._with_room(streams)

    def _with_room(self, by_target: Sequence[list[Tensor]]) -> _ByTarget:
        kept = {}
        for number, of_target in enumerate(by_target):
            size = sum(tensor.nbytes for tensor in of_target)
            if size <= self.room:
                self.room -= size
                kept[number] = of_target
        return kept

    def calls(self, key: str | None, number: int) -> int | None:
        """Return how often a target runs on a batch; None if that is not known."""
        return self._n_calls[key][number] if key in self._n_calls else None

    def streams(self, key: str | None, number: int) -> list[Tensor] | None:
        """Return the teacher's streams after a target's calls; None if they were not kept."""
        return self._streams.get(key, {}).get(number)

    def hidden(self, key: str | None, number: int) -> list[HiddenPositions]:
        """Return what the teacher's attention hid at a target's calls.

        Only for a batch whose streams are kept.
        """
        return self._hidden[key][number]

    def sensitivities(self, key: str | None, number: int) -> list[Tensor] | None:
        """Return the sensitivities at a target's calls; None if they were not kept."""
        return self._sensitivities.get(key, {}).get(number)

    def mean_sensitivity(self, number: int) -> Tensor | None:
        """Return a target's mean sensitivity over all tokens; None if none were measured."""
        return self.mean_sensitivities[number] if self.mean_sensitivities else None

    def forget(self, number: int) -> None:
        """Free the memory of a target that is done."""
        for of_batch in (*self._streams.values(), *self._sensitivities.values()):
            of_batch.pop(number, None)


def key_of(batch: Any) -> str | None:
    """Return a batch's fingerprint; None if it holds more than tensors and plain values."""
    try:
        plain_values = _plain_values(batch)
    except TypeError:
        # Such objects may change what a model returns, and have no contents to compare.
        return None
    return f"{digest_of(batch)} {plain_values}"


def _plain_values(value: Any) -> str:
    """Write all of a batch except its tensors as text."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        items = (f"{name!r}: {_plain_values(item)}" for name, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain_values, value))})"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    raise TypeError(type(value).__name__)
