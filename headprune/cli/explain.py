"""``headprune explain``: which heads a plan removes, why, and what that can be expected to cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import AsJson, Debug, echo, emit, guarded, say
from headprune.cli._shared import show as show_value


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan, or the folder of a run.")],
    scores: Annotated[
        Path | None,
        typer.Option(help="The scores it was made from; default scores.json beside the plan."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say of a plan which heads go and why, how sure that choice is, and what to expect."""
    with guarded(debug):
        from headprune.core.errors import InvalidValue
        from headprune.core.plan import PruningPlan
        from headprune.core.record import RunRecord
        from headprune.core.scores import HeadScores
        from headprune.report.explanation import explain as explained
        from headprune.run.journal import PLAN, RECORD, SCORES

        path = plan / PLAN if plan.is_dir() else plan
        beside = scores or path.with_name(SCORES)
        decided = PruningPlan.load(path)
        if not beside.is_file():
            hint = "headprune score writes them, and every run leaves them beside its plan."
            raise InvalidValue(
                "--scores", "given, or scores.json beside the plan", f"no {beside}", hint
            )
        found = HeadScores.load(beside)
        if decided.scores not in (None, found.digest):
            say(f"warning: {beside} holds other scores than those that the plan was made from")
        explanation = explained(decided, found)
        record = path.with_name(RECORD)
        measured = RunRecord.load(record).quality if record.is_file() else ()
        if as_json:
            emit({**explanation.to_dict(), "measured": [vars(row) for row in measured]})
            return
        show_value(explanation)
        if measured:
            echo("\nwhat was measured:")
        for row in measured:
            echo(f"  {row.name}, {row.kept_heads} heads: {row.split} {row.metric} {row.value:.4f}")
