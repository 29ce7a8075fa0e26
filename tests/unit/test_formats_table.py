"""The table of docs/checkpoints.md: which model families each format can hold."""

from pathlib import Path

import pytest
import transformers as hf

from headprune.layouts import registry
from tests.scripts import benchmark

ROOT = Path(__file__).resolve().parents[2]


FORMATS = benchmark("formats")
FAMILIES = sorted(
    (family, layout) for layout in registry.names() for family, _ in registry.get(layout).families
)


#: Families whose rows were found in different ways; the others take minutes.
QUICK = {"distilbert", "falcon-alibi", "labml", "llama", "mpnet", "phi3", "siglip", "vit"}


def test_the_table_has_every_family():
    lines = FORMATS.documented().splitlines()
    assert lines[2] == FORMATS.HEADER
    assert [line.split("|")[1].strip() for line in lines[4:]] == [f for f, _ in FAMILIES], (
        "run benchmarks/formats.py"
    )


def test_the_table_is_of_the_installed_and_pinned_version():
    """`make test` installs what constraints.txt pins; the page names what it was measured with."""
    words = "measure again: python benchmarks/formats.py"
    assert FORMATS.documented().startswith(f"Transformers {hf.__version__}."), words
    assert f"transformers=={hf.__version__}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*p, id=p[0], marks=() if p[0] in QUICK else pytest.mark.long) for p in FAMILIES],
)
def test_the_table_is_true(family, layout):
    line = f"| {family} | {' | '.join(FORMATS.row(layout, family))} |"
    assert line in FORMATS.documented().splitlines(), "measure again: python benchmarks/formats.py"
