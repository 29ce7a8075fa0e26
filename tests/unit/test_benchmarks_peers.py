"""benchmarks/peers: rows are what programs did, errors are rows, and runs go on.

There is no network here, and no other environment.
"""

from __future__ import annotations

import importlib
import json
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headprune as hp
from tests.benchmark_runs import encoder_study, page_of, record_of
from tests.scripts import BENCHMARKS, benchmark

PROGRAMS = BENCHMARKS / "peers" / "programs"
#: Its answers are sums of tokens modulo 3 (the reference's: modulo 2), which padding does not
#: change; its models are naps. What it says of the base model is what the runner wrote down.
PROGRAM = f"""
import os, sys, time
if '"dies"' in open(sys.argv[1]).read():
    os._exit(3)
sys.path.insert(0, {str(PROGRAMS)!r})
import numpy as np
import torch
from protocol import Cut, main

def run_for(seconds, classes):
    def run(inputs):
        time.sleep(seconds)
        return torch.nn.functional.one_hot(inputs["input_ids"].sum(1) % classes, 3).float()
    return run

def cut(job):
    how = job.settings["how"]
    if how == "raises":
        raise ValueError(f"no head left in {{job.out}}")
    first = np.load(job.base.parent / "first.npz")["logits"] + (how == "strange")

    def base(inputs):
        time.sleep(0.03)
        return first[: len(inputs["input_ids"])]

    notes = [f"{{len(job.batches('calibration', labels=True)[0]['labels'])}} labels"]
    save = lambda folder: (folder / "model").write_text("x" * 100) and "a text file"
    small = run_for(0.003, 2 if how == "reference" else 3)
    return Cut(base, small, save, {{"score": 1.0, "cut": 2.0}}, [2, job.kept - 2], notes)

def load(job, folder):
    assert (folder / "model").read_text() == "x" * 100
    return run_for(0, 2 if job.settings["how"] in ("reference", "forgets") else 3)

main(cut, load)
"""


@pytest.fixture(scope="module")
def run() -> ModuleType:
    return benchmark("peers/run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, labelled questions, and the program."""
    made = tmp_path_factory.mktemp("peers")
    encoder_study(made, "trec")
    (made / "fake.py").write_text(PROGRAM)
    return made


def given(folder: Path, out: Path) -> str:
    """The arguments of a small run."""
    where = f"--task trec --data {folder / 'trec'} --work {folder / 'work'} --model {folder}/model"
    small = "--budgets 5 --seeds 1 --calibration 16 --threads 1 --epochs 1"
    speed = "--batch-sizes 2 --lengths 8 --seconds 0.05"
    return f"{where} --environments {folder} {small} {speed} --out {out}"


def arguments(run: ModuleType, folder: Path, more: str = "") -> Any:
    return run.arguments(shlex.split(f"{given(folder, folder / 'unused.json')} {more}"))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a program as a module, beside what it imports."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module


def test_a_run_of_peers(
    run: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Only what works and what dies runs in processes of its own; the others run here."""
        if any(f"{how}-5-0" in command[2] for how in ("works", "dies")):
            return subprocess.run(command, **more)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", command[1:])
            patched.setattr(sys, "path", [*sys.path])
            runpy.run_path(command[1], run_name="__main__")
        return subprocess.CompletedProcess(command, 0, "", "")

    processes = SimpleNamespace(run=launched, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(run, "subprocess", processes)
    ours = run.PEERS["headprune"]
    fake = replace(ours, program=str(folder / "fake"), settings={"how": "reference"})
    hows = ("works", "forgets", "raises", "dies", "strange")
    peers = {how: replace(fake, name=how, settings={"how": how}) for how in hows}
    peers["elsewhere"] = replace(fake, name="elsewhere", environment="onnx")
    (folder / "onnx.json").write_text(json.dumps({"ok": False, "error": "no such package"}))
    for module in (run, run.page, run.page.verdict):
        monkeypatch.setattr(module, "PEERS", {"headprune": fake, **peers})
    command = given(folder, tmp_path / "peers-trec.json")
    record = record_of(run, command)
    rows = {row["peer"]: row for row in record["rows"]}
    assert list(rows) == ["headprune", *peers]

    (subject,) = (folder / "work").glob("subject-trec-*")
    with np.load(subject / "test.npz") as file:
        right, reference = (file["input_ids"].sum(1) % n == file["label"] for n in (3, 2))
    row = rows["works"]
    assert len(right) == 40
    assert row["test"] == pytest.approx(right.mean(), abs=1e-5)
    assert (row["heads"], row["notes"], row["bytes"]) == ([2, 3], ["16 labels"], 100)
    (speed,) = row["speed"]
    assert speed["low"] <= speed["ratio"] <= speed["high"]
    assert speed["ratio"] > 1.5  # naps of 30 and of 3 ms, and a busy machine
    assert speed["base_ms"] >= 30
    assert row["loads_back"] == {"ok": True, "by": "a text file", "difference": 0.0}
    assert rows["forgets"]["loads_back"]["difference"] == 1
    assert not rows["forgets"]["loads_back"]["ok"]
    assert rows["raises"]["error"].startswith("ValueError: no head left in WORK")
    assert rows["dies"]["error"] == "exit status 3: "
    assert "its base model is another one: logits differ by 1" in rows["strange"]["error"]
    assert rows["elsewhere"]["error"] == "its environment cannot be made: no such package"
    line = next(line for line in record["compared"] if line["peer"] == "works")
    assert (line["reference"], line["kept"]) == ("headprune", 5)
    assert line["test"]["difference"] == pytest.approx(right.mean() - reference.mean(), abs=1e-5)

    # Another draw is of the same model and rows, and is not timed.
    record = record_of(run, f"{command} --peers headprune works --seeds 2")
    added = [(row["peer"], row["seed"], "speed" in row) for row in record["rows"][-2:]]
    assert added == [("headprune", 1, False), ("works", 1, False)]
    assert next(line for line in record["compared"] if line["peer"] == "works")["draws"] == 2

    # Nothing runs twice, and errors run again only when asked to.
    tried: list[str] = []

    def measured(args: Any, subject: Any, peer: Any, *_: Any) -> dict[str, Any]:
        tried.append(peer.name)
        return {**rows[peer.name], "created": "again"}

    monkeypatch.setattr(run, "measured", measured)
    record_of(run, command)
    assert tried == []
    assert len(record_of(run, f"{command} --again")["rows"]) == 9
    assert tried == ["raises", "dies", "strange", "elsewhere"]
    with pytest.raises(SystemExit, match="give another --out"):
        run.main(shlex.split(f"{command} --lengths 9"))

    text = page_of(run, tmp_path, "peers.md")
    assert "MiniLM on SST-2: no record yet." in text
    assert "### 5 of 8 heads kept" in text
    assert f"| forgets | 1 | {row['test']:.3f} | {100 * line['test']['difference']:+.1f} [" in text
    assert "| raises | does not work |" in text
    assert "- **raises** failed: ValueError: no head left" in text
    assert "**forgets** does not load back: says something else, by 1" in text


def test_the_time_is_up_before_a_row_and_a_kill_leaves_comparisons(
    run: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, done = tmp_path / "peers-trec.json", list[str]()

    def measured(args: Any, subject: Any, peer: Any, kept: int, seed: int) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(peer.name)
        return {"peer": peer.name, "kept": kept, "seed": seed, "error": "none"}

    monkeypatch.setattr(run, "measured", measured)
    monkeypatch.setattr(run, "compared", lambda args, subject, rows: [row["peer"] for row in rows])
    command = f"{given(folder, out)} --peers headprune flap2024 kwon2022"
    with monkeypatch.context() as late:
        late.setattr(run.studies, "clock", lambda args: lambda: True)
        assert record_of(run, command)["rows"] == []
    with pytest.raises(KeyboardInterrupt):
        run.main(shlex.split(command))
    assert json.loads(out.read_text())["compared"] == done == ["headprune", "flap2024"]


def test_what_a_run_needs_is_said(
    run: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.arguments(["--task", "digits"])
    assert "give --work, --environments, or --figure" in capsys.readouterr().err
    command = f"{given(folder, tmp_path / 'a.json')} --environments {tmp_path} --peers TextPruner"
    with pytest.raises(SystemExit, match=r"No environment textpruner: run .*environments\.py"):
        run.main(shlex.split(command))


def test_an_environment_that_cannot_be_made_is_a_row(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments, calls = run.environments, list[list[str]]()
    make = ["--environments", str(tmp_path), "--names", "onnx"]

    def failing(command: list[str]) -> str | None:
        calls.append(command)
        return "No matching distribution" if "pip" in command else None

    monkeypatch.setattr(environments, "_error", failing)
    assert environments.main([*make, "--pip=--no-index"]) == 1
    assert "--no-index" in calls[1]
    with pytest.raises(run.Failure, match="cannot be made: No matching distribution"):
        run.interpreter(tmp_path, run.PEERS["onnxsim"])
    monkeypatch.setattr(environments, "_error", lambda command: calls.append(command))
    assert environments.main([*make, "textpruner"]) == 0
    assert run.interpreter(tmp_path, run.PEERS["onnxsim"]).startswith(str(tmp_path / "onnx"))
    made = len(calls)
    assert environments.main(make) == 0
    assert len(calls) == made, "an environment of the same pins is kept"


def test_the_roster_is_whole(run: ModuleType) -> None:
    names = run.environments.names()
    assert {"transformers4", "textpruner", "torch-pruning", "onnx"} == set(names)
    for peer in run.PEERS.values():
        assert (PROGRAMS / f"{peer.program}.py").is_file(), peer.name
        assert peer.environment in (run.OWN, *names), peer.name
    for path in run.environments.REQUIREMENTS.iterdir():
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert all(line.count("==") == 1 for line in pins), path.name
        # Builds differ from machine to machine.
        assert not any("+" in line for line in pins), path.name


def test_ours_come_before_those_that_need_them(run: ModuleType, tmp_path: Path) -> None:
    order = [peer.name for peer, *_ in run.wanted(arguments(run, tmp_path))]
    together = [name for name in order if name.startswith("headprune + ")]
    assert order.index("headprune") < order.index(together[0])
    assert order.index("PyTorch INT8") < order.index("headprune + PyTorch INT8")


def test_peers_that_keep_as_many_heads_in_every_layer_have_no_row_of_others(
    run: ModuleType, tmp_path: Path
) -> None:
    args = arguments(run, tmp_path, "--budgets 24 14 --task sst2")
    rows = {(peer.name, kept) for peer, kept, _ in run.wanted(args, layers=6)}
    assert ("TextPruner", 24) in rows
    assert ("TextPruner", 14) not in rows
    assert ("Torch-Pruning, global", 14) in rows
    record = {"task": "sst2", "rows": [{"peer": "TextPruner", "kept": 24}], "shapes": []}
    even, lacking = run.page.table(record, 14, [])[-2:]
    assert even.endswith("as many heads in every layer: TextPruner.")
    assert "TextPruner" not in lacking


def test_peers_are_held_to_models_that_are_like_theirs(run: ModuleType) -> None:
    def opponents(name: str, kept: int | None) -> Any:
        return run.opponents(name, kept, [36, 24])

    assert opponents("unpruned", None) == opponents("headprune", 24) == []
    whole = [("unpruned", None), ("headprune", 36), ("headprune", 24)]
    assert opponents("PyTorch INT8", None) == whole
    assert opponents("TextPruner", 24) == [("headprune", 24)]
    # It has trained once, and not twice.
    assert opponents("smaller architecture", 24) == [("headprune", 24)]
    twice = [("headprune", 24), ("headprune, trained", 24)]
    assert opponents("smaller architecture, distilled", 24) == twice
    assert opponents("headprune, trained", 24) == [("headprune", 24)]
    both = [("headprune", 24), ("PyTorch INT8", None)]
    assert opponents("headprune + PyTorch INT8", 24) == both


def test_a_difference_is_the_paired_one(run: ModuleType) -> None:
    base = (np.random.default_rng(1).random(400) < 0.8).astype(np.float32)
    other = base.copy()
    other[:20] = 1 - other[:20]
    found, apart = run.judging.difference([(other, base)]), other - base
    assert found["difference"] == pytest.approx(float(apart.mean()), abs=1e-5)
    assert (found["high"] - found["low"]) / 3.92 == pytest.approx(float(apart.std()) / 20, rel=0.1)
    assert run.judging.difference([(other, base), (base, other)])["difference"] == 0


def test_speed_is_a_median_of_rounds(run: ModuleType) -> None:
    found = run.judging.speed((4, 128), [[0.2, 0.1]] * 9 + [[9.0, 0.1]])
    assert (found["ratio"], found["low"], found["base_ms"], found["ms"]) == (2, 2, 200, 100)
    assert (found["batch"], found["length"], found["rounds"]) == (4, 128, 10)


# ----------------------------------------------------------------------------------------------
# programs


@pytest.mark.parametrize("name", ["headprune", "flap2024", "kwon2022"])
def test_ours_is_cut_recovered_and_loads_back(
    run: ModuleType, folder: Path, programs: Any, name: str
) -> None:
    args = arguments(run, folder)
    subject = run.subjects.subject(args)
    ours, protocol = programs("ours"), sys.modules["protocol"]
    job = protocol.Job.read(run.written(args, subject, run.PEERS[name], 5, 0))
    cut = ours.cut(job)
    assert sum(cut.heads) == 5
    assert list(cut.seconds) == ["score", "cut"]
    batches = job.batches("test")
    assert np.abs(protocol.logits(cut.base, batches) - subject.first()).max() < 1e-5
    cut.save(job.saved)
    found = protocol.logits(cut.small, batches)
    np.testing.assert_array_equal(protocol.logits(ours.load(job, job.saved), batches), found)
    assert np.abs(found - subject.first()).max() > 1e-6


@pytest.mark.parametrize("share", [1.0, 0.5, 1 / 3])
def test_a_smaller_architecture_has_as_many_multiply_adds(programs: Any, share: float) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    from headprune.model.costs import measure_costs
    from headprune.model.sites import bind

    smaller = programs("smaller")
    shape = {"hidden_size": 24, "intermediate_size": 96, "num_attention_heads": 6, "vocab_size": 8}
    config = BertConfig(**shape, num_hidden_layers=6, max_position_embeddings=32)
    layers, inner = smaller.shape(config, share, 16)
    cut, plain = BertForSequenceClassification(config), BertForSequenceClassification(config)
    hp.prune_heads_(cut, {layer: list(range(round(6 * share), 6)) for layer in range(6)})
    del plain.bert.encoder.layer[layers:]
    for layer in plain.bert.encoder.layer:
        smaller.narrow_(layer.intermediate.dense, layer.output.dense, inner)
    example = {"input_ids": torch.ones(1, 16, dtype=torch.long)}

    def macs(model: nn.Module) -> float:
        return measure_costs(model, bind(model, hp.find_sites(model)), example).total.macs(16)

    assert macs(plain) == pytest.approx(macs(cut), rel=0.01)
    assert layers <= 6
    assert plain(**example).logits.shape == (1, 2)


def test_a_smaller_architecture_counts_the_tokens_of_its_task(
    run: ModuleType, folder: Path
) -> None:
    """They are the longest length that is timed, or an image's patches and its class token."""
    args = arguments(run, folder)
    subject = run.subjects.subject(args)

    def settings(subject: Any, name: str) -> dict[str, Any]:
        job = run.written(args, subject, run.PEERS[name], 5, 0)
        found: dict[str, Any] = json.loads(job.read_text())["settings"]
        return found

    assert settings(subject, "smaller architecture")["tokens"] == 8
    image = replace(subject, name="digits", folder=folder / "image")
    image.base.mkdir(parents=True)
    (image.base / "config.json").write_text(json.dumps({"image_size": 8, "patch_size": 2}))
    found = settings(image, "smaller architecture, distilled")
    assert (found["tokens"], found["times"]) == (17, 2)


def test_training_takes_as_many_epochs_as_asked(
    programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, seen = programs("training"), list[float]()
    rows = {"label": np.array([0, 1]), "input_ids": np.ones((2, 3), dtype=np.int64)}
    train = {"batch_size": 2, "epochs": 2.0, "learning_rate": 1e-3}
    job = SimpleNamespace(train=train, seed=0, arrays=lambda purpose: rows)
    recover = lambda model, loader, tune, teacher: seen.append(tune.epochs)  # noqa: E731
    monkeypatch.setattr(training.hp, "recover_", recover)
    for times in (1, 2):
        training.train_(nn.Linear(1, 1), job, times=times)
    assert seen == [2.0, 4.0]


def test_narrowing_keeps_the_largest_neurons(programs: Any) -> None:
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    with torch.no_grad():
        first.weight[[1, 4]] = 0
    x = torch.randn(3, 4)
    whole = second(torch.relu(first(x)) * (torch.arange(6) % 3 != 1))
    programs("smaller").narrow_(first, second, 4)
    torch.testing.assert_close(second(torch.relu(first(x))), whole)


def test_batches_end_at_their_longest_row(programs: Any) -> None:
    protocol = programs("protocol")
    mask = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    rows = {"input_ids": mask * 7, "attention_mask": mask, "label": np.array([0, 1, 2])}
    found = list(protocol._batches(rows, 2, labels=True, device="cpu"))
    assert [tuple(batch["input_ids"].shape) for batch in found] == [(2, 2), (1, 3)]
    assert found[1]["labels"].tolist() == [2]
    shaped = protocol.shaped(rows, 5, 9, "cpu")
    assert shaped["input_ids"].shape == (5, 9)
    assert (shaped["input_ids"] == 7).all(), "all are tokens, none is padding"
    assert (shaped["attention_mask"] == 1).all()


def test_static_ranges_come_from_rows_of_all_lengths(
    programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = programs("onnx_runtime")
    seen: list[int] = []

    def static(source: str, out: str, reader: Any, **_: Any) -> None:
        while (rows := reader.get_next()) is not None:
            seen.append(rows["input_ids"].shape[1])

    module = SimpleNamespace(CalibrationDataReader=object, quantize_static=static)
    monkeypatch.setattr(runtime.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(runtime, "prepared", lambda job, source: source)
    lengths = [{"input_ids": torch.ones(2, n)} for n in range(1, 17)]
    job = SimpleNamespace(batches=lambda purpose: lengths, settings={"batches": 8})
    runtime.static(job, "in", "out")
    assert seen == [16, 14, 12, 10, 8, 6, 4, 2]
