"""Rows of one part of the data that stand in another one, too: as they were given, and as the model
reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from headprune.data.features import Example
from headprune.data.splits import Part

#: How many rows of one part stand in other parts: ``{"test": {"train": 3}}``.
Overlap = dict[str, dict[str, int]]
#: What a model should answer, and what its decoder reads of that.
_ANSWERS = (
    "labels",
    "decoder_input_ids",
    "decoder_attention_mask",
    "start_positions",
    "end_positions",
)


def given_twice(keys: Mapping[str, Sequence[str]], parts: Mapping[str, Part]) -> Overlap:
    """How many test and validation rows stood among other rows before these were removed there.

    Args:
        keys: What each row of each split says, as `partition` compared it.
        parts: Its answer.
    """
    test, validation = parts["test"], parts["validation"]
    drawn = {i for part in (test, validation) if part.source == "train" for i in part.rows}
    train = {key for i, key in enumerate(keys["train"]) if i not in drawn}

    def among_train(part: Part) -> int:
        return sum(keys[part.source][i] in train for i in part.rows)

    of_validation = {"train": among_train(validation), "test": validation.dropped}
    return {"test": {"train": among_train(test)}, "validation": of_validation}


def read_twice(examples: Mapping[str, Sequence[Example]]) -> Overlap:
    """How many test and validation rows a model reads exactly as rows of other parts, whatever
    their labels.

    A text that is cut off, or a tokenizer that knows no capitals, makes rows equal that were given
    as different ones. Memory is that of a digest a test or validation row; other rows are looked at
    one by one.
    """
    judged = {
        name: [_digest(example) for example in examples[name]] for name in ("test", "validation")
    }
    known = {digest for digests in judged.values() for digest in digests}
    seen = {
        name: known.intersection(map(_digest, examples[name])) for name in ("train", "calibration")
    }
    seen["validation"] = set(judged["validation"])
    wanted = {
        "test": ("train", "calibration", "validation"),
        "validation": ("train", "calibration"),
    }
    return {
        name: {other: _count(judged[name], seen[other]) for other in others}
        for name, others in wanted.items()
    }


def given_notes(found: Overlap, parts: Mapping[str, Part]) -> tuple[str, ...]:
    """What a reader should know of rows that were given twice; nothing where there are none."""
    notes = []
    for name in ("test", "validation"):
        if count := found[name]["train"]:
            among = (
                f"{count} of {len(parts[name].rows)} {name} rows stood among the train rows, too"
            )
            compared = "inputs compared; text without capitals and white space"
            notes.append(f"{among} ({compared}): those train rows were removed")
    if removed := found["validation"]["test"]:
        notes.append(
            f"{removed} validation rows stood among the test rows, too: they were removed from"
            " validation"
        )
    return tuple(notes)


def read_notes(found: Overlap, examples: Mapping[str, Sequence[Example]]) -> tuple[str, ...]:
    """What a reader should know of rows that a model reads twice; nothing where there are none."""
    notes = []
    for name, others in found.items():
        if among := [f"{count} of {other}" for other, count in others.items() if count]:
            notes.append(
                f"of {len(examples[name])} {name} rows the model reads some exactly as rows of"
                f" other parts ({', '.join(among)}): they stay, and may make it look better than"
                " it is"
            )
    return tuple(notes)


def _count(digests: Iterable[bytes], seen: set[bytes]) -> int:
    return sum(digest in seen for digest in digests)


def _digest(example: Example) -> bytes:
    """Tells an example's inputs from others."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(example.keys() - set(_ANSWERS)):
        value = example[name]
        values = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        found.update(f"{name} {values.dtype} {values.shape};".encode())
        found.update(values.tobytes())
    return found.digest()
