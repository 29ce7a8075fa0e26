"""``headprune explain``: which heads a plan removes, why, and the expected effect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import AsJson, Debug, echo, emit, guarded, say
from headprune.cli._shared import show as show_value
from headprune.core.errors import WARNING


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan, or the folder of a run.")],
    scores: Annotated[
        Path | None,
        typer.Option(help="The scores it was made from; default scores.json beside the plan."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Explain which heads a plan removes, why, how certainly, and the expected effect."""
    with guarded(debug):
        from headprune.core.errors import InvalidValue
        from headprune.core.plan import PruningPlan
        from headprune.core.record import RunRecord
        from headprune.core.scores import HeadScores
        from headprune.report.explanation import explain as explained
        from headprune.run.journal import PLAN, RECORD, SCORES

        # 1. Load the plan and the scores that it was made from.
        path = plan / PLAN if plan.is_dir() else plan
        pruning_plan = PruningPlan.load(path)
        scores_path = scores or path.with_name(SCORES)
        if not scores_path.is_file():
            must = "given, or scores.json beside the plan"
            hint = "headprune score writes them, and every run leaves them beside its plan."
            raise InvalidValue("--scores", must, f"no {scores_path}", hint)
        head_scores = HeadScores.load(scores_path)
        if pruning_plan.scores not in (None, head_scores.digest):
            text = "holds other scores than those that the plan was made from"
            say(f"{WARNING}{scores_path} {text}")

        # 2. Explain, and add what a run has measured.
        explanation = explained(pruning_plan, head_scores)
        # A plan in a run's folder has a record beside it.
        record = path.with_name(RECORD)
        measured = RunRecord.load(record).quality if record.is_file() else ()
        # 3. Print.
        if as_json:
            emit({**explanation.to_dict(), "measured": list(map(vars, measured))})
            return
        show_value(explanation)
        if measured:
            echo("\nwhat was measured:")
        for row in measured:
            echo(f"  {row.name}, {row.kept}: {row.split} {row.metric} {row.value:.4f}")
