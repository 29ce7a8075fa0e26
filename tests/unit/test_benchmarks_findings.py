"""benchmarks/findings.py: its rows are what masked and trained models do, a run goes on, and the
verdicts can fail."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import headprune as hp
from headprune.bench.quality import evaluate
from tests.scripts import WORDS, benchmark, tiny_encoder


@pytest.fixture(scope="module")
def findings() -> ModuleType:
    return benchmark("findings")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Questions whose first word says their class, a tiny encoder, and the arguments about them."""
    folder = tmp_path_factory.mktemp("findings")
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 20), ("test", 40)):
        texts = [draw.choices(WORDS, k=draw.randint(3, 7)) for _ in range(count)]
        rows = [{"text": " ".join(words), "label": WORDS.index(words[0]) % 3} for words in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where = [
        "--task",
        "trec",
        "--data",
        str(folder),
        "--work",
        str(folder),
        "--model",
        str(tiny_encoder(folder)),
    ]
    return [*where, "--calibration", "24"]


def test_rows_and_a_run_that_goes_on(
    findings: ModuleType, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "findings-trec.json"
    trained: list[Any] = []
    original = findings.tuned_
    monkeypatch.setattr(
        findings, "tuned_", lambda *a, **k: (trained.append(a[0]), original(*a, **k))[1]
    )
    few = [*given, "--budgets", "4", "--out", str(out)]
    record = json.loads(findings.main([*few, "--seeds", "1"]).read_text())
    rows = {(r["way"], r["choice"], r["kept"]): r["accuracy"] for r in record["rows"]}
    assert len(trained) == 1 + 1 + 3, "the whole twice, and every choice at the one budget"
    assert [kept for way, choice, kept in rows if (way, choice) == ("masked", "important")] == [
        7,
        6,
        5,
        4,
        3,
        2,
    ]
    assert {kept for _, _, kept in rows} == set(range(2, 9)), "a head a layer stays"

    # The same by other code: what is masked is the model that was trained first, and all trained
    # begin anew.
    model = trained[0]
    args = findings.arguments([*few, "--seeds", "1"])
    recipe = findings.recipe_of(args)
    raw = findings.number_labels(recipe, findings.load_rows(recipe))
    data = findings.encode_rows(recipe, raw, findings.prepare(recipe))
    batches = data.redrawn(24, 0).batches("calibration", 32)
    order = hp.score(model, batches, "taylor").units()
    best, worst = (
        sorted(order, key=lambda u: sign * u.value)[
            :4
        ]  # no layer of the tiny model loses all of its heads
        for sign in (-1, 1)
    )
    for choice, units in (("important", best), ("unimportant", worst)):
        keep = {
            site.name: [u.heads[0] for u in units if u.name.startswith(site.name)]
            for site in hp.find_sites(model)
        }
        if not all(keep.values()):
            continue
        cut = copy.deepcopy(model)
        hp.prune_(cut, hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
        assert evaluate(cut, data.evaluation("test", 128)).value == pytest.approx(
            rows["masked", choice, 4]
        )
    assert [sum(len(site.heads) for site in hp.find_sites(m)) for m in trained[2:]] == [4, 4, 4]
    assert record["alone"]["heads"] == 8
    for row in record["rows"]:
        assert row["right"].count("1") / len(row["right"]) == pytest.approx(row["accuracy"])

    more = json.loads(findings.main([*few, "--seeds", "2"]).read_text())
    assert more["rows"][: len(record["rows"])] == record["rows"]
    assert len(more["rows"]) == 2 * len(record["rows"])
    with pytest.raises(SystemExit, match="give another --out"):
        findings.main([*given, "--budgets", "5", "--out", str(out)])


def right(accuracy: float) -> str:
    """Answers of 1000 examples, the same ones wrong first."""
    return "".join("0" if i < round(1000 * (1 - accuracy)) else "1" for i in range(1000))


def record(important: list[float], trained: list[float], alone: int = 3) -> dict[str, Any]:
    """What a run of ten heads and three draws would leave: chance is .5 when masked."""
    found = [
        ("masked", choice, kept, value)
        for choice in ("important", "chance", "unimportant")
        for kept, value in zip(
            (8, 6, 4), important if choice == "important" else [0.5] * 3, strict=True
        )
    ]
    names = [("important", 4), ("chance", 4), ("unimportant", 4), ("all", 10)]
    found += [
        ("trained", choice, kept, value)
        for (choice, kept), value in zip(names, trained, strict=True)
    ]
    keys = ("way", "choice", "kept", "accuracy")
    rows = [
        dict(zip(keys, f, strict=True)) | {"right": right(f[3]), "seed": seed}
        for f in found
        for seed in range(3)
    ]
    judged = {"rows": "test", "n": 1000, "accuracy": 0.9, "right": right(0.9)}
    about = {"task": "trec", "heads": 10, "budgets": [4], "judged": judged}
    return {**about, "rows": rows, "alone": {"heads": 10, "raises": alone, "lowers": 1}}


@pytest.fixture
def told(findings: ModuleType, tmp_path: Path) -> Callable[..., str]:
    """The page of records."""

    def text(found: dict[str, Any], gates: dict[str, Any] | None = None) -> str:
        (tmp_path / "findings-trec.json").write_text(json.dumps(found))
        if gates:
            (tmp_path / "learned-gates-trec.json").write_text(json.dumps(gates))
        findings.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
        assert (tmp_path / findings.PICTURE).read_text().startswith("<?xml")
        return " ".join((tmp_path / findings.PAGE).read_text().split())

    return text


GOOD = [0.9, 0.898, 0.8]


def test_michel_is_judged_by_the_interval(told: Callable[..., str]) -> None:
    page = told(record(GOOD, [0.9, 0.895, 0.89, 0.9]))
    assert (
        "40 % of the heads go, least important first, for surely at most 1 point; beyond 40 % it is"
        " surely" in page
    )
    assert "Alone, 3 of 10 heads raise the loss" in page
    assert "at once). **Reproduced.**" in page
    assert "Voita" not in page
    page = told(
        record([0.889, 0.889, 0.8], [0.9, 0.895, 0.89, 0.9])
    )  # 1.1 points lost: neither is sure
    assert (
        "0 % of the heads go, least important first, for surely at most 1 point; beyond 40 %"
        in page
    )
    assert "at once). **Undecided.**" in page
    assert "at once). **Contradicted.**" in told(record([0.8, 0.7, 0.6], [0.9, 0.895, 0.89, 0.9]))


@pytest.mark.parametrize(
    ("trained", "word"),
    [
        ([0.9, 0.895, 0.89, 0.9], "Reproduced"),
        ([0.5, 0.45, 0.5, 0.95], "Contradicted"),  # random ones end far below the whole
        ([0.9, 0.6, 0.5, 0.9], "Contradicted"),  # training leaves the difference
        ([0.9, 0.871, 0.5, 0.9], "Undecided"),  # 2.9 points below the whole, of 3 allowed
    ],
)
def test_prasanna_has_three_parts(
    told: Callable[..., str], trained: list[float], word: str
) -> None:
    page = told(record(GOOD, trained))
    assert f"(nearly as good: at most 3). **{word}.**" in page
    assert f"{100 * (trained[0] - trained[1]):+.1f} [" in page
    cells = " | ".join(f"{value:.3f} ± 0.000" for value in (0.8, 0.5, 0.5, *trained))
    assert f"| trec | 4 | {cells} |" in page
    assert "important heads are +30.0 [" in page


def gates(*lost: float) -> dict[str, Any]:
    """A record of learned gates; the whole model trained on has .9."""
    found = {"task": "sst2", "heads": 10, "budgets": [4], "training": {"steps": 7}}
    judged = {"accuracy": 0.85, "n": 50, "rows": "validation"}
    ways = [
        ("all heads", 10, lambda _: 0.9),
        ("taylor", 4, lambda _: 0.88),
        ("subset_topk", 4, lambda seed: 0.9 - lost[seed]),
    ]
    rows = [
        {
            "method": m,
            "kept": kept,
            "seed": seed,
            "accuracy": value(seed),
            "untrained": 0.7 if m == "taylor" else None,
        }
        for m, kept, value in ways
        for seed in range(3)
    ]
    return {**found, "judged": judged, "rows": rows}


@pytest.mark.parametrize(
    ("lost", "word"),
    [
        ((0.001, 0.002, 0.003), "Reproduced"),
        ((0.03, 0.031, 0.032), "Contradicted"),
        ((0.0, 0.02, 0.01), "Undecided"),
    ],
)
def test_voita_is_judged_beside_the_whole_after_as_many_steps(
    told: Callable[..., str], lost: tuple[float, ...], word: str
) -> None:
    page = told(record(GOOD, [0.9, 0.895, 0.89, 0.9]), gates(*lost))
    mean = 100 * sum(lost) / 3
    assert f"- `sst2`, 4 of 10 heads by `subset_topk`: {mean:+.1f} [" in page
    assert f"of the whole model's 0.900 ± 0.000 on validation rows. **{word}.**" in page
    assert (
        "by `taylor`: +2.0 [+2.0, +2.0] points lost of the whole model's 0.900 ± 0.000 on"
        " validation rows." in page
    )
    assert "whole, before: 0.850; whole, trained on: 0.900 ± 0.000." in page
    assert "| `taylor` | 4 | 0.700 ± 0.000 | 0.880 ± 0.000 |" in page


def test_a_difference_is_over_draws_and_examples(findings: ModuleType) -> None:
    chance = np.random.default_rng(0)
    same = {seed: (chance.random(500) < 0.8).astype(float) for seed in range(3)}
    assert findings.difference([(same, same)]) == findings.Share(0.0, 0.0, 0.0)
    apart = {
        seed: right - 0.1 * seed for seed, right in same.items()
    }  # draws differ, examples do not
    found = findings.difference([(same, apart), (same, apart)])
    assert found.mean == pytest.approx(0.1)
    assert found.low == pytest.approx(0.0, abs=1e-9)
    assert found.high == pytest.approx(0.2)
    student = findings.over_draws([0.01, 0.02, 0.03])
    assert student.mean == pytest.approx(0.02)
    assert student.high - student.mean == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)


def test_missing_arguments_are_named(
    findings: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        findings.main(["--task", "trec", "--work", "x"])
    assert "--task, --work and, for TREC, --data must be given" in capsys.readouterr().err
