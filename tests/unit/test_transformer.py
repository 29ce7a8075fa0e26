"""Our encoder-decoder: the laws on all three kinds of attention, decoding with padding, with a
cache and with beams."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM

import headprune as hp
from headprune.attention.transformer import TransformerConfig, TransformerForTranslation, positions
from headprune.core.errors import CheckpointError, InvalidValue
from headprune.core.heads import HeadMask
from headprune.model.losses import default_loss
from tests.laws.support import CLOSE, EXACT, objective, ragged, shaken

SIZES = {"vocab_size": 40, "d_model": 16, "ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 3}
LENGTHS = (7, 4, 2)
NEW = 9


def build() -> TransformerForTranslation:
    """Two layers and three, with biases and norms that are not those of a fresh model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TransformerForTranslation(
            TransformerConfig(**SIZES, num_attention_heads=4, dropout=0.1)
        )
        model = shaken(model).double().eval()
        with (
            torch.no_grad()
        ):  # a tied output says the last token again until something outweighs that
            for layer in model.decoder.layers:
                layer.feed_forward[3].weight.mul_(12)
    return model


@pytest.fixture
def model() -> TransformerForTranslation:
    return build()


def sources() -> dict[str, Tensor]:
    """Three sources of unlike length."""
    ids = torch.randint(3, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def batch() -> dict[str, Tensor]:
    """Sources with targets that are as uneven."""
    labels = torch.randint(3, 40, (3, 5), generator=torch.Generator().manual_seed(2))
    labels = labels.masked_fill(torch.arange(5) >= torch.tensor([3, 5, 4])[:, None], -100)
    return {**sources(), "labels": labels}


def mask_of(model: nn.Module, which: str) -> HeadMask:
    sites = hp.find_sites(model)
    if which == "ragged":
        return ragged(sites, 1)
    gone = {
        "first decoder layer": ["decoder.layers.0.self_attention"],
        "one of each kind": [
            "encoder.layers.1.self_attention",
            "decoder.layers.0.self_attention",
            "decoder.layers.2.cross_attention",
        ],
        "no heads at all": [s.name for s in sites],
    }[which]
    return HeadMask.from_keep({name: [] for name in gone}, {s.name: s.n_query_heads for s in sites})


MASKS = ["ragged", "first decoder layer", "one of each kind", "no heads at all"]


def generate(model: Any, given: dict[str, Tensor], **options: Any) -> Any:
    wanted = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "num_beams": 1,
        **options,
    }
    return model.generate(**given, **wanted, output_logits=True, return_dict_in_generate=True)


def test_each_attention_says_its_kind(model: TransformerForTranslation) -> None:
    kinds = [
        (s.name.split(".")[0], s.name.rpartition(".")[2], s.kind) for s in hp.find_sites(model)
    ]
    assert set(kinds) == {
        ("encoder", "self_attention", "self"),
        ("decoder", "self_attention", "causal"),
        ("decoder", "cross_attention", "cross"),
    }
    assert len(kinds) == 2 + 2 * 3
    with pytest.raises(InvalidValue, match="kind: must be one of self, causal, cross"):
        hp.MultiHeadAttention(8, 2, kind="crossed")  # type: ignore[arg-type]


@pytest.mark.parametrize("which", MASKS)
def test_gated_is_pruned_in_outputs_and_gradients(
    model: TransformerForTranslation, which: str
) -> None:
    mask, small = mask_of(model, which), copy.deepcopy(model)
    hp.prune_(small, mask)
    with hp.gated(model, mask):
        expected = model(**batch()).logits
        objective(expected).backward()
    got = small(**batch()).logits
    objective(got).backward()
    assert_close(got, expected, **CLOSE)
    assert (expected - model(**batch()).logits).abs().max() > 1e-3, "the mask changes nothing"
    whole = dict(model.named_parameters())
    uncut = {
        n: p
        for n, p in small.named_parameters()
        if p.shape == whole[n].shape and p.grad is not None
    }
    assert "encoder.embedding.weight" in uncut
    for name, parameter in uncut.items():
        if not name.endswith(("W_q.bias", "W_k.bias")):  # may be as long by having been cut to it
            assert_close(parameter.grad, whole[name].grad, **CLOSE, msg=name)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("which", MASKS)
def test_gated_is_pruned_in_generation(
    model: TransformerForTranslation, which: str, beams: int
) -> None:
    mask, small = mask_of(model, which), copy.deepcopy(model)
    hp.prune_(small, mask)
    with hp.gated(model, mask):
        expected = generate(model, sources(), num_beams=beams)
    got = generate(small, sources(), num_beams=beams)
    for found in (got, generate(small, sources(), num_beams=beams, use_cache=False)):
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits), **CLOSE)
    assert (
        len({tuple(row) for row in expected.sequences.tolist()}) > 1 or which == "no heads at all"
    )
    held = got.past_key_values
    for i in range(3):
        for cache, name, length in (
            (held.self_attention_cache, "self", NEW),
            (held.cross_attention_cache, "cross", 7),
        ):
            n_kept = len(mask.kept(f"decoder.layers.{i}.{name}_attention"))
            assert tuple(cache.layers[i].keys.shape[1:3]) == (n_kept, length), (
                "the cache has not shrunk with the heads"
            )


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("pruned", [False, True])
def test_a_padded_source_is_translated_as_if_alone(
    model: TransformerForTranslation, pruned: bool, beams: int
) -> None:
    if pruned:
        hp.prune_(model, mask_of(model, "ragged"))
    together = generate(model, sources(), num_beams=beams)
    for i, length in enumerate(LENGTHS):
        alone = generate(
            model, {k: v[i : i + 1, :length] for k, v in sources().items()}, num_beams=beams
        )
        assert torch.equal(alone.sequences[0], together.sequences[i])
        if beams == 1:
            assert_close(
                torch.stack(alone.logits)[:, 0], torch.stack(together.logits)[:, i], **CLOSE
            )
    assert len(set(map(tuple, together.sequences.tolist()))) == 3


def test_a_step_at_a_time_is_the_whole_pass(model: TransformerForTranslation) -> None:
    given = sources()
    tokens = generate(model, given).sequences
    whole = model(**given, decoder_input_ids=tokens[:, :-1]).logits
    logits = torch.stack(generate(model, given).logits, 1)  # Transformers hands them out in fp32
    assert_close(whole.float(), logits, rtol=1e-6, atol=1e-6)
    first = model(**given, decoder_input_ids=tokens[:, :4], use_cache=True)
    rest = {"decoder_input_ids": tokens[:, 4:-1], "past_key_values": first.past_key_values}
    assert_close(model(**given, **rest).logits, whole[:, 4:], **CLOSE)


def test_labels_make_the_decoders_inputs_and_padding_changes_no_loss(
    model: TransformerForTranslation,
) -> None:
    losses = default_loss(model, batch())
    for i, length in enumerate((3, 5, 4)):
        alone = {
            "input_ids": sources()["input_ids"][i : i + 1, : LENGTHS[i]],
            "labels": batch()["labels"][i : i + 1],
        }
        alone["labels"] = alone["labels"][:, :length]
        inputs = torch.cat([torch.tensor([[1]]), alone["labels"][:, :-1]], 1)
        assert_close(default_loss(model, alone)[0], losses[i], **CLOSE)
        assert_close(
            default_loss(model, {**alone, "decoder_input_ids": inputs})[0], losses[i], **CLOSE
        )
    padding = {"decoder_attention_mask": (batch()["labels"] != -100).long()}
    assert_close(default_loss(model, {**batch(), **padding}), losses, **CLOSE)


def test_scores_do_not_depend_on_padding_and_budgets_go_by_kind(
    model: TransformerForTranslation,
) -> None:
    rows = [{k: v[i : i + 1] for k, v in batch().items()} for i in range(3)]
    scores = hp.score(model, [batch()], "taylor", progress=False)
    single = hp.score(model, rows, "taylor", progress=False)
    assert_close(torch.tensor(single.values), torch.tensor(scores.values), **CLOSE)
    budgets = {
        "self": hp.Budget(keep_heads=3),
        "causal": hp.Budget(keep_heads=6),
        "cross": hp.Budget(keep_heads=9),
    }
    plan = hp.select(scores, budgets)
    kept = dict.fromkeys(budgets, 0)
    for site in hp.find_sites(model):
        kept[site.kind] += len(plan.mask.kept(site.name))
    assert kept == {"self": 3, "causal": 6, "cross": 9}
    assert hp.prune_(model, plan, example=batch()).proof is not None


@pytest.mark.parametrize("which", ["ragged", "one of each kind"])
def test_a_cut_model_comes_back_bit_for_bit(
    model: TransformerForTranslation, which: str, tmp_path: Path
) -> None:
    hp.prune_(model, mask_of(model, which))
    hp.save_pretrained(model, tmp_path)
    for loaded in (hp.from_pretrained(tmp_path), hp.from_pretrained(tmp_path, model=build())):
        assert isinstance(loaded, TransformerForTranslation)
        assert_close(loaded(**batch()).logits, model(**batch()).logits, **EXACT)
        assert (
            loaded.lm_head.weight
            is loaded.encoder.embedding.weight
            is loaded.decoder.embedding.weight
        )
        assert torch.equal(
            generate(loaded, sources()).sequences, generate(model, sources()).sequences
        )
    with pytest.raises(CheckpointError):
        hp.from_pretrained(
            tmp_path,
            model=TransformerForTranslation(TransformerConfig(**SIZES, num_attention_heads=2)),
        )


def test_a_whole_model_goes_through_the_auto_classes(
    model: TransformerForTranslation, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert loaded.lm_head.weight is loaded.encoder.embedding.weight
    stored = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert_close(tensor, stored[name], **EXACT)
    assert_close(
        loaded(**batch()).logits, model(**batch()).logits, **CLOSE
    )  # its memory is not aligned


def test_the_embeddings_are_one_matrix_of_the_right_size() -> None:
    torch.manual_seed(0)
    fresh = TransformerForTranslation(
        TransformerConfig(**{**SIZES, "vocab_size": 4000}, num_attention_heads=4)
    )
    assert fresh.lm_head.weight is fresh.encoder.embedding.weight is fresh.decoder.embedding.weight
    assert_close(fresh.lm_head.weight.detach().std(), torch.tensor(16**-0.5), rtol=0.02, atol=0.0)


def test_positions_are_those_of_the_paper() -> None:
    found = positions(3, 2, 6, torch.zeros(1, dtype=torch.float64))
    for i, place in enumerate((3, 4)):
        angles = [place / 10000 ** (2 * j / 6) for j in range(3)]
        expected = torch.tensor(
            [*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64
        )
        assert_close(found[i], expected, rtol=1e-6, atol=1e-6)  # angles are taken in fp32


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"labels": [[3]]}, "must be given input_ids or encoder_outputs"),
        ({"input_ids": [[3]]}, "must be given decoder_input_ids or labels"),
        (
            {"input_ids": [[3]], "labels": [[3]], "output_attentions": True},
            "output_attentions: must be left out",
        ),
        ({"input_ids": [[3]], "labels": [[3]], "head_mask": [1]}, "head_mask: must be left out"),
        (
            {"input_ids": [[3, 4]], "labels": [[3]], "token_type_ids": torch.zeros(1, 2)},
            "token_type_ids: must be left",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(
    model: TransformerForTranslation, given: dict[str, Any], words: str
) -> None:
    tensors = {
        k: torch.tensor(v) if isinstance(v, list) and k != "head_mask" else v
        for k, v in given.items()
    }
    with pytest.raises(InvalidValue, match=words):
        model(**tensors)


def test_a_static_cache_is_refused_in_words(model: TransformerForTranslation) -> None:
    with pytest.raises(
        InvalidValue,
        match="past_key_values: must be a cache that grows with the tokens, got a static",
    ):
        model.generate(**sources(), cache_implementation="static", max_new_tokens=3)
