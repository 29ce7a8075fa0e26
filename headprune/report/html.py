"""The HTML report: one file that loads nothing, runs no script and opens offline."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from headprune.core.record import RunRecord
from headprune.report.figures import attention_maps, bars, intervals
from headprune.report.formats import clean
from headprune.report.view import view


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("headprune.report"),
        autoescape=True,  # by hand: the suffix .j2 would not switch it on
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )


def render_html(record: RunRecord) -> str:
    """The report as one HTML page.

    All data is escaped, and a content security policy forbids every load. Missing parts of the record are left out
    and named at the end; a failed or interrupted run shows its stage, its error and whatever it had measured.

    >>> record = RunRecord("demo", "failed", "score", "2026-01-01T00:00:00Z", error="no rows in <data>")
    >>> page = render_html(record)
    >>> "no rows in &lt;data&gt;" in page, "<script" in page
    (True, False)
    """
    template = _environment().get_template("report.html.j2")
    seen = view(record)
    charts = [bars(group) for group in seen.quality]
    return template.render(
        view=seen, charts=charts, intervals=intervals(record.speed), attention=attention_maps(record)
    )
