"""Inputs of a report other than the record: values that a run writes into its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headprune.core.agreement import Agreement
from headprune.core.changed import ChangedAnswers
from headprune.core.codec import EMPTY
from headprune.core.latency import LatencyTable
from headprune.core.paired import Drop
from headprune.core.record import SpeedRow
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
        latency: The table that a budget of speed was met by.
        changed: The test rows whose answer changed.
        folder: The run's folder, for commands; by default that of the recipe.
    """

    pictures: AttentionPictures | None = None
    scores: tuple[HeadScores, ...] = ()
    agreement: Agreement | None = None
    latency: LatencyTable | None = None
    changed: ChangedAnswers | None = None
    folder: str | None = None


NOTHING = ReportInputs()


@dataclass(frozen=True)
class SweepInputs:
    """What the page of a sweep shows beside its table; each may be missing.

    Args:
        speeds: The measured speed of each cut model, by its plan's file.
        against_random: For each setting of the table, how much more it loses on test rows than
            random heads of the same budget; None where no such heads were tried.
        pick: What ``pick`` answers at one point, or one per cent.
        max_drop: A ``--max-drop`` at which ``pick`` finds a model; None if that is not known.
        folder: The sweep's folder, for the command: its path from where the sweep was started.
    """

    speeds: Mapping[str, SpeedRow] = EMPTY
    against_random: tuple[Drop | None, ...] = ()
    pick: str = ""
    max_drop: float | None = None
    folder: str = "."


TABLE_ALONE = SweepInputs()
