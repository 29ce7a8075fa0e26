"""The user's batches, read pass by pass; the first can be looked at without losing it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from headprune.core.errors import InvalidValue

_HINT = "Pass list(batches), or a DataLoader of a dataset that can be read again."


class Batches:
    """An iterable of batches whose first batch can be looked at before it is read.

    An iterable that can be read only once need not be an iterator: a tqdm of a generator or a
    DataLoader of a stream makes a new iterator at each call of ``iter``, and all of them read from
    one source. So a look at the first batch begins a pass, and the next pass continues it. A pass
    without batches after one with batches is refused.

    Args:
        source: What the user gave.

    Attributes:
        now: The number and the batch that was handed out last; None between batches.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        if isinstance(source, (Mapping, str)):
            got = f"a single {type(source).__name__}"
            hint = "Wrap a single batch in a list: [batch]."
            raise InvalidValue("batches", "an iterable of batches", got, hint)
        self.source = source
        self.now: tuple[int, Any] | None = None
        # The first batch of a pass that a look began, and the rest of it.
        self._begun: tuple[Any, Iterator[Any]] | None = None
        self._had_batches = False  # in any pass

    @classmethod
    def of(cls, batches: Iterable[Any]) -> Batches:
        """Wrap batches, unless they are ``Batches`` already and know what was read before."""
        return batches if isinstance(batches, cls) else cls(batches)

    @property
    def only_once(self) -> bool:
        """Whether they are known to be readable only once, without reading them."""
        return isinstance(self.source, Iterator)

    def keep(self) -> None:
        """Put the batches of an iterator into a list, so that they can be read more than once."""
        if self.only_once:
            self.source, self._begun = list(self), None

    def restart(self) -> None:
        """Forget a pass that a look began, so that the next one draws its own order."""
        self._had_batches = self._had_batches or self._begun is not None
        self._begun = None

    def first(self) -> Any:
        """Look at the first batch of the next pass, which will still return it.

        Raises:
            InvalidValue: there is none, or there are none left.
        """
        if self._begun is None:
            iterator = iter(self.source)
            for batch in iterator:
                check_examples(self.source, batch)
                self._begun = batch, iterator
                break
            else:
                raise self._read_before() if self._had_batches else InvalidValue(*EMPTY)
        batch, _ = self._begun
        self.now = 0, batch
        return batch

    def again(self) -> bool:
        """Whether another pass has batches."""
        # To look would start the only pass.
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
            InvalidValue: an earlier pass had batches, and there are none left.
        """
        source: Iterable[Any] = self.source
        if self._begun is not None:
            first, rest = self._begun
            source = chain([first], rest)
        self._begun = None
        self.now = None
        number = -1
        for number, batch in enumerate(iter(source)):
            self._had_batches = True
            if number == 0:
                check_examples(self.source, batch)
            self.now = number, batch
            yield batch
            self.now = None  # an error while the next batch is made is not about this one
        if number < 0 and self._had_batches:
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
    """Refuse a dataset, which gives single examples, in the place of a loader of batches.

    Raises:
        InvalidValue: the first batch is an example: it has a number without an axis, or tokens with
            a single axis.
    """
    values: dict[Any, Any] = {}
    if isinstance(first, Mapping):
        values = dict(first)
    elif type(first) in (tuple, list):
        values = dict(enumerate(first))
    if not values or not _is_dataset(source):
        return
    if any(_is_of_one_example(name, value) for name, value in values.items()):
        must = "a batch of examples, as a DataLoader gives them"
        got = f"a single example of a {type(source).__name__}"
        hint = (
            "Pass torch.utils.data.DataLoader(dataset, batch_size=32); where examples differ in"
            " length, a collate_fn."
        )
        raise InvalidValue("batch 0", must, got, hint)


def _is_dataset(source: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(source, Dataset) or type(source).__module__.partition(".")[0] == "datasets"


def _is_of_one_example(name: Any, value: Any) -> bool:
    """Whether a value has no axis for the examples."""
    if isinstance(value, bool):  # a switch of the model's, such as use_cache
        return False
    if isinstance(value, Tensor):
        return value.ndim == 0 or (value.ndim == 1 and str(name).endswith("input_ids"))
    if isinstance(value, list):
        return all(isinstance(x, int) for x in value)
    return isinstance(value, (int, float, str))


#: Arguments of the error for batches of which there are none.
EMPTY = ("batches", "at least one batch", "an empty iterable")
