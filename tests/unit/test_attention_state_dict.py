"""Which heads are kept is a part of the state of MultiHeadAttention, in whatever way a state dict
is stored."""

import copy
import pickle
from itertools import combinations, product

import accelerate
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.testing import assert_close

import headprune as hp
from headprune.attention.kept_heads import KEPT_HEADS, weights_of
from headprune.core.errors import InvalidValue
from headprune.model.fingerprint import fingerprint, weights_digest
from tests.laws.support import subject_of

REFUSED = r"the heads of .* in the state dict: must be those of the module, .* of \d, got .* of \d"


def module_of(keep, n_kv_heads, seed=0):
    torch.manual_seed(seed)
    module = hp.MultiHeadAttention(16, 4, n_kv_heads=n_kv_heads).eval()
    module.prune_heads_(keep, policy="free")
    return module


def reread(state, folder, how):
    file = folder / "state"
    if how == "torch":
        torch.save(state, file)
        return torch.load(file, weights_only=True)
    if how == "safetensors":
        safetensors.torch.save_file(state, file)
        return safetensors.torch.load_file(file)
    return {k: (v.double() + v.double()) / 2 for k, v in state.items()} if how else state


#: Ways to store a state dict, each with a number of key/value heads; "" is in memory.
STORED = [("", 1), ("", 2), ("", 4), ("torch", 2), ("safetensors", 2), ("averaged", 4)]
KEPT = [keep for n in (1, 2, 3) for keep in combinations(range(4), n)]


@pytest.mark.parametrize(("how", "n_kv_heads"), STORED)
def test_a_state_dict_goes_into_the_heads_it_is_of(how, n_kv_heads, tmp_path):
    x = torch.randn(2, 5, 16)
    for ours, theirs in product(KEPT, KEPT):
        if len(ours) != len(theirs):
            continue
        source, target = module_of(ours, n_kv_heads), module_of(theirs, n_kv_heads, seed=1)
        before = copy.deepcopy(target)
        state = reread(source.state_dict(), tmp_path, how)
        if ours == theirs:
            target.load_state_dict(state)
            assert_close(target(x), source(x))
            continue
        for strict in (True, False):
            with pytest.raises(InvalidValue, match=REFUSED):
                target.load_state_dict(state, strict=strict)
        assert_close(target(x), before(x), rtol=0, atol=0)


def test_the_whole_counts_too():
    """Heads 1, 2 and 3: of 4 in two groups the first group has one, of 6 in two groups it has
    two."""
    module, wide = module_of((1, 2, 3), 2), hp.MultiHeadAttention(24, 6, n_kv_heads=2, head_dim=4)
    wide.prune_heads_([1, 2, 3], policy="free")
    narrow = hp.MultiHeadAttention(24, 4, n_kv_heads=2, head_dim=4)
    narrow.prune_heads_([1, 2, 3], policy="free")
    assert {k: v.shape for k, v in wide.state_dict().items()} == {
        k: v.shape for k, v in narrow.state_dict().items()
    }
    with pytest.raises(InvalidValue, match=REFUSED):
        narrow.load_state_dict(wide.state_dict())
    assert (module.state_dict()[KEPT_HEADS] // 16).tolist() == [4, 2, 1, 2, 3]


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_older_state_dicts_load(n_kv_heads):
    """Those of cut modules do not say which heads they have, those of whole ones never do."""
    names = [f"W_{name}.{part}" for name in "qkvo" for part in ("weight", "bias")]
    assert list(module_of((0, 1, 2, 3), n_kv_heads).state_dict()) == names
    for keep in [*KEPT, (0, 1, 2, 3)]:
        source, target = module_of(keep, n_kv_heads), module_of(keep, n_kv_heads, seed=1)
        old = {k: v for k, v in source.state_dict().items() if k != KEPT_HEADS}
        assert (old.keys() == source.state_dict().keys()) == (len(keep) == 4)
        assert target.load_state_dict(old) == ([], [])
        assert_close(target.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_a_module_that_was_built_small_takes_what_means_the_same_in_it():
    x, source = torch.randn(2, 5, 16), module_of((1, 2, 3), 4)
    small = hp.MultiHeadAttention(16, 3, head_dim=4).eval()
    small.load_state_dict(source.state_dict())
    assert_close(small(x), source(x))
    words = REFUSED + r".*Cut the full-size model to the heads \["
    for uneven, heads in ((module_of((0, 1, 2), 2), 3), (module_of((1, 3), 4), 4)):
        other = hp.MultiHeadAttention(16, heads, head_dim=4)
        with pytest.raises(InvalidValue, match=words):
            other.load_state_dict(uneven.state_dict())
    for stored in (torch.zeros(()), torch.tensor([1]), torch.tensor([4, 2**40, 0]), 4):
        with pytest.raises(InvalidValue, match="must be a tensor"):
            source.load_state_dict({**source.state_dict(), KEPT_HEADS: stored})


def cut(heads):
    subject = subject_of("multi_head_attention")
    model = copy.deepcopy(subject.model)
    hp.prune_heads_(model, heads)
    return model, subject.batch


def test_fingerprints_are_those_of_before_modules_stored_their_heads():
    model, _ = cut({0: [0, 1]})
    sites = hp.find_sites(model)
    marks = [fingerprint(model, sites), weights_digest(model)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(hp.MultiHeadAttention, "_save_to_state_dict")
        assert [fingerprint(model, sites), weights_digest(model)] == marks


def test_tools_that_store_models_keep_the_heads(tmp_path):
    (source, batch), (other, _) = cut({0: [0, 1]}), cut({0: [2, 3]})
    file = str(tmp_path / "model.safetensors")
    safetensors.torch.save_model(source, file)
    load = [
        lambda model: model.load_state_dict(source.state_dict(), assign=True),
        lambda model: safetensors.torch.load_model(model, file),
        lambda model: set_model_state_dict(model, get_model_state_dict(source)),
    ]
    for one in load:
        same, _ = cut({0: [0, 1]})
        one(same)
        assert_close(same(**batch), source(**batch), rtol=0, atol=0)
        with pytest.raises(InvalidValue, match=r"the heads of layers\.0\.attention in the state"):
            one(copy.deepcopy(other))


CHANGES = {
    "half": lambda model: model.half(),
    "to dtype": lambda model: model.to(torch.bfloat16).double(),
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "given memory": lambda model: filled(
        copy.deepcopy(model).to("meta").to_empty(device="cpu"), model
    ),
    "assigned": lambda model: filled(copy.deepcopy(model).to("meta"), model, assign=True),
}
CHANGED = [(change, "mpnet") for change in CHANGES]
CHANGED += [(change, "multi_head_attention") for change in ("half", "given memory", "assigned")]


def filled(empty, source, **how):
    empty.load_state_dict(dict(weights_of(source)), **how)
    return empty


@pytest.mark.parametrize(("change", "layout"), [*CHANGED, ("half", "bert")])
def test_what_changes_a_model_keeps_the_heads(change, layout):
    subject = subject_of(layout)
    models = [subject.copy(), subject.copy()]
    for model, removed in zip(models, (0, -1), strict=True):
        hp.prune_(model, subject.without({s.name: s.units[removed] for s in subject.sites}))
    n_weights = sum(p.numel() for p in models[0].parameters())
    same, other = (CHANGES[change](model) for model in models)
    state = same.state_dict()
    stored = [v for k, v in state.items() if k.endswith(KEPT_HEADS)]
    assert (stored == []) == (layout == "bert"), "BERT's weights say all there is to compute"
    assert all(v.dtype == torch.int64 and not v.is_meta for v in stored)
    assert sum(p.numel() for p in same.parameters()) == n_weights
    same.load_state_dict(state)
    with pytest.raises(InvalidValue, match=REFUSED):
        other.load_state_dict(state)
    assert hp.find_sites(same)[0].heads != hp.find_sites(other)[0].heads


def test_accelerate_dispatches_a_stored_model(tmp_path):
    """It sets tensors one by one: a place for the heads must be there, and what came is looked at
    in the next verb."""
    (source, batch), (same, _), (other, _) = cut({0: [0, 1]}), cut({0: [0, 1]}), cut({0: [2, 3]})
    file = str(tmp_path / "model.safetensors")
    safetensors.torch.save_model(source, file)
    loaded = accelerate.load_checkpoint_and_dispatch(same, file, device_map={"": "cpu"})
    assert_close(loaded(**batch), source(**batch), rtol=0, atol=0)
    accelerate.load_checkpoint_and_dispatch(other, file, device_map={"": "cpu"})
    with pytest.raises(InvalidValue, match=r"the heads that came with the weights of layers\.0\."):
        hp.find_sites(other)


@pytest.mark.parametrize("buffers", [False, True])
def test_a_model_whose_buffers_are_offloaded_can_be_cut(buffers):
    (expected, batch), (model, _) = cut({0: [0, 1], 1: [0, 1]}), cut({})
    model = accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=buffers)
    for layer in (0, 1):
        hp.prune_heads_(model, {layer: [0, 1]})
    assert_close(model(**batch), expected(**batch), rtol=0, atol=0)


@pytest.mark.parametrize("decay", [0.9, 0.9999])
@torch.no_grad()
def test_an_average_of_models_keeps_the_heads(decay):
    """Averages of whole numbers are rounded down, a little at every step."""
    module = hp.MultiHeadAttention(36, 18, n_kv_heads=9)
    module.prune_heads_([0, 3, 5, 6, 7, 17], policy="free")
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=average, use_buffers=True)
    for _ in range(200):
        averaged.update_parameters(module)
    module.load_state_dict(averaged.module.state_dict())
    assert [site.heads for site in hp.find_sites(averaged.module)] == [(0, 3, 5, 6, 7, 17)]


def test_a_folder_holds_weights_alone(tmp_path):
    hp.save_pretrained(cut({0: [0, 1]})[0], tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert not any(KEPT_HEADS in name for name in stored)
