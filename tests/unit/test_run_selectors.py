"""Recipes with selectors that look at the model: what they are given, and recoveries on the way."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import RecipeError, check_recipe
from headprune.report.repeat import python_lines
from headprune.run import choosing, runner

WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer, and rows whose label is in their words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    found = tmp_path_factory.mktemp("bert")
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(found)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 16,
    }
    settings = {"vocab_size": 24, "max_position_embeddings": 32, "initializer_range": 0.3, **sizes}
    BertModel(BertConfig(**settings)).save_pretrained(found)
    draw = random.Random(0)
    rows = [draw.choices(WORDS, k=draw.randint(2, 8)) for _ in range(60)]
    lines = (json.dumps({"text": " ".join(row), "label": int(row[0][-1]) % 3}) for row in rows)
    (found / "rows.jsonl").write_text("\n".join(lines))
    return found


def recipe(folder: Path, out: Path, scorer: str = "fisher", **select: Any) -> Recipe:
    return check_recipe(
        {
            "name": "test",
            "description": "for tests",
            "task": "text_classification",
            "device": "cpu",
            "out": str(out),
            "model": {"path": str(folder)},
            "data": {"path": str(folder / "rows.jsonl"), "text": "text"},
            "train": {"epochs": 1, "batch_size": 16, "learning_rate": 1e-3},
            "score": {"scorer": scorer, "random_draws": 1},
            "select": {"keep_heads": 0.5, **select},
            "report": False,
        }
    )


def run(chosen: Recipe) -> hp.RunRecord:
    return runner.run_recipe(chosen, say=lambda line: None)


@pytest.mark.parametrize(
    ("selector", "settings", "note"),
    [
        ("quadratic", {}, ""),
        (
            "iterative",
            {"steps": 2, "inner": "quadratic"},
            "quadratic in 2 steps; scored anew 1 times.",
        ),
        ("local_search", {"max_losses": 20, "margin": 0.0}, "plans measured."),
    ],
)
def test_a_run_gives_selectors_what_they_need(
    folder: Path, tmp_path: Path, selector: str, settings: dict[str, Any], note: str
) -> None:
    record = run(recipe(folder, tmp_path, selector=selector, settings=settings))
    assert record.status == "done"
    assert record.plan is not None
    assert (record.plan.selector, record.plan.mask.n_kept) == (selector, 4)
    assert note in " ".join(record.plan.notes)
    asked = {
        "iterative": "rescore=hp.scoring.rescorer(model, batches, hp.scoring.Fisher(",
        "local_search": "loss=hp.scoring.loss_of",
    }
    assert asked.get(selector, "hp.select(") in python_lines(record)  # lines that would run
    assert (tmp_path / "scores.curvature.safetensors").is_file()
    again = run(recipe(folder, tmp_path / "again", selector=selector, settings=settings))
    assert again.plan == record.plan
    assert {"base", "fisher", "magnitude", "random"} <= {row.name for row in record.quality}


@pytest.mark.parametrize("selector", ["iterative", "local_search"])
def test_recoveries_between_the_choices(
    folder: Path, tmp_path: Path, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = choosing.recoverer

    def counted(subject: Any, steps: Any) -> Any:
        recover = real(subject, steps)
        if recover is None:
            return None

        def call(small: Any) -> None:
            before = [p.detach().clone() for p in small.parameters()]
            recover(small)
            after = list(small.parameters())
            assert any(
                b.shape == a.shape and not torch.equal(b, a)
                for b, a in zip(before, after, strict=True)
            )
            seen.append(sum(len(site.heads) for site in hp.find_sites(small)))

        return call

    monkeypatch.setattr(choosing, "recoverer", counted)
    settings: dict[str, Any] = {"steps": 3} if selector == "iterative" else {"max_losses": 6}
    steps = [{"method": "mean_fold"}]
    record = run(
        recipe(folder, tmp_path, "taylor", selector=selector, settings=settings, recover=steps)
    )
    assert record.status == "done"
    assert seen == ([7, 5] if selector == "iterative" else [4] * 6)


def test_recoveries_are_checked(folder: Path, tmp_path: Path) -> None:
    for select, words in [
        (
            {"recover": [{"method": "mean_fold"}]},
            r"select\.recover: must be left out .*global_topk",
        ),
        (
            {"selector": "iterative", "recover": [{"method": "mean_fould"}]},
            r"select\.recover\.0\.method: .*mean_fold",
        ),
        (
            {"selector": "iterative", "settings": {"inner": "iterative"}},
            "inner: must be the name of a selector",
        ),
        (
            {"selector": "iterative", "settings": {"step": 3}},
            r"select\.settings\.step.*Did you mean 'steps'",
        ),
    ]:
        with pytest.raises(RecipeError, match=words):
            recipe(folder, tmp_path, **select)
