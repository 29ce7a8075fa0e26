"""How benchmarks/peers judges: classes, next tokens and grades, and the models and rows of each."""

import importlib
import json
import random
import shlex
import sys

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tests.benchmark_runs import encoder_study, page_of, record_of
from tests.scripts import BENCHMARKS, benchmark
from tests.tiny_models import llama


@pytest.fixture(scope="module")
def run():
    return benchmark("peers/run")


@pytest.fixture(scope="module")
def judging(run):
    return run.judging


def test_a_class_is_right_or_wrong(judging):
    found = judging.answers(np.array([[1.0, 2], [3, 0], [0, 1]]), np.array([1, 1, 1]))
    assert found.tolist() == [1, 0, 1]
    assert judging.quality(found, np.array([1, 1, 1])) == pytest.approx(2 / 3)


def test_next_tokens_count_but_for_padding(judging):
    tokens = np.array([[0, 1, 2, 1], [2, 0, judging.IGNORED, judging.IGNORED]])
    # What comes after each token, said for the token itself: the last one has none.
    said = np.array([[1, 0, 1, 0], [0, 2, 2, 2]])
    found = judging.answers(np.eye(3)[said], tokens)
    assert found == pytest.approx([2 / 3, 1])


def test_grades_are_judged_by_their_order(judging):
    grades = np.array([0.0, 2, 1, 5], np.float32)
    found = judging.answers(np.array([[10.0], [30], [20], [21]]), grades)
    assert found.tolist() == [10, 30, 20, 21]
    assert judging.quality(found, grades) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("shape", "labels", "must"),
    [
        ((3, 2), np.zeros(4, np.int64), r"\[4, 'classes'\], not \[3, 2\]"),
        ((4, 2), np.zeros(4, np.float32), r"\[4, '1'\], not \[4, 2\]"),
        ((4, 2), np.zeros((4, 5), np.int64), r"\[4, 5, 'classes'\], not \[4, 2\]"),
    ],
)
def test_logits_of_another_shape_are_refused(judging, shape, labels, must):
    with pytest.raises(ValueError, match=must):
        judging.answers(np.zeros(shape), labels)


def test_the_interval_of_a_correlation_is_that_of_resampled_rows(judging, monkeypatch):
    draw = np.random.default_rng(3)
    grades = draw.integers(0, 6, 80).astype(np.float32)
    first, second = (grades + draw.normal(0, spread, 80) for spread in (1, 2))
    monkeypatch.setattr(judging, "DRAWS", 300)
    found = judging.difference([(first, second)], grades)

    def apart(rows):
        return (
            spearmanr(first[rows], grades[rows]).statistic
            - spearmanr(second[rows], grades[rows]).statistic
        )

    assert found["difference"] == pytest.approx(apart(slice(None)), abs=1e-5)
    resampled = [apart(rows) for rows in judging._drawn(80, 300)]
    assert len(resampled) == 300
    low, high = np.percentile(resampled, (2.5, 97.5))
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-5)
    assert judging.difference([(first, second), (second, first)], grades)["difference"] == 0


def command(made, task, peers):
    """A small run, one third of the multiply-adds kept."""
    small = "--shares 0.34 --seeds 1 --calibration 16 --threads 1"
    speed = "--batch-sizes 2 --lengths 8 --seconds 0.05"
    where = f"--environments {made} --out {made / f'peers-{task}.json'} --peers {peers}"
    if task == "stsb":
        more = encoder_study(made, task)
    else:
        more = f"--task {task} --data {stories(made / 'stories')} --work {made}"
    return f"{more} {where} {small} {speed}"


def arguments(run, made, task, peers):
    return run.arguments(shlex.split(command(made, task, peers)))


def stories(folder):
    """A tiny Llama and rows of tokens; 140 of them judge."""
    llama(folder)
    draw = random.Random(0)
    rows = ([1, *draw.choices(range(3, 34), k=draw.randint(6, 30))] for _ in range(170))
    lines = (json.dumps({"input_ids": row}) for row in rows)
    (folder / "stories.jsonl").write_text("\n".join(lines))
    return folder


def answered(run, args, name, kept, monkeypatch):
    """The job of a peer, done in this process, and its answer."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers" / "programs"))
    peer = run.PEERS[name]
    program = importlib.import_module(peer.program)
    subject = run.subjects.subject(args)
    job = sys.modules["protocol"].Job.read(run.written(args, subject, peer, kept, 0))
    return subject, job, program.cut(job)


@pytest.mark.parametrize("name", ["headprune, trained", "smaller architecture, distilled"])
def test_grades_are_trained_without_a_teacher(run, tmp_path, monkeypatch, name):
    args = arguments(run, tmp_path, "stsb", f'"{name}"')
    subject, job, cut = answered(run, args, name, 0.34, monkeypatch)
    assert subject.labels("test").dtype == np.float32
    assert any("no distribution to distil" in note for note in cut.notes)
    logits = sys.modules["protocol"].logits(cut.small, job.batches("test"))
    assert run.judging.answers(logits, subject.labels("test")).shape == (40,)


def test_a_model_of_language_is_judged_by_its_next_tokens(run, tmp_path, monkeypatch):
    args = arguments(run, tmp_path, "stories", "headprune")
    subject, job, cut = answered(run, args, "headprune", 0.34, monkeypatch)
    protocol, labels = sys.modules["protocol"], subject.labels("test")
    assert subject.train == {}
    first = protocol.logits(cut.base, job.batches("test"), most=protocol.FIRST)
    assert np.abs(first - subject.first()).max() < 1e-5
    found = protocol.logits(cut.small, job.batches("test"))
    with np.load(subject.file("test", 0)) as rows:
        shares = [
            np.mean(said.argmax(1)[: len(tokens) - 1] == tokens[1:])
            for said, ids, mask in zip(
                found, rows["input_ids"], rows["attention_mask"], strict=True
            )
            for tokens in [ids[mask == 1]]
        ]
    assert run.judging.answers(found, labels) == pytest.approx(shares, abs=1e-6)
    # Queries go with the keys and values of their group, and neurons with both projections.
    assert all(heads % 2 == 0 for heads in cut.heads)
    assert 0 < sum(cut.heads) < 16
    assert sum(cut.neurons) < 2 * job_neurons(job), "of an untrained model all may go"


def job_neurons(job):
    """Neurons of a layer of the base model."""
    return json.loads((job.base / "config.json").read_text())["intermediate_size"]


@pytest.mark.parametrize("broken", [[3.0, 3.0, 3.0], [1.0, float("nan"), 2.0]])
def test_grades_without_an_order_have_no_quality(judging, broken):
    grades = np.array([0.0, 1, 2], np.float32)
    assert not judging.has_quality(np.array(broken), grades)
    assert judging.has_quality(np.array([2.0, 1, 1]), grades)
    assert judging.has_quality(np.array([1.0, 1, 1]), np.array([0, 1, 2]))


def test_labels_of_tokens_are_padded_so_that_padding_does_not_count(run):
    batches = [{"labels": torch.ones(1, width, dtype=torch.long)} for width in (2, 3)]
    labels = run.subjects._joined(batches)["label"]
    assert labels.tolist() == [[1, 1, run.judging.IGNORED], [1, 1, 1]]


def test_every_task_has_its_own_rows_and_budgets(run, tmp_path, capsys):
    def args(task, more=""):
        where = f"--task {task} --data d --work {tmp_path} --environments {tmp_path}"
        return run.arguments(shlex.split(f"{where} {more}"))

    found = {task: args(task) for task in ("stsb", "stories", "digits")}
    assert {task: one.calibration for task, one in found.items()} == {
        "stsb": 512,
        "stories": 64,
        "digits": 512,
    }
    heads = {task: list(one.budgets or ()) for task, one in found.items()}
    assert heads == {"stsb": [36, 24, 14], "stories": [], "digits": [16, 8]}
    assert args("stories", "--calibration 8").calibration == 8
    for task, more, error in (
        ("stories", "--budgets 36", "heads alone are not compared on stories; give --shares"),
        ("stories", "--epochs 1", "--epochs: the model of stories comes trained"),
        ("digits", "--model x", "--model: digits has a model of its own, digits-vit"),
    ):
        with pytest.raises(SystemExit):
            args(task, more)
        assert error in capsys.readouterr().err
    cut = {peer.name for peer, _, _ in run.wanted(found["stories"])}
    assert {"headprune", "kwon2022", "PyTorch INT8"} <= cut
    assert not cut & {"TextPruner", "Torch-Pruning, global", "smaller architecture"}


@pytest.mark.slow
def test_a_record_of_grades_goes_from_the_rows_to_the_page(run, tmp_path):
    asked = command(tmp_path, "stsb", "unpruned flap2024")
    record, args = record_of(run, asked), run.arguments(shlex.split(asked))
    rows = {row["peer"]: row for row in record["rows"]}
    assert list(rows) == ["unpruned", "flap2024"]
    subject = run.subjects.subject(args)
    job = run.folder_of(args, subject, "unpruned", None, 0) / "job.json"
    said = run.array(job, "cut", "test")[:, 0]
    expected = spearmanr(said, subject.labels("test")).statistic
    assert rows["unpruned"]["test"] == pytest.approx(expected, abs=1e-5)
    assert all(row["loads_back"]["ok"] for row in rows.values())
    text = page_of(run, tmp_path, "peers.md")
    assert "| peer | draws | Spearman correlation | against unpruned |" in text
    assert "reads both sentences together" in text
