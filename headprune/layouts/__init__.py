"""Layouts: where each family keeps its heads. One file a family; the file's name is the layout's
name.

To add one, write ``layouts/<name>.py`` with a constant ``LAYOUT``; see any of them and
CONTRIBUTING.md.
"""

from headprune.core.registry import Registry

registry = Registry(
    "layout", "headprune.layouts", "headprune.layouts", attribute=lambda name: "LAYOUT"
)
