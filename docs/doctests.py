"""An extension of Griffe: examples with prompts in docstrings become code blocks of the API pages.

Our docstrings have them as doctest reads them, without a heading; Markdown would take the prompts
for quotations.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(Extension):
    """Fences every run of lines that begins with a prompt."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """The docstring with its examples as blocks."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", docstring)
