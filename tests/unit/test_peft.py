"""Models with LoRA adapters (PEFT): base and adapters are cut together, before a merge and after
it."""

import copy
import re
from pathlib import Path

import pytest
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.data.adapters import _check_patterns
from headprune.layouts import registry
from tests.laws import test_law_1_families, test_law_3_families, test_law_5_families
from tests.laws.families import assert_equal, far, run
from tests.laws.support import CLOSE, EXACT, Subject, as_double, objective, shaken, unchanged

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "bert": ["query", "key", "value", "attention.output.dense"],
    "gpt2": ["attn.c_attn", "attn.c_proj"],  # Conv1D: [in, out]
}


def lora(layout, **settings):
    usual = {"r": 2, "lora_alpha": 3, "fan_in_fan_out": layout == "gpt2", "bias": "none"}
    return peft.LoraConfig(target_modules=TARGETS[layout], **(usual | settings))


def wrapped(layout, seed=0, second=False, **settings):
    """A family's tiny model with LoRA on all projections of its attention, and a batch."""
    model, batch = registry.get(layout).tiny(seed, layout)
    model = peft.get_peft_model(model, lora(layout, **settings))
    if second:
        model.add_adapter("second", lora(layout, **{**settings, "r": 3}))
    return model, batch


def subject_of(layout, **settings):
    model, batch = wrapped(layout, **settings)
    model = shaken(model, norms=False).double().eval()
    return Subject(registry.get(layout), model, as_double(batch), hp.find_sites(model), layout)


@pytest.fixture(params=["llama", "gpt2"])
def subject(request):
    return subject_of(request.param)


def test_laws(subject):
    test_law_1_families.test_law_1_gates_of_one_change_no_bit_and_leave_no_trace(subject)
    test_law_3_families.test_law_3_padding_on_the_left(subject)
    test_law_5_families.test_law_5_a_layer_without_heads_is_exact_or_refused(subject, "all")
    if subject.family == "llama":
        test_law_3_families.test_law_3_policies_of_grouped_queries(subject, "free")


def test_gated_is_pruned_and_the_adapters_train_on(subject):
    mask, small = subject.ragged(), subject.copy()
    needed = {n: p.requires_grad for n, p in small.named_parameters()}
    assert set(needed.values()) == {True, False}
    test_law_3_families.test_law_3_gated_is_pruned(subject, "own")
    hp.prune_(small, mask)
    assert {n: p.requires_grad for n, p in small.named_parameters()} == needed
    assert small.peft_config.keys() == {"default"}
    for name, module in small.named_modules():
        if hasattr(module, "lora_A"):
            first, second = module.lora_A["default"], module.lora_B["default"]
            assert first.weight.shape[1] == first.in_features == module.in_features, name
            assert second.weight.shape[0] == second.out_features == module.out_features, name
    small.zero_grad(set_to_none=True)
    objective(run(small, subject.batch)[-1]).backward()
    moved = [n for n, p in small.named_parameters() if p.grad is not None]
    assert moved
    assert all("lora_" in n for n in moved)


def test_merging_before_is_merging_after(subject):
    mask, base = subject.ragged(), subject.copy()
    after, before = subject.copy(), subject.copy()
    hp.prune_(after, mask)
    expected = run(after, subject.batch)
    after = after.merge_and_unload()
    assert_equal(run(after, subject.batch), expected, **CLOSE)
    before = before.merge_and_unload()
    names = [s.name.removeprefix("base_model.model.") for s in subject.sites]
    keep = {n: mask.kept(f"base_model.model.{n}") for n in names}
    n_heads = dict.fromkeys(names, subject.sites[0].n_query_heads)
    hp.prune_(before, hp.HeadMask.from_keep(keep, n_heads))
    assert_close(dict(before.state_dict()), dict(after.state_dict()), **CLOSE)
    base.merge_adapter()
    hp.prune_(base, mask)
    assert_equal(run(base, subject.batch), expected, **CLOSE)
    base.unmerge_adapter()
    assert_equal(run(base, subject.batch), expected, **CLOSE)
    with base.disable_adapter():
        assert far(run(base, subject.batch), expected)


def test_every_adapter_is_cut():
    subject = subject_of("llama", second=True)
    small, mask = subject.copy(), subject.ragged()
    hp.prune_(small, mask)
    seen = []
    for adapter in ("default", "second"):
        for model in (subject.model, small):
            model.set_adapter(adapter)
        with hp.gated(subject.model, mask):
            seen.append(run(subject.model, subject.batch))
        assert_equal(run(small, subject.batch), seen[-1], **CLOSE)
    assert far(seen[0], seen[1])


PLAIN = "must be a projection, or one with plain LoRA adapters"
REFUSED = {
    "dora": (lora("bert", use_dora=True), PLAIN),
    "bias": (lora("bert", lora_bias=True), PLAIN),
    "ia3": (peft.IA3Config(target_modules=TARGETS["bert"], feedforward_modules=[]), "merge those"),
    "loha": (peft.LoHaConfig(target_modules=TARGETS["bert"]), "merge those first"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_adapters_are_refused_in_words(kind):
    config, words = REFUSED[kind]
    model = peft.get_peft_model(registry.get("bert").tiny(0, "bert")[0], config)
    sites = hp.find_sites(model)
    with unchanged(model), pytest.raises(UnsupportedModel, match=words):
        hp.prune_(model, hp.HeadMask.from_keep({sites[0].name: [1]}, {s.name: 4 for s in sites}))


def test_a_recovery_asks_to_merge_first():
    subject = subject_of("bert")
    teacher = subject.copy()
    hp.prune_(subject.model, subject.ragged())
    with pytest.raises(UnsupportedModel, match="merge those first"):
        hp.recover_(subject.model, [subject.batch], "mean_fold", teacher=teacher)


def test_costs_count_the_adapters_and_magnitude_the_merged_weights(subject):
    adapted = hp.score(subject.model, [subject.batch], "magnitude")
    merged = hp.score(subject.copy().merge_and_unload(), [subject.batch], "magnitude")
    for a, b in zip(adapted.values, merged.values, strict=True):
        assert_close(a, b, **CLOSE)
    site, (unit, *_) = subject.sites[0], adapted.costs.units[0]
    small = subject.copy()
    hp.prune_(small, subject.without({site.name: site.units[0]}))
    whole, after = (sum(p.numel() for p in m.parameters()) for m in (subject.model, small))
    assert whole - after == unit.params
    less = hp.score(small, [subject.batch], "magnitude").costs.total.macs_per_token
    assert adapted.costs.total.macs_per_token - less == unit.macs_per_token


def test_checkpoints(subject, tmp_path):
    hp.prune_(subject.model, subject.ragged())
    expected = run(subject.model, subject.batch)
    hp.save_pretrained(subject.model, tmp_path / "ours")
    fresh = wrapped(subject.family, seed=3)[0].double()
    loaded = copy.deepcopy(hp.from_pretrained(tmp_path / "ours", fresh))
    assert_equal(run(loaded, subject.batch), expected, **EXACT)

    subject.model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    base = copy.deepcopy(subject.model).unload()
    hp.save_pretrained(base, tmp_path / "base")
    opened = hp.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(opened, tmp_path / "adapter").eval()
    assert_equal(run(again, subject.batch), expected, **CLOSE)

    merged = subject.model.merge_and_unload()
    hp.save_pretrained(merged, tmp_path / "merged")
    # Copied, because tensors read from a file are aligned in another way, in which MKL may round in
    # another way.
    loaded = copy.deepcopy(hp.from_pretrained(tmp_path / "merged"))
    assert_equal(run(loaded, subject.batch), run(merged, subject.batch), **EXACT)


USUAL = [
    "all-linear",
    ".*decoder.*(SA|MHA).*q_proj$",
    "(.*)layer(.*)",
    r"^(?!.*vision).*(?:q_proj|k_proj)$",
    r"(?:.*\.)?layers\.([0-9]|1\d|2[0-3])\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)",
    r"(?:.*?(?:vision|image|patch|text).*?(?:self_attn|attention|attn|mlp|ffn|dense).*?(?:q_proj|k_proj|qkv|proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|up_proj)))",
    "|".join(re.escape(f"model.layers.{i}.self_attn.q_proj") for i in range(512)),
]


def test_usual_patterns_of_adapters_are_let_through():
    """Even so in lists and tables, where there may be many of them; hostile ones are in
    tests/test_hostile.py."""
    for pattern in USUAL:
        _check_patterns({"target_modules": pattern, "exclude_modules": pattern}, Path())
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(20_000)]
    tables = {rf"^model.layers.{i}\..*q_proj": 4 for i in range(500)}
    free = {"prompt_tuning_init_text": "(.+)+!", "base_model_name_or_path": "(.+)+!"}
    _check_patterns({"target_modules": names, "rank_pattern": tables, **free}, Path())


@pytest.mark.parametrize("layout", ["bert", "llama"])
def test_the_lines_in_the_docs(layout, tmp_path, monkeypatch):
    text = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    blocks = text.partition("## LoRA adapters")[2]
    together, first = re.findall(r"```python\n(.*?)```", blocks, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    more = {"task_type": "CAUSAL_LM"} if layout == "llama" else {}
    adapted, batch = wrapped(layout, init_lora_weights=False, **more)
    if layout == "llama":
        batch = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    adapted.save_pretrained("adapters")
    base = copy.deepcopy(adapted).unload().eval()
    names = {"base": copy.deepcopy(base), "batches": [batch]}
    exec(together, names)
    plan = hp.select(names["scores"], hp.Budget(keep_heads=0.5))
    assert 0 < plan.mask.n_kept <= plan.mask.n_heads // 2
    again = names["again"].eval()
    for model in (hp.from_pretrained("small/base"), again):
        assert sum(len(s.heads) for s in hp.find_sites(model)) == plan.mask.n_kept
    cut = copy.deepcopy(adapted).eval()
    hp.prune_(cut, plan)
    assert_close(again(**batch).logits, cut(**batch).logits)
    merged = {"base": copy.deepcopy(base), "peft": peft}
    exec(first, merged)
    assert_close(merged["model"](**batch).logits, adapted.eval()(**batch).logits)
    assert not any("lora" in name for name, _ in merged["model"].named_modules())
