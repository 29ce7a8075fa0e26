"""Scorers that need selection, cuts and refits: `auto` and `ladder`.

`auto` tries several scorers and judges each one's plan on held-out rows. `ladder` measures what
each number of kept heads or neurons costs at one site. `refitted_loss_of` measures whole plans.
Both scorers are like any other: ``hp.score(model, batches, "auto")``, ``score.scorer: auto``.
"""

from headprune.core.lazy import lazy

#: Imported on first use.
_HOME = {"Auto": "headprune.choice.auto", "Ladder": "headprune.choice.ladder"}

__all__ = ["Auto", "Ladder"]
__getattr__, __dir__ = lazy(__name__, _HOME)
