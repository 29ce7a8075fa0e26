"""The default per-example losses: their mean is Transformers' own loss, and each is that of its
example alone."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

from headprune.core.errors import InvalidValue
from headprune.model.losses import check_finite, default_loss, is_causal_lm, shaped_losses

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


def bert(kind, **options):
    config = hf.BertConfig(**SIZES, max_position_embeddings=16, **options)
    return getattr(hf, kind)(config).double().eval()


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).double().eval()


def t5():
    sizes = {"vocab_size": 40, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = hf.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return hf.T5ForConditionalGeneration(config).eval()


def classifier(n=3, **options):
    return bert("BertForSequenceClassification", num_labels=n, **options)


def tagger():
    return bert("BertForTokenClassification", num_labels=3)


def tokens(*lengths, n=40):
    """Labels ``[4, 6]``, of which so many count in each row."""
    labels = IDS.flip(1) % n
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return labels


def one(batch, number):
    return {k: v[number : number + 1] for k, v in batch.items()}


SEVERAL = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).double()
GRADES = torch.tensor([0.5, -1.0, 2.0, 0.0]).double()
PLACES = torch.tensor([[0.5, -1.0], [2.0, 0.0], [1.0, 1.0], [0.0, 3.0]]).double()
CLASSES = torch.tensor([0, 2, 1, 1])
STARTS, ENDS = torch.tensor([0, 2, 1, 0]), torch.tensor([1, 5, 3, 2])
#: Without padding: Transformers has it in the softmax.
QUESTIONS = {"input_ids": IDS, "attention_mask": torch.ones_like(MASK)}

CASES = {
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
def case(request):
    torch.manual_seed(0)
    make, batch, tolerance = CASES[request.param]
    return make(), batch, tolerance


def test_each_example_has_the_loss_that_transformers_gives_it_alone(case):
    model, batch, tolerance = case
    config, given = model.config.to_dict(), {k: v.clone() for k, v in batch.items()}
    found = default_loss(model, batch)
    assert model.config.to_dict() == config
    assert_close(batch, given, rtol=0, atol=0)
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


def test_padding_does_not_change_a_loss(case):
    model, batch, tolerance = case
    more = {"input_ids": 5, "attention_mask": 0, "labels": -100}
    wider = {
        k: torch.cat([v, v.new_full((4, 3), more[k])], 1) if v.shape == IDS.shape else v
        for k, v in batch.items()
    }
    found, expected = default_loss(model, wider), default_loss(model, batch)
    assert_close(found, expected, **(F32 if expected.dtype == torch.float32 else tolerance))


def test_without_labels_the_inputs_are_the_labels():
    model, labels = llama(), IDS.masked_fill(MASK == 0, -100)
    expected = default_loss(model, {**TEXT, "labels": labels})
    assert_close(default_loss(model, TEXT), expected, rtol=0, atol=0)
    bare = {"input_ids": IDS}
    assert_close(default_loss(model, bare), default_loss(model, {**bare, "labels": IDS}))
    # Labels that forget the padding do not make it count.
    assert_close(default_loss(model, {**TEXT, "labels": IDS}), expected, rtol=0, atol=0)


def test_a_class_of_the_users_is_causal_as_its_parent_is():
    class Mine(hf.LlamaForCausalLM):
        pass

    assert is_causal_lm(Mine(llama().config))
    assert not is_causal_lm(t5())


def test_the_first_token_after_padding_on_the_left_is_not_predicted():
    model = llama()
    left = {
        "input_ids": torch.cat([torch.full((4, 2), 7), IDS], 1),
        "attention_mask": torch.cat([torch.zeros(4, 2).long(), torch.ones(4, 6).long()], 1),
    }
    expected = default_loss(model, {"input_ids": IDS})
    # Rotary sines are computed in float32, at other positions.
    assert_close(default_loss(model, left), expected, **F32)
    assert_close(default_loss(model, {**left, "labels": left["input_ids"]}), expected, **F32)


def test_the_encoders_mask_does_not_hide_labels():
    """Source and target of one shape: the mask is that of the source."""
    model = t5()
    labels = tokens(6, 6, 6, 6)
    logits = model(**TEXT, labels=labels).logits
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
    assert_close(default_loss(model, {**TEXT, "labels": labels}), expected)


def test_an_answer_that_was_cut_off_does_not_count():
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


def test_an_example_without_labels_has_no_loss():
    batch = {**TEXT, "labels": tokens(5, 0, 3, 2, n=3)}
    found = default_loss(tagger(), batch)
    assert default_loss(tagger().bfloat16(), batch).dtype == torch.float32
    assert float(found[1].detach()) == 0.0
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("make", "batch", "words"),
    [
        (llama, {"inputs_embeds": torch.randn(4, 6, 8).double()}, "'labels' or 'input_ids'"),
        (lambda: bert("BertModel"), {**TEXT, "labels": CLASSES}, "one with logits"),
    ],
)
def test_batches_it_cannot_judge(make, batch, words):
    with pytest.raises(InvalidValue, match=words):
        default_loss(make(), batch)


def test_what_is_checked_of_a_loss():
    model, batch = nn.Linear(1, 1), torch.ones(3, 1)
    with pytest.raises(InvalidValue, match=r"of shape \[3\], one loss per example, got \[3, 1\]"):
        shaped_losses(lambda m, b: b, model, batch, 0)
    with pytest.raises(InvalidValue, match=r"batch 4, example 1: must be finite, got -inf"):
        check_finite([(4, torch.tensor([0.0, -torch.inf, 1.0]))])
