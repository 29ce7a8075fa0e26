"""The docs are true: examples run, written tables are those of today, refusals name listed
properties."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headprune import scoring, selection
from headprune.core.registry import Registry
from headprune.detect.properties import PROPERTIES
from tests.documents import DOCS, PAGES, ROOT
from tests.scripts import benchmark, script

README = " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize(
    "path", sorted(p for p in DOCS.glob("*.md") if ">>>" in p.read_text()), ids=lambda p: p.name
)
def test_examples_run(path: Path) -> None:
    found = doctest.testfile(str(path), module_relative=False)
    assert found.attempted > 0
    assert found.failed == 0


def test_a_layout_of_ones_own_takes_at_most_15_lines() -> None:
    text = (DOCS / "custom-models.md").read_text()
    (layout,) = re.findall(r">>> layout = hp\.AttentionLayout\(.*?\n\.\.\. \)", text, re.DOTALL)
    assert len(layout.splitlines()) <= 15


def test_written_tables_are_fresh(tmp_path: Path) -> None:
    tables = script(DOCS / "tables.py")
    tables.main(tmp_path)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")}
    assert written == set(tables.WRITES)
    assert {"README.md", "docs/scorers.md", "docs/api-methods.md"} <= written
    for name in written:
        fresh = (tmp_path / name).read_text()
        assert fresh == (ROOT / name).read_text(), f"{name}: run `python docs/tables.py`"


@pytest.mark.parametrize("registry", [scoring.registry, selection.registry], ids=lambda r: r.kind)
def test_every_method_says_when_to_take_it(registry: Registry) -> None:
    told = script(DOCS / "tables.py").told
    lacking = [name for name in registry.names() if not told(registry.get(name), "When")]
    assert lacking == [], "a line `When: ...` in the docstring"


def test_the_packages_of_the_architecture_are_those_of_the_code() -> None:
    text = (DOCS / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "headprune").glob("*/__init__.py")}
    described, _, imports = text.partition("## Packages")[2].partition("Imports go down only")
    assert set(re.findall(r"^\| `(\w+)/` \|", described, re.MULTILINE)) == packages
    listed = re.findall(r"^\| `(\w+)` \| ([\w, ]*) \| ([\w, ]*) \|$", imports, re.MULTILINE)
    start = "__main__"  # the command line, for `python -m headprune`
    assert {package for package, _, _ in listed} == {*packages, start}
    without_torch = {package for package, _, other in listed if "torch" not in other.split(", ")}
    assert without_torch == {"core", "maps", "recipes", "selection", "report", start}


def test_every_decision_is_listed_and_names_files_that_exist() -> None:
    """``core/heads.py`` in a note is a file of the package, ``tests/...`` one of the repository."""
    architecture = DOCS / "architecture.md"
    notes = sorted((DOCS / "decisions").glob("*.md"))
    assert len(notes) > 30
    for page in (architecture, *notes):
        if page in notes:
            assert f"(decisions/{page.name})" in architecture.read_text()
        for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text()):
            places = (ROOT / name, ROOT / "headprune" / name)
            assert any(place.is_file() for place in places), f"{page.name}: {name}"


def test_counts_of_the_readme_are_those_of_the_registries() -> None:
    """They are written by docs/tables.py, as long as the words around them are there."""
    said = r"(\d+) layouts for (\d+) model families and variants"
    ((layouts, families),) = re.findall(said, (DOCS / "layouts.md").read_text())
    assert f"{families} families and variants" in README
    assert f"[{layouts} layouts]" in README
    assert f"{len(scoring.registry)} [scorers]" in README


def test_coverage_is_that_of_its_record_and_good_enough() -> None:
    record: dict[str, Any] = json.loads((ROOT / "benchmarks/records/coverage.json").read_text())
    coverage, rows = benchmark("family_coverage"), record["rows"]
    assert (DOCS / "coverage.md").read_text() == coverage.table(record)
    types = {row["model_type"] for row in rows}
    assert not types & coverage.known_types(), "run `python benchmarks/family_coverage.py`"
    assert len(types) == len(rows) == 20
    n_exact = sum(row["status"] == "exact" for row in rows)
    assert n_exact >= 14
    assert f"{n_exact} are cut exactly, {len(rows) - n_exact} refused" in README
    for row in rows:
        if row["status"] == "exact":
            assert row["sites"] > 0
            assert row["difference"] <= 1e-10
        else:
            assert row["status"] == "refused"
            assert any(name in row["reason"] for name in PROPERTIES), row


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
