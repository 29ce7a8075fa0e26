"""Which rows are for what: train, validation, test and calibration, with nothing in two of them."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.core.errors import InvalidValue


@dataclass(frozen=True)
class Part:
    """The rows of one purpose.

    Args:
        source: The split that they come from.
        rows: Their numbers there.
        dropped: Rows that were left out, because what they say stands in a split that comes first.
        duplicates: Rows that repeat an earlier row of this same part; they stay.
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
        """What the record says about it."""
        counts = {
            "rows": len(self.rows),
            "from": self.source,
            "dropped": self.dropped,
            "duplicates": self.duplicates,
        }
        return {**counts, "digest": self.digest}


def normalised(text: str) -> str:
    """Text as it is compared between splits: no case, no white space but single blanks.

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
    """Rows for train, validation, test and calibration.

    Test rows stay as they are given; validation loses what stands in test; train loses what stands
    in either. A part that the data lacks is drawn from train first. Calibration rows are a seeded
    subset of train.

    Args:
        keys: For ``train`` and, where there are such splits, ``validation`` and ``test``: what each
            row says.
        strata: Labels of the train rows, for draws that keep their proportions; None draws freely.
        holdout: Rows, or fraction of train, for validation.
        test_holdout: The same for test.
        calibration: Rows for calibration, at most.
        seed: Of every draw.

    Raises:
        InvalidValue: a part without rows.
    """
    train: list[int] = list(range(len(keys["train"])))
    words = keys["train"]
    if "test" in keys:
        test = Part("test", tuple(range(len(keys["test"]))))
    else:
        drawn, train = _draw(train, test_holdout, strata, seed, "data.test_holdout")
        test = Part("train", drawn)
    seen = {keys[test.source][i] for i in test.rows}
    n_before = len(train)
    train = [i for i in train if words[i] not in seen]
    if "validation" in keys:
        rows = tuple(i for i, key in enumerate(keys["validation"]) if key not in seen)
        validation = Part("validation", rows, dropped=len(keys["validation"]) - len(rows))
        drawn = ()
    else:
        drawn, train = _draw(train, holdout, strata, seed + 1, "data.holdout")
        validation = Part("train", drawn)
    seen |= {keys[validation.source][i] for i in validation.rows}
    train = [i for i in train if words[i] not in seen]
    learning = Part("train", tuple(train), dropped=n_before - len(drawn) - len(train))
    for name, part in (("train", learning), ("validation", validation), ("test", test)):
        if not part.rows:
            got = f"none left after {part.dropped} that stand in other splits were dropped"
            raise InvalidValue(f"data: {name}", "at least one row", got)
    chosen = calibration_rows(len(train), calibration, seed)
    return {
        "train": _counted(learning, words),
        "validation": _counted(validation, keys[validation.source]),
        "test": _counted(test, keys[test.source]),
        "calibration": _counted(Part("train", tuple(train[i] for i in chosen)), words),
    }


def calibration_rows(n_train: int, count: int, seed: int) -> list[int]:
    """Places of the calibration rows among the train rows: a draw of ``count`` of them, or of all,
    in random order."""
    return random.Random(seed + 2).sample(range(n_train), min(count, n_train))


def _counted(part: Part, words: Sequence[str]) -> Part:
    repeats = sum(n - 1 for n in Counter(words[i] for i in part.rows).values())
    return Part(part.source, part.rows, part.dropped, repeats)


def _draw(
    rows: list[int], amount: int | float, strata: Sequence[Any] | None, seed: int, where: str
) -> tuple[tuple[int, ...], list[int]]:
    """``amount`` rows, in proportion to the labels where these are numerous enough, and the
    rest."""
    from sklearn.model_selection import train_test_split

    count = amount if isinstance(amount, int) else max(1, round(amount * len(rows)))
    if not 0 < count < len(rows):
        raise InvalidValue(where, f"fewer than the {len(rows)} rows of train", amount)
    labels = None
    if strata is not None:
        sizes = Counter(strata[i] for i in rows)
        if min(sizes.values()) >= 2 and len(sizes) <= min(count, len(rows) - count):
            labels = [strata[i] for i in rows]
    rest, drawn = train_test_split(rows, test_size=count, stratify=labels, random_state=seed)
    return tuple(sorted(drawn)), sorted(rest)
