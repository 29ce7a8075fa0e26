"""Reports of one run, of several compared, or of a sweep: one HTML page and its Markdown.

Both forms come from one set of formatted values (`view`), so that their numbers agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.core.lazy import lazy

#: Modules of the public names; importing the package loads none of them.
_HOME = {
    "ReportInputs": "headprune.report.inputs",
    "Compared": "headprune.report.comparison",
    "draw_agreement": "headprune.report.agreement",
    "render_html": "headprune.report.html",
    "render_markdown": "headprune.report.markdown",
    "write_comparison": "headprune.report.write",
    "write_report": "headprune.report.write",
}

__all__ = [
    "ReportInputs",
    "Compared",
    "draw_agreement",
    "render_html",
    "render_markdown",
    "write_comparison",
    "write_report",
]

__getattr__, __dir__ = lazy(__name__, _HOME)

if TYPE_CHECKING:
    from headprune.report.agreement import draw_agreement
    from headprune.report.comparison import Compared
    from headprune.report.html import render_html
    from headprune.report.inputs import ReportInputs
    from headprune.report.markdown import render_markdown
    from headprune.report.write import write_comparison, write_report
