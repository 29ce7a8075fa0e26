"""No mixed devices, and few waits for the GPU: on a pretended one, for scorers, recoveries, cuts
and benchmarks.

How often a call may wait is stated here, in ``SCORERS``, ``RECOVERIES`` and ``OTHERS``, and it is
measured for a small case and for one with more batches, layers and heads: it must not grow with
them, but for what is stated. A scorer or recovery that is in no table is measured as
well, against ``USUAL``.

What Transformers and accelerate do themselves is counted apart: a model that is given a mask asks
once in every forward pass whether the mask hides anything.
"""

import copy
import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import headprune as hp
from headprune.bench.latency import compare_latency
from headprune.bench.quality import evaluate
from headprune.gating import HardConcrete, SubsetTopk
from headprune.model.running import to_device
from headprune.recovery import Finetune, Lstsq
from headprune.recovery import registry as recoveries
from headprune.scoring import ActivationNorm, Ggn, LeaveOneOut, Obs, Surgeon, Taylor, _gradients
from headprune.scoring import registry as scorers
from headprune.scoring._base import Scorer
from tests.pretended_cuda import CPU, CUDA, PretendedCuda
from tests.scripts import benchmark

_OTHERS_OWN = ("transformers", "accelerate")
_TOKENS = 30  # words of the tiny models
_EXAMPLES = 4  # in a batch

# ---------------------------------------------------------------- what is stated


@dataclass(frozen=True)
class Waits:
    """How often a call waits for the GPU.

    Args:
        per_call: Whatever the data and the model.
        per_batch: For every batch.
        per_layer: For every layer.
        at_most: Fewer are fine, too.
    """

    per_call: int
    per_batch: int = 0
    per_layer: int = 0
    at_most: bool = False

    def at(self, size):
        return self.per_call + self.per_batch * size.batches + self.per_layer * size.layers

    def allow(self, found, size):
        return found == self.at(size) or (self.at_most and found < self.at(size))


@dataclass(frozen=True)
class Size:
    """Of what is measured."""

    layers: int = 2
    heads: int = 4
    batches: int = 2


SIZES = {"small": Size(layers=1), "more of all": Size(layers=2, heads=6, batches=3)}

#: Of what is in no table: most wait for the fingerprint, for the model's own loss, which the
#: default one is compared with, for the first loss, for the pass's last losses, for the rows.
USUAL = Waits(6, at_most=True)

#: One wait of those that read slopes is for whether the loss couples examples, on the first batch.
SCORERS = {
    "activation_norm": Waits(3),
    "add_one_in": Waits(11),  # six of them in the proof, which is made once a call
    "attattr": Waits(10),
    # up to 3 plans here, each refitted twice as by lstsq, +ff; one once more without
    "auto": Waits(66, per_layer=24, at_most=True),
    "confidence": Waits(4),
    "entropy": Waits(4),
    "fluctuation": Waits(4),
    "ggn": Waits(5),
    # a batch is a block here: its slopes decide the gates of the next
    "hard_concrete": Waits(5, per_batch=1),
    "ladder": Waits(7, per_layer=8, at_most=True),  # a solve for every level
    "leave_one_out": Waits(11),
    "magnitude": Waits(2),
    "obs": Waits(3),
    "random": Waits(1),
    "shapley": Waits(17),  # of three passes, each by the losses of the one before
    "subset_topk": Waits(5, per_batch=1),
    "surgeon": Waits(5),
    "wanda": Waits(3),
}
#: First-order scorers.
SCORERS |= dict.fromkeys(
    ("attribution_patching", "fisher", "integrated_gradients", "taylor", "taylor2"), Waits(6)
)

#: Name: the recovery, how often it waits. Of the layer-wise ones a projection is a pass of its own,
#: after those before it were changed.
RECOVERIES = {
    "finetune": (Finetune(distill=0.5, distill_hidden=0.5), Waits(4)),
    "head_rescale": ("head_rescale", Waits(8, per_layer=2)),
    "lstsq": (Lstsq(ridge=0.3), Waits(8, per_layer=2)),
    "lstsq, by what the output feels": (
        Lstsq(ridge=0.3, token_weights="output"),
        Waits(12, per_layer=2),
    ),
    # two projections a layer
    "lstsq, a ridge by held-out error": (
        Lstsq(ridge=None, feed_forward=True),
        Waits(8, per_layer=4, at_most=True),
    ),
    "mean_fold": ("mean_fold", Waits(13)),
}
RECOVERIES |= {name: (name, USUAL) for name in recoveries.names() if name not in RECOVERIES}


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Case:
    """A model on the pretended GPU and its data, which lie in main memory as from a loader."""

    model: nn.Module
    batches: list[dict[str, Tensor]]
    size: Size
    folder: Path


def bert(size, spread=0.5, classes=3):
    """An encoder with slopes as large as a trained one's, which fresh weights of spread 0.02 do not
    have."""
    torch.manual_seed(0)
    config = BertConfig(**sizes(size), num_labels=classes, initializer_range=spread)
    return BertForSequenceClassification(config).eval()


def llama(size):
    """A decoder in which two query heads share a key/value head, so that units are of two heads."""
    torch.manual_seed(0)
    config = LlamaConfig(**sizes(size), num_key_value_heads=size.heads // 2)
    return LlamaForCausalLM(config).eval()


def sizes(size):
    own = {"hidden_size": 4 * size.heads, "num_attention_heads": size.heads}
    own |= {"num_hidden_layers": size.layers, "intermediate_size": 16}
    return {**own, "vocab_size": _TOKENS, "max_position_embeddings": 16}


def data(size, classes):
    """Batches with padding; for ``classes`` a label an example, else the tokens themselves."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(size.batches):
        ids = torch.randint(0, _TOKENS, (_EXAMPLES, 6), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 4:] = 0
        labels = torch.randint(0, 3, (_EXAMPLES,), generator=generator) if classes else ids
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def check(name, run, stated, folder, make=bert):
    """Runs a call in both sizes; returns what was seen: the GPU, and how often the model ran.

    Raises:
        AssertionError: devices are mixed, a copy to the GPU is waited for, or there are other waits
            than were stated.
    """
    seen = []
    for what, size in SIZES.items():
        forwards = []
        with PretendedCuda() as gpu:
            model = make(size).to("cuda")
            model.register_forward_pre_hook(lambda *_, noted=forwards: noted.append(1))
            case = Case(model, data(size, make is not llama), size, folder)
            gpu.forget()
            run(case)
        where, report = f"{name}, {what} {size}", gpu.report()
        assert not gpu.mismatches, f"{where}: mixed devices\n{report}"
        uploads = [event for event in gpu.uploads if event.package not in _OTHERS_OWN]
        assert not uploads, f"{where}: copies to the GPU that are waited for\n{report}"
        waits = sum(event.package not in _OTHERS_OWN for event in gpu.waits)
        more = f"{waits} waits, stated are {stated.at(size)}"
        assert stated.allow(waits, size), f"{where}: {more}\n{report}"
        seen.append((gpu, len(forwards)))
    return seen


def with_scorer(scorer):
    return lambda case: hp.score(case.model, case.batches, scorer, progress=False)


def small(name, size):
    """A registered scorer with settings that take little time."""
    scorer = scorers.resolve(name, Scorer, "scorer")[1]
    if name in ("hard_concrete", "subset_topk"):
        return replace(scorer, steps=size.batches, block=_EXAMPLES)  # a block a batch
    changes = {
        "attattr": {"steps": 2},
        "auto": {"candidates": ("taylor", "obs"), "random_draws": 1},
        "integrated_gradients": {"points": 2},
        "shapley": {"orders": 1, "truncation": 0.0, "step": 24},  # all heads in one step
    }
    return replace(scorer, **changes.get(name, {}))


# ---------------------------------------------------------------- the pretended GPU itself


def test_tensors_say_where_they_lie():
    with PretendedCuda() as gpu:
        here = torch.ones(3)
        there = here.to("cuda")
        assert (here.device, there.device, there.is_cuda, there.get_device()) == (CPU, CUDA, 1, 0)
        same = [there + 1, there[1:], there.to(torch.float64), copy.deepcopy(there)]
        same += [torch.zeros(2, device="cuda"), torch.zeros_like(there), there.new_zeros(2)]
        assert all(tensor.device == CUDA for tensor in same)
        assert there.cpu().device == torch.zeros_like(there, device="cpu").device == CPU
        model = nn.Linear(3, 2).to("cuda")
        model(there).sum().backward()
        assert model.weight.device == model.weight.grad.device == CUDA
        assert gpu.mismatches == []
    assert there.device == CPU  # no more pretence
    assert_close(there, here)


#: What runs, and how many waits, copies to the GPU and mixed devices are seen.
SEEN = [
    (lambda here, there: there.sum().item(), 1, 0, 0),
    (lambda here, there: 1 if there.sum() > 0 else 0, 1, 0, 0),
    (lambda here, there: there.tolist(), 1, 0, 0),
    (lambda here, there: there.cpu(), 1, 0, 0),
    (lambda here, there: here.copy_(there), 1, 0, 0),
    (lambda here, there: there[there > 0], 1, 0, 0),
    (lambda here, there: torch.equal(there, there), 1, 0, 0),
    (lambda here, there: there.repeat_interleave(there.long()), 1, 0, 0),
    (lambda here, there: torch.linalg.inv(there.diag()), 1, 0, 0),
    (lambda here, there: torch.cuda.synchronize(), 1, 0, 0),
    (lambda here, there: here.to("cuda"), 0, 1, 0),
    (lambda here, there: torch.tensor([1, 2], device="cuda"), 0, 1, 0),
    (lambda here, there: there[[0, 1]], 0, 1, 0),
    (lambda here, there: there.copy_(here), 0, 1, 0),
    (lambda here, there: here + there, 0, 0, 1),
    (lambda here, there: here[there.long()], 0, 0, 1),
    (lambda here, there: there.index_add(0, torch.arange(3), there.clone()), 0, 0, 1),
    (lambda here, there: there.numpy(), 0, 0, 1),
    (lambda here, there: there * torch.tensor(2.0), 0, 0, 0),
    (lambda here, there: there.__setitem__(there > 0, 0.0), 0, 0, 0),
    (lambda here, there: here.to("cuda", non_blocking=True) + there, 0, 0, 0),
    (lambda here, there: torch.linalg.cholesky_ex(there.diag()), 0, 0, 0),
]


@pytest.mark.parametrize(("run", "waits", "uploads", "mixed"), SEEN)
def test_waits_copies_and_mixed_devices_are_found_and_nothing_else(run, waits, uploads, mixed):
    with PretendedCuda() as gpu:
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        gpu.forget()
        run(here, there)
    found = (len(gpu.waits), len(gpu.uploads), len(gpu.mismatches))
    assert found == (waits, uploads, mixed), gpu.report()
    for event in (*gpu.waits, *gpu.mismatches):
        assert event.line.startswith("tests/unit/test_pretended_cuda.py:")
        assert event.package == "tests"


def test_a_mismatch_in_the_backward_pass_is_found():
    with PretendedCuda() as gpu:
        x = torch.ones(3, device="cuda", requires_grad=True)
        x.register_hook(lambda gradient: gradient * torch.ones(3))
        (x * 2).sum().backward()
    assert len(gpu.mismatches) == 1, gpu.report()


def test_numbers_are_those_of_the_cpu():
    size = Size()
    expected = hp.score(bert(size), data(size, True), "taylor", progress=False)
    with PretendedCuda():
        found = hp.score(bert(size).to("cuda"), data(size, True), "taylor", progress=False)
    assert found == expected


# ---------------------------------------------------------------- the package


@pytest.mark.parametrize("name", scorers.names())
def test_a_scorer_waits_as_often_as_is_stated(name, tmp_path):
    def run(case):
        hp.score(case.model, case.batches, small(name, case.size), progress=False)

    for gpu, forwards in check(name, run, SCORERS.get(name, USUAL), tmp_path):
        others = sum(event.package in _OTHERS_OWN for event in gpu.waits)
        assert others <= forwards, "Transformers asks once a pass whether a mask hides anything"


#: Settings in which a scorer goes another way, each with the model that it is for.
CONFIGURED = {
    "taylor of tokens": (Taylor(reduce="token"), bert, Waits(6)),
    "activation_norm of outputs": (ActivationNorm(of="output"), bert, Waits(3)),
    "leave_one_out with means": (LeaveOneOut(replacement="mean"), bert, Waits(14)),
    "leave_one_out with other examples": (LeaveOneOut(replacement="resample"), bert, Waits(14)),
    "leave_one_out, a pass for each": (LeaveOneOut(replay=False), bert, Waits(5)),
    "ggn of tokens": (Ggn(), llama, Waits(5)),
    "surgeon of tokens": (Surgeon(blocks=2), llama, Waits(5)),
    "surgeon of many classes": (Surgeon(), functools.partial(bert, classes=9), Waits(5)),
    "taylor of grouped queries": (Taylor(), llama, Waits(6)),
    "obs of grouped queries": (Obs(), llama, Waits(3)),
    "several": (["taylor", "fisher", "wanda", "activation_norm"], bert, Waits(9)),
    # two passes of the first batch, and one copy of the slopes of both
    "small slopes are looked at again": ("taylor", functools.partial(bert, spread=0.02), Waits(7)),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_settings_that_go_another_way(name, tmp_path):
    scorer, make, stated = CONFIGURED[name]
    check(name, with_scorer(scorer), stated, tmp_path, make)


def with_fewer_heads(model):
    """All heads but the first of every layer."""
    sites = hp.find_sites(model)
    return hp.HeadMask.from_keep(
        {s.name: s.heads[1:] for s in sites}, {s.name: s.n_query_heads for s in sites}
    )


@pytest.mark.parametrize("name", RECOVERIES)
def test_a_recovery_waits_as_often_as_is_stated(name, tmp_path):
    recovery, stated = RECOVERIES[name]

    def run(case):
        teacher = copy.deepcopy(case.model)
        hp.prune_(case.model, with_fewer_heads(case.model))
        hp.recover_(case.model, case.batches, recovery, teacher, progress=False)

    check(name, run, stated, tmp_path)


def gate(case):
    with torch.no_grad(), hp.gated(case.model, with_fewer_heads(case.model)):
        for batch in case.batches:
            case.model(**to_device(batch, CUDA))


def learn_gates(distribution, case):
    """Trains gates in a loop of one's own."""
    case.model.train()
    with hp.learned_gates(case.model, distribution()) as gates:
        optimizer = torch.optim.SGD(gates.parameters(), 0.1)
        for batch in case.batches:
            loss = case.model(**to_device(batch, CUDA)).loss + gates.penalty()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def save_and_load(case):
    hp.prune_(case.model, with_fewer_heads(case.model))
    hp.save_pretrained(case.model, case.folder / "small")
    hp.from_pretrained(case.folder / "small").to("cuda")


def prove_cut(case):
    hp.prune_(case.model, with_fewer_heads(case.model), to_device(case.batches[0], CUDA))


def compare_speed(case):
    small = copy.deepcopy(case.model)
    hp.prune_(small, with_fewer_heads(case.model))
    example = to_device(case.batches[0], CUDA)
    effort = {"seconds": 0, "warmup": 1, "min_rounds": 2, "max_rounds": 2}
    compare_latency(case.model, small, lambda *_: example, (_EXAMPLES,), (6,), **effort)


def ways_of(name, function, on_gpu=False):
    """Runs once each of the ways that a benchmark compares; ``on_gpu`` if it draws its batches
    there."""

    def run(case):
        batches = to_device(case.batches, CUDA) if on_gpu else case.batches
        for way in getattr(benchmark(name), function)(case.model, batches).values():
            way()

    return run


SOFT = functools.partial(HardConcrete, keep=0.5)
TOP = functools.partial(SubsetTopk, keep=0.5, steps=4)

#: What else runs on a GPU; a benchmark is one more entry.
OTHERS = {
    "prune_": (lambda case: hp.prune_(case.model, with_fewer_heads(case.model)), Waits(0)),
    "prune_ with its proof": (prove_cut, Waits(8)),
    "gated": (gate, Waits(0)),
    # a copy a tensor: together they would need all weights' memory once more
    "save and load": (save_and_load, Waits(10, per_layer=16)),
    "evaluate": (lambda case: evaluate(case.model, case.batches), Waits(4)),
    "compare_latency": (compare_speed, Waits(12)),  # the clock stops when the GPU is done
    "learned gates, hard_concrete": (functools.partial(learn_gates, SOFT), Waits(0)),
    # its threshold is found on the CPU, in a hundred small steps
    "learned gates, subset_topk": (functools.partial(learn_gates, TOP), Waits(1, per_batch=1)),
    # batches on the GPU are copied back for the digest of the data
    "benchmarks/scoring_cost.py, first order": (
        ways_of("scoring_cost", "first_order_ways", on_gpu=True),
        Waits(13, per_batch=2),
    ),
    "benchmarks/scoring_cost.py, throughput": (
        ways_of("scoring_cost", "throughput_ways"),
        Waits(6),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_waits(name, tmp_path):
    run, stated = OTHERS[name]
    check(name, run, stated, tmp_path)


# ---------------------------------------------------------------- the net holds


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        # a wait for each of two batches, in place of the one that brings all rows to the CPU
        (lambda rows: rows.to("cpu"), r"7 waits, stated are 6\n(.*\n)*.*copy to main memory"),
        (lambda rows: rows + torch.zeros(rows.shape), "mixed devices"),
    ],
)
def test_what_is_wrong_in_a_scorers_loop_is_found(spoil, words, monkeypatch, tmp_path):
    original = _gradients.loss_gradients
    monkeypatch.setattr(_gradients, "loss_gradients", lambda *a, **k: spoil(original(*a, **k)))
    with pytest.raises(AssertionError, match=rf"taylor, small .*: {words}"):
        check("taylor", with_scorer("taylor"), SCORERS["taylor"], tmp_path)
