"""``headprune prune`` on tables as people have them: files of every form, what a log says on the way,
and options that are taken for granted."""

from pathlib import Path

import pytest
import torch

import headprune as hp
from headprune.core import bars
from headprune.core.record import RunRecord
from tests.command_line import done, refused
from tests.tables import TABLES, N, written
from tests.tiny_models import bert

#: A run without what takes time.
FAST = "--set score.scorer=magnitude --set score.random_draws=0 --set score.magnitude=false"
FAST += " --set recover=[] --set bench=null --set report=false"


def model(folder, name="message,queue"):
    """A tiny classifier of the classes of a table."""
    classes = TABLES[name][2]
    torch.manual_seed(0)
    numbers = {name: i for i, name in enumerate(classes)}
    return str(bert(folder / "model", id2label=dict(enumerate(classes)), label2id=numbers))


#: ``test_columns.py`` reads all tables; a run over each way to read one is enough.
RUN = ("tsv", "quoted newlines", "labels with blanks", "pairs", "from Excel")


@pytest.mark.parametrize("name", RUN)
def test_one_command_takes_every_table(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = done(
        f"prune --keep 0.5 {FAST}",
        "--model",
        model(tmp_path, name),
        "--data",
        written(tmp_path, name),
    )
    _, _, classes, words = TABLES[name]
    assert f"{words}\n" in result.stderr
    assert "wrote model-pruned (" in result.stdout
    sites = hp.find_sites(hp.from_pretrained("model-pruned"))
    assert sum(len(site.heads) for site in sites) == 4
    record = RunRecord.load(Path("model-pruned/run/record.json"))
    assert record.metrics["labels"]["classes"] == tuple(classes)
    blank = name == "labels with blanks"
    assert sum(record.rows[part]["rows"] for part in ("train", "validation", "test")) == N - blank
    assert ("1 of 40 train rows were dropped" in result.stderr) == blank


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a run that drops a row; it writes beside the model."""
    monkeypatch.chdir(tmp_path)
    return f"--model {model(tmp_path)} --data {written(tmp_path, 'labels with blanks')} {FAST}"


def test_a_log_shows_how_rows_are_read_and_encoded(given, monkeypatch):
    monkeypatch.setattr(bars, "INTERVAL", 0.0)
    said = done(f"prune {given} --keep 0.5").stderr
    lines = [line.strip().partition(",")[0] for line in said.splitlines()]
    assert "reading train rows: 100 % (39 of 39)" in lines
    for part in ("train", "validation", "test"):
        assert any(line.startswith(f"encoding {part} rows: 100 % (") for line in lines)


def test_quiet_keeps_warnings(given):
    said = done(f"prune {given} --keep 50 --quiet").stderr
    assert said.startswith("warning: 1 of 40 train rows were dropped: ")
    assert "[score]" not in said


def test_a_budget_of_all_heads_is_named_before_the_scores(given):
    said = done(f"prune {given} --keep 50").stderr
    warning, others = said.partition("[score]")[::2]
    assert "warning: select.keep_heads: the budget allows all 8 heads: nothing will be" in warning
    assert "For 50 % of the heads, write 0.5." in warning
    assert "[select]" in others


def test_a_dry_run_writes_nothing(given):
    result = done(f"prune {given} --keep 0.5 --dry-run")
    assert "label: queue (matches the model's 4 classes)" in result.stderr
    assert result.stdout.rstrip().endswith("nothing was trained, cut or written")
    assert not Path("model-pruned").exists()
    message = refused("prune --model model --plan plan.json --dry-run")
    assert "--dry-run: must be given with --data only" in message
    message = refused(f"prune {given} --keep 0.5 --dry-run --streaming")
    assert "--streaming: must be given with --plan or --scores" in message


@pytest.mark.parametrize(
    ("keep", "hint"),
    [
        ("50%", "For 50 % of the heads, write 0.5."),
        ("50.0", "For 50 % of the heads, write 0.5."),
        ("1.0", "All heads would be kept. For one head write 1."),
        ("1%", "For 1 % of the heads, write 0.01."),
        ("0.5%", "For example 0.5, or 36."),
        ("half", "For example 0.5, or 36."),
        ("0", "For example 0.5, or 36."),
    ],
)
def test_what_is_no_count_and_no_fraction_gets_a_hint(given, keep, hint):
    for command in (f"prune {given}", f"init {given.partition(' --set')[0]}"):
        message = refused(f"{command} --keep {keep}")
        assert "--keep: must be a count of heads, or a fraction of them above 0" in message
        assert message.rstrip().endswith(hint)


def test_the_default_folder_is_not_written_twice(given):
    Path("model-pruned").mkdir()
    Path("model-pruned/notes.txt").touch()
    message = refused(f"prune {given} --keep 0.5")
    assert "--out: must be a new or an empty folder, got model-pruned. Name another" in message
