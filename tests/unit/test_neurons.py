"""Neurons of feed-forwards: scores, levels, one budget with heads, latency tables, refits, formats."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

import headprune as hp
from headprune.checkpoints.checkpoint import applicable_formats
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.levels import level_widths
from headprune.layouts import registry
from headprune.model.running import call
from headprune.scoring import _activations, _removal, magnitude, obs, wanda
from headprune.scoring import fluctuation as fluctuation_file
from tests.steady_clock import steady_levels

WIDTH = 96


@pytest.fixture
def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=WIDTH,
        max_position_embeddings=32,
        initializer_range=0.3,
        num_labels=3,
    )
    return BertForSequenceClassification(config).eval()


@pytest.fixture
def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(4):
        ids = torch.randint(0, 50, (6, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[::2, 6:] = 0
        labels = torch.randint(0, 3, (6,), generator=generator)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def neurons(sites: Any) -> list[Any]:
    return [site for site in sites if site.kind == "feed_forward"]


def test_taylor_is_the_mean_slope_of_each_example_at_the_gates(bert: Any, batches: Any) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    scores = hp.score(bert, batches, "taylor", sites=sites)
    total = {site.name: torch.zeros(WIDTH) for site in neurons(sites)}
    for batch in batches:
        gates = {name: torch.ones(6, WIDTH, requires_grad=True) for name in total}
        with hp.gated(bert, gates):
            loss = torch.nn.functional.cross_entropy(
                call(bert, batch).logits, batch["labels"], reduction="sum"
            )
        for name, slope in zip(gates, torch.autograd.grad(loss, list(gates.values())), strict=True):
            total[name] += slope.abs().sum(0)
    for site, row in zip(scores.sites, scores.values, strict=True):
        if site.name in total:
            assert_close(torch.tensor(row), total[site.name] / 24, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scorer", ["wanda", "fluctuation", "obs"])
def test_all_neurons_at_once_are_each_by_itself(
    scorer: str, bert: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    at_once = hp.score(bert, batches, scorer, sites=sites)
    for file in (wanda, fluctuation_file, obs, magnitude, _activations):
        monkeypatch.setattr(file, "has_unit_per_channel", lambda bound: False)
    for row, alone in zip(
        at_once.values, hp.score(bert, batches, scorer, sites=sites).values, strict=True
    ):
        assert_close(torch.tensor(row), torch.tensor(alone), rtol=1e-6, atol=1e-9)


def test_magnitude_is_the_product_of_a_neurons_norms(bert: Any) -> None:
    scores = hp.score(bert, None, "magnitude", sites=hp.find_sites(bert, feed_forward=True))
    layer = bert.bert.encoder.layer[0]
    up, down = layer.intermediate.dense.weight, layer.output.dense.weight
    expected = (up.norm(dim=1) * down.norm(dim=0)).tolist()
    assert scores.values[1] == pytest.approx(expected, rel=1e-5)


def test_surgeon_removes_neurons_in_the_order_of_single_removals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 30, generator=generator, dtype=torch.float64)
    g = torch.randn(90, 30, generator=generator, dtype=torch.float64)
    inverse = torch.linalg.inv(x.T @ x / 200 + 0.01 * torch.eye(30))[None]
    c, failed = (g.T @ g)[None], torch.zeros(1, dtype=torch.bool)
    single = _removal._in_order(inverse.clone(), c.clone(), failed, 30, 1)
    several = _removal._neurons_in_order(inverse, c, failed)  # 1 of 30 in each step
    assert torch.equal(several[:, 0], single[:, 0])
    assert_close(several[:, 1], single[:, 1])
    monkeypatch.setattr(_removal, "_STEPS", 3)
    rough = _removal._neurons_in_order(inverse, c, failed)
    assert sorted(rough[0, 0].tolist()) == list(range(30))
    assert_close(rough[:, 1].sum(), single[:, 1].sum(), rtol=0.3, atol=0.0)


def test_heads_and_neurons_share_a_budget_and_neurons_come_in_levels(
    bert: Any, batches: Any, tmp_path: Path
) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    scores = hp.score(bert, batches, "surgeon", sites=sites)
    assert any("No standard errors" in note for note in scores.notes)
    plan = hp.select(scores, hp.Budget(keep_params=0.7))
    counts = {row.site: len(row.kept) for row in plan.mask.rows}
    of_neurons = {counts[site.name] for site in neurons(sites)}
    assert of_neurons <= set(level_widths(WIDTH))
    assert min(of_neurons) < WIDTH
    # The best neurons of each feed-forward are kept.
    for site, row in zip(scores.sites, scores.values, strict=True):
        if site.kind == "feed_forward":
            kept = plan.mask.kept(site.name)
            others = [row[n] for n in range(WIDTH) if n not in kept]
            assert min(row[n] for n in kept) >= max(others, default=0.0)
    # A plan on file cuts the model, by the sites that it names.
    again = hp.PruningPlan.load(plan.save(tmp_path / "plan.json"))
    report = hp.prune_(bert, again, example=batches[0])
    assert report.proof is not None
    assert report.params_after <= 0.7 * report.params_before


def test_a_budget_of_heads_counts_no_neurons(bert: Any, batches: Any) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    scores = hp.score(bert, batches, "taylor", sites=sites)
    plan = hp.select(scores, hp.Budget(keep_heads=0.5))
    attention = [site for site in sites if site.kind != "feed_forward"]
    assert sum(len(plan.mask.kept(site.name)) for site in attention) == 4
    assert all(len(plan.mask.kept(site.name)) == WIDTH for site in neurons(sites))


def test_a_latency_table_measures_levels_and_a_speed_budget_uses_them(
    bert: Any, batches: Any
) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    table = hp.bench.latency_table(bert, batches[0], sites=sites, seconds=0)
    for site in neurons(sites):
        row = table.row(site.name)
        assert row[0] == 0.0
        assert {n for n, seconds in enumerate(row) if seconds is not None} == set(
            level_widths(WIDTH)
        )
    scores = hp.score(bert, batches, "wanda", sites=sites)
    # Measured times are noisy, so what a fixed speed needs might be out of reach.
    steady = steady_levels(bert, batches[0], sites=sites)
    plan = hp.select(scores, hp.Budget(speedup=1.05), latency=steady)
    assert steady.whole / steady.predict(plan.mask) >= 1.05 * (1 - 1e-9)


def test_a_refit_takes_cut_feed_forwards_too(bert: Any, batches: Any) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    n_heads = {site.name: site.n_query_heads for site in sites}
    keep = {site.name: site.heads[: WIDTH * 2 // 3] for site in neurons(sites)}
    small = copy.deepcopy(bert)
    hp.prune_(small, hp.HeadMask.from_keep(keep, n_heads), example=batches[0])

    def error() -> float:
        with torch.no_grad():
            gaps = [call(small, b).logits - call(bert, b).logits for b in batches]
        return float(torch.cat(gaps).square().mean())

    before = error()
    hp.recover_(small, batches, "lstsq", teacher=bert)
    assert error() < before / 2


def test_equal_widths_are_opened_by_transformers_alone(
    bert: Any, batches: Any, tmp_path: Path
) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    n_heads = {site.name: site.n_query_heads for site in sites}
    keep = {site.name: range(32, 80) for site in neurons(sites)}
    hp.prune_(bert, hp.HeadMask.from_keep(keep, n_heads), example=batches[0])
    hp.save_pretrained(bert, tmp_path, format="transformers", example=batches[0])
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert again.config.intermediate_size == 48
    with torch.no_grad():
        assert_close(call(again, batches[0]).logits, call(bert, batches[0]).logits)


def test_padding_does_not_count(bert: Any, batches: Any) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    changed = []
    for batch in batches:
        ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)
        changed.append({**batch, "input_ids": ids})
    for scorer in ("wanda", "obs", "surgeon"):
        values = [hp.score(bert, data, scorer, sites=sites).values for data in (batches, changed)]
        for row, other in zip(*values, strict=True):
            assert_close(torch.tensor(row), torch.tensor(other), rtol=1e-5, atol=1e-7)


def test_a_torch_layer_with_tokens_first_is_refused() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 24)
    with pytest.raises(UnsupportedModel, match="feed-forward"):
        hp.find_sites(layer, feed_forward=True)


def test_one_layout_fits_each_feed_forward() -> None:
    layouts = [registry.get(name) for name in registry if registry.get(name).is_feed_forward]
    assert len({layout.name for layout in layouts}) == len(layouts)
    assert all(layout.families == () for layout in layouts)


def test_a_site_of_neurons_prints_their_number(bert: Any) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    (first, _) = neurons(sites)
    assert str(first) == "bert.encoder.layer.0: 96 neurons (feed_forward_bert)"
    n_heads = {site.name: site.n_query_heads for site in sites}
    mask = hp.HeadMask.from_keep({first.name: range(40)}, n_heads)
    hp.prune_(bert, mask)
    (cut, _) = neurons(hp.find_sites(bert, feed_forward=True))
    assert str(cut) == "bert.encoder.layer.0: 96 neurons, 40 present (feed_forward_bert)"


def test_layers_of_unlike_widths_need_another_format(bert: Any) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    n_heads = {site.name: site.n_query_heads for site in sites}
    hp.prune_(bert, hp.HeadMask.from_keep({neurons(sites)[0].name: range(40)}, n_heads))
    reason = applicable_formats(bert)["transformers"]
    assert reason is not None
    assert "layers with 40, 96 neurons" in reason


def test_a_folder_that_would_not_load_is_not_written(
    bert: Any, batches: Any, tmp_path: Path
) -> None:
    attention = hp.find_sites(bert)
    sites = hp.find_sites(bert, feed_forward=True)
    n_heads = {site.name: site.n_query_heads for site in sites}
    hp.prune_(bert, hp.HeadMask.from_keep({neurons(sites)[0].name: range(40)}, n_heads))
    with pytest.raises(InvalidValue, match="all sites that were cut, feed-forwards too"):
        hp.save_pretrained(bert, tmp_path / "a", sites=attention)
    assert not (tmp_path / "a").exists()


def test_layers_named_like_those_of_torch_are_passed_over() -> None:
    named = torch.nn.ModuleDict(
        {"linear1": torch.nn.Linear(8, 6), "linear2": torch.nn.Linear(6, 8)}
    )
    model = torch.nn.Sequential(hp.MultiHeadAttention(8, 2), named)
    with pytest.raises(UnsupportedModel, match="feed-forward"):
        hp.find_sites(model, feed_forward=True)


def test_an_empty_feed_forward_has_no_scores(bert: Any) -> None:
    sites = hp.find_sites(bert, feed_forward=True)
    n_heads = {site.name: site.n_query_heads for site in sites}
    hp.prune_(bert, hp.HeadMask.from_keep({neurons(sites)[0].name: ()}, n_heads))
    sites = hp.find_sites(bert, feed_forward=True)
    scores = hp.score(bert, None, "magnitude", sites=sites)
    assert [len(row) for row in scores.values] == [4, 0, 4, WIDTH]
