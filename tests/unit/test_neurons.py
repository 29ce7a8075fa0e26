"""Neurons of feed-forwards: scores, levels, one budget with heads, latency tables, refits, formats."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, OPTConfig, OPTForCausalLM

import headprune as hp
from headprune.checkpoints.checkpoint import applicable_formats
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.levels import level_widths
from headprune.gating.context import multiplied
from headprune.model.losses import default_loss
from headprune.model.running import call
from headprune.scoring import _activations, _removal, magnitude, obs
from tests.steady_clock import steady_levels

WIDTH = 96
FIRST, SECOND = "bert.encoder.layer.0", "bert.encoder.layer.1"


@pytest.fixture
def bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": WIDTH, "num_labels": 3}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    config = BertConfig(**sizes, initializer_range=0.3)
    return BertForSequenceClassification(config).eval()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(4):
        ids = torch.randint(0, 50, (6, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[::2, 6:] = 0
        labels = torch.randint(0, 3, (6,), generator=generator)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def neurons(sites):
    return [site for site in sites if site.kind == "feed_forward"]


def cut(model, keep):
    sites = hp.find_sites(model, feed_forward=True)
    counts = {site.name: site.n_query_heads for site in sites}
    hp.prune_(model, hp.HeadMask.from_keep(keep, counts))


def test_taylor_is_the_mean_slope_of_each_example_at_the_gates(bert, batches):
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
def test_all_neurons_at_once_are_each_by_itself(scorer, bert, batches, monkeypatch):
    sites = hp.find_sites(bert, feed_forward=True)
    at_once = hp.score(bert, batches, scorer, sites=sites)
    for file in (obs, magnitude, _activations):
        monkeypatch.setattr(file, "has_unit_per_channel", lambda bound: False)
    for row, alone in zip(
        at_once.values, hp.score(bert, batches, scorer, sites=sites).values, strict=True
    ):
        assert_close(torch.tensor(row), torch.tensor(alone), rtol=1e-6, atol=1e-9)


def test_magnitude_is_the_product_of_a_neurons_norms(bert):
    scores = hp.score(bert, None, "magnitude", sites=hp.find_sites(bert, feed_forward=True))
    layer = bert.bert.encoder.layer[0]
    up, down = layer.intermediate.dense.weight, layer.output.dense.weight
    expected = (up.norm(dim=1) * down.norm(dim=0)).tolist()
    assert scores.values[1] == pytest.approx(expected, rel=1e-5)


def test_surgeon_removes_neurons_in_the_order_of_single_removals(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 200, 30, generator=generator, dtype=torch.float64)
    x[..., 1] = 2 * x[..., 0] + 0.1 * x[..., 1]  # either of the two is worth much without the other
    g = torch.randn(2, 90, 30, generator=generator, dtype=torch.float64)
    inverse = torch.linalg.inv(x.mT @ x / 200 + 0.01 * torch.eye(30))
    c, failed = g.mT @ g, torch.zeros(2, dtype=torch.bool)
    single = _removal._in_order(inverse.clone(), c.clone(), failed, 30, 1)
    for steps in (64, 3, 1):  # a third of the kept ones in each step; all in one
        monkeypatch.setattr(_removal, "_STEPS", steps)
        several = _removal._neurons_in_order(inverse, c, failed)
        assert torch.equal(several[:, 0], single[:, 0])
        assert_close(several[:, 1], single[:, 1])
    broken = _removal._neurons_in_order(
        inverse * torch.tensor([1.0, -1.0])[:, None, None], c, failed
    )
    assert broken[:, 1].isnan().all(1).tolist() == [False, True]


def test_heads_and_neurons_share_a_budget_and_neurons_come_in_levels(bert, batches, tmp_path):
    sites = hp.find_sites(bert, feed_forward=True)
    scores = hp.score(bert, batches, "surgeon", sites=sites)
    assert any("No standard error:" in note for note in scores.notes)
    assert any("With feed-forwards" in note for note in scores.notes)
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
    # A budget of heads counts no neurons.
    of_heads = hp.select(scores, hp.Budget(keep_heads=0.5)).mask
    assert sum(len(of_heads.kept(s.name)) for s in sites if not s.is_feed_forward) == 4
    assert all(len(of_heads.kept(s.name)) == WIDTH for s in neurons(sites))
    # A plan on file cuts the model, by the sites that it names.
    again = hp.PruningPlan.load(plan.save(tmp_path / "plan.json"))
    report = hp.prune_(bert, again, example=batches[0])
    assert report.proof is not None
    assert report.params_after <= 0.7 * report.params_before


def test_a_latency_table_measures_levels_and_a_speed_budget_uses_them(bert, batches):
    sites = hp.find_sites(bert, feed_forward=True)
    # Measured times are noisy, so what a fixed speed needs might be out of reach.
    table = steady_levels(bert, batches[0], sites=sites)
    for site in neurons(sites):
        measured = {n for n, seconds in enumerate(table.row(site.name)) if seconds is not None}
        assert measured == set(level_widths(WIDTH))
    scores = hp.score(bert, batches, "wanda", sites=sites)
    plan = hp.select(scores, hp.Budget(speedup=1.05), latency=table)
    assert table.whole / table.predict(plan.mask) >= 1.05 * (1 - 1e-9)


def test_a_refit_takes_cut_feed_forwards_too(bert, batches):
    small = copy.deepcopy(bert)
    cut(small, {FIRST: range(64), SECOND: range(64)})

    def error():
        with torch.no_grad():
            gaps = [call(small, b).logits - call(bert, b).logits for b in batches]
        return float(torch.cat(gaps).square().mean())

    before = error()
    hp.recover_(small, batches, "lstsq", teacher=bert)
    assert error() < before / 2


def test_equal_widths_are_opened_by_transformers_alone(bert, batches, tmp_path):
    cut(bert, {FIRST: range(32, 80), SECOND: range(32, 80)})
    hp.save_pretrained(bert, tmp_path, format="transformers", example=batches[0])
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert again.config.intermediate_size == 48
    with torch.no_grad():
        assert_close(call(again, batches[0]).logits, call(bert, batches[0]).logits)


def test_padding_does_not_count(bert, batches):
    sites = hp.find_sites(bert, feed_forward=True)
    changed = []
    for batch in batches:
        ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)
        changed.append({**batch, "input_ids": ids})
    for scorer in ("wanda", "obs", "surgeon"):
        values = [hp.score(bert, data, scorer, sites=sites).values for data in (batches, changed)]
        for row, other in zip(*values, strict=True):
            assert_close(torch.tensor(row), torch.tensor(other), rtol=1e-5, atol=1e-7)


def test_padding_does_not_count_in_chunks_of_tokens(bert, batches):
    """A chunk has another shape than the mask; in a measurement all tokens run at once."""
    sites = hp.find_sites(bert, feed_forward=True)
    whole = hp.score(bert, batches, "wanda", sites=sites)
    for layer in bert.bert.encoder.layer:
        layer.chunk_size_feed_forward = 3
    assert_close(hp.score(bert, batches, "wanda", sites=sites).values, whole.values)
    assert [layer.chunk_size_feed_forward for layer in bert.bert.encoder.layer] == [3, 3]


def by_place(x):
    """Weighs neurons by their places."""
    return x.relu() * (1 + torch.arange(x.shape[-1]) % 3)


@pytest.mark.parametrize(
    "activation",
    [
        nn.Softmax(-1),
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: x.relu() - 0.015 * x.mean(-1, keepdim=True),
        by_place,
        # Two functions in turn; a width of its own, which raises for any other.
        lambda x: torch.stack([x[..., ::2].relu(), x[..., 1::2].tanh()], -1).flatten(-2),
        nn.LayerNorm(32, elementwise_affine=False),
    ],
)
def test_an_activation_over_all_neurons_is_refused(activation):
    options = {"batch_first": True, "activation": activation}
    layer = nn.TransformerEncoderLayer(16, 2, 32, **options)
    with pytest.raises(UnsupportedModel, match="whose activation treats every neuron by itself"):
        hp.find_sites(nn.Sequential(layer), feed_forward=True)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation=nn.SiLU())
    assert len(neurons(hp.find_sites(nn.Sequential(layer), feed_forward=True))) == 1


def test_sparse_layers_of_gemma_3n_are_passed_over():
    from headprune.layouts import feed_forward_llama

    layer = nn.Module()
    layer.down_proj, layer.activation_sparsity = nn.Linear(8, 4), 0.95
    with pytest.raises(UnsupportedModel, match=r"got activation_sparsity=0\.95"):
        feed_forward_llama.LAYOUT.head_dim(layer)
    layer.activation_sparsity = 0.0
    assert feed_forward_llama.LAYOUT.head_dim(layer) == 1


def test_taylor_of_tokens_reads_feed_forwards_whose_tokens_are_flattened(batches):
    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": WIDTH}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32}
    model = OPTForCausalLM(OPTConfig(**sizes, init_std=0.3, dropout=0.0)).eval()
    batch = {"input_ids": batches[0]["input_ids"], "labels": batches[0]["input_ids"]}
    sites = hp.find_sites(model, feed_forward=True)
    scores = hp.score(model, [batch], hp.scoring.Taylor(reduce="token"), sites=sites)
    # The gradient of a token's gate is the slope along what the projection down reads there.
    read = []
    down = model.model.decoder.layers[0].fc2
    with down.register_forward_pre_hook(lambda module, args: read.append(args[0])):
        losses = default_loss(model, batch)
    (slope,) = torch.autograd.grad(losses.sum(), read)
    expected = (read[0] * slope).detach().reshape(6, 9, WIDTH).abs().sum(1).mean(0)
    (row,) = [row for site, row in zip(sites, scores.values, strict=True) if site in neurons(sites)]
    assert_close(torch.tensor(row), expected, rtol=1e-4, atol=1e-6)


def test_gates_of_other_tokens_than_the_flattened_ones_are_refused():
    x, gate = torch.randn(12, 8), torch.ones(3, 5, 8)
    with pytest.raises(InvalidValue, match="for the 12 tokens that the model runs on"):
        multiplied(x, [gate.unsqueeze(-1)])


def test_recovery_counts_neurons_apart_from_heads(bert, batches):
    teacher = copy.deepcopy(bert)
    cut(bert, {FIRST + ".attention": [0, 1], FIRST: range(64)})
    folded = hp.recover_(copy.deepcopy(bert), batches, "mean_fold", teacher=teacher)
    fitted = hp.recover_(bert, batches, "lstsq", teacher=teacher)
    for outcome in (folded, fitted):
        assert (outcome.metrics["heads"], outcome.metrics["neurons"]) == (2, WIDTH - 64)


def test_ladder_in_the_order_of_attention_maps_is_refused(bert, batches):
    sites = hp.find_sites(bert, feed_forward=True)
    ladder = hp.scoring.registry.configured("ladder", {"order": "entropy"}, "test")
    with pytest.raises(InvalidValue, match="must be one that scores neurons"):
        hp.score(bert, batches, ladder, sites=sites)


def test_what_is_no_feed_forward_is_passed_over():
    tokens_first = nn.TransformerEncoderLayer(16, 4, 24)
    named = nn.ModuleDict({"linear1": nn.Linear(8, 6), "linear2": nn.Linear(6, 8)})
    other = nn.Sequential(hp.MultiHeadAttention(8, 2), named)
    for model, reason in ((tokens_first, "batch_first=True"), (other, "feed_forward_torch")):
        with pytest.raises(UnsupportedModel, match=f"a feed-forward that.*{reason}"):
            hp.find_sites(model, feed_forward=True)


def test_a_folder_that_would_not_load_is_not_written(bert, tmp_path):
    attention = hp.find_sites(bert)
    cut(bert, {FIRST: range(40)})
    assert "layers with 40 and 96 neurons" in applicable_formats(bert)["transformers"]
    with pytest.raises(InvalidValue, match="all sites that were cut, feed-forwards too"):
        hp.save_pretrained(bert, tmp_path / "a", sites=attention)
    assert not (tmp_path / "a").exists()


def test_an_empty_feed_forward_has_no_scores(bert):
    cut(bert, {FIRST: ()})
    sites = hp.find_sites(bert, feed_forward=True)
    scores = hp.score(bert, None, "magnitude", sites=sites)
    assert [len(row) for row in scores.values] == [4, 0, 4, WIDTH]
