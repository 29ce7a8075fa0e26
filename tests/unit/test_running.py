"""Running a model without a trace: calls, devices, sizes, modes, gradients, random states."""

import pytest
import torch
import transformers
from torch import nn

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.contexts import rows_of
from headprune.model.examples import example_batch
from headprune.model.running import DataDigest, batch_size, call, outputs
from headprune.model.sites import bind
from tests.laws.support import subject_of


class Plain(nn.Module):
    def forward(self, x):
        return ["x"]


class Open(nn.Module):
    def forward(self, **given):
        return list(given)


def test_call_keeps_answers_from_models_that_have_no_parameter_for_them():
    batch = {"x": torch.ones(1), "labels": torch.ones(1)}
    assert call(Plain(), batch) == ["x"]
    assert call(Open(), batch) == ["x", "labels"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        call(Plain(), {**batch, "mask": torch.ones(1)})


def test_outputs_leave_caches_attention_maps_and_integers_out():
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
def test_made_up_batches_are_what_a_configuration_says(kind, sizes, expected):
    model = nn.Linear(2, 2).bfloat16()
    model.config = getattr(transformers, kind).config_class(**sizes)
    model.main_input_name = getattr(transformers, kind).main_input_name
    found = example_batch(model)
    assert {name: tuple(t.shape) for name, t in found.items()} == expected
    for name, tensor in found.items():
        assert tensor.dtype == (torch.bfloat16 if "values" in name else torch.long)
        assert "ids" not in name or int(tensor.max()) < 7


def test_no_batch_is_made_up_for_other_models():
    model = nn.Linear(2, 2)
    assert example_batch(model) is None
    model.config = transformers.WhisperConfig()
    model.main_input_name = transformers.WhisperModel.main_input_name
    assert example_batch(model) is None


def test_batch_size_is_that_of_the_first_tensor_with_a_dimension():
    assert batch_size({"scalar": torch.tensor(1.0), "x": torch.ones(5, 2)}) == 5
    assert batch_size((torch.ones(4), torch.ones(9))) == 4
    with pytest.raises(InvalidValue, match=r"example: must be made of tensors .* got dict"):
        batch_size({"x": "text"}, "example")
    with pytest.raises(InvalidValue, match="an empty batch"):
        batch_size(torch.ones(0, 3))


def test_digest_sees_values_types_shapes_and_order():
    def digest(*batches):
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


def test_rows_of_what_a_projection_reads():
    (bound,) = bind(hp.MultiHeadAttention(8, 2))
    for shape, rows in (
        ((3, 8), (3, 1, 8)),  # one token an example
        ((5, 8), (1, 5, 8)),  # one example
        ((3, 5, 8), (3, 5, 8)),
        ((3, 2, 5, 8), (3, 10, 8)),
    ):
        x = torch.arange(torch.Size(shape).numel()).view(shape)
        assert torch.equal(rows_of(bound, x, torch.zeros(3, 1)), x.view(rows))
