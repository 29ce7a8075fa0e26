"""``headprune agree``: a table, JSON, a picture, and one message an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headprune as hp
from headprune.cli.main import app
from headprune.core.agreement import Agreement
from tests.laws.support import Subject, as_double, subject_of


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["agree", *map(str, arguments)])


def save(subject: Subject, folder: Path, **scorers: str) -> list[Path]:
    batches = [as_double(subject.layout.tiny(seed)[1]) for seed in range(3)]
    paths = []
    for name, scorer in scorers.items():
        paths.append(
            hp.score(subject.model, batches, scorer, progress=False).save(folder / f"{name}.json")
        )
    return paths


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    torch.manual_seed(0)
    return save(
        subject_of("bert"), tmp_path, first="taylor", second="leave_one_out", third="magnitude"
    )


def test_a_table(files: list[Path]) -> None:
    result = call(*files, "--k", 4)
    assert result.exit_code == 0, result.output
    for words in (
        "first - second",
        "first - third",
        "second - third",
        "Kendall tau-b",
        "Jaccard of the 4 lowest",
    ):
        assert words in result.stdout
    scores = [hp.HeadScores.load(path) for path in files]
    expected = hp.agreement(*scores, k=4, names=["first", "second", "third"])
    assert result.stdout.strip() == str(expected)
    assert expected.pairs[0].spearman.low is not None


def test_json_and_a_picture(files: list[Path], tmp_path: Path) -> None:
    result = call(*files, "--json", "--out", tmp_path / "agree.svg")
    assert result.exit_code == 0, result.output
    found = Agreement.from_dict(json.loads(result.stdout))
    assert (found.names, found.k, found.n_units) == (("first", "second", "third"), 6, 12)
    assert "wrote" in result.stderr
    assert (tmp_path / "agree.svg").stat().st_size > 5000


def test_files_of_one_name_are_told_apart_by_their_paths(files: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other" / "first.json"
    hp.HeadScores.load(files[0]).save(other)
    result = call(files[0], other)
    assert result.exit_code == 0, result.output
    assert f"{files[0]} - {other}" in result.stdout


def test_bad_input(files: list[Path], tmp_path: Path) -> None:
    (stranger,) = save(subject_of("gpt2"), tmp_path, stranger="magnitude")
    for arguments, words in (
        ([files[0]], "two scores or more"),
        ([files[0], tmp_path / "missing.json"], "a readable HeadScores file"),
        ([files[0], stranger], "scores of one model"),
        (
            [files[0], tmp_path / "sub" / ".." / files[0].name],
            "files: must be different from one another",
        ),
        ([*files, "--k", 12], "a count of units from 1 to 11"),
        ([*files, "--out", tmp_path / "a.doc"], "a picture that ends in one of"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
