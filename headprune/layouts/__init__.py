"""Layouts: where each model family keeps its heads; one file per family.

The file's name is the layout's name. To add one, write ``layouts/<name>.py`` with a constant
``LAYOUT``. CONTRIBUTING.md shows an example.
"""

from headprune.core.registry import Registry

registry = Registry(
    "layout", "headprune.layouts", "headprune.layouts", attribute=lambda name: "LAYOUT"
)
