"""The model card: which facts it states of a plan and a base model, and whose words stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headprune as hp
from headprune.checkpoints import card
from headprune.core.heads import HeadMask
from headprune.core.plan import Budget, PruningPlan, SiteBudget
from headprune.layouts import registry


def tiny(name: str) -> Any:
    return registry.get(name).tiny(0)[0].eval()


def written(folder: Path, model: Any, plan: PruningPlan | None = None) -> str:
    hp.save_pretrained(model, folder, plan=plan)
    return (folder / card.CARD).read_text()


@pytest.mark.parametrize("place", ["deep/llama", "llama"])
def test_a_folder_is_no_repository_of_the_hub(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained(place)
    from transformers import LlamaForCausalLM

    text = written(tmp_path / "out", LlamaForCausalLM.from_pretrained(place))
    assert "base_model" not in text
    assert "- Base model: llama\n" in text


@pytest.mark.parametrize("name", ["gpt2", "someone/some-llama"])
def test_a_repository_of_the_hub_is_named_where_hubs_read_it(name: str, tmp_path: Path) -> None:
    model = tiny("llama")
    model.config._name_or_path = name
    text = written(tmp_path, model)
    assert text.startswith(f'---\nbase_model: "{name}"\n')
    assert f"- Base model: {name}\n" in text


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_parameters_are_counted_as_the_models_that_were_there(name: str, tmp_path: Path) -> None:
    """An embedding that is also the output counts once."""
    import copy

    from transformers import LlamaForCausalLM

    model = tiny(name)
    if name == "llama":
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = True
        model = LlamaForCausalLM(config).eval()
    sites = hp.find_sites(model)
    keep = {s.name: [h for unit in s.units[1:] for h in unit] for s in sites}
    report = hp.prune_(model, HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}))
    text = written(tmp_path, model)
    assert f"- Parameters: {report.params_before:,} before, {report.params_after:,} after" in text


def test_budgets_by_kind_and_the_policy_are_stated(tmp_path: Path) -> None:
    model = tiny("llama")
    mask = HeadMask.full(hp.find_sites(model))
    budgets = (
        SiteBudget("causal", Budget(keep_heads=0.5)),
        SiteBudget("cross", Budget(keep_heads=3)),
    )
    text = written(
        tmp_path, model, PruningPlan(mask, selector="uniform", budgets=budgets, policy="free")
    )
    assert (
        "selector uniform, scorer none, causal: keep 50 % of the heads, cross: keep 3 heads, policy"
        " free\n" in text
    )
    assert "no budget" not in text


def test_a_plan_by_hand_for_heads_that_share_nothing(tmp_path: Path) -> None:
    model = tiny("bert")
    text = written(tmp_path, model, PruningPlan(HeadMask.full(hp.find_sites(model))))
    assert "- Plan: selector by hand, scorer none, no budget\n" in text


def test_the_words_of_another_card_stay_without_its_section(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    other = tmp_path / "README.md"
    other.write_text(
        f"Before.\n\n{card.BEGIN}\n## Attention heads\n\nof an earlier cut\n{card.END}\nAfter.\n"
    )
    written(tmp_path / "out", tiny("vit"))
    card.carry(tmp_path / "out", other)
    text = (tmp_path / "out" / card.CARD).read_text()
    assert text.startswith(
        f"Before.\n\nAfter.\n\n{card.BEGIN}\n## Attention heads\n\nThe other words of this card"
    )
    assert "of an earlier cut" not in text
    assert "kept 12 of 12 heads" in text


@pytest.mark.parametrize("words", ["", "\n", f"{card.BEGIN}\nonly a section\n{card.END}\n"])
def test_a_card_without_words_replaces_nothing(words: str, tmp_path: Path) -> None:
    before = written(tmp_path / "out", tiny("vit"))
    (tmp_path / "README.md").write_text(words)
    card.carry(tmp_path / "out", tmp_path / "README.md")
    assert (tmp_path / "out" / card.CARD).read_text() == before
