"""The runs of a sweep, with digests of everything that they depend on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headprune import recovery, scoring, selection
from headprune.core.codec import FrozenDict, Value
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.plan import PruningPlan
from headprune.core.sweeps import words
from headprune.data.models import resolve_device
from headprune.data.splits import calibration_rows
from headprune.recipes.judged import judged_after
from headprune.recipes.schema import Recipe, RecoverStep
from headprune.recipes.validate import check_recipe, configured
from headprune.run.identity import digest
from headprune.run.recovering import seeded
from headprune.run.surroundings import versions
from headprune.sweep.base import Base
from headprune.sweep.grid import Combination, Design
from headprune.sweep.outcome import ModelOutcome
from headprune.sweep.tasks import Kind, SweepTask, file_of, load_plan

#: Folder of the files of runs in that of the sweep.
RUNS = "runs"


@dataclass(frozen=True)
class SweepRun(Value):
    """The file of a run that is done or failed.

    It counts if its status is ``done``, its name is the digest of its settings, and its plan and
    outcome are complete.

    Args:
        settings: Everything that its result depends on, in full; its digest names the file.
        values: The grid's values.
        seed: Number of the draw.
        recipe: The recipe with the grid's values.
        base: Digest of what makes the base model.
        status: done or failed.
        plan: Digest of the plan.
        outcome: Key of the outcome.
        error: Why it failed.
    """

    settings: FrozenDict
    values: FrozenDict
    seed: int
    recipe: FrozenDict
    base: str
    status: Literal["done", "failed"]
    plan: str | None = None
    outcome: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        # These name files of the sweep, so they must not be paths.
        for name in ("base", "plan", "outcome"):
            key = getattr(self, name)
            if key is not None and not key.isalnum():
                must = "a digest, which names a file of the sweep"
                raise InvalidValue(f"SweepRun.{name}", must, repr(key))


def recipe_of(run: SweepRun) -> Recipe:
    """Return the checked recipe of a run's file.

    Raises:
        RecipeError: with all its errors.
    """
    data = json.loads(json.dumps(run.recipe, default=dict))  # plain dicts in place of frozen ones
    return check_recipe(data, "the recipe of a run of the sweep")


@dataclass(frozen=True)
class PlannedRun:
    """One combination of the grid with one draw of calibration rows.

    Args:
        key: Digest of ``settings``.
        settings: Everything that its result depends on.
        values: The grid's values.
        draw: Number of the draw of calibration rows.
        recipe: The recipe with the grid's values.
        scores: Key of its scores.
        plan: Key of its plan.
    """

    key: str
    settings: FrozenDict
    values: FrozenDict
    draw: int
    recipe: Recipe
    scores: str
    plan: str

    @property
    def what(self) -> str:
        """The grid's values and the draw, as text."""
        return words({**self.values, "seed": self.draw})

    def path(self, sweep: Path) -> Path:
        """Where its file is."""
        return sweep / RUNS / f"{self.key[:24]}.json"

    def task(self, kind: Kind, key: str, sweep: Path, base: Base, threads: int | None) -> SweepTask:
        """Return the task that makes its scores, its plan or its outcome."""
        needs = {"scores": "", "plans": self.scores, "outcomes": self.plan}[kind]
        return SweepTask(kind, key, sweep, base, self.recipe, self.draw, needs, threads, self.what)

    def finished(self, sweep: Path, base: Base) -> SweepRun | None:
        """Return its file if it is done, with complete plan and outcome; else None."""
        # 1. The file says that this very run is done.
        try:
            file = SweepRun.load(self.path(sweep))
        except HeadPruneError:
            return None
        if file.status != "done" or file.outcome is None:
            return None
        if digest(dict(file.settings)) != self.key:
            return None
        # 2. Its plan is there, unchanged and of this base model.
        plan = load_plan(file_of(sweep, "plans", self.plan))
        if plan is None or plan.digest != file.plan or not base.is_model(plan.model):
            return None
        # 3. Its outcome is there.
        if ModelOutcome.find(file_of(sweep, "outcomes", file.outcome), file.outcome) is None:
            return None
        return file

    def file(self, base: Base, **result: Any) -> SweepRun:
        """Return its file, with a result."""
        recipe = FrozenDict(self.recipe.model_dump())
        return SweepRun(self.settings, self.values, self.draw, recipe, base.made_of, **result)


def runs_of(design: Design, base: Base, seeds: int) -> list[PlannedRun]:
    """Return a run for every combination and every draw, the draw changing fastest."""
    device = resolve_device(design.recipe.device).type
    same = FrozenDict({"base": base.identity, "device": device, "versions": versions()})
    runs = []
    for point in design.points:
        runs += [_planned_run(point, base, draw, same) for draw in range(seeds)]
    return runs


def _planned_run(point: Combination, base: Base, draw: int, same: FrozenDict) -> PlannedRun:
    """Collect what a run's scores, plan and result depend on, and their digests.

    Args:
        point: The grid's values, and the recipe with them.
        base: The base model.
        draw: Number of the draw of calibration rows.
        same: What all runs of the sweep depend on.
    """
    recipe = point.recipe
    seed = recipe.seed + draw  # draw 0 is what `headprune run` does
    rows = digest(calibration_rows(base.rows["train"]["rows"], recipe.data.calibration, seed))
    # 1. Scores, which combinations with other budgets, selectors and recoveries share.
    score = _score_settings(recipe, seed, rows, same)
    # 2. The plan, which other recoveries share.
    selector = configured(selection.registry, recipe.select.selector, recipe.select.settings)
    select = {**recipe.select.model_dump(), "settings": dict(selector.settings)}
    plan: dict[str, Any] = {"scores": digest(score), "select": select}
    if selector.needs:  # it measures the model, and may draw numbers or recover in between
        plan["seed"] = seed
    # 3. The run.
    recover = recovered(recipe.recover, seed, rows)
    settings = FrozenDict({"score": score, "select": select, "recover": recover, "seed": seed})
    return PlannedRun(
        key=digest(dict(settings)),
        settings=settings,
        values=point.values,
        draw=draw,
        recipe=recipe,
        scores=digest(score),
        plan=digest(plan),
    )


def _score_settings(recipe: Recipe, seed: int, rows: str, same: FrozenDict) -> dict[str, Any]:
    """Everything that scores depend on."""
    wanted = recipe.score
    scorer = seeded(scoring.registry, wanted.scorer, wanted.settings, seed)
    settings = {
        "same": same,
        "rows": rows,
        "scorer": wanted.scorer,
        "settings": dict(scorer.settings),
        "until": wanted.until.model_dump() if wanted.until else None,
        "batch_size": wanted.batch_size,
        "policy": recipe.select.policy,
    }
    if recipe.select.feed_forward:
        settings["feed_forward"] = True
    if wanted.scorer == "auto":  # it judges scorers by the plans and models they lead to
        settings["judged"] = {
            "select": recipe.select.model_dump(),
            "recover": recovered(judged_after(recipe), seed, rows),
        }
    return settings


def recovered(steps: Sequence[RecoverStep], seed: int, rows: str) -> Any:
    """Return what a recovered model depends on besides its plan; None without recoveries."""
    if not steps:
        return None
    sections = []
    for step in steps:
        method = seeded(recovery.registry, step.method, step.settings, seed)
        sections.append({**step.model_dump(), "settings": dict(method.settings)})
    return {"steps": sections, "seed": seed, "rows": rows}


def outcome_key(run: PlannedRun | SweepRun, plan: PruningPlan | None) -> str:
    """Return the key of a run's model, cut by a plan and recovered.

    Runs that lead to the same model have the same key. Without a plan it is the key of the base
    model, which all runs of a sweep share.

    Raises:
        InvalidValue: a run's file lacks the facts that all runs of its sweep share.
    """
    score = run.settings.get("score")
    same = score.get("same") if isinstance(score, FrozenDict) else None
    if same is None:
        must, got = "complete (with score.same)", "those of another version"
        raise InvalidValue("the settings of a run", must, got, "Call the sweep again.")
    if plan is None:
        return digest({"same": same, "mask": None})
    # Not how the heads were chosen, but which ones.
    mask = [[row.site, list(row.kept)] for row in plan.mask.rows]
    facts = {
        "same": same,
        "mask": mask,
        "policy": plan.policy,
        "recover": run.settings["recover"],
    }
    return digest(facts)
