"""Model classes by name: those of Transformers, and ours."""

from __future__ import annotations

import importlib
from typing import Any

#: Our own models, and where they are.
OWN = {"TransformerForTranslation": "headprune.attention.transformer"}


def class_named(name: str) -> type | None:
    """Find the model class of this name, Transformers' or ours; None where there is none.

    >>> class_named("TransformerForTranslation").__module__, class_named("Linear")
    ('headprune.attention.transformer', None)
    """
    import transformers

    home = transformers
    if name in OWN:
        home = importlib.import_module(OWN[name])
    value = getattr(home, name, None)
    if isinstance(value, type) and issubclass(value, transformers.PreTrainedModel):
        return value
    return None


def class_name_of(config: Any) -> str:
    """Read the name of the model class from a configuration; empty where there is none.

    >>> from types import SimpleNamespace
    >>> class_name_of(SimpleNamespace(architectures=["BertModel"]))
    'BertModel'
    >>> class_name_of(SimpleNamespace(architectures=0.5))
    ''
    """
    # A configuration from a file may hold anything.
    names = config.architectures
    return str(names[0]) if isinstance(names, list) and names else ""
