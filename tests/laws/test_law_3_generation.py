"""Law 3, decoders: gated = pruned in generation with a KV cache, with left padding, with one
layer's heads all gone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.testing import assert_close
from transformers import StaticCache

import headprune as hp
from headprune.core.errors import UnsupportedModel
from tests.laws.support import CLOSE, Subject, emptied, picture, subject_of

LEFT = torch.tensor([[1] * 7, [0, 0] + [1] * 5, [0, 0, 0, 0, 1, 1, 1]])
MASKS = ["ragged", "first", "middle", "all"]


def ragged_or_emptied(subject: Subject, which: str) -> hp.HeadMask:
    return subject.ragged(1) if which == "ragged" else emptied(subject, which)


def generate(subject: Subject, model: nn.Module, **options: Any) -> Any:
    ids = torch.randint(3, 50, (3, 7), generator=torch.Generator().manual_seed(3)) * LEFT
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
    return model.generate(
        input_ids=ids,
        attention_mask=LEFT,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def gated_and_cut(decoder: Subject, which: str, **options: Any) -> tuple[Any, nn.Module]:
    """What the gated model generates, and the model that is cut to match."""
    mask, small = ragged_or_emptied(decoder, which), decoder.copy()
    hp.prune_(small, mask)
    with hp.gated(decoder.model, mask):
        return generate(decoder, decoder.model, **options), small


def assert_same(got: Any, expected: Any) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), **CLOSE)


@pytest.mark.parametrize("which", MASKS)
def test_greedy_with_a_left_padded_batch(decoder: Subject, which: str) -> None:
    expected, small = gated_and_cut(decoder, which)
    got = generate(decoder, small)
    assert_same(got, expected)
    assert_same(generate(decoder, small, use_cache=False), expected)
    assert got.past_key_values.get_seq_length() == 7 + 6 - 1
    mask = ragged_or_emptied(decoder, which)
    for layer, site in zip(got.past_key_values.layers, decoder.sites, strict=True):
        n_groups = len(mask.kept(site.name)) // site.group_size
        assert layer.keys.shape[1] == max(1, n_groups), "the cache has not shrunk"
    assert not torch.equal(generate(decoder, decoder.model).sequences, expected.sequences)


@pytest.mark.parametrize("which", MASKS)
def test_a_left_padded_example_is_generated_as_if_alone(decoder: Subject, which: str) -> None:
    """Positions and masks: what an example gets does not depend on the padding beside it."""
    small = decoder.copy()
    hp.prune_(small, ragged_or_emptied(decoder, which))
    together = generate(decoder, small)
    ids = torch.randint(3, 50, (3, 7), generator=torch.Generator().manual_seed(3))[2:, 4:]
    alone = small.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6
    )
    assert torch.equal(together.sequences[2, 7:], alone[0, 3:])


@pytest.mark.parametrize("which", MASKS)
def test_static_cache(decoder: Subject, which: str) -> None:
    expected, small = gated_and_cut(decoder, which)
    got = generate(decoder, small, cache_implementation="static", disable_compile=True)
    assert isinstance(got.past_key_values, StaticCache)
    assert_same(got, expected)


@pytest.mark.parametrize("which", MASKS)
def test_beam_search_reorders_every_cache(decoder: Subject, which: str) -> None:
    expected, small = gated_and_cut(decoder, which, num_beams=2)
    assert torch.equal(generate(decoder, small, num_beams=2).sequences, expected.sequences)


@pytest.mark.parametrize("which", MASKS)
def test_eager_attention_in_float32(decoder: Subject, which: str) -> None:
    """Not in fp64: there Transformers' eager mask for a row of padding overflows its own float32
    softmax to NaN."""
    decoder.model.float().set_attn_implementation("eager")
    expected, small = gated_and_cut(decoder, which)
    got = generate(decoder, small)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_prefill_in_two_parts_and_a_step(decoder: Subject) -> None:
    """Positions go on from a cache whose first layer has no heads."""
    mask, small = ragged_or_emptied(decoder, "first"), decoder.copy()
    hp.prune_(small, mask)
    ids = decoder.batch["input_ids"][:2]
    with hp.gated(decoder.model, mask):
        expected = decoder.model(input_ids=ids).logits
    cache, parts = None, []
    for part in (ids[:, :4], ids[:, 4:6], ids[:, 6:]):
        out = small(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert_close(torch.cat(parts, 1), expected, **CLOSE)


def test_generation_in_a_model_cut_twice() -> None:
    decoder = subject_of("llama")
    first, second = decoder.sites[0].name, decoder.sites[2].name
    small = decoder.copy()
    hp.prune_(small, decoder.mask({first: [0, 1]}))
    hp.prune_(small, decoder.mask({first: [], second: [4, 5]}))
    small = copy.deepcopy(small)
    with hp.gated(decoder.model, decoder.mask({first: [], second: [4, 5]})):
        expected = generate(decoder, decoder.model)
    assert_same(generate(decoder, small), expected)


def test_a_layer_without_heads_under_the_hooks_of_accelerate(decoder: Subject) -> None:
    """With a device_map every module has a forward of its own, which would hide that of its new
    class."""
    mask, small = ragged_or_emptied(decoder, "first"), decoder.copy()
    with hp.gated(decoder.model, mask):
        expected = generate(decoder, decoder.model)
    attention = small.get_submodule(decoder.sites[0].name)
    add_hook_to_module(attention, AlignDevicesHook(execution_device="cpu"))
    hooked = attention.forward
    hp.prune_(small, mask)
    assert attention.forward is hooked
    assert_same(generate(decoder, small), expected)


def test_a_layer_whose_forward_someone_replaced_keeps_a_head(decoder: Subject) -> None:
    attention = decoder.model.get_submodule(decoder.sites[0].name)
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)
    before = picture(decoder.model)
    with pytest.raises(UnsupportedModel, match="replaced forward prevents"):
        hp.prune_(decoder.model, ragged_or_emptied(decoder, "first"))
    assert [row for row in picture(decoder.model) if row[1] != "forward"] == [
        r for r in before if r[1] != "forward"
    ]
    hp.prune_(decoder.model, decoder.ragged(), decoder.batch)
