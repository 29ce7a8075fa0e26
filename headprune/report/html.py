"""The HTML report: one file that loads nothing, with one script that is allowed by its hash."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headprune.core.agreement import MEASURES, Agreement
from headprune.core.display import clean
from headprune.core.record import RunRecord
from headprune.core.sweeps import SweepTable
from headprune.report.comparison import Compared, comparison_view
from headprune.report.curve import COLOURS, HEIGHT, WIDTH, curve
from headprune.report.figures import agreement_dots, bars, intervals
from headprune.report.inputs import NOTHING, TABLE_ALONE, ReportInputs, SweepInputs
from headprune.report.series import points_of_sweep
from headprune.report.tradeoff import sweep_view
from headprune.report.view import view


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("headprune.report"),
        autoescape=True,  # by hand: the suffix .j2 would not switch it on
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Data may hold terminal colours and control characters, which no page should show.
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    source = files("headprune.report") / "templates" / "report.js"
    # The template begins the script on a new line, which the hash covers.
    script = "\n" + source.read_text(encoding="utf-8")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page_script = Markup(script)  # a file of this package  # nosec B704
    environment.globals.update(script=page_script, script_hash=allowed)
    environment.globals.update(measures=list(MEASURES), colours=COLOURS)
    return environment


def _agreement(agreement: Agreement | None) -> Any:
    if agreement is None:
        return None
    # The template knows the agreement by this key.
    return {"found": agreement, "pairs": agreement_dots(agreement)}


def render_html(record: RunRecord, inputs: ReportInputs = NOTHING) -> str:
    """Render the report as one HTML page.

    All data is escaped. A content security policy forbids every load, and every script but the
    page's own, which sorts, switches and draws. Without scripts the page lacks only the pictures of
    attention. Missing parts of the record are left out and named at the end. A failed or
    interrupted run shows its stage, its error and what it had measured.

    Args:
        record: The record.
        inputs: Attention pictures, other scores and their agreement.

    >>> record = RunRecord(
    ...     "demo", "failed", "score", "2026-01-01T00:00:00Z", error="no <script> in data"
    ... )
    >>> page = render_html(record)
    >>> "no &lt;script&gt; in data" in page, page.count("<script")
    (True, 1)
    """
    template = _environment().get_template("report.html.j2")
    seen = view(record, inputs)
    return template.render(
        view=seen,
        charts=list(map(bars, seen.quality)),
        intervals=intervals(record.speed),
        agreement=_agreement(seen.agreement),
    )


def render_comparison_html(compared: Sequence[Compared], agreement: Agreement | None = None) -> str:
    """Render several records as one page, a column per record; as safe as the page of one.

    Args:
        compared: Two records or more.
        agreement: How alike their scores order the heads.

    Raises:
        InvalidValue: fewer than two records, or names that are not different.
    """
    template = _environment().get_template("comparison.html.j2")
    seen = comparison_view(compared, agreement)
    return template.render(
        view=seen, size={"width": WIDTH, "height": HEIGHT}, agreement=_agreement(agreement)
    )


def render_sweep_html(table: SweepTable, inputs: SweepInputs = TABLE_ALONE) -> str:
    """Render a sweep as one page: its trade-off on validation and test rows, and all its settings.

    Args:
        table: The sweep's table.
        inputs: Speeds, random heads, and what `pick` answers.
    """
    template = _environment().get_template("sweep.html.j2")
    curves = []
    for split in ("validation", "test"):
        drawn = curve(points_of_sweep(table, split), split)
        # Settings of one size have no curve.
        if drawn is not None:
            curves.append(drawn)
    size = {"width": WIDTH, "height": HEIGHT}
    return template.render(view=sweep_view(table, inputs), curves_drawn=curves, size=size)
