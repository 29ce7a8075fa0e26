"""The table of docs/checkpoints.md: which model families each format can hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from headprune.layouts import registry

ROOT = Path(__file__).resolve().parents[2]


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("formats_benchmark", ROOT / "benchmarks" / "formats.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORMATS = benchmark()
FAMILIES = sorted((family, layout) for layout in registry.names() for family, _ in registry.get(layout).families)


def test_the_table_has_every_family() -> None:
    lines = FORMATS.documented().splitlines()
    assert lines[2] == FORMATS.HEADER
    assert [line.split("|")[1].strip() for line in lines[4:]] == [f for f, _ in FAMILIES], "run benchmarks/formats.py"


def test_the_table_is_of_the_installed_and_pinned_version() -> None:
    """`make test` installs what constraints.txt pins; the page names what it was measured with."""
    words = "measure again: python benchmarks/formats.py"
    assert FORMATS.documented().startswith(f"Transformers {hf.__version__}."), words
    assert f"transformers=={hf.__version__}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(("family", "layout"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_the_table_is_true(family: str, layout: str) -> None:
    line = f"| {family} | {' | '.join(FORMATS.row(layout, family))} |"
    assert line in FORMATS.documented().splitlines(), "measure again: python benchmarks/formats.py"
