"""Model classes by name: those of Transformers, and ours."""

from __future__ import annotations

import importlib

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
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None
