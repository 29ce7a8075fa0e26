"""Losses of many gate settings: equal to a pass for each, for every family, and at a fraction of
the work."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.gating.candidates import CandidateLosses
from headprune.gating.tape import CannotReplay, Tape
from headprune.layouts import registry
from headprune.model.double import Doubled
from headprune.model.running import batch_size, call, outputs
from headprune.model.sites import bind
from tests.laws.support import Subject, family_subject, picture

FAMILIES = [
    (layout, family) for layout in registry.names() for family, _ in registry.get(layout).families
]

#: Whose passes cannot be played back: examples see each other, or the model takes only the batch
#: whose lengths it has.
WHOLE_PASSES = {"clip", "siglip", "d2l", "annotated transformer", "labml"}


def loss(model: nn.Module, batch: Any) -> Tensor:
    size = batch_size(batch)
    with Doubled():
        found = outputs(call(model, batch))
    found = [t for t in found if t.ndim and t.shape[0] == size]
    return torch.stack([t.reshape(size, -1).square().mean(1) for t in found]).sum(0)


def settings_of(subject: Subject) -> Tensor:
    """Every unit alone closed, two random settings, and one that changes nothing."""
    heads = [(s.name, h) for s in subject.sites for h in s.heads]
    units = [{(s.name, h) for h in unit} for s in subject.sites for unit in s.units]
    rows = [[float(head not in unit) for head in heads] for unit in units]
    random = torch.rand(
        2, len(heads), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return torch.cat([torch.tensor(rows, dtype=torch.float64), random, torch.ones_like(random[:1])])


def gated_losses(subject: Subject, settings: Tensor) -> Tensor:
    """What ``gated`` says, one setting after another."""
    found = []
    for row in settings:
        parts = row.split([len(s.heads) for s in subject.sites])
        gates = {s.name: part for s, part in zip(subject.sites, parts, strict=True)}
        with hp.gated(subject.model, gates, subject.sites):
            found.append(loss(subject.model, subject.batch))
    return torch.stack(found)


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("layout", "family"), FAMILIES, ids=[family for _, family in FAMILIES])
def test_equals_gated_passes_and_leaves_no_trace(layout: str, family: str) -> None:
    subject = family_subject(layout, family)
    loss(subject.model, subject.batch)  # Transformers installs hooks of its own in a first pass
    before = picture(subject.model)
    settings = settings_of(subject)
    candidates = CandidateLosses(subject.model, bind(subject.model, subject.sites), loss)
    got, base = candidates(subject.batch, settings)
    assert picture(subject.model) == before
    assert_close(got, gated_losses(subject, settings), rtol=1e-10, atol=1e-10)
    assert torch.equal(got[-1], base)
    assert bool(candidates.notes) == (family in WHOLE_PASSES), candidates.notes


@pytest.mark.parametrize(
    ("layout", "family"), [("bert", "bert"), ("llama", "llama"), ("t5", "t5"), ("gpt2", "gpt2")]
)
def test_any_base_and_any_memory(layout: str, family: str) -> None:
    subject = family_subject(layout, family)
    settings = settings_of(subject)
    bound = bind(subject.model, subject.sites)
    base = settings[0] * 0.5
    expected = gated_losses(subject, settings)
    for max_bytes in (1, 2**16, 2**30):
        candidates = CandidateLosses(subject.model, bound, loss, max_bytes=max_bytes)
        got, start = candidates(subject.batch, settings, base)
        assert_close(got, expected, rtol=1e-10, atol=1e-10)
        assert_close(start, gated_losses(subject, base[None])[0], rtol=1e-10, atol=1e-10)
        assert candidates.notes == ()


def test_what_no_gate_changes_runs_once_and_settings_share_passes() -> None:
    subject = family_subject("bert", "bert")
    layers = subject.model.bert.encoder.layer  # type: ignore[union-attr]
    rows: dict[int, int] = dict.fromkeys(range(len(layers)), 0)
    settings = settings_of(subject)[:-3]
    bound = bind(subject.model, subject.sites)
    candidates = CandidateLosses(subject.model, bound, loss)
    candidates(subject.batch, settings)  # with its proof
    for i, layer in enumerate(layers):
        layer.intermediate.register_forward_hook(
            lambda m, a, out, i=i: rows.__setitem__(i, rows[i] + out.shape[0])  # type: ignore[misc]
        )
    candidates(subject.batch, settings)
    size, n_heads = batch_size(subject.batch), len(subject.sites[0].heads)
    assert rows == {i: size * (1 + n_heads * (i + 1)) for i in range(len(layers))}


def test_a_model_whose_calls_depend_on_the_batch_size_has_whole_passes_and_a_note() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attentions = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(3))
            self.scale = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            for attention in self.attentions:
                for _ in range(len(x) // 2):  # more calls for more examples
                    x = self.scale(x)
                x = x + attention(x)
            return x

    torch.manual_seed(0)
    model = Counting().double()
    assert (
        "as passes could not be played back"
        in held(model, [{"x": torch.randn(5, 3, 8, dtype=torch.float64)}])[0]
    )


class Split(nn.Module):
    """What comes after a first attention depends on which examples, or how many, there are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two = (Block() for _ in range(2))
        self.how, self.passes = how, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if self.how == "longer" and len(x) > 2:
            return self.two(torch.cat([x, x[:1]]))[: len(x)]
        if self.how == "sums":  # the same examples, but not a row an example
            self.two.feed(torch.arange(8.0).double().expand(len(x) + 1, 1, 8))
        return self.two(x)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "longer",
            (
                "a recorded tensor: must be longer on one axis for more examples, got (2, 3, 8) and"
                " (5, 3, 8)"
            ),
        ),
        (
            "sums",
            (
                "a recorded tensor: must be longer on one axis for more examples, got (3, 1, 8) and"
                " (5, 1, 8)"
            ),
        ),
    ],
)
def test_outputs_that_have_no_row_an_example_are_told(how: str, words: str) -> None:
    torch.manual_seed(0)
    (note,) = held(Split(how).double(), [{"x": torch.randn(4, 3, 8, dtype=torch.float64)}])
    assert "as passes could not be played back" in note
    assert words in note


def test_an_input_changed_in_place_is_not_confused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 8)
            self.attentions = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            x[:, 0] = 0
            for attention in self.attentions:
                x += attention(x)
                x *= 0.9
            return x

    torch.manual_seed(0)
    model = InPlace().double()
    assert held(model, [{"x": torch.randn(4, 3, 8, dtype=torch.float64)}]) == ()


def test_an_exception_in_a_pass_leaves_no_trace() -> None:
    subject = family_subject("llama", "llama")
    loss(subject.model, subject.batch)
    before = picture(subject.model)
    calls = []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return loss(model, batch)

    candidates = CandidateLosses(subject.model, bind(subject.model, subject.sites), failing)
    with pytest.raises(KeyboardInterrupt):
        candidates(subject.batch, settings_of(subject))
    assert picture(subject.model) == before


def test_a_cut_model_is_the_same_as_its_gated_original() -> None:
    subject = family_subject("llama", "llama")
    mask = hp.HeadMask.from_keep(
        {s.name: s.units[0] + s.units[2] for s in subject.sites},
        {s.name: s.n_query_heads for s in subject.sites},
    )
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask, sites=subject.sites)
    sites = hp.find_sites(small)
    n_heads = sum(len(s.heads) for s in sites)
    settings = torch.ones(n_heads, n_heads, dtype=torch.float64) - torch.eye(
        n_heads, dtype=torch.float64
    )
    cut = CandidateLosses(small, bind(small, sites), loss)(subject.batch, settings)[0]
    index = [
        i
        for i, (s, h) in enumerate((s, h) for s in subject.sites for h in s.heads)
        if h in mask.kept(s.name)
    ]
    wide = torch.zeros(n_heads, sum(len(s.heads) for s in subject.sites), dtype=torch.float64)
    wide[:, index] = settings
    full = CandidateLosses(subject.model, bind(subject.model, subject.sites), loss)(
        subject.batch, wide
    )[0]
    assert_close(cut, full, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- what would be wrong if nobody
# looked


class Block(nn.Module):
    """Attention, and whatever a test puts behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = hp.MultiHeadAttention(8, 4)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed(x)


class Net(nn.Module):
    def __init__(self, n_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(n_layers))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        found = self.out(x.mean(1))
        return found if weights is None else found * weights.sum()


def net(n_layers: int = 4) -> Any:
    torch.manual_seed(0)
    return Net(n_layers).double().eval()


def inputs(size: int, tokens: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, tokens, 8, generator=generator, dtype=torch.float64)}


def held(model: nn.Module, batches: list[dict[str, Any]], **options: Any) -> tuple[str, ...]:
    """Asserts that all batches get the losses of gated passes; returns the notes."""
    sites = hp.find_sites(model)
    candidates = CandidateLosses(model, bind(model, sites), loss, **options)
    for number, batch in enumerate(batches):
        subject = Subject(registry.get("multi_head_attention"), model, batch, sites)
        settings = settings_of(subject)
        got, _ = candidates(batch, settings, number=number)
        assert_close(got, gated_losses(subject, settings), rtol=1e-10, atol=1e-10)
    return candidates.notes


class Rounding(nn.Linear):
    """A projection that rounds its inputs, as one that was trained for quantisation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 8).round() / 8)


def test_a_projection_in_the_middle_that_is_not_linear() -> None:
    model = net()
    model.layers[1].attention.W_o.__class__ = Rounding
    assert held(model, [inputs(3)]) == ()


def test_a_projection_with_a_hook_of_the_users() -> None:
    model = net()
    model.layers[2].attention.W_o.register_forward_hook(lambda m, args, out: out.tanh())
    assert held(model, [{**inputs(3), "weights": None}]) == ()


def test_passes_that_are_not_the_recorded_one_are_refused() -> None:
    model, x = net(), inputs(3)["x"]
    tape = Tape(model, bind(model))

    def call(site: int, original: Any, args: Any, kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def play(run: Any) -> Any:
        return tape.play(run, 1, lambda gate: gate.output, call, lambda key, tensor: tensor)

    recorded = tape.record(lambda: model(x), call)
    assert_close(play(lambda: model(x)), recorded)
    with pytest.raises(
        CannotReplay,
        match=r"the gate of layers\.1\.attention: must be reached, got a pass that never",
    ):
        play(lambda: model.layers[0](x))
    with pytest.raises(
        CannotReplay, match="the call of a Sequential: must be made in the recorded pass too"
    ):
        play(lambda: model(model.layers[0].feed(x)))
    assert_close(model(x), recorded)


def test_a_last_layer_that_large_batches_leave_out() -> None:
    class Short(Net):
        def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
            for layer in self.layers[: 3 if len(x) > 4 else 4]:
                x = layer(x)
            return self.out(x.mean(1))

    torch.manual_seed(0)
    (note,) = held(Short().double().eval(), [inputs(3)])
    assert (
        "the gate of layers.3.attention: must be reached, got a pass that never called it" in note
    )


def test_a_projection_whose_forward_someone_replaced() -> None:
    model = net()
    projection = model.layers[2].attention.W_o
    before = projection.forward
    projection.forward = lambda x: before(x).tanh()
    assert held(model, [inputs(3)]) == ()


def test_layers_that_hand_something_over_behind_the_back_of_their_calls() -> None:
    box: dict[str, Tensor] = {}

    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            box["seen"] = x
            return x

    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + box["seen"].tanh()

    model = net(6)
    model.layers[1].__class__, model.layers[3].__class__ = Writing, Reading
    assert "could not be played back" in held(model, [inputs(3)])[0]


def test_hooks_of_the_user_run_wherever_their_module_would() -> None:
    model, box = net(6), {}
    model.layers[1].register_forward_hook(lambda m, args, out: box.update(seen=out))
    model.layers[3].register_forward_hook(lambda m, args, out: out + box["seen"].tanh())
    assert held(model, [inputs(3)]) == ()


@pytest.mark.parametrize("max_bytes", [1, 2000, 2**30])
def test_examples_that_see_each_other(max_bytes: int) -> None:
    model = net()
    model.layers[1].feed.register_forward_hook(
        lambda m, args, out: out - 0.5 * out.mean(0, keepdim=True)
    )
    assert "could not be played back" in held(model, [inputs(4)], max_bytes=max_bytes)[0]
    assert "could not be played back" in held(model, [inputs(1), inputs(4)], max_bytes=max_bytes)[0]


def test_a_tensor_that_is_as_long_as_a_batch_by_chance() -> None:
    weights = torch.tensor([0.2, 0.3, 0.4], dtype=torch.float64)
    batches = [{**inputs(size, seed=size), "weights": weights} for size in (4, 2, 3)]
    assert held(net(), batches) == ()
    assert (
        "could not be played back" in held(net(), batches[::-1])[0]
    )  # here by chance in the first one already


def test_a_failure_in_a_later_batch_falls_back_and_says_from_when_on() -> None:
    class Picky(Net):
        def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
            assert x.shape[1] == 5 or len(x) == 3, "only whole batches of three"
            return super().forward(x)

    torch.manual_seed(0)
    model = Picky().double().eval()
    (note,) = held(model, [inputs(3), inputs(3, tokens=7)])
    assert "from batch 1 on" in note
    assert "only whole batches of three" in note


def test_longer_batches_need_no_more_memory_than_allowed() -> None:
    model, rows = net(), []
    bound = bind(model, hp.find_sites(model))
    candidates = CandidateLosses(model, bound, loss, max_bytes=400_000)
    settings = settings_of(
        Subject(registry.get("multi_head_attention"), model, inputs(4), hp.find_sites(model))
    )
    candidates(inputs(4), settings)
    model.layers[3].feed[0].register_forward_hook(lambda m, args, out: rows.append(out.numel() * 8))
    candidates(inputs(4), settings)
    short = max(rows)
    rows.clear()
    candidates(inputs(4, tokens=200), settings)
    assert max(rows) < 10 * short, "forty times as many tokens"
