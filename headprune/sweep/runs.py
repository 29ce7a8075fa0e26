"""The runs of a sweep: what each is, under which digests its pieces lie, and the file that says
that it is done."""

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
from headprune.sweep.grid import Design
from headprune.sweep.outcome import Outcome
from headprune.sweep.tasks import Kind, Task, file_of, load_plan

RUNS = "runs"


@dataclass(frozen=True)
class SweepRun(Value):
    """The file of a run; it counts where it says ``done``, bears the digest of its settings, and
    its pieces are whole.

    Args:
        settings: Everything that its result depends on, in full; its digest names the file.
        values: The grid's values.
        seed: Number of the draw.
        recipe: The recipe with the grid's values.
        base: What the base model is made of.
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
        for name, key in (("base", self.base), ("plan", self.plan), ("outcome", self.outcome)):
            if key is not None and not key.isalnum():
                raise InvalidValue(
                    f"SweepRun.{name}", "a digest, which names a file of the sweep", repr(key)
                )


def recipe_of(run: SweepRun) -> Recipe:
    """The recipe in a run's file, checked like any other.

    Raises:
        RecipeError: with every error that it has.
    """
    return check_recipe(
        json.loads(json.dumps(run.recipe, default=dict)), "the recipe of a run of the sweep"
    )


@dataclass(frozen=True)
class Run:
    """One combination with one draw.

    Args:
        key: Digest of ``settings``.
        settings: Everything that its result depends on.
        values: The grid's values.
        draw: Number of the draw of calibration rows.
        recipe: The recipe with the grid's values.
        scores, plan: Keys of its scores and of its plan.
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
        """It in words."""
        return words({**self.values, "seed": self.draw})

    def path(self, sweep: Path) -> Path:
        """Its file."""
        return sweep / RUNS / f"{self.key[:24]}.json"

    def task(self, kind: Kind, key: str, sweep: Path, base: Base, threads: int | None) -> Task:
        """A piece of its work."""
        needs = {"scores": "", "plans": self.scores, "outcomes": self.plan}[kind]
        return Task(kind, key, sweep, base, self.recipe, self.draw, needs, threads, self.what)

    def finished(self, sweep: Path, base: Base) -> SweepRun | None:
        """Its file, where it is done and whole: nothing of it has to be done again."""
        try:
            found = SweepRun.load(self.path(sweep))
        except HeadPruneError:
            return None
        if (
            found.status != "done"
            or found.outcome is None
            or digest(dict(found.settings)) != self.key
        ):
            return None
        plan = load_plan(file_of(sweep, "plans", self.plan))
        whole = plan is not None and plan.digest == found.plan and plan.model == base.model
        return (
            found
            if whole and Outcome.find(file_of(sweep, "outcomes", found.outcome), found.outcome)
            else None
        )

    def file(self, base: Base, **result: Any) -> SweepRun:
        """The file of it."""
        recipe = FrozenDict(self.recipe.model_dump())
        return SweepRun(self.settings, self.values, self.draw, recipe, base.made_of, **result)


def runs_of(design: Design, base: Base, seeds: int) -> list[Run]:
    """Every combination with every draw, the draw changing fastest."""
    device = resolve_device(design.recipe.device).type
    same = FrozenDict({"base": base.identity, "device": device, "versions": versions()})
    return [
        _run(point.values, point.recipe, base, draw, same)
        for point in design.points
        for draw in range(seeds)
    ]


def _run(values: FrozenDict, recipe: Recipe, base: Base, draw: int, same: FrozenDict) -> Run:
    seed, wanted = recipe.seed + draw, recipe.score
    rows = digest(calibration_rows(base.rows["train"]["rows"], recipe.data.calibration, seed))
    scorer = seeded(scoring.registry, wanted.scorer, wanted.settings, seed)
    score = {
        "same": same,
        "rows": rows,
        "scorer": wanted.scorer,
        "settings": dict(scorer.settings),
        "until": wanted.until.model_dump() if wanted.until else None,
        "batch_size": wanted.batch_size,
        "policy": recipe.select.policy,
    }
    if wanted.scorer == "auto":  # it chooses by what comes after the scores
        score["judged"] = {
            "select": recipe.select.model_dump(),
            "recover": recovered(judged_after(recipe), seed, rows),
        }
    chosen = configured(selection.registry, recipe.select.selector, recipe.select.settings)
    select = {**recipe.select.model_dump(), "settings": dict(chosen.settings)}
    recover = recovered(recipe.recover, seed, rows)
    plan: dict[str, Any] = {"scores": digest(score), "select": select}
    if chosen.needs:  # it looks at the model, and may draw, or recover on the way
        plan["seed"] = seed
    settings = FrozenDict({"score": score, "select": select, "recover": recover, "seed": seed})
    return Run(digest(dict(settings)), settings, values, draw, recipe, digest(score), digest(plan))


def recovered(steps: Sequence[RecoverStep], seed: int, rows: str) -> Any:
    """What a recovered model depends on besides its plan; nothing where nothing is recovered."""
    if not steps:
        return None
    given = []
    for step in steps:
        method = seeded(recovery.registry, step.method, step.settings, seed)
        given.append({**step.model_dump(), "settings": dict(method.settings)})
    return {"steps": given, "seed": seed, "rows": rows}


def outcome_key(run: Run | SweepRun, plan: PruningPlan | None) -> str:
    """Of what a run's plan leaves of the model, recovered: runs that come to the same model share
    it.

    Without a plan it is that of the base model, which all runs of a sweep share.

    Raises:
        InvalidValue: a run's file that does not say on what it was made.
    """
    score = run.settings.get("score")
    same = score.get("same") if isinstance(score, FrozenDict) else None
    if same is None:
        hint = "Call the sweep again."
        raise InvalidValue(
            "the settings of a run", "complete (with score.same)", "those of another version", hint
        )
    if plan is None:
        return digest({"same": same, "mask": None})
    mask = [[row.site, list(row.kept)] for row in plan.mask.rows]
    return digest(
        {"same": same, "mask": mask, "policy": plan.policy, "recover": run.settings["recover"]}
    )
