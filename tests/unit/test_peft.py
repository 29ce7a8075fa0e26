"""Models with LoRA adapters (PEFT): base and adapters are cut together, before a merge and after
it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.testing import assert_close
from transformers import BertForSequenceClassification

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.data.adapters import _check_patterns
from headprune.data.models import open_model
from headprune.layouts import registry
from tests.laws import (
    families,
    test_law_1_families,
    test_law_2_families,
    test_law_3_families,
    test_law_5_families,
)
from tests.laws.families import assert_equal, far, run
from tests.laws.support import CLOSE, EXACT, Subject, as_double, objective, picture, shaken
from tests.tiny_models import bert

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "bert": ["query", "key", "value", "attention.output.dense"],
    "gpt2": ["attn.c_attn", "attn.c_proj"],  # Conv1D: [in, out]
}


def wrapped(
    layout: str, seed: int = 0, second: bool = False, **settings: Any
) -> tuple[nn.Module, Any]:
    """A family's tiny model with LoRA on all projections of its attention, and a batch."""
    model, batch = registry.get(layout).tiny(seed, layout)
    settings = {
        "r": 2,
        "lora_alpha": 3,
        "fan_in_fan_out": layout == "gpt2",
        "bias": "none",
    } | settings
    config = peft.LoraConfig(target_modules=TARGETS[layout], **settings)
    model = peft.get_peft_model(model, config)
    if second:
        model.add_adapter(
            "second", peft.LoraConfig(target_modules=TARGETS[layout], **{**settings, "r": 3})
        )
    return model, batch


def subject_of(layout: str, **settings: Any) -> Subject:
    model, batch = wrapped(layout, **settings)
    model = shaken(model, norms=False).double().eval()
    return Subject(registry.get(layout), model, as_double(batch), hp.find_sites(model), layout)


@pytest.fixture(params=TARGETS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return subject_of(request.param)


LAWS = [
    test_law_1_families.test_law_1_gates_of_one_change_no_bit_and_leave_no_trace,
    test_law_2_families.test_law_2_a_gate_of_zero_is_a_zeroed_head_and_has_an_effect,
    test_law_3_families.test_law_3_padding_on_the_left,
    test_law_5_families.test_law_5_one_after_the_other_is_both_at_once,
    test_law_5_families.test_law_5_nothing_pruned_nothing_changed,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws(subject: Subject, law: Any) -> None:
    law(subject)


@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_a_layer_without_heads(subject: Subject, which: str) -> None:
    test_law_5_families.test_law_5_a_layer_without_heads_is_exact_or_refused(subject, which)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_gated_is_pruned(subject: Subject, implementation: str) -> None:
    subject.model.base_model.model.set_attn_implementation(implementation)
    for seed in range(2):
        mask, small = subject.ragged(seed), subject.copy()
        with hp.gated(subject.model, mask):
            expected, full = (
                run(subject.model, subject.batch),
                families.gradients(subject.model, subject.batch),
            )
        hp.prune_(small, mask)
        assert_equal(run(small, subject.batch), expected, **CLOSE)
        families.assert_same_gradients(subject, small, full, mask)
        for name, module in small.named_modules():
            if hasattr(module, "lora_A"):
                counts = {"in": module.in_features, "out": module.out_features}
                assert {
                    module.lora_A["default"].weight.shape[1],
                    module.lora_A["default"].in_features,
                } == {counts["in"]}, name
                assert {
                    module.lora_B["default"].weight.shape[0],
                    module.lora_B["default"].out_features,
                } == {counts["out"]}, name


@pytest.mark.parametrize("policy", ["balanced", "free"])
def test_policies_of_grouped_queries(policy: str) -> None:
    test_law_3_families.test_law_3_policies_of_grouped_queries(subject_of("llama"), policy)


def test_what_survives(subject: Subject) -> None:
    model = subject.model
    needed = {n: p.requires_grad for n, p in model.named_parameters()}
    assert set(needed.values()) == {True, False}
    hp.prune_(model, subject.ragged())
    assert {n: p.requires_grad for n, p in model.named_parameters()} == needed
    assert model.peft_config.keys() == {"default"}


def test_merging_before_is_merging_after(subject: Subject) -> None:
    mask, base = subject.ragged(), copy.deepcopy(subject.model)
    after, before = subject.copy(), subject.copy()
    hp.prune_(after, mask)
    expected = run(after, subject.batch)
    after = after.merge_and_unload()
    assert_equal(run(after, subject.batch), expected, **CLOSE)
    before = before.merge_and_unload()
    names = [s.name.removeprefix("base_model.model.") for s in subject.sites]
    keep = {n: mask.kept(f"base_model.model.{n}") for n in names}
    hp.prune_(
        before, hp.HeadMask.from_keep(keep, dict.fromkeys(names, subject.sites[0].n_query_heads))
    )
    for (name, a), (_, b) in zip(
        after.state_dict().items(), before.state_dict().items(), strict=True
    ):
        assert_close(a, b, msg=name, **CLOSE)
    base.merge_adapter()
    hp.prune_(base, mask)
    assert_equal(run(base, subject.batch), expected, **CLOSE)
    base.unmerge_adapter()
    assert_equal(run(base, subject.batch), expected, **CLOSE)
    with base.disable_adapter():
        assert far(run(base, subject.batch), expected)


def test_every_adapter_is_cut() -> None:
    subject = subject_of("llama", second=True)
    small, mask = subject.copy(), subject.ragged()
    hp.prune_(small, mask)
    seen = []
    for adapter in ("default", "second"):
        subject.model.set_adapter(adapter)
        small.set_adapter(adapter)
        with hp.gated(subject.model, mask):
            seen.append(run(subject.model, subject.batch))
        assert_equal(run(small, subject.batch), seen[-1], **CLOSE)
    assert far(seen[0], seen[1])


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"lora_bias": True, "second": False}], ids=["dora", "bias"]
)
def test_other_forms_of_lora_are_refused_in_words(settings: dict[str, Any]) -> None:
    subject = subject_of("bert", **settings)
    before = picture(subject.model)
    with pytest.raises(
        UnsupportedModel, match="must be a projection, or one with plain LoRA adapters"
    ):
        hp.prune_(subject.model, subject.ragged())
    assert picture(subject.model) == before


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "OFTConfig"])
def test_other_adapters_are_refused_in_words(kind: str) -> None:
    model, _ = registry.get("bert").tiny(0, "bert")
    more = {
        "IA3Config": {"feedforward_modules": []},
        "OFTConfig": {"r": 4, "oft_block_size": 0},
    }.get(kind, {})
    model = peft.get_peft_model(model, getattr(peft, kind)(target_modules=TARGETS["bert"], **more))
    sites = hp.find_sites(model)
    before = picture(model)
    with pytest.raises(UnsupportedModel, match="merge those first"):
        hp.prune_(model, hp.HeadMask.from_keep({sites[0].name: [1]}, {s.name: 4 for s in sites}))
    assert picture(model) == before


def test_costs_count_the_adapters(subject: Subject) -> None:
    table = hp.score(subject.model, [subject.batch], "magnitude").costs
    for site, units in zip(subject.sites, table.units, strict=True):
        small = subject.copy()
        n_before = sum(p.numel() for p in small.parameters())
        gone = site.units[0]
        hp.prune_(small, subject.without({site.name: gone}))
        n_after = sum(p.numel() for p in small.parameters())
        assert n_before - n_after == units[0].params
        after = hp.score(small, [subject.batch], "magnitude").costs
        assert table.total.macs_per_token - after.total.macs_per_token == units[0].macs_per_token


@pytest.mark.parametrize("layout", TARGETS)
def test_checkpoints(layout: str, tmp_path: Path) -> None:
    subject = subject_of(layout)
    hp.prune_(subject.model, subject.ragged())
    expected = run(subject.model, subject.batch)
    hp.save_pretrained(subject.model, tmp_path / "ours")
    fresh = wrapped(layout, seed=3)[0].double()
    loaded = copy.deepcopy(hp.from_pretrained(tmp_path / "ours", fresh))
    assert_equal(run(loaded, subject.batch), expected, **EXACT)

    subject.model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    base = copy.deepcopy(subject.model).unload()
    hp.save_pretrained(base, tmp_path / "base")
    again = peft.PeftModel.from_pretrained(
        hp.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    ).eval()
    assert_equal(run(again, subject.batch), expected, **CLOSE)

    merged = subject.model.merge_and_unload()
    hp.save_pretrained(merged, tmp_path / "merged")
    # Copied, because tensors read from a file are aligned in another way, in which MKL may round in
    # another way.
    loaded = copy.deepcopy(hp.from_pretrained(tmp_path / "merged"))
    assert_equal(run(loaded, subject.batch), run(merged, subject.batch), **EXACT)


def test_adapters_of_a_cut_model_train(subject: Subject) -> None:
    hp.prune_(subject.model, subject.ragged())
    objective(run(subject.model, subject.batch)[-1]).backward()
    moved = [n for n, p in subject.model.named_parameters() if p.grad is not None]
    assert moved
    assert all("lora_" in n for n in moved)


def test_adapters_added_to_a_cut_model(subject: Subject) -> None:
    base = copy.deepcopy(subject.model).unload()
    names = {
        s.name.removeprefix("base_model.model."): subject.ragged().kept(s.name)
        for s in subject.sites
    }
    hp.prune_(
        base, hp.HeadMask.from_keep(names, dict.fromkeys(names, subject.sites[0].n_query_heads))
    )
    expected = run(base, subject.batch)
    config = peft.LoraConfig(
        target_modules=TARGETS[subject.family], fan_in_fan_out=subject.family == "gpt2"
    )
    model = peft.get_peft_model(base, config)
    assert_equal(run(model, subject.batch), expected, **CLOSE)
    assert {s.heads for s in hp.find_sites(model)} == set(names.values())


def test_mean_fold_asks_to_merge_first() -> None:
    subject = subject_of("bert")
    mask, teacher = subject.ragged(), subject.copy()
    hp.prune_(subject.model, mask)
    before = picture(subject.model)
    with pytest.raises(UnsupportedModel, match="merge those first"):
        hp.recover_(subject.model, [subject.batch], "mean_fold", teacher=teacher)
    assert picture(subject.model) == before


def test_magnitude_is_that_of_the_merged_weights(subject: Subject) -> None:
    adapted = hp.score(subject.model, [subject.batch], "magnitude")
    merged = hp.score(subject.copy().merge_and_unload(), [subject.batch], "magnitude")
    for a, b in zip(adapted.values, merged.values, strict=True):
        assert_close(a, b, **CLOSE)


@pytest.mark.parametrize(
    "pattern",
    [
        "query",
        "all-linear",
        ".*decoder.*(SA|MHA).*q_proj$",
        "(.*)layer(.*)",
        r".*\.(q|k|v)_proj",
        r"^(?!.*vision).*(?:q_proj|k_proj)$",
        r"(?:.*\.)?layers\.([0-9]|1\d|2[0-3])\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)",
        r"(?:.*?(?:vision|image|patch|text).*?(?:self_attn|attention|attn|mlp|ffn|dense).*?(?:q_proj|k_proj|qkv|proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|up_proj)))",
        "|".join(
            re.escape(f"model.layers.{i}.self_attn.{name}")
            for i in range(128)
            for name in TARGETS["llama"]
        ),
    ],
)
def test_usual_patterns_of_adapters_are_let_through(pattern: str) -> None:
    """Even so in lists and tables, where there may be many of them; hostile ones are in
    tests/test_hostile.py."""
    _check_patterns({"target_modules": pattern, "exclude_modules": pattern}, Path())
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(20_000)]
    tables = {rf"^model.layers.{i}\..*q_proj": 4 for i in range(500)}
    free = {"prompt_tuning_init_text": "(.+)+!", "base_model_name_or_path": "(.+)+!"}
    _check_patterns({"target_modules": names, "rank_pattern": tables, **free}, Path())


def test_adapters_with_a_pattern_are_opened(tmp_path: Path) -> None:
    bert(tmp_path / "base")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=r".*\.(query|value)$", init_lora_weights=False
    )
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapters")
    opened = dict(open_model(str(tmp_path / "adapters")).named_parameters())
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert_close(opened[name], dict(adapted.merge_and_unload().named_parameters())[name])


@pytest.mark.parametrize("layout", ["bert", "llama"])
def test_the_lines_in_the_docs(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two blocks of docs/checkpoints.md: cut together and saved apart, or merged first.

    A causal language model comes without labels, as it may without adapters.
    """
    text = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    together, first = re.findall(
        r"```python\n(.*?)```", text.partition("## LoRA adapters")[2], re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    adapted, batch = wrapped(
        layout, init_lora_weights=False, **({"task_type": "CAUSAL_LM"} if layout == "llama" else {})
    )
    if layout == "llama":
        batch = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    adapted.save_pretrained("adapters")
    base = copy.deepcopy(adapted).unload().eval()
    names: dict[str, Any] = {"base": copy.deepcopy(base), "batches": [batch]}
    exec(together, names)
    plan = hp.select(names["scores"], hp.Budget(keep_heads=0.5))
    kept = plan.mask.n_kept
    assert 0 < kept <= plan.mask.n_heads // 2
    small, again = hp.from_pretrained("small/base"), names["again"].eval()
    assert (
        sum(len(s.heads) for s in hp.find_sites(small))
        == sum(len(s.heads) for s in hp.find_sites(again))
        == kept
    )
    cut = copy.deepcopy(adapted).eval()
    hp.prune_(cut, plan)
    assert_close(again(**batch).logits, cut(**batch).logits)
    merged: dict[str, Any] = {"base": copy.deepcopy(base), "peft": peft}
    exec(first, merged)
    assert_close(merged["model"](**batch).logits, adapted.eval()(**batch).logits)
    assert not any("lora" in name for name, _ in merged["model"].named_modules())
