"""Every kind of file that is read from a path: what makes a sound one, what reads it, and how it is
damaged. A new kind gets a line in ``KINDS``."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import wave
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow
import pytest
import torch
import transformers
from pyarrow import parquet

import headprune as hp
from headprune.checkpoints import card
from headprune.checkpoints.streaming import prune_checkpoint
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.heads import HeadMask
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.core.paired import Drop, paired_drops
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.samples import Curvature, Samples
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.core.sweeps import SweepTable
from headprune.data.datasets import load_rows
from headprune.data.models import open_model, prepare
from headprune.data.sound import clip_of
from headprune.data.vocabulary import train_tokenizer
from headprune.maps.pictures import AttentionPictures
from headprune.recipes.validate import load_recipe
from headprune.recovery._checkpoint import Keeper
from headprune.report import ReportInputs, render_html, render_markdown
from headprune.report.html import render_sweep_html
from headprune.run.gradual import FILE as GRADUAL
from headprune.run.identity import hashes
from headprune.run.journal import Journal
from headprune.run.progress import Finished, Progress, take_folder
from headprune.scoring import _resume_cache
from headprune.sweep.base import Base
from headprune.sweep.outcome import SPLITS, ModelOutcome
from headprune.sweep.pick import Pick, SettingVerdict
from headprune.sweep.runs import PlannedRun, SweepRun, recipe_of
from headprune.sweep.tables import write_timings
from headprune.sweep.tasks import file_of, outcome_of
from tests.fuzzing import mutated, mutated_bytes, mutated_header, mutated_lines
from tests.report_records import maps_of, plan_of, record_of, sweep_table
from tests.scripts import ROOT

KEY = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Kind:
    """A file that is read: its name in a folder that ``make`` fills, and what reads that folder.

    ``refuses``: whether a damaged one is an error; else the work goes on without it.
    """

    file: str
    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    damage: Callable[[bytes, random.Random], bytes] = mutated
    refuses: bool = True


# ---------------------------------------------------------------- plans, scores, records, pages


def scores() -> HeadScores:
    found = record_of().scores
    assert found is not None
    return found


def save_plan(folder: Path) -> None:
    plan_of(scores()).save(folder / "plan.json")


def read_plan(folder: Path) -> None:
    plan = PruningPlan.load(folder / "plan.json")
    str(plan.then(plan))
    plan._repr_html_()


def save_scores(folder: Path) -> None:
    scores().save(folder / "scores.json")


def read_scores(folder: Path) -> None:
    found = HeadScores.load(folder / "scores.json")
    str(hp.select(found, hp.Budget(keep_heads=0.5)))
    found._repr_html_()


def save_beside_scores(folder: Path) -> None:
    values = np.array([unit.value for unit in scores().units()])
    rows = np.random.default_rng(0).random((6, len(values))) + values
    bent = np.diag(2.0 * values + 1e-9)
    more = replace(scores(), samples=Samples.of(rows), curvature=Curvature.of(bent))
    more.save(folder / "scores.json")


def read_samples(folder: Path) -> None:
    HeadScores.load(folder / "scores.json").rank_interval(draws=5)


def read_curvature(folder: Path) -> None:
    hp.select(HeadScores.load(folder / "scores.json"), hp.Budget(keep_heads=0.9), "quadratic")


def save_record(folder: Path) -> None:
    record_of().save(folder / "record.json")


def read_record(folder: Path) -> None:
    record = RunRecord.load(folder / "record.json")
    render_html(record)
    render_markdown(record)


def save_pictures(folder: Path) -> None:
    AttentionPictures.of(maps_of(record_of(), 2, 5)).save(folder / "attention.json")


def read_pictures(folder: Path) -> None:
    render_html(record_of(), ReportInputs(AttentionPictures.load(folder / "attention.json")))


def save_latency(folder: Path) -> None:
    sites = (SiteLatency("a", (0.1, 0.3, 0.4)),)
    LatencyTable(1.0, sites, 8, 128, "a processor", "float32").save(folder / "latency.json")


# ---------------------------------------------------------------- recipes and data


def save_recipe(folder: Path) -> None:
    shutil.copy(ROOT / "recipes" / "sst2-minilm.yaml", folder / "recipe.yaml")


ROWS = [{"text": f"w{i} w{i + 1}", "label": i % 2} for i in range(30)]
CSV = "text,label\n" + "".join(f'"w{i}, w{i + 1}",{i % 2}\n' for i in range(30))
TSV = "text\tlabel\n" + "".join(f"w{i}, w{i + 1}\t{i % 2}\n" for i in range(30))
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def text_of_rows(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def save_parquet(folder: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "data.parquet")


def rows_of(name: str) -> Callable[[Path], Any]:
    """What reads the rows of a file as a recipe does."""
    settings = ["model.path=none", "data.label=label", "train=null", "data.calibration=4"]
    settings += ["data.holdout=5", "data.test_holdout=5"]
    return lambda f: load_rows(load_recipe("sst2-minilm", [*settings, f"data.path={f / name}"]))


def save_sound(folder: Path) -> None:
    with wave.open(str(folder / "clip.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(range(200)))


# ---------------------------------------------------------------- models


def llama() -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 17}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(max_position_embeddings=16, **heads, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def save_checkpoint(folder: Path) -> None:
    model = llama()
    hp.prune_heads_(model, {0: [0, 1]})
    hp.save_pretrained(model, folder)


def save_model(folder: Path) -> None:
    llama().save_pretrained(folder)


def save_shards(folder: Path) -> None:
    llama().save_pretrained(folder, max_shard_size="4KB")


def save_adapter(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    base = folder.parent / "base"
    llama().save_pretrained(base)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, config).save_pretrained(folder)


def read_model(folder: Path) -> None:
    open_model(str(folder))


def stream(folder: Path) -> None:
    sites = hp.find_sites(llama())
    mask = HeadMask.from_keep({s.name: [2, 3] for s in sites}, {s.name: 4 for s in sites})
    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        prune_checkpoint(folder, mask, out)


def save_tokenizer(folder: Path) -> None:
    train_tokenizer("bpe", ["some words", "and more words"], 300).save_pretrained(folder)


def read_tokenizer(folder: Path) -> None:
    prepare(load_recipe("sst2-minilm", [f"model.path={folder}", "train=null"])).tokenizer("words")


def save_cards(folder: Path) -> None:
    (folder / "ours").mkdir()
    old = "---\nlicense: mit\n---\n# A model\n"
    card.write(folder, "## Attention heads\n\nan earlier cut", old=old)
    card.write(folder / "ours", "## Attention heads\n\nthis cut")


def read_card(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        shutil.copy(folder / "ours" / "README.md", other)
        card.carry(Path(other), folder / "README.md")
        assert os.listdir(other) == ["README.md"]
        assert "this cut" in (Path(other) / "README.md").read_bytes().decode()


# ---------------------------------------------------------------- work that was begun


class Sum:
    """A sum of numbers that batches are added to."""

    def __init__(self) -> None:
        self.total = torch.ones(2)

    def parts(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def join(self, parts: list[Any]) -> None:
        self.total = torch.stack([part["total"] for part in parts]).sum(0)


def keep_scoring(folder: Path) -> None:
    """Keeps what batches gave to a call: rows of a pass, and sums of the next."""
    with patch.object(_resume_cache, "EVERY", 0.0):
        resume_scoring(folder)


def resume_scoring(folder: Path) -> None:
    call = {"scorers": "taylor", "device": "cpu"}
    with _resume_cache.opened(folder, call, [0.5, 1.0], 1e-5) as cache:
        cache.rows(lambda number, batch: batch)(0, torch.ones(2, 3), "aa", lambda: None)
        into = cache.sums({"sum": Sum()})
        into.begin_pass()
        if not into.holds(0, "aa"):
            into.batch_added("aa", lambda: None)
        into.end_pass("aa", lambda: None)


TRAINED = {"weights": {"w": torch.ones(3)}, "step": 3}


def training_of(folder: Path, *file: str) -> Keeper:
    return Keeper(folder, 1, {"a": "b"}, *file)


def save_gradual(folder: Path) -> None:
    """What ``prune_gradually_`` keeps between two of its stages."""
    state = {"stages": ["{}"], "generators": [torch.get_rng_state()], "batches": 5}
    training_of(folder, GRADUAL).save({**TRAINED, **state})


def save_finished(folder: Path) -> None:
    """An unfinished run whose scores are there."""
    (folder / ".work").mkdir(exist_ok=True)
    save_scores(folder)
    replace(record_of(), status="failed").save(folder / "record.json")
    files, noted = hashes(folder, ("scores.json",)), RunRecord("a", "running", "score", "now")
    Finished(KEY, FrozenDict(files), noted).save(folder / ".work" / "score.json")


class Keyed(Progress):
    """Of a run whose stages have a key that is known."""

    def key(self, stage: str) -> str:
        return KEY


def take_finished(folder: Path) -> None:
    journal = Journal("a", {}, folder, lambda line: None, progress=False)
    take_folder(folder, False, journal)
    Keyed(journal).done("score")


def read_finished(folder: Path) -> None:
    """On a copy, for what no finished stage vouches for is taken away."""
    with tempfile.TemporaryDirectory() as other:
        copy = Path(shutil.copytree(folder, Path(other) / "run"))
        (Path(other) / "neighbour").touch()
        take_finished(copy)
        assert sorted(os.listdir(other)) == ["neighbour", "run"]
    Finished.load(folder / ".work" / "score.json")


# ---------------------------------------------------------------- sweeps


def save_table(folder: Path) -> None:
    sweep_table().save(folder / "table.json")


def read_table(folder: Path) -> None:
    render_sweep_html(SweepTable.load(folder / "table.json"))


def save_outcome(folder: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {}
    for split in SPLITS:
        arrays |= {f"{split}.{name}": draw.random(5) for name in ("amounts", "losses")}
        arrays[f"{split}.counts"] = np.ones(5)
    sizes = FrozenDict({"heads": 4, "params": 10, "macs": 10, "kv": None})
    ModelOutcome("accuracy", sizes, arrays).save(file_of(folder, "outcomes", KEY), KEY)


def read_outcome(folder: Path) -> None:
    found = outcome_of(folder, KEY)
    paired_drops(found.answers("test"), [found.answers("test")], draws=10)


def save_pick(folder: Path) -> None:
    drop, plan, metric = Drop(0.01, 0.0, 0.02), plan_of(scores()), sweep_table().metric
    looks = (SettingVerdict("taylor", 16.0, 0.01, True),)
    about = ("heads", metric, "abc", "taylor", plan, 16.0, drop, drop, 0.02)
    Pick(0.01, 0.95, *about, looks=looks).save(folder / "pick.json")


def save_run(folder: Path) -> None:
    recipe = FrozenDict(load_recipe("sst2-minilm").model_dump())
    values = FrozenDict({"scorer": "taylor"})
    SweepRun(values, values, 0, recipe, KEY, "done", KEY, KEY).save(folder / "run.json")


def save_base(folder: Path) -> None:
    files = FrozenDict({"model/config.json": KEY, "headprune.json": KEY})
    base = Base(KEY, files, ModelFingerprint(KEY, KEY), FrozenDict({"train": {}}), EMPTY)
    base.save(folder / "base.json")


def read_base(folder: Path) -> None:
    base = Base.load(folder / "base.json")
    assert base.folder(folder).resolve().is_relative_to(folder.resolve() / "bases")
    str(base.identity)


def save_timings(folder: Path) -> None:
    lines = [{"kind": kind, "key": KEY, "seconds": 1.5} for kind in ("scores", "plans", "outcomes")]
    (folder / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def sum_timings(folder: Path) -> None:
    recipe = load_recipe("sst2-minilm")
    run = PlannedRun(KEY, EMPTY, FrozenDict({"keep": 0.5}), 0, recipe, KEY, KEY)
    write_timings([run], {KEY: SweepRun(EMPTY, EMPTY, 0, EMPTY, KEY, "done", KEY, KEY)}, folder)


def read_timings(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        shutil.copy(folder / "timings.jsonl", other)
        sum_timings(Path(other))
        assert sorted(os.listdir(other)) == ["timings.csv", "timings.jsonl"]


# ---------------------------------------------------------------- all of them

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
KINDS: dict[str, Kind] = {
    "plan": Kind("plan.json", save_plan, read_plan),
    "scores": Kind("scores.json", save_scores, read_scores),
    "record": Kind("record.json", save_record, read_record),
    "pictures": Kind("attention.json", save_pictures, read_pictures),
    "maps": Kind(
        "maps.safetensors",
        lambda f: maps_of(record_of(), 2, 5).save(f / "maps.safetensors"),
        lambda f: hp.AttentionMaps.load(f / "maps.safetensors"),
        mutated_header,
    ),
    "table": Kind("table.json", save_table, read_table),
    "recipe": Kind(
        "recipe.yaml", save_recipe, lambda f: load_recipe(f / "recipe.yaml"), mutated_bytes
    ),
    "csv": Kind("data.csv", text_of_rows("data.csv", CSV), rows_of("data.csv"), mutated_bytes),
    "tsv": Kind("a.tsv", text_of_rows("a.tsv", TSV), rows_of("a.tsv"), mutated_bytes),
    "jsonl": Kind("a.jsonl", text_of_rows("a.jsonl", JSONL), rows_of("a.jsonl"), mutated_bytes),
    "json rows": Kind("a.json", text_of_rows("a.json", json.dumps(ROWS)), rows_of("a.json")),
    "parquet": Kind("data.parquet", save_parquet, rows_of("data.parquet"), mutated_bytes),
    "weights": Kind(WEIGHTS, save_checkpoint, hp.from_pretrained, mutated_header),
    "manifest": Kind("headprune.json", save_checkpoint, hp.from_pretrained),
    "config": Kind("config.json", save_checkpoint, hp.from_pretrained),
    "generation": Kind("generation_config.json", save_checkpoint, hp.from_pretrained),
    "weights to stream": Kind(WEIGHTS, save_model, stream, mutated_header),
    "config to stream": Kind("config.json", save_model, stream),
    "index to stream": Kind(INDEX, save_shards, stream),
    "weights to open": Kind(WEIGHTS, save_model, read_model, mutated_header),
    "config to open": Kind("config.json", save_model, read_model),
    "index to open": Kind(INDEX, save_shards, read_model),
    "generation to open": Kind("generation_config.json", save_model, read_model, refuses=False),
    "adapter": Kind("adapter_config.json", save_adapter, read_model),
    "adapter weights": Kind("adapter_model.safetensors", save_adapter, read_model, mutated_header),
    "tokenizer": Kind("tokenizer.json", save_tokenizer, read_tokenizer),
    "tokenizer config": Kind("tokenizer_config.json", save_tokenizer, read_tokenizer),
    "samples": Kind("scores.samples.safetensors", save_beside_scores, read_samples, mutated_header),
    "curvature": Kind(
        "scores.curvature.safetensors", save_beside_scores, read_curvature, mutated_header
    ),
    "outcome": Kind(f"outcomes/{KEY[:24]}.safetensors", save_outcome, read_outcome, mutated_header),
    "call of scores": Kind("call.json", keep_scoring, resume_scoring),
    "rows of scores": Kind(
        "rows-000001.safetensors", keep_scoring, resume_scoring, mutated_header, refuses=False
    ),
    "sums of scores": Kind(
        "sums-2.safetensors", keep_scoring, resume_scoring, mutated_header, refuses=False
    ),
    "pick": Kind("pick.json", save_pick, lambda f: str(Pick.load(f / "pick.json"))),
    "run of a sweep": Kind(
        "run.json", save_run, lambda f: recipe_of(SweepRun.load(f / "run.json"))
    ),
    "base of a sweep": Kind("base.json", save_base, read_base),
    "latency table": Kind(
        "latency.json", save_latency, lambda f: str(LatencyTable.load(f / "latency.json"))
    ),
    "finished stage": Kind(".work/score.json", save_finished, read_finished),
    "timings": Kind("timings.jsonl", save_timings, read_timings, mutated_lines, refuses=False),
    "card": Kind("README.md", save_cards, read_card, mutated_bytes, refuses=False),
    "gradual training": Kind(
        GRADUAL, save_gradual, lambda f: training_of(f, GRADUAL).load(), mutated_bytes
    ),
    "training": Kind(
        "finetune.pt",
        lambda f: training_of(f).save(TRAINED),
        lambda f: training_of(f).load(),
        mutated_bytes,
    ),
    "sound": Kind("clip.wav", save_sound, lambda f: clip_of("clip.wav", "row 0", f), mutated_bytes),
}
