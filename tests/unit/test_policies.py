"""Query heads that share a key/value head: what each policy can remove, in scores, plans, cuts,
caches and checkpoints."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close
from transformers import StaticCache

import headprune as hp
from headprune.attention.cache import KVCache
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.mixin import original_class
from headprune.core.plan import PruningPlan
from headprune.layouts._repeated import Repeated
from headprune.model.costs import measure_costs
from headprune.model.double import Doubled
from headprune.model.losses import default_loss
from headprune.model.sites import bind
from tests.laws.support import CLOSE, EXACT, family_subject, unchanged

LEFT = torch.tensor([[1] * 7, [0, 0] + [1] * 5, [0, 0, 0, 0, 1, 1, 1]])


@pytest.fixture
def llama():
    """Three layers of 6 query heads in 3 groups of 2."""
    return family_subject("llama", "llama")


@pytest.fixture
def mqa():
    return family_subject("falcon", "falcon-mqa")


def run(model, batch):
    with Doubled():
        return model(**batch).logits


def scored(subject, policy, scorer="taylor"):
    batch = {**subject.batch, "labels": subject.batch["input_ids"]}
    sites = hp.find_sites(subject.model, policy=policy)
    return hp.score(subject.model, [batch], scorer, sites=sites)


def uneven(subject):
    """Groups of 2, 1 and no heads; of 2, 2 and 1; all whole."""
    keep = dict(zip(subject.n_heads, [[0, 1, 3], [0, 1, 2, 3, 5], range(6)], strict=True))
    return PruningPlan(subject.mask(keep), policy="free")


def cut(subject, plan):
    small = subject.copy()
    hp.prune_(small, plan)
    return small


@pytest.mark.parametrize(
    ("policy", "selector"), [("group", "uniform"), ("balanced", "global_topk"), ("free", "uniform")]
)
def test_a_plan_keeps_the_policy_of_its_scores(llama, policy, selector):
    scores = scored(llama, policy)
    plan = hp.select(scores, hp.Budget(keep_heads=0.5), selector)
    assert plan.policy == policy
    assert PruningPlan.from_json(plan.to_json()) == plan
    assert 0 < plan.mask.n_kept <= 9
    for site in scores.sites:
        assert site.check(plan.mask.kept(site.name)) == plan.mask.kept(site.name)


def test_free_keeps_the_best_heads_and_balanced_the_best_of_each_group(llama):
    scores = scored(llama, "free")
    plan = hp.select(scores, hp.Budget(keep_heads=7), hp.selection.GlobalTopk(min_heads=0))
    best = sorted(scores.units(), key=lambda u: -u.value)[:7]
    assert {(u.name, *u.heads) for u in best} == {(h.site, h.head) for h in plan.mask}
    plan = hp.select(scored(llama, "balanced"), hp.Budget(keep_heads=0.5), "uniform")
    values = {(u.name, u.heads[0]): u.value for u in scores.units()}
    for site in scores.sites:
        for group in site.groups:
            assert plan.mask.kept(site.name)[group[0] // 2] == max(
                group, key=lambda h: values[site.name, h]
            )


def test_what_a_policy_refuses_is_named(llama):
    mask = uneven(llama).mask
    for policy in ("group", "balanced"):
        with (
            unchanged(llama.model),
            pytest.raises(InvalidValue, match="policy='balanced' or 'free'"),
        ):
            hp.prune_(llama.model, PruningPlan(mask, policy=policy))


def test_groups_of_unlike_size_take_every_policy_but_balanced(llama):
    hp.prune_(llama.model, PruningPlan(uneven(llama).mask, policy="free"))
    for policy in ("group", "free"):
        hp.select(scored(llama, policy), hp.Budget(keep_heads=0.5))
    with pytest.raises(InvalidValue, match=r"policy 'balanced': must be of groups of one size"):
        hp.select(scored(llama, "balanced"), hp.Budget(keep_heads=1.0))


def test_the_note_tells_the_size_of_the_real_cache(llama):
    plan = hp.select(scored(llama, "free"), hp.Budget(keep_heads=6))
    small = cut(llama, plan)

    def cache_bytes(model):
        layers = model(**llama.batch, use_cache=True).past_key_values.layers
        tensors = [t for layer in layers for t in (layer.keys, layer.values)]
        return sum(t.numel() for t in tensors if t.shape[-1] > 1)

    share = cache_bytes(small) / cache_bytes(llama.model)
    assert f"{100 * share:.0f} %" in plan.notes[0]
    table = [measure_costs(m, bind(m), llama.batch).total.kv_bytes for m in (small, llama.model)]
    assert table[0] / table[1] == share


def test_a_cache_budget_is_for_whole_groups_or_where_each_group_has_one_head(llama):
    assert hp.select(scored(llama, "group"), hp.Budget(keep_kv=0.5)).mask.n_kept == 8
    with pytest.raises(InvalidValue, match="find the sites with policy='group'"):
        hp.select(scored(llama, "free"), hp.Budget(keep_kv=0.5))
    keep = {name: [0, 2, 4] for name in llama.n_heads}
    small = cut(llama, PruningPlan(llama.mask(keep), policy="balanced"))
    scores = hp.score(small, [llama.batch], "magnitude", sites=hp.find_sites(small, policy="free"))
    plan = hp.select(scores, hp.Budget(keep_kv=0.5))
    assert plan.mask.n_kept == 4
    hp.prune_(small, plan)


@pytest.mark.parametrize(("policy", "kind"), [("balanced", "keep_params"), ("free", "keep_macs")])
def test_budgets_over_what_single_heads_free_are_met(llama, policy, kind):
    before = measure_costs(llama.model, bind(llama.model), llama.batch).total
    small = cut(llama, hp.select(scored(llama, policy), hp.Budget(**{kind: 0.9})))
    after = measure_costs(small, bind(small), llama.batch).total
    if kind == "keep_params":
        assert after.params <= 0.9 * before.params
    else:
        assert after.macs(7) <= 0.9 * before.macs(7)


@pytest.mark.parametrize("policy", ["balanced", "free"])
def test_scores_are_of_single_heads(llama, policy):
    groups = {(u.name, u.heads): u.value for u in scored(llama, "group", "taylor").units()}
    taylor, left_out = scored(llama, policy), scored(llama, policy, "leave_one_out")
    for scores in (taylor, left_out):
        assert [u.heads for u in scores.units()] == [(h,) for _ in range(3) for h in range(6)]
    for (name, heads), value in groups.items():  # |a + b| <= |a| + |b|, example by example
        singles = [taylor[hp.HeadId(name, h)] for h in heads]
        assert value <= sum(singles) * (1 + 1e-9)
    name = taylor.sites[1].name
    batch = {**llama.batch, "labels": llama.batch["input_ids"]}
    gate = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.float64)
    with torch.no_grad():
        base = default_loss(llama.model, batch)
        with hp.gated(llama.model, {name: gate}):
            difference = default_loss(llama.model, batch) - base
    assert left_out[hp.HeadId(name, 3)] == pytest.approx(float(difference.mean()), rel=1e-4)


# what Transformers' own call and PyTorch's import of inductor say
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_any_kernel_set_before_or_after_the_cut(llama, implementation):
    plan = uneven(llama)
    # flex takes no fp64 on a CPU; norms, and softmax in eager attention, are taken in fp32
    flex = implementation == "flex_attention"
    dtype, tolerance = (torch.float32, 1e-4) if flex else (torch.float64, 1e-6)
    llama.model.to(dtype)
    small = cut(llama, plan)
    for model in (llama.model, small):
        model.set_attn_implementation(implementation)
    seen = []
    hook = small.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape)
    )
    # inductor would take half a minute
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        with hp.gated(llama.model, plan.mask):
            expected = llama.model(**llama.batch).logits
        got = small(**llama.batch).logits
        hook.remove()
        hp.prune_(llama.model, plan)  # with the kernel set before the cut
        assert_close(llama.model(**llama.batch).logits, got, **EXACT)
    assert seen == [(3, 7, 3 * 4)]
    assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("static", [False, True])
def test_generation_with_a_compact_cache(llama, static):
    plan = uneven(llama)
    small = cut(llama, plan)
    ids = torch.randint(3, 50, (3, 7), generator=torch.Generator().manual_seed(3)) * LEFT

    def generate(model, **more):
        with Doubled():
            return model.generate(
                input_ids=ids,
                attention_mask=LEFT,
                return_dict_in_generate=True,
                output_logits=True,
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
                **more,
            )

    with hp.gated(llama.model, plan.mask):
        expected = generate(llama.model)
    mine = {"cache_implementation": "static", "disable_compile": True} if static else {}
    got = generate(small, **mine)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), **CLOSE)
    assert [layer.keys.shape[1] for layer in got.past_key_values.layers] == [2, 3, 3]
    assert isinstance(got.past_key_values, StaticCache) == static


def test_beams_and_steps_of_several_tokens(llama):
    plan = uneven(llama)
    small, ids = cut(llama, plan), llama.batch["input_ids"][:2]
    with hp.gated(llama.model, plan.mask):
        beams = llama.model.generate(input_ids=ids, num_beams=2, max_new_tokens=4)
        expected = run(llama.model, {"input_ids": ids})
    assert torch.equal(small.generate(input_ids=ids, num_beams=2, max_new_tokens=4), beams)
    cache, parts = None, []
    for part in (ids[:, :4], ids[:, 4:6], ids[:, 6:]):
        with Doubled():
            out = small(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert_close(torch.cat(parts, 1), expected, **CLOSE)


def test_copies_pickles_and_checkpoints(llama, tmp_path):
    small = cut(llama, uneven(llama))
    expected = run(small, llama.batch)
    hp.save_pretrained(small, tmp_path)
    loaded = hp.from_pretrained(tmp_path)
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small)), loaded.double()):
        assert_close(run(twin, llama.batch), expected, rtol=1e-6, atol=1e-6)
        assert hp.find_sites(twin) == hp.find_sites(small)
        attention = twin.model.layers[0].self_attn
        assert isinstance(attention, Repeated)
        assert isinstance(attention, original_class(llama.model.model.layers[0].self_attn))
        assert type(attention).__name__ == "LlamaAttention"
        assert not isinstance(twin.model.layers[2].self_attn, Repeated)
        whole_groups = PruningPlan(llama.mask({s: [0, 1] for s in llama.n_heads}))
        hp.prune_(twin, uneven(llama).then(whole_groups))
        assert not any(isinstance(m, Repeated) for m in twin.modules())


def backward(model, batch):
    model(**batch).logits.square().mean().backward()


def test_training_a_model_with_uneven_groups_and_checkpoints(llama):
    """Norms of Llama take fp32 inside whatever the dtype; no mode of ours reaches what
    checkpointing runs again."""
    plan = uneven(llama)
    small = cut(llama, plan)
    with hp.gated(llama.model, plan.mask):
        backward(llama.model, llama.batch)
    small.train()
    small.activation_checkpointing_enable()
    backward(small, llama.batch)
    names = [n for n, _ in small.named_parameters() if ".self_attn." not in n]
    mine, theirs = dict(small.named_parameters()), dict(llama.model.named_parameters())
    for name in [*names, "model.layers.1.self_attn.k_proj.weight"]:
        assert_close(mine[name].grad, theirs[name].grad, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_sees_a_free_cut(llama):
    torch.compiler.reset()  # the limit of recompilations counts those of other tests, too
    plan = uneven(llama)
    llama.model.float()
    compiled = torch.compile(llama.model, backend="eager", fullgraph=True)
    batch = {**llama.batch, "use_cache": False}
    with torch.no_grad():
        before = compiled(**batch).logits
        with hp.gated(llama.model, plan.mask):
            expected = llama.model(**batch).logits
        hp.prune_(llama.model, plan)
        got = compiled(**batch).logits
    assert (before - expected).abs().max() > 1e-3
    assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_forward_that_someone_replaced_is_not_passed_by(llama):
    attention = llama.model.model.layers[0].self_attn
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)
    with pytest.raises(UnsupportedModel, match="replaced forward prevents"):
        hp.prune_(llama.model, uneven(llama))
    assert attention.q_proj.weight.shape[0] == 24


def test_one_key_head_for_all_is_kept_until_the_last_head_is_removed(mqa):
    assert {s.policy for s in mqa.sites} == {"balanced"}
    names = list(mqa.n_heads)
    plan = PruningPlan(mqa.mask({names[0]: [1, 4, 5], names[1]: [], names[2]: [0]}))
    small = cut(mqa, plan)
    cache = small(**mqa.batch, use_cache=True).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == [1, 1, 1]
    chosen = hp.select(scored(mqa, "group"), hp.Budget(keep_heads=0.4))
    assert chosen.policy == "group"
    assert any(
        note.startswith("MQA: a layer keeps its only key/value head") for note in chosen.notes
    )
    hp.prune_(mqa.model, chosen, mqa.batch)
    with pytest.raises(InvalidValue, match=r"Budget\.keep_kv"):
        hp.select(scored(mqa, "group"), hp.Budget(keep_kv=0.5))


@pytest.mark.parametrize(
    ("policy", "keep", "n_kv"), [("balanced", [0, 3, 5], 3), ("free", [0, 1, 3], 2)]
)
def test_our_own_attention_with_its_cache(policy, keep, n_kv):
    torch.manual_seed(0)
    whole = hp.MultiHeadAttention(12, 6, n_kv_heads=3, head_dim=4, value_dim=5).double().eval()
    x, valid_lens = torch.randn(2, 6, 12, dtype=torch.float64), torch.tensor([6, 4])
    gate = torch.tensor([float(h in keep) for h in range(6)], dtype=torch.float64)
    expected = whole(x, causal=True, valid_lens=valid_lens, gates=gate)
    attention, planned = copy.deepcopy(whole), copy.deepcopy(whole)
    hp.prune_(planned, PruningPlan(hp.HeadMask.from_keep({"": keep}, {"": 6}), policy=policy), x)
    with pytest.raises(InvalidValue, match="whole groups"):
        attention.prune_heads_(keep)
    assert {*attention.prune_heads_(keep, policy=policy), *keep} == set(range(6))
    for cut_one in (planned, attention):
        assert (cut_one.heads, cut_one.n_kv_heads) == (tuple(keep), n_kv)
        assert_close(cut_one(x, causal=True, valid_lens=valid_lens), expected, **CLOSE)
    cache, at_once = KVCache(), attention(x, causal=True)
    parts = [attention(part, causal=True, cache=cache) for part in x.split([3, 1, 2], 1)]
    assert_close(torch.cat(parts, 1), at_once, **CLOSE)
    assert cache.keys is not None
    assert cache.keys.shape[1] == n_kv
    again = pickle.loads(pickle.dumps(attention))
    assert_close(again(x, causal=True), at_once, **EXACT)
    with pytest.raises(InvalidValue, match="the same number of query heads"):
        whole.prune_heads_([0, 1, 3], policy="balanced")
