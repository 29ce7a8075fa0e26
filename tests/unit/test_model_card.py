"""The model card: which facts it states of a plan and a base model, and whose words it keeps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

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


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_an_embedding_that_is_also_the_output_counts_once(name: str, tmp_path: Path) -> None:
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


def test_the_plan_is_stated(tmp_path: Path) -> None:
    model = tiny("llama")
    mask = HeadMask.full(hp.find_sites(model))
    half, three = Budget(keep_heads=0.5), Budget(keep_heads=3)
    budgets = (SiteBudget("causal", half), SiteBudget("cross", three))
    plan = PruningPlan(mask, selector="uniform", budgets=budgets, policy="free")
    kinds = "causal: keep 50 % of the heads, cross: keep 3 heads, policy free\n"
    assert f"selector uniform, scorer none, {kinds}" in written(tmp_path / "kinds", model, plan)
    bert = tiny("bert")
    by_hand = written(tmp_path, bert, PruningPlan(HeadMask.full(hp.find_sites(bert))))
    assert "- Plan: selector by hand, scorer none, no budget\n" in by_hand


def test_the_words_of_another_card_are_kept_without_its_section(tmp_path: Path) -> None:
    other = tmp_path / "README.md"
    section = f"{card.BEGIN}\n## Attention heads\n\nof an earlier cut\n{card.END}\n"
    other.write_text(f"Before.\n\n{section}After.\n")
    written(tmp_path / "out", tiny("vit"))
    card.carry(tmp_path / "out", other)
    text = (tmp_path / "out" / card.CARD).read_text()
    assert text.startswith(f"Before.\n\nAfter.\n\n{card.BEGIN}\n## Attention heads\n\nThe other")
    assert "of an earlier cut" not in text
    assert "kept 12 of 12 heads" in text


@pytest.mark.parametrize("words", ["\n", f"{card.BEGIN}\nonly a section\n{card.END}\n"])
def test_a_card_without_words_replaces_nothing(words: str, tmp_path: Path) -> None:
    before = written(tmp_path / "out", tiny("vit"))
    (tmp_path / "README.md").write_text(words)
    card.carry(tmp_path / "out", tmp_path / "README.md")
    assert (tmp_path / "out" / card.CARD).read_text() == before
