"""Damaged files of every kind that we read: an error in words or a value, never a crash, a hang or a written file.

Each mutation has a number, and the number alone makes it. ``make test`` tries some of each kind; ``make test-long``
thousands.
"""

from __future__ import annotations

import json
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune as hp
from headprune.core.attention_pictures import AttentionPictures
from headprune.core.errors import HeadPruneError
from headprune.core.heads import HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.core.sweeps import SweepTable
from headprune.report import Beside, render_html, render_markdown
from headprune.report.html import render_sweep_html
from headprune.run.data import load_rows
from headprune.run.validate import load_recipe
from headprune.surgery.streaming import prune_checkpoint
from tests.fuzzing import mutated, mutated_bytes, mutated_header
from tests.report_records import maps_of, plan_of, record_of, sweep_table

#: Seconds that one damaged file may take: far above what a sound one takes on a slow machine.
PATIENCE = 20


@dataclass(frozen=True)
class Kind:
    """A file that is read: its name in a folder that ``make`` fills, and what reads that folder."""

    file: str
    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    damage: Callable[[bytes, random.Random], bytes] = mutated


def _record(folder: Path) -> None:
    record_of().save(folder / "record.json")


def _report(folder: Path) -> None:
    record = RunRecord.load(folder / "record.json")
    render_html(record)
    render_markdown(record)


def _scores(folder: Path) -> None:
    scores = record_of().scores
    assert scores is not None
    scores.save(folder / "scores.json")


def _read_scores(folder: Path) -> None:
    scores = HeadScores.load(folder / "scores.json")
    str(hp.select(scores, hp.Budget(keep_heads=0.5)))
    scores._repr_html_()


def _plan(folder: Path) -> None:
    scores = record_of().scores
    assert scores is not None
    plan_of(scores).save(folder / "plan.json")


def _read_plan(folder: Path) -> None:
    plan = PruningPlan.load(folder / "plan.json")
    str(plan.then(plan))
    plan._repr_html_()


def _pictures(folder: Path) -> None:
    AttentionPictures.of(maps_of(record_of(), 2, 5)).save(folder / "attention.json")


def _read_pictures(folder: Path) -> None:
    render_html(record_of(), Beside(AttentionPictures.load(folder / "attention.json")))


def _maps(folder: Path) -> None:
    maps_of(record_of(), 2, 5).save(folder / "maps.safetensors")


def _table(folder: Path) -> None:
    sweep_table().save(folder / "table.json")


def _recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_bytes((Path(__file__).parents[1] / "recipes" / "sst2-minilm.yaml").read_bytes())


def _rows(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_text(text, encoding="utf-8"))


def void(_: object) -> None:
    return None


CSV = "text,label\n" + "".join(f'"w{i}, w{i + 1}",{i % 2}\n' for i in range(30))
JSONL = "".join(json.dumps({"text": f"w{i} w{i + 1}", "label": i % 2}) + "\n" for i in range(30))
DATA = [
    "model.path=none",
    "data.label=label",
    "train=null",
    "data.calibration=4",
    "data.holdout=5",
    "data.test_holdout=5",
]


def _read_rows(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        recipe = load_recipe("sst2-minilm", [*DATA, f"data.path={folder / name}"])
        load_rows(recipe)

    return read


def _llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 17}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def _checkpoint(folder: Path) -> None:
    model = _llama()
    hp.prune_heads_(model, {0: [0, 1]})
    hp.save_pretrained(model, folder)


def _hub_folder(folder: Path) -> None:
    _llama().save_pretrained(folder)


def _stream(folder: Path) -> None:
    sites = hp.find_sites(_llama())
    keep = {s.name: [2, 3] for s in sites}
    prune_checkpoint(folder, HeadMask.from_keep(keep, {s.name: 4 for s in sites}), folder.parent / "out" / folder.name)


KINDS: dict[str, Kind] = {
    "plan": Kind("plan.json", _plan, _read_plan),
    "scores": Kind("scores.json", _scores, _read_scores),
    "record": Kind("record.json", _record, _report),
    "pictures": Kind("attention.json", _pictures, _read_pictures),
    "maps": Kind("maps.safetensors", _maps, lambda f: hp.AttentionMaps.load(f / "maps.safetensors"), mutated_header),
    "table": Kind("table.json", _table, lambda f: render_sweep_html(SweepTable.load(f / "table.json"))),
    "recipe": Kind("recipe.yaml", _recipe, lambda f: load_recipe(f / "recipe.yaml"), mutated_bytes),
    "csv": Kind("data.csv", _rows("data.csv", CSV), _read_rows("data.csv"), mutated_bytes),
    "jsonl": Kind("data.jsonl", _rows("data.jsonl", JSONL), _read_rows("data.jsonl"), mutated_bytes),
    "weights": Kind("model.safetensors", _checkpoint, hp.from_pretrained, mutated_header),
    "manifest": Kind("headprune.json", _checkpoint, hp.from_pretrained),
    "config": Kind("config.json", _checkpoint, hp.from_pretrained),
    "weights to stream": Kind("model.safetensors", _hub_folder, _stream, mutated_header),
}
#: Reading rows takes a second each time.
SLOW = {"csv": 0.1, "jsonl": 0.1}


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_some(name: str, numbers: range, folder: Path) -> dict[str, int]:
    """Reads so many damaged files; how many were refused and how many were read all the same."""
    kind, found = KINDS[name], {"refused": 0, "read": 0}
    sound = folder / "sound"
    sound.mkdir()
    kind.make(sound)
    whole = (sound / kind.file).read_bytes()
    kind.read(sound)
    here = os.getcwd()
    (folder / "here").mkdir()
    os.chdir(folder / "here")
    try:
        for number in numbers:
            damaged = kind.damage(whole, random.Random(f"{name} {number}"))
            (sound / kind.file).write_bytes(damaged)
            try:
                with alarm(PATIENCE), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    kind.read(sound)
                found["read"] += 1
            except HeadPruneError as refusal:
                found["refused"] += 0 < len(str(refusal).strip()) < 50_000
            except BaseException as error:
                raise AssertionError(f"{name} {number}: {type(error).__name__}: {str(error)[:500]}") from error
            assert (sound / kind.file).read_bytes() == damaged, f"{name} {number} was written"
            assert not list((folder / "here").iterdir()), f"{name} {number} wrote something"
    finally:
        os.chdir(here)
    assert sum(found.values()) == len(numbers), "an error without words, or far too many of them"
    return found


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    found = try_some(name, range(round(60 * SLOW.get(name, 1))), tmp_path)
    assert found["refused"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_damaged_files(name: str, tmp_path: Path) -> None:
    found = try_some(name, range(100, 100 + round(1200 * SLOW.get(name, 1))), tmp_path)
    print(f"{name}: {found}")
    assert found["refused"] > 0
