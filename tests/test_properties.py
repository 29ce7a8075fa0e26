"""Laws on whatever Hypothesis draws: ragged plans, shapes, masks, values; and any sequence of verbs
on one model."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import headprune as hp
from headprune.core.codec import FrozenDict
from headprune.core.heads import HeadMask
from headprune.core.plan import Budget
from headprune.core.record import RunRecord
from headprune.core.slabs import axis_size, kept_rows, rows_of, used_groups
from tests.laws.support import CLOSE, EXACT, logits, subject_of, unchanged, without_float32_norms
from tests.properties import MAPPINGS, TEXT, geometries, kept_units, often, quick, tiers

# ---------------------------------------------------------------- stored values


def _stored():
    @given(MAPPINGS, TEXT, st.lists(st.floats(), max_size=3))
    def test(data, text, numbers):
        metrics = FrozenDict({"all": [data, numbers], **data})
        record = RunRecord(text, "done", text, text, metrics=metrics, error=text)
        written = record.to_json()
        again = RunRecord.from_json(written)
        assert again.to_json() == written
        assert repr(again) == repr(record)  # NaN is not equal to itself, and is spelt as itself
        assert again.digest == record.digest

    return test


test_a_value_comes_back_from_its_file, test_any_value_comes_back_from_its_file = tiers(
    _stored, 150, 5000
)


# ---------------------------------------------------------------- slabs

_PACKED = [
    *(("query",), ("context",), ("gated_query",), ("head",), ("kv_head",)),
    *(("key", "value"), ("query", "key", "value")),
]


def _slabs():
    packings = st.sampled_from(["sequential", "grouped"])

    @given(geometries(), st.sampled_from(_PACKED), packings, st.data())
    def test(geometry, units, packing, data):
        every = range(geometry.n_query_heads)
        first = data.draw(st.sets(st.sampled_from(every)), "kept first")
        kept_of_these = st.sets(st.sampled_from(sorted(first))) if first else st.just(set())
        second = data.draw(kept_of_these, "kept of these")
        size = axis_size(geometry, units)

        def rows(of, heads):
            return kept_rows(of, units, packing, heads, used_groups(of, heads))

        assert rows(geometry, set(every)) == list(range(size))
        kept, after = rows(geometry, first), geometry.keep(first)
        assert kept == sorted(set(kept))
        assert set(kept) <= set(range(size))
        assert len(kept) == axis_size(after, units)
        places = {sorted(first).index(h) for h in second}
        in_turn = [kept[i] for i in rows(after, places)]
        assert in_turn == rows(geometry, second), "A, then B of the heads that A keeps"
        for unit in units:
            n = geometry.count(unit)
            each = [rows_of(geometry, units, packing, unit, [h]) for h in range(n)]
            assert all(len(r) == geometry.width(unit) for r in each)
            joined = sorted(i for r in each for i in r)
            assert len(joined) == len(set(joined))
            assert joined == rows_of(geometry, units, packing, unit, range(n))

    return test


test_rows_that_are_kept, test_any_rows_that_are_kept = tiers(_slabs, 150, 5000)


# ---------------------------------------------------------------- our own attention


class Pair(nn.Module):
    """Two attentions of ours of one shape, the second reading the first."""

    def __init__(self, **sizes):
        super().__init__()
        self.first, self.second = hp.MultiHeadAttention(**sizes), hp.MultiHeadAttention(**sizes)

    def forward(self, x, **seen):
        return self.second(torch.tanh(self.first(x, **seen)), **seen)


@st.composite
def pairs(draw):
    """A pair, what it reads, and how far rounding may take it."""
    n_kv, share = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = {"query_size": draw(st.integers(1, 6)), "n_heads": n_kv * share, "n_kv_heads": n_kv}
    sizes |= {name: draw(st.integers(1, 4)) for name in ("head_dim", "value_dim")}
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    torch.manual_seed(draw(st.integers(0, 99)))
    model = Pair(**sizes, bias=draw(st.booleans()), dtype=dtype).eval()
    n, length = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    batch = {"x": torch.randn(n, length, sizes["query_size"], dtype=dtype)}
    batch["causal"] = draw(st.booleans())
    match draw(st.sampled_from(["whole", "right", "left", "ragged"])):
        case "right":
            batch["valid_lens"] = torch.tensor([draw(st.integers(0, length)) for _ in range(n)])
        case "left":
            starts = torch.tensor([draw(st.integers(0, length - 1)) for _ in range(n)])
            batch["mask"] = (torch.arange(length) >= starts[:, None])[:, None, None, :]
        case "ragged":
            batch["mask"] = torch.rand(n, 1, length, length) < 0.6
    return model, batch, 1e-10 if dtype == torch.float64 else 1e-4


def check_cuts(model, data, run, tolerance):
    """Laws 1, 3 and 5 of two plans: gates leave no trace, gated = pruned, and A then B = A ∪ B, to
    the last bit. Returns the cut model."""
    sites = hp.find_sites(model)
    a, b = (data.draw(kept_units(sites), name) for name in ("a", "b"))
    with unchanged(model), torch.no_grad(), hp.gated(model, a & b):
        expected = run(model)
    at_once, in_turn = copy.deepcopy(model), copy.deepcopy(model)
    hp.prune_(at_once, a & b)
    hp.prune_(in_turn, a)
    hp.prune_(in_turn, b)
    same_bits(in_turn, at_once)
    with torch.no_grad():
        assert_close(run(at_once), expected, rtol=tolerance, atol=tolerance)
    assert [s.heads for s in hp.find_sites(at_once)] == [(a & b).kept(s.name) for s in sites]
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, at_once)]
    assert (sizes[1] < sizes[0]) == (len(a & b) < len(HeadMask.full(sites)))
    return at_once


def same_bits(got, expected):
    assert_close(got.state_dict(), expected.state_dict(), **EXACT)


def _own():
    @given(pairs(), st.data())
    def test(made, data):
        model, batch, tolerance = made
        small = check_cuts(model, data, lambda m: m(**batch), tolerance)
        with tempfile.TemporaryDirectory() as folder:
            hp.save_pretrained(small, folder)
            again = hp.from_pretrained(folder, model=copy.deepcopy(model))
        with torch.no_grad():
            assert_close(again(**batch), small(**batch), **EXACT)
        same_bits(again, small)

    return test


test_our_attention, test_any_attention_of_ours = tiers(_own, 15, 1500)


# ---------------------------------------------------------------- any sequence of verbs

_BUILT = {}


def built(name):
    """A tiny model in fp64, built once; whoever cuts it cuts a copy."""
    if name not in _BUILT:
        _BUILT[name] = subject_of(name)
    return _BUILT[name]


class Verbs(RuleBasedStateMachine):
    """One model under every verb, beside the same model uncut with a mask over it: the two are
    always equal."""

    name = "bert"

    @initialize()
    def begin(self):
        subject = built(self.name)
        self.batch = subject.batch
        self.model = copy.deepcopy(subject.model)
        self.whole = copy.deepcopy(self.model)  # what the mask is laid over
        self.mask = HeadMask.full(subject.sites)
        self.plan = None

    def _labelled(self):
        ids, seen = self.batch["input_ids"], self.batch["attention_mask"]
        of_tokens = self.name == "llama"
        labels = ids.masked_fill(seen == 0, -100) if of_tokens else torch.arange(len(ids)) % 2
        return {**self.batch, "labels": labels}

    def _units(self, data):
        return data.draw(kept_units(hp.find_sites(self.model)))

    def _run(self, model):
        with torch.no_grad():
            return logits(model, self.batch)

    @rule(data=st.data())
    def gate(self, data):
        gates, shown = self._units(data), self._run(self.model)
        with unchanged(self.model), hp.gated(self.model, gates):
            inside = self._run(self.model)
        with hp.gated(self.whole, self.mask & gates):
            assert_close(inside, self._run(self.whole), **CLOSE)
        assert_close(self._run(self.model), shown, **EXACT)

    # A model without heads has nothing to score, and says so.
    @precondition(lambda self: len(self.mask))
    @rule(name=st.sampled_from(["magnitude", "taylor"]))
    def score(self, name):
        shown, batch = self._run(self.model), self._labelled()
        with unchanged(self.model):
            scores = hp.score(self.model, None if name == "magnitude" else [batch], name)
        assert_close(self._run(self.model), shown, **EXACT)
        assert [s.heads for s in scores.sites] == [self.mask.kept(s.name) for s in scores.sites]
        if name == "taylor":
            one_by_one = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(len(shown))]
            for other in (one_by_one, [_longer(batch)]):
                found = hp.score(self.model, other, name)
                assert_close(list(map(list, found.values)), list(map(list, scores.values)), **CLOSE)
        if sum(len(s.units) for s in scores.sites) > 1:
            budget = Budget(keep_heads=scores.n_heads - 1)
            self.plan = hp.select(scores, budget, hp.selection.GlobalTopk(min_heads=0))
            assert self.plan.mask.n_kept <= scores.n_heads - 1

    @rule(data=st.data(), proven=st.booleans())
    def prune(self, data, proven):
        plan = self._units(data)
        note(str(plan))
        report = hp.prune_(self.model, plan, self.batch if proven else None)
        assert report.n_removed == len(self.mask) - len(self.mask & plan)
        self.mask = self.mask & plan

    @precondition(lambda self: self.plan is not None)
    @rule()
    def prune_by_the_plan(self):
        """A plan of some time ago: heads may have been removed since."""
        hp.prune_(self.model, self.plan.mask)
        self.mask = self.mask & self.plan.mask
        self.plan = None

    @rule()
    def prune_nothing(self):
        with unchanged(self.model):
            assert hp.prune_(self.model, self.mask, self.batch).n_removed == 0

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            hp.save_pretrained(self.model, Path(folder) / "model")
            again = without_float32_norms(hp.from_pretrained(Path(folder) / "model"))
        same_bits(again, self.model)
        assert_close(self._run(again), self._run(self.model), **EXACT)
        self.model = again

    @precondition(lambda self: len(self.mask))
    @rule(method=st.sampled_from(["mean_fold", "lstsq"]))
    def recover(self, method):
        """What is recovered is another model, so the comparison goes on with a copy of it."""
        hp.recover_(self.model, [self.batch], method, teacher=copy.deepcopy(self.whole))
        self.whole = copy.deepcopy(self.model)

    @invariant()
    def equals_the_gated_one(self):
        sites = hp.find_sites(self.model)
        assert [s.heads for s in sites] == [self.mask.kept(s.name) for s in sites]
        with hp.gated(self.whole, self.mask):
            expected = self._run(self.whole)
        assert_close(self._run(self.model), expected, **CLOSE)
        assert not self.model.training


class DecoderVerbs(Verbs):
    """The same of a decoder whose heads share keys and values."""

    name = "llama"


def _longer(batch):
    """The batch with two tokens of padding more."""
    longer = {}
    for name, x in batch.items():
        value = -100 if name == "labels" else 0
        longer[name] = functional.pad(x, (0, 2), value=value) if x.ndim == 2 else x
    return longer


@pytest.mark.parametrize("machine", [Verbs, DecoderVerbs])
def test_any_sequence_of_verbs_keeps_the_laws(machine):
    run_state_machine_as_test(machine, settings=quick(4, stateful_step_count=8))


@pytest.mark.long
@pytest.mark.parametrize("machine", [Verbs, DecoderVerbs])
def test_many_sequences_of_verbs_keep_the_laws(machine):
    run_state_machine_as_test(machine, settings=often(100, stateful_step_count=20))
