"""benchmarks/findings.py: its rows are what masked and trained models do, a run goes on, and the verdicts can fail."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

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
    where = ["--task", "trec", "--data", str(folder), "--work", str(folder), "--model", str(tiny_encoder(folder))]
    return [*where, "--calibration", "24"]


def test_rows_and_a_run_that_goes_on(
    findings: ModuleType, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "findings-trec.json"
    trained: list[Any] = []
    original = findings.tuned_
    monkeypatch.setattr(findings, "tuned_", lambda *a, **k: (trained.append(a[0]), original(*a, **k))[1])
    few = [*given, "--budgets", "4", "--out", str(out)]
    record = json.loads(findings.main([*few, "--seeds", "1"]).read_text())
    rows = {(r["way"], r["choice"], r["kept"]): r["accuracy"] for r in record["rows"]}
    assert len(trained) == 1 + 1 + 3, "the whole twice, and every choice at the one budget"
    assert [kept for way, choice, kept in rows if (way, choice) == ("masked", "important")] == [7, 6, 5, 4, 3, 2]
    assert {kept for _, _, kept in rows} == set(range(2, 9)), "a head a layer stays"

    # The same by other code: what is masked is the model that was trained first, and all trained begin anew.
    model = trained[0]
    args = findings.arguments([*few, "--seeds", "1"])
    recipe = findings.recipe_of(args)
    raw = findings.number_labels(recipe, findings.load_rows(recipe))
    data = findings.encode_rows(recipe, raw, findings.prepare(recipe))
    batches = data.redrawn(24, 0).batches("calibration", 32)
    order = hp.score(model, batches, "taylor").units()
    best, worst = (
        sorted(order, key=lambda u: sign * u.value)[:4]  # no layer of the tiny model loses all of its heads
        for sign in (-1, 1)
    )
    for choice, units in (("important", best), ("unimportant", worst)):
        keep = {site.name: [u.heads[0] for u in units if u.name.startswith(site.name)] for site in hp.find_sites(model)}
        if not all(keep.values()):
            continue
        cut = copy.deepcopy(model)
        hp.prune_(cut, hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
        assert evaluate(cut, data.evaluation("test", 128)).value == pytest.approx(rows["masked", choice, 4])
    assert [sum(len(site.heads) for site in hp.find_sites(m)) for m in trained[2:]] == [4, 4, 4]
    assert record["alone"]["heads"] == 8

    more = json.loads(findings.main([*few, "--seeds", "2"]).read_text())
    assert more["rows"][: len(record["rows"])] == record["rows"]
    assert len(more["rows"]) == 2 * len(record["rows"])
    with pytest.raises(SystemExit, match="give another --out"):
        findings.main([*given, "--budgets", "5", "--out", str(out)])


def record(important: list[float], trained: list[float], alone: int = 3) -> dict[str, Any]:
    """What a run of ten heads would leave: chance is .5 when masked."""
    rows = [
        {"way": "masked", "choice": choice, "kept": kept, "seed": 0, "accuracy": value}
        for choice in ("important", "chance", "unimportant")
        for kept, value in zip((8, 6, 4), important if choice == "important" else [0.5] * 3, strict=True)
    ]
    names = [("important", 4), ("chance", 4), ("unimportant", 4), ("all", 10)]
    rows += [
        {"way": "trained", "choice": choice, "kept": kept, "seed": 0, "accuracy": value}
        for (choice, kept), value in zip(names, trained, strict=True)
    ]
    judged = {"rows": "test", "n": 100, "accuracy": 0.9}
    about = {"task": "trec", "heads": 10, "budgets": [4], "judged": judged}
    return {**about, "rows": rows, "alone": {"heads": 10, "raises": alone, "lowers": 1}}


def test_verdicts_follow_the_record(findings: ModuleType, tmp_path: Path) -> None:
    def text(found: dict[str, Any], gates: dict[str, Any] | None = None) -> str:
        (tmp_path / "findings-trec.json").write_text(json.dumps(found))
        if gates:
            (tmp_path / "learned-gates-trec.json").write_text(json.dumps(gates))
        findings.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
        assert (tmp_path / findings.PICTURE).read_text().startswith("<?xml")
        return " ".join((tmp_path / findings.PAGE).read_text().split())

    page = text(record([0.9, 0.895, 0.8], [0.9, 0.88, 0.87, 0.9]))
    assert "40 % of the heads go before 1 point is lost, least important first; 0 % by chance." in page
    assert "Alone, 3 of 10 heads raise the loss" in page
    assert "+30.0 points from random ones when masked and +2.0 when trained again" in page
    assert "end 2.0 points below the whole. **Reproduced.**" in page
    assert "| trec | 4 | 0.800 | 0.500 | 0.500 | 0.900 | 0.880 | 0.870 | 0.900 |" in page
    assert "Contradicted" not in page
    assert "Voita" not in page

    page = text(record([0.8, 0.7, 0.6], [0.9, 0.5, 0.5, 0.9]))
    assert "0 % of the heads go before 1 point is lost" in page
    assert "**Contradicted**, less than 20 %, but importance brings no more than chance." in page
    assert "+10.0 points from random ones when masked and +40.0 when trained again" in page
    assert "**Contradicted.**" in page

    def gates(learned: float) -> dict[str, Any]:
        found = {"task": "trec", "heads": 10, "budgets": [4], "judged": {"accuracy": 0.9}}
        rows = [("hard_concrete", learned), ("subset_topk", 0.2), ("taylor", 0.85)]
        return {**found, "rows": [{"method": m, "kept": 4, "seed": 0, "accuracy": v} for m, v in rows]}

    page = text(record([0.9, 0.895, 0.8], [0.9, 0.88, 0.87, 0.9]), gates(0.891))
    assert "`hard_concrete` ends at 0.891, and the model that both began with had 0.900. **Reproduced.**" in page
    assert "`taylor` at equal steps: 0.850." in page
    page = text(record([0.9, 0.895, 0.8], [0.9, 0.88, 0.87, 0.9]), gates(0.88))
    assert "**Contradicted at this budget.**" in page


def test_missing_arguments_are_named(findings: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        findings.main(["--task", "trec", "--work", "x"])
    assert "--task, --work and, for TREC, --data must be given" in capsys.readouterr().err
