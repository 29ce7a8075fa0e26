"""``headprune sweep`` and ``headprune pick``: stopped and resumed, in two processes, locked; exit
codes and words."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock

from headprune.core.sweeps import SweepTable
from tests.command_line import call, done, json_of, refused
from tests.tiny_models import WORDS, bert
from tests.tiny_recipe import TINY

GRID = "--grid scorer=taylor,random --grid keep=0.75,0.5 --seeds 2"
N_RUNS = 8
WRITTEN = ("table.json", "table.csv", "table.parquet", "tradeoff.svg", "summary.md", "report.html")


def files(folder):
    """Finished files of a sweep, each with its inode and the time when it was written."""
    found = {}
    for kind in ("scores", "plans", "outcomes", "runs", "bases"):
        for path in (folder / kind).rglob("*.*"):
            name = path.relative_to(folder)
            if not any(part.startswith(".") for part in name.parts):
                found[str(name)] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """The folder of a sweep that nothing disturbed."""
    out = tmp_path_factory.mktemp("sweeps") / "whole"
    said = done(f"sweep {recipe} {GRID} --out {out}").stderr
    assert len(SweepTable.load(out / "table.json").rows) == N_RUNS
    assert f"[{N_RUNS}/{N_RUNS}]" in said
    assert "elapsed)" in said
    return out


def test_what_was_done_before_it_was_stopped_is_not_done_again(recipe, whole, tmp_path):
    """The folder of a sweep that was killed: half of its runs, and no table."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    for path in sorted((out / "runs").glob("*.json"))[N_RUNS // 2 :]:
        path.unlink()
    for name in WRITTEN:
        (out / name).unlink()
    before = files(out)
    said = done(f"sweep {recipe} {GRID} --out {out}").stderr
    assert f"{N_RUNS // 2} of {N_RUNS} runs are done already" in said
    assert "[train]" not in said
    assert before.items() <= files(out).items(), "nothing was written again"
    for name in WRITTEN:
        # The page has a command with the folder.
        page = (out / name).read_bytes().replace(bytes(out), bytes(whole))
        assert page == (whole / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["", pytest.param("--backend dask", marks=pytest.mark.long)], ids=["joblib", "dask"]
)
def test_several_processes_give_the_same_table(backend, recipe, whole, tmp_path, capfd):
    if backend:
        pytest.importorskip("distributed")
    shutil.copytree(whole / "bases", tmp_path / "bases")
    said = done(f"sweep {recipe} {GRID} --out {tmp_path} --jobs 2 {backend}").stderr
    assert (tmp_path / "table.json").read_bytes() == (whole / "table.json").read_bytes()
    assert backend or not re.search("Traceback|Warning", said + capfd.readouterr().err)


def test_its_page_is_drawn_anew(whole, tmp_path):
    made = json_of(f"report {whole} --out {tmp_path}")
    assert sorted(made) == ["html", "markdown", "png", "svg"]
    page, there = (folder.joinpath("report.html").read_text() for folder in (tmp_path, whole))
    assert page == there


def test_the_line_of_its_page_runs_where_the_sweep_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    bert(tmp_path / "t4", num_labels=2)
    rows = [f"{WORDS[i % 7]} {WORDS[i % 11]} {i},{i % 2}" for i in range(300)]
    (tmp_path / "tickets.csv").write_text("\n".join(["text,label", *rows]))
    done("init --model t4 --data tickets.csv --out mine.yaml")
    short = "--set score.scorer=magnitude --set bench=null --set data.holdout=0.4"
    done(f"sweep mine.yaml --grid keep=1.0 {short} --out sw")
    page = Path("sw/report.html").read_text()
    assert "in the folder where the sweep was started:" in page
    (line,) = re.findall("headprune (pick sw .*)</pre>", page)
    done(line)
    assert (tmp_path / "small" / "pick.json").exists()
    monkeypatch.chdir(tmp_path / "t4")
    done("report ../sw --out ../elsewhere")
    page = (tmp_path / "elsewhere" / "report.html").read_text()
    assert "headprune pick" not in page, "its data is not found from here"


def test_one_sweep_a_folder(recipe, whole):
    with FileLock(whole / ".lock"):
        message = refused(f"sweep {recipe} {GRID} --out {whole}")
    assert "must be free, got a sweep that is running there" in message


def test_failed_runs_end_in_a_list_and_an_exit_code(recipe, whole, tmp_path):
    shutil.copytree(whole / "bases", tmp_path / "bases")
    # The first run's budget is checked with the base model, before anything runs.
    message = refused(f"sweep {recipe} --grid keep=1,0.5 --out {tmp_path}")
    assert "Budget.keep_heads: must be at least 2, got 1" in message
    result = call(f"sweep {recipe} --grid keep=0.5,1 --out {tmp_path}")
    assert result.exit_code == 1
    assert "failed: keep 1, seed 0, error Budget.keep_heads: must be at least 2" in result.stderr
    assert len(SweepTable.load(tmp_path / "table.json").rows) == 1
    assert "## Failed" in (tmp_path / "summary.md").read_text()


def test_bad_input(recipe, whole, tmp_path, monkeypatch):
    shutil.copytree(whole / "bases", tmp_path / "bases")
    monkeypatch.setitem(sys.modules, "distributed", None)
    for arguments, words in (
        ("--grid scorer=tailor --grid kep=1", "2 errors"),
        ("--grid keep=0.5 --seeds 0", "seeds"),
        ("--grid keep=0.5 --backend loki", "backend: must be one of joblib's, got 'loki'"),
        ("--grid keep=0.5 --backend dask", "whose package is installed: pip install distributed"),
    ):
        assert words in refused(f"sweep {recipe} {arguments} --out {tmp_path}")


def test_pick(whole, tmp_path):
    command = f"pick {whole} --max-drop 0.9"
    result = done(f"{command} --out {tmp_path / 'small'}")
    assert "4 heads, shown by validation rows to lose at most 90.00 points" in result.stdout
    assert "test rows: drop" in result.stdout
    assert sorted(os.listdir(tmp_path / "small")) == ["model", "pick.json", "plan.json"]
    said = r"making .*seed \d.* again, to prove that it answers as in the sweep\n"
    assert re.match(said, result.stderr)
    assert "making" not in done(f"{command} --out {tmp_path / 'other'} --quiet").stderr
    found = json_of(command)
    assert (found["headprune"], found["size"]) == ("Pick", 4.0)


def test_pick_of_nothing(whole, tmp_path):
    result = call(f"pick {whole} --max-drop -0.9")
    assert result.exit_code == 1
    assert "no model of the sweep is shown to lose at most" in result.stdout
    message = refused(f"pick {tmp_path} --max-drop 0.01")
    assert "a sweep that was stopped has no table yet" in message
