"""The Markdown report: the same numbers as the HTML page, as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from headprune.core.agreement import Agreement
from headprune.core.display import clean, escape
from headprune.core.record import RunRecord
from headprune.report.comparison import Compared, comparison_view
from headprune.report.inputs import NOTHING, ReportInputs
from headprune.report.view import view


def block(text: str) -> str:
    """Write text as a fenced block that no backticks inside can close."""
    text = clean(text).strip("\n")
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    # At least one backtick longer than any run of them in the text.
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


@cache
def _environment() -> Environment:
    # Markdown has its own escapes: templates pass every value through `md` or `block`.
    environment = Environment(
        loader=PackageLoader("headprune.report"),
        autoescape=False,  # no HTML is made here  # nosec B701
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(md=escape, block=block)
    return environment


def render_markdown(record: RunRecord, inputs: ReportInputs = NOTHING) -> str:
    """Render the report as GitHub-flavoured Markdown.

    >>> print(
    ...     render_markdown(
    ...         RunRecord("demo", "running", "score", "2026-01-01T00:00:00Z")
    ...     ).splitlines()[0]
    ... )
    # demo: running
    """
    return _rendered("report.md.j2", view=view(record, inputs))


def render_comparison_markdown(
    compared: Sequence[Compared], agreement: Agreement | None = None
) -> str:
    """Render several records as GitHub-flavoured Markdown, a column per record.

    Raises:
        InvalidValue: fewer than two records, or names that are not different.
    """
    return _rendered("comparison.md.j2", view=comparison_view(compared, agreement))


def _rendered(template: str, **values: Any) -> str:
    text = _environment().get_template(template).render(**values)
    # Sections that are left out leave empty lines behind.
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
