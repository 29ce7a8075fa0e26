"""Run the laws for one scorer or one layout: ``pytest tests/laws --scorer NAME`` or ``--layout NAME``.

``tests/conftest.py`` reads the options; names are those of the registries, or of a layout's family.

``make test`` runs the laws over one family of every layout, ``make test-all`` over all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from headprune.core.errors import did_you_mean
from headprune.layouts import registry as layouts
from headprune.scoring import registry as scorers

#: The scorer that was asked for; None means all of them.
SCORER: str | None = None


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("laws")
    group.addoption("--scorer", metavar="NAME", help="run the laws of scores for this scorer alone")
    group.addoption("--layout", metavar="NAME", help="run the laws for this layout or family alone")


def read_options(config: pytest.Config) -> None:
    """Check the names, and note the scorer before test files are imported.

    Raises:
        pytest.UsageError: a name that is not registered, or ``random``, which no law is about.
    """
    global SCORER
    SCORER, layout = config.getoption("--scorer"), config.getoption("--layout")
    if SCORER:
        check("--scorer", SCORER, set(scorers.names()) - {"random"})
    if layout:
        check("--layout", layout, every_name())


def check(option: str, name: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if name not in names:
        hint = did_you_mean(name, names)
        raise pytest.UsageError(f"{option}: unknown name {name!r}. {hint}")


def families_of(name: str) -> set[str]:
    """A layout's name and its families; a family's name alone."""
    if name in layouts.names():
        return {name, *(family for family, _ in layouts.get(name).families)}
    return {name}


def every_name() -> set[str]:
    found = set(layouts.names())
    for name in layouts.names():
        found |= families_of(name)
    return found


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that do not concern the scorer or the layout that was asked for."""
    if SCORER:
        laws = [item for item in items if "test_law_6_" in item.nodeid]
        keep = [item for item in laws if ("auto" in item.name) == (SCORER == "auto")]
    elif config.getoption("--layout"):
        wanted = families_of(config.getoption("--layout"))
        keep = [item for item in items if wanted & parameters(item)]
    else:
        return
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = keep


def mark_further_families(items: list[pytest.Item]) -> None:
    """Mark further families of a layout as slow: most of their code is the first one's.

    The first one of every layout of feed-forwards counts as well.
    """
    families = [item for item in items if isinstance(arguments(item).get("subject"), tuple)]
    first = first_families() if families else set()
    for item in families:
        if arguments(item)["subject"] not in first:
            item.add_marker(pytest.mark.slow)


def first_families() -> set[tuple[str, str]]:
    """A family of every layout, as pairs of the layout of its attention and its name."""
    from tests.laws.families import ONE_EACH  # it imports Transformers; most tests do not

    families = {name: layouts.get(name).families for name in layouts.names()}
    return {(name, own[0][0]) for name, own in families.items() if own} | {*ONE_EACH}


def arguments(item: pytest.Item) -> dict[str, Any]:
    """What a test is parametrized with, by name."""
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec else {}


def parameters(item: pytest.Item) -> set[str]:
    """The strings among a test's parameters, also those inside pairs (layout, family)."""
    found = set()
    for value in arguments(item).values():
        parts = value if isinstance(value, tuple) else (value,)
        found |= {part for part in parts if isinstance(part, str)}
    return found
