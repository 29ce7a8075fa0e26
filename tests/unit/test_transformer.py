"""Our encoder-decoder: the laws on all three kinds of attention, decoding with padding, with a
cache and with beams."""

import copy
import math

import pytest
import torch
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


def build(heads=4):
    """Two layers and three, with biases and norms that are not those of a fresh model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = TransformerConfig(**SIZES, num_attention_heads=heads, dropout=0.1)
        model = shaken(TransformerForTranslation(config)).double().eval()
    with torch.no_grad():  # a tied output says the last token again until something outweighs that
        for layer in model.decoder.layers:
            layer.feed_forward[3].weight.mul_(12)
    return model


@pytest.fixture
def model():
    return build()


def sources():
    ids = torch.randint(3, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def batch():
    labels = torch.randint(3, 40, (3, 5), generator=torch.Generator().manual_seed(2))
    labels = labels.masked_fill(torch.arange(5) >= torch.tensor([3, 5, 4])[:, None], -100)
    return {**sources(), "labels": labels}


#: Sites without heads in each mask; "ragged" keeps another number in each.
EMPTY = {
    "ragged": None,
    "first decoder layer": ["decoder.layers.0.self_attention"],
    "one of each kind": [
        "encoder.layers.1.self_attention",
        "decoder.layers.0.self_attention",
        "decoder.layers.2.cross_attention",
    ],
}


def mask_of(model, which):
    sites, empty = hp.find_sites(model), EMPTY[which]
    if empty is None:
        return ragged(sites, 1)
    n_heads = {s.name: s.n_query_heads for s in sites}
    return HeadMask.from_keep({name: [] for name in empty}, n_heads)


def generate(model, given, **options):
    length = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1}
    wanted = {**length, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**given, **{**wanted, **options})


@pytest.mark.parametrize("which", ["ragged", "one of each kind"])
def test_gated_is_pruned_in_outputs_and_gradients(model, which):
    mask, small = mask_of(model, which), copy.deepcopy(model)
    hp.prune_(small, mask)
    with hp.gated(model, mask):
        expected = model(**batch()).logits
        objective(expected).backward()
    got = small(**batch()).logits
    objective(got).backward()
    assert_close(got, expected, **CLOSE)
    assert (expected - model(**batch()).logits).abs().max() > 1e-3, "the mask changes nothing"
    whole, uncut = dict(model.named_parameters()), []
    for name, parameter in small.named_parameters():
        same = parameter.grad is not None and parameter.shape == whole[name].shape
        if same and not name.endswith(("W_q.bias", "W_k.bias")):  # may be cut to the same length
            assert_close(parameter.grad, whole[name].grad, **CLOSE, msg=name)
            uncut.append(name)
    assert "encoder.embedding.weight" in uncut


@pytest.mark.parametrize(("which", "beams"), [("ragged", 3), ("first decoder layer", 1)])
def test_gated_is_pruned_in_generation(model, which, beams):
    mask, small = mask_of(model, which), copy.deepcopy(model)
    hp.prune_(small, mask)
    with hp.gated(model, mask):
        expected = generate(model, sources(), num_beams=beams)
    got = generate(small, sources(), num_beams=beams)
    for found in (got, generate(small, sources(), num_beams=beams, use_cache=False)):
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits), **CLOSE)
    assert len({tuple(row) for row in expected.sequences.tolist()}) > 1
    held = got.past_key_values
    own, cross = held.self_attention_cache.layers, held.cross_attention_cache.layers
    for i in range(3):
        for layer, name, length in ((own[i], "self", NEW), (cross[i], "cross", 7)):
            n_kept = len(mask.kept(f"decoder.layers.{i}.{name}_attention"))
            assert tuple(layer.keys.shape[1:3]) == (n_kept, length), "the cache has not shrunk"


@pytest.mark.parametrize("beams", [1, 3])
def test_a_padded_source_is_translated_as_if_alone(model, beams):
    hp.prune_(model, mask_of(model, "ragged"))
    together = generate(model, sources(), num_beams=beams)
    for i, length in enumerate(LENGTHS):
        one = {k: v[i : i + 1, :length] for k, v in sources().items()}
        alone = generate(model, one, num_beams=beams)
        assert torch.equal(alone.sequences[0], together.sequences[i])
        if beams == 1:
            logits = torch.stack(together.logits)[:, i]
            assert_close(torch.stack(alone.logits)[:, 0], logits, **CLOSE)
    assert len(set(map(tuple, together.sequences.tolist()))) == 3


def test_a_step_at_a_time_is_the_whole_pass(model):
    given = sources()
    tokens = generate(model, given).sequences
    whole = model(**given, decoder_input_ids=tokens[:, :-1]).logits
    logits = torch.stack(generate(model, given).logits, 1)  # Transformers hands them out in fp32
    assert_close(whole.float(), logits, rtol=1e-6, atol=1e-6)
    first = model(**given, decoder_input_ids=tokens[:, :4], use_cache=True)
    rest = {"decoder_input_ids": tokens[:, 4:-1], "past_key_values": first.past_key_values}
    assert_close(model(**given, **rest).logits, whole[:, 4:], **CLOSE)


def test_labels_make_the_decoders_inputs_and_padding_changes_no_loss(model):
    losses, given = default_loss(model, batch()), batch()
    for i, length in enumerate((3, 5, 4)):
        ids, labels = given["input_ids"][i, : LENGTHS[i]], given["labels"][i, :length]
        alone = {"input_ids": ids[None], "labels": labels[None]}
        assert_close(default_loss(model, alone)[0], losses[i], **CLOSE)
        inputs = torch.cat([torch.tensor([1]), labels[:-1]])[None]
        shifted = {**alone, "decoder_input_ids": inputs}
        assert_close(default_loss(model, shifted)[0], losses[i], **CLOSE)
    padding = {"decoder_attention_mask": (given["labels"] != -100).long()}
    assert_close(default_loss(model, {**given, **padding}), losses, **CLOSE)


def test_scores_do_not_depend_on_padding_and_budgets_go_by_kind(model):
    rows = [{k: v[i : i + 1] for k, v in batch().items()} for i in range(3)]
    scores = hp.score(model, [batch()], "taylor", progress=False)
    single = hp.score(model, rows, "taylor", progress=False)
    assert_close(torch.tensor(single.values), torch.tensor(scores.values), **CLOSE)
    wanted = {"self": 3, "causal": 6, "cross": 9}
    plan = hp.select(scores, {kind: hp.Budget(keep_heads=n) for kind, n in wanted.items()})
    sites, kept = hp.find_sites(model), dict.fromkeys(wanted, 0)
    assert len(sites) == 2 + 2 * 3
    for site in sites:
        place, name = site.name.split(".")[0], site.name.rpartition(".")[2]
        own = "self" if place == "encoder" else "causal"
        assert site.kind == ("cross" if name == "cross_attention" else own)
        kept[site.kind] += len(plan.mask.kept(site.name))
    assert kept == wanted
    assert hp.prune_(model, plan, example=batch()).proof is not None


@pytest.mark.parametrize("which", ["ragged", "one of each kind"])
def test_a_cut_model_comes_back_bit_for_bit(model, which, tmp_path):
    hp.prune_(model, mask_of(model, which))
    hp.save_pretrained(model, tmp_path)
    for loaded in (hp.from_pretrained(tmp_path), hp.from_pretrained(tmp_path, model=build())):
        assert isinstance(loaded, TransformerForTranslation)
        assert_close(loaded(**batch()).logits, model(**batch()).logits, **EXACT)
        assert loaded.lm_head.weight is loaded.encoder.embedding.weight
        assert loaded.lm_head.weight is loaded.decoder.embedding.weight
        again, first = (generate(m, sources()).sequences for m in (loaded, model))
        assert torch.equal(again, first)
    with pytest.raises(CheckpointError):
        hp.from_pretrained(tmp_path, model=build(heads=2))


def test_a_whole_model_goes_through_the_auto_classes(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert loaded.lm_head.weight is loaded.encoder.embedding.weight
    assert_close(dict(loaded.state_dict()), dict(model.state_dict()), **EXACT)
    # Its memory is not aligned.
    assert_close(loaded(**batch()).logits, model(**batch()).logits, **CLOSE)


def test_positions_and_embeddings_are_those_of_the_paper():
    found = positions(3, 2, 6, torch.zeros(1, dtype=torch.float64))
    for i, place in enumerate((3, 4)):
        angles = [place / 10000 ** (2 * j / 6) for j in range(3)]
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        assert found[i].tolist() == pytest.approx(expected, abs=1e-6)  # angles are taken in fp32
    config = TransformerConfig(**{**SIZES, "vocab_size": 4000}, num_attention_heads=4)
    weight = TransformerForTranslation(config).lm_head.weight
    assert weight.std().item() == pytest.approx(16**-0.5, rel=0.02)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"labels": [[3]]}, "must be given input_ids or encoder_outputs"),
        ({"input_ids": [[3]]}, "must be given decoder_input_ids or labels"),
        ({"output_attentions": True}, "output_attentions: must be left out"),
        ({"head_mask": (1,)}, "head_mask: must be left out"),
        ({"token_type_ids": [[0]]}, "token_type_ids: must be left"),
    ],
)
def test_what_it_cannot_do_is_refused(model, given, words):
    if "given" not in words:
        given = {"input_ids": [[3]], "labels": [[3]], **given}
    tensors = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in given.items()}
    with pytest.raises(InvalidValue, match=words):
        model(**tensors)


def test_a_static_cache_and_other_kinds_are_refused(model):
    with pytest.raises(InvalidValue, match="must be a cache that grows with the tokens, got a sta"):
        model.generate(**sources(), cache_implementation="static", max_new_tokens=3)
    with pytest.raises(InvalidValue, match="kind: must be one of self, causal, cross"):
        hp.MultiHeadAttention(8, 2, kind="crossed")
