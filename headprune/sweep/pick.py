"""``pick``: the smallest model of a sweep that surely loses no more than allowed; chosen on
validation rows alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from headprune.checkpoints.checkpoint import save_pretrained
from headprune.core.codec import FrozenDict, Value
from headprune.core.errors import InvalidValue, VerificationFailed
from headprune.core.files import write_atomic
from headprune.core.metrics import drop_words
from headprune.core.plan import PruningPlan
from headprune.core.sweeps import Setting, SweepTable, check_size, words
from headprune.run.journal import MODEL, PLAN, TABLE, to_stderr
from headprune.run.subject import Subject
from headprune.sweep.base import BASES, MARK, Base
from headprune.sweep.fixed_sequence import Candidate, Verdict, fixed_sequence
from headprune.sweep.outcome import SPLITS, Outcome, judge
from headprune.sweep.paired import Drop, paired_drops, upper_bounds
from headprune.sweep.runs import RUNS, SweepRun, outcome_key, recipe_of
from headprune.sweep.sweeping import SweepResult
from headprune.sweep.tasks import Task, close, cut_and_recovered, opened, outcome_of

PICK = "pick.json"
_DRAWS = 10_000
_TAIL = 20  # resamples beyond a bound, at least
_SUREST = 0.9999  # a bound beyond it takes more resamples than examples can tell of


@dataclass(frozen=True)
class Looked:
    """What became of one setting: the upper bound of its worst draw's validation drop, None if not
    looked at."""

    setting: str
    size: float
    bound: float | None
    passed: bool


@dataclass(frozen=True)
class Pick(Value):
    """The answer of ``pick``.

    Args:
        max_drop, confidence, by: What was asked.
        metric: Of the sweep.
        run: Digest of the picked run; None where none is surely good enough.
        setting: The picked combination and draw, in words.
        plan: The picked plan.
        size: Of its model, by ``by``.
        validation, test: Its drops, each with its 95 % interval; the test rows took no part in the
        choice.
        test_bound: One-sided upper bound of the test drop at ``confidence``.
        looks: What became of every setting, in the order of the table.
    """

    max_drop: float
    confidence: float
    by: str
    metric: str
    run: str | None
    setting: str
    plan: PruningPlan | None
    size: float | None
    validation: Drop | None
    test: Drop | None
    test_bound: float | None
    looks: tuple[Looked, ...]

    @property
    def confirmed(self) -> bool:
        """Whether the test rows alone say the same, at the same confidence."""
        return self.test_bound is not None and self.test_bound <= self.max_drop

    def __str__(self) -> str:
        allowed = (
            f"{drop_words(self.metric, self.max_drop)} at {100 * self.confidence:g} % confidence"
        )
        n_looks = sum(look.bound is not None for look in self.looks)
        looked = f"{n_looks} of {len(self.looks)} settings were looked at"
        if self.validation is None or self.test is None or self.test_bound is None:
            bounds = [(look.bound, look.setting) for look in self.looks if look.bound is not None]
            best = [
                f"the least bound is {drop_words(self.metric, bound)}, of {of}"
                for bound, of in sorted(bounds)[:1]
            ]
            return (
                f"no model of the sweep surely loses at most {allowed};"
                f" {', '.join([looked, *best])}"
            )
        confirmed = "confirm it" if self.confirmed else "do not confirm it"
        return "\n".join(
            [
                (
                    f"{self.setting}: {self.size:,.0f} {self.by}, surely loses at most {allowed}"
                    f" ({looked})"
                ),
                f"  validation rows: {_interval(self.metric, self.validation)}",
                (
                    f"  test rows: {_interval(self.metric, self.test)}; they {confirmed} "
                    f"(bound {drop_words(self.metric, self.test_bound)})"
                ),
            ]
        )


def _interval(metric: str, drop: Drop) -> str:
    low, high = drop_words(metric, drop.low), drop_words(metric, drop.high)
    return f"drop {drop_words(metric, drop.value)}, 95 % interval {low} to {high}"


def pick(
    sweep: str | Path | SweepResult,
    *,
    max_drop: float,
    by: str = "heads",
    confidence: float = 0.95,
    out: str | Path | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = to_stderr,
) -> Pick:
    """The smallest model of a sweep whose drop is at most ``max_drop``, at a confidence that many
    looks keep.

    Decided on validation rows: the settings of every method are looked at from the largest to the
    smallest, until the upper bound of one's drop, by the paired bootstrap over examples, is above
    ``max_drop``; methods share the error (``headprune.sweep.fixed_sequence`` says why this may be
    believed). A setting passes when the models of all its calibration draws do, and of those the
    one with the smallest validation drop is taken. ``random`` is a baseline and is looked at only
    where the sweep has nothing else. The test rows come last, and change nothing.

    Args:
        sweep: The folder of a sweep, its ``table.json``, or what ``sweep`` returned.
        max_drop: See ``headprune.core.metrics.drop``: 0.01 is one point of accuracy, or 1 % of
            perplexity.
        by: What is to be small: ``heads``, ``params``, ``macs`` or ``kv``.
        confidence: That the picked model loses no more on the data that the rows were drawn from;
            0.9999 at most.
        out: A folder for ``plan.json``, ``pick.json`` and the cut and recovered model (``model/``),
            which is made again and must answer as it did in the sweep. Nothing is written where
            none is good enough.
        overwrite: Replace an earlier pick there.
        say: Takes lines of progress.

    Raises:
        InvalidValue: no finished sweep there, or arguments that cannot be.
        UnknownName: no such size.
        VerificationFailed: the model that was made again answers otherwise; nothing is written.
    """
    if (
        not isinstance(max_drop, (int, float))
        or isinstance(max_drop, bool)
        or not math.isfinite(max_drop)
    ):
        raise InvalidValue(
            "pick(max_drop=)", "a number, such as 0.01 for one point", repr(max_drop)
        )
    if not 0 < confidence <= _SUREST:
        raise InvalidValue(
            "pick(confidence=)", f"above 0 and at most {_SUREST}", confidence, "For example 0.95."
        )
    folder, table = _read(sweep)
    check_size(table.base, by, "pick(by=)")
    if out is not None and (Path(out) / PICK).exists() and not overwrite:
        raise InvalidValue(
            str(out), "free", "an earlier pick", "Give another folder with --out, or --overwrite."
        )
    settings = [s for s in table.settings() if not _is_random(s, folder)] or list(table.settings())
    if not settings:
        raise InvalidValue(
            str(folder), "a sweep with a finished run", "none", "The table's failed runs say why."
        )
    judged = _judged(folder, settings)
    verdicts = _verdicts(judged, settings, by, max_drop, confidence)
    empty = dict.fromkeys(("run", "plan", "size", "validation", "test", "test_bound"))
    looks = tuple(_look(s, v, by) for s, v in zip(settings, verdicts, strict=True))
    found = Pick(float(max_drop), confidence, by, table.metric, **empty, setting="", looks=looks)
    passed = [row for s, v in zip(settings, verdicts, strict=True) if v.passed for row in s.rows]
    if passed:
        row = min(passed, key=lambda row: (row[by], row["validation_drop"]))
        found = _filled(found, row, judged, folder)
        if out is not None:
            say(f"making {found.setting} again, to prove that it answers as in the sweep")
            _write(found, judged, folder, Path(out))
    return found


@dataclass(frozen=True)
class _Judged:
    """What the files of a sweep say: its base model, that one's outcome, and every run with its
    own."""

    base: Base
    whole: Outcome
    runs: dict[str, SweepRun]
    outcomes: dict[str, Outcome]


def _judged(folder: Path, settings: Sequence[Setting]) -> _Judged:
    runs = {row["run"]: _run(folder, row["run"]) for setting in settings for row in setting.rows}
    base = Base.load(folder / BASES / next(iter(runs.values())).base[:16] / MARK)
    outcomes = {run: outcome_of(folder, str(file.outcome)) for run, file in runs.items()}
    whole = outcome_of(folder, outcome_key(next(iter(runs.values())), None))
    return _Judged(base, whole, runs, outcomes)


def _verdicts(
    judged: _Judged, settings: Sequence[Setting], by: str, max_drop: float, confidence: float
) -> tuple[Verdict, ...]:
    def candidate(setting: Setting) -> Candidate:
        answers = tuple(judged.outcomes[row["run"]].answers("validation") for row in setting.rows)
        return Candidate(setting.method, _largest(setting, by), answers)

    n_chains = len({setting.method for setting in settings})
    draws = max(_DRAWS, math.ceil(_TAIL * n_chains / (1 - confidence)))
    candidates = [candidate(setting) for setting in settings]
    return fixed_sequence(
        judged.whole.answers("validation"), candidates, max_drop, confidence, draws
    )


def _filled(found: Pick, row: FrozenDict, judged: _Judged, folder: Path) -> Pick:
    """The answer with the picked run, and what the test rows say to it."""
    file, outcome, whole = judged.runs[row["run"]], judged.outcomes[row["run"]], judged.whole
    drops = {
        split: paired_drops(whole.answers(split), [outcome.answers(split)])[0] for split in SPLITS
    }
    (bound,) = upper_bounds(whole.answers("test"), [outcome.answers("test")], found.confidence)
    return replace(
        found,
        run=row["run"],
        setting=words({**file.values, "seed": file.seed}),
        plan=PruningPlan.load(folder / row["plan"]),
        size=float(row[found.by]),
        validation=drops["validation"],
        test=drops["test"],
        test_bound=bound,
    )


def _read(sweep: str | Path | SweepResult) -> tuple[Path, SweepTable]:
    if isinstance(sweep, SweepResult):
        return sweep.folder.resolve(), sweep.table
    path = Path(sweep)
    path = path / TABLE if path.is_dir() else path
    if not path.is_file():
        hint = (
            "`headprune sweep` makes one; a sweep that was stopped has no table yet: call it again."
        )
        raise InvalidValue(
            str(sweep), f"the folder of a finished sweep, with {TABLE}", "none", hint
        )
    return path.parent.resolve(), SweepTable.load(path)


def _run(folder: Path, run: str) -> SweepRun:
    return SweepRun.load(folder / RUNS / f"{run}.json")


def _is_random(setting: Setting, folder: Path) -> bool:
    """By its file: the scorer need not be a key of the grid."""
    return bool(_run(folder, setting.rows[0]["run"]).recipe["score"]["scorer"] == "random")


def _largest(setting: Setting, by: str) -> float:
    return float(max(row[by] for row in setting.rows))


def _look(setting: Setting, verdict: Verdict, by: str) -> Looked:
    return Looked(words(setting.values), _largest(setting, by), verdict.bound, verdict.passed)


def _write(found: Pick, judged: _Judged, folder: Path, out: Path) -> None:
    """Makes the picked model again, proves that it answers as it did, and saves all."""
    assert found.run is not None
    assert found.plan is not None
    file = judged.runs[found.run]
    recipe = recipe_of(file)
    task = Task("outcomes", str(file.outcome), folder, judged.base, recipe, file.seed)
    try:
        subject, batches = opened(task)
        model, notes = cut_and_recovered(subject, found.plan)
        _prove(judge(subject, model, batches, notes), judged.outcomes[found.run])
        _save(model, subject, found, out)
    finally:
        close()


def _prove(again: Outcome, before: Outcome) -> None:
    """The same answers; losses may differ by what another number of threads rounds otherwise."""
    for name in (f"{split}.losses" for split in SPLITS):
        values = before.arrays[name]
        difference, allowed = (
            float(abs(again.arrays[name] - values).max()),
            1e-3 * (1 + float(abs(values).max())),
        )
        if difference > allowed:
            hint = "Recover on the device and with the versions of the sweep."
            raise VerificationFailed(
                "the picked model",
                f"as in the sweep, {name} within {allowed:.1e}",
                difference,
                hint,
            )


def _save(model: nn.Module, subject: Subject, found: Pick, out: Path) -> None:
    save_pretrained(model, out / MODEL, subject.sites, processor=subject.preparation.tools)
    assert found.plan is not None
    found.plan.save(out / PLAN)
    write_atomic(out / PICK, found.to_json().encode())
