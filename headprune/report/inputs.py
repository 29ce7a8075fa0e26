"""Inputs of a report other than the record: values that a run writes into its folder."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.core.agreement import Agreement
from headprune.core.scores import HeadScores
from headprune.maps.pictures import AttentionPictures


@dataclass(frozen=True)
class ReportInputs:
    """Values that belong to a record but are not part of it; each may be missing.

    Args:
        pictures: Attention of every head in a few examples.
        scores: Other scores of the same model; the head map switches between them and the record's
            own.
        agreement: How alike the scores order the heads.
    """

    pictures: AttentionPictures | None = None
    scores: tuple[HeadScores, ...] = ()
    agreement: Agreement | None = None


NOTHING = ReportInputs()
