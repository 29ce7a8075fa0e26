"""Assign rows to train, validation, test and calibration, without overlap."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headprune.core.errors import InvalidValue


@dataclass(frozen=True)
class Part:
    """The rows of one purpose.

    Args:
        source: The split that they come from.
        rows: Their numbers there.
        dropped: Rows that were dropped because a split with precedence has the same input.
        duplicates: Rows that repeat an earlier row of this same part; they are kept.
    """

    source: str
    rows: tuple[int, ...]
    dropped: int = 0
    duplicates: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 of the split's name and the row numbers, in order."""
        text = f"{self.source}:" + ",".join(map(str, self.rows))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """Counts and digest, for the record."""
        return {
            "rows": len(self.rows),
            "from": self.source,
            "dropped": self.dropped,
            "duplicates": self.duplicates,
            "digest": self.digest,
        }


def normalised(text: str) -> str:
    """Return text as it is compared between splits: no case, single blanks.

    >>> normalised("  Who  is\\tSHE ?")
    'who is she ?'
    """
    return " ".join(text.split()).casefold()


def partition(
    keys: Mapping[str, Sequence[str]],
    strata: Sequence[Any] | None,
    holdout: int | float,
    test_holdout: int | float,
    calibration: int,
    seed: int,
) -> dict[str, Part]:
    """Assign rows to train, validation, test and calibration.

    Test rows are used as given. Validation loses rows that are in test; train loses rows that are
    in either. A split that the data lacks is drawn from train first. Calibration rows are a seeded
    subset of train.

    Args:
        keys: Each row's input as text, by split: ``train`` and, where the data has them,
            ``validation`` and ``test``.
        strata: Labels of the train rows, for draws that keep their proportions; None draws freely.
        holdout: Rows, or fraction of train, for validation.
        test_holdout: The same for test.
        calibration: Rows for calibration, at most.
        seed: Seed of every draw.

    Raises:
        InvalidValue: a part without rows.
    """
    of_train = keys["train"]
    train = list(range(len(of_train)))
    # 1. Test rows: given, or drawn.
    if "test" in keys:
        test = Part("test", tuple(range(len(keys["test"]))))
    else:
        drawn, train = _draw(train, test_holdout, strata, seed, "data.test_holdout")
        test = Part("train", drawn)
    used = _inputs_of(test, keys)
    # Rows dropped from train are counted without the drawn ones, which are used elsewhere.
    n_before = len(train)
    train = _without(train, of_train, used)
    # 2. Validation rows: given, or drawn, without those of test.
    drawn = ()
    if "validation" in keys:
        n_given = len(keys["validation"])
        rows = tuple(_without(range(n_given), keys["validation"], used))
        validation = Part("validation", rows, dropped=n_given - len(rows))
    else:
        drawn, train = _draw(train, holdout, strata, seed + 1, "data.holdout")
        validation = Part("train", drawn)
    used |= _inputs_of(validation, keys)
    # 3. Train rows: the others.
    train = _without(train, of_train, used)
    n_dropped = n_before - len(drawn) - len(train)
    parts = {
        "train": Part("train", tuple(train), dropped=n_dropped),
        "validation": validation,
        "test": test,
    }
    for name, part in parts.items():
        if not part.rows:
            got = f"none: {part.dropped} rows were dropped because other splits have them too"
            raise InvalidValue(f"data: {name}", "at least one row", got)
    # 4. Calibration rows: some of train.
    chosen = calibration_rows(len(train), calibration, seed)
    parts["calibration"] = Part("train", tuple(train[i] for i in chosen))
    # 5. Count rows that repeat an earlier row of their own part.
    for name, part in parts.items():
        distinct = _inputs_of(part, keys)
        parts[name] = replace(part, duplicates=len(part.rows) - len(distinct))
    return parts


def _inputs_of(part: Part, keys: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the distinct inputs of a part's rows."""
    of_split = keys[part.source]
    return {of_split[i] for i in part.rows}


def _without(rows: Iterable[int], keys: Sequence[str], used: set[str]) -> list[int]:
    return [i for i in rows if keys[i] not in used]


def calibration_rows(n_train: int, count: int, seed: int) -> list[int]:
    """Draw places of calibration rows among the train rows, in random order.

    Returns:
        ``count`` places, or all where train has fewer rows.
    """
    return random.Random(seed + 2).sample(range(n_train), min(count, n_train))


def _draw(
    rows: list[int],
    amount: int | float,
    strata: Sequence[Any] | None,
    seed: int,
    where: str,
) -> tuple[tuple[int, ...], list[int]]:
    """Draw ``amount`` rows, in proportion to their labels where these are frequent enough.

    Returns:
        The drawn rows and the other rows, both sorted.
    """
    from sklearn.model_selection import train_test_split

    count = amount if isinstance(amount, int) else max(1, round(amount * len(rows)))
    if not 0 < count < len(rows):
        hint = "A text file is one row: give a csv with a row per text." if len(rows) == 1 else ""
        raise InvalidValue(where, f"fewer than the {len(rows)} rows of train", amount, hint)
    labels = None
    if strata is not None:
        labels = [strata[i] for i in rows]
        sizes = Counter(labels)
        # scikit-learn needs two rows of every label, and room for every label in both parts.
        if min(sizes.values()) < 2 or len(sizes) > min(count, len(rows) - count):
            labels = None
    rest, drawn = train_test_split(rows, test_size=count, stratify=labels, random_state=seed)
    return tuple(sorted(drawn)), sorted(rest)
