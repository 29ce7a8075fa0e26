"""PyTorch's encoder with padding, by default of nested tensors in evaluation: what is measured and
cut is the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.recovery import registry as recoveries
from headprune.scoring import registry as scorers
from tests.laws.support import shaken

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True, but"
)

FORMS: dict[str, dict[str, Any]] = {
    "default": {"batch_first": True},
    "norm first": {"batch_first": True, "norm_first": True},
    "without biases": {"batch_first": True, "bias": False},
    "sequence first": {},
}
EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
REMOVED = {"encoder.layers.0.self_attn": [1], "encoder.layers.1.self_attn": [0, 2]}


class Reader(nn.Module):
    """An encoder of padded sentences, whose first token tells the class."""

    def __init__(self, nested: bool, **options: Any) -> None:
        super().__init__()
        self.sequence_first = not options.get("batch_first")
        self.embedding = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x.transpose(0, 1) if self.sequence_first else x
        x = self.encoder(x, src_key_padding_mask=ids == 0)
        found: Tensor = self.head(x[0] if self.sequence_first else x[:, 0])
        return found


def pair(**options: Any) -> tuple[Reader, Reader]:
    """A model with PyTorch's default, and the same model that makes no nested tensors."""
    torch.manual_seed(0)
    default = shaken(Reader(True, **options)).double().eval()
    plain = Reader(False, **options).double().eval()
    plain.load_state_dict(default.state_dict())
    return default, plain


def data(longest: int = 9) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in (longest, longest - 2):
        ids = torch.randint(1, 30, (5, length), generator=generator)
        ids[::2, 4:] = 0
        batches.append({"ids": ids, "labels": torch.randint(3, (5,), generator=generator)})
    return batches


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["ids"]), batch["labels"], reduction="none")


def mask() -> hp.HeadMask:
    return hp.HeadMask.from_keep(
        {name: set(range(4)) - set(removed) for name, removed in REMOVED.items()},
        dict.fromkeys(REMOVED, 4),
    )


def packs(model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the model, as its user runs it, makes a nested tensor of the batch."""
    made: list[Any] = []
    pack = torch._nested_tensor_from_mask
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(
            torch, "_nested_tensor_from_mask", lambda *a, **k: made.append(a) or pack(*a, **k)
        )
        model(batch["ids"])
    return bool(made)


def scored(model: nn.Module, scorer: str) -> Any:
    """Scores, or what refused them."""
    try:
        return hp.score(model, data(), scorer, loss=loss, progress=False)
    except UnsupportedModel as error:  # no map to be seen
        return str(error)


@pytest.mark.parametrize("scorer", scorers.names())
def test_scores_do_not_depend_on_nested_tensors(scorer: str) -> None:
    default, plain = pair(**FORMS["default"])
    found, expected = scored(default, scorer), scored(plain, scorer)
    assert default.encoder.use_nested_tensor, "it is as it was"
    if isinstance(expected, str):
        assert found == expected
        return
    assert found.values == expected.values
    assert found.standard_errors == expected.standard_errors
    assert (found.costs, found.notes) == (expected.costs, expected.notes)


@pytest.mark.parametrize("scorer", ["taylor", "wanda", "obs", "leave_one_out"])
def test_padding_does_not_count_in_them(scorer: str) -> None:
    default, _ = pair(**FORMS["default"])
    longer = [{**batch, "ids": functional.pad(batch["ids"], (0, 3))} for batch in data()]
    here, there = (
        torch.tensor(hp.score(default, batches, scorer, loss=loss, progress=False).values)
        for batches in (data(), longer)
    )
    assert_close(there, here, **CLOSE)


@pytest.mark.parametrize("method", recoveries.names())
def test_recoveries_do_not_depend_on_nested_tensors(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = hp.recovery.Finetune(epochs=1, learning_rate=1e-2) if method == "finetune" else method
    states, outputs = [], []
    for teacher in pair(**FORMS["default"]):
        small = copy.deepcopy(teacher)
        hp.prune_(small, mask())
        cut = copy.deepcopy(small.state_dict())
        needed = {} if method == "finetune" else {"teacher": teacher}
        torch.manual_seed(0)
        hp.recover_(small, data(), chosen, loss=loss, **needed)
        now = small.state_dict()
        assert now.keys() != cut.keys() or any(
            not torch.equal(cut[name], now[name]) for name in cut
        )
        states.append(now)
        with torch.no_grad():
            outputs.append(small(data()[0]["ids"]))
        assert packs(small, data()[0], monkeypatch) == packs(teacher, data()[0], monkeypatch)
    assert_close(states[0], states[1], **EXACT)
    assert_close(outputs[0], outputs[1], **CLOSE)


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_the_cut_model_reads_padding_as_the_gated_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    default, plain = pair(**options)
    batch = data()[0]
    native = packs(default, batch, monkeypatch)
    assert native == (options == FORMS["default"])
    with torch.no_grad():
        whole = default(batch["ids"])
        with hp.gated(plain, mask()):
            expected = plain(batch["ids"])
        with hp.gated(default, mask()):
            assert_close(default(batch["ids"]), expected, **CLOSE)
    assert hp.prune_(default, mask(), example={"ids": batch["ids"]}).proof is not None
    assert packs(default, batch, monkeypatch) == native
    for gradients in (False, True):  # with gradients no nested tensor is made
        with torch.set_grad_enabled(gradients):
            assert_close(default(batch["ids"]), expected, **CLOSE)
    assert (whole - expected).abs().max() > 1e-3


def test_all_heads_of_a_layer_may_be_removed() -> None:
    default, plain = pair(**FORMS["default"])
    ids = data()[0]["ids"]
    keep: dict[str, list[int]] = {name: [] for name in REMOVED}
    keep["encoder.layers.1.self_attn"] = [3]
    plan = hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4))
    with torch.no_grad():
        with hp.gated(plain, plan):
            expected = plain(ids)
        hp.prune_(default, plan, example={"ids": ids})
        assert_close(default(ids), expected, **CLOSE)


def test_losses_of_masks_and_learned_gates_do_not_depend_on_nested_tensors() -> None:
    rises, learned = [], []
    for model in pair(**FORMS["default"]):
        rise = hp.scoring.loss_of(model, data(), loss=loss, progress=False)([mask()])
        rises.append(torch.from_numpy(rise))
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout | nn.MultiheadAttention):
                module.eval()
        torch.manual_seed(0)
        with hp.learned_gates(model, hp.gating.HardConcrete(keep=0.5)) as gates:
            (loss(model, data()[0]).mean() + gates.penalty()).backward()
        learned.append(torch.cat([p.grad for p in gates.parameters() if p.grad is not None]))
    assert_close(rises[0], rises[1], **EXACT)
    assert_close(learned[0], learned[1], **EXACT)


class Averaged(Reader):
    """Reads what the encoder puts where there is padding."""

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(
            self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0).mean(1)
        )
        return found


def test_a_model_that_reads_padding_is_told_of_zeros_there() -> None:
    torch.manual_seed(0)
    model = shaken(Averaged(True, batch_first=True)).double().eval()
    (note,) = hp.score(model, data(), "taylor", loss=loss, progress=False).notes
    assert "enable_nested_tensor=False" in note
    model.encoder.use_nested_tensor = False
    assert not hp.score(model, data(), "taylor", loss=loss, progress=False).notes
