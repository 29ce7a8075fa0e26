"""Laws on whatever Hypothesis draws: ragged plans, shapes, masks, values; and any sequence of verbs
on one model."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import headprune as hp
from headprune.core.codec import FrozenDict
from headprune.core.errors import InfeasibleBudget
from headprune.core.heads import HeadMask
from headprune.core.plan import Budget, PruningPlan, allowance
from headprune.core.record import RunRecord
from headprune.core.slabs import axis_size, kept_rows, rows_of, used_groups
from headprune.selection._api import select
from tests.laws.support import (
    CLOSE,
    EXACT,
    Subject,
    logits,
    picture,
    subject_of,
    without_float32_norms,
)
from tests.properties import MAPPINGS, TEXT, geometries, kept_units, often, quick, tiers
from tests.selection_problems import KINDS, LENGTH, make, site, unit_cost

# ---------------------------------------------------------------- stored values


def _stored() -> Any:
    @given(MAPPINGS, TEXT, st.lists(st.floats(), max_size=3))
    def test(data: dict[str, Any], text: str, numbers: list[float]) -> None:
        record = RunRecord(
            text,
            "done",
            text,
            text,
            metrics=FrozenDict({"all": [data, numbers], **data}),
            error=text,
        )
        text_form = record.to_json()
        again = RunRecord.from_json(text_form)
        assert again.to_json() == text_form
        assert repr(again) == repr(record)  # NaN is not equal to itself, and is spelt as itself
        assert again.digest == record.digest

    return test


test_a_value_comes_back_from_its_file, test_any_value_comes_back_from_its_file = tiers(
    _stored, 150, 5000
)


# ---------------------------------------------------------------- slabs

_PACKED = [
    ("query",),
    ("context",),
    ("key", "value"),
    ("query", "key", "value"),
    ("gated_query",),
    ("head",),
    ("kv_head",),
]


def _slabs() -> Any:
    @given(
        geometries(),
        st.sampled_from(_PACKED),
        st.sampled_from(["sequential", "grouped"]),
        st.data(),
    )
    def test(geometry: Any, units: tuple[str, ...], packing: str, data: Any) -> None:
        every = range(geometry.n_query_heads)
        first = data.draw(st.sets(st.sampled_from(every)), "kept first")
        second = data.draw(
            st.sets(st.sampled_from(sorted(first))) if first else st.just(set()), "kept of these"
        )
        size = axis_size(geometry, units)

        def rows(of: Any, heads: set[int]) -> list[int]:
            return kept_rows(of, units, packing, heads, used_groups(of, heads))

        assert rows(geometry, set(every)) == list(range(size))
        kept, after = rows(geometry, first), geometry.keep(first)
        assert kept == sorted(set(kept))
        assert set(kept) <= set(range(size))
        assert len(kept) == axis_size(after, units)
        places = {sorted(first).index(h) for h in second}
        assert [kept[i] for i in rows(after, places)] == rows(geometry, second), (
            "A, then B of what is left"
        )
        for unit in units:
            each = [
                rows_of(geometry, units, packing, unit, [h]) for h in range(geometry.count(unit))
            ]
            assert all(len(r) == geometry.width(unit) for r in each)
            joined = sorted(i for r in each for i in r)
            assert (
                joined
                == sorted(set(joined))
                == rows_of(geometry, units, packing, unit, range(geometry.count(unit)))
            )

    return test


test_rows_that_stay, test_any_rows_that_stay = tiers(_slabs, 150, 5000)


# ---------------------------------------------------------------- budgets


@st.composite
def problems(draw: Any) -> Any:
    """Scores over ragged sites with and without shared key/value heads, every unit with a price of
    its own."""
    sites = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        n_kv, share = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        groups = draw(st.sets(st.integers(0, n_kv - 1), min_size=1))
        heads = sorted(h for g in groups for h in range(g * share, (g + 1) * share))
        policy = draw(st.sampled_from(["group", "free"]))
        sites.append(
            site(name, n_kv * share, n_kv, heads, policy=policy, least=draw(st.integers(0, 1)))
        )
    values = [[draw(st.integers(-3, 3)) for _ in s.units] for s in sites]
    return make(
        sites, values, [[unit_cost(draw(st.integers(1, 5))) for _ in s.units] for s in sites]
    )


def _budgets() -> Any:
    selectors = st.sampled_from(["global_topk", "uniform", "knapsack"])

    @given(problems(), selectors, st.sampled_from(KINDS), st.floats(0.01, 1.0), st.integers(0, 3))
    def test(scores: Any, name: str, kind: str, share: float, min_heads: int) -> None:
        selector = {"global_topk": hp.selection.GlobalTopk, "uniform": hp.selection.Uniform}
        chosen = {**selector, "knapsack": hp.selection.Knapsack}[name](min_heads=min_heads)
        shared = any(s.policy == "free" and s.n_kv_heads < s.n_query_heads for s in scores.sites)
        assume(
            kind != "keep_kv" or not shared
        )  # no budget of a cache that heads do not shrink one by one
        budget = Budget(**{kind: share})
        try:
            plan = select(scores, budget, chosen)
        except InfeasibleBudget:
            return
        assert plan == select(scores, budget, chosen), "the same every time"

        def price(cost: Any) -> int:
            macs = cost.macs(LENGTH)
            return int(
                {"keep_params": cost.params, "keep_macs": macs, "keep_kv": cost.kv_bytes}[kind]
            )

        gone = [u for u in scores.units() if not set(u.heads) <= set(plan.mask.kept(u.name))]
        if kind == "keep_heads":
            assert plan.mask.n_kept <= allowance(share, scores.n_heads)
        else:
            total = price(scores.costs.total)
            assert total - sum(price(u.cost) for u in gone) <= allowance(share, total)
        for here in scores.sites:
            kept = set(plan.mask.kept(here.name))
            assert kept <= set(here.heads)
            assert all(kept.isdisjoint(unit) or kept.issuperset(unit) for unit in here.units), (
                "a unit is torn"
            )
            assert len(kept) >= min(max(min_heads, here.least), len(here.heads))
        assert plan.mask.n_kept >= 1

    return test


test_a_plan_meets_its_budget, test_any_plan_meets_its_budget = tiers(_budgets, 60, 3000)


# ---------------------------------------------------------------- our own attention


class Pair(nn.Module):
    """Two attentions of ours of one shape, the second reading the first."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.first, self.second = hp.MultiHeadAttention(**sizes), hp.MultiHeadAttention(**sizes)

    def forward(self, x: Tensor, **seen: Any) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x, **seen)), **seen)
        return found


@st.composite
def pairs(draw: Any) -> tuple[Pair, dict[str, Any], float]:
    """A pair, what it reads, and how far rounding may take it."""
    n_kv, share = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = {"query_size": draw(st.integers(1, 6)), "n_heads": n_kv * share, "n_kv_heads": n_kv}
    sizes |= {
        "head_dim": draw(st.integers(1, 4)),
        "value_dim": draw(st.integers(1, 4)),
        "bias": draw(st.booleans()),
    }
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    torch.manual_seed(draw(st.integers(0, 99)))
    model = Pair(**sizes, dtype=dtype).eval()
    n, length = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    batch: dict[str, Any] = {"x": torch.randn(n, length, sizes["query_size"], dtype=dtype)}
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


def _own() -> Any:
    @given(pairs(), st.data())
    def test(made: tuple[Pair, dict[str, Any], float], data: Any) -> None:
        model, batch, tolerance = made
        sites = hp.find_sites(model)
        a, b = (data.draw(kept_units(sites), name) for name in ("a", "b"))
        before = picture(model)
        with torch.no_grad(), hp.gated(model, a & b):
            expected = model(**batch)
        assert picture(model) == before
        _prune_in_turn(model, a, b, lambda m: m(**batch), expected, tolerance)
        with tempfile.TemporaryDirectory() as folder:
            small = copy.deepcopy(model)
            hp.prune_(small, a)
            hp.save_pretrained(small, folder)
            again = hp.from_pretrained(folder, model=copy.deepcopy(model))
            with torch.no_grad():
                assert_close(again(**batch), small(**batch), **EXACT)
        _same_bits(again, small)

    return test


def _prune_in_turn(
    model: nn.Module, a: HeadMask, b: HeadMask, run: Any, expected: Tensor, tolerance: float
) -> None:
    """Laws 3 and 5: gated = pruned, and A then B = A ∪ B, to the last bit."""
    at_once, in_turn = copy.deepcopy(model), copy.deepcopy(model)
    hp.prune_(at_once, a & b)
    hp.prune_(in_turn, a)
    hp.prune_(in_turn, b)
    _same_bits(in_turn, at_once)
    with torch.no_grad():
        assert_close(run(at_once), expected, rtol=tolerance, atol=tolerance)
    sites = hp.find_sites(at_once)
    assert [s.heads for s in sites] == [(a & b).kept(s.name) for s in sites]
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, at_once)]
    assert (sizes[1] < sizes[0]) == (len(a & b) < len(HeadMask.full(hp.find_sites(model))))


def _same_bits(got: nn.Module, expected: nn.Module) -> None:
    mine, theirs = got.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


test_our_attention, test_any_attention_of_ours = tiers(_own, 25, 1500)


# ---------------------------------------------------------------- models of Transformers

_BUILT: dict[str, Subject] = {}


def built(name: str) -> Subject:
    """A tiny model in fp64, built once; whoever cuts it cuts a copy."""
    if name not in _BUILT:
        _BUILT[name] = subject_of(name)
    return _BUILT[name]


def _padded(subject: Subject, left: bool, lengths: list[int]) -> dict[str, Any]:
    """Tokens with padding at one side."""
    ids = subject.batch["input_ids"]
    ids = ids[torch.arange(len(lengths)) % len(ids)]
    length = ids.shape[1]
    seen = torch.arange(length) < torch.tensor([min(n, length) for n in lengths])[:, None]
    return {"input_ids": ids, "attention_mask": (seen.flip(1) if left else seen).long()}


def _families() -> Any:
    names = st.sampled_from(["llama", "bert", "gpt2"])

    @given(names, st.booleans(), st.lists(st.integers(1, 8), min_size=1, max_size=3), st.data())
    def test(name: str, left: bool, lengths: list[int], data: Any) -> None:
        subject = built(name)
        batch = _padded(subject, left, lengths)
        a, b = (data.draw(kept_units(subject.sites), word) for word in ("a", "b"))
        before = picture(subject.model)
        with torch.no_grad(), hp.gated(subject.model, a & b):
            expected = _shown(subject.model, batch)
        assert picture(subject.model) == before
        _prune_in_turn(subject.model, a, b, lambda m: _shown(m, batch), expected, CLOSE["atol"])

    return test


def _shown(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The outputs at tokens that are no padding; BERT's are a row an example."""
    found = logits(model, batch)
    return found[batch["attention_mask"].bool()] if found.ndim == 3 else found


test_models_of_transformers, test_many_cuts_of_models_of_transformers = tiers(_families, 15, 600)


# ---------------------------------------------------------------- any sequence of verbs


class Verbs(RuleBasedStateMachine):
    """One model under every verb, beside the same model uncut with a mask over it: the two are
    always equal."""

    name = "bert"

    @initialize()
    def begin(self) -> None:
        subject = built(self.name)
        self.batch = subject.batch
        self.model = copy.deepcopy(subject.model)
        self.whole = copy.deepcopy(self.model)  # what the mask is laid over
        self.mask = HeadMask.full(subject.sites)
        self.plan: PruningPlan | None = None

    def _labelled(self) -> dict[str, Any]:
        ids, seen = self.batch["input_ids"], self.batch["attention_mask"]
        decoder = self.name == "llama"
        return {
            **self.batch,
            "labels": ids.masked_fill(seen == 0, -100) if decoder else torch.arange(len(ids)) % 2,
        }

    def _units(self, data: Any, least: int = 0) -> HeadMask:
        found: HeadMask = data.draw(kept_units(hp.find_sites(self.model), least))
        return found

    def _run(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            return logits(model, self.batch)

    @rule(data=st.data())
    def gate(self, data: Any) -> None:
        gates, before, shown = self._units(data), picture(self.model), self._run(self.model)
        with hp.gated(self.model, gates):
            inside = self._run(self.model)
        with hp.gated(self.whole, self.mask & gates):
            assert_close(inside, self._run(self.whole), **CLOSE)
        assert picture(self.model) == before
        assert_close(self._run(self.model), shown, **EXACT)

    @precondition(
        lambda self: len(self.mask)
    )  # a model without heads has nothing to score, and says so
    @rule(name=st.sampled_from(["magnitude", "taylor"]))
    def score(self, name: str) -> None:
        before, shown, batch = picture(self.model), self._run(self.model), self._labelled()
        scores = hp.score(self.model, None if name == "magnitude" else [batch], name)
        assert picture(self.model) == before
        assert_close(self._run(self.model), shown, **EXACT)
        assert [s.heads for s in scores.sites] == [self.mask.kept(s.name) for s in scores.sites]
        if name == "taylor":
            one_by_one = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(len(shown))]
            for other in (one_by_one, [_longer(batch)]):
                found = hp.score(self.model, other, name)
                assert_close(
                    torch.tensor(sum(found.values, ())),
                    torch.tensor(sum(scores.values, ())),
                    **CLOSE,
                )
        if sum(len(s.units) for s in scores.sites) > 1:
            chosen = (
                scores,
                Budget(keep_heads=scores.n_heads - 1),
                hp.selection.GlobalTopk(min_heads=0),
            )
            self.plan = hp.select(*chosen)
            assert self.plan == hp.select(*chosen), "the same every time"
            assert self.plan.mask.n_kept <= scores.n_heads - 1
            for site in scores.sites:
                kept = set(self.plan.mask.kept(site.name))
                assert all(kept.isdisjoint(unit) or kept.issuperset(unit) for unit in site.units), (
                    "a unit is torn"
                )

    @precondition(lambda self: len(self.mask))
    @rule(data=st.data())
    def close_a_head(self, data: Any) -> None:
        """Like a head whose output nobody reads; and it has an effect."""
        site = data.draw(st.sampled_from([s for s in hp.find_sites(self.model) if s.heads]))
        place, shown = data.draw(st.integers(0, len(site.heads) - 1)), self._run(self.model)
        gate = torch.ones(len(site.heads), dtype=torch.float64)
        gate[place] = 0.0
        with hp.gated(self.model, {site.name: gate}):
            closed = self._run(self.model)
        unread = copy.deepcopy(self.model)
        projection = unread.get_submodule(f"{site.name}.{built(self.name).layout.gate}")
        with torch.no_grad():
            projection.weight.narrow(1, place * site.value_dim, site.value_dim).zero_()  # type: ignore[operator, union-attr]
        assert_close(closed, self._run(unread), **CLOSE)
        assert (closed - shown).abs().max() > 1e-9

    @rule(data=st.data(), proven=st.booleans())
    def prune(self, data: Any, proven: bool) -> None:
        plan = self._units(data)
        note(str(plan))
        report = hp.prune_(self.model, plan, self.batch if proven else None)
        assert report.n_removed == len(self.mask) - len(self.mask & plan)
        self.mask = self.mask & plan

    @precondition(lambda self: self.plan is not None)
    @rule()
    def prune_by_the_plan(self) -> None:
        """A plan of some time ago: what has left since has left."""
        assert self.plan is not None
        hp.prune_(self.model, self.plan.mask)
        self.mask = self.mask & self.plan.mask
        self.plan = None

    @rule(data=st.data())
    def prune_nothing(self, data: Any) -> None:
        before = picture(self.model)
        report = hp.prune_(self.model, self.mask, self.batch)
        assert (report.n_removed, picture(self.model)) == (0, before)

    @rule(data=st.data())
    def compose(self, data: Any) -> None:
        a, b = (PruningPlan(self._units(data)) for _ in range(2))
        both, in_turn = (copy.deepcopy(self.model) for _ in range(2))
        hp.prune_(both, a.then(b))
        hp.prune_(in_turn, a)
        hp.prune_(in_turn, b)
        _same_bits(in_turn, both)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            hp.save_pretrained(self.model, Path(folder) / "model")
            again = without_float32_norms(hp.from_pretrained(Path(folder) / "model"))
        _same_bits(again, self.model)
        assert_close(self._run(again), self._run(self.model), **EXACT)
        self.model = again

    @rule(method=st.sampled_from(["mean_fold", "lstsq"]))
    def recover(self, method: str) -> None:
        """What is recovered is another model, so the comparison goes on with a copy of it."""
        if not len(self.mask):
            return
        hp.recover_(self.model, [self.batch], method, teacher=copy.deepcopy(self.whole))
        self.whole = copy.deepcopy(self.model)

    @invariant()
    def equals_the_gated_one(self) -> None:
        sites = hp.find_sites(self.model)
        assert [s.heads for s in sites] == [self.mask.kept(s.name) for s in sites]
        with hp.gated(self.whole, self.mask):
            expected = self._run(self.whole)
        assert_close(self._run(self.model), expected, **CLOSE)
        assert not self.model.training


class DecoderVerbs(Verbs):
    """The same of a decoder whose heads share keys and values."""

    name = "llama"


def _longer(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with two tokens of padding more."""

    def more(name: str, x: Tensor) -> Tensor:
        return (
            functional.pad(x, (0, 2), value=-100 if name == "labels" else 0) if x.ndim == 2 else x
        )

    return {name: more(name, x) for name, x in batch.items()}


@pytest.mark.parametrize("machine", [Verbs, DecoderVerbs])
def test_any_sequence_of_verbs_keeps_the_laws(machine: type[Verbs]) -> None:
    run_state_machine_as_test(machine, settings=quick(5, stateful_step_count=8))


@pytest.mark.long
@pytest.mark.parametrize("machine", [Verbs, DecoderVerbs])
def test_many_sequences_of_verbs_keep_the_laws(machine: type[Verbs]) -> None:
    run_state_machine_as_test(machine, settings=often(100, stateful_step_count=20))
