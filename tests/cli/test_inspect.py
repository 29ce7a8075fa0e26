"""``headprune inspect``: policies, what a cut changes, and every attention-like module that is not
taken."""

import pytest
from torch import nn

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts import registry
from tests.command_line import done, json_of, refused


class OddAttention(nn.Module):
    """Attention that no layout describes."""

    def __init__(self, width=8):
        super().__init__()
        self.W_q = nn.Linear(width, width)


@pytest.fixture
def put(monkeypatch):
    """Makes a model the one that ``inspect here`` opens."""

    def place(model):
        monkeypatch.setattr("headprune.data.models.open_model", lambda path: model)
        return model

    return place


def test_sites_and_totals(put):
    put(registry.get("bert").tiny(0)[0])
    found = json_of("inspect here")
    first = found["sites"][0]
    assert (first["heads"], first["units"], first["layout"]) == (4, 4, "bert")
    assert found["totals"]["heads"] == 4 * len(found["sites"])
    assert 0 < found["totals"]["prunable_params"] < found["totals"]["params"]
    assert (found["not_taken"], found["cache"]) == ([], [])
    text = done("inspect here").stdout
    assert first["site"] in text
    assert f"{found['totals']['heads']} heads in" in text
    assert "KV cache" not in text


def test_removed_neurons_are_mentioned_where_they_are_not_shown(put):
    model, _ = registry.get("bert").tiny(0)
    put(model)
    note = "Neurons of feed-forwards were removed; --feed-forward shows them."
    assert note not in done("inspect here").output
    sites = hp.find_sites(model, feed_forward=True)
    keep = {site.name: site.heads[1:] if site.is_feed_forward else site.heads for site in sites}
    hp.prune_(model, hp.HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}))
    assert note in done("inspect here").output
    assert note not in done("inspect here --feed-forward").output


def test_policies_and_units_of_grouped_queries(put):
    put(registry.get("llama").tiny(0, "llama")[0])
    by_group, by_head = (
        json_of(f"inspect here --policy {policy}")["sites"] for policy in ("group", "balanced")
    )
    assert {tuple(row["policies"][:2]) for row in by_group} == {("group", "balanced")}
    assert [row["policy"] for row in by_group] == ["group"] * 3
    assert [row["units"] for row in by_group] == [row["kv_heads"] for row in by_group]
    assert [row["units"] for row in by_head] == [row["heads"] for row in by_head]
    for key in ("params", "kv_bytes_per_token"):
        assert [row[key] for row in by_group] == [row[key] for row in by_head], "of the whole site"
    text = done("inspect here --policy balanced").stdout
    assert "6 / 3" in text
    assert "group, [balanced]" in text
    assert "must be one of group, balanced, free" in refused("inspect here --policy some")


def test_what_a_policy_costs_in_cache(put):
    put(registry.get("llama").tiny(0, "llama")[0])
    for policy, words in (
        ("group", "group: a key/value head is removed with all its query heads"),
        ("balanced", "balanced: the cache stores each key/value head that a kept head reads"),
        ("free", "free: the cache stores"),
    ):
        text = done(f"inspect here --policy {policy}").stdout
        assert words in text
        assert "KV bytes/token" in text
        assert "288 bytes of KV cache per token" in text
    assert "every step repeats keys and values for each query head" in text
    found = json_of("inspect here")
    assert found["totals"]["kv_bytes_per_token"] == 288
    site = found["sites"][0]
    assert site["kv_bytes_per_token"] == 2 * site["kv_heads"] * site["head_dim"] * 4


def test_one_key_head_for_all_query_heads(put):
    put(registry.get("falcon").tiny(0, "falcon-mqa")[0])
    text = done("inspect here").stdout
    assert "one key/value head is kept" in text
    assert "[balanced]" not in text
    assert (
        "(MQA): under every policy, it and the cache are kept as long as one query head is" in text
    )


def test_whether_a_layer_may_lose_all_heads_is_tried_and_put_back(put, monkeypatch):
    def picture(model):
        return {n: (t.shape, type(m)) for n, m in model.named_modules() for t in m.parameters()}

    model, batch = registry.get("bart").tiny(0, "bart")
    before = picture(put(model))
    answers = json_of("inspect here")["layouts"]["bart"]["without_heads"]
    assert answers == {"self": "yes", "causal": "yes", "cross": "yes"}
    assert picture(model) == before
    model(**batch)

    def refuse(*_):
        raise UnsupportedModel("here", "cut so that it keeps a head", "none kept")

    put(registry.get("t5").tiny(0, "t5")[0])
    monkeypatch.setattr("headprune.model.cut.cut_", refuse)
    said = "all heads of a layer may be removed: no: must be cut so that it keeps a head"
    assert said in done("inspect here").stdout


def test_what_a_cut_changes_in_words(put):
    put(registry.get("gpt2").tiny(0)[0])
    layout = json_of("inspect here")["layouts"]["gpt2"]
    assert layout["gate"] == "input of `c_proj`"
    assert "rows of `c_attn` (queries, keys, values; one after the other)" in layout["cut"]
    assert "`num_heads` (query heads)" in layout["patched"][0]
    text = done("inspect here").stdout
    assert all(line in text for line in (*layout["cut"], *layout["patched"]))


def test_every_module_that_is_not_taken_is_named_with_its_reason(put):
    odd = [*(OddAttention() for _ in range(12)), OddAttention(16)]
    put(nn.Sequential(hp.MultiHeadAttention(8, 2), *odd))
    (group,) = json_of("inspect here")["not_taken"]
    assert group["modules"] == [str(i) for i in range(1, 14)]
    assert (group["module"], group["class"]) == ("1", "OddAttention")
    errors = done("inspect here").stderr
    assert (
        "not recognised: 1 and 12 more (OddAttention; no layout is close; its parts are W_q)"
        in errors
    )
    assert "propose_layouts" in errors
    put(nn.Sequential(*odd, nn.Linear(2, 2)))
    assert "not recognised: 0 and 12 more (OddAttention" in refused("inspect here")
