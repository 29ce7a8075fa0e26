"""benchmarks/peers: rows are what programs did, errors are rows, and runs go on.

There is no network here, and no other environment.
"""

import importlib
import json
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import headprune as hp
from tests.benchmark_runs import encoder_study, page_of, question, record_of, write_rows
from tests.scripts import BENCHMARKS, benchmark, script

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
def run():
    return benchmark("peers/run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT, labelled questions, and the program."""
    made = tmp_path_factory.mktemp("peers")
    encoder_study(made, "trec")
    write_rows(made / "trec", question, test=30)  # one batch
    (made / "fake.py").write_text(PROGRAM)
    return made


def given(folder, out, budget="--budgets 5"):
    """The arguments of a small run."""
    where = f"--task trec --data {folder / 'trec'} --work {folder / 'work'} --model {folder}/model"
    small = "--seeds 1 --calibration 16 --threads 1 --epochs 1"
    speed = "--batch-sizes 2 --lengths 8 --seconds 0.05"
    return f"{where} --environments {folder} {budget} {small} {speed} --out {out}"


def arguments(run, folder, budget="--budgets 5"):
    return run.arguments(shlex.split(given(folder, folder / "unused.json", budget)))


@pytest.fixture
def programs(monkeypatch):
    """Imports a program as a module, beside what it imports."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module


def test_a_run_of_peers(run, folder, tmp_path, monkeypatch):
    def launched(command, **more):
        """Only what dies runs in a process of its own; the others run here."""
        if "dies-5-0" in command[2]:
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
    assert len(right) == 30
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

    # What a row saved is timed once more, by a process that makes nothing.
    again = {
        row["peer"]: row for row in record_of(run, f"{command} --peers works --retime")["rows"]
    }
    assert "timed" in again["works"]
    assert again["works"]["speed"] != row["speed"]
    assert {**again["works"], "speed": row["speed"], "timed": 0} == {**row, "timed": 0}
    assert again["headprune"] == rows["headprune"]

    # Another draw is of the same model and rows, and is not timed.
    record = record_of(run, f"{command} --peers headprune works --seeds 2")
    added = [(row["peer"], row["seed"], "speed" in row) for row in record["rows"][-2:]]
    assert added == [("headprune", 1, False), ("works", 1, False)]
    assert next(line for line in record["compared"] if line["peer"] == "works")["draws"] == 2

    # Where logits are gone, as on another machine, the comparisons of the record stay.
    (logits,) = subject.rglob("works-5-1/cut.npz")
    logits.unlink()
    assert record_of(run, command)["compared"] == record["compared"]

    # Nothing runs twice, and errors run again only when asked to.
    tried = []

    def measured(args, subject, peer, *_):
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
    assert "- **raises** failed: ValueError: no head left" in text
    assert "**forgets** does not load back: says something else, by 1" in text


def test_peers_are_held_to_models_that_are_like_theirs(run):
    def opponents(name, kept):
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


def test_a_difference_is_the_paired_one(run):
    base = (np.random.default_rng(1).random(400) < 0.8).astype(np.float32)
    other = base.copy()
    other[:20] = 1 - other[:20]
    labels = np.zeros(400, np.int64)
    found, apart = run.judging.difference([(other, base)], labels), other - base
    assert found["difference"] == pytest.approx(float(apart.mean()), abs=1e-5)
    assert (found["high"] - found["low"]) / 3.92 == pytest.approx(float(apart.std()) / 20, rel=0.1)
    assert run.judging.difference([(other, base), (base, other)], labels)["difference"] == 0


def test_speed_is_a_median_of_rounds(run):
    found = run.judging.speed((4, 128), [[0.2, 0.1]] * 9 + [[9.0, 0.1]])
    assert (found["ratio"], found["low"], found["base_ms"], found["ms"]) == (2, 2, 200, 100)
    assert (found["batch"], found["length"], found["rounds"]) == (4, 128, 10)


def cut_and_loaded(run, programs, args, name, kept):
    """A cut of ours and its job: its base is the subject's, it says something else, and it loads
    back."""
    ours, protocol = programs("ours"), sys.modules["protocol"]
    subject = run.subjects.subject(args)
    job = protocol.Job.read(run.written(args, subject, run.PEERS[name], kept, 0))
    cut, batches = ours.cut(job), job.batches("test")
    assert np.abs(protocol.logits(cut.base, batches) - subject.first()).max() < 1e-5
    cut.save(job.saved)
    found = protocol.logits(cut.small, batches)
    assert np.abs(found - subject.first()).max() > 1e-6
    np.testing.assert_array_equal(protocol.logits(ours.load(job, job.saved), batches), found)
    return cut, job, protocol


@pytest.mark.parametrize("name", ["headprune", "flap2024", "kwon2022"])
def test_ours_is_cut_recovered_and_loads_back(run, folder, programs, name):
    cut, *_ = cut_and_loaded(run, programs, arguments(run, folder), name, 5)
    assert sum(cut.heads) == 5
    assert list(cut.seconds) == ["score", "cut"]


@pytest.mark.parametrize("name", ["headprune", "flap2024", "kwon2022", "ziplm2023"])
def test_ours_meets_a_share_of_the_multiply_adds(run, folder, programs, name):
    args = arguments(run, folder, f"--shares 0.4 --peers {name}")
    assert [kept for _, kept, _ in run.wanted(args)] == [0.4]
    cut, job, protocol = cut_and_loaded(run, programs, args, name, 0.4)
    config = protocol.pretrained(job.base, "cpu").config
    attention, neurons = protocol.layer_macs(config, job.tokens)
    kept = sum(cut.heads) / config.num_attention_heads * attention
    kept += sum(cut.neurons) / config.intermediate_size * neurons
    share = kept / (config.num_hidden_layers * (attention + neurons))
    assert 0.25 < share < 0.41


def test_shares_are_refused_outside_0_and_1(run, folder, capsys):
    with pytest.raises(SystemExit):
        arguments(run, folder, "--shares 36")
    assert "--shares: must lie between 0 and 1, got [36.0]" in capsys.readouterr().err


@pytest.mark.parametrize("share", [1.0, 0.5, 1 / 3])
def test_a_smaller_architecture_has_as_many_multiply_adds(programs, share):
    from transformers import BertConfig, BertForSequenceClassification

    from headprune.model.costs import measure_costs
    from headprune.model.sites import bind

    smaller = programs("smaller")
    shape = {"hidden_size": 24, "intermediate_size": 96, "num_attention_heads": 6, "vocab_size": 8}
    config = BertConfig(**shape, num_hidden_layers=6, max_position_embeddings=32)
    layers, inner = smaller.shape(config, smaller.share_of_heads(config, share, 16), 16)
    cut, plain = BertForSequenceClassification(config), BertForSequenceClassification(config)
    hp.prune_heads_(cut, {layer: list(range(round(6 * share), 6)) for layer in range(6)})
    del plain.bert.encoder.layer[layers:]
    for layer in plain.bert.encoder.layer:
        smaller.narrow_(layer.intermediate.dense, layer.output.dense, inner)
    example = {"input_ids": torch.ones(1, 16, dtype=torch.long)}

    def macs(model):
        return measure_costs(model, bind(model, hp.find_sites(model)), example).total.macs(16)

    assert macs(plain) == pytest.approx(macs(cut), rel=0.01)
    assert layers <= 6
    assert plain(**example).logits.shape == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("integers", ["those of this processor", "QUInt8"])
def test_static_int8_of_onnx_runtime_is_close_to_its_file_in_fp32(integers, tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [str(PROGRAMS), *sys.path])
        program = script(PROGRAMS / "onnx_runtime.py")
        if integers == "QUInt8":  # as of a processor without VNNI
            patched.setattr(program, "integers", lambda package: package.QuantType.QUInt8)
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, 8, generator=generator) for n in (6, 5))
        made, numbers = onnx.helper, onnx.TensorProto.FLOAT
        node = made.make_node("MatMul", ["x", "w"], ["y"])
        ends = [
            made.make_tensor_value_info(name, numbers, ["n", width])
            for name, width in (("x", 8), ("y", 5))
        ]
        weights = onnx.numpy_helper.from_array(weight.T.contiguous().numpy(), "w")
        graph = made.make_graph([node], "product", ends[:1], ends[1:], [weights])
        opset = [made.make_opsetid("", 20)]
        onnx.save(made.make_model(graph, opset_imports=opset), tmp_path / "x.onnx")
        job = SimpleNamespace(
            out=tmp_path, settings={"batches": 1}, batches=lambda purpose: [{"x": x}]
        )
        program.static(job, str(tmp_path / "x.onnx"), str(tmp_path / "int8.onnx"))
        y = program.session(tmp_path / "int8.onnx", 1)({"x": x})
    difference = (torch.from_numpy(y) - x @ weight.T).abs().max()
    assert 0 < difference < 0.1
