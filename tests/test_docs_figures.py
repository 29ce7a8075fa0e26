"""Everything measured that README and docs state is what the committed records say: written anew,
it is the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from headprune.core.codec import FrozenDict
from headprune.core.record import RunRecord
from tests.report_records import record_of
from tests.scripts import ROOT, script

DOCS, README = ROOT / "docs", ROOT / "README.md"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return script(DOCS / "figures.py")


def test_pages_and_blocks_are_those_of_the_records(figures: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    # Every block is emptied first, or one that is not written would pass.
    readme.write_text(figures.BLOCK.sub(r"\1\3", README.read_text()))
    figures.main(["--docs", str(tmp_path), "--readme", str(readme)])
    for path in sorted(tmp_path.iterdir()):
        if path.suffix == ".md":
            committed = README if path.name == "README.md" else DOCS / path.name
            assert path.read_text() == committed.read_text(), (
                f"{committed.name}: run `make docs-figures`"
            )
        else:
            assert same_drawing(path, DOCS / path.name), f"{path.name}: run `make docs-figures`"
    expected = {"README.md", "headline.svg", "tradeoff.md", "coverage.md", "scale.md", "serving.md"}
    assert expected <= {path.name for path in tmp_path.iterdir()}


def same_drawing(one: Path, other: Path) -> bool:
    """Byte for byte; another Matplotlib draws otherwise, and is believed."""
    drawn_by = {
        tuple(re.findall(r"<dc:title>(Matplotlib v[^,]+)", path.read_text()))
        for path in (one, other)
    }
    return len(drawn_by) > 1 or one.read_bytes() == other.read_bytes()


def test_every_block_of_a_page_is_written(figures: ModuleType) -> None:
    """The page is read where it lies: a block that the command cannot fill, or one that lost its
    end, would be kept as it was."""
    for page in figures.WITH_BLOCKS:
        text = (DOCS / page).read_text()
        begun = re.findall(r"<!-- make docs-figures: ([\w-]+) -->", text)
        assert begun, page
        assert [found[2] for found in figures.BLOCK.finditer(text)] == begun
        assert figures.filled(figures.BLOCK.sub(r"\1\3", text), figures.RECORDS) == text


def test_the_figure_of_concepts_is_that_of_the_demo(figures: ModuleType, tmp_path: Path) -> None:
    drawn = figures.concepts.draw(figures.RECORDS, tmp_path)
    assert drawn.read_text() == (DOCS / "concepts.svg").read_text(), (
        "docs/concepts.svg: run `make docs-figures`"
    )
    record = RunRecord.load(figures.RECORDS / "demo.json")
    assert (
        f"{record.plan.mask.n_kept} of {record.plan.mask.n_heads} heads kept" in drawn.read_text()
    )


def test_what_the_readme_measured_is_written(figures: ModuleType) -> None:
    text = README.read_text()
    names = [found[2] for found in figures.BLOCK.finditer(text)]
    assert names == ["headline", "coverage", "serving", "limits"]
    assert text.count("<!-- make docs-figures") == len(names), "a block that does not end"


def test_every_study_has_its_page(figures: ModuleType) -> None:
    """A record whose page the command forgets would go stale."""
    apart = {"exactness", "known_answer"}  # tested against the registries, and stated nowhere
    others = {
        "tradeoff",
        "native",
        "scoring-",
        "startup",
        "gpu-",
    }  # docs/tradeoff.md and docs/gpu.md
    others |= {"scale-", "processes", "streaming"}  # blocks of docs/scale.md
    others |= {"serving", "by-command"}  # blocks of docs/serving.md and of the README
    others |= {"empty-layers"}  # a sentence of docs/one-budget.md
    patterns = [pattern.partition(".")[0].rstrip("*").rstrip("-") for pattern in figures.PAGES]
    for path in figures.RECORDS.glob("*.json"):
        assert any(path.stem.startswith(name) for name in {*apart, *others, *patterns}), path.name


def test_a_block_that_nobody_writes_is_an_error(figures: ModuleType) -> None:
    with pytest.raises(KeyError, match="nothing"):
        figures.filled("<!-- make docs-figures: nothing -->\nx\n<!-- end of nothing -->", DOCS)


def test_a_run_is_kept_without_paths_of_its_machine(figures: ModuleType, tmp_path: Path) -> None:
    record = record_of()
    data = {"path": "/mine/text.txt", "text": "t"}
    recipe = FrozenDict({"description": "A run.", "out": "/mine/run", "data": data})
    source = FrozenDict({"source": {"path": "/mine/text.txt", "block": 8}})
    replace(record, recipe=recipe, rows=source).save(tmp_path / "run" / "record.json")
    places = (f"--records={tmp_path}", f"--docs={tmp_path}")
    figures.recipe_runs.main(["--keep", str(tmp_path / "run"), *places])
    kept = (tmp_path / f"run-{record.name}.json").read_text()
    assert "mine" not in kept
    assert RunRecord.from_json(kept).quality == record.quality
    assert f"## {record.name}" in (tmp_path / "recipe-runs.md").read_text()
