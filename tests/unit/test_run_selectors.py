"""Recipes with selectors that look at the model: what they are given, and recoveries on the way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.recipes.schema import Recipe
from headprune.report.repeat import python_lines
from headprune.run import choosing
from tests.small_recipes import checked_recipe, quiet_run, write_rows
from tests.tiny_models import WORDS, bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer, and rows whose label is in their words."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "initializer_range": 0.3}
    found = bert(tmp_path_factory.mktemp("bert"), "BertModel", **sizes)
    draw = random.Random(0)
    rows = [draw.choices(WORDS, k=draw.randint(2, 8)) for _ in range(60)]
    texts = ({"text": " ".join(row), "label": int(row[0][-1]) % 3} for row in rows)
    write_rows(found / "rows.jsonl", texts)
    return found


def recipe(folder: Path, out: Path, scorer: str = "fisher", **select: Any) -> Recipe:
    data = {"path": str(folder / "rows.jsonl"), "text": "text"}
    sections: dict[str, Any] = {
        "out": str(out),
        "train": {"epochs": 1, "batch_size": 16, "learning_rate": 1e-3},
        "score": {"scorer": scorer, "random_draws": 1},
        "select": {"keep_heads": 0.5, **select},
    }
    return checked_recipe("text_classification", folder, data, **sections)


ITERATIVE = {"steps": 2, "inner": "quadratic"}


@pytest.mark.parametrize(
    ("selector", "settings", "note", "line"),
    [
        ("quadratic", {}, "", "hp.select("),
        (
            "iterative",
            ITERATIVE,
            "scored anew 1 times.",
            "rescorer(model, batches, hp.scoring.Fish",
        ),
        ("local_search", {"max_losses": 20}, "plans measured.", "loss=hp.scoring.loss_of"),
    ],
)
def test_a_run_gives_selectors_what_they_need(
    folder: Path, tmp_path: Path, selector: str, settings: dict[str, Any], note: str, line: str
) -> None:
    record = quiet_run(recipe(folder, tmp_path, selector=selector, settings=settings))
    assert record.status == "done"
    assert record.plan is not None
    assert (record.plan.selector, record.plan.mask.n_kept) == (selector, 4)
    assert note in " ".join(record.plan.notes)
    assert line in python_lines(record), "these lines would run"
    assert (tmp_path / "scores.curvature.safetensors").is_file()
    assert {"base", "fisher", "magnitude", "random"} <= {row.name for row in record.quality}


@pytest.mark.parametrize(
    ("selector", "settings", "expected"),
    [("iterative", {"steps": 3}, [7, 5]), ("local_search", {"max_losses": 6}, [4] * 6)],
)
def test_recoveries_between_the_choices(
    folder: Path,
    tmp_path: Path,
    selector: str,
    settings: dict[str, Any],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    real = choosing.recoverer

    def counted(subject: Any, steps: Any) -> Any:
        recover = real(subject, steps)

        def call(small: Any) -> None:
            before = [p.detach().clone() for p in small.parameters()]
            recover(small)
            pairs = zip(before, small.parameters(), strict=True)
            assert any(b.shape == a.shape and not torch.equal(b, a) for b, a in pairs)
            seen.append(sum(len(site.heads) for site in hp.find_sites(small)))

        return call if recover else None

    monkeypatch.setattr(choosing, "recoverer", counted)
    select = {"selector": selector, "settings": settings, "recover": [{"method": "mean_fold"}]}
    assert quiet_run(recipe(folder, tmp_path, "taylor", **select)).status == "done"
    assert seen == expected
