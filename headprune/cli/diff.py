"""``headprune diff``: compare two plans, or two records of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.cli._shared import AsJson, Debug, emit, guarded
from headprune.cli._shared import show as show_value
from headprune.core.errors import InvalidValue

if TYPE_CHECKING:
    from headprune.core.plan import PruningPlan
    from headprune.core.record import RunRecord
    from headprune.report.difference import PlanDifference, RecordDifference


def diff(
    first: Annotated[Path, typer.Argument(help="A plan, a record, or the folder of a run.")],
    second: Annotated[Path, typer.Argument(help="Another of the same kind.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two plans head by head, or two records by settings, figures and plans."""
    with guarded(debug):
        from headprune.core.plan import PruningPlan
        from headprune.core.record import RunRecord
        from headprune.report.difference import plan_difference, record_difference

        # 1. Read both; a folder stands for its record.
        a, b = _read(first), _read(second)
        names = str(first), str(second)
        # 2. Compare plans with plans, and records with records.
        difference: PlanDifference | RecordDifference
        if isinstance(a, PruningPlan) and isinstance(b, PruningPlan):
            difference = plan_difference(a, b, names)
        elif isinstance(a, RunRecord) and isinstance(b, RunRecord):
            difference = record_difference(a, b, names)
        else:
            got = f"a {type(a).__name__} and a {type(b).__name__}"
            hint = "A run's plan is plan.json in its folder."
            raise InvalidValue("diff", "given two plans or two records", got, hint)
        if as_json:
            emit(difference.to_dict())
        else:
            show_value(difference)


def _read(path: Path) -> PruningPlan | RunRecord:
    """Load a plan or a record, the latter also from a run's folder."""
    from headprune.core.opening import NotAFile, read_text
    from headprune.core.plan import PruningPlan
    from headprune.core.record import RunRecord
    from headprune.run.journal import record_path

    file = record_path(path)
    # Every value that headprune stores names its type.
    try:
        kind = json.loads(read_text(file))["headprune"]
    except NotAFile:  # has a message of its own
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        must = "a plan, a record or the folder of a run"
        raise InvalidValue(str(path), must, f"{type(error).__name__}") from None
    if kind == "PruningPlan":
        return PruningPlan.load(file)
    return RunRecord.load(file)  # which refuses any other kind
