"""Which scorer to trust on this model, data and budget: each candidate's plan is cut, refitted and
judged.

`auto` is a scorer like any other (``hp.score(model, batches, "auto")``, ``score.scorer: auto`` in a
recipe). It stands above the rooms that it puts together: scores, selection, the cut and the refit.
"""

import importlib
from typing import Any

#: Imported on first use.
_HOME = {"Auto": "headprune.choice.auto", "Ladder": "headprune.choice.ladder"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
