"""benchmarks/peers: rows are what programs did, errors are rows, runs go on; no network and no
other environment."""

from __future__ import annotations

import importlib
import json
import random
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
from tests.scripts import BENCHMARKS, WORDS, benchmark, tiny_encoder

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
    tiny_encoder(made)
    drawing = random.Random(0)
    for split, count in (("train", 60), ("validation", 20), ("test", 30)):
        rows = [
            {"text": " ".join(drawing.choices(WORDS, k=drawing.randint(3, 7))), "label": i % 3}
            for i in range(count)
        ]
        (made / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (made / "fake.py").write_text(PROGRAM)
    return made


def given(folder: Path, out: Path, *more: str) -> list[str]:
    where = [
        "--task",
        "trec",
        "--data",
        str(folder),
        "--work",
        str(folder / "work"),
        "--environments",
        str(folder),
    ]
    small = [
        "--budgets",
        "5",
        "--seeds",
        "1",
        "--calibration",
        "16",
        "--threads",
        "1",
        "--epochs",
        "1",
    ]
    speed = ["--batch-sizes", "2", "--lengths", "8", "--seconds", "0.05"]
    return [*where, "--model", str(folder / "model"), *small, *speed, "--out", str(out), *more]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a program as a module, beside what it imports."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module


def test_a_run_of_peers(
    run: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = replace(
        run.PEERS["headprune"], program=str(folder / "fake"), settings={"how": "reference"}
    )
    hows = ("works", "forgets", "raises", "dies", "strange")
    peers = {how: replace(fake, name=how, settings={"how": how}) for how in hows}
    peers["elsewhere"] = replace(fake, name="elsewhere", environment="onnx")
    (folder / "onnx.json").write_text(json.dumps({"ok": False, "error": "no such package"}))
    for module in (run, run.page, run.page.verdict):
        monkeypatch.setattr(module, "PEERS", {"headprune": fake, **peers})
    out = tmp_path / "peers-trec.json"
    record = json.loads(run.main(given(folder, out)).read_text())
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

    # Another draw, later: the same model and rows, and not timed.
    both = ["--peers", "headprune", "works", "--seeds", "2"]
    record = json.loads(run.main(given(folder, out, *both)).read_text())
    assert [(row["peer"], row["seed"], "speed" in row) for row in record["rows"][-2:]] == [
        ("headprune", 1, False),
        ("works", 1, False),
    ]
    assert next(line for line in record["compared"] if line["peer"] == "works")["draws"] == 2

    # Goes on: nothing runs twice, and errors again only when asked to.
    monkeypatch.setattr(run, "measured", lambda *_: pytest.fail("measured twice"))
    run.main(given(folder, out))
    tried: list[str] = []
    monkeypatch.setattr(
        run,
        "measured",
        lambda a, s, peer, *_: tried.append(peer.name) or {**rows[peer.name], "created": "again"},
    )
    again = json.loads(run.main(given(folder, out, "--again")).read_text())
    assert tried == ["raises", "dies", "strange", "elsewhere"]
    assert len(again["rows"]) == 9
    with pytest.raises(SystemExit, match="give another --out"):
        run.main(given(folder, out, "--lengths", "9"))

    run.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    text = (tmp_path / "peers.md").read_text()
    assert "MiniLM on SST-2: no record yet." in text
    assert "MiniLM on TREC: no record yet." not in text
    assert "### 5 of 8 heads kept" in text
    assert f"| forgets | 1 | {row['test']:.3f} | {100 * line['test']['difference']:+.1f} [" in text
    assert "| raises | does not work |" in text
    assert "- **raises** failed: ValueError: no head left" in text
    assert "**forgets** does not load back: says something else, by 1" in text


@pytest.mark.parametrize("name", ["headprune", "flap2024", "kwon2022"])
def test_ours_is_cut_recovered_and_loads_back(
    run: ModuleType, folder: Path, programs: Any, name: str
) -> None:
    args = run.arguments(given(folder, folder / "unused.json"))
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


def test_the_page_is_that_of_its_records(run: ModuleType, tmp_path: Path) -> None:
    if not list(run.RECORDS.glob("peers-*.json")):
        assert not (BENCHMARKS.parent / "docs" / "peers.md").exists(), "a page without a record"
        return
    run.main(["--figure", "--docs", str(tmp_path)])
    page = (BENCHMARKS.parent / "docs" / "peers.md").read_text()
    assert (tmp_path / "peers.md").read_text() == page, (
        "run `python benchmarks/peers/run.py --figure`"
    )


def test_what_a_run_needs_is_said(run: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.arguments(["--task", "digits"])
    assert "give --work, --environments, or --figure" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.arguments(["--task", "sst2", "--work", "w", "--environments", "e"])
    assert "give --data" in capsys.readouterr().err


def test_the_roster_is_whole(run: ModuleType) -> None:
    names = run.environments.names()
    assert {"transformers4", "textpruner", "torch-pruning", "onnx"} == set(names)
    for peer in run.PEERS.values():
        assert (PROGRAMS / f"{peer.program}.py").is_file(), peer.name
        assert peer.environment in (run.OWN, *names), peer.name
    for path in run.environments.REQUIREMENTS.iterdir():
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert all(line.count("==") == 1 for line in pins), path.name
        assert not any("+" in line for line in pins), (
            path.name
        )  # builds differ from machine to machine


def test_ours_come_before_those_that_need_them(run: ModuleType, tmp_path: Path) -> None:
    order = [
        peer.name for peer, *_ in run.wanted(run.arguments(given(tmp_path, tmp_path / "r.json")))
    ]
    assert order.index("headprune") < min(
        i for i, name in enumerate(order) if name.startswith("headprune + ")
    )
    assert order.index("PyTorch INT8") < order.index("headprune + PyTorch INT8")


def test_who_keeps_as_many_heads_in_every_layer_has_no_row_of_others(
    run: ModuleType, tmp_path: Path
) -> None:
    args = run.arguments(
        [*given(tmp_path, tmp_path / "r.json"), "--budgets", "24", "14", "--task", "sst2"]
    )
    rows = {(peer.name, kept) for peer, kept, _ in run.wanted(args, layers=6)}
    assert ("TextPruner", 24) in rows
    assert ("TextPruner", 14) not in rows
    assert ("Torch-Pruning, global", 14) in rows
    record = {"task": "sst2", "rows": [{"peer": "TextPruner", "kept": 24}], "shapes": []}
    even, lacking = run.page.table(record, 14, [])[-2:]
    assert even.endswith("as many heads in every layer: TextPruner.")
    assert lacking.startswith("- No row yet: headprune; headprune, not refitted; ")
    assert "TextPruner" not in lacking


def test_who_has_no_row_is_said(run: ModuleType) -> None:
    record = {"task": "digits", "rows": [], "shapes": []}
    assert run.page.gaps(
        record, None, {"unpruned", "ONNX Runtime fp32", "ONNX Runtime static INT8"}
    ) == ["- No row yet: PyTorch INT8; ONNX Runtime dynamic INT8."]
    everybody = {name for name, peer in run.PEERS.items() if peer.cuts and "digits" in peer.tasks}
    assert run.page.gaps(record, 16, everybody) == []
    assert run.page.gaps({**record, "task": "sst2"}, 16, everybody) == ["- No row yet: TextPruner."]


def test_an_environment_that_cannot_be_made_is_a_row(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments, calls = run.environments, []

    def failing(command: list[str]) -> str | None:
        calls.append(command)
        return "No matching distribution" if "pip" in command else None

    monkeypatch.setattr(environments, "_error", failing)
    assert (
        environments.main(["--environments", str(tmp_path), "--names", "onnx", "--pip=--no-index"])
        == 1
    )
    assert "--no-index" in calls[1]
    with pytest.raises(run.Failure, match="cannot be made: No matching distribution"):
        run.interpreter(tmp_path, run.PEERS["onnxsim"])
    monkeypatch.setattr(environments, "_error", lambda command: calls.append(command))
    assert (
        environments.main(["--environments", str(tmp_path), "--names", "onnx", "textpruner"]) == 0
    )
    assert "--no-deps" in calls[-1]
    assert run.interpreter(tmp_path, run.PEERS["onnxsim"]).startswith(str(tmp_path / "onnx"))
    made = len(calls)
    assert environments.main(["--environments", str(tmp_path), "--names", "onnx"]) == 0
    assert len(calls) == made  # the same pins: left alone


def test_a_difference_is_the_paired_one(run: ModuleType) -> None:
    chance = np.random.default_rng(1)
    base = (chance.random(400) < 0.8).astype(np.float32)
    other = base.copy()
    other[:20] = 1 - other[:20]
    found = run.judging.difference([(other, base)])
    apart = other - base
    assert found["difference"] == pytest.approx(float(apart.mean()), abs=1e-5)
    assert (found["high"] - found["low"]) / 3.92 == pytest.approx(float(apart.std()) / 20, rel=0.1)
    assert run.judging.difference([(other, base), (base, other)])["difference"] == 0


def test_speed_is_a_median_of_rounds(run: ModuleType) -> None:
    found = run.judging.speed((4, 128), [[0.2, 0.1]] * 9 + [[9.0, 0.1]])
    assert (found["ratio"], found["low"], found["base_ms"], found["ms"]) == (2, 2, 200, 100)
    assert (found["batch"], found["length"], found["rounds"]) == (4, 128, 10)


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
    keep = round(6 * share)
    hp.prune_heads_(cut, {layer: list(range(keep, 6)) for layer in range(6)})
    del plain.bert.encoder.layer[layers:]
    for layer in plain.bert.encoder.layer:
        smaller.narrow_(layer.intermediate.dense, layer.output.dense, inner)
    example = {"input_ids": torch.ones(1, 16, dtype=torch.long)}
    wanted, found = (
        measure_costs(m, bind(m, hp.find_sites(m)), example).total.macs(16) for m in (cut, plain)
    )
    assert found == pytest.approx(wanted, rel=0.01)
    assert layers <= 6
    assert plain(**example).logits.shape == (1, 2)


def test_a_smaller_architecture_counts_the_tokens_of_its_task(
    run: ModuleType, folder: Path
) -> None:
    """A text's longest length that is timed; an image's patches and its class token."""
    args = run.arguments(given(folder, folder / "unused.json"))
    subject = run.subjects.subject(args)
    job = json.loads(
        run.written(args, subject, run.PEERS["smaller architecture"], 5, 0).read_text()
    )
    assert job["settings"]["tokens"] == 8
    image = replace(subject, name="digits", folder=folder / "image")
    image.base.mkdir(parents=True)
    (image.base / "config.json").write_text(json.dumps({"image_size": 8, "patch_size": 2}))
    job = json.loads(
        run.written(args, image, run.PEERS["smaller architecture, distilled"], 5, 0).read_text()
    )
    assert (job["settings"]["tokens"], job["settings"]["times"]) == (17, 2)


def test_training_takes_as_many_epochs_as_asked(
    programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, seen = programs("training"), []
    rows = {"label": np.array([0, 1]), "input_ids": np.ones((2, 3), dtype=np.int64)}

    class Job:
        train, seed = {"batch_size": 2, "epochs": 2.0, "learning_rate": 1e-3}, 0

        def arrays(self, purpose: str) -> dict[str, np.ndarray]:
            return rows

    monkeypatch.setattr(
        training.hp, "recover_", lambda model, loader, tune, teacher: seen.append(tune)
    )
    for times in (1, 2):
        training.train_(nn.Linear(1, 1), Job(), times=times)
    assert [tune.epochs for tune in seen] == [2.0, 4.0]


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
    assert (shaped["input_ids"] == 7).all()  # tokens, no padding
    assert (shaped["attention_mask"] == 1).all()


def timed(
    name: str, kept: int | None, *ratios: float, test: float = 0.8, **more: Any
) -> dict[str, Any]:
    """A row whose intervals end 0.01 from its ratios."""
    speed = [
        {"ratio": r, "low": r - 0.01, "high": r + 0.01, "base_ms": 9.0, "ms": 9 / r} for r in ratios
    ]
    environment = "headprune" if name.startswith("headprune") else name
    return {
        "peer": name,
        "kept": kept,
        "seed": 0,
        "test": test,
        "environment": environment,
        "speed": speed,
        **more,
    }


def paired(
    peer: str, kept: int | None, low: float, high: float, its: str = "headprune"
) -> dict[str, Any]:
    points = {"difference": (low + high) / 2, "low": low, "high": high}
    return {
        "peer": peer,
        "kept": kept,
        "reference": its,
        "reference_kept": 24,
        "draws": 2,
        "test": points,
    }


def recorded(rows: list[dict[str, Any]], *lines: dict[str, Any]) -> dict[str, Any]:
    return {
        "rows": rows,
        "compared": list(lines),
        "shapes": [[1, 128], [32, 128]],
        "rows_used": {"test": 100},
    }


def test_what_a_comparison_comes_to(run: ModuleType) -> None:
    verdict = run.page.verdict
    rows = [
        timed("headprune", 24, 1.3, 1.4),
        timed("TextPruner", 24, 1.3, 1.4),
        timed("onnxsim", 24, 1.3, 1.2),
        timed("onnxsim, fused", 24, 1.6, 1.2),
        timed("PyTorch INT8", None, 2.0, 1.4),
    ]

    def outcome(peer: str, low: float, high: float) -> str:
        line = paired(peer, None if "INT8" in peer else 24, low, high)
        (found,) = verdict.comparisons(recorded(rows, line))
        table = [
            cells for cells in verdict.text(recorded(rows, line)) if cells.startswith(f"| {peer} |")
        ]
        assert table[0].endswith(f" | {found.outcome} |")
        return str(found.outcome)

    more, same, less = (0.01, 0.03), (-0.01, 0.02), (-0.03, -0.01)
    assert [outcome("TextPruner", *points) for points in (more, same, less)] == [
        "**lost**",
        "tied",
        "won",
    ]
    # Slower at one shape, and at the other as fast.
    assert [outcome("onnxsim", *points) for points in (more, same, less)] == [
        "a trade",
        "won",
        "won",
    ]
    # Faster at one shape, slower at the other: a trade, whatever the accuracy.
    assert {outcome("onnxsim, fused", *points) for points in (more, same, less)} == {"a trade"}
    assert [outcome("PyTorch INT8", *points) for points in (more, same, less)] == [
        "**lost**",
        "**lost**",
        "a trade",
    ]


def test_the_noise_is_what_models_of_as_many_heads_differ_by(run: ModuleType) -> None:
    noise = run.page.verdict.noise
    rows = [timed("headprune", 24, 1.2, 1.2, heads=[12, 12]), timed("unpruned", None, 0.99, 1.0)]
    assert noise(recorded(rows)) == pytest.approx([1 / 0.99 - 1, 0])
    rows.append(timed("headprune, taylor", 24, 1.3, 1.2, heads=[4, 20]))
    assert noise(recorded(rows)) == pytest.approx([1.3 / 1.2 - 1, 0])
    rows += [  # of another environment, with another number of heads, with a layer that has none, with uncounted heads
        timed("TextPruner", 24, 2.0, 2.0, heads=[12, 12]),
        timed("headprune, trained", 24, 2.0, 2.0, heads=[12, 11]),
        timed("headprune, not refitted", 24, 2.0, 2.0, heads=[24, 0]),
        timed("headprune + PyTorch INT8", 24, 2.0, 2.0),
    ]
    assert noise(recorded(rows)) == pytest.approx([1.3 / 1.2 - 1, 0])
    # Beyond the intervals, and within that noise; the other shape has less of it.
    rows = [*rows[:3], timed("TextPruner", 24, 1.25, 1.25)]
    (found,) = run.page.verdict.comparisons(recorded(rows, paired("TextPruner", 24, -0.01, 0.01)))
    assert found.faster == ("", "theirs")
    assert "8.3 % at 1 x 128 and 0.0 % at 32 x 128" in "\n".join(
        run.page.verdict.text(recorded(rows))
    )


def test_notes_are_of_what_theirs_is_better_in_and_of_whom_it_was_held_to(run: ModuleType) -> None:
    name, trained, peers = "smaller architecture, distilled", "headprune, trained", run.PEERS
    rows = [
        timed("headprune", 24, 1.2, 1.2),
        timed(trained, 24, 1.2, 1.2, test=0.9),
        timed(name, 24, 1.3, 1.2),
    ]
    rows += [timed("smaller architecture", 24, 1.3, 1.2), timed("PyTorch INT8", None, 1.3, 1.3)]

    def notes(*lines: dict[str, Any]) -> list[str]:
        record = recorded(rows, *lines)
        return list(run.page.verdict.notes(record, run.page.verdict.comparisons(record)))

    untrained, beside_trained, best, _ = notes(
        paired(name, 24, 0.01, 0.03), paired(name, 24, -0.02, 0.01, trained)
    )
    assert untrained.startswith(
        f"- **{name}** beside *headprune* with 24 heads: more accurate, as it was trained on"
    )
    assert untrained.endswith(f"; faster at 1 x 128, as {peers[name].faster}.")
    assert (
        beside_trained == f"- **{name}** beside *{trained}* with 24 heads: faster at 1 x 128, as"
        f" {peers[name].faster}."
    )
    assert (
        best
        == "- Of ours the most accurate, by these test rows: 24 heads, *headprune, trained*, 0.900"
        " at 1.20x and 1.20x."
    )
    both = notes(paired("smaller architecture", 24, -0.02, 0.01), paired(name, 24, -0.02, 0.01))
    assert both[0].startswith(
        f"- **smaller architecture** and **{name}** beside *headprune* with 24 heads: faster at"
    )
    assert notes(paired("PyTorch INT8", None, -0.02, 0.01))[0].endswith(
        f": faster, as {peers['PyTorch INT8'].faster}."
    )
    assert notes(paired("PyTorch INT8", None, -0.02, -0.01))[0].endswith(
        f": faster, as {peers['PyTorch INT8'].faster}."
    )
    rows.append(timed("TextPruner", 24, 1.2, 1.2))
    assert run.page.verdict.UNKNOWN in notes(paired("TextPruner", 24, 0.01, 0.03))[0]
    assert notes(paired("TextPruner", 24, -0.03, -0.01)) == []


def test_a_tie_says_how_many_rows_would_tell(run: ModuleType) -> None:
    rows = [
        timed("headprune", 24, 1.2, 1.2),
        timed("TextPruner", 24, 1.2, 1.2),
        timed("onnxsim", 24, 1.2, 1.2),
    ]
    lines = [paired("TextPruner", 24, -0.01, 0.03), paired("onnxsim", 24, -0.02, 0.02)]
    record = recorded(rows, *lines)
    told = run.page.verdict.notes(record, run.page.verdict.comparisons(record))[0]
    # 0.01 apart, and 0.02 from there to the end beyond 0: four times the rows halve it.
    assert "so many times the 100 there are would tell" in told
    assert "TextPruner, 24 heads: 4.0 times (4.0 points wide)" in told
    assert told.endswith("onnxsim, 24 heads: no number, as none was found (4.0 points wide).")
    rows.append(timed("PyTorch INT8", None, 1.2, 1.2))
    (found,) = run.page.verdict.comparisons(
        recorded(rows, paired("PyTorch INT8", None, -0.001, 0.021))
    )
    assert (
        run.page.verdict.tie(found)
        == "PyTorch INT8, all heads beside 24: 1.2 times (2.2 points wide)"
    )


def test_what_ours_adds_is_of_all_draws(run: ModuleType) -> None:
    both = "headprune + PyTorch INT8"
    rows = [timed("PyTorch INT8", None, 2.0, 2.0, test=0.8), timed(both, 24, 2.5, 3.0, test=0.79)]
    rows.append({"peer": both, "kept": 24, "seed": 1, "test": 0.76})
    added = run.page.verdict.added
    line = "| PyTorch INT8 | 24 | 2 | -2.5 | 1.25 [1.24, 1.26] | 1.50 [1.49, 1.51] |"
    assert added(recorded(rows))[-1] == line
    found = added(recorded(rows, paired(both, 24, -0.03, -0.01, "PyTorch INT8")))[-1]
    assert found == line.replace("-2.5", "-2.0 [-3.0, -1.0]")
    assert run.opponents(both, 24, [24]) == [("headprune", 24), ("PyTorch INT8", None)]
    assert added(recorded(rows[:1])) == []


def test_the_page_says_how_far_apart_rows_were_timed(run: ModuleType) -> None:
    rows = [timed("headprune", 24, 1.2, 1.2, created="2026-01-01T00:00:00+00:00")]
    rows += [
        timed("TextPruner", 36, 1.2, 1.2, created="2026-01-01T02:30:00+00:00"),
        {**rows[0], "seed": 1},
    ]
    rows[1]["speed"][1]["base_ms"] = 1750.4
    del rows[2]["speed"]
    found = run.page.sessions(recorded(rows))[-1]
    assert "up to 2.5 hours apart" in found
    assert "9 to 9 ms at 1 x 128, 9 to 1750 ms at 32 x 128" in found
    assert "1 with 36 heads; 2 with 24 heads; 1 for what trains" in found
    assert run.page._speed(rows[1]["speed"][1]).endswith(", 1750 to 7.5")


def test_time_is_up_before_a_row_and_a_kill_leaves_comparisons(
    run: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, done = tmp_path / "peers-trec.json", []

    def measured(args: Any, subject: Any, peer: Any, kept: int | None, seed: int) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(peer.name)
        return {"peer": peer.name, "kept": kept, "seed": seed, "error": "none"}

    monkeypatch.setattr(run, "measured", measured)
    monkeypatch.setattr(run, "compared", lambda args, subject, rows: [row["peer"] for row in rows])
    with monkeypatch.context() as late:
        late.setattr(run.studies, "clock", lambda args: lambda: True)
        assert (
            json.loads(
                run.main(given(folder, out, "--peers", "headprune", "flap2024")).read_text()
            )["rows"]
            == []
        )
    assert done == []
    with pytest.raises(KeyboardInterrupt):
        run.main(given(folder, out, "--peers", "headprune", "flap2024", "kwon2022"))
    assert json.loads(out.read_text())["compared"] == done == ["headprune", "flap2024"]


def test_a_row_that_was_timed_on_a_busy_machine_says_so(run: ModuleType) -> None:
    def row(name: str, environment: str, base: float) -> dict[str, Any]:
        return {"peer": name, "kept": 24, "environment": environment, "speed": [{"base_ms": base}]}

    rows = [row("headprune", "headprune", 10.0), row("headprune, taylor", "headprune", 12.9)]
    rows += [
        row("flap2024", "headprune", 14.0),
        row("TextPruner", "textpruner", 20.0),
    ]  # an older PyTorch is slower
    told = run.page.others({"rows": rows, "shapes": [[32, 128]]})
    assert told == [
        "",
        (
            "- **flap2024**, 24 heads: at 32 x 128 the base model took 1.4 times what it took at"
            " best in that environment."
        ),
    ]


def test_everybody_is_held_to_what_is_like_him(run: ModuleType) -> None:
    budgets = [36, 24]
    assert run.opponents("unpruned", None, budgets) == run.opponents("headprune", 24, budgets) == []
    assert run.opponents("PyTorch INT8", None, budgets) == [
        ("unpruned", None),
        ("headprune", 36),
        ("headprune", 24),
    ]
    assert run.opponents("TextPruner", 24, budgets) == [("headprune", 24)]
    assert run.opponents("smaller architecture", 24, budgets) == [
        ("headprune", 24)
    ]  # has trained once, not twice
    twice = [("headprune", 24), ("headprune, trained", 24)]
    assert run.opponents("smaller architecture, distilled", 24, budgets) == twice
    assert run.opponents("headprune, trained", 24, budgets) == [("headprune", 24)]


def test_a_run_without_its_environments_does_not_begin(
    run: ModuleType, folder: Path, tmp_path: Path
) -> None:
    arguments = given(folder, tmp_path / "peers.json", "--peers", "TextPruner")
    arguments[arguments.index("--environments") + 1] = str(tmp_path)
    with pytest.raises(
        SystemExit, match=r"No environment textpruner: run .*environments\.py first"
    ):
        run.main(arguments)


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
