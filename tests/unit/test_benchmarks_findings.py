"""benchmarks/findings.py: rows are what masked and trained models do, and verdicts can fail."""

import json
import shlex

import numpy as np
import pytest

import headprune as hp
from headprune.bench.quality import evaluate
from tests.benchmark_runs import encoder_study, record_of
from tests.scripts import benchmark


@pytest.fixture(scope="module")
def findings():
    return benchmark("findings")


def test_rows_are_what_models_do_and_a_run_goes_on(findings, tmp_path, monkeypatch):
    trained = []
    original = findings.tuned_
    keep = lambda *a, **k: (trained.append(a[0]), original(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(findings, "tuned_", keep)
    out, study = tmp_path / "findings-trec.json", encoder_study(tmp_path, "trec")
    few = f"{study} --calibration 24 --budgets 4 --seeds 1 --out {out}"
    record = record_of(findings, few)
    rows = {(r["way"], r["choice"], r["kept"]): r["accuracy"] for r in record["rows"]}
    curve = [kept for way, choice, kept in rows if (way, choice) == ("masked", "important")]
    assert curve == [7, 6, 5, 4, 3, 2], "every layer keeps a head"
    assert record["alone"]["heads"] == 8
    for row in record["rows"]:
        assert row["right"].count("1") / len(row["right"]) == pytest.approx(row["accuracy"])
    # The whole model twice, then one for every choice of four heads.
    n_heads = [sum(len(site.heads) for site in hp.find_sites(model)) for model in trained]
    assert n_heads == [8, 8, 4, 4, 4]

    # A cut of the same heads gives what the masked model gave.
    args = findings.arguments(shlex.split(few))
    recipe = findings.recipe_of(args)
    raw = findings.number_labels(recipe, findings.load_rows(recipe))
    data = findings.encode_rows(recipe, raw, findings.prepare(recipe))
    model = trained[0]
    batches = data.redrawn(24, 0).batches("calibration", 32)
    hp.prune_(model, hp.select(hp.score(model, batches, "taylor"), hp.Budget(keep_heads=4)))
    found = evaluate(model, data.evaluation("test", 128)).value
    assert found == pytest.approx(rows["masked", "important", 4])

    out.write_text(json.dumps({**record, "rows": record["rows"][:-1]}))
    again = record_of(findings, few)["rows"]
    assert again[:-1] == record["rows"][:-1]
    assert again[-1]["accuracy"] == record["rows"][-1]["accuracy"]


def right(accuracy):
    """Answers of 1000 examples, the same ones wrong first."""
    return "".join("0" if i < round(1000 * (1 - accuracy)) else "1" for i in range(1000))


def record(important, trained):
    """A run of ten heads and three draws; masked models without the important heads have .5."""
    found = []
    for choice in ("important", "chance", "unimportant"):
        values = important if choice == "important" else [0.5] * 3
        found += [("masked", choice, n, value) for n, value in zip((8, 6, 4), values, strict=True)]
    names = [("important", 4), ("chance", 4), ("unimportant", 4), ("all", 10)]
    found += [("trained", *name, value) for name, value in zip(names, trained, strict=True)]
    keys = ("way", "choice", "kept", "accuracy")
    rows = [
        {**dict(zip(keys, row, strict=True)), "right": right(row[-1]), "seed": seed}
        for row in found
        for seed in range(3)
    ]
    judged = {"rows": "test", "n": 1000, "accuracy": 0.9, "right": right(0.9)}
    alone = {"heads": 10, "raises": 3, "lowers": 1}
    about = {"task": "trec", "heads": 10, "budgets": [4], "judged": judged, "alone": alone}
    return {**about, "rows": rows}


GOOD, TRAINED = [0.9, 0.898, 0.8], [0.9, 0.895, 0.89, 0.9]


def gates(lost):
    """A record of learned gates; the whole model trained on has .9."""
    rows = []
    for seed in range(3):
        for method, kept, value in (
            ("all heads", 10, 0.9),
            ("taylor", 4, 0.88),
            ("subset_topk", 4, 0.9 - lost[seed]),
        ):
            row = {"method": method, "kept": kept, "seed": seed, "accuracy": value}
            rows.append({**row, "untrained": 0.7 if method == "taylor" else None})
    judged = {"accuracy": 0.85, "n": 50, "rows": "validation"}
    about = {"task": "sst2", "heads": 10, "budgets": [4], "training": {"steps": 7}}
    return {**about, "judged": judged, "rows": rows}


#: The accuracies without training and with it, the gates' losses, and the verdicts on Michel,
#: Prasanna and Voita.
VERDICTS = [
    (GOOD, TRAINED, (0.001, 0.002, 0.003), ("Reproduced", "Reproduced", "Reproduced")),
    # 1.1 points lost: neither is sure. Random heads end far below the whole model.
    (
        [0.889, 0.889, 0.8],
        [0.5, 0.45, 0.5, 0.95],
        (0.03, 0.031, 0.032),
        ("Undecided", "Contradicted", "Contradicted"),
    ),
    # Training ends 2.9 points below the whole, of 3 allowed.
    (
        [0.8, 0.7, 0.6],
        [0.9, 0.871, 0.5, 0.9],
        (0.0, 0.02, 0.01),
        ("Contradicted", "Undecided", "Undecided"),
    ),
    # Training does not make up the difference.
    (GOOD, [0.9, 0.6, 0.5, 0.9], None, ("Reproduced", "Contradicted", "")),
]


@pytest.mark.parametrize(("important", "trained", "lost", "words"), VERDICTS)
def test_verdicts(findings, important, trained, lost, words):
    found = [gates(lost)] if lost else []
    page = " ".join(findings.page([record(important, trained)], found).split())
    michel, prasanna, voita = words
    share = 40 if important is GOOD else 0
    assert f"{share} % of the heads can be removed, least important first, at a loss" in page
    assert f"at once). **{michel}.**" in page
    assert f"(nearly as good: at most 3). **{prasanna}.**" in page
    if lost is None:
        assert "Voita" not in page, "there is no record of learned gates"
        return
    assert f"of the whole model's 0.900 ± 0.000 on validation rows. **{voita}.**" in page


def test_a_difference_is_over_draws_and_examples(findings):
    chance = np.random.default_rng(0)
    same = {seed: (chance.random(500) < 0.8).astype(float) for seed in range(3)}
    assert findings.difference([(same, same)]) == findings.Share(0.0, 0.0, 0.0)
    # Draws differ, examples do not.
    apart = {seed: answers - 0.1 * seed for seed, answers in same.items()}
    found = findings.difference([(same, apart), (same, apart)])
    assert found == pytest.approx((0.1, 0.0, 0.2), abs=1e-9)
    student = findings.over_draws([0.01, 0.02, 0.03])
    assert student.mean == pytest.approx(0.02)
    assert student.high - student.mean == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
