"""Running a model without a trace: calls, devices, sizes, modes, gradients, random states."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.contexts import rows_of
from headprune.model.examples import example_batch
from headprune.model.masks import token_mask
from headprune.model.running import (
    DataDigest,
    batch_size,
    call,
    device_of,
    outputs,
    tensors,
    to_device,
    undisturbed,
)
from headprune.model.sites import bind
from tests.laws.support import EXACT, picture, subject_of


class Takes(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x if y is None else x - y


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_call_takes_mappings_and_sequences(kind: Any) -> None:
    named = {"x": torch.ones(2), "y": torch.zeros(2)}
    batch = kind(named if kind is dict else named.values())
    assert_close(call(Takes(), batch), torch.ones(2), **EXACT)
    assert_close(call(Takes(), torch.ones(2)), torch.ones(2), **EXACT)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> list[str]:
        return ["x"]


class Asking(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> list[str]:
        return ["x", "labels"]


class Open(nn.Module):
    def forward(self, **given: Tensor) -> list[str]:
        return list(given)


def test_call_keeps_answers_from_models_that_have_no_parameter_for_them() -> None:
    batch = {"x": torch.ones(1), "labels": torch.ones(1)}
    assert call(Plain(), batch) == ["x"]
    assert call(Asking(), batch) == call(Open(), batch) == ["x", "labels"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        call(Plain(), {**batch, "mask": torch.ones(1)})


def test_outputs_leave_caches_attention_maps_and_integers_out() -> None:
    subject = subject_of("llama")
    subject.model.set_attn_implementation("eager")
    more = {"use_cache": True, "output_attentions": True, "output_hidden_states": True}
    out = subject.model(**subject.batch, **more)
    assert out.past_key_values is not None
    assert len(out.attentions) == 3
    found = outputs(out)
    assert [t.shape for t in found] == [(3, 7, 50)] + [(3, 7, 24)] * 4
    mixed = (torch.ones(1), [torch.ones(2), {"a": torch.ones(3).int()}], None, "x")
    assert [t.shape[0] for t in outputs(mixed)] == [1, 2]


def test_tensors_come_in_order_from_any_nesting() -> None:
    a, b, c = (torch.ones(n) for n in (1, 2, 3))
    nested = OrderedDict(z=[a, (b, {"k": c})], y=None, x=3)
    assert [t.shape[0] for t in tensors(nested)] == [1, 2, 3]


def test_to_device_copies_containers_and_leaves_the_rest() -> None:
    batch = {"a": torch.ones(2), "b": [torch.ones(1), "text", None], "c": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].device.type == moved["b"][0].device.type == "meta"
    assert (moved["b"][1], moved["b"][2], moved["c"]) == ("text", None, 3)
    assert batch["a"].device.type == "cpu"
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta"
    assert device_of(nn.Identity()).type == "cpu"


@pytest.mark.parametrize(
    ("shape", "batch", "expected"),
    [
        ((3, 8), 3, (3, 1, 8)),  # one token an example
        ((5, 8), 3, (1, 5, 8)),  # one example
        ((3, 5, 8), 3, (3, 5, 8)),
        ((3, 2, 5, 8), 3, (3, 10, 8)),
    ],
)
def test_rows_of_what_a_projection_reads(
    shape: tuple[int, ...], batch: int, expected: tuple[int, ...]
) -> None:
    (bound,) = bind(hp.MultiHeadAttention(8, 2))
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    found = rows_of(bound, x, torch.zeros(batch, 1))
    assert torch.equal(found, x.view(expected))


IDS = {"input_ids": (2, 12), "attention_mask": (2, 12)}


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        ("BertModel", {"vocab_size": 7}, IDS),
        ("T5Model", {"vocab_size": 7}, {**IDS, "decoder_input_ids": (2, 5)}),
        ("ViTModel", {"image_size": 8}, {"pixel_values": (2, 3, 8, 8)}),
        ("Wav2Vec2Model", {}, {"input_values": (2, 4000)}),
    ],
)
def test_made_up_batches_are_what_a_configuration_says(
    kind: str, sizes: Any, expected: Any
) -> None:
    model = nn.Linear(2, 2).bfloat16()
    model.config = getattr(transformers, kind).config_class(**sizes)
    model.main_input_name = getattr(transformers, kind).main_input_name
    found = example_batch(model)
    assert {name: tuple(t.shape) for name, t in found.items()} == expected
    for name, tensor in found.items():
        assert tensor.dtype == (torch.bfloat16 if "values" in name else torch.long)
        assert "ids" not in name or int(tensor.max()) < 7


def test_no_batch_is_made_up_for_other_models() -> None:
    model = nn.Linear(2, 2)
    assert example_batch(model) is None
    model.config = transformers.WhisperConfig()
    model.main_input_name = transformers.WhisperModel.main_input_name
    assert example_batch(model) is None


def test_batch_size_is_that_of_the_first_tensor_with_a_dimension() -> None:
    assert batch_size({"scalar": torch.tensor(1.0), "x": torch.ones(5, 2)}) == 5
    assert batch_size((torch.ones(4), torch.ones(9))) == 4
    with pytest.raises(InvalidValue, match=r"example: must be made of tensors .* got dict"):
        batch_size({"x": "text"}, "example")
    with pytest.raises(InvalidValue, match="an empty batch"):
        batch_size(torch.ones(0, 3))


def test_token_mask_only_where_it_fits() -> None:
    mask = torch.tensor([[1, 1, 0]])
    assert token_mask({"attention_mask": mask}, (1, 3)).tolist() == [[True, True, False]]
    assert token_mask({"attention_mask": mask}, (1, 4)) is None
    assert token_mask({"input_ids": mask}, (1, 3)) is None
    assert token_mask((mask,), (1, 3)) is None


def test_digest_sees_values_types_shapes_and_order() -> None:
    def digest(*batches: Any) -> str:
        of = DataDigest()
        for batch in batches:
            of.add(batch)
        return of.hexdigest()

    a = torch.arange(6.0).view(2, 3)
    assert digest({"x": a}) == digest((a,)) == digest(a.t().contiguous().t())
    others = digest(a.t()), digest(a.double()), digest(a + 1), digest(a[:1], a[1:]), digest()
    assert len({digest(a), *others}) == 6
    assert digest(torch.tensor(True)) != digest(torch.tensor(False))
    assert digest(a.bfloat16()) != digest(a.half())


@pytest.mark.parametrize(("frozen", "fails"), [(True, True), (False, False)])
def test_undisturbed_puts_everything_back(frozen: bool, fails: bool) -> None:
    subject = subject_of("bert")
    model = subject.model
    for index, module in enumerate(model.modules()):
        module.training = index % 2 == 0
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 > 0)
        parameter.grad = torch.ones_like(parameter) if index % 3 == 1 else None
    grads = [p.grad for p in model.parameters()]
    before, state = picture(model), torch.get_rng_state()
    try:
        with undisturbed(model, frozen) as same:
            assert same is model
            assert not any(m.training for m in model.modules())
            assert any(p.requires_grad for p in model.parameters()) is not frozen
            torch.randn(3)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert picture(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))
