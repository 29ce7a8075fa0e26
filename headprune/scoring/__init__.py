"""Importance scorers: one file a scorer, the file's name is its registered name, its class the name in camel case.

``hp.score(model, batches, "taylor")`` takes the name; ``hp.scoring.Taylor(reduce="token")`` is the same scorer with
settings of your own.
"""

from typing import Any

from headprune.core.registry import Registry, camel_case

registry = Registry("scorer", "headprune.scoring", "headprune.scorers")


def __getattr__(name: str) -> Any:
    if name == "gate_gradients":
        from headprune.scoring._gradients import gate_gradients

        return gate_gradients
    for entry in registry.names() if name[:1].isupper() else ():
        if camel_case(entry) == name:
            return registry.get(entry)
    raise AttributeError(f"module 'headprune.scoring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["gate_gradients", "registry", *map(camel_case, registry.names())])
