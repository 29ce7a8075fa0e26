"""Count rows that several parts of the data share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from headprune.data.features import Example
from headprune.data.splits import Part

#: How many rows of one part are in other parts too: ``{"test": {"train": 3}}``.
Overlap = dict[str, dict[str, int]]
#: Values of an example that are no inputs: what a model should answer, and what its decoder reads.
_ANSWERS = (
    "labels",
    "decoder_input_ids",
    "decoder_attention_mask",
    "start_positions",
    "end_positions",
)
#: The parts that each judged part is compared with.
_OTHERS = {
    "test": ("train", "calibration", "validation"),
    "validation": ("train", "calibration"),
}


def given_twice(
    keys: Mapping[str, Sequence[str]],
    parts: Mapping[str, Part],
) -> Overlap:
    """Count test and validation rows that were among other rows too, before these were removed.

    Args:
        keys: Each row's input as text, by split, as ``partition`` compared it.
        parts: The parts that ``partition`` returned.
    """
    test, validation = parts["test"], parts["validation"]
    # Rows of train that became rows of another part.
    drawn: set[int] = set()
    for part in (test, validation):
        if part.source == "train":
            drawn.update(part.rows)
    train = {key for i, key in enumerate(keys["train"]) if i not in drawn}

    def among_train(part: Part) -> int:
        return sum(keys[part.source][i] in train for i in part.rows)

    return {
        "test": {"train": among_train(test)},
        "validation": {"train": among_train(validation), "test": validation.dropped},
    }


def read_twice(examples: Mapping[str, Sequence[Example]]) -> Overlap:
    """Count test and validation rows that a model reads exactly as rows of other parts.

    A cut-off text, or a tokenizer that ignores case, makes rows equal that were given as different
    ones. Labels are not compared. Memory: one digest per test or validation row.
    """
    judged = {name: list(map(_digest, examples[name])) for name in _OTHERS}
    # Only digests of judged rows are kept: train may be far larger.
    known = set().union(*judged.values())
    seen = {"validation": set(judged["validation"])}
    for name in ("train", "calibration"):
        seen[name] = known.intersection(map(_digest, examples[name]))
    counts: Overlap = {}
    for name, others in _OTHERS.items():
        counts[name] = {other: _count(judged[name], seen[other]) for other in others}
    return counts


def given_notes(overlap: Overlap, parts: Mapping[str, Part]) -> tuple[str, ...]:
    """Return warnings about rows that were given twice, if any."""
    notes = []
    for name in ("test", "validation"):
        count = overlap[name]["train"]
        if count:
            notes.append(
                f"{count} of {len(parts[name].rows)} {name} rows are also in the train rows"
                " (compared by input, ignoring case and white space): those train rows were removed"
            )
    removed = overlap["validation"]["test"]
    if removed:
        notes.append(
            f"{removed} validation rows are also in the test rows: they were removed from"
            " validation"
        )
    return tuple(notes)


def read_notes(
    overlap: Overlap,
    examples: Mapping[str, Sequence[Example]],
) -> tuple[str, ...]:
    """Return warnings about rows that a model reads twice, if any."""
    notes = []
    for name, others in overlap.items():
        counts = [f"{count} of {other}" for other, count in others.items() if count]
        if counts:
            notes.append(
                f"some of {len(examples[name])} {name} rows are, as the model reads them, equal to"
                f" rows of other parts ({', '.join(counts)}): they are kept, and may make the"
                " model look better than it is"
            )
    return tuple(notes)


def _count(digests: Iterable[bytes], seen: set[bytes]) -> int:
    return sum(digest in seen for digest in digests)


def _digest(example: Example) -> bytes:
    """Return a digest of an example's inputs: names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(example.keys() - set(_ANSWERS)):
        value = example[name]
        # Type and shape too: the same bytes may be other values.
        values = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        digest.update(f"{name} {values.dtype} {values.shape};".encode())
        digest.update(values.tobytes())
    return digest.digest()
