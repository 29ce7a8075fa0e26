"""Names of files and folders: any is read as it stands or refused with an error, and none ends a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import headprune as hp
from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.data.guess import guess
from headprune.data.sources import load_source
from headprune.recipes.schema import DataSection
from headprune.recipes.validate import load_recipe
from headprune.run import on_data
from headprune.run.journal import Journal
from tests.small_recipes import checked_recipe, quiet_run, write_rows
from tests.tiny_models import bert

#: A byte that is no UTF-8, as Python has it in a file's name.
ODD = "\udcff"
NAMES = [
    *("v[1]/train.jsonl", "v1/train.jsonl", "x?.jsonl", "xy.jsonl", "[!b].jsonl", "b.jsonl"),
    *("reviews[2].jsonl", "**/train.jsonl", "{a,b}.jsonl", "file:/train.jsonl"),
    *(".[h]/train.jsonl", "~x.jsonl", f"a{ODD}[1].jsonl"),
]


def write(path: Path, text: str, n: int = 1) -> Path:
    return write_rows(path, ({"text": f"{text} {i}", "label": i % 2} for i in range(n)))


def text_of(path: object) -> list[str]:
    return list(load_source(DataSection(path=str(path))).splits["train"]["text"])


def test_a_data_file_is_read_whatever_its_name_means_in_a_pattern(tmp_path, monkeypatch):
    home = tmp_path / "c[w]d"
    for i, name in enumerate(NAMES):
        write(home / name, f"file {i}")
    monkeypatch.chdir(home)
    for i, name in enumerate(NAMES):
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        for path in (home / name, f"./{name}"):
            source = load_source(DataSection(path=str(path)))
            assert source.splits["train"]["text"][:] == [f"file {i} 0"], path
            assert source.facts["sha256"] == {Path(name).name: digest}


def test_the_files_of_a_split_are_read_once_each(tmp_path):
    for name in ("train-*.jsonl", "train-a.jsonl", "train-[ab].jsonl"):
        write(tmp_path / name, name)
    assert sorted(text_of(tmp_path)) == ["train-*.jsonl 0", "train-[ab].jsonl 0", "train-a.jsonl 0"]


@pytest.mark.parametrize("name", ["a::b.jsonl", "a::b/train.jsonl", "${SPLIT}/train.jsonl"])
def test_a_name_that_no_reader_takes_as_it_is_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("SPLIT", "other")
    path = write(tmp_path / name, "a")
    write(tmp_path / name.replace("${SPLIT}", "other"), "b")
    with pytest.raises(InvalidValue, match=r"data\.path: must be .* Rename the file") as refused:
        text_of(path)
    assert refused.value.got == repr(str(path))


def test_a_record_with_names_that_are_no_text_is_saved_and_comes_back(tmp_path):
    found = hp.RunRecord(
        "a", "failed", "s", "c", FrozenDict({ODD: [ODD, {ODD: 1}]}), warnings=(ODD,), error=ODD
    )
    again = hp.RunRecord.load(found.save(tmp_path / "record.json"))
    assert (again.error, again.warnings) == ("\\udcff", ("\\udcff",))
    assert again.recipe == {"\\udcff": ("\\udcff", {"\\udcff": 1})}
    assert again.digest == found.digest
    assert again.to_json() == found.to_json()


def test_a_failure_is_told_whatever_its_words(tmp_path):
    journal = Journal("a", {}, tmp_path, lambda line: None, progress=False)
    journal.begin()
    journal.close("failed", ODD)
    assert hp.RunRecord.load(tmp_path / "record.json").status == "failed"
    text = (tmp_path / "history.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    ends = [(line["status"], line["error"]) for line in lines]
    assert ends == [("running", None), ("failed", ODD)]


def test_a_run_on_a_file_whose_name_is_no_text(tmp_path):
    hub = bert(tmp_path / "hub", num_labels=2)
    path = write(tmp_path / f"train-{ODD}.jsonl", "w1 w2", 60)
    data = {"path": str(path), "text": "text", "label": "label", "calibration": 8}
    score = {"scorer": "magnitude"}
    chosen = checked_recipe("text_classification", hub, data, score=score, report=True)
    quiet_run(chosen, out=tmp_path / "out")
    record = hp.RunRecord.load(tmp_path / "out" / "record.json")
    assert record.status == "done"
    assert list(record.rows["source"]["sha256"]) == ["train-\\udcff.jsonl"]
    # The command of the report runs again.
    assert load_recipe(tmp_path / "out" / "recipe.yaml").data.path == str(path)


def test_a_model_is_cut_once_on_a_file_whose_name_is_no_text(tmp_path):
    hub = bert(tmp_path / "hub", num_labels=2)
    path = write(tmp_path / f"train-{ODD}.jsonl", "w1 w2", 60)
    quick = ("bench=null", "score.random_draws=0", "report=false", "recover=[]", "device=cpu")

    def cut() -> list[str]:
        said: list[str] = []
        folder = tmp_path / "${seed} #" / "run"
        options: dict[str, Any] = {"settings": quick, "say": said.append, "progress": False}
        on_data.prune_on_data(str(hub), str(path), folder, **options)
        return said

    assert any(line.startswith("[prune]") for line in cut())
    assert cut() == list(guess(str(hub), str(path)).why)  # it is taken as it is
