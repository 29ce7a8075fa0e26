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
from headprune.model.sites import reason_against
from tests.laws.support import CLOSE, Subject, family_subject, logits, ragged, shaken

FAMILIES = [
    (layout, family) for layout in registry.names() for family, _ in registry.get(layout).families
]


def subject_named(family: str) -> Subject:
    return family_subject(*next(pair for pair in FAMILIES if pair[1] == family))


@pytest.mark.parametrize("pair", FAMILIES, ids=lambda pair: pair[1])
def test_one_layout_matches_a_module_and_no_other(pair: tuple[str, str]) -> None:
    subject = family_subject(*pair)
    for site in subject.sites:
        module = subject.model.get_submodule(site.name)
        assert [n for n in registry if reason_against(registry.get(n), module) is None] == [
            site.layout
        ]


@pytest.mark.parametrize("family", ["clip", "siglip", "blip"])
def test_the_towers_are_told_apart_by_the_names_of_sites(family: str) -> None:
    towers = [s.name.partition(".")[0].partition("_")[0] for s in subject_named(family).sites]
    assert set(towers) == {"text", "vision"}


def test_kinds_of_a_text_tower_that_looks_at_an_image() -> None:
    kinds = [(s.layout, s.kind) for s in subject_named("blip").sites]
    assert kinds == [("blip", "self")] * 2 + [("bert", "causal"), ("bert", "cross")] * 2


@pytest.mark.parametrize("keep", [[0, 3], []])
@pytest.mark.parametrize("which", ["attention", "crossattention"])
def test_blip_generates(which: str, keep: list[int]) -> None:
    subject = subject_named("blip")
    mask = subject.mask({f"text_decoder.bert.encoder.layer.0.{which}": keep})
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
    }
    options |= {"pixel_values": subject.batch["pixel_values"], "return_dict_in_generate": True}
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask)
    with Doubled():
        with hp.gated(subject.model, mask):
            expected = torch.stack(subject.model.generate(**options).logits)
        plain = torch.stack(subject.model.generate(**options).logits)
        got = torch.stack(small.generate(**options).logits)
        again = torch.stack(small.generate(use_cache=False, **options).logits)
    assert (plain[0] - expected[0]).abs().max() > 1e-4
    assert_close(got, expected, **CLOSE)
    assert_close(again, expected, **CLOSE)


def test_a_head_of_albert_leaves_every_layer() -> None:
    subject = subject_named("albert")
    (site,) = subject.sites
    assert (site.units, subject.model.config.num_hidden_layers) == (((0,), (1,), (2,), (3,)), 3)
    widths: list[int] = []
    hp.prune_(subject.model, subject.mask({site.name: [1, 2]}))
    gate = subject.model.get_submodule(f"{site.name}.dense")
    gate.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[-1]))
    subject.run()
    assert widths == [8, 8, 8]


@pytest.mark.parametrize(("family", "shared"), [("deberta-v2", False), ("deberta-v3", True)])
def test_deberta_depends_on_its_head_count_without_an_error(family: str, shared: bool) -> None:
    """Its code divides the width by ``num_attention_heads``: a stale count gives wrong numbers, not
    an error."""
    subject = subject_named(family)
    site = subject.sites[0]
    inner = subject.model.get_submodule(site.name).self
    assert hasattr(inner, "pos_key_proj") is not shared
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
    with hp.gated(
        subject.model, {s.name: torch.ones(4, dtype=torch.float64) for s in subject.sites}
    ):
        assert_close(subject.run(), expected, **CLOSE)
    assert calls == [(3, 10, 16)] * 3
    subject.run()
    assert len(calls) == 3


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


def test_the_first_layer_of_wavlm_makes_the_bias_for_all_heads_whatever_it_has_left() -> None:
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


def test_both_position_biases_of_beit_at_once() -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    }
    sizes |= {"image_size": 8, "patch_size": 4, "num_channels": 1, "initializer_range": 0.3}
    both = {"use_relative_position_bias": True, "use_shared_relative_position_bias": True}
    model = shaken(transformers.BeitModel(transformers.BeitConfig(**sizes, **both))).double().eval()
    batch = {"pixel_values": torch.randn(2, 1, 8, 8, dtype=torch.float64)}
    sites = hp.find_sites(model)
    for keep in ([2], [0, 3], []):
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


def test_a_layer_that_is_called_with_something_else_keeps_a_head() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {
        "intermediate_size": 24,
        "embedding_size": 16,
        "intra_bottleneck_size": 16,
        "true_hidden_size": 16,
    }
    model = transformers.MobileBertModel(transformers.MobileBertConfig(**sizes)).eval()
    sites = hp.find_sites(model)
    mask = hp.HeadMask.from_keep({sites[0].name: []}, {s.name: 4 for s in sites})
    with pytest.raises(
        UnsupportedModel, match="cut so that it keeps a head, for only one called with hidden_states"
    ):
        hp.prune_(model, mask)
    assert hp.find_sites(model) == sites


def test_logits_of_the_tiny_models_depend_on_every_tower() -> None:
    subject = subject_named("clip")
    for tower in ("text_model", "vision_model"):
        mask = subject.mask({s.name: [0] for s in subject.sites if s.name.startswith(tower)})
        with Doubled():
            plain = logits(subject.model, subject.batch)
            with hp.gated(subject.model, mask):
                assert (logits(subject.model, subject.batch) - plain).abs().max() > 1e-4


# --- what BERT's likes add
# --------------------------------------------------------------------------------------------

_BERT: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_BIASES = [(True, True), (True, False), (False, True), (False, False)]


def cut_untouched(model: nn.Module, batch: dict[str, Any], gone: int | None = None) -> None:
    """A model that never ran is cut, and again: equal to the gated one; site ``gone`` keeps no
    head."""
    model = shaken(model).double().eval()
    sites = hp.find_sites(model)
    small, mask = copy.deepcopy(model), ragged(sites)
    if gone is not None:
        mask &= hp.HeadMask.from_keep({sites[gone].name: []}, {s.name: 4 for s in sites})
    for more in (
        mask,
        mask & hp.HeadMask.from_keep({s.name: [0, 2] for s in sites}, {s.name: 4 for s in sites}),
    ):
        hp.prune_(small, more)
        with Doubled():
            with hp.gated(model, more):
                expected = outputs(model(**batch))
            assert_close(outputs(small(**batch)), expected, **CLOSE)
            assert (expected[0] - outputs(model(**batch))[0]).abs().max() > 1e-3


def boxes() -> torch.Tensor:
    return torch.randint(0, 10, (2, 7, 4)).sort(-1).values


@pytest.mark.parametrize("gone", [None, 0])
@pytest.mark.parametrize(("relative", "spatial"), _BIASES)
def test_position_biases_of_layoutlmv3_come_for_all_heads(
    relative: bool, spatial: bool, gone: int | None
) -> None:
    biases = {"has_relative_attention_bias": relative, "has_spatial_attention_bias": spatial}
    sizes = {
        "max_2d_position_embeddings": 16,
        "coordinate_size": 2,
        "shape_size": 4,
        "visual_embed": False,
    }
    model = transformers.LayoutLMv3Model(transformers.LayoutLMv3Config(**_BERT, **biases, **sizes))
    cut_untouched(model, {"input_ids": torch.randint(3, 50, (2, 7)), "bbox": boxes()}, gone)


@pytest.mark.parametrize(("relative", "spatial"), _BIASES)
def test_position_biases_of_layoutlmv2_come_for_all_heads(relative: bool, spatial: bool) -> None:
    """Of its encoder, which needs no detectron2."""
    from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2Encoder

    biases = {"has_relative_attention_bias": relative, "has_spatial_attention_bias": spatial}
    config = transformers.LayoutLMv2Config(**_BERT, **biases, fast_qkv=False)
    states = torch.randn(2, 7, 16, dtype=torch.float64)
    masked = torch.tensor([[0] * 7, [0] * 4 + [1] * 3])[:, None, None]
    places = {"bbox": boxes(), "position_ids": torch.arange(7).expand(2, 7)}
    cut_untouched(
        LayoutLMv2Encoder(config), {"hidden_states": states, "attention_mask": masked, **places}
    )


@pytest.mark.parametrize("attention", ["block_sparse", "original_full"])
def test_big_bird_is_refused_because_it_may_make_its_attention_anew(attention: str) -> None:
    model = transformers.BigBirdModel(
        transformers.BigBirdConfig(**_BERT, attention_type=attention, block_size=4)
    )
    with pytest.raises(UnsupportedModel, match="it has 'attention_type'"):
        hp.find_sites(model)


def test_lxmert_is_refused_because_it_counts_its_width_by_another_name() -> None:
    layers = {"l_layers": 1, "x_layers": 1, "r_layers": 1}
    sizes = {k: v for k, v in _BERT.items() if k != "num_hidden_layers"}
    with pytest.raises(UnsupportedModel, match=r"it has no 'self\.all_head_size'"):
        hp.find_sites(transformers.LxmertModel(transformers.LxmertConfig(**sizes, **layers)))
