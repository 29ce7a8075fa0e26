"""The model card: which facts it states of a plan and a base model, and whose words it keeps."""

import copy

import pytest
from transformers import LlamaForCausalLM

import headprune as hp
from headprune.checkpoints import card
from headprune.core.heads import HeadMask
from headprune.core.plan import Budget, PruningPlan, SiteBudget
from headprune.core.record import QualityRow
from headprune.layouts import registry
from tests.laws.support import mask_of
from tests.report_records import record_of


def tiny(name):
    return registry.get(name).tiny(0)[0].eval()


def written(folder, model, plan=None):
    hp.save_pretrained(model, folder, plan=plan)
    return (folder / card.CARD).read_text()


@pytest.mark.parametrize("place", ["deep/llama", "llama"])
def test_a_folder_is_no_repository_of_the_hub(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained(place)
    text = written(tmp_path / "out", LlamaForCausalLM.from_pretrained(place))
    assert "base_model" not in text
    assert "- Base model: llama\n" in text


def test_a_repository_of_the_hub_is_named_where_hubs_read_it(tmp_path):
    model, name = tiny("llama"), "gpt2"
    model.config._name_or_path = name
    text = written(tmp_path, model)
    assert text.startswith(f'---\nbase_model: "{name}"\n')
    assert f"- Base model: {name}\n" in text


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_an_embedding_that_is_also_the_output_counts_once(name, tmp_path):
    model = tiny(name)
    if name == "llama":
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = True
        model = LlamaForCausalLM(config).eval()
    sites = hp.find_sites(model)
    keep = {s.name: [h for unit in s.units[1:] for h in unit] for s in sites}
    report = hp.prune_(model, mask_of(sites, keep))
    text = written(tmp_path, model)
    assert f"- Parameters: {report.params_before:,} before, {report.params_after:,} after" in text


def test_the_plan_is_stated(tmp_path):
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


def test_the_words_of_another_card_are_kept_without_its_section(tmp_path):
    other = tmp_path / "README.md"
    section = f"{card.BEGIN}\n## Attention heads\n\nof an earlier cut\n{card.END}\n"
    other.write_text(f"Before.\n\n{section}After.\n")
    written(tmp_path / "out", tiny("vit"))
    card.carry(tmp_path / "out", other)
    text = (tmp_path / "out" / card.CARD).read_text()
    assert text.startswith(f"Before.\n\nAfter.\n\n{card.BEGIN}\n## Attention heads\n\nThe rest")
    assert "of an earlier cut" not in text
    assert "kept 12 of 12 heads" in text


def test_bytes_of_a_card_that_are_no_text_are_kept(tmp_path):
    words = b"# Ours \xff\xfe\n"
    (tmp_path / "README.md").write_bytes(words)
    card.write(tmp_path, "a section", old=card.read(tmp_path / "README.md"))
    assert (tmp_path / "README.md").read_bytes().startswith(words)


@pytest.mark.parametrize("words", ["\n", f"{card.BEGIN}\nonly a section\n{card.END}\n"])
def test_a_card_without_words_replaces_nothing(words, tmp_path):
    before = written(tmp_path / "out", tiny("vit"))
    (tmp_path / "README.md").write_text(words)
    card.carry(tmp_path / "out", tmp_path / "README.md")
    assert (tmp_path / "out" / card.CARD).read_text() == before


def test_neurons_are_counted_apart_from_heads(tmp_path):
    model = tiny("llama")
    sites = hp.find_sites(model, feed_forward=True)
    keep = {site.name: list(site.heads) for site in sites}
    cut = next(site for site in sites if site.is_feed_forward)
    keep[cut.name] = keep[cut.name][:4]
    hp.prune_(model, mask_of(sites, keep), sites=sites)
    rows = (QualityRow("base", 8, "accuracy", 0.9, "test", 10, 0.5, kept_neurons=1234),)
    record = record_of(quality=rows)
    text = card.section(model, hp.find_sites(model, feed_forward=True), "load", record=record)
    assert "| layer | heads or neurons kept | which |" in text
    assert f"| `{cut.name}` | 4 of {cut.n_query_heads} | neurons |" in text
    assert "| base | 8, 1,234 | accuracy | 0.9000 | 10 test |" in text
