"""Selectors answer as they did, and refuse in the same words: what ``tests/selection_answers.json``
holds."""

from __future__ import annotations

import json

import pytest

from headprune.selection import registry
from tests.selection_answers import FILE, GROUPS, SETTINGS, answers

HELD = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("group", GROUPS)
def test_the_answers_are_those_that_are_held(group: str) -> None:
    """Where a change is meant: ``python -m tests.selection_answers``, and a line of
    CHANGELOG.md."""
    assert answers(group) == HELD[group]


def test_every_selector_and_every_setting_of_it_is_asked() -> None:
    assert set(SETTINGS) == set(registry.names())
    assert set(HELD) == set(GROUPS)
    for name, asked in SETTINGS.items():
        own = set(registry.get(name)().settings) - {"inner_settings"}
        keys = {key for settings in asked for key in settings}
        assert own <= keys | {"min_heads", "multiple_of"}, name
