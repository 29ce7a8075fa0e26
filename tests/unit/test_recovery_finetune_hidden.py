"""Finetune's distillation of hidden states: against a literal transcription, and where it is
refused."""

import copy

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.layouts import registry as layouts
from headprune.model.losses import default_loss
from headprune.recovery import Finetune
from headprune.recovery._blocks import Block, blocks_of
from headprune.recovery._distillation import Comparison, hidden_gap
from headprune.surgery.prune import prune_heads_

CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def pair(name):
    """A cut model, the whole one, and a batch; fp64, no dropout."""
    model, batch = layouts.get(name).tiny(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    teacher = copy.deepcopy(model)
    prune_heads_(model, {0: hp.find_sites(model)[0].units[0]})
    return model, teacher, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def literal(ours, theirs, mask):
    """Oracle: example by example, token by token."""
    layers = []
    for h, t in zip(ours, theirs, strict=True):
        rows, values = [], []
        for i in range(h.shape[0]):
            tokens = [j for j in range(h.shape[1]) if mask is None or mask[i, j]]
            rows.append(sum(((h[i, j] - t[i, j]) ** 2).mean() for j in tokens) / len(tokens))
            values += [t[i, j] for j in tokens]
        values = torch.stack(values)
        variance = ((values - values.mean()) ** 2).mean()
        layers.append(sum(rows) / len(rows) / variance)
    return sum(layers) / len(layers)


def compared(model, teacher, batch, which="all"):
    comparison = Comparison(model, teacher, hidden=which)
    with comparison.listening():
        default_loss(model, batch)
    return comparison.gaps()["hidden_states"]


@pytest.mark.parametrize("which", ["all", "last"])
@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_it_is_the_literal_transcription_in_value_and_gradient(name, which):
    """The layers of these put out Transformers' ``hidden_states``; its last one of a decoder is
    after another norm."""
    model, teacher, batch = pair(name)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    mask = batch.get("attention_mask")
    assert mask is None or not mask.all()

    def states(m):
        found = []
        handles = [
            b.module.register_forward_hook(lambda _, a, o: found.append(o))
            for b in blocks_of(m, None)
        ]
        hidden = m(**inputs, output_hidden_states=True).hidden_states
        for handle in handles:
            handle.remove()
        assert len(found) == len(hidden) - 1
        for own, theirs in zip(found[:-1], hidden[1:-1], strict=True):
            torch.testing.assert_close(own, theirs, rtol=0, atol=0)
        return found if which == "all" else found[-1:]

    with torch.no_grad():
        target = states(teacher)
    wanted = literal(states(model), target, mask)
    got = compared(model, teacher, batch, which)
    assert wanted > 1e-4
    torch.testing.assert_close(got, wanted, **CLOSE)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(wanted, parameters, allow_unused=True)
    found = torch.autograd.grad(got, parameters, allow_unused=True)
    assert sum(g is not None for g in expected) > 10
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **CLOSE)
    assert all(p.grad is None for p in teacher.parameters())


def test_padding_makes_no_difference():
    model, teacher, batch = pair("bert")
    inside = compared(model, teacher, batch)
    wider = {
        k: torch.cat([v, torch.zeros_like(v)], 1) if v.ndim == 2 else v for k, v in batch.items()
    }
    torch.testing.assert_close(compared(model, teacher, wider), inside, **CLOSE)


def test_a_decoders_padding_is_its_own():
    """Encoder tokens follow one mask, decoder tokens the other."""
    model, teacher, batch = pair("t5")
    blocks = blocks_of(model, None)
    assert [b.kind != "self" for b in blocks] == [False, False, True, True]
    decoder_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    found = []
    handles = [
        b.module.register_forward_hook(lambda _, a, o: found.append(o[0].detach())) for b in blocks
    ]
    model(**batch, decoder_attention_mask=decoder_mask)
    for handle in handles:
        handle.remove()
    handles = [
        b.module.register_forward_hook(lambda _, a, o: found.append(o[0].detach()))
        for b in blocks_of(teacher, None)
    ]
    teacher(**batch, decoder_attention_mask=decoder_mask)
    masks = [batch["attention_mask"]] * 2 + [decoder_mask] * 2
    parts = [literal([h], [t], m) for h, t, m in zip(found[:4], found[4:], masks, strict=True)]
    for handle in handles:
        handle.remove()
    comparison = Comparison(model, teacher, hidden="all")
    with comparison.listening():
        model(**batch, decoder_attention_mask=decoder_mask)
    torch.testing.assert_close(comparison.gaps()["hidden_states"].detach(), sum(parts) / 4, **CLOSE)


def test_the_weight_means_the_same_at_every_scale():
    """States ten times as large, at both: the same share is missed."""
    torch.manual_seed(0)
    model = nn.Sequential(hp.MultiHeadAttention(8, 2), hp.MultiHeadAttention(8, 2)).double()
    teacher, x = copy.deepcopy(model), torch.randn(4, 5, 8).double()
    prune_heads_(model, {0: [0]})

    def gap(scale):
        both = copy.deepcopy((model, teacher))
        with torch.no_grad():
            for m in both:
                for attention in m:
                    attention.W_o.weight.mul_(scale)
                    attention.W_o.bias.mul_(scale)
        comparison = Comparison(both[0][:1], both[1][:1], hidden="all")
        with comparison.listening():
            comparison.model(x)
        return comparison.gaps()["hidden_states"]

    torch.testing.assert_close(gap(10.0), gap(1.0), **CLOSE)


def test_training_on_it_lowers_the_distance():
    model, teacher, batch = pair("bert")
    before = compared(model, teacher, batch).item()
    settings = Finetune(steps=30, learning_rate=3e-3, distill_hidden=10.0, distill=0.5)
    report = hp.recover_(model, [batch], settings, teacher=teacher)
    after = compared(model, teacher, batch).item()
    assert after < 0.6 * before
    assert set(report.metrics) == {"steps", "loss", "distillation", "hidden_states"}
    assert not any(
        m._forward_hooks or m._forward_pre_hooks
        for both in (model, teacher)
        for m in both.modules()
    )


def test_a_step_is_that_of_the_sum():
    model, teacher, batch = pair("bert")
    oracle = copy.deepcopy(model).train()
    settings = Finetune(
        steps=1, learning_rate=0.01, schedule="constant", max_grad_norm=None, distill_hidden=3.0
    )
    report = hp.recover_(model, [batch], settings, teacher=teacher)
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=0.01, weight_decay=0.0)
    gap = compared(oracle, teacher, batch)
    (default_loss(oracle, batch).mean() + 3.0 * gap).backward()
    optimizer.step()
    for (name, a), b in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name, rtol=1e-6, atol=1e-6)
    assert report.metrics["hidden_states"] == pytest.approx(gap.item())


def test_a_regression_has_hidden_states():
    torch.manual_seed(0)
    model = nn.Sequential(hp.MultiHeadAttention(8, 2), nn.Flatten(), nn.Linear(24, 1))
    teacher, x = copy.deepcopy(model), torch.randn(4, 3, 8)
    settings = Finetune(steps=2, distill_hidden=1.0)
    report = hp.recover_(
        model, [x], settings, teacher=teacher, loss=lambda m, x: m(x).square().mean(1)
    )
    assert report.metrics["hidden_states"] >= 0


def test_batches_that_come_second_are_told_by_the_layout():
    """``[tokens, batch, features]`` with as many tokens as examples: only the layout tells them
    apart."""
    model, _ = layouts.get("labml").tiny(0)
    block = Block("", model, "self", 1)
    torch.manual_seed(0)
    h, t = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    got = hidden_gap(model, [block], [(0, h)], [(0, t)], [{"attention_mask": mask}], "all")
    torch.testing.assert_close(got, literal([h.transpose(0, 1)], [t.transpose(0, 1)], mask))
    assert {b.batch_axis for b in blocks_of(model, None)} == {1}


def test_what_has_no_layers_is_refused_in_words():
    plain = nn.Linear(4, 2)
    settings = Finetune(distill_hidden=1.0)
    with pytest.raises(UnsupportedModel):
        hp.recover_(plain, [torch.randn(2, 4)], settings, teacher=copy.deepcopy(plain))
    model, _, batch = pair("bert")
    shallow = layouts.get("bert").tiny(0)[0].double()
    shallow.bert.encoder.layer = shallow.bert.encoder.layer[:2]
    with pytest.raises(InvalidValue, match="a teacher of 3 layers, got 2"):
        hp.recover_(model, [batch], settings, teacher=shallow)


def test_layers_that_return_no_states_or_others_are_refused():
    class Odd(nn.Module):
        def __init__(self, answer):
            super().__init__()
            self.attention, self.answer = hp.MultiHeadAttention(8, 2), answer

        def forward(self, x):
            return self.answer(self.attention(x))

    def run(ours, theirs):
        comparison = Comparison(nn.Sequential(Odd(ours)), nn.Sequential(Odd(theirs)), hidden="all")
        with comparison.listening():
            comparison.model(torch.randn(2, 3, 8))
        return comparison.gaps()

    torch.manual_seed(0)
    plain = run(lambda x: (x, None), lambda x: (x, None))["hidden_states"]
    assert plain > 0
    torch.manual_seed(0)
    assert run(lambda x: {"states": x, "more": 1}, lambda x: x)["hidden_states"] == plain
    with pytest.raises(InvalidValue, match="used where 0 returns hidden states first, got list"):
        run(lambda x: ["nothing"], lambda x: x)
    with pytest.raises(
        InvalidValue, match=r"a teacher whose 0 returns \[2, 3, 8\], got \[2, 2, 8\]"
    ):
        run(lambda x: x, lambda x: x[:, :2])


def test_layers_that_do_not_all_run_in_both_are_refused():
    class Early(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.layers = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(3))
            self.depth = depth

        def forward(self, x):
            for layer in self.layers[: self.depth]:
                x = x + layer(x)
            return x

    for ours, theirs in ((2, 3), (0, 0)):
        comparison = Comparison(Early(ours), Early(theirs), hidden="all")
        with comparison.listening():
            comparison.model(torch.randn(2, 3, 8))
        with pytest.raises(
            InvalidValue, match=rf"the same layers \(layers\.0, .*, got {ours} and {theirs} states"
        ):
            comparison.gaps()


def test_a_distance_that_is_not_finite_names_the_step():
    model, teacher, batch = pair("bert")
    with torch.no_grad():
        teacher.bert.encoder.layer[0].output.dense.bias.fill_(float("nan"))
    with pytest.raises(InvalidValue, match="step 1: the distance of hidden states: must be finite"):
        hp.recover_(model, [batch], Finetune(distill_hidden=1.0), teacher=teacher)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distill_hidden": -1.0}, "Finetune.distill_hidden: must be a number >= 0"),
        ({"hidden_layers": "first"}, "Finetune.hidden_layers: must be one of all, last"),
        ({"hidden_layers": "last"}, "Finetune.hidden_layers: must be used with distill_hidden"),
        ({"temperature": 2.0}, "Finetune.temperature: must be used with distill"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(InvalidValue, match=message):
        Finetune(**settings)


class TwoSentences(nn.Module):
    """An encoder that runs once for each sentence, whose padding only its own inputs tell."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, first, second):
        return self.encoder(**first).logits - self.encoder(**second).logits


def test_padding_of_an_encoder_that_runs_twice():
    """What stands at padding does not count, whichever run it is in."""
    _, whole, batch = pair("bert")
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    away = inputs["attention_mask"] == 0
    assert bool(away.any())
    gaps = []
    for spoilt in (0.0, 100.0):
        model, teacher = TwoSentences(whole), TwoSentences(copy.deepcopy(whole))
        last = teacher.encoder.bert.encoder.layer[-1]
        last.register_forward_hook(
            lambda m, a, out, by=spoilt: out + out.square() + by * away[..., None]
        )
        comparison = Comparison(model, teacher, hidden="last")
        with comparison.listening():
            model(inputs, inputs)
        gaps.append(comparison.gaps()["hidden_states"].detach())
    assert float(gaps[0]) > 0
    torch.testing.assert_close(gaps[1], gaps[0])
