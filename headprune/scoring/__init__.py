"""Importance scorers: one file a scorer, the file's name is its registered name, its class the name
in camel case.

``hp.score(model, batches, "taylor")`` takes the name; ``hp.scoring.Taylor(reduce="token")`` is the
same scorer with settings of your own.
"""

import importlib
from typing import Any

from headprune.core.registry import Registry

registry = Registry(
    "scorer", "headprune.scoring", "headprune.scorers", elsewhere={"auto": "headprune.choice.auto"}
)

_HOME = {
    "Stable": "headprune.scoring._stopping",
    "agreement": "headprune.scoring._agreement",
    "fisher_matrix": "headprune.scoring.fisher",
    "gate_gradients": "headprune.scoring._gradients",
    "ggn_matrix": "headprune.scoring.ggn",
    "loss_of": "headprune.scoring._callables",
    "mask_losses": "headprune.scoring._masks",
    "rank_average": "headprune.scoring._agreement",
    "rescorer": "headprune.scoring._callables",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    return registry.class_named(name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "registry", *map(registry.attribute, registry)])
