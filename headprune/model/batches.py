"""The user's batches, read pass by pass: no peek loses a batch, and what can be read only once is
found out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from headprune.core.errors import InvalidValue

_HINT = "Pass list(batches), or a DataLoader of a dataset that can be read again."


class Batches:
    """An iterable of batches that may be looked into before it is read.

    An iterable that can be read only once need not be an iterator: a tqdm of a generator or a
    DataLoader of a stream makes a new iterator at each call of ``iter``, and all of them read from
    one source. So a look at the first batch begins a pass, and the next pass goes on with it. A
    pass that finds nothing after one that did is refused.

    Args:
        source: What the user gave.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        if isinstance(source, (Mapping, str)):
            hint = "Wrap a single batch in a list: [batch]."
            raise InvalidValue(
                "batches", "an iterable of batches", f"a single {type(source).__name__}", hint
            )
        self.source = source
        self.now: tuple[int, Any] | None = (
            None  # the number and the batch that was handed out last, until another is
        )
        self._begun: tuple[Any, Iterator[Any]] | None = (
            None  # the first batch of a pass, and the rest of it
        )
        self._seen = False  # whether any pass gave a batch

    @classmethod
    def of(cls, batches: Iterable[Any]) -> Batches:
        """The batches themselves where they are ``Batches``, which know what was read of them
        before."""
        return batches if isinstance(batches, cls) else cls(batches)

    @property
    def only_once(self) -> bool:
        """Whether they are known to be readable only once, without reading them."""
        return isinstance(self.source, Iterator)

    def keep(self) -> None:
        """Puts the batches of an iterator into a list, so that they can be read more than once."""
        if self.only_once:
            self.source, self._begun = list(self), None

    def restart(self) -> None:
        """Forgets a pass that a look began, so that the next one draws its own order."""
        self._seen = self._seen or self._begun is not None
        self._begun = None

    def first(self) -> Any:
        """The first batch of the next pass, which still gives it.

        Raises:
            InvalidValue: there is none, or there is none any more.
        """
        if self._begun is None:
            iterator = iter(self.source)
            for batch in iterator:
                check_examples(self.source, batch)
                self._begun = batch, iterator
                break
            else:
                raise self._read_before() if self._seen else InvalidValue(*EMPTY)
        self.now = 0, self._begun[0]
        return self._begun[0]

    def again(self) -> bool:
        """Whether another pass has batches."""
        if self.only_once and self._begun is None:
            return False
        try:
            self.first()
        except InvalidValue:
            return False
        return True

    def __iter__(self) -> Iterator[Any]:
        """One pass; without batches it ends at once, unless an earlier one had some.

        Raises:
            InvalidValue: an earlier pass had batches, and there are none any more.
        """
        begun, self._begun = self._begun, None
        self.now, number = None, -1
        for number, batch in enumerate(
            iter(self.source) if begun is None else chain([begun[0]], begun[1])
        ):
            self._seen = True
            if number == 0:
                check_examples(self.source, batch)
            self.now = number, batch
            yield batch
            self.now = None  # an error while the next one is made is none of this one's
        if number < 0 and self._seen:
            raise self._read_before()

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __length_hint__(self) -> int:
        return operator.length_hint(self.source)

    def _read_before(self) -> InvalidValue:
        got = (
            f"a {type(self.source).__name__} whose batches were read before, and which has none any"
            " more"
        )
        return InvalidValue("batches", "readable more than once", got, _HINT)


def check_examples(source: Any, first: Any) -> None:
    """Refuses a dataset, which gives single examples, in the place of a loader, which gives
    batches.

    Raises:
        InvalidValue: the first batch is an example: it has a number without an axis, or tokens with
            one alone.
    """
    named = (
        dict(first)
        if isinstance(first, Mapping)
        else dict(enumerate(first))
        if type(first) in _ROWS
        else {}
    )
    if named and _is_dataset(source) and any(_of_one(name, value) for name, value in named.items()):
        hint = (
            "Pass torch.utils.data.DataLoader(dataset, batch_size=32); where examples differ in"
            " length, a collate_fn."
        )
        got = f"a single example of a {type(source).__name__}"
        raise InvalidValue("batch 0", "a batch of examples, as a DataLoader gives them", got, hint)


_ROWS = (tuple, list)


def _is_dataset(source: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(source, Dataset) or type(source).__module__.partition(".")[0] == "datasets"


def _of_one(name: Any, value: Any) -> bool:
    if isinstance(value, bool):  # a switch of the model's, such as use_cache
        return False
    if not isinstance(value, Tensor):
        return isinstance(value, (int, float, str)) or (
            isinstance(value, list) and all(isinstance(x, int) for x in value)
        )
    return value.ndim == 0 or (value.ndim == 1 and str(name).endswith("input_ids"))


#: Where, what must be and what was found where there is no batch at all.
EMPTY = ("batches", "at least one batch", "an empty iterable")
