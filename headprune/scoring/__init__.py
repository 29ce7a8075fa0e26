"""Importance scorers: one file a scorer, the file's name is its registered name, its class the name in camel case.

``hp.score(model, batches, "taylor")`` takes the name; ``hp.scoring.Taylor(reduce="token")`` is the same scorer with
settings of your own.
"""

from typing import Any

from headprune.core.registry import Registry

registry = Registry("scorer", "headprune.scoring", "headprune.scorers")


def __getattr__(name: str) -> Any:
    if name == "gate_gradients":
        from headprune.scoring._gradients import gate_gradients

        return gate_gradients
    return registry.class_named(name)


def __dir__() -> list[str]:
    return sorted(["gate_gradients", "registry", *map(registry.attribute, registry)])
