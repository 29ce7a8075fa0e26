"""Which projections a layer-wise refit takes, which it leaves and says so, and what it refuses half
way."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.layouts import registry
from headprune.model.cut import Undo
from headprune.model.padding import PaddingInfo
from headprune.recovery import Lstsq
from headprune.recovery._replaced import Replaced
from headprune.recovery._targets import Target
from headprune.recovery._taught import key_of


class Stack(nn.Module):
    """Attentions and feed-forwards that add to a stream, so many times over."""

    def __init__(self, feed_forward=True):
        super().__init__()
        self.attention = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(2 if feed_forward else 0))
        self.rounds = 1

    def forward(self, x):
        for _ in range(self.rounds if len(x) > 2 else 1):
            for number, attention in enumerate(self.attention):
                x = x + attention(x)
                for down in self.down[number : number + 1]:
                    x = x + down(x.relu())
        return x


def cut(teacher):
    model = copy.deepcopy(teacher)
    counts = {s.name: s.n_query_heads for s in hp.find_sites(model)}
    hp.prune_(model, hp.HeadMask.from_keep({"attention.0": [1]}, counts))
    return model


def batches():
    return [torch.randn(2, 6, 8), torch.randn(5, 6, 8)]


def test_attentions_without_a_feed_forward_are_named():
    teacher = Stack(feed_forward=False)
    report = hp.recover_(cut(teacher), batches(), Lstsq(feed_forward=True), teacher)
    must = "no plain linear layer that is added to the stream was found there"
    names = "attention.0.W_o, attention.1.W_o"
    assert report.notes == (f"No feed-forward refitted after {names}: {must}.",)


def test_feed_forwards_that_lost_neurons_are_refitted_as_sites():
    teacher, batch = registry.get("bert").tiny(0)
    sites = hp.find_sites(teacher, feed_forward=True)
    keep = {site.name: site.heads[: len(site.heads) // 2] for site in sites}
    model = copy.deepcopy(teacher)
    counts = {site.name: site.n_query_heads for site in sites}
    hp.prune_(model, hp.HeadMask.from_keep(keep, counts), sites=sites)

    def refit(sites):
        small = copy.deepcopy(model)
        return hp.recover_(small, [batch] * 2, Lstsq(feed_forward=True), teacher, sites=sites)

    everything = refit(hp.find_sites(model, feed_forward=True))
    assert everything.metrics["projections"] == len(sites)
    assert not any("Not refitted: " in note for note in everything.notes)
    assert not any("No feed-forward" in note for note in everything.notes)
    # Sites of attention alone miss them, and the report says so.
    attention = refit(hp.find_sites(model))
    (note,) = [note for note in attention.notes if "Neurons were removed" in note]
    assert "bert.encoder.layer.0.output.dense" in note
    assert note.endswith("Give sites=hp.find_sites(model, feed_forward=True).")


def tied(model, teacher):
    for one in (model, teacher):
        one.other = nn.Linear(8, 8)
        one.other.weight = one.down[0].weight


def with_a_buffer(model, teacher):
    model.down[0].register_buffer("scale", torch.ones(1))


def of_another_kind(model, teacher):
    teacher.down[0] = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (tied, "Not refitted: down.0 (is shared by ['down.0', 'other'])."),
        (with_a_buffer, "Not refitted: down.0 (is Linear with scale)."),
        (of_another_kind, ""),
    ],
)
def test_a_feed_forward_that_cannot_be_refitted_is_kept_and_named(change, words):
    teacher = Stack()
    model = cut(teacher)
    change(model, teacher)
    before = model.down[0].weight.detach().clone()
    report = hp.recover_(model, batches(), Lstsq(feed_forward=True), teacher)
    assert not words or words in report.notes
    assert list(report.metrics["errors"]) == ["attention.0.W_o", "attention.1.W_o", "down.1"]
    assert torch.equal(model.down[0].weight, before)


# --- what goes wrong half way


def test_models_that_run_differently_often_later_on_are_refused():
    teacher = Stack()
    model = cut(teacher)
    model.rounds = 2
    before = copy.deepcopy(model.state_dict())
    words = r"attention\.0\.W_o: .*every batch, got 2 runs, and 1 of the teacher's"
    with pytest.raises(UnsupportedModel, match=words):
        hp.recover_(model, batches(), "lstsq", teacher)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


ONES = torch.ones(2, 6, 8)


class Changing(list):
    def __init__(self, *times):
        super().__init__(times[0])
        self.times = iter(times)

    def __iter__(self):
        return iter(next(self.times))


FINITE = r"what model and teacher write at attention\.0\.W_o: must be finite"


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ([[ONES], []], "readable more than once, got a Changing whose batches were read before"),
        ([[ONES, ONES * torch.nan]], FINITE),
        ([[ONES], [ONES * torch.nan]], FINITE),
    ],
    ids=["nothing", "NaN", "NaN after the errors were measured"],
)
def test_a_loader_that_changes_is_refused_and_the_model_is_as_it_was(passes, words):
    teacher = Stack()
    model = cut(teacher)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidValue, match=words):
        hp.recover_(model, Changing(*passes), "lstsq", teacher)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_change_beyond_the_range_of_half_precision_is_refused():
    linear = nn.Linear(4, 6).half()
    before = linear.weight.detach().clone()
    undo = Undo()
    replaced = Replaced(nn.Sequential(linear), undo, adds_biases=False)
    change = torch.full((4, 6), 1e6, dtype=torch.float64)
    replaced.add_(Target("out", linear, linear), "weight", change)
    with pytest.raises(
        InvalidValue, match=r"out\.weight: must be within the range of torch\.float16"
    ):
        replaced.check()
    undo.restore()
    assert_close(linear.weight, before, rtol=0, atol=0)


# --- which tokens count, and which batch is which


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 4), [True, True, False, True, False, False]),
        ((6, 4), [True, True, False, True, False, False]),
        ((2, 3, 1, 4), [True, True, False, True, False, False]),
        ((3, 2, 4), [True, True, True, False, False, False]),
        ((5, 4), None),  # packed: no row is a token of a known place
    ],
)
def test_tokens_of_a_feed_forward_in_any_shape(shape, expected):
    linear, mask = nn.Linear(4, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    target, batch = Target("down", linear, linear), PaddingInfo({"attention_mask": mask})
    counted = target.counted(linear, torch.zeros(shape), batch)
    assert (None if counted is None else counted.tolist()) == expected


def test_batches_are_told_apart_by_all_they_hold():
    x, y = torch.ones(2), torch.zeros(2)
    different = [x, y, {"a": x}, {"b": x}, [x, y], [y, x], (x,), (x, "left")]
    different += [(x, "right"), (x, None), (x, 1), (x, 1.5)]
    keys = [key_of(b) for b in different]
    assert len(set(keys)) == len(different)
    assert keys == [key_of(copy.deepcopy(b)) for b in different]
    assert key_of((x, object())) is None
