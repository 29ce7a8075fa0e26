"""The default loss is the model's own, for every class of Transformers that can be built tiny; or
it is refused."""

import copy
import math
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.core.errors import InvalidValue
from headprune.model.losses import default_loss, is_causal_lm, reads_next
from headprune.model.own_loss import reading_of
from headprune.recovery import Finetune
from headprune.scoring._distributions import distributions
from tests.own_losses import TASKS, batch_for, build, classes, one
from tests.scoring_help import flat

#: Classes whose own loss is none that the default one could be.
OTHERS = {"ProphetNetForCausalLM", "ProphetNetForConditionalGeneration"}
BART = {
    "vocab_size": 60,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32,
}
WIDE = {"init_std": 0.3, "is_decoder": True, "is_encoder_decoder": False}
SIZES = {"hidden_size": 16, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------- every class


def outcomes(task, step):
    """How many classes of a mapping have which outcome; none of them is wrong."""
    found = {name: _outcome(name, task) for name in classes(task)[::step]}
    wrong = [f"{name}: {outcome}" for name, outcome in found.items() if outcome.startswith("wrong")]
    assert not wrong, "\n".join(wrong)
    other = {name for name, said in found.items() if said.startswith("refused: the default loss")}
    assert other <= OTHERS, "refused, though the default loss could judge as the model does"
    return Counter(outcome.partition(":")[0] for outcome in found.values())


@pytest.mark.parametrize(
    ("step", "least"),
    [
        pytest.param(25, 15, id="every 25th class"),
        pytest.param(1, 518, id="every class", marks=pytest.mark.long),
    ],
)
def test_the_default_loss_is_the_models_own(step, least):
    """Of so many classes at the least; with Transformers 5.23 there are a tenth more."""
    assert sum((outcomes(task, step) for task in TASKS), Counter())["same"] >= least


def _outcome(name, task):
    """``same``, ``refused: why``, ``not built``, ``no own loss``, or ``wrong: why``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = build(name)
        except Exception:  # not every class can do with such numbers, or has all packages
            return "not built"
        batch = batch_for(model, task)
        try:
            with torch.no_grad():
                own = [float(model(**one(batch, i)).loss) for i in range(2)]
        except Exception:  # inputs that only a few classes take, or no loss
            return "no own loss"
        try:
            ours = evaluate(model, [batch]).losses
        except InvalidValue as error:
            return f"refused: {error}" if "Pass loss=" in str(error) else f"wrong: {error}"
        except Exception as error:
            return f"wrong: {type(error).__name__}: {error}"
    # A convolution rounds otherwise for another number of examples; another reading is further
    # away.
    pairs = zip(own, ours, strict=True)
    same = all(math.isclose(a, b, rel_tol=1e-3, abs_tol=2e-3) for a, b in pairs)
    return "same" if same else f"wrong: its own {own}, ours {ours}"


# ---------------------------------------------------------------- wherever it is picked


def llava():
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 32}
    text = hf.LlamaConfig(vocab_size=60, num_key_value_heads=4, initializer_range=0.3, **sizes)
    vision = hf.CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=32, **sizes)
    parts = {"text_config": text, "vision_config": vision}
    config = hf.LlavaConfig(**parts, image_token_index=59, vision_feature_layer=-1)
    return hf.LlavaForConditionalGeneration(config).eval()


def bart():
    torch.manual_seed(0)
    return hf.BartForCausalLM(hf.BartConfig(**BART, **WIDE)).eval()


def _next_tokens(model):
    """Four examples of as many labels; with an image before the text, where the model takes one."""
    ids = IDS.clone()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    batch["labels"][:, :5] = -100
    if isinstance(model, hf.LlavaForConditionalGeneration):
        ids[:, 1:5] = 59
        draw = torch.Generator().manual_seed(4)
        batch["pixel_values"] = torch.randn(4, 3, 16, 16, generator=draw)
    return batch


def by_hand(shift):
    def loss(model, batch):
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, : 12 - shift]
        labels, columns = batch["labels"][:, shift:], logits.transpose(1, 2)
        losses = functional.cross_entropy(columns, labels, reduction="none", ignore_index=-100)
        return losses.sum(1) / (labels != -100).sum(1)

    return loss


@pytest.fixture(params=[(llava, 1), (bart, 0)], ids=["llava", "bart"])
def case(request):
    make, shift = request.param
    model = make()
    return model, _next_tokens(model), by_hand(shift)


def test_scores_judge_as_the_model_does(case):
    model, batch, right = case
    losses = (None, right, by_hand(1 if isinstance(model, hf.BartForCausalLM) else 0))
    found, expected, wrong = (
        flat(hp.score(model, [batch], "taylor", loss=loss, sites=_sites(model), progress=False))
        for loss in losses
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, wrong, rtol=1e-2, atol=1e-3)


def _sites(model):
    """Those that run: Bart's decoder has attention to an encoder that it does not have."""
    found = hp.find_sites(model)
    return type(found)((s for s in found if s.name.endswith("self_attn")), found.layouts.values())


def test_all_that_measures_a_loss_judges_as_the_model_does(case):
    model, batch, right = case
    with torch.no_grad():
        own = float(model(**batch).loss)
    found = evaluate(model, [batch])
    assert found.loss == pytest.approx(own, rel=1e-5)
    assert (found.metric, math.log(found.value)) == ("perplexity", pytest.approx(own, rel=1e-5))
    sites = _sites(model)
    mask = hp.HeadMask.from_keep({sites[0].name: [1, 2]}, {s.name: 4 for s in sites})
    asked = {"model": model, "batches": [batch], "sites": sites}
    for measure in (
        lambda loss: evaluate(model, [batch], loss).losses,
        lambda loss: hp.scoring.mask_losses(masks=[mask], loss=loss, **asked),
        lambda loss: flat(hp.scoring.rescorer(scorer="taylor", loss=loss, **asked)(mask)),
        lambda loss: hp.scoring.gate_gradients(loss=loss or default_loss, **asked),
    ):
        ours, theirs = torch.as_tensor(measure(None)), torch.as_tensor(measure(right))
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_ggn_counts_the_tokens_that_the_loss_counts(case):
    model, batch, _ = case
    shifted = reading_of(model, batch).shifted
    counted = distributions(model, batch, "the batch", shifted=shifted).counted
    assert counted.sum(1).tolist() == [7] * 4  # labels from the sixth token on
    assert counted.shape[1] == 12 - shifted


def test_training_lowers_the_models_own_loss(case):
    """Here the next token is the one after this in the alphabet; a model that is trained on the
    token itself unlearns that."""
    model, batch, _ = case
    with torch.no_grad():
        before = float(model(**batch).loss)
    hp.recover_(model, [batch], Finetune(steps=6, learning_rate=3e-3))
    with torch.no_grad():
        assert float(model(**batch).loss) < before - 0.5


def test_learned_gates_judge_as_the_model_does(case):
    model, batch, right = case
    inputs, labels = {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
    for m in model.modules():
        m.training = False
    model.training = True  # gates are drawn, and there is no dropout
    found = []
    for trainer in (True, False):
        with hp.learned_gates(model, hp.gating.HardConcrete(keep=0.5), _sites(model)) as gates:
            output = model(**inputs)
            if trainer:
                loss = gates.trainer_loss(output, labels)
            else:
                loss = right(lambda output=output, **_: output, batch).mean() + gates.penalty()
            loss.backward()
            slopes = gates.weights.grad, model.get_parameter("lm_head.weight").grad
            found.append((loss.detach(), *slopes, gates.n_forwards))
            model.zero_grad()
            assert model.training
    assert_close(*found)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_learned_gates_under_checkpoints_meet_the_gates_that_were_drawn():
    """The first loss has the model run once more, with other gates, between a forward and its
    backward."""
    slopes = []
    for kept in (False, True):
        model = build("LlamaForCausalLM")
        if kept:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = _next_tokens(model)
        with hp.learned_gates(model.train(), hp.gating.HardConcrete(keep=0.5)) as gates:
            gates.trainer_loss(model(input_ids=IDS), batch["labels"]).backward()
            slopes.append(gates.weights.grad)
    assert_close(*slopes)


def test_learned_gates_refuse_another_loss():
    model = classifier(Focal)
    with (
        hp.learned_gates(model, hp.gating.HardConcrete(keep=0.5)) as gates,
        pytest.raises(InvalidValue, match=r"own loss of Focal.*Pass a compute_loss_func"),
    ):
        gates.trainer_loss(model(input_ids=IDS), CLASSES["labels"])


def test_without_labels_bart_predicts_the_next_token():
    model, batch = bart(), {"input_ids": IDS}
    assert_close(default_loss(model, batch), by_hand(1)(model, {**batch, "labels": IDS}))


# ---------------------------------------------------------------- another loss than ours


class OwnLoss(hf.BertForSequenceClassification):
    """Judges by a loss of its own."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        if labels is not None:
            output.loss = self.judge(output.logits, labels)
        return output


class Focal(OwnLoss):
    """Weighs examples by how wrong the model is."""

    def judge(self, logits, labels):
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return ((1 - (-losses).exp()) ** 2 * losses).mean()


class Weighted(OwnLoss):
    """Weighs classes and smooths labels."""

    def judge(self, logits, labels):
        weights = torch.tensor([1.0, 5.0, 0.2])
        return functional.cross_entropy(logits, labels, weight=weights, label_smoothing=0.1)


class Broken(OwnLoss):
    """Has a loss of a single example."""

    def judge(self, logits, labels):
        if len(labels) > 1:
            raise RuntimeError("no such thing\nas labels")
        return functional.cross_entropy(logits, labels)


def classifier(kind=hf.BertForSequenceClassification):
    torch.manual_seed(0)
    return kind(hf.BertConfig(vocab_size=60, num_labels=3, initializer_range=0.5, **SIZES)).eval()


CLASSES = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
CLASSES |= {"labels": torch.tensor([0, 2, 1, 1])}


def test_another_loss_is_refused_wherever_it_is_asked():
    model = classifier(Focal)
    words = r"the default loss: must be the own loss of Focal, [\d.]+ on .* got [\d.]+\. Pass loss="
    plan = hp.HeadMask.from_keep({}, {s.name: 4 for s in hp.find_sites(model)})
    for ask in (
        lambda: hp.score(model, [CLASSES], "taylor"),
        lambda: hp.score(model, [CLASSES], ["wanda", "fisher"]),
        lambda: hp.scoring.mask_losses(model, [CLASSES], [plan]),
        lambda: evaluate(model, [CLASSES]),
        lambda: hp.recover_(model, [CLASSES], Finetune(steps=2, patience=1), validation=[CLASSES]),
    ):
        with pytest.raises(InvalidValue, match=words):
            ask()


def test_who_asks_no_loss_refuses_none():
    model = classifier(Focal)
    names = ["wanda", "entropy", "ggn", "surgeon", "obs", "magnitude"]
    found = hp.score(model, [CLASSES], names, progress=False)
    plainly = hp.score(classifier(), [CLASSES], names, progress=False)
    assert [scores.notes for scores in found] == [scores.notes for scores in plainly]

    def plain(model, batch):
        logits = model(batch["input_ids"]).logits
        return functional.cross_entropy(logits, batch["labels"], reduction="none")

    assert hp.score(model, [CLASSES], "taylor", loss=plain).n_examples == 4


@pytest.mark.parametrize("scorer", ["surgeon", "ggn"])
def test_an_output_that_may_be_no_classes_is_named(scorer):
    def notes(model, batch, **options):
        return " ".join(hp.score(model, [batch], scorer, progress=False, **options).notes)

    words = "The model's output was read as logits of a softmax over its last axis"
    own, x = nn.Sequential(hp.MultiHeadAttention(8, 4)), torch.randn(4, 5, 8)
    assert words in notes(own, x)
    # A class of Transformers says what it gives.
    assert words not in notes(classifier(), {"input_ids": IDS})
    # With a loss of the user's, surgeon reads that one; ggn says that it does not.
    assert words not in notes(own, x, loss=lambda m, b: m(b).square().mean((1, 2)))


def test_weights_of_classes_and_smoothed_labels_are_told():
    plain, model = classifier(), classifier(Weighted)
    said = (
        "The model's own loss has smoothed labels and weights of classes; the default loss does not."
        " Pass loss= for them."
    )
    scores, expected = (hp.score(m, [CLASSES], "taylor", progress=False) for m in (model, plain))
    assert (scores.notes, scores.values) == ((said, *expected.notes), expected.values)
    assert hp.recover_(model, [CLASSES], Finetune(steps=1)).notes == (said,)


def test_a_loss_of_its_own_that_fails_is_told():
    scores = hp.score(classifier(Broken), [CLASSES], "taylor", progress=False)
    assert "not compared with the model's own, which failed: RuntimeError: no" in scores.notes[0]
    assert scores.values == hp.score(classifier(), [CLASSES], "taylor", progress=False).values


def test_a_routers_share_is_no_other_loss():
    model = build("MixtralForCausalLM")
    batch = _next_tokens(model)
    model.config.output_router_logits = True
    with torch.no_grad():
        without = model(**batch, output_router_logits=False).loss
        assert float(model(**batch).loss) > float(without) + 1e-4
    assert reading_of(model, batch).refusal is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_ways_to_read_labels_are_told_apart(dtype):
    """Transformers gives both classes' names to causal language models."""
    for model, shifted in ((llava(), True), (bart(), False)):
        batch = _next_tokens(model)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        found = reading_of(model.to(dtype), batch)
        assert (found.shifted, found.refusal) == (shifted, None)
        batch["labels"][:] = -100  # they say nothing, so that the class decides
        assert reading_of(model, batch).shifted is reads_next(model) is shifted


def test_padding_that_the_model_counts_is_no_other_loss():
    """The default loss leaves padding out though its labels say otherwise; the model's own does
    not."""
    model = build("LlamaForCausalLM")
    batch = _next_tokens(model)
    batch["attention_mask"][0, 8:] = 0
    assert reading_of(model, batch).refusal is None
    assert hp.score(model, [batch], "taylor", progress=False).n_examples == 4


# ---------------------------------------------------------------- no trace


def test_the_comparison_leaves_no_trace():
    model = classifier().train()
    before, state = model.config.to_dict(), torch.get_rng_state()
    reading_of(model, CLASSES)
    assert model.training
    assert model.config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_no_batch_is_lost_to_the_comparison():
    model = classifier()
    once = (one(CLASSES, i) for i in range(4))
    assert hp.score(model, once, "taylor", progress=False).n_examples == 4
    assert evaluate(model, (one(CLASSES, i) for i in range(4))).n_examples == 4


def test_a_training_that_goes_on_reads_labels_as_before(tmp_path):
    """The first batch after a kill may say nothing of how labels are read: what was found is in the
    checkpoint."""
    model, silent = bart(), _next_tokens(bart())
    silent["labels"][:] = -100
    batches = [_next_tokens(model), silent]
    settings = Finetune(epochs=1, learning_rate=1e-2, checkpoint_every=1)
    whole, killed, again = (copy.deepcopy(model) for _ in range(3))
    hp.recover_(whole, batches, settings, folder=tmp_path / "whole")
    with pytest.raises(_Killed):
        hp.recover_(killed, _Dying(batches), settings, folder=tmp_path / "parts")
    report = hp.recover_(again, batches, settings, folder=tmp_path / "parts")
    assert "Continued after step 1" in report.notes[0]
    assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)


class _Killed(Exception):
    """A training ends early."""


class _Dying(list[Any]):
    def __iter__(self):
        yield self[0]
        raise _Killed


# ---------------------------------------------------------------- wrappers


def _compiled_adapters(model):
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    return torch.compile(peft.get_peft_model(model, config), backend="eager")


def _distributed(model):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


@pytest.mark.filterwarnings("ignore")  # DataParallel without a GPU, PEFT's and compilers' own
@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("LlamaForCausalLM", _compiled_adapters),
        ("BartForCausalLM", _distributed),
        ("BartForConditionalGeneration", _distributed),
    ],
)
def test_a_wrapper_hides_no_kind_of_model(name, wrapped, request):
    inside = bart() if name == "BartForCausalLM" else build(name)
    model = wrapped(inside).eval()
    if wrapped is _distributed:
        request.addfinalizer(torch.distributed.destroy_process_group)
    assert is_causal_lm(model) is is_causal_lm(inside)
    assert reads_next(model) is reads_next(inside)
    batch = _next_tokens(inside)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        if is_causal_lm(inside):
            bare = {"input_ids": IDS, "attention_mask": batch["attention_mask"]}
            assert evaluate(model, [bare]).metric == "perplexity"
            losses = default_loss(model, bare)
            assert_close(losses, by_hand(1)(model, {**bare, "labels": IDS}))
        own = float(model(**batch).loss)
        assert evaluate(model, [batch]).loss == pytest.approx(own, rel=1e-5)


def test_a_class_without_a_loss_says_nothing_of_labels():
    kind = getattr(hf, "Gemma4AssistantForCausalLM", None)
    if kind is None:
        pytest.skip("not in this version of Transformers")
    model = object.__new__(kind)
    nn.Module.__init__(model)
    assert reads_next(model)


def test_gates_are_learned_by_the_trainer_whatever_it_counts(tmp_path):
    """The Trainer gives the model the number of tokens of several batches, by which the model
    divides its loss."""
    model = build("LlamaForCausalLM")
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(3, 40, (16, 7))]
    settings = {"use_cpu": True, "report_to": "none", "save_strategy": "no"}
    settings |= {"max_steps": 2, "gradient_accumulation_steps": 2, "disable_tqdm": True}
    args = hf.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, **settings)
    with hp.learned_gates(model, hp.gating.HardConcrete(keep=0.5, warmup=2)) as gates:
        loss = gates.trainer_loss
        trainer = hf.Trainer(model, args, train_dataset=rows, compute_loss_func=loss)
        assert math.isfinite(trainer.train().training_loss)
