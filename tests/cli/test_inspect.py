"""``headprune inspect``: policies, what a cut changes, and every attention-like module that is not
taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import headprune as hp
from headprune.cli.main import app
from headprune.core.errors import UnsupportedModel
from headprune.layouts import registry


class OddAttention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.W_q = nn.Linear(width, width)


def call(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *arguments: str) -> Any:
    from headprune.data import models

    monkeypatch.setattr(models, "open_model", lambda path: model)
    return CliRunner().invoke(app, ["inspect", "here", *arguments])


def found(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *arguments: str) -> Any:
    return json.loads(call(monkeypatch, model, *arguments, "--json").stdout)


def test_policies_and_units_of_grouped_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = registry.get("llama").tiny(0, "llama")
    by_group, by_head = (
        found(monkeypatch, model, "--policy", p)["sites"] for p in ("group", "balanced")
    )
    assert {tuple(r["policies"][:2]) for r in by_group} == {("group", "balanced")}
    assert [r["policy"] for r in by_group] == ["group"] * 3
    assert [r["units"] for r in by_group] == [r["kv_heads"] for r in by_group]
    assert [r["units"] for r in by_head] == [r["heads"] for r in by_head]
    text = call(monkeypatch, model, "--policy", "balanced").stdout
    assert "6 / 3" in text
    assert "group, [balanced]" in text


def test_what_a_policy_costs_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = registry.get("llama").tiny(0, "llama")
    lines = {
        p: call(monkeypatch, model, "--policy", p).stdout for p in ("group", "balanced", "free")
    }
    assert all("KV bytes/token" in text and " 96 " in text for text in lines.values())
    assert all("288 bytes of KV cache per token" in text for text in lines.values())
    assert (
        "group: a key/value head is removed with all its query heads, and the cache shrinks by it"
        in lines["group"]
    )
    assert (
        "balanced: the cache keeps every key/value head that a kept head reads, once"
        in lines["balanced"]
    )
    assert "free: the cache keeps" in lines["free"]
    assert "every step repeats keys and values for each query head" in lines["free"]
    assert found(monkeypatch, model)["totals"]["kv_bytes_per_token"] == 288
    bert, _ = registry.get("bert").tiny(0, "bert")
    assert found(monkeypatch, bert)["cache"] == []
    assert "KV cache" not in call(monkeypatch, bert).stdout


def test_one_key_head_for_all_query_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = registry.get("falcon").tiny(0, "falcon-mqa")
    text = call(monkeypatch, model).stdout
    assert "one key/value head is kept" in text
    assert "[balanced]" not in text
    assert "(MQA): it is kept as long as one of them is, whatever the policy" in text


def test_whether_a_layer_may_lose_all_heads_is_tried_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = registry.get("bart").tiny(0, "bart")
    before = {n: (t.shape, type(m)) for n, m in model.named_modules() for t in m.parameters()}
    answers = found(monkeypatch, model)["layouts"]["bart"]["no_heads_left"]
    assert answers == {"self": "yes", "causal": "yes", "cross": "yes"}
    assert {
        n: (t.shape, type(m)) for n, m in model.named_modules() for t in m.parameters()
    } == before
    model(**batch)
    refusing, _ = registry.get("t5").tiny(0, "t5")
    monkeypatch.setattr("headprune.model.cut.cut_", _refused)
    assert (
        "all heads of a layer may be removed: no: must be left with a head"
        in call(monkeypatch, refusing).stdout
    )


def _refused(*_: Any) -> Any:
    raise UnsupportedModel("here", "left with a head", "none kept")


@pytest.mark.parametrize(("layout", "family"), [("llama", "llama"), ("falcon", "falcon-mqa")])
def test_parameters_and_cache_of_a_site_do_not_depend_on_the_policy(
    layout: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = registry.get(layout).tiny(0, family)
    by_group, by_head = (
        found(monkeypatch, model, "--policy", p)["sites"] for p in ("group", "free")
    )
    of_a_site = by_head[0]
    assert of_a_site["kv_bytes_per_token"] == 2 * of_a_site["kv_heads"] * of_a_site["head_dim"] * 4
    for key in ("params", "kv_bytes_per_token"):
        assert [r[key] for r in by_group] == [r[key] for r in by_head]


def test_a_policy_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = registry.get("llama").tiny(0, "llama")
    result = call(monkeypatch, model, "--policy", "some")
    assert result.exit_code == 2
    assert "must be one of group, balanced, free" in result.stderr


def test_what_a_cut_changes_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = registry.get("gpt2").tiny(0)
    layout = found(monkeypatch, model)["layouts"]["gpt2"]
    assert layout["gate"] == "input of `c_proj`"
    assert "rows of `c_attn` (queries, keys, values; one after the other)" in layout["cut"]
    assert "`num_heads` (query heads)" in layout["patched"][0]
    text = call(monkeypatch, model).stdout
    assert all(line in text for line in (*layout["cut"], *layout["patched"]))


def test_every_module_that_is_not_taken_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(
        hp.MultiHeadAttention(8, 2), *(OddAttention() for _ in range(12)), OddAttention(16)
    )
    groups = found(monkeypatch, model)["not_taken"]
    assert [g["modules"] for g in groups] == [[str(i) for i in range(1, 14)]]
    errors = call(monkeypatch, model).stderr
    assert "not taken: 1 and 12 more (OddAttention; near" in errors
    assert "propose_layouts" in errors


def test_a_model_without_any_site_names_all_that_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call(
        monkeypatch, nn.Sequential(*(OddAttention() for _ in range(20)), torch.nn.Linear(2, 2))
    )
    assert result.exit_code == 2
    assert "not taken: 0 and 19 more (OddAttention" in result.stderr
