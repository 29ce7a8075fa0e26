"""The trade-off of a sweep: its picture with the Pareto curve, its tables and its summary."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.core.codec import FrozenDict
from headprune.core.display import escape
from headprune.core.files import atomic_path
from headprune.core.metrics import POINTS, RATIO, drop_words, is_one_of
from headprune.core.paired import Drop
from headprune.core.record import SpeedRow
from headprune.core.sweeps import Setting, SweepTable, words
from headprune.report.formats import count, fixed, times
from headprune.report.inputs import TABLE_ALONE, SweepInputs
from headprune.report.plot import band, plain, style, style_of_random
from headprune.report.speed import verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPLITS = ("validation", "test")
_LABELS = {
    "heads": "heads",
    "neurons": "neurons",
    "params": "parameters",
    "macs": "multiply-adds",
    "kv": "KV-cache bytes per token",
}


def draw_tradeoff(table: SweepTable, path: str | Path, by: str | None = None) -> Path:
    """Draw the drop against size, for validation and for test rows.

    One line per method: its mean over calibration draws, with bars of one standard deviation;
    ``random`` is a band. Rings mark the Pareto curve of the validation rows, in both panels. The
    ending of ``path`` gives the format.
    """
    import matplotlib
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    path, by = Path(path), by or table.usual_size
    front = table.front(by)
    kind = path.suffix.removeprefix(".")
    # The salt makes identifiers in an SVG, and so the file, depend on the table alone. Names in the
    # table are not to become LaTeX commands.
    with matplotlib.rc_context({"svg.hashsalt": "headprune", "text.usetex": False}):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for panel, split in zip(panels, _SPLITS, strict=True):
            _panel(panel, table, front, split, by)
        panels[0].set_ylabel(plain(_drop_label(table.metric)))
        panels[0].legend(fontsize=8)
        figure.suptitle(f"{plain(table.name)}: {len(table.rows)} runs", fontsize=11)
        # Without a date the same table gives the same file.
        metadata = {"Date": None} if kind == "svg" else None
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata=metadata)
    return path


def _panel(panel: Axes, table: SweepTable, front: Sequence[Setting], split: str, by: str) -> None:
    """Draw one split: every method, and rings around the Pareto curve."""
    from matplotlib.ticker import MaxNLocator

    methods: dict[str, list[Setting]] = {}
    for setting in table.settings():
        methods.setdefault(setting.method, []).append(setting)
    scale = _scale(table.metric)
    drawn: Counter[bool] = Counter()
    for method, settings in methods.items():
        settings.sort(key=lambda setting: setting.size(by))
        # As in the page's curves, random heads have no colour and are counted by themselves.
        is_random = settings[0].is_random
        _method(panel, plain(method), settings, split, by, scale, drawn[is_random])
        drawn[is_random] += 1
    rings: dict[str, Any] = {"s": 90, "facecolors": "none", "edgecolors": "black", "zorder": 3}
    sizes, drops = [], []
    for setting in front:
        sizes.append(setting.size(by))
        drops.append(scale * getattr(setting, split).mean)
    panel.scatter(sizes, drops, label="Pareto curve (validation)", linewidths=1.2, **rings)
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_title(f"{split} rows", fontsize=10)
    panel.set_xlabel(f"{_LABELS[by]} (of {count(table.base[by])})")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)


def _method(
    panel: Axes,
    name: str,
    settings: Sequence[Setting],
    split: str,
    by: str,
    scale: float,
    number: int,
) -> None:
    """Draw one method's settings, in order of size: a line with error bars, or a band."""
    sizes, means, deviations = [], [], []
    for setting in settings:
        spread = getattr(setting, split)
        sizes.append(setting.size(by))
        means.append(scale * spread.mean)
        # One draw has no standard deviation.
        deviations.append(scale * (spread.sd or 0.0))
    if settings[0].is_random:
        low, high = band(means, deviations)
        panel.fill_between(sizes, low, high, color="0.85", linewidth=0)
        panel.plot(sizes, means, label=name, **style_of_random(number))
    else:
        panel.errorbar(sizes, means, yerr=deviations, label=name, **style(number))


def _scale(metric: str) -> float:
    """Return the factor that turns drops into points or percent, or 1."""
    return 100.0 if is_one_of(metric, (*POINTS, *RATIO)) else 1.0


def _drop_label(metric: str) -> str:
    if is_one_of(metric, POINTS):
        return f"points of {metric} lost"
    if is_one_of(metric, RATIO):
        return f"{metric}, increase in %"
    return f"{metric}, increase"


@dataclass(frozen=True)
class SweepCell:
    """A cell of the table: its text, what it is sorted by, and a smaller note."""

    text: str
    key: float | None = None  # None is text
    note: str = ""

    @property
    def script_key(self) -> str:
        """The number as the page's script reads it; empty for text."""
        if self.key is None:
            return ""
        return str(self.key).replace("inf", "Infinity").replace("nan", "Infinity")


@dataclass(frozen=True)
class SweepRow:
    """A setting: its cells, by ``SweepView.header``, and the file of its best plan.

    ``marks`` says whether it is the best of its budget, or on the Pareto curve.
    """

    cells: tuple[SweepCell, ...]
    plan: str  # path in the sweep's folder
    marks: str


@dataclass(frozen=True)
class SweepView:
    """The table of a sweep, formatted.

    Args:
        title: The sweep and how many runs it has.
        verdict: What `pick` finds, and how many settings beat random heads.
        details: The figures behind it.
        notes: The uncut model, and how to read the table.
        header: Columns; one for the plan follows.
        rows: Every setting with a finished run.
        command: A shell line that picks a model; empty where none is known to. It works in the
            folder where the sweep was started, from which the paths of its recipe begin.
        failed: Runs that ended in an error.
    """

    title: str
    verdict: str
    details: str
    notes: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[SweepRow, ...]
    command: str
    failed: tuple[str, ...]


def sweep_view(table: SweepTable, inputs: SweepInputs = TABLE_ALONE) -> SweepView:
    """Format a sweep for its page and its summary."""
    base = table.base
    # Only decoders have a cache.
    sizes = [size for size in _LABELS if base.get(size) is not None]
    counts = [f"{count(base[size])} {_LABELS[size]}" for size in sizes]
    values = [f"{base[split]:.4f} on {base[f'{split}_rows']:,} {split} rows" for split in _SPLITS]
    header = ["budget", "setting", *(_LABELS[size] for size in sizes)]
    unit = drop_words(table.metric, 0.0).partition(" ")[2]
    header += [f"{split} drop{', ' * bool(unit)}{unit}" for split in _SPLITS]
    notes = [
        f"The uncut model: {table.metric} {', '.join(values)}; {', '.join(counts)}.",
        (
            "Drops are means over calibration draws, ± one standard deviation; below zero is better"
            " than the uncut model. Settings are ranked by validation rows; test rows are only"
            " reported."
        ),
    ]
    if any(inputs.against_random):
        header.append("against random")
        notes.append(
            "Against random: how much less it loses on test rows than random heads of the same"
            " budget, with a 95 % interval."
        )
    if inputs.speeds:
        header.append("speed")
        row = next(iter(inputs.speeds.values()))
        notes.append(
            f"Speed: times as fast as the uncut model at batch {row.batch:,} × {row.length:,}"
            " tokens, timed in turn, with a 95 % interval; ≈ is no measurable difference."
        )
    command = ""
    if inputs.max_drop is not None:
        folder = shlex.quote(inputs.folder)
        command = f"headprune pick {folder} --max-drop {inputs.max_drop:g} --out small"
    return SweepView(
        title=f"{table.name}: {len(table.rows)} runs of {len(table.settings())} settings",
        verdict=_sweep_verdict(table, inputs),
        details=_sentences(inputs.pick.splitlines()[1:]),
        notes=tuple(notes),
        header=tuple(header),
        rows=_sweep_rows(table, inputs, sizes),
        command=command,
        failed=tuple(map(_failure, table.failed)),
    )


def _sweep_verdict(table: SweepTable, inputs: SweepInputs) -> str:
    """Say what the sweep found, random heads included."""
    if not table.rows:
        return "No run of this sweep is finished."
    parts = [_sentences(inputs.pick.splitlines()[:1])] if inputs.pick else []
    known = [drop for drop in inputs.against_random if drop is not None]
    if known:
        better = sum(drop.high < 0 for drop in known)
        parts.append(
            f"{better} of {len(known)} settings are shown to lose less than random heads of the"
            " same budget."
        )
    return " ".join(parts)


def _sentences(lines: Sequence[str]) -> str:
    """Write each line as a sentence."""
    texts = [line.strip() for line in lines]
    return " ".join(f"{text[:1].upper()}{text[1:]}." for text in texts)


def _failure(run: Mapping[str, Any]) -> str:
    settings = {key: value for key, value in run.items() if key != "error"}
    return f"{words(settings)}: {run['error']}"


def _ranked(table: SweepTable) -> dict[str, set[FrozenDict]]:
    """The settings that are marked in the table, by their mark."""
    return {
        "best of its budget": {setting.values for setting in table.best()},
        "Pareto curve": {setting.values for setting in table.front()},
    }


def _sweep_rows(
    table: SweepTable, inputs: SweepInputs, sizes: Sequence[str]
) -> tuple[SweepRow, ...]:
    settings = table.settings()
    ranked = _ranked(table) if settings else {}  # without a finished run there is nothing to rank
    against = inputs.against_random or (None,) * len(settings)
    rows = []
    for setting, drop in zip(settings, against, strict=True):
        cells = [SweepCell(setting.budget or "all"), SweepCell(setting.method)]
        for size in sizes:
            value = setting.size(size)
            cells.append(SweepCell(count(round(value, 1)), value))
        for split in _SPLITS:
            spread = getattr(setting, split)
            cells.append(SweepCell(_number(table.spread(spread)), spread.mean))
        if any(inputs.against_random):
            cells.append(_against_random(table.metric, setting, drop))
        if inputs.speeds:
            cells.append(_speed_cell(inputs.speeds.get(setting.best["plan"])))
        marks = [name for name, among in ranked.items() if setting.values in among]
        rows.append(SweepRow(tuple(cells), setting.best["plan"], ", ".join(marks)))
    return tuple(rows)


def _against_random(metric: str, setting: Setting, drop: Drop | None) -> SweepCell:
    if setting.is_random:
        return SweepCell("random", -math.inf)
    if drop is None:
        return SweepCell("–", -math.inf)
    word = "ties"
    if drop.high < 0:
        word = "better"
    elif drop.low > 0:
        word = "worse"
    gains = [-drop.value, -drop.high, -drop.low]
    gain, low, high = (_number(drop_words(metric, one)) for one in gains)
    return SweepCell(f"{word}, {gain}", -drop.value, f"{low} to {high}")


def _number(drop: str) -> str:
    """A drop without its unit, which the header has."""
    return drop.removesuffix(" points").removesuffix(" %").replace("-", "−")


def _speed_cell(row: SpeedRow | None) -> SweepCell:
    if row is None:
        return SweepCell("–", -math.inf)
    ratio = times(row.ratio)
    if verdict(row)[1] == "plain":
        ratio = f"≈ {ratio}"
    return SweepCell(ratio, row.ratio, f"{fixed(row.low, 2)} to {fixed(row.high, 2)}")


def render_tradeoff(table: SweepTable, inputs: SweepInputs = TABLE_ALONE) -> str:
    """Write the summary as Markdown: every setting, and failed runs."""
    view = sweep_view(table, inputs)
    lines = [f"# {escape(view.title)}", ""]
    if view.verdict:
        lines += [escape(view.verdict), ""]
    if view.details:
        lines += [escape(view.details), ""]
    lines += [f"- {escape(note)}" for note in view.notes]
    if view.rows:
        # Budget and setting are text, marks and plan too; all other columns are numbers.
        rule = f"| --- | --- |{' ---: |' * (len(view.header) - 2)} --- | --- |"
        lines += ["", "## All settings", "", _markdown_row([*view.header, "", "best plan"]), rule]
        lines += map(_markdown_setting, view.rows)
        lines += ["", "![Trade-off](tradeoff.svg)"]
    if view.failed:
        lines += ["", "## Failed", "", *(f"- {escape(failed)}" for failed in view.failed)]
    return "\n".join(lines) + "\n"


def _markdown_setting(row: SweepRow) -> str:
    cells = []
    for cell in row.cells:
        note = f" ({cell.note})" if cell.note else ""
        cells.append(escape(f"{cell.text}{note}"))
    # A plan's file is called plans/DIGEST.json.
    return _markdown_row([*cells, row.marks, f"[{row.plan[6:14]}]({row.plan})"])


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
