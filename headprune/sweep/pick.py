"""``pick``: the smallest model that is shown to lose no more than allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from headprune.checkpoints.checkpoint import save_pretrained
from headprune.core.codec import LATER, FrozenDict, Value
from headprune.core.errors import InvalidValue, VerificationFailed
from headprune.core.files import write_atomic
from headprune.core.metrics import apart, drop_words
from headprune.core.paired import Drop, paired_drops, upper_bounds
from headprune.core.plan import PruningPlan
from headprune.core.sweeps import Setting, SweepTable, check_size, words
from headprune.run.journal import MODEL, PLAN, TABLE, to_stderr
from headprune.run.subject import Subject
from headprune.sweep.base import BASES, MARK, Base
from headprune.sweep.fixed_sequence import CandidateSetting, Verdict, fixed_sequence
from headprune.sweep.outcome import SPLITS, ModelOutcome, judge
from headprune.sweep.runs import RUNS, SweepRun, outcome_key, recipe_of
from headprune.sweep.tables import SweepResult
from headprune.sweep.tasks import SweepTask, close, cut_and_recovered, opened, outcome_of

#: The file of a pick.
PICK = "pick.json"
#: Resamples of the bootstrap, at least.
_DRAWS = 10_000
#: At least so many resamples lie beyond a bound.
_TAIL = 20
#: The highest confidence: beyond it the number of resamples is out of proportion to the examples.
_MAX_CONFIDENCE = 0.9999


@dataclass(frozen=True)
class SettingVerdict:
    """The test of one setting.

    Args:
        setting: The setting, as text.
        size: Size of its largest model.
        bound: Upper bound of its worst draw's drop on validation rows; None if not tested.
        passed: The bound is at most the allowed drop.
        drop: The drop of the draw with that bound; None if not tested.
    """

    setting: str
    size: float
    bound: float | None
    passed: bool
    drop: float | None = field(default=None, metadata=LATER)


@dataclass(frozen=True)
class Pick(Value):
    """The answer of ``pick``.

    Args:
        max_drop: The largest allowed drop.
        confidence: Confidence that the picked model loses no more.
        by: What is to be small.
        metric: Metric of the sweep.
        run: Digest of the picked run; None if no setting passed.
        setting: The picked combination and draw, as text.
        plan: The picked plan.
        size: Size of its model, by ``by``.
        validation: Its drop on validation rows, with a 95 % interval.
        test: Its drop on test rows, which take no part in the choice.
        test_bound: One-sided upper bound of the drop on test rows, at ``confidence``.
        looks: The tests of all settings, in the order of the table.
        rows: Validation rows that they were tested on.
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
    looks: tuple[SettingVerdict, ...]
    rows: int = field(default=0, metadata=LATER)

    @property
    def confirmed(self) -> bool:
        """Whether the test rows alone lead to the same conclusion, at the same confidence."""
        return self.test_bound is not None and self.test_bound <= self.max_drop

    @property
    def nearest(self) -> SettingVerdict | None:
        """The tested setting that needs the fewest more rows; None if none was tested."""
        tested = [look for look in self.looks if look.bound is not None]
        return min(tested, key=lambda look: (self._needed(look), look.bound), default=None)

    @property
    def needed_rows(self) -> int | None:
        """About how many validation rows, at most, would show ``nearest`` to be good enough.

        None where its drop on these rows is above ``max_drop``: more rows would not help.
        """
        if self.nearest is None or not math.isfinite(self._needed(self.nearest)):
            return None
        n = math.ceil(self._needed(self.nearest))
        # Two significant digits, upwards: the estimate is no better.
        step: int = 10 ** max(0, len(str(n)) - 2)
        return -(-n // step) * step

    @property
    def allowable(self) -> float:
        """A ``max_drop`` at which ``nearest`` passes; 0 if none was tested."""
        if self.nearest is None or self.nearest.bound is None:
            return 0.0
        return math.ceil(1000 * self.nearest.bound) / 1000

    def _needed(self, look: SettingVerdict) -> float:
        """Rows at which the bound meets the limit, if its distance shrinks as 1 / sqrt(rows)."""
        if look.bound is None or look.drop is None or look.drop >= self.max_drop:
            return math.inf
        return self.rows * ((look.bound - look.drop) / (self.max_drop - look.drop)) ** 2

    def __str__(self) -> str:
        if self.validation is None or self.test is None or self.test_bound is None:
            return self._without_pick()
        size = f"{self.size:,.0f} {self.by}"
        confirm = "confirm it" if self.confirmed else "do not confirm it"
        allowed, bound = apart(self.metric, self.max_drop, self.test_bound)
        lines = [
            f"{self.setting}: {size}, shown by validation rows to lose at most {self._at(allowed)}",
            f"  validation rows: {_interval(self.metric, self.validation)}",
            f"  test rows: {_interval(self.metric, self.test)}; they {confirm} (bound {bound})",
        ]
        return "\n".join(lines)

    def _at(self, allowed: str) -> str:
        tested = sum(look.bound is not None for look in self.looks)
        counts = f"{tested} of {len(self.looks)} settings were tested"
        return f"{allowed} at {100 * self.confidence:g} % confidence ({counts})"

    def _without_pick(self) -> str:
        nearest = self.nearest
        if nearest is None or nearest.bound is None:
            allowed = drop_words(self.metric, self.max_drop)
            return f"no model of the sweep is shown to lose at most {self._at(allowed)}"
        allowed, bound = apart(self.metric, self.max_drop, nearest.bound)
        lines = [f"no model of the sweep is shown to lose at most {self._at(allowed)}"]
        if nearest.drop is None:  # of a file by an older version
            return f"{lines[0]}; nearest: {nearest.setting}, upper bound {bound}"
        lost, _ = apart(self.metric, nearest.drop, self.max_drop)
        lines.append(
            f"  nearest: {nearest.setting}; on the {self.rows:,} validation rows its drop is"
            f" {lost}, with an upper bound of {bound}"
        )
        if self.needed_rows is None:
            lines.append(
                "  more rows would not help, because the drop itself is too large;"
                f" keep more, or allow more: --max-drop {self.allowable:g}"
            )
        else:
            lines.append(
                f"  at most about {self.needed_rows:,} validation rows would be needed to show it,"
                f" if that drop holds on them; or allow more: --max-drop {self.allowable:g}"
            )
        return "\n".join(lines)


def _interval(metric: str, drop: Drop) -> str:
    low, high = drop_words(metric, drop.low), drop_words(metric, drop.high)
    return f"drop {drop_words(metric, drop.value)}, 95 % interval {low} to {high}"


def pick(
    sweep: str | Path | SweepResult,
    *,
    max_drop: float,
    by: str | None = None,
    confidence: float = 0.95,
    out: str | Path | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = to_stderr,
) -> Pick:
    """Pick the smallest model of a sweep that is shown to lose at most ``max_drop``.

    The settings of each method are tested on validation rows, from the largest to the smallest,
    until one's upper bound of the drop is above ``max_drop`` (paired bootstrap over examples).
    Methods share the error probability; see ``headprune.sweep.fixed_sequence``. A setting passes if
    the models of all its draws do; of these, the one with the smallest drop is picked. The baseline
    ``random`` is tested only if there is no other scorer. Test rows take no part in the choice.

    Args:
        sweep: The folder of a sweep, its ``table.json``, or what ``sweep`` returned.
        max_drop: See ``headprune.core.metrics.drop``: 0.01 is one point of accuracy, or 1 % of
            perplexity.
        by: ``heads`` (default), ``params`` (default with neurons), ``macs`` or ``kv``.
        confidence: Confidence that the picked model loses no more, on data like these rows.
        out: A folder for ``plan.json``, ``pick.json`` and the model (``model/``), which is made
            again and compared with the sweep's.
        overwrite: Replace an earlier pick there.
        say: Takes lines of progress.

    Raises:
        InvalidValue: no finished sweep, or impossible arguments.
        UnknownName: no such size.
        VerificationFailed: the model made again has other results; nothing is written.
    """
    # 1. Check the arguments and read the table.
    _check_numbers(max_drop, confidence)
    folder, table = _read(sweep)
    by = by or table.usual_size
    check_size(table.base, by, "pick(by=)")
    if out is not None and (Path(out) / PICK).exists() and not overwrite:
        hint = "Give another folder with --out, or --overwrite."
        raise InvalidValue(str(out), "free", "an earlier pick", hint)

    # 2. Test the settings on validation rows.
    settings = _settings_to_test(table, folder)
    files = _read_files(folder, settings)
    verdicts = _verdicts(files, settings, by, max_drop, confidence)
    looks = []
    passed: list[FrozenDict] = []
    for setting, verdict in zip(settings, verdicts, strict=True):
        size = _largest(setting, by)
        text = words(setting.values)
        looks.append(SettingVerdict(text, size, verdict.bound, verdict.passed, verdict.drop))
        if verdict.passed:
            passed.extend(setting.rows)
    answer = Pick(
        max_drop=float(max_drop),
        confidence=confidence,
        by=by,
        metric=table.metric,
        run=None,
        setting="",
        plan=None,
        size=None,
        validation=None,
        test=None,
        test_bound=None,
        looks=tuple(looks),
        rows=table.base["validation_rows"],
    )
    if not passed:
        return answer

    # 3. Take the smallest model, of equally small ones that with the smallest drop.
    row = min(passed, key=lambda row: (row[by], row["validation_drop"]))
    answer = _with_row(answer, row, files, folder)

    # 4. Make the model again and save it.
    if out is not None:
        say(f"making {answer.setting} again, to prove that it answers as in the sweep")
        _write(answer, files, folder, Path(out))
    return answer


def _check_numbers(max_drop: float, confidence: float) -> None:
    is_number = isinstance(max_drop, (int, float)) and not isinstance(max_drop, bool)
    if not is_number or not math.isfinite(max_drop):
        must = "a number, such as 0.01 for one point"
        raise InvalidValue("pick(max_drop=)", must, repr(max_drop))
    if not 0 < confidence <= _MAX_CONFIDENCE:
        must = f"above 0 and at most {_MAX_CONFIDENCE}"
        raise InvalidValue("pick(confidence=)", must, confidence, "For example 0.95.")


# ------------------------------------------------------------------------ reading a sweep's files


@dataclass(frozen=True)
class _SweepFiles:
    """What the files of a sweep contain.

    Args:
        base: The base model.
        base_outcome: Its results.
        runs: The files of the runs, by digest.
        outcomes: The results of the runs, by digest.
    """

    base: Base
    base_outcome: ModelOutcome
    runs: dict[str, SweepRun]
    outcomes: dict[str, ModelOutcome]


def _read(sweep: str | Path | SweepResult) -> tuple[Path, SweepTable]:
    """Return the folder and the table of a sweep."""
    if isinstance(sweep, SweepResult):
        return sweep.folder.resolve(), sweep.table
    path = Path(sweep)
    if path.is_dir():
        path = path / TABLE
    if not path.is_file():
        must = f"the folder of a finished sweep, with {TABLE}"
        hint = "`headprune sweep` makes one; "
        hint += "a sweep that was stopped has no table yet: call it again."
        raise InvalidValue(str(sweep), must, "none", hint)
    return path.parent.resolve(), SweepTable.load(path)


def _settings_to_test(table: SweepTable, folder: Path) -> list[Setting]:
    """The settings of the table, without random scores if there are others."""
    settings = list(table.settings())
    if not settings:
        hint = "The table's failed runs say why."
        raise InvalidValue(str(folder), "a sweep with a finished run", "none", hint)
    return [setting for setting in settings if not _is_random(setting, folder)] or settings


def _is_random(setting: Setting, folder: Path) -> bool:
    """Whether the scorer is ``random``; its name need not be in the grid."""
    run = _read_run(folder, setting.rows[0]["run"])
    return bool(run.recipe["score"]["scorer"] == "random")


def _read_run(folder: Path, run: str) -> SweepRun:
    return SweepRun.load(folder / RUNS / f"{run}.json")


def _read_files(folder: Path, settings: Sequence[Setting]) -> _SweepFiles:
    runs: dict[str, SweepRun] = {}
    for setting in settings:
        for row in setting.rows:
            runs[row["run"]] = _read_run(folder, row["run"])
    any_run = next(iter(runs.values()))  # all have the same base model
    return _SweepFiles(
        base=Base.load(folder / BASES / any_run.base[:16] / MARK),
        base_outcome=outcome_of(folder, outcome_key(any_run, None)),
        runs=runs,
        outcomes={key: outcome_of(folder, str(run.outcome)) for key, run in runs.items()},
    )


# -------------------------------------------------------------------------------- choosing a model


def _verdicts(
    files: _SweepFiles, settings: Sequence[Setting], by: str, max_drop: float, confidence: float
) -> tuple[Verdict, ...]:
    """Test the settings on validation rows, each method as a chain of its own."""
    candidates = []
    for setting in settings:
        outcomes = [files.outcomes[row["run"]] for row in setting.rows]
        answers = tuple(outcome.answers("validation") for outcome in outcomes)
        candidates.append(CandidateSetting(setting.method, _largest(setting, by), answers))
    # More chains and a higher confidence need more resamples.
    n_chains = len({setting.method for setting in settings})
    draws = max(_DRAWS, math.ceil(_TAIL * n_chains / (1 - confidence)))
    base = files.base_outcome.answers("validation")
    return fixed_sequence(base, candidates, max_drop, confidence, draws)


def _largest(setting: Setting, by: str) -> float:
    """Size of the setting's largest model, over its draws."""
    return float(max(row[by] for row in setting.rows))


def _with_row(answer: Pick, row: FrozenDict, files: _SweepFiles, folder: Path) -> Pick:
    """Fill in the picked run, with its drops on validation and test rows."""
    # Drops of this model alone; test rows are used here for the first time.
    run, outcome, base = files.runs[row["run"]], files.outcomes[row["run"]], files.base_outcome
    drops = {}
    for split in SPLITS:
        (drops[split],) = paired_drops(base.answers(split), [outcome.answers(split)])
    (bound,) = upper_bounds(base.answers("test"), [outcome.answers("test")], answer.confidence)
    return replace(
        answer,
        run=row["run"],
        setting=words({**run.values, "seed": run.seed}),
        plan=PruningPlan.load(folder / row["plan"]),
        size=float(row[answer.by]),
        validation=drops["validation"],
        test=drops["test"],
        test_bound=bound,
    )


# -------------------------------------------------------------------------------- writing a model


def _write(answer: Pick, files: _SweepFiles, folder: Path, out: Path) -> None:
    """Make the picked model again, prove that it has the same results, and save everything."""
    assert answer.run is not None
    assert answer.plan is not None
    run = files.runs[answer.run]
    recipe = recipe_of(run)
    task = SweepTask("outcomes", str(run.outcome), folder, files.base, recipe, run.seed)
    try:
        subject, batches = opened(task)
        model, notes = cut_and_recovered(subject, answer.plan)
        _prove(judge(subject, model, batches, notes), files.outcomes[answer.run])
        _save(model, subject, answer, answer.plan, out)
    finally:
        close()


def _prove(again: ModelOutcome, before: ModelOutcome) -> None:
    """Refuse other losses than in the sweep, except for the rounding of other thread counts."""
    for split in SPLITS:
        name = f"{split}.losses"
        losses = before.arrays[name]
        difference = float(abs(again.arrays[name] - losses).max())
        allowed = 1e-3 * (1 + float(abs(losses).max()))
        if difference > allowed:
            must = f"as in the sweep, {name} within {allowed:.1e}"
            hint = "Recover on the device and with the versions of the sweep."
            raise VerificationFailed("the picked model", must, difference, hint)


def _save(model: nn.Module, subject: Subject, answer: Pick, plan: PruningPlan, out: Path) -> None:
    save_pretrained(model, out / MODEL, subject.sites, processor=subject.preparation.tools)
    plan.save(out / PLAN)
    write_atomic(out / PICK, answer.to_json().encode())
