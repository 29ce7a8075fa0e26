"""Importance scorers, one per file; a file is named as its scorer, and in camel case its class.

``hp.score(model, batches, "taylor")`` takes the name; ``hp.scoring.Taylor(reduce="token")`` is the
same scorer with other settings.
"""

import importlib
from typing import Any

from headprune.core.registry import Registry

registry = Registry(
    "scorer",
    "headprune.scoring",
    "headprune.scorers",
    elsewhere={"auto": "headprune.choice.auto", "ladder": "headprune.choice.ladder"},
)

#: Where the other public names are defined; their modules, and torch, are imported on first use.
_HOME = {
    "Stable": "headprune.scoring._stopping",
    "agreement": "headprune.scoring._agreement",
    "fisher_matrix": "headprune.scoring.fisher",
    "gate_gradients": "headprune.scoring._gradients",
    "ggn_matrix": "headprune.scoring.ggn",
    "loss_of": "headprune.scoring._callables",
    "mask_losses": "headprune.scoring._masks",
    "rank_average": "headprune.scoring._agreement",
    "refitted_loss_of": "headprune.choice.refitted",
    "rescorer": "headprune.scoring._callables",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    return registry.class_named(name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "registry", *map(registry.attribute, registry)])
