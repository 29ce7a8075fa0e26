"""The default per-example losses: their mean is Transformers' own loss, and each is that of its
example alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

from headprune.core.errors import InvalidValue
from headprune.model.losses import checked_losses, default_loss, is_causal_lm

F64 = {"rtol": 1e-10, "atol": 1e-12}
#: Transformers computes the losses of causal language models in float32.
F32 = {"rtol": 1e-5, "atol": 1e-6}

IDS = torch.randint(3, 40, (4, 6), generator=torch.Generator().manual_seed(3))
#: Two examples of full length, two padded on the right.
MASK = torch.tensor([[1] * 6, [1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
TEXT = {"input_ids": IDS, "attention_mask": MASK}
PIXELS = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(3)).double()

BERT = {
    "vocab_size": 40,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
    "initializer_range": 0.5,
}


def bert(kind: str, **options: Any) -> nn.Module:
    return getattr(hf, kind)(hf.BertConfig(**BERT, **options)).double().eval()


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        initializer_range=0.5,
    )
    return hf.LlamaForCausalLM(config).double().eval()


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16, initializer_range=0.5
    )
    return hf.GPT2LMHeadModel(config).double().eval()


def vit() -> nn.Module:
    config = hf.ViTConfig(
        image_size=4,
        patch_size=2,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
    )
    return hf.ViTForImageClassification(config).double().eval()


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=40,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config).eval()


def tokens(*lengths: int, n: int = 40) -> Tensor:
    """Labels ``[4, 6]``, of which so many count in each row."""
    labels = IDS.flip(1) % n
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return labels


def one(batch: dict[str, Any], number: int) -> dict[str, Any]:
    return {k: v[number : number + 1] for k, v in batch.items()}


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, float]]] = {
    "single label": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        {**TEXT, "labels": torch.tensor([0, 2, 1, 1])},
        F64,
    ),
    "several labels": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        {**TEXT, "labels": torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).double()},
        F64,
    ),
    "regression": (
        lambda: bert("BertForSequenceClassification", num_labels=1),
        {**TEXT, "labels": torch.tensor([0.5, -1.0, 2.0, 0.0]).double()},
        F64,
    ),
    "regression of several numbers": (
        lambda: bert("BertForSequenceClassification", num_labels=2, problem_type="regression"),
        {
            **TEXT,
            "labels": torch.tensor([[0.5, -1.0], [2.0, 0.0], [1.0, 1.0], [0.0, 3.0]]).double(),
        },
        F64,
    ),
    "token classification": (
        lambda: bert("BertForTokenClassification", num_labels=3),
        {**TEXT, "labels": tokens(5, 4, 3, 2, n=3)},
        F64,
    ),
    "masked": (lambda: bert("BertForMaskedLM"), {**TEXT, "labels": tokens(2, 1, 2, 3)}, F64),
    "question": (
        lambda: bert("BertForQuestionAnswering"),
        {  # no padding: Transformers has it in the softmax
            "input_ids": IDS,
            "attention_mask": torch.ones_like(MASK),
            "start_positions": torch.tensor([0, 2, 1, 0]),
            "end_positions": torch.tensor([1, 5, 3, 2]),
        },
        F64,
    ),
    "image": (vit, {"pixel_values": PIXELS, "labels": torch.tensor([0, 2, 1, 1])}, F64),
    "llama": (llama, {**TEXT, "labels": tokens(6, 5, 4, 3)}, F32),
    "gpt2": (gpt2, {**TEXT, "labels": tokens(6, 5, 4, 3)}, F32),
    "t5": (t5, {**TEXT, "labels": tokens(6, 5, 2, 3)}, F32),
}


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Any], dict[str, float]]:
    torch.manual_seed(0)
    make, batch, tolerance = CASES[request.param]
    return make(), batch, tolerance


def test_each_example_has_the_loss_that_transformers_gives_it_alone(case: Any) -> None:
    model, batch, tolerance = case
    found = default_loss(model, batch)
    # A copy: Transformers writes the problem type that it guesses into the configuration.
    theirs = copy.deepcopy(model)
    alone = torch.stack([theirs(**one(batch, i)).loss for i in range(4)])
    assert_close(found, alone.to(found.dtype), **tolerance)
    assert len({round(float(x), 4) for x in found.detach()}) == 4


def test_the_mean_is_the_loss_of_transformers(case: Any) -> None:
    model, batch, tolerance = case
    found = default_loss(model, batch)
    weights = torch.ones(4, dtype=found.dtype)
    if (
        "labels" in batch and batch["labels"].shape == IDS.shape
    ):  # theirs is the mean over all tokens
        weights = (batch["labels"][:, int(is_causal_lm(model)) :] != -100).sum(1).to(found.dtype)
    theirs = copy.deepcopy(model)(**batch).loss
    assert_close((found * weights).sum() / weights.sum(), theirs.to(found.dtype), **tolerance)


def test_the_configuration_is_not_changed(case: Any) -> None:
    model, batch, _ = case
    before = model.config.to_dict()
    default_loss(model, batch)
    assert model.config.to_dict() == before
    assert before.get("problem_type") in (None, "regression")


def test_the_batch_is_not_changed(case: Any) -> None:
    model, batch, _ = case
    before = {k: v.clone() for k, v in batch.items()}
    default_loss(model, batch)
    assert batch.keys() == before.keys()
    for key, value in before.items():
        assert_close(batch[key], value, rtol=0, atol=0)


def test_padding_does_not_change_a_loss(case: Any) -> None:
    model, batch, _ = case
    if "input_ids" not in batch:
        pytest.skip("images have no padding")
    more = {"input_ids": 5, "attention_mask": 0, "labels": -100}
    wider = {
        k: torch.cat([v, v.new_full((4, 3), more[k])], 1) if v.shape == IDS.shape else v
        for k, v in batch.items()
    }
    found, expected = default_loss(model, wider), default_loss(model, batch)
    assert_close(
        found,
        expected,
        **({"rtol": 1e-5, "atol": 1e-6} if expected.dtype == torch.float32 else F64),
    )


@pytest.mark.parametrize("make", [llama, gpt2])
def test_without_labels_the_inputs_are_the_labels(make: Callable[[], nn.Module]) -> None:
    model = make()
    labels = IDS.masked_fill(MASK == 0, -100)
    assert_close(
        default_loss(model, TEXT), default_loss(model, {**TEXT, "labels": labels}), rtol=0, atol=0
    )
    assert_close(
        default_loss(model, {"input_ids": IDS}),
        default_loss(model, {"input_ids": IDS, "labels": IDS}),
    )
    # Labels that forget the padding do not make it count.
    assert_close(
        default_loss(model, {**TEXT, "labels": IDS}), default_loss(model, TEXT), rtol=0, atol=0
    )


def test_the_first_token_after_padding_on_the_left_is_not_predicted() -> None:
    model = llama()
    left = {
        "input_ids": torch.cat([torch.full((4, 2), 7), IDS], 1),
        "attention_mask": torch.cat([torch.zeros(4, 2).long(), torch.ones(4, 6).long()], 1),
    }
    expected = default_loss(model, {"input_ids": IDS})
    # Rotary sines are computed in float32, at other positions.
    assert_close(default_loss(model, left), expected, rtol=1e-5, atol=1e-6)
    assert_close(
        default_loss(model, {**left, "labels": left["input_ids"]}), expected, rtol=1e-5, atol=1e-6
    )


def test_the_encoders_mask_does_not_hide_labels() -> None:
    """Source and target of one shape: the mask is that of the source."""
    model = t5()
    labels = tokens(6, 6, 6, 6)
    logits = model(**TEXT, labels=labels).logits
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
    assert_close(default_loss(model, {**TEXT, "labels": labels}), expected)


def test_an_answer_that_was_cut_off_does_not_count() -> None:
    model = bert("BertForQuestionAnswering")
    batch = {
        **TEXT,
        "start_positions": torch.tensor([[6], [2], [1], [9]]),
        "end_positions": torch.tensor([6, 5, 3, 2]),
    }
    inside = {
        **TEXT,
        "start_positions": torch.tensor([0, 2, 1, 0]),
        "end_positions": torch.tensor([0, 5, 3, 2]),
    }
    found, expected = default_loss(model, batch), default_loss(model, inside)
    assert_close(found[1:3], expected[1:3], **F64)
    assert float(found[0].detach()) == 0.0
    logits = model(**TEXT).end_logits.masked_fill(MASK == 0, float("-inf"))
    ends = nn.functional.cross_entropy(logits, inside["end_positions"], reduction="none")
    assert_close(found[3], ends[3] / 2, **F64)


def test_an_answer_may_come_without_a_mask() -> None:
    model = bert("BertForQuestionAnswering")
    ends = {
        "start_positions": torch.tensor([0, 2, 1, 4]),
        "end_positions": torch.tensor([5, 5, 3, 4]),
    }
    bare = {**{k: v for k, v in TEXT.items() if k != "attention_mask"}, **ends}
    expected = default_loss(model, {**bare, "attention_mask": torch.ones_like(MASK)})
    assert_close(default_loss(model, bare), expected, **F64)
    with torch.no_grad():
        assert not torch.equal(default_loss(model, bare), default_loss(model, {**TEXT, **ends}))


def test_an_example_without_labels_has_no_loss() -> None:
    model = bert("BertForTokenClassification", num_labels=3)
    found = default_loss(model, {**TEXT, "labels": tokens(5, 0, 3, 2, n=3)})
    assert float(found[1].detach()) == 0.0
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_judged_in_float32(dtype: torch.dtype) -> None:
    model = bert("BertForSequenceClassification", num_labels=3).to(dtype)
    assert (
        default_loss(model, {**TEXT, "labels": torch.tensor([0, 2, 1, 1])}).dtype == torch.float32
    )


def test_who_is_causal() -> None:
    assert is_causal_lm(llama())
    assert is_causal_lm(gpt2())
    assert not is_causal_lm(t5())
    assert not is_causal_lm(bert("BertForMaskedLM"))

    class Mine(hf.LlamaForCausalLM):
        pass

    assert is_causal_lm(Mine(llama().config))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (TEXT, r"'labels', got only \['attention_mask', 'input_ids'\]"),
        ((IDS, MASK), "a mapping .* got tuple"),
        (IDS, "a mapping .* got Tensor"),
        ({**TEXT, "labels": torch.tensor([1, 2])}, r"one for each of 4 examples, got \[2\]"),
    ],
    ids=["no labels", "tuple", "tensor", "too few"],
)
def test_batches_it_cannot_judge(batch: Any, words: str) -> None:
    with pytest.raises(InvalidValue, match=words + r".*Pass loss="):
        default_loss(bert("BertForSequenceClassification", num_labels=3), batch)


def test_labels_of_another_length() -> None:
    model = bert("BertForTokenClassification", num_labels=3)
    with pytest.raises(InvalidValue, match=r"labels: must be of shape \[4, 6\], got \[4, 5\]"):
        default_loss(model, {**TEXT, "labels": tokens(5, 4, 3, 2, n=3)[:, :5]})


def test_a_causal_batch_without_ids() -> None:
    with pytest.raises(InvalidValue, match="'labels' or 'input_ids'"):
        default_loss(llama(), {"inputs_embeds": torch.randn(4, 6, 8).double()})


def test_an_output_without_logits() -> None:
    model = bert("BertModel")
    with pytest.raises(InvalidValue, match="one with logits"):
        default_loss(model, {**TEXT, "labels": torch.tensor([0, 2, 1, 1])})


def test_what_is_checked_of_a_loss() -> None:
    model, batch = nn.Linear(1, 1), torch.ones(3, 1)
    for wrong, got in (
        (torch.ones(()), r"\[\]"),
        (torch.ones(3, 1), r"\[3, 1\]"),
        (1.0, "float"),
        ([1.0] * 3, "list"),
    ):
        with pytest.raises(InvalidValue, match=rf"of shape \[3\], one loss per example, got {got}"):
            checked_losses(lambda m, b, w=wrong: w, model, batch, 0)
    bad = torch.tensor([0.0, float("-inf"), float("nan")], requires_grad=True)
    with pytest.raises(
        InvalidValue, match=r"the loss of batch 4, example 1: must be finite, got -inf"
    ):
        checked_losses(lambda m, b: bad, model, batch, 4)
