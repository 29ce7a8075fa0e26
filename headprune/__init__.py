"""headprune finds which attention heads a trained transformer does not need and removes them.

The main path; sites, scores and plans can be printed, saved and loaded::

    sites = hp.find_sites(model)
    scores = hp.score(model, batches, "taylor")
    plan = hp.select(scores, hp.Budget(keep_heads=0.5))
    hp.prune_(model, plan, example=batches[0])  # compares the cut with the gated model
    hp.save_pretrained(model, "small/")

Importing this package imports neither torch nor transformers; every name loads when it is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.core.lazy import lazy
from headprune.core.version import __version__

_HOME = {
    "AttentionLayout": "headprune.core.layout",
    "AttentionMaps": "headprune.maps.attention_maps",
    "AttentionSite": "headprune.core.heads",
    "Budget": "headprune.core.plan",
    "HeadId": "headprune.core.heads",
    "HeadMask": "headprune.core.heads",
    "HeadPruneError": "headprune.core.errors",
    "HeadScores": "headprune.core.scores",
    "HeadSlab": "headprune.core.layout",
    "MultiHeadAttention": "headprune.attention.multi_head",
    "Processes": "headprune.model.processes",
    "PruningPlan": "headprune.core.plan",
    "RunRecord": "headprune.core.record",
    "Stable": "headprune.scoring._stopping",
    "agreement": "headprune.scoring._agreement",
    "attention_maps": "headprune.scoring._attention_maps",
    "find_sites": "headprune.model.sites",
    "from_pretrained": "headprune.checkpoints.checkpoint",
    "gated": "headprune.gating.context",
    "learned_gates": "headprune.gating.learned",
    "prune_": "headprune.surgery.prune",
    "prune_heads_": "headprune.surgery.prune",
    "push_to_hub": "headprune.checkpoints.hub",
    "propose_layouts": "headprune.detect.propose",
    "recover_": "headprune.recovery._api",
    "save_pretrained": "headprune.checkpoints.checkpoint",
    "score": "headprune.scoring._api",
    "select": "headprune.selection._api",
}
_PACKAGES = (
    "attention",
    "bench",
    "checkpoints",
    "core",
    "data",
    "detect",
    "gating",
    "layouts",
    "maps",
    "model",
    "recipes",
    "recovery",
    "report",
    "run",
    "scoring",
    "selection",
    "serving",
    "surgery",
    "sweep",
)
_MODULES = {package: f"headprune.{package}" for package in _PACKAGES} | {
    "plot": "headprune.report.plot"
}

__all__ = ["__version__", *_HOME, *_MODULES]
__getattr__, __dir__ = lazy(__name__, _HOME, _MODULES)

if TYPE_CHECKING:
    from headprune.attention.multi_head import MultiHeadAttention
    from headprune.checkpoints.checkpoint import from_pretrained, save_pretrained
    from headprune.checkpoints.hub import push_to_hub
    from headprune.core.errors import HeadPruneError
    from headprune.core.heads import AttentionSite, HeadId, HeadMask
    from headprune.core.layout import AttentionLayout, HeadSlab
    from headprune.core.plan import Budget, PruningPlan
    from headprune.core.record import RunRecord
    from headprune.core.scores import HeadScores
    from headprune.detect.propose import propose_layouts
    from headprune.gating.context import gated
    from headprune.gating.learned import learned_gates
    from headprune.maps.attention_maps import AttentionMaps
    from headprune.model.processes import Processes
    from headprune.model.sites import find_sites
    from headprune.recovery._api import recover_
    from headprune.report import plot
    from headprune.scoring._agreement import agreement
    from headprune.scoring._api import score
    from headprune.scoring._attention_maps import attention_maps
    from headprune.scoring._stopping import Stable
    from headprune.selection._api import select
    from headprune.surgery.prune import prune_, prune_heads_
