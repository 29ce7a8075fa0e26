"""Layouts: where each model family keeps its heads; one file per family.

The file's name is the layout's name. To add one, write ``layouts/<name>.py`` with a constant
``LAYOUT``. CONTRIBUTING.md shows an example.
"""

from headprune.core.errors import InvalidValue
from headprune.core.layout import AttentionLayout
from headprune.core.registry import Registry

registry = Registry(
    "layout", "headprune.layouts", "headprune.layouts", attribute=lambda name: "LAYOUT"
)


def register(layout: AttentionLayout) -> None:
    """Have every verb of this process find the modules of a layout.

    For one of your own, or one that ``hp.propose_layouts`` found: ``find_sites(model)`` then needs
    no ``layouts=``. Another package registers with an entry point instead. Folders of
    ``hp.save_pretrained`` hold it as data.

    Raises:
        NameClash: another layout has the name already.
        InvalidValue: no ``AttentionLayout``.
    """
    if not isinstance(layout, AttentionLayout):
        must = "an AttentionLayout, one for each call"
        raise InvalidValue("layouts.register(layout)", must, type(layout).__name__)
    registry.add(layout.name, layout)


def is_registered(layout: AttentionLayout) -> bool:
    """Whether a layout, or its copy, is in the registry: this library's or a package's."""
    return layout.name in registry and registry.get(layout.name) == layout


def is_builtin(layout: AttentionLayout) -> bool:
    """Whether a layout is one of this library's files."""
    return registry.is_builtin(layout.name) and registry.get(layout.name) is layout
