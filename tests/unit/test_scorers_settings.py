"""Settings of scorers that law 6 does not try: they keep to it as the defaults do."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.testing import assert_close

from headprune.scoring import (
    ActivationNorm,
    AttributionPatching,
    Fluctuation,
    Ggn,
    LeaveOneOut,
    Shapley,
)
from tests.laws.support import subject_of
from tests.scoring_help import flat, score, split

SETTINGS: list[Any] = [
    Ggn(draws=2),
    AttributionPatching(base="mean"),
    AttributionPatching(base="corrupt", corrupt=lambda batch: rolled(batch)),
    LeaveOneOut(replacement="mean"),
    LeaveOneOut(replacement="resample", pool=2),
    Shapley(method="two_sided"),
    ActivationNorm(of="output"),
    Fluctuation(normalize="none"),
]


def rolled(batch: Any) -> Any:
    """A corruption that no order or size of batches changes: every word becomes another one."""
    return {**batch, "input_ids": (batch["input_ids"] + 11) % 50}


def longer(batch: dict[str, Any], left: int, right: int) -> dict[str, Any]:
    pad = (left, right)
    return {k: nn.functional.pad(v, pad) if v.ndim == 2 else v for k, v in batch.items()}


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        largest = float(flat(b).abs().max())
        assert largest > 1e-6
        assert a.n_examples == b.n_examples
        assert_close(flat(a), flat(b), rtol=0, atol=1e-12 * max(1, largest), msg=str(a))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_batches_order_and_padding_change_nothing(name: str) -> None:
    subject = subject_of(name)
    whole = score(subject, SETTINGS)
    turned = {k: v.flip(0) for k, v in subject.batch.items()}
    padded = longer(subject.batch, 0, 3)
    for batches in (split(subject.batch, 1), [turned], [padded]):
        same(score(subject, SETTINGS, batches), whole)


def test_padding_on_the_left_changes_nothing() -> None:
    subject = subject_of("gpt2")
    shifted = longer(subject.batch, 3, 0)
    shifted["position_ids"] = (shifted["attention_mask"].cumsum(1) - 1).clamp(min=0)
    same(score(subject, SETTINGS, [shifted]), score(subject, SETTINGS))
