"""What is particular to single layouts of encoders, vision and speech, beyond the laws of
families."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts import registry
from headprune.layouts.vit import PresentHeadsOfMask
from headprune.model.double import Doubled
from headprune.model.running import outputs
from headprune.model.sites import bind, reason_against
from tests.laws.families import FAMILIES
from tests.laws.support import CLOSE, Subject, family_subject, logits, ragged, shaken


def subject_named(family: str) -> Subject:
    return family_subject(*next(pair for pair in FAMILIES if pair[1] == family))


def assert_one_layout_fits(model: nn.Module) -> None:
    for bound in bind(model):
        fitting = [n for n in registry if reason_against(registry.get(n), bound.module) is None]
        assert fitting == [bound.site.layout]


@pytest.mark.parametrize("pair", FAMILIES, ids=lambda pair: pair[1])
def test_one_layout_fits_a_module_and_no_other(pair: tuple[str, str]) -> None:
    assert_one_layout_fits(registry.get(pair[0]).tiny(0, pair[1])[0])


@pytest.mark.parametrize("layout", ["bart", "falcon", "gpt2", "llama", "olmo2", "phi3"])
def test_the_same_layout_fits_a_module_that_is_cut_and_one_without_heads(layout: str) -> None:
    subject = family_subject(layout, registry.get(layout).families[0][0])
    emptied = subject.mask({subject.sites[-1].name: []})
    hp.prune_(subject.model, emptied & subject.ragged())
    assert_one_layout_fits(subject.model)


@pytest.mark.parametrize("family", ["clip", "siglip", "blip"])
def test_the_towers_are_told_apart_by_the_names_of_sites(family: str) -> None:
    towers = [s.name.partition(".")[0].partition("_")[0] for s in subject_named(family).sites]
    assert set(towers) == {"text", "vision"}


def test_kinds_of_a_text_tower_that_looks_at_an_image() -> None:
    kinds = [(s.layout, s.kind) for s in subject_named("blip").sites]
    assert kinds == [("blip", "self")] * 2 + [("bert", "causal"), ("bert", "cross")] * 2


@pytest.mark.parametrize(("which", "keep"), [("attention", [0, 3]), ("crossattention", [])])
def test_blip_generates(which: str, keep: list[int]) -> None:
    subject = subject_named("blip")
    mask = subject.mask({f"text_decoder.bert.encoder.layer.0.{which}": keep})
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask)
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}

    def generated(model: Any, **more: Any) -> torch.Tensor:
        made = model.generate(pixel_values=subject.batch["pixel_values"], **options, **more)
        return torch.stack(made.logits)

    with Doubled():
        with hp.gated(subject.model, mask):
            expected = generated(subject.model)
        assert (generated(subject.model)[0] - expected[0]).abs().max() > 1e-4
        assert_close(generated(small), expected, **CLOSE)
        assert_close(generated(small, use_cache=False), expected, **CLOSE)


def test_a_head_of_albert_is_removed_from_every_layer() -> None:
    subject = subject_named("albert")
    (site,) = subject.sites
    assert (site.units, subject.model.config.num_hidden_layers) == (((0,), (1,), (2,), (3,)), 3)
    widths: list[int] = []
    hp.prune_(subject.model, subject.mask({site.name: [1, 2]}))
    gate = subject.model.get_submodule(f"{site.name}.dense")
    gate.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[-1]))
    subject.run()
    assert widths == [8, 8, 8]


def test_deberta_depends_on_its_head_count_without_an_error() -> None:
    """Its code divides the width by ``num_attention_heads``: a stale count gives wrong numbers, not
    an error."""
    subject = subject_named("deberta-v2")
    site = subject.sites[0]
    inner = subject.model.get_submodule(site.name).self
    hp.prune_(subject.model, subject.mask({site.name: [0, 2]}), subject.batch)
    expected = subject.run()
    assert inner.num_attention_heads == 2
    inner.num_attention_heads = 4
    assert (subject.run() - expected).abs().max() > 1e-4


def test_wavlm_calls_its_output_projection_only_inside_of_a_block() -> None:
    subject = subject_named("wavlm")
    calls: list[tuple[int, ...]] = []
    for site in subject.sites:
        gate = subject.model.get_submodule(f"{site.name}.out_proj")
        gate.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape)))
    expected = subject.run()
    assert calls == []
    ones = {s.name: torch.ones(4, dtype=torch.float64) for s in subject.sites}
    with hp.gated(subject.model, ones):
        assert_close(subject.run(), expected, **CLOSE)
    subject.run()
    assert calls == [(3, 10, 16)] * 3


def test_wavlm_does_not_attend_to_padding() -> None:
    subject = subject_named("wavlm")
    mask, everything = subject.ragged(), torch.ones_like(subject.batch["attention_mask"])
    small = subject.copy()
    hp.prune_(small, mask)
    with hp.gated(subject.model, mask):
        expected, unmasked = subject.run(), subject.run(attention_mask=everything)
    assert_close(subject.run(small), expected, **CLOSE)
    assert_close(subject.run(small, attention_mask=everything), unmasked, **CLOSE)
    assert_close(subject.run(small, attention_mask=None), unmasked, **CLOSE)
    assert (expected - unmasked)[-1].abs().min() > 1e-4


def test_the_first_layer_of_wavlm_makes_the_bias_for_all_heads_whichever_it_keeps() -> None:
    subject = subject_named("wavlm")
    first, second = (subject.model.get_submodule(s.name) for s in subject.sites[:2])
    hp.prune_(subject.model, subject.mask({subject.sites[0].name: [2]}), subject.batch)
    assert first.rel_attn_embed.weight.shape[1] == 4
    assert first.gru_rel_pos_const.shape == (1, 1, 1, 1)
    assert second.gru_rel_pos_const.shape == (1, 4, 1, 1)


def test_a_linear_layer_over_several_heads_is_not_taken_for_one_of_each() -> None:
    subject = subject_named("wavlm")
    attention = subject.model.get_submodule(subject.sites[0].name)
    attention.gru_rel_pos_linear = nn.Linear(8, 8)
    assert "not one head's width" in str(reason_against(subject.layout, attention))


@pytest.mark.parametrize("keep", [[2], []])
def test_both_position_biases_of_beit_at_once(keep: list[int]) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "image_size": 8, "patch_size": 4, "num_channels": 1}
    both = {"use_relative_position_bias": True, "use_shared_relative_position_bias": True}
    config = transformers.BeitConfig(**sizes, **both, initializer_range=0.3)
    model = shaken(transformers.BeitModel(config)).double().eval()
    batch = {"pixel_values": torch.randn(2, 1, 8, 8, dtype=torch.float64)}
    sites = hp.find_sites(model)
    mask = hp.HeadMask.from_keep({sites[0].name: keep}, {s.name: 4 for s in sites})
    small = copy.deepcopy(model)
    hp.prune_(small, mask, batch)
    with Doubled():
        with hp.gated(model, mask):
            expected = model(**batch).last_hidden_state
        assert_close(small(**batch).last_hidden_state, expected, **CLOSE)
    assert small.shared_position_bias.relative_position_bias_table.shape[1] == 4


def test_a_part_of_beit_is_cut_for_the_table_that_lies_outside_of_it() -> None:
    subject = subject_named("beit-shared-bias")
    small = copy.deepcopy(subject.model)
    layer, name = small.beit.layers, "beit.layers."
    kept = ragged(hp.find_sites(layer))
    hp.prune_(layer, kept)
    whole = subject.mask({s.name: kept.kept(s.name.removeprefix(name)) for s in subject.sites})
    with Doubled():
        with hp.gated(subject.model, whole):
            expected = subject.run()
        assert_close(subject.run(small), expected, **CLOSE)


def test_a_vision_transformer_without_position_biases_keeps_its_code() -> None:
    subject = subject_named("vit")
    hp.prune_(subject.model, subject.ragged())
    assert not any(isinstance(m, PresentHeadsOfMask) for m in subject.model.modules())


def test_the_network_of_position_biases_of_swin_v2_loses_a_row_a_head() -> None:
    subject = subject_named("swinv2")
    site = subject.sites[-1]
    inner = subject.model.get_submodule(site.name).self
    hp.prune_(subject.model, subject.mask({site.name: [1, 3]}), subject.batch)
    assert inner.continuous_position_bias_mlp[2].weight.shape == (2, 512)
    assert inner.logit_scale.shape == (2, 1, 1)


@pytest.mark.parametrize("tower", ["text_model", "vision_model"])
def test_logits_of_the_tiny_models_depend_on_every_tower(tower: str) -> None:
    subject = subject_named("clip")
    mask = subject.mask({s.name: [0] for s in subject.sites if s.name.startswith(tower)})
    with Doubled():
        plain = logits(subject.model, subject.batch)
        with hp.gated(subject.model, mask):
            assert (logits(subject.model, subject.batch) - plain).abs().max() > 1e-4


# ---------------------------------------------------------------- what BERT's likes add

_BERT: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0, "max_position_embeddings": 32}
_BERT |= {"hidden_size": 16, "intermediate_size": 24}
_BERT |= {"num_hidden_layers": 2, "num_attention_heads": 4}


def cut_untouched(model: nn.Module, batch: dict[str, Any], emptied: bool) -> None:
    """A model that never ran is cut, and again: equal to the gated one; the first site may keep no
    head."""
    model = shaken(model).double().eval()
    sites = hp.find_sites(model)
    counts = {s.name: 4 for s in sites}
    small, mask = copy.deepcopy(model), ragged(sites)
    if emptied:
        mask &= hp.HeadMask.from_keep({sites[0].name: []}, counts)
    for more in (mask, mask & hp.HeadMask.from_keep({s.name: [0, 2] for s in sites}, counts)):
        hp.prune_(small, more)
        with Doubled():
            with hp.gated(model, more):
                expected = outputs(model(**batch))
            assert_close(outputs(small(**batch)), expected, **CLOSE)
            assert (expected[0] - outputs(model(**batch))[0]).abs().max() > 1e-3


def boxes() -> torch.Tensor:
    return torch.randint(0, 10, (2, 7, 4)).sort(-1).values


@pytest.mark.parametrize(
    ("relative", "spatial", "emptied"),
    [(True, True, False), (True, False, True), (False, True, True), (False, False, False)],
)
def test_position_biases_of_layoutlmv3_come_for_all_heads(
    relative: bool, spatial: bool, emptied: bool
) -> None:
    biases = {"has_relative_attention_bias": relative, "has_spatial_attention_bias": spatial}
    sizes = {"max_2d_position_embeddings": 16, "coordinate_size": 2, "shape_size": 4}
    config = transformers.LayoutLMv3Config(**_BERT, **biases, **sizes, visual_embed=False)
    batch = {"input_ids": torch.randint(3, 50, (2, 7)), "bbox": boxes()}
    cut_untouched(transformers.LayoutLMv3Model(config), batch, emptied)


@pytest.mark.parametrize(("relative", "spatial"), [(True, True), (True, False), (False, True)])
def test_position_biases_of_layoutlmv2_come_for_all_heads(relative: bool, spatial: bool) -> None:
    """Of its encoder, which needs no detectron2."""
    from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2Encoder

    biases = {"has_relative_attention_bias": relative, "has_spatial_attention_bias": spatial}
    config = transformers.LayoutLMv2Config(**_BERT, **biases, fast_qkv=False)
    states = torch.randn(2, 7, 16, dtype=torch.float64)
    masked = torch.tensor([[0] * 7, [0] * 4 + [1] * 3])[:, None, None]
    places = {"bbox": boxes(), "position_ids": torch.arange(7).expand(2, 7)}
    batch = {"hidden_states": states, "attention_mask": masked, **places}
    cut_untouched(LayoutLMv2Encoder(config), batch, emptied=False)


def test_a_layer_that_is_called_with_something_else_keeps_a_head() -> None:
    sizes = {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}
    config = transformers.MobileBertConfig(**_BERT, **sizes)
    model = transformers.MobileBertModel(config).eval()
    sites = hp.find_sites(model)
    mask = hp.HeadMask.from_keep({sites[0].name: []}, {s.name: 4 for s in sites})
    with pytest.raises(UnsupportedModel, match="for only one called with hidden_states"):
        hp.prune_(model, mask)
    assert hp.find_sites(model) == sites
