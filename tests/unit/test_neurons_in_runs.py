"""Neurons in runs, on the command line, in stored files and in pictures: their words and sizes."""

import copy
import itertools
import json
import random
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification

import headprune as hp
from headprune.checkpoints.streaming import prune_checkpoint
from headprune.choice.auto import WITH_NEURONS
from headprune.cli.prune import _as_settings, _Choice, _decide
from headprune.core.codec import FrozenDict
from headprune.core.errors import HeadPruneError, InfeasibleBudget, InvalidValue
from headprune.core.heads import AttentionSite, places
from headprune.core.ladders import SiteLadder
from headprune.core.latency import LatencyTable
from headprune.model.running import call
from headprune.recipes.validate import RecipeError
from headprune.report import Compared
from headprune.report.comparison import comparison_view
from headprune.report.curve import curve
from headprune.report.difference import plan_difference
from headprune.report.explanation import explain
from headprune.report.formats import milliseconds
from headprune.report.markdown import render_markdown
from headprune.report.neurons import neuron_table
from headprune.report.series import TradeoffPoint
from headprune.report.tradeoff import sweep_view
from headprune.report.verdict import verdict
from headprune.run import subject, sweep
from headprune.run.auto import scorer_of
from headprune.selection._units import bundled
from headprune.sweep.pick import pick
from tests.command_line import refused
from tests.report_records import of_bert_base
from tests.selection_problems import make, site
from tests.small_recipes import llama_with_neurons, quiet_run, quietly_prepared
from tests.steady_clock import steady_levels

mpl.use("Agg")

WIDTH = 96
CONFIG = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": WIDTH}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}


@pytest.fixture
def bert():
    torch.manual_seed(1)
    return BertForSequenceClassification(BertConfig(**CONFIG, initializer_range=0.3)).eval()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, 20, (6, 9), generator=generator),
        "labels": torch.randint(0, 2, (6,), generator=generator),
    }


def recipe(folder, select, **sections):
    draw = random.Random(0)
    rows = (draw.choices(range(17), k=8) for _ in range(40))
    return llama_with_neurons(folder, select, rows, **sections)


def test_a_run_cuts_neurons_to_a_speed_and_reports_them(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "latency_table", steady_levels)
    timed = {"speedup": 1.3, "latency": {"batch_size": 3, "length": 5, "seconds": 0.01}}
    record = quiet_run(recipe(tmp_path, timed, report=True))
    # 1. The plan meets the budget by a table of heads and neurons.
    table = LatencyTable.load(tmp_path / "out" / "latency.json")
    assert [row.neurons for row in table.sites] == [False, True, False, True]
    assert record.plan.selector == "repriced"
    assert any("after pricing again" in note for note in record.plan.notes)
    assert table.whole / table.predict(record.plan.mask) >= 1.3 * (1 - 1e-9)
    # 2. Heads and neurons are counted apart.
    kept, whole = record.plan.mask.kept_counts, record.plan.mask.counts
    assert (whole.heads, whole.neurons) == (8, 96)
    (chosen,) = {row.kept for row in record.quality if row.name == "ladder"}
    assert chosen == kept
    sizes = {row.name: (row.original, row.pruned) for row in record.size}
    assert sizes["heads"] == (8, kept.heads)
    assert sizes["neurons"] == (96, kept.neurons)
    # 3. The report says so, and what each layer has bought.
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    for text in (html, markdown):
        assert kept.of(whole, ",") in text
    row = table.row("model.layers.0.mlp")
    after = row[len(record.plan.mask.kept("model.layers.0.mlp"))]
    assert f"{milliseconds(row[-1])} → {milliseconds(after)}" in html
    assert "48, head" not in html  # no map has a cell per neuron
    # Prices decided, not the scores that the map shows.
    (ladder,) = (one for one in record.scores.ladders if one.site == "model.layers.0.mlp")
    price = ladder.at(len(record.plan.mask.kept("model.layers.0.mlp")))
    assert f'data-label="Price" class="nowrap">{price:.2g}<' in html
    for text in (html, markdown):
        assert "The scores shown are those of surgeon" in text
    assert "random heads and neurons" in verdict(record).sentence
    # The lines that repeat the run.
    assert "hp.find_sites(model, feed_forward=True)" in markdown
    measured = "model, batches, sites=sites, examples=256, ridge=0.3, temperature=2.0"
    assert f"loss=hp.scoring.refitted_loss_of({measured})" in markdown


def test_auto_tries_ladders_and_plain_scorers_of_neurons(tmp_path):
    wanted = recipe(tmp_path, {"keep_macs": 0.6}, score={"random_draws": 0, "magnitude": False})
    auto = scorer_of(quietly_prepared(wanted))
    assert auto.candidates == WITH_NEURONS
    heads_alone = recipe(tmp_path, {"keep_macs": 0.8, "feed_forward": False})
    assert "ladder" not in scorer_of(quietly_prepared(heads_alone)).settings.get("candidates", ())
    record = quiet_run(wanted)
    names = {candidate.name for candidate in record.scores.choice.candidates}
    assert {"ladder (order=surgeon)", "ladder (order=taylor)", "taylor"} <= names


@pytest.mark.parametrize(
    ("select", "sections", "says"),
    [
        ({"keep_macs": 0.5}, {"score": {"scorer": "entropy"}}, "one that scores neurons"),
        (
            {"keep_macs": 0.5},
            {"score": {"scorer": "ladder", "settings": {"order": "entropy"}}},
            "one that scores neurons",
        ),
        ({"keep_kv": 0.5}, {}, "left out with feed_forward: this budget"),
        (
            {"keep_macs": 0.5},
            {"score": {"scorer": "ladder", "until": {"k": 2}}},
            "score.until: must be left out",
        ),
    ],
)
def test_a_recipe_that_has_no_meaning_for_neurons_is_refused(select, sections, says, tmp_path):
    with pytest.raises(RecipeError, match=says):
        recipe(tmp_path, select, **sections)


@pytest.mark.parametrize(
    ("select", "sections", "says"),
    [
        ({"keep_params": 0.01}, {}, r"Budget\.keep_params: must be at least"),
        ({"keep_macs": 0.01}, {}, r"Budget\.keep_macs: must be at least"),
        ({"sites": {"feed_forward": {"keep_kv": 0.5}}}, {}, "no KV cache that shrinks"),
        ({"speedup": 1.1, "tensor_parallel": 8}, {}, "tensor_parallel=8"),
        (
            {"speedup": 1.1, "latency": {"length": 999}},
            {},
            r"select\.latency\.length: must be at m",
        ),
        ({"keep_macs": 0.9, "selector": "quadratic"}, {}, "one that needs no curvature"),
        ({"keep_macs": 0.9}, {"bench": {"lengths": [8, 999]}}, r"bench\.lengths: must be at most"),
        ({"keep_macs": 0.9}, {"data": {"calibration": 3}, "score": {"scorer": "ladder"}}, "4 rows"),
    ],
)
def test_what_no_scores_can_meet_is_refused_before_them(select, sections, says, tmp_path):
    with pytest.raises(HeadPruneError, match=says):
        quietly_prepared(recipe(tmp_path, select, **sections))


def test_prices_that_no_selector_reads_are_warned_of(tmp_path):
    for selector, warned in (("global_topk", True), ("repriced", False)):
        select = {"keep_macs": 0.9, "selector": selector}
        prepared = quietly_prepared(recipe(tmp_path, select, score={"scorer": "ladder"}))
        warnings = prepared.journal.record.warnings
        assert (
            any("does not read the prices that the scorer ladder" in text for text in warnings)
            is warned
        )


def test_a_model_without_feed_forwards_is_refused_before_it_is_scored(tmp_path):
    wanted = recipe(tmp_path, {"keep_macs": 0.5})
    config = {**wanted.model.config, "num_local_experts": 2, "num_experts_per_tok": 1}
    experts = wanted.model.model_copy(
        update={"class_name": "MixtralForCausalLM", "config": {**config, "num_key_value_heads": 4}}
    )
    with pytest.raises(InvalidValue, match=r"select\.feed_forward"):
        quietly_prepared(wanted.model_copy(update={"model": experts}))


def test_a_run_cuts_feed_forwards_where_attention_fits_no_layout(tmp_path):
    wanted = recipe(tmp_path, {"keep_params": 0.8}, report=True)
    model = wanted.model.model_copy(update={"class_name": "PersimmonForCausalLM"})
    record = quiet_run(wanted.model_copy(update={"model": model}))
    assert record.plan.mask.counts.heads == 0
    assert record.plan.mask.kept_counts.neurons < 96
    assert any("no attention pictures" in text for text in record.warnings)
    small = hp.from_pretrained(tmp_path / "out" / "model")
    for kept in hp.find_sites(small, feed_forward=True):
        assert kept.heads == record.plan.mask.kept(kept.name)


def test_scorers_of_maps_are_refused_at_once(bert, batch):
    sites = hp.find_sites(bert, feed_forward=True)
    with pytest.raises(InvalidValue, match="one that scores neurons"):
        hp.score(bert, [batch], "entropy", sites=sites)


def test_random_levels_count_like_random_heads(bert):
    sites = hp.find_sites(bert, feed_forward=True)
    levels = bundled(hp.score(bert, None, "random", sites=sites))
    for one, row in zip(levels.sites, levels.values, strict=True):
        assert len(row) == (12 if one.is_feed_forward else 4)
        assert min(row) >= 0
        assert max(row) <= 1


def _bundled(bert, batch, scorer):
    """By feed-forward, the scores of its neurons, and those of their bundles with standard errors."""
    sites = hp.find_sites(bert, feed_forward=True)
    scores = hp.score(bert, [batch], scorer, sites=sites, progress=False)
    bundles = bundled(scores)
    for place, one in enumerate(bundles.sites):
        if one.is_feed_forward:
            values = np.array(scores.values[place])
            errors = np.array(scores.standard_errors[place])
            for unit, members in enumerate(one.units):
                at = list(members)
                found = bundles.values[place][unit], bundles.standard_errors[place][unit]
                yield values[at], errors[at], found


@pytest.mark.parametrize("scorer", ["fluctuation", "activation_norm", "taylor"])
def test_bundles_of_neurons_are_scored_as_heads_are_from_their_channels(bert, batch, scorer):
    for values, errors, (value, error) in _bundled(bert, batch, scorer):
        if scorer == "fluctuation":  # a head's z-score is the mean of its channels'
            assert value == pytest.approx(values.mean())
            assert error == pytest.approx(np.linalg.norm(errors) / len(values))
        elif scorer == "activation_norm":  # a head's norm is that over its channels
            assert value == pytest.approx(np.linalg.norm(values))
            assert error == pytest.approx(np.linalg.norm(values * errors) / value)
        else:
            assert value == pytest.approx(values.sum())
            assert error == pytest.approx(np.linalg.norm(errors))


def test_scores_that_do_not_add_up_say_so_in_their_file_and_others_keep_their_bytes(
    bert, batch, tmp_path
):
    sites = hp.find_sites(bert, feed_forward=True)
    scored = hp.score(bert, [batch], ["fluctuation", "taylor"], sites=sites, progress=False)
    paths = []
    for scores in scored:
        paths.append(scores.save(tmp_path / f"{scores.scorer}.json"))
        assert hp.HeadScores.load(paths[-1]).bundling == scores.bundling
    assert '"bundling": "mean"' in paths[0].read_text()
    assert "bundling" not in paths[1].read_text()
    average = hp.scoring.rank_average(scored)
    assert average.bundling == "mean"


@pytest.mark.parametrize(
    ("amounts", "feed_forward", "neurons"),
    [
        ({"--speedup": 2.0}, None, True),
        ({"--speedup": 2.0}, False, False),
        ({"--keep-macs": 0.5}, None, False),
        ({"--keep-macs": 0.5}, True, True),
    ],
)
def test_speedup_cuts_neurons_unless_told_not_to(amounts, feed_forward, neurons):
    settings = _as_settings(_Choice(amounts, None, None, feed_forward), ["score.scorer=taylor"])
    assert ("select.feed_forward=true" in settings) is neurons
    assert ("score.scorer=ladder" in settings) is neurons
    assert settings[-1] == "score.scorer=taylor"  # the user's own word is the last


@pytest.mark.parametrize("option", ["--speedup 2", "--no-feed-forward"])
def test_options_of_a_run_need_data(option, tmp_path):
    line = f"prune --model m --plan plan.json --out {tmp_path / 'out'} {option}"
    assert "given with --data only" in refused(line)


@pytest.fixture(scope="module")
def scores():
    return of_bert_base()


@pytest.fixture(scope="module")
def plan(scores):
    return hp.select(scores, hp.Budget(keep_params=0.5), "knapsack")


def test_files_of_bert_base_with_all_neurons_are_small(scores, plan, tmp_path):
    # A selector decides on a dozen levels per feed-forward.
    assert sum(len(row) for row in bundled(scores).values) == 12 * (12 + 12)
    assert plan.save(tmp_path / "plan.json").stat().st_size < 2**20
    assert scores.save(tmp_path / "scores.json").stat().st_size < 2 * 2**20
    again = hp.HeadScores.load(tmp_path / "scores.json")
    assert again == scores
    assert again.digest == scores.digest
    assert hp.PruningPlan.load(tmp_path / "plan.json") == plan


def test_equal_costs_of_a_long_row_are_written_once_and_those_of_heads_as_before():
    data = of_bert_base(1).to_dict()
    heads, neurons = data["costs"]["units"][:2]
    assert len(heads) == 12
    assert "times" not in heads[0]
    assert [run["times"] for run in neurons] == [3072]
    # Files of before have every cost.
    longhand = copy.deepcopy(data)
    cost = {key: value for key, value in neurons[0].items() if key != "times"}
    longhand["costs"]["units"] = [
        row if len(row) == 12 else [cost] * 3072 for row in data["costs"]["units"]
    ]
    assert hp.HeadScores.from_dict(longhand) == hp.HeadScores.from_dict(data)
    for times in (0, -1, True, 1 << 40, "9"):
        neurons[0]["times"] = times
        with pytest.raises(InvalidValue, match="times"):
            hp.HeadScores.from_json(json.dumps(data))


def test_a_feed_forward_is_a_bar_in_every_picture(scores, plan):
    row = plan.mask.row("bert.encoder.layer.3")
    words = f"{len(row.kept):,} of 3,072 neurons"
    assert plan.title.startswith(plan.mask.kept_counts.of(plan.mask.counts))
    assert words in str(plan)
    assert words in plan._repr_html_()
    assert "3,072 neurons" in str(scores)
    assert max(map(len, str(scores).split("\n"))) < 130
    assert max(len(line.cells) for line in scores.rows(frozenset(plan.mask))) == 12
    axes = hp.plot.head_map(scores, plan)
    assert words in {text.get_text() for text in axes.texts}
    assert len(axes.get_xticks()) == 12


def test_explanations_and_differences_count_neurons(scores, plan):
    other = hp.select(scores, hp.Budget(keep_params=0.6), "knapsack")
    explained = explain(plan, scores)
    kept = len(plan.mask.kept("bert.encoder.layer.3"))
    assert f"bert.encoder.layer.3: {kept:,} of 3,072 neurons kept" in str(explained)
    assert len(explained.units) == 144
    # Costs are those of everything that is removed.
    (_, removed, _), *_ = explained.saved
    counts = plan.mask.counts - plan.mask.kept_counts
    assert removed == 196_800 * counts.heads + 1537 * counts.neurons
    text = str(plan_difference(plan, other, ("a", "b")))
    assert f"a keeps {kept:,} and b" in text
    assert len(text) < 5000


def test_counts_of_a_cut_model_are_of_heads_and_of_neurons(bert, batch, tmp_path):
    sites = hp.find_sites(bert, feed_forward=True)
    keep = {sites[0].name: [0, 1], sites[1].name: range(40), sites[3].name: ()}
    mask = hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})
    whole = copy.deepcopy(bert)
    report = hp.prune_(bert, mask, example=batch)
    assert str(report).startswith("6 of 8 heads and 40 of 192 neurons kept, ")
    rows = {row.name: row for row in hp.bench.sizes(whole, bert, batch)}
    assert (rows["neurons"].original, rows["neurons"].pruned) == (192, 40)
    hp.save_pretrained(bert, tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "6 of 8 heads and 40 of 192 neurons" in card


def test_a_kind_goes_before_a_name_only_where_it_is_there():
    def named(name, kind):
        return AttentionSite(name, "bert", kind, 2, 2, 4, 4, (0, 1))

    assert places([named("feed_forward", "self"), named("b", "self")], "feed_forward") == (0,)
    both = [named("feed_forward", "self"), named("b", "feed_forward")]
    assert places(both, "feed_forward") == (1,)


def test_a_layer_without_heads_and_neurons_multiplies_no_matrices(bert, batch):
    sites = hp.find_sites(bert, feed_forward=True)
    keep = {site.name: () for site in sites[2:]}
    mask = hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})
    inputs = {"input_ids": batch["input_ids"]}
    with hp.gated(bert, mask), torch.no_grad():
        expected = call(bert, inputs).logits
    hp.prune_(bert, mask)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        got = call(bert, inputs).logits
    layers = counter.get_flop_counts()
    whole, empty = (layers[f"BertForSequenceClassification.bert.encoder.layer.{i}"] for i in (0, 1))
    assert sum(whole.values()) > 0
    assert sum(empty.values()) == 0
    assert torch.equal(got, expected)


def test_streaming_cuts_neurons_and_folders_with_cut_neurons(bert, tmp_path):
    bert.save_pretrained(tmp_path / "whole")
    sites = hp.find_sites(bert, feed_forward=True)
    n_heads = {site.name: site.n_query_heads for site in sites}
    both = hp.HeadMask.from_keep({sites[0].name: [1, 2], sites[1].name: range(40)}, n_heads)
    heads = hp.HeadMask.from_keep(
        {sites[0].name: [1], sites[2].name: [3]}, {site.name: 4 for site in (sites[0], sites[2])}
    )
    report = prune_checkpoint(tmp_path / "whole", both, tmp_path / "once")
    assert "removed 2 heads and 56 neurons" in str(report)
    prune_checkpoint(tmp_path / "once", heads, tmp_path / "twice")
    hp.prune_(bert, both)
    hp.prune_(bert, heads)
    again = hp.from_pretrained(tmp_path / "twice")
    for name, tensor in bert.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_sweep_scores_neurons_where_its_recipe_has_them(tmp_path):
    select = {"keep_params": 0.8, "selector": "global_topk", "feed_forward": False}
    wanted = recipe(tmp_path, select, score={"scorer": "taylor", "random_draws": 1}, train=None)
    grid = {"select.feed_forward": [False, True]}
    found = sweep(wanted, grid, out=tmp_path / "sweep", say=lambda line: None)
    assert not found.table.failed
    # Heads alone are not enough; with neurons, more heads are kept.
    without, neurons = found.table.rows
    assert found.table.base["heads"] == 8
    assert without["heads"] < neurons["heads"] <= 8
    assert neurons["params"] <= 0.8 * found.table.base["params"]
    # Models that lost neurons are ranked by parameters.
    assert "neurons" not in found.table.base
    with_neurons = recipe(
        tmp_path, {**select, "feed_forward": True}, score=wanted.score, train=None
    )
    grid = {"select.keep_params": [0.6, 0.8]}
    found = sweep(with_neurons, grid, out=tmp_path / "neurons", say=lambda line: None)
    assert found.table.base["neurons"] == 96
    assert found.table.usual_size == "params"
    assert [one.values["select.keep_params"] for one in found.table.front()][-1] == 0.6
    assert "neurons, drop" in str(found.table)
    picked = pick(found, max_drop=1.0, say=lambda line: None)
    assert (picked.by, picked.size) == ("params", min(row["params"] for row in found.table.rows))
    page = sweep_view(found.table)
    assert page.header[2:5] == ("heads", "neurons", "parameters")


def test_a_run_with_neurons_is_compared_with_one_of_heads(tmp_path):
    taylor = {"scorer": "taylor", "random_draws": 1}
    select = {"keep_params": 0.8, "selector": "global_topk"}
    heads = quiet_run(recipe(tmp_path, {**select, "feed_forward": False}, score=taylor))
    both = quiet_run(recipe(tmp_path, select, score=taylor, out=str(tmp_path / "both")))
    kept = both.plan.mask.kept_counts.neurons
    for pair in ((heads, both), (both, heads)):
        found = plan_difference(*(record.plan for record in pair), ("a", "b"))
        assert found.n_heads == 8
        assert len(found.neurons) == 2, "one line a feed-forward"
    compared = (Compared("heads", heads), Compared("both", both))
    (line,) = [line for line in comparison_view(compared).plans if "neurons" in line]
    assert line == f"heads keeps all neurons, and both {kept} of 96 neurons."
    # The page of a decoder says what its cache keeps, layer by layer.
    table = neuron_table(both)
    assert table.cached
    before = int(table.total.cache[0].replace(",", ""))
    assert before == 2 * 2 * 16 * 4, "bytes: keys and values, layers, width, fp32"
    assert "KV cache, bytes per token" in render_markdown(both)
    # Markdown ends a table by an empty line.
    lines = render_markdown(both).splitlines()
    for before, line in itertools.pairwise(lines):
        assert not (before.startswith("|") and line and not line.startswith("|")), line


def test_no_curve_over_heads_compares_models_with_other_neurons():
    def points(*neurons):
        values = zip((8, 4, 4), (0.95, 0.90, 0.92), neurons, strict=True)
        return [TradeoffPoint("accuracy", "m", n, value, 0.0, neurons=m) for n, value, m in values]

    drawn = curve(points(80, 80, 80), "test")
    assert (
        drawn.title
        == "accuracy on test rows against heads kept; m: 4 heads 0.91 ± 0.0141, 8 heads 0.95"
    )
    assert curve(points(80, 20, 20), "test") is None


def test_a_run_that_goes_on_scores_neurons_that_were_not_scored(tmp_path):
    taylor = {"scorer": "taylor", "random_draws": 1}
    too_little = {"keep_params": 0.05, "selector": "knapsack", "feed_forward": False}
    with pytest.raises(InfeasibleBudget):
        quiet_run(recipe(tmp_path, too_little, score=taylor))
    record = quiet_run(recipe(tmp_path, {"keep_params": 0.8}, score=taylor))
    assert record.plan.mask.counts.neurons == 96


def test_settings_are_those_of_the_selector_that_a_recipe_takes_by_default(tmp_path):
    amount = {"keep_params": 0.8}
    kept = {"method": "lstsq"}
    found = recipe(tmp_path, {**amount, "settings": {"rounds": 5}, "recover": [kept]})
    assert (found.select.selector, found.select.settings) == ("repriced", {"rounds": 5})
    with pytest.raises(RecipeError, match=r"select\.settings\.normalise"):
        recipe(tmp_path, {**amount, "settings": {"normalise": "l2"}})


def test_the_command_selects_by_measured_prices_as_select_does(tmp_path):
    sites = [site("a", 4), site("f", 8, kind="feed_forward")]
    ladders = (
        SiteLadder("a", (0, 1, 2, 3, 4), (9.0, 1.0, 0.5, 0.2, 0.0)),
        SiteLadder("f", (0, 4, 8), (2.0, 1.9, 0.0)),
    )
    scores = replace(make(sites, [[4.0, 3.0, 2.0, 1.0], [1.0] * 8]), ladders=ladders)
    scores.save(tmp_path / "scores.json")
    made = _decide(None, tmp_path / "scores.json", _Choice({"--keep-params": 0.7}, None, None))
    assert made == hp.select(scores, hp.Budget(keep_params=0.7))
    assert made.selector == "knapsack"
    assert not any("prices of levels" in note for note in made.notes)
    ordered = replace(scores, scorer="ladder", settings=FrozenDict({"order": "taylor"}))
    assert explain(made, ordered).scorer == "taylor", "the values are those of the order"
    by_scores = hp.select(scores, hp.Budget(keep_params=0.7), "global_topk")
    words = "global_topk does not read the prices of levels"
    assert any(note.startswith(words) for note in by_scores.notes)
