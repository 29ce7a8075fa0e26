"""Damaged files of every kind that we read: an error in words or a value, never a crash, a hang or
a written file.

Each mutation has a number, and the number alone makes it. ``make test`` tries some of each kind;
``make test-long`` thousands.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import warnings
import wave
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers

import headprune as hp
from headprune.checkpoints import card
from headprune.checkpoints.streaming import prune_checkpoint
from headprune.core.codec import FrozenDict
from headprune.core.errors import HeadPruneError
from headprune.core.heads import HeadMask
from headprune.core.latency import LatencyTable, SiteLatency
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
from headprune.sweep.paired import Drop, paired_drops
from headprune.sweep.pick import Pick, SettingVerdict
from headprune.sweep.runs import PlannedRun, SweepRun, recipe_of
from headprune.sweep.tables import write_timings
from headprune.sweep.tasks import file_of, outcome_of
from tests.fuzzing import alarm, mutated, mutated_bytes, mutated_header, mutated_lines
from tests.report_records import maps_of, plan_of, record_of, sweep_table

#: Seconds of work that one damaged file may take: far above what a sound one takes on a slow
#: machine.
PATIENCE = 20


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
    render_html(record_of(), ReportInputs(AttentionPictures.load(folder / "attention.json")))


def _maps(folder: Path) -> None:
    maps_of(record_of(), 2, 5).save(folder / "maps.safetensors")


def _table(folder: Path) -> None:
    sweep_table().save(folder / "table.json")


def _recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_bytes(
        (Path(__file__).parents[1] / "recipes" / "sst2-minilm.yaml").read_bytes()
    )


def _rows(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_text(text, encoding="utf-8"))


def void(_: object) -> None:
    return None


CSV = "text,label\n" + "".join(f'"w{i}, w{i + 1}",{i % 2}\n' for i in range(30))
JSONL = "".join(json.dumps({"text": f"w{i} w{i + 1}", "label": i % 2}) + "\n" for i in range(30))
JSON = json.dumps([{"text": f"w{i} w{i + 1}", "label": i % 2} for i in range(30)])
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


def _parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in JSONL.splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")


def _beside_scores(folder: Path) -> None:
    scores = record_of().scores
    assert scores is not None
    draw = np.random.default_rng(0)
    rows = draw.random((6, scores.n_heads)) + np.array([u.value for u in scores.units()])
    bent = np.diag([2.0 * u.value + 1e-9 for u in scores.units()])
    replace(scores, samples=Samples.of(rows), curvature=Curvature.of(bent)).save(
        folder / "scores.json"
    )


def _read_samples(folder: Path) -> None:
    HeadScores.load(folder / "scores.json").rank_interval(draws=5)


def _read_curvature(folder: Path) -> None:
    hp.select(HeadScores.load(folder / "scores.json"), hp.Budget(keep_heads=0.9), "quadratic")


KEY = "0123456789abcdef" * 4


def _outcome(folder: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {
        f"{split}.{name}": draw.random(5) for split in SPLITS for name in ("amounts", "losses")
    }
    arrays |= {f"{split}.counts": np.ones(5) for split in SPLITS}
    sizes = FrozenDict({"heads": 4, "params": 10, "macs": 10, "kv": None})
    ModelOutcome("accuracy", sizes, arrays).save(file_of(folder, "outcomes", KEY), KEY)


def _read_outcome(folder: Path) -> None:
    found = outcome_of(folder, KEY)
    paired_drops(found.answers("test"), [found.answers("test")], draws=10)


class _Sum:
    """A sum of numbers that batches are added to."""

    def __init__(self) -> None:
        self.total = torch.ones(2)

    def parts(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def join(self, parts: list[Any]) -> None:
        self.total = torch.stack([part["total"] for part in parts]).sum(0)


def _kept(folder: Path) -> None:
    """What batches gave to a call: rows of a pass, and sums of the next."""
    with patch.object(_resume_cache, "EVERY", 0.0):
        _read_kept(folder)


def _read_kept(folder: Path) -> None:
    def nothing() -> None:
        pass

    with _resume_cache.opened(
        folder, {"scorers": "taylor", "device": "cpu"}, [0.5, 1.0], 1e-5
    ) as cache:
        cache.rows(lambda number, batch: batch)(0, torch.ones(2, 3), "aa", nothing)
        into = cache.sums({"sum": _Sum()})
        into.begin_pass()
        if not into.holds(0, "aa"):
            into.batch_added("aa", nothing)
        into.end_pass("aa", nothing)


def _pick(folder: Path) -> None:
    table, scores = sweep_table(), record_of().scores
    assert scores is not None
    drop = Drop(0.01, 0.0, 0.02)
    found = Pick(
        0.01,
        0.95,
        "heads",
        table.metric,
        "abc",
        "taylor",
        plan_of(scores),
        16.0,
        drop,
        drop,
        0.02,
        (),
    )
    replace(found, looks=(SettingVerdict("taylor", 16.0, 0.01, True),)).save(folder / "pick.json")


def _run(folder: Path) -> None:
    recipe = FrozenDict(load_recipe("sst2-minilm").model_dump())
    values = FrozenDict({"scorer": "taylor"})
    SweepRun(values, values, 0, recipe, KEY, "done", KEY, KEY).save(folder / "run.json")


def _read_run(folder: Path) -> None:
    recipe_of(SweepRun.load(folder / "run.json"))


def _training(folder: Path) -> None:
    Keeper(folder, 1, {"a": "b"}).save({"weights": {"w": torch.ones(3)}, "step": 3})


def _gradual(folder: Path) -> None:
    """What ``prune_gradually_`` keeps between two of its stages."""
    kept = {
        "stages": ["{}"],
        "weights": {"w": torch.ones(3)},
        "generators": [torch.get_rng_state()],
        "batches": 5,
    }
    Keeper(folder, 1, {"a": "b"}, GRADUAL).save(kept)


def _sound(folder: Path) -> None:
    with wave.open(str(folder / "clip.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(range(200)))


def _llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 17}
    config = transformers.LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, **sizes
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def _checkpoint(folder: Path) -> None:
    model = _llama()
    hp.prune_heads_(model, {0: [0, 1]})
    hp.save_pretrained(model, folder)


def _hub_folder(folder: Path) -> None:
    _llama().save_pretrained(folder)


def _shards(folder: Path) -> None:
    _llama().save_pretrained(folder, max_shard_size="4KB")


def _adapter(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    base = folder.parent / "base"
    model = _llama()
    model.save_pretrained(base)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)


def _open(folder: Path) -> None:
    open_model(str(folder))


def _tokenizer(folder: Path) -> None:
    train_tokenizer("bpe", ["some words", "and more words"], 300).save_pretrained(folder)


def _read_tokenizer(folder: Path) -> None:
    recipe = load_recipe("sst2-minilm", [f"model.path={folder}", "train=null"])
    tool = prepare(recipe).tokenizer
    tool("more words")


def _stream(folder: Path) -> None:
    sites = hp.find_sites(_llama())
    keep = {s.name: [2, 3] for s in sites}
    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        prune_checkpoint(folder, HeadMask.from_keep(keep, {s.name: 4 for s in sites}), out)


def _latency(folder: Path) -> None:
    LatencyTable(1.0, (SiteLatency("a", (0.1, 0.3, 0.4)),), 8, 128, "a processor", "float32").save(
        folder / "latency.json"
    )


def _base(folder: Path) -> None:
    files = FrozenDict({"model/config.json": KEY, "headprune.json": KEY})
    Base(KEY, files, ModelFingerprint(KEY, KEY), FrozenDict({"train": {}}), FrozenDict({})).save(
        folder / "base.json"
    )


def _read_base(folder: Path) -> None:
    base = Base.load(folder / "base.json")
    assert base.folder(folder).resolve().is_relative_to(folder.resolve() / "bases")
    str(base.identity)


def _finished(folder: Path) -> None:
    """An unfinished run whose scores are there."""
    (folder / ".work").mkdir(exist_ok=True)
    _scores(folder)
    replace(record_of(), status="failed").save(folder / "record.json")
    noted = RunRecord("a", "running", "score", "now")
    Finished(KEY, FrozenDict(hashes(folder, ("scores.json",))), noted).save(
        folder / ".work" / "score.json"
    )


class _Keyed(Progress):
    """Of a run whose stages have a key that is known."""

    def key(self, stage: str) -> str:
        return KEY


def _read_finished(folder: Path) -> None:
    """On a copy, for what no finished stage vouches for is taken away."""
    with tempfile.TemporaryDirectory() as other:
        copy = Path(shutil.copytree(folder, Path(other) / "run"))
        (Path(other) / "neighbour").write_text("stays")
        take_finished(copy)
        assert sorted(os.listdir(other)) == ["neighbour", "run"]
    Finished.load(folder / ".work" / "score.json")


def take_finished(folder: Path) -> None:
    journal = Journal("a", {}, folder, void, progress=False)
    take_folder(folder, False, journal)
    _Keyed(journal).done("score")


def _timings(folder: Path) -> None:
    lines = [{"kind": kind, "key": KEY, "seconds": 1.5} for kind in ("scores", "plans", "outcomes")]
    (folder / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _read_timings(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        shutil.copy(folder / "timings.jsonl", other)
        sum_timings(Path(other))
        assert sorted(os.listdir(other)) == ["timings.csv", "timings.jsonl"]


def sum_timings(folder: Path) -> None:
    recipe = load_recipe("sst2-minilm")
    run = PlannedRun(KEY, FrozenDict({}), FrozenDict({"keep": 0.5}), 0, recipe, KEY, KEY)
    found = SweepRun(FrozenDict({}), FrozenDict({}), 0, FrozenDict({}), KEY, "done", KEY, KEY)
    write_timings([run], {KEY: found}, folder)


def _cards(folder: Path) -> None:
    (folder / "ours").mkdir()
    card.write(
        folder, "## Attention heads\n\nan earlier cut", old="---\nlicense: mit\n---\n# A model\n"
    )
    card.write(folder / "ours", "## Attention heads\n\nthis cut")


def _read_card(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        shutil.copy(folder / "ours" / "README.md", other)
        card.carry(Path(other), folder / "README.md")
        assert os.listdir(other) == ["README.md"]
        assert "this cut" in (Path(other) / "README.md").read_bytes().decode()


KINDS: dict[str, Kind] = {
    "plan": Kind("plan.json", _plan, _read_plan),
    "scores": Kind("scores.json", _scores, _read_scores),
    "record": Kind("record.json", _record, _report),
    "pictures": Kind("attention.json", _pictures, _read_pictures),
    "maps": Kind(
        "maps.safetensors",
        _maps,
        lambda f: hp.AttentionMaps.load(f / "maps.safetensors"),
        mutated_header,
    ),
    "table": Kind(
        "table.json", _table, lambda f: render_sweep_html(SweepTable.load(f / "table.json"))
    ),
    "recipe": Kind("recipe.yaml", _recipe, lambda f: load_recipe(f / "recipe.yaml"), mutated_bytes),
    "csv": Kind("data.csv", _rows("data.csv", CSV), _read_rows("data.csv"), mutated_bytes),
    "jsonl": Kind(
        "data.jsonl", _rows("data.jsonl", JSONL), _read_rows("data.jsonl"), mutated_bytes
    ),
    "weights": Kind("model.safetensors", _checkpoint, hp.from_pretrained, mutated_header),
    "manifest": Kind("headprune.json", _checkpoint, hp.from_pretrained),
    "config": Kind("config.json", _checkpoint, hp.from_pretrained),
    "weights to stream": Kind("model.safetensors", _hub_folder, _stream, mutated_header),
    "config to stream": Kind("config.json", _hub_folder, _stream),
    "index to stream": Kind("model.safetensors.index.json", _shards, _stream),
    "weights to open": Kind("model.safetensors", _hub_folder, _open, mutated_header),
    "config to open": Kind("config.json", _hub_folder, _open),
    "index to open": Kind("model.safetensors.index.json", _shards, _open),
    "adapter": Kind("adapter_config.json", _adapter, _open),
    "adapter weights": Kind("adapter_model.safetensors", _adapter, _open, mutated_header),
    "tokenizer": Kind("tokenizer.json", _tokenizer, _read_tokenizer),
    "tokenizer config": Kind("tokenizer_config.json", _tokenizer, _read_tokenizer),
    "samples": Kind("scores.samples.safetensors", _beside_scores, _read_samples, mutated_header),
    "curvature": Kind(
        "scores.curvature.safetensors", _beside_scores, _read_curvature, mutated_header
    ),
    "outcome": Kind(f"outcomes/{KEY[:24]}.safetensors", _outcome, _read_outcome, mutated_header),
    "call of scores": Kind("call.json", _kept, _read_kept),
    "rows of scores": Kind(
        "rows-000001.safetensors", _kept, _read_kept, mutated_header, refuses=False
    ),
    "sums of scores": Kind("sums-2.safetensors", _kept, _read_kept, mutated_header, refuses=False),
    "pick": Kind("pick.json", _pick, lambda f: str(Pick.load(f / "pick.json"))),
    "run of a sweep": Kind("run.json", _run, _read_run),
    "latency table": Kind(
        "latency.json", _latency, lambda f: str(LatencyTable.load(f / "latency.json"))
    ),
    "base of a sweep": Kind("base.json", _base, _read_base),
    "finished stage": Kind(".work/score.json", _finished, _read_finished),
    "timings": Kind("timings.jsonl", _timings, _read_timings, mutated_lines, refuses=False),
    "card": Kind("README.md", _cards, _read_card, mutated_bytes, refuses=False),
    "generation": Kind("generation_config.json", _checkpoint, hp.from_pretrained),
    "generation to open": Kind("generation_config.json", _hub_folder, _open, refuses=False),
    "gradual training": Kind(
        "gradual.pt", _gradual, lambda f: Keeper(f, 1, {"a": "b"}, GRADUAL).load(), mutated_bytes
    ),
    "training": Kind(
        "finetune.pt", _training, lambda f: Keeper(f, 1, {"a": "b"}).load(), mutated_bytes
    ),
    "sound": Kind("clip.wav", _sound, lambda f: clip_of("clip.wav", "row 0", f), mutated_bytes),
    "json rows": Kind("rows.json", _rows("rows.json", JSON), _read_rows("rows.json")),
    "parquet": Kind("data.parquet", _parquet, _read_rows("data.parquet"), mutated_bytes),
}
#: Reading rows takes a tenth of a second each time, opening adapters the same.
SLOW = {
    "timings": 0.5,
    "csv": 0.3,
    "jsonl": 0.3,
    "json rows": 0.3,
    "parquet": 0.3,
    "adapter": 0.2,
    "adapter weights": 0.2,
}


@pytest.mark.parametrize("seed", range(2))
def test_no_flipped_bit_of_a_training_is_gone_on_with(seed: int, tmp_path: Path) -> None:
    """``torch.load`` compares no checksum, so that most of them would make other weights."""
    draw, keeper = random.Random(seed), Keeper(tmp_path, 1, {"a": "b"})
    weights = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    keeper.save({"weights": {"w": weights}, "step": 3})
    whole, found = keeper.path.read_bytes(), []
    for _ in range(100):
        damaged, at = bytearray(whole), draw.randrange(len(whole))
        damaged[at] ^= 1 << draw.randrange(8)
        keeper.path.write_bytes(damaged)
        try:
            state = keeper.load()
        except HeadPruneError:
            found.append("refused")
            continue
        assert state is not None
        assert torch.equal(state["weights"]["w"], weights)
        assert state["step"] == 3
    assert found


def try_some(name: str, numbers: range, folder: Path) -> dict[str, int]:
    """Reads so many damaged files; how many were refused and how many were read all the same.

    The folders lie deep enough in ``folder`` that a way out of them by some ``..`` ends in it
    still, where any change is seen: a file that is new, gone, or written.
    """
    kind, found = KINDS[name], {"refused": 0, "read": 0}
    deep = folder / "a" / "b" / "c"
    sound, here = deep / "sound", deep / "here"
    for made in (sound, here):
        made.mkdir(parents=True)
    kind.make(sound)
    whole = (sound / kind.file).read_bytes()
    kind.read(sound)
    before = os.getcwd()
    os.chdir(here)
    try:
        for number in numbers:
            damaged = kind.damage(whole, random.Random(f"{name} {number}"))
            (sound / kind.file).write_bytes(damaged)
            everything = seen_in(folder)
            try:
                with alarm(PATIENCE), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    kind.read(sound)
                found["read"] += 1
            except HeadPruneError as refusal:
                found["refused"] += 0 < len(str(refusal).strip()) < 50_000
            except BaseException as error:
                raise AssertionError(
                    f"{name} {number}: {type(error).__name__}: {str(error)[:500]}"
                ) from error
            assert seen_in(folder) == everything, f"{name} {number} wrote something"
    finally:
        os.chdir(before)
    assert sum(found.values()) == len(numbers), "an error without words, or far too many of them"
    return found


def seen_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file under a folder, with its length and the time when it was written last."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("where", ["../../HACKED", "../sound/neighbour", "new"])
def test_what_a_reader_writes_is_seen(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path) -> None:
        _plan(folder)
        (folder / "neighbour").write_text("a")

    sound = [True]  # the first time that it is read

    def read(folder: Path) -> None:
        if not sound:
            Path(where).write_text("b")
        sound.clear()

    monkeypatch.setitem(KINDS, "a reader that writes", Kind("plan.json", make, read))
    with pytest.raises(AssertionError, match="a reader that writes 0 wrote something"):
        try_some("a reader that writes", range(1), tmp_path)


#: PEFT asks Transformers by an old name.
IGNORED = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@IGNORED
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    found = try_some(name, range(round(60 * SLOW.get(name, 1))), tmp_path)
    assert found["refused"] > 0 or not KINDS[name].refuses


@IGNORED
@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_damaged_files(name: str, tmp_path: Path) -> None:
    found = try_some(name, range(100, 100 + round(500 * SLOW.get(name, 1))), tmp_path)
    print(f"{name}: {found}")
    assert found["refused"] > 0 or not KINDS[name].refuses
