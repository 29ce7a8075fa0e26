"""Model classes by name: those of Transformers, and ours."""

from __future__ import annotations

import importlib
from typing import Any

#: Our own models, and where they are.
OWN = {"TransformerForTranslation": "headprune.attention.transformer"}


def class_named(name: str) -> type | None:
    """The Transformers model class of this name, or ours; None where there is none.

    >>> class_named("TransformerForTranslation").__module__, class_named("Linear")
    ('headprune.attention.transformer', None)
    """
    import transformers

    home = importlib.import_module(OWN[name]) if name in OWN else transformers
    found = getattr(home, name, None)
    return (
        found
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        else None
    )


def class_name_of(config: Any) -> str:
    """The name of the model class that a configuration says it is of, or an empty one; a
    configuration from a file may hold anything there.

    >>> from types import SimpleNamespace
    >>> (
    ...     class_name_of(SimpleNamespace(architectures=["BertModel"])),
    ...     class_name_of(SimpleNamespace(architectures=0.5)),
    ... )
    ('BertModel', '')
    """
    named = config.architectures
    return str(named[0]) if isinstance(named, list) and named else ""
