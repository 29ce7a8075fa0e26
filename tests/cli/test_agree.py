"""``headprune agree``: JSON, a picture, and one message an error."""

import pytest
import torch

import headprune as hp
from headprune.core.agreement import Agreement
from tests.command_line import done, json_of, refused
from tests.laws.support import as_double, subject_of


def save(subject, folder, **scorers):
    batches = [as_double(subject.layout.tiny(seed)[1]) for seed in range(3)]
    paths = []
    for name, scorer in scorers.items():
        scores = hp.score(subject.model, batches, scorer, progress=False)
        paths.append(scores.save(folder / f"{name}.json"))
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("scores")
    return save(subject_of("bert"), folder, first="taylor", second="fisher", third="magnitude")


def test_json_and_a_picture(files, tmp_path):
    found = Agreement.from_dict(json_of("agree", *files, "--out", tmp_path / "agree.svg"))
    assert (found.names, found.k, found.n_units) == (("first", "second", "third"), 6, 12)
    assert found.pairs[0].spearman.low is not None
    assert (tmp_path / "agree.svg").stat().st_size > 5000


def test_files_of_one_name_are_told_apart_by_their_paths(files, tmp_path):
    other = tmp_path / "other" / "first.json"
    hp.HeadScores.load(files[0]).save(other)
    assert f"{files[0]} - {other}" in done("agree", files[0], other).stdout


def test_bad_input(files, tmp_path):
    (stranger,) = save(subject_of("gpt2"), tmp_path, stranger="magnitude")
    first = files[0]
    for arguments, words in (
        ([first], "two scores or more"),
        ([first, tmp_path / "missing.json"], "a readable HeadScores file"),
        ([first, stranger], "scores of one model"),
        ([first, first.parent / ".." / first.parent.name / first.name], "must be different"),
        ([*files, "--k", 12], "a count of units from 1 to 11"),
        ([*files, "--out", tmp_path / "a.doc"], "a picture that ends in one of"),
    ):
        message = refused("agree", *arguments)
        assert words in message
        assert len(message.strip().splitlines()) == 1
