"""Scorers that read activations and attention maps, against literal loops; what they need and what
they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.attention import MultiHeadAttention
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.double import Doubled
from headprune.model.padding import query_mask
from headprune.model.running import call, outputs
from headprune.scoring import ActivationNorm, Attattr, Confidence, Entropy, Fluctuation, Obs, Wanda
from headprune.scoring._activations import jackknife
from headprune.scoring._maps import eager
from tests.laws.support import Subject, family_subject, picture, set_implementation
from tests.laws.support import examples_of as data
from tests.reference import activations as reference

MAIN = [
    ("bert", "bert"),
    ("gpt2", "gpt2"),
    ("llama", "llama"),
    ("t5", "t5"),
    ("multi_head_attention", "multi_head_attention"),
]
OVER = pytest.mark.parametrize("family", MAIN, ids=[family for _, family in MAIN])

CONTEXTS: list[tuple[Any, Any]] = [
    (ActivationNorm(), reference.activation_norm),
    (ActivationNorm(of="output"), reference.output_norm),
    (Fluctuation(), reference.fluctuation),
    (Fluctuation(normalize="none"), lambda *args: reference.fluctuation(*args, normalize=False)),
    (Wanda(), reference.wanda),
    (Obs(), reference.obs),
]
ACTIVATIONS = [scorer for scorer, _ in CONTEXTS]
MAPS = [Entropy(), Confidence()]
#: Rounding of fp64, relative to the largest score of a layer.
TIGHT = 1e-12


@pytest.fixture(autouse=True)
def _doubled() -> Iterator[None]:
    """Norms, angles and softmaxes in fp64, which Transformers takes in fp32 whatever the model's
    type."""
    with Doubled():
        yield


def split(batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
    n = len(next(iter(batch.values())))
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, n, size)]


def score(subject: Subject, scorers: Any, batches: Any = None, **options: Any) -> Any:
    options = {"sites": subject.sites, "progress": False, **options}
    return hp.score(subject.model, batches or [subject.batch], scorers, **options)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Small, so that ``exp(-loss)`` is a probability worth attributing."""
    first = next(o for o in outputs(call(model, batch)) if o.ndim > 1)
    return first.flatten(1).logsumexp(-1) * 0.3


def close(found: Any, expected: Any, tolerance: float = TIGHT) -> None:
    """Values and standard errors agree, relative to the layer's largest score."""
    assert (found.scorer, found.settings, found.n_examples) == (
        expected.scorer,
        expected.settings,
        expected.n_examples,
    )
    for layer, (row, other) in enumerate(zip(found.values, expected.values, strict=True)):
        atol = tolerance * max(map(abs, other))
        assert atol > 0
        assert_close(
            torch.tensor(row),
            torch.tensor(other),
            rtol=0,
            atol=atol,
            msg=lambda m, f=found: f"{f}: {m}",
        )
        if found.standard_errors is not None:
            mine, theirs = found.standard_errors[layer], expected.standard_errors[layer]
            assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=10 * atol)


# ---------------------------------------------------------------- against literal loops


@pytest.mark.parametrize(
    "family", [*MAIN, ("albert", "albert")], ids=[f for _, f in MAIN] + ["one module, two runs"]
)
def test_statistics_of_contexts_are_those_of_literal_loops(family: tuple[str, str]) -> None:
    """Values, and standard errors as by leaving out one example at a time; a module that runs twice
    counts twice."""
    subject = family_subject(*family)
    batch = data(subject, 4)
    scores = score(subject, ACTIVATIONS, split(batch, 3))
    for number, site in enumerate(subject.sites):
        found = reference.contexts(subject.model, batch, site)
        weight = reference.weight_of(subject.model, site)
        for mine, (_, literal) in zip(scores, CONTEXTS, strict=True):
            values, errors = reference.jackknifed(lambda x, f=literal: f(weight, site, x), found)  # noqa: B023
            # Squared distances of a least-squares problem lose half the digits that its solution
            # has.
            loose = (
                {"rtol": 1e-8, "atol": 1e-10}
                if mine.scorer == "obs"
                else {"rtol": 1e-10, "atol": 1e-12}
            )
            assert_close(list(mine.values[number]), values, **loose)
            assert_close(list(mine.standard_errors[number]), errors, **loose)


def test_obs_is_what_a_refit_cannot_win_back() -> None:
    """By a means of its own: the ridge problem solved by gradient, not by the formula."""
    subject = family_subject("bert", "bert")
    site = subject.sites[0]
    rows = torch.cat(reference.contexts(subject.model, subject.batch, site))
    weight = reference.weight_of(subject.model, site)
    penalty = 0.05 * rows.square().mean()
    free = torch.ones(rows.shape[1], dtype=torch.bool)
    free[reference.channels(site, site.units[1])] = False
    kept = weight[:, free].clone().requires_grad_()

    def error() -> Tensor:
        change = (weight.clone() * 0).index_copy(1, free.nonzero()[:, 0], kept) - weight
        return (rows @ change.T).square().sum() / len(rows) + penalty * change.square().sum()

    optimizer = torch.optim.LBFGS(
        [kept], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = error()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_close(
        score(subject, Obs(ridge=0.05)).values[0][1], float(error().detach()), rtol=1e-8, atol=0
    )


@OVER
def test_statistics_of_maps_are_those_of_literal_loops(family: tuple[str, str]) -> None:
    subject = family_subject(*family)
    batch = data(subject, 4)
    scores = score(subject, [Entropy(), Confidence(exclude=())], split(batch, 3))
    if hasattr(subject.model, "config"):
        set_implementation(subject.model, "eager")
    for number, site in enumerate(subject.sites):
        for mine, measure in zip(scores, (reference.minus_entropy, max), strict=True):
            rows = torch.tensor(
                reference.of_queries(subject.model, batch, site, subject.sites, measure)
            )
            assert_close(list(mine.values[number]), rows.mean(0).tolist(), rtol=1e-6, atol=1e-8)
            errors = (rows.double().std(0) / 2).tolist()
            assert_close(list(mine.standard_errors[number]), errors, rtol=1e-5, atol=1e-7)


def test_maps_of_windows_are_those_of_their_image() -> None:
    subject = family_subject("swin", "swin")
    size, scorers = len(subject.batch["pixel_values"]), [Entropy(), Confidence(exclude=())]
    scores = score(subject, scorers)
    set_implementation(subject.model, "eager")
    with torch.no_grad():
        seen: list[Tensor] = []
        handles = [
            subject.model.get_submodule(s.name).register_forward_hook(
                lambda m, a, out: seen.append(out[1])
            )
            for s in subject.sites
        ]
        subject.model(**subject.batch)
    for handle in handles:
        handle.remove()
    for number, found in enumerate(seen):
        assert len(found) > size
        for mine, rows in zip(scores, (found.xlogy(found).sum(-1), found.amax(-1)), strict=True):
            expected = rows.unflatten(0, (size, -1)).mean((1, 3))
            assert_close(
                list(mine.values[number]), expected.mean(0).tolist(), rtol=1e-9, atol=1e-12
            )
    attributed = score(subject, Attattr(steps=2), loss=own_loss)
    close(score(subject, Attattr(steps=2), split(subject.batch, 1), loss=own_loss), attributed)


def test_what_an_attention_is_attributed_is_over_all_its_runs() -> None:
    """With one step, by the gradient of the answer with respect to the maps that the model itself
    returns."""
    subject = family_subject("albert", "albert")
    batch = {**subject.batch, "attention_mask": torch.ones_like(subject.batch["attention_mask"])}
    found = score(subject, Attattr(steps=1), [batch], loss=own_loss)
    set_implementation(subject.model, "eager")
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    out = subject.model(**inputs, output_attentions=True)
    answer = torch.exp(-0.3 * out.logits.flatten(1).logsumexp(-1)).sum()
    slopes = torch.autograd.grad(answer, out.attentions)
    assert len(slopes) > 1
    best = (
        torch.stack([(a * g).amax((2, 3)) for a, g in zip(out.attentions, slopes, strict=True)])
        .amax(0)
        .mean(0)
    )
    assert_close(list(found.values[0]), best.tolist(), rtol=1e-7, atol=1e-12)


def test_the_parts_of_a_model_take_their_softmax_in_the_open_and_have_their_kernels_back() -> None:
    from transformers import CLIPConfig, CLIPModel

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 16,
    }
    config = CLIPConfig(
        text_config=sizes, vision_config={**sizes, "image_size": 8, "patch_size": 4}
    )
    holder = nn.Module()
    holder.config = CLIPModel(
        config
    ).config  # of a model whose parts have no configurations of their own
    parts = [holder.config, holder.config.text_config, holder.config.vision_config]
    parts[1]._attn_implementation = "flash_attention_2"
    before = [part._attn_implementation for part in parts]
    with eager(holder):
        assert [part._attn_implementation for part in parts] == ["eager"] * 3
    assert (
        [part._attn_implementation for part in parts]
        == before
        == ["sdpa", "flash_attention_2", "sdpa"]
    )


def test_confidence_leaves_nothing_out_where_there_are_no_ids() -> None:
    subject = family_subject("bert", "bert")
    batch = data(subject, 3)
    embedded = {k: v for k, v in batch.items() if k not in ("input_ids", "labels")}
    embedded["inputs_embeds"] = subject.model.get_input_embeddings()(batch["input_ids"]).detach()
    gone = Confidence(exclude=(int(batch["input_ids"][0, 2]),))
    assert (
        score(subject, gone, [embedded]).values
        == score(subject, Confidence(exclude=()), [embedded]).values
    )


def test_confidence_knows_what_a_decoder_reads_from_labels() -> None:
    subject = family_subject("t5", "t5")
    batch = data(subject, 3)
    labels = batch.pop("decoder_input_ids")
    shifted = subject.model.prepare_decoder_input_ids_from_labels(labels)
    gone = Confidence(exclude=(int(labels[0, 1]),))
    found = score(subject, gone, [{**batch, "labels": labels}])
    close(found, score(subject, gone, [{**batch, "labels": labels, "decoder_input_ids": shifted}]))
    assert (
        found.values != score(subject, Confidence(exclude=()), [{**batch, "labels": labels}]).values
    )


def test_confidence_leaves_tokens_out_on_both_sides() -> None:
    subject = family_subject("bert", "bert")
    batch = data(subject, 3)
    gone = int(batch["input_ids"][0, 2])
    site, total = subject.sites[0], torch.zeros(3, 4)
    found = score(subject, Confidence(exclude=(gone,)), [batch])
    set_implementation(subject.model, "eager")
    for i in range(3):
        maps = reference.maps(subject.model, reference.example(batch, i), site, subject.sites)
        kept = [
            t
            for t in range(7)
            if batch["attention_mask"][i, t] and batch["input_ids"][i, t] != gone
        ]
        total[i] = maps[:, kept][:, :, kept].amax(-1).mean(-1)
    assert_close(list(found.values[0]), total.mean(0).tolist(), rtol=1e-6, atol=1e-8)
    assert found.values != score(subject, Confidence(), [batch]).values


def test_confidence_leaves_out_the_end_of_the_sequence_by_itself() -> None:
    subject = family_subject("t5", "t5")
    batch = data(subject, 3)
    batch["input_ids"][:, 3] = subject.model.config.eos_token_id
    batch["decoder_input_ids"][:, 2] = subject.model.config.eos_token_id
    named = score(subject, Confidence(exclude=(subject.model.config.eos_token_id,)), [batch])
    found = score(subject, Confidence(), [batch])
    everything = score(subject, Confidence(exclude=()), [batch])
    assert found.values == named.values
    kinds = ["encoder" if s.kind == "self" else s.kind for s in subject.sites]
    assert set(kinds) == {"encoder", "causal", "cross"}
    for mine, whole in zip(found.values, everything.values, strict=True):
        assert mine != whole


@OVER
def test_attention_attribution_is_that_of_finite_differences(family: tuple[str, str]) -> None:
    subject = family_subject(*family)
    batch = reference.example(subject.batch, 2)
    batch = {k: v[:, :4] if v.ndim > 1 else v for k, v in batch.items()}
    found = score(subject, Attattr(steps=2), [batch], loss=own_loss)
    if hasattr(subject.model, "config"):
        set_implementation(subject.model, "eager")
    else:  # shows its weights, so that it takes its softmax in the open
        for module in subject.model.modules():
            if isinstance(module, MultiHeadAttention):
                module.register_forward_pre_hook(
                    lambda m, a, k: (a, {**k, "need_weights": True}), with_kwargs=True
                )
                module.register_forward_hook(lambda m, a, out: out[0])
    for number in {0, len(subject.sites) - 1}:
        site = subject.sites[number]
        whole = reference.attention_attribution(subject.model, batch, own_loss, number, steps=2)
        heads = whole.amax((1, 2))
        expected = [float(sum(heads[site.heads.index(h)] for h in unit)) for unit in site.units]
        assert_close(list(found.values[number]), expected, rtol=1e-5, atol=1e-9)


# ---------------------------------------------------------------- what scores do not depend on


@OVER
def test_batch_size_and_order(family: tuple[str, str]) -> None:
    """Also over more examples than there are blocks; standard errors then depend on the order, and
    only they do."""
    subject = family_subject(*family)
    scorers = [*ACTIVATIONS, *MAPS]
    batch = data(subject, 30)
    expected = score(subject, scorers, split(batch, 64))
    for size in (1, 7):
        for mine, theirs in zip(score(subject, scorers, split(batch, size)), expected, strict=True):
            close(mine, theirs)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    mixed = score(subject, scorers, split({k: v[order] for k, v in batch.items()}, 7))
    for mine, theirs in zip(mixed, expected, strict=True):
        for row, other in zip(mine.values, theirs.values, strict=True):
            assert_close(
                torch.tensor(row), torch.tensor(other), rtol=0, atol=TIGHT * max(map(abs, other))
            )


def test_padding_of_an_encoder_decoder_is_told_on_both_sides() -> None:
    subject = family_subject("t5", "t5")
    scorers = [*ACTIVATIONS, *MAPS]
    batch = data(subject, 3)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    batch["decoder_attention_mask"] = mask

    def longer(x: Tensor, by: int, value: int) -> Tensor:
        return nn.functional.pad(x, (0, by), value=value)

    padded = {
        "input_ids": longer(batch["input_ids"], 2, 7),
        "attention_mask": longer(batch["attention_mask"], 2, 0),
        "decoder_input_ids": longer(batch["decoder_input_ids"], 4, 7),
        "decoder_attention_mask": longer(mask, 4, 0),
    }
    expected = score(subject, scorers, [batch])
    for mine, theirs in zip(score(subject, scorers, [padded]), expected, strict=True):
        close(mine, theirs)
    labelled = {k: v for k, v in padded.items() if k != "decoder_attention_mask"}
    labelled["labels"] = longer(batch["decoder_input_ids"], 4, 7).masked_fill(
        padded["decoder_attention_mask"] == 0, -100
    )
    for mine, theirs in zip(score(subject, scorers, [labelled]), expected, strict=True):
        close(mine, theirs)
    without = {k: v for k, v in padded.items() if k != "decoder_attention_mask"}
    assert score(subject, Wanda(), [without]).values[2] != expected[4].values[2]


@pytest.mark.parametrize("family", MAIN[:4], ids=[family for _, family in MAIN[:4]])
def test_attention_implementation(family: tuple[str, str]) -> None:
    subject = family_subject(*family)
    scorers = [*ACTIVATIONS, *MAPS, Attattr(steps=2)]
    found = []
    for implementation in ("sdpa", "eager"):
        set_implementation(subject.model, implementation)
        found.append(score(subject, scorers, loss=own_loss))
        assert subject.model.config._attn_implementation == implementation
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs)


OTHERS = [
    ("swin", "swin"),  # windows
    ("head_list_bare", "list of heads without output"),  # read at its output
    (
        "torch_multi_head",
        "torch.nn.MultiheadAttention",
    ),  # an output projection that is not called, sequence first
]


@pytest.mark.parametrize("family", OTHERS, ids=[family for _, family in OTHERS])
def test_other_layouts_are_read_example_by_example(family: tuple[str, str]) -> None:
    subject = family_subject(*family)
    expected = score(subject, ACTIVATIONS, [subject.batch])
    for mine, theirs in zip(
        score(subject, ACTIVATIONS, split(subject.batch, 1)), expected, strict=True
    ):
        close(mine, theirs)
        assert min(min(row) for row in mine.standard_errors) > 0


@pytest.mark.parametrize("family", [("bert", "bert"), OTHERS[1]], ids=["bert", OTHERS[1][1]])
def test_heads_that_are_left_are_read_in_their_place(family: tuple[str, str]) -> None:
    subject = family_subject(*family)
    before = score(
        subject, [Wanda(), ActivationNorm(), Entropy()][: 3 if family[0] == "bert" else 2]
    )
    first = subject.sites[0]
    hp.prune_(subject.model, subject.without({first.name: [0, 2]}), sites=subject.sites)
    sites = hp.find_sites(subject.model)
    for mine, whole in zip(
        score(subject, [b.scorer for b in before], sites=sites), before, strict=True
    ):
        assert_close(
            list(mine.values[0]), [whole.values[0][1], whole.values[0][3]], rtol=1e-10, atol=1e-12
        )


# ---------------------------------------------------------------- standard errors


def test_the_jackknife_of_blocks_of_unlike_size() -> None:
    """For a mean it is the textbook's formula for groups of m_j, and for single examples the
    examples themselves."""
    values = torch.randn(23, 3, dtype=torch.float64)
    sums = torch.stack([values[g::5].sum(0) for g in range(5)])
    sizes = [len(values[g::5]) for g in range(5)]
    counts = torch.tensor(sizes).double()

    def mean(weights: Tensor) -> Tensor:
        return weights @ sums / (weights @ counts)

    rows = jackknife(mean, torch.zeros(5).double(), [*sizes])
    assert_close(rows.mean(0), values.mean(0))
    expected = torch.zeros(3).double()
    for g, size in enumerate(sizes):
        h = 23 / size
        without = (values.sum(0) - sums[g]) / (23 - size)
        pseudo = h * values.mean(0) - (h - 1) * without
        expected += (pseudo - values.mean(0)) ** 2 / (h - 1) / 5
    # Moving the rows so that their mean is the score takes a little off where sizes differ.
    assert_close(rows.var(0) / 5, expected, rtol=5e-3, atol=0)
    alone = jackknife(lambda w: w @ values / w.sum(), torch.zeros(23).double(), [1] * 23)
    assert_close(alone, values)


@pytest.mark.parametrize(
    "scorer",
    [Wanda(), Obs(blocks=4), Fluctuation(normalize="none")],
    ids=lambda s: type(s).__name__,
)
def test_standard_errors_are_the_spread_over_other_data(scorer: Any) -> None:
    """The spread of scores over 60 data sets of 24 examples, which come from the same
    distribution."""
    subject = family_subject("multi_head_attention", "multi_head_attention")
    found, errors = [], []
    for seed in range(60):
        batch = {
            "x": torch.randn(24, 7, 16, generator=torch.Generator().manual_seed(seed)).double()
        }
        one = score(subject, scorer, [batch])
        found.append(one.values[0])
        errors.append(one.standard_errors[0])
    ratio = torch.tensor(errors).square().mean(0).sqrt() / torch.tensor(found).std(0)
    # 60 draws know a spread to 9 %, and a jackknife of 4 blocks is itself rough.
    assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=0.35)


def test_samples_are_a_row_a_block_or_an_example() -> None:
    subject = family_subject("bert", "bert")
    batch = data(subject, 30)
    rows = [
        len(s.samples.matrix)
        for s in score(subject, [Wanda(), Obs(), Obs(blocks=1), Entropy()], [batch])
    ]
    assert rows == [20, 8, 1, 30]
    assert score(subject, Obs(blocks=1), [batch]).standard_errors is None


def test_one_example_has_no_standard_error_and_says_so() -> None:
    subject = family_subject("bert", "bert")
    for scores in score(subject, [*ACTIVATIONS, *MAPS], split(subject.batch, 1)[:1]):
        assert scores.standard_errors is None
        assert any("standard error" in note for note in scores.notes), scores.scorer


# ---------------------------------------------------------------- one pass, no trace


def test_one_forward_pass_for_all_of_them() -> None:
    subject = family_subject("bert", "bert")
    runs = []
    subject.model.classifier.register_forward_hook(lambda *_: runs.append(1))
    counts = []
    for scorers in ([Wanda()], [Wanda(), *ACTIVATIONS, Obs(blocks=2)]):
        runs.clear()
        score(subject, scorers, split(subject.batch, 1))
        counts.append(len(runs))
    assert counts[0] == counts[1] >= 3


def test_nothing_is_left_behind() -> None:
    for family in (("llama", "llama"), ("multi_head_attention", "multi_head_attention")):
        subject = family_subject(*family)
        before = picture(subject.model)
        kernels = [
            m.config._attn_implementation for m in subject.model.modules() if hasattr(m, "config")
        ]
        score(subject, [*ACTIVATIONS, *MAPS, Attattr(steps=1)], loss=own_loss)
        assert picture(subject.model) == before
        assert [
            m.config._attn_implementation for m in subject.model.modules() if hasattr(m, "config")
        ] == kernels


def test_an_error_puts_the_kernel_back() -> None:
    subject = family_subject("bert", "bert")
    before, kernel = picture(subject.model), subject.model.config._attn_implementation
    assert kernel == "sdpa"

    def failing(model: nn.Module, batch: Any) -> Tensor:
        if model.config._attn_implementation == "eager":
            raise KeyError("while it is eager")
        return own_loss(model, batch)

    for scorer in (Entropy(), Attattr()):
        with pytest.raises(KeyError, match="while it is eager"):
            score(subject, scorer, loss=failing)
        assert subject.model.config._attn_implementation == kernel
        assert picture(subject.model) == before


def test_our_own_attention_still_returns_what_was_asked_for() -> None:
    """A model that reads the weights gets them during the pass too."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(8, 2)
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            out, weights = self.attention(x, need_weights=True)
            self.seen.append(weights.ndim)
            return out

    model = Reads().double()
    hp.score(model, [torch.randn(3, 4, 8).double()], ["entropy", "confidence"], progress=False)
    assert set(model.seen) == {4}


class TwoSentences(nn.Module):
    """An encoder that runs once for each sentence: the batch has no mask of its own, each sentence
    has."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
        a, b = (self.encoder(**tokens).logits for tokens in (first, second))
        return nn.functional.cosine_similarity(a, b)


def test_padding_of_inputs_inside_a_batch_does_not_count() -> None:
    subject = family_subject("bert", "bert")
    tokens = {k: subject.batch[k] for k in ("input_ids", "attention_mask")}
    assert bool((tokens["attention_mask"] == 0).any())

    def longer(sentence: dict[str, Tensor]) -> dict[str, Tensor]:
        fill = {"input_ids": 7, "attention_mask": 0}
        return {k: torch.cat([v, v.new_full((len(v), 3), fill[k])], 1) for k, v in sentence.items()}

    other = {k: v.flip(0) for k, v in tokens.items()}
    scorers = [
        ActivationNorm(),
        Fluctuation(),
        Wanda(),
        Obs(),
        Entropy(),
        Confidence(),
        Attattr(steps=2),
    ]
    model = TwoSentences(subject.model)
    found = [
        hp.score(model, [batch], scorers, loss=lambda m, b: m(**b).square(), progress=False)
        for batch in (
            {"first": tokens, "second": other},
            {"first": longer(tokens), "second": longer(other)},
        )
    ]
    for short, padded in zip(*found, strict=True):
        assert_close(
            torch.tensor(padded.values),
            torch.tensor(short.values),
            rtol=1e-5,
            atol=1e-6,
            msg=short.scorer,
        )


# ---------------------------------------------------------------- what they need and refuse


def test_no_labels_are_needed() -> None:
    subject = family_subject("bert", "bert")
    bare = {k: v for k, v in subject.batch.items() if k != "labels"}
    with_labels = score(subject, [*ACTIVATIONS, *MAPS])
    for mine, theirs in zip(
        score(subject, [*ACTIVATIONS, *MAPS], [bare]), with_labels, strict=True
    ):
        assert mine.values == theirs.values
    with pytest.raises(InvalidValue, match="labels"):
        score(subject, Attattr(), [bare])


@pytest.mark.parametrize(
    "name", ["obs", "activation_norm", "fluctuation", "wanda", "entropy", "confidence", "attattr"]
)
def test_no_data(name: str) -> None:
    subject = family_subject("bert", "bert")
    with pytest.raises(InvalidValue, match="needs data"):
        hp.score(subject.model, None, name)


@pytest.mark.parametrize("scorer", [Entropy(), Attattr()])
def test_a_fused_kernel_is_refused_in_words(scorer: Any) -> None:
    subject = family_subject("torch_multi_head", "torch.nn.MultiheadAttention")
    with pytest.raises(UnsupportedModel, match=r"attention map of first.*fused kernel"):
        score(subject, scorer, loss=own_loss)


def test_a_map_that_is_not_in_use_is_refused() -> None:
    """Weights that are returned but computed beside the point: the gate's gradient gives them
    away."""

    class Beside(MultiHeadAttention):  # type: ignore[misc]
        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(query, *args, **{**kwargs, "need_weights": True})
            return out, weights.clone() + 0 * query.sum()

    torch.manual_seed(0)
    model = nn.Sequential(Beside(8, 2)).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).square().mean((1, 2))

    with pytest.raises(UnsupportedModel, match="gradient is not the gate's"):
        hp.score(
            model, [torch.randn(3, 4, 8).double()], Attattr(steps=1), loss=loss, progress=False
        )


def test_a_map_that_has_another_use_besides_is_refused() -> None:
    class Twice(MultiHeadAttention):  # type: ignore[misc]
        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(query, *args, **{**kwargs, "need_weights": True})
            return out + weights.square().sum((1, 3))[..., None], weights

    torch.manual_seed(0)
    model, x = nn.Sequential(Twice(8, 2)).double(), torch.randn(3, 4, 8).double()

    def first(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).square().mean((1, 2))

    with pytest.raises(UnsupportedModel, match="gradient is not the gate's"):
        hp.score(model, [x], Attattr(steps=1), loss=first, progress=False)
    with pytest.raises(
        InvalidValue, match="the loss: must be one that depends on 0, got no dependence on it"
    ):
        hp.score(
            nn.Sequential(MultiHeadAttention(8, 2)).double(),
            [x],
            Attattr(steps=1),
            loss=lambda m, x: m(x).new_ones(len(x)),
            progress=False,
        )


def test_tokens_that_do_not_vary() -> None:
    subject = family_subject("bert", "bert")
    batch = {
        "input_ids": torch.full((3, 1), 5),
        "attention_mask": torch.ones(3, 1, dtype=torch.long),
    }
    found = score(subject, Fluctuation(), [batch])
    assert found.values == ((0.0,) * 4,) * len(found.values)
    assert any("Nothing varies over the tokens at" in note for note in found.notes)


def test_nothing_but_padding() -> None:
    subject = family_subject("bert", "bert")
    batch = {**subject.batch, "attention_mask": torch.zeros(3, 7, dtype=torch.long)}
    for scorer in (Wanda(), Entropy(), Attattr(steps=1)):
        with pytest.raises(InvalidValue, match="with a token that"):
            score(subject, scorer, [batch], loss=own_loss)


def test_numbers_that_are_not_finite() -> None:
    subject = family_subject("bert", "bert")
    with torch.no_grad():
        subject.model.bert.encoder.layer[0].attention.self.value.bias[0] = torch.nan
    with pytest.raises(InvalidValue, match="finite"):
        score(subject, Wanda())
    subject = family_subject("bert", "bert")
    ids = subject.batch["input_ids"]
    odd = next(int(i) for i in ids[1, :3] if i not in ids[0])
    with torch.no_grad():
        subject.model.bert.embeddings.word_embeddings.weight[odd] = torch.nan
    with pytest.raises(InvalidValue, match="the attention maps of example 1: must be finite"):
        score(subject, Entropy(), loss=own_loss)


def test_maps_of_no_whole_examples_are_refused() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x.mean((1, 2)) + self.attention(x[1:]).mean()

    x = torch.randn(3, 4, 8)
    with pytest.raises(
        UnsupportedModel, match=r"attention: must be run on 3 examples, got a map of 2 rows"
    ):
        hp.score(Others().double(), [x.double()], Entropy(), loss=lambda m, x: m(x), progress=False)


def test_batches_in_which_a_site_does_not_run_do_not_count_for_it() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (MultiHeadAttention(8, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.two(x) if x.shape[1] > 3 else x

    torch.manual_seed(0)
    model = Late().double()
    long, short = torch.randn(3, 4, 8).double(), torch.randn(2, 3, 8).double()

    def scored(*batches: Tensor) -> Any:
        return hp.score(
            model,
            batches,
            ActivationNorm(),
            loss=lambda m, x: m(x).square().mean((1, 2)),
            progress=False,
        )

    both, alone = scored(short, long, short), scored(long)
    assert_close(both.values[1], alone.values[1])
    assert both.values[0] != alone.values[0]


def test_a_site_that_never_runs() -> None:
    subject = family_subject("bert", "bert")
    subject.model.spare = MultiHeadAttention(8, 2).double()
    for scorer in (Wanda(), Entropy(), Attattr(steps=1)):
        with pytest.raises(UnsupportedModel, match=r"spare.*no batch reached"):
            score(subject, scorer, sites=None, loss=own_loss)


def test_obs_without_a_ridge_needs_channels_that_do_not_depend_on_each_other() -> None:
    subject = family_subject("bert", "bert")
    with pytest.raises(InvalidValue, match=r"Obs\.ridge"):
        score(subject, Obs(ridge=0.0), [{k: v[2:] for k, v in subject.batch.items()}])


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Obs(ridge=-1.0), "Obs.ridge"),
        (lambda: Obs(blocks=0), "Obs.blocks"),
        (lambda: ActivationNorm(of="heads"), "ActivationNorm.of"),
        (lambda: Fluctuation(normalize="l2"), "Fluctuation.normalize"),
        (lambda: Attattr(steps=0), "Attattr.steps"),
        (lambda: Attattr(of="logit"), "Attattr.of"),
    ],
)
def test_settings_are_checked(make: Any, where: str) -> None:
    with pytest.raises(InvalidValue, match=where):
        make()


def test_queries_of_a_decoder_follow_its_own_mask() -> None:
    subject = family_subject("t5", "t5")
    mask, other = torch.tensor([[1, 1, 0]]), torch.tensor([[1, 0, 0]])
    labels = torch.tensor([[4, 5, -100]])
    ids = torch.ones(1, 3, dtype=torch.long)
    cases: list[tuple[Any, dict[str, Any], list[int] | None]] = [
        ("self", {"attention_mask": mask, "decoder_attention_mask": other}, [1, 1, 0]),
        ("cross", {"attention_mask": mask, "decoder_attention_mask": other}, [1, 0, 0]),
        ("causal", {"attention_mask": other, "labels": labels}, [1, 1, 0]),
        (
            "causal",
            {"attention_mask": other, "labels": labels, "decoder_attention_mask": mask},
            [1, 1, 0],
        ),
        ("causal", {"attention_mask": other, "decoder_input_ids": ids}, None),
        ("causal", {"attention_mask": other}, [1, 0, 0]),
        ("self", {"attention_mask": mask[:, :2]}, None),
    ]
    for kind, batch, expected in cases:
        found = query_mask(subject.model, kind, batch, (1, 3))
        assert (None if found is None else found.int().tolist()[0]) == expected, (kind, batch)
    alone = query_mask(
        family_subject("gpt2", "gpt2").model,
        "causal",
        {"attention_mask": mask, "labels": labels},
        (1, 3),
    )
    assert alone is not None
    assert alone.int().tolist() == [[1, 1, 0]]
