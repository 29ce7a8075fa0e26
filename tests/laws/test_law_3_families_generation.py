"""Law 3 in generation, over every family that generates: both kernels, caches, left padding, beams,
layers without heads; fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import StaticCache

import headprune as hp
from headprune.model.double import Doubled
from headprune.model.running import call, outputs
from tests.laws import families
from tests.laws.families import implementations, model_class, over, use
from tests.laws.support import CLOSE, Subject, set_implementation

NEW_TOKENS = 4


def generates(layout: str, family: str) -> bool:
    """Whether a family's model does; told by its class, which is not built for this."""
    kind = model_class(layout, family)
    return hasattr(kind, "can_generate") and bool(kind.can_generate())


FAMILIES = [pair for pair in families.FAMILIES if generates(*pair)]
#: Families that have another kernel than eager attention, and run with it where nothing else is
#: said.
BOTH = [pair for pair in FAMILIES if "sdpa" in implementations(*pair)]
#: Transformers builds ALiBi from a mask of two axes, and hands it one of four where the cache is
#: static.
NO_STATIC = {"falcon-alibi"}
STATIC = [
    pair
    for pair in FAMILIES
    if model_class(*pair)._can_compile_fullgraph and pair[1] not in NO_STATIC
]
BEAMS = ["t5", "bart", "whisper", "llama", "falcon"]
FLEX = ["bart", "gpt_neox", "opt", "t5"]
MASKS = ["ragged", "without heads"]


def named(names: list[str]) -> list[tuple[str, str]]:
    found = [pair for pair in FAMILIES if pair[1] in names]
    assert len(found) == len(names)
    return found


def cut(subject: Subject, which: str) -> tuple[hp.HeadMask, nn.Module]:
    """A mask and the model that was cut by it: every site ragged, or the first site of every kind
    without heads."""
    small = subject.copy()
    if which == "ragged":
        mask = subject.ragged(1)
    else:
        first = {site.kind: site.name for site in reversed(subject.sites)}
        mask = subject.mask({name: [] for name in first.values()})
    hp.prune_(small, mask, sites=subject.sites)
    return mask, small


def left_padded(subject: Subject) -> dict[str, Tensor]:
    """The batch as generation takes it, ragged and padded on the left; images and sounds are as
    long as they are."""
    batch = {k: v for k, v in subject.batch.items() if k not in ("labels", "decoder_input_ids")}
    if "pixel_values" in batch or "attention_mask" not in batch:
        return batch
    assert len(set(batch["attention_mask"].sum(1).tolist())) > 1, "a ragged batch"
    return {k: v.flip(1) if k in ("input_ids", "attention_mask") else v for k, v in batch.items()}


def generate(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Any:
    options = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        **options,
    }
    with Doubled():
        return model.generate(  # type: ignore[operator]
            **inputs,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )


def assert_same(got: Any, expected: Any) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.scores) == len(expected.scores) == NEW_TOKENS
    for kind in ("scores", "logits"):
        a, b = torch.stack(getattr(got, kind)), torch.stack(getattr(expected, kind))
        assert a.dtype == torch.float64
        assert_close(a, b, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("which", MASKS)
@over(FAMILIES)
def test_greedy_with_a_left_padded_ragged_batch(subject: Subject, which: str) -> None:
    mask, small = cut(subject, which)
    inputs = left_padded(subject)
    full = generate(subject.model, inputs)
    with hp.gated(subject.model, mask, subject.sites):
        expected = generate(subject.model, inputs)
    got = generate(small, inputs)
    assert_same(got, expected)
    assert_same(generate(small, inputs, use_cache=False), expected)
    changed = (torch.stack(full.logits) - torch.stack(expected.logits)).abs().max()
    assert changed > 1e-6, "heads that are gone change what is generated"


@over(BOTH)
def test_greedy_with_eager_attention(subject: Subject) -> None:
    inputs = left_padded(subject)
    by_default = generate(subject.model, inputs)
    use(subject.model, "eager")
    mask, small = cut(subject, "ragged")
    with hp.gated(subject.model, mask, subject.sites):
        expected = generate(subject.model, inputs)
    assert_same(generate(small, inputs), expected)
    assert (torch.stack(by_default.logits) - torch.stack(expected.logits)).abs().max() > 1e-6


@pytest.mark.parametrize("which", MASKS)
@over(STATIC)
def test_static_cache(subject: Subject, which: str) -> None:
    static = {"cache_implementation": "static", "disable_compile": True}
    inputs = left_padded(subject)
    mask, small = cut(subject, which)
    with hp.gated(subject.model, mask, subject.sites):
        expected = generate(subject.model, inputs)
    got = generate(small, inputs, **static)
    cache = got.past_key_values
    if subject.family != "whisper":  # which takes its cache apart before it returns it
        assert isinstance(getattr(cache, "self_attention_cache", cache), StaticCache)
    assert_same(got, expected)


@pytest.mark.parametrize("which", MASKS)
@over(named(BEAMS))
def test_beam_search_reorders_every_cache(subject: Subject, which: str) -> None:
    mask, small = cut(subject, which)
    inputs = left_padded(subject)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    with hp.gated(subject.model, mask, subject.sites):
        expected = generate(subject.model, inputs, **beams)
    got = generate(small, inputs, **beams)
    assert_same(got, expected)
    assert_close(got.sequences_scores, expected.sequences_scores, **CLOSE)
    assert not torch.equal(expected.sequences, generate(subject.model, inputs, **beams).sequences)
    assert expected.beam_indices.unique().numel() > 3, "beams have moved"


# Said by Transformers' own call.
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
# Said as PyTorch imports inductor.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("which", MASKS)
@over(named(FLEX))  # test_law_3_gated_is_pruned.py has bert, llama and vit
def test_flex_attention_forward(subject: Subject, which: str) -> None:
    """Uncompiled, for inductor would take half a minute a model. One example: T5's bias does not
    fit more in flex."""
    batch = {k: v[:1] for k, v in subject.batch.items()}
    set_implementation(subject.model, "flex_attention")
    mask, small = cut(subject, which)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), Doubled():
        full = outputs(call(subject.model, batch))[0]
        with hp.gated(subject.model, mask, subject.sites):
            expected = outputs(call(subject.model, batch))[0]
        got = outputs(call(small, batch))[0]
    assert_close(got, expected, **CLOSE)
    assert (full - expected).abs().max() > 1e-4
