"""Which scorer to trust on this model, data and budget: each candidate's plan is cut, refitted and
judged.

`auto` is a scorer like any other (``hp.score(model, batches, "auto")``, ``score.scorer: auto`` in a
recipe). It stands above the rooms that it puts together: scores, selection, the cut and the refit.
"""

from headprune.core.lazy import lazy

#: Imported on first use.
_HOME = {"Auto": "headprune.choice.auto", "Ladder": "headprune.choice.ladder"}

__all__ = ["Auto", "Ladder"]
__getattr__, __dir__ = lazy(__name__, _HOME)
