"""Wrappers that keep parameters of their own: a cut inside of one is refused, with the order that
works."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.recovery import Finetune, Lstsq, MeanFold
from headprune.run.gradual import prune_gradually_
from tests.laws.support import unchanged

ORDER = "Unwrap it first"


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def attention(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(hp.MultiHeadAttention(8, 4, bias=bias), nn.Linear(8, 8))


def square(model, batch):
    return model(batch).square().mean((1, 2))


X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class DeepSpeedEngine(nn.Module):
    """Stands for theirs, which flattens parameters; the package is not installed."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


WRAPPED = {
    "ddp": DistributedDataParallel,
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "a part": lambda model: nn.Sequential(DistributedDataParallel(model), nn.Linear(8, 8)),
    "deepspeed": DeepSpeedEngine,
}


def gradually(model):
    settings = Finetune(steps=1)
    more = {"stages": 1, "finetune": settings, "scorer": "magnitude", "loss": square}
    return prune_gradually_(model, [X], hp.Budget(keep_heads=2), **more)


def masked(model):
    counts = {s.name: s.n_query_heads for s in hp.find_sites(model)}
    return hp.prune_(model, hp.HeadMask.from_keep({name: [0, 2] for name in counts}, counts))


def listed(model):
    return hp.prune_heads_(model, {0: [1]})


CASES = [(wrapped, masked) for wrapped in WRAPPED] + [("ddp", listed), ("deepspeed", gradually)]


@pytest.mark.parametrize(("wrapped", "cut"), CASES)
def test_a_cut_inside_of_a_wrapper_is_refused(wrapped, cut, group):
    model = WRAPPED[wrapped](attention())
    words = f"cut before it is wrapped, got .*inside of .*{ORDER}"
    with unchanged(model), pytest.raises(UnsupportedModel, match=words):
        cut(model)


def test_fsdp_is_refused(group):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    with pytest.raises(UnsupportedModel, match="before fully_shard"):
        listed(fully_shard(attention(), mesh=mesh))
    cpu = torch.device("cpu")
    with pytest.warns(UserWarning, match="NO_SHARD"):
        older = FullyShardedDataParallel(attention(), device_id=cpu, use_orig_params=True)
    with pytest.raises(UnsupportedModel):
        listed(older)


def test_scores_gates_and_empty_cuts_of_a_wrapped_model(group):
    plain, wrapped = attention(), DistributedDataParallel(attention())
    scores = [hp.score(model, [X], "taylor", loss=square) for model in (plain, wrapped)]
    assert scores[0].values == scores[1].values
    mask = hp.HeadMask.from_keep({"module.0": [0, 2]}, {"module.0": 4})
    with hp.gated(wrapped, mask):
        assert not torch.equal(wrapped(X), plain(X))
    report = hp.prune_(wrapped, hp.HeadMask.full(hp.find_sites(wrapped)))
    assert report.n_removed == 0
    both = nn.Sequential(attention()[0], wrapped)  # what is outside of the wrapper can be cut
    hp.prune_heads_(both, {0: [1]})
    assert both[0].heads == (0, 2, 3)


def test_the_order_that_works(group):
    """Unwrap, cut, wrap: gradients of the new parameters are averaged; the old wrapper refuses to
    train, another one goes on."""
    old, other = DistributedDataParallel(attention()), DistributedDataParallel(attention())
    old(X).sum().backward()
    model = old.module
    listed(model)
    other(X).sum().backward()
    with torch.no_grad():
        assert_close(old(X), model(X))
    with pytest.raises(
        UnsupportedModel, match=r"DistributedDataParallel: must be made after .* was"
    ):
        old(X)
    new = DistributedDataParallel(model)
    seen = []

    def averaged(state, bucket):
        seen.extend(p.numel() for p in bucket.parameters())
        work = distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    new.register_comm_hook(None, averaged)
    new(X).sum().backward()
    assert sorted(seen) == sorted(p.numel() for p in model.parameters())


def test_a_cut_that_fails_leaves_the_wrapper_as_it_was(group, monkeypatch):
    wrapper = DistributedDataParallel(attention())
    monkeypatch.setattr("headprune.surgery.prune.compare", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hp.prune_heads_(wrapper.module, {0: [1]}, example=X)
    wrapper(X).sum().backward()


@pytest.mark.parametrize(
    ("method", "bias"), [(MeanFold(), True), (Lstsq(), True), (Lstsq(), False)]
)
def test_recoveries_add_no_bias_inside_of_a_wrapper(method, bias, group):
    """What changes numbers in place is right; a new parameter would not be averaged."""
    teacher = attention(bias)
    cut = copy.deepcopy(teacher)
    listed(cut)
    plain = copy.deepcopy(cut)
    hp.recover_(plain, [X], method, teacher)
    wrapped, original = DistributedDataParallel(cut), DistributedDataParallel(teacher)
    if bias:
        hp.recover_(wrapped, [X], method, original)
        assert_close(wrapped.module.state_dict(), plain.state_dict(), rtol=0, atol=0)
        return
    with pytest.raises(UnsupportedModel, match=f"given new biases before it is wrapped.*{ORDER}"):
        hp.recover_(wrapped, [X], method, original)


def test_adapters_are_not_put_inside_of_a_wrapper(group):
    settings = Finetune(steps=1, lora_rank=2, lora_targets=("W_q",))
    with pytest.raises(UnsupportedModel, match=f"given adapters before it is wrapped.*{ORDER}"):
        hp.recover_(DistributedDataParallel(attention()), [X], settings, loss=square)


def test_data_parallel_and_compiled_models_can_be_cut():
    """They look at the parameters that are there in every call."""
    expected = attention()
    hp.prune_heads_(expected, {0: [1]})
    for wrap in (nn.DataParallel, lambda model: torch.compile(model, backend="eager")):
        model = wrap(attention())
        model(X).sum().backward()
        hp.prune_heads_(model, {0: [1]})
        assert_close(model(X), expected(X))
        model(X).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
