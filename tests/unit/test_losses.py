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
SIZES = {
    "vocab_size": 40,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "initializer_range": 0.5,
}


def bert(kind: str, **options: Any) -> nn.Module:
    config = hf.BertConfig(**SIZES, max_position_embeddings=16, **options)
    return getattr(hf, kind)(config).double().eval()


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).double().eval()


def t5() -> nn.Module:
    sizes = {"vocab_size": 40, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = hf.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return hf.T5ForConditionalGeneration(config).eval()


def classifier(n: int = 3, **options: Any) -> nn.Module:
    return bert("BertForSequenceClassification", num_labels=n, **options)


def tagger() -> nn.Module:
    return bert("BertForTokenClassification", num_labels=3)


def tokens(*lengths: int, n: int = 40) -> Tensor:
    """Labels ``[4, 6]``, of which so many count in each row."""
    labels = IDS.flip(1) % n
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return labels


def one(batch: dict[str, Any], number: int) -> dict[str, Any]:
    return {k: v[number : number + 1] for k, v in batch.items()}


SEVERAL = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).double()
GRADES = torch.tensor([0.5, -1.0, 2.0, 0.0]).double()
PLACES = torch.tensor([[0.5, -1.0], [2.0, 0.0], [1.0, 1.0], [0.0, 3.0]]).double()
CLASSES = torch.tensor([0, 2, 1, 1])
STARTS, ENDS = torch.tensor([0, 2, 1, 0]), torch.tensor([1, 5, 3, 2])
#: Without padding: Transformers has it in the softmax.
QUESTIONS = {"input_ids": IDS, "attention_mask": torch.ones_like(MASK)}

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, float]]] = {
    "single label": (classifier, {**TEXT, "labels": CLASSES}, F64),
    "several labels": (classifier, {**TEXT, "labels": SEVERAL}, F64),
    "regression": (lambda: classifier(1), {**TEXT, "labels": GRADES}, F64),
    "regression of several numbers": (
        lambda: classifier(2, problem_type="regression"),
        {**TEXT, "labels": PLACES},
        F64,
    ),
    "token classification": (tagger, {**TEXT, "labels": tokens(5, 4, 3, 2, n=3)}, F64),
    "question": (
        lambda: bert("BertForQuestionAnswering"),
        {**QUESTIONS, "start_positions": STARTS, "end_positions": ENDS},
        F64,
    ),
    "llama": (llama, {**TEXT, "labels": tokens(6, 5, 4, 3)}, F32),
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
    weights = torch.ones(4, dtype=found.dtype)
    if "labels" in batch and batch["labels"].shape == IDS.shape:  # theirs is a mean over all tokens
        weights = (batch["labels"][:, int(is_causal_lm(model)) :] != -100).sum(1).to(found.dtype)
    together = theirs(**batch).loss.to(found.dtype)
    assert_close((found * weights).sum() / weights.sum(), together, **tolerance)


def test_neither_the_configuration_nor_the_batch_is_changed(case: Any) -> None:
    model, batch, _ = case
    config, given = model.config.to_dict(), {k: v.clone() for k, v in batch.items()}
    default_loss(model, batch)
    assert model.config.to_dict() == config
    assert_close(batch, given, rtol=0, atol=0)


def test_padding_does_not_change_a_loss(case: Any) -> None:
    model, batch, tolerance = case
    more = {"input_ids": 5, "attention_mask": 0, "labels": -100}
    wider = {
        k: torch.cat([v, v.new_full((4, 3), more[k])], 1) if v.shape == IDS.shape else v
        for k, v in batch.items()
    }
    found, expected = default_loss(model, wider), default_loss(model, batch)
    assert_close(found, expected, **(F32 if expected.dtype == torch.float32 else tolerance))


def test_without_labels_the_inputs_are_the_labels() -> None:
    model, labels = llama(), IDS.masked_fill(MASK == 0, -100)
    expected = default_loss(model, {**TEXT, "labels": labels})
    assert_close(default_loss(model, TEXT), expected, rtol=0, atol=0)
    bare = {"input_ids": IDS}
    assert_close(default_loss(model, bare), default_loss(model, {**bare, "labels": IDS}))
    # Labels that forget the padding do not make it count.
    assert_close(default_loss(model, {**TEXT, "labels": IDS}), expected, rtol=0, atol=0)


def test_the_first_token_after_padding_on_the_left_is_not_predicted() -> None:
    model = llama()
    left = {
        "input_ids": torch.cat([torch.full((4, 2), 7), IDS], 1),
        "attention_mask": torch.cat([torch.zeros(4, 2).long(), torch.ones(4, 6).long()], 1),
    }
    expected = default_loss(model, {"input_ids": IDS})
    # Rotary sines are computed in float32, at other positions.
    assert_close(default_loss(model, left), expected, **F32)
    assert_close(default_loss(model, {**left, "labels": left["input_ids"]}), expected, **F32)


def test_the_encoders_mask_does_not_hide_labels() -> None:
    """Source and target of one shape: the mask is that of the source."""
    model = t5()
    labels = tokens(6, 6, 6, 6)
    logits = model(**TEXT, labels=labels).logits
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
    assert_close(default_loss(model, {**TEXT, "labels": labels}), expected)


def test_an_answer_that_was_cut_off_does_not_count() -> None:
    model = bert("BertForQuestionAnswering")
    starts, ends = torch.tensor([[6], [2], [1], [9]]), torch.tensor([6, 5, 3, 2])
    batch = {**TEXT, "start_positions": starts, "end_positions": ends}
    inside = {**TEXT, "start_positions": STARTS, "end_positions": ENDS}
    found, expected = default_loss(model, batch), default_loss(model, inside)
    assert_close(found[1:3], expected[1:3], **F64)
    assert float(found[0].detach()) == 0.0
    logits = model(**TEXT).end_logits.masked_fill(MASK == 0, float("-inf"))
    of_ends = nn.functional.cross_entropy(logits, ENDS, reduction="none")
    assert_close(found[3], of_ends[3] / 2, **F64)
    bare = {"input_ids": IDS, "start_positions": STARTS, "end_positions": ENDS}  # without a mask
    assert_close(default_loss(model, bare), default_loss(model, {**bare, **QUESTIONS}), **F64)


def test_an_example_without_labels_has_no_loss() -> None:
    found = default_loss(tagger(), {**TEXT, "labels": tokens(5, 0, 3, 2, n=3)})
    assert float(found[1].detach()) == 0.0
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_judged_in_float32(dtype: torch.dtype) -> None:
    model = classifier().to(dtype)
    assert default_loss(model, {**TEXT, "labels": CLASSES}).dtype == torch.float32


def test_who_is_causal() -> None:
    assert is_causal_lm(llama())
    assert not is_causal_lm(t5())
    assert not is_causal_lm(bert("BertForMaskedLM"))

    class Mine(hf.LlamaForCausalLM):
        pass

    assert is_causal_lm(Mine(llama().config))


@pytest.mark.parametrize(
    ("make", "batch", "words"),
    [
        (classifier, TEXT, r"'labels', got only \['attention_mask', 'input_ids'\].*Pass loss="),
        (classifier, (IDS, MASK), "a mapping .* got tuple.*Pass loss="),
        (classifier, IDS, "a mapping .* got Tensor.*Pass loss="),
        (classifier, {**TEXT, "labels": CLASSES[:2]}, r"one for each of 4 examples, got \[2\]"),
        (tagger, {**TEXT, "labels": IDS[:, :5] % 3}, r"must be of shape \[4, 6\], got \[4, 5\]"),
        (llama, {"inputs_embeds": torch.randn(4, 6, 8).double()}, "'labels' or 'input_ids'"),
        (lambda: bert("BertModel"), {**TEXT, "labels": CLASSES}, "one with logits"),
    ],
)
def test_batches_it_cannot_judge(make: Callable[[], nn.Module], batch: Any, words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        default_loss(make(), batch)


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
    with pytest.raises(InvalidValue, match=r"batch 4, example 1: must be finite, got -inf"):
        checked_losses(lambda m, b: bad, model, batch, 4)
