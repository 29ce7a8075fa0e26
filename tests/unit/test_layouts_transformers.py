"""What is particular to single layouts of Transformers; the laws of all families are in
tests/laws."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close
from transformers.models import cohere, layoutlmv2

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.plan import PruningPlan
from headprune.layouts import _grouped, registry
from headprune.model.costs import measure_costs
from headprune.model.double import Doubled
from headprune.model.running import outputs
from headprune.model.sites import bind, reason_against
from tests.laws.families import FAMILIES
from tests.laws.support import CLOSE, family_subject, mask_of, ragged, shaken


def subject_named(family):
    return family_subject(*next(pair for pair in FAMILIES if pair[1] == family))


def assert_one_layout_fits(model):
    for bound in bind(model):
        fitting = [n for n in registry if reason_against(registry.get(n), bound.module) is None]
        assert fitting == [bound.site.layout]


#: One family a layout.
LAYOUTS = dict(reversed(FAMILIES))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_layout_fits_a_module_and_no_other(layout):
    assert_one_layout_fits(registry.get(layout).tiny(0, LAYOUTS[layout])[0])


def test_towers_and_kinds_of_a_text_tower_that_looks_at_an_image():
    sites = subject_named("blip").sites
    assert {s.name.partition("_")[0] for s in sites} == {"text", "vision"}
    kinds = [(s.layout, s.kind) for s in sites]
    assert kinds == [("blip", "self")] * 2 + [("bert", "causal"), ("bert", "cross")] * 2


def test_a_linear_layer_over_several_heads_is_not_taken_for_one_of_each():
    subject = subject_named("wavlm")
    attention = subject.model.get_submodule(subject.sites[0].name)
    attention.gru_rel_pos_linear = nn.Linear(8, 8)
    assert "not one head's width" in str(reason_against(subject.layout, attention))


@pytest.mark.parametrize("keep", [[2], []])
def test_both_position_biases_of_beit_at_once(keep):
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "image_size": 8, "patch_size": 4, "num_channels": 1}
    both = {"use_relative_position_bias": True, "use_shared_relative_position_bias": True}
    config = transformers.BeitConfig(**sizes, **both, initializer_range=0.3)
    model = shaken(transformers.BeitModel(config)).double().eval()
    batch = {"pixel_values": torch.randn(2, 1, 8, 8, dtype=torch.float64)}
    sites = hp.find_sites(model)
    mask = mask_of(sites, {sites[0].name: keep})
    small = copy.deepcopy(model)
    hp.prune_(small, mask, batch)
    with Doubled():
        with hp.gated(model, mask):
            expected = model(**batch).last_hidden_state
        assert_close(small(**batch).last_hidden_state, expected, **CLOSE)
    assert small.shared_position_bias.relative_position_bias_table.shape[1] == 4


def test_a_part_of_beit_is_cut_for_the_table_that_lies_outside_of_it():
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


_BERT = {"vocab_size": 50, "pad_token_id": 0, "max_position_embeddings": 32}
_BERT |= {"hidden_size": 16, "intermediate_size": 24}
_BERT |= {"num_hidden_layers": 2, "num_attention_heads": 4}


def cut_untouched(model, batch, emptied):
    """A model that never ran is cut, and again: equal to the gated one; the first site may keep no
    head."""
    model = shaken(model).double().eval()
    sites = hp.find_sites(model)
    small, mask = copy.deepcopy(model), ragged(sites)
    if emptied:
        mask &= mask_of(sites, {sites[0].name: []})
    for more in (mask, mask & mask_of(sites, {s.name: [0, 2] for s in sites})):
        hp.prune_(small, more)
        with Doubled():
            with hp.gated(model, more):
                expected = outputs(model(**batch))
            assert_close(outputs(small(**batch)), expected, **CLOSE)
            assert (expected[0] - outputs(model(**batch))[0]).abs().max() > 1e-3


def boxes():
    return torch.randint(0, 10, (2, 7, 4)).sort(-1).values


@pytest.mark.parametrize(
    ("relative", "spatial", "emptied"),
    [(True, False, True), (False, True, False)],
)
def test_position_biases_of_layoutlmv3_come_for_all_heads(relative, spatial, emptied):
    biases = {"has_relative_attention_bias": relative, "has_spatial_attention_bias": spatial}
    sizes = {"max_2d_position_embeddings": 16, "coordinate_size": 2, "shape_size": 4}
    config = transformers.LayoutLMv3Config(**_BERT, **biases, **sizes, visual_embed=False)
    batch = {"input_ids": torch.randint(3, 50, (2, 7)), "bbox": boxes()}
    cut_untouched(transformers.LayoutLMv3Model(config), batch, emptied)


def test_position_biases_of_layoutlmv2_come_for_all_heads():
    """Of its encoder, which needs no detectron2."""
    biases = {"has_relative_attention_bias": True, "has_spatial_attention_bias": True}
    config = transformers.LayoutLMv2Config(**_BERT, **biases, fast_qkv=False)
    states = torch.randn(2, 7, 16, dtype=torch.float64)
    masked = torch.tensor([[0] * 7, [0] * 4 + [1] * 3])[:, None, None]
    places = {"bbox": boxes(), "position_ids": torch.arange(7).expand(2, 7)}
    batch = {"hidden_states": states, "attention_mask": masked, **places}
    cut_untouched(layoutlmv2.modeling_layoutlmv2.LayoutLMv2Encoder(config), batch, emptied=False)


def run(model, batch):
    with Doubled():
        return model(**batch).logits


def assert_exact(subject, mask):
    small = subject.copy()
    hp.prune_(small, PruningPlan(mask, policy="free"))
    with hp.gated(subject.model, mask):
        assert_close(run(small, subject.batch), run(subject.model, subject.batch), **CLOSE)
    return small


def bytes_held(model, batch):
    """By the keys and values of a cache."""
    layers = model(**batch, use_cache=True).past_key_values.layers
    return sum(t.numel() * t.element_size() for x in layers for t in (x.keys, x.values))


def kv_bytes(model, batch):
    """A token of one of the batch's 3 sequences of 7 tokens."""
    return measure_costs(model, bind(model), batch).total.kv_bytes


def test_norms_of_one_head_are_not_taken_for_norms_of_all():
    attention = subject_named("qwen3").model.model.layers[0].self_attn
    config = transformers.CohereConfig(hidden_size=16, num_attention_heads=4, use_qk_norm=True)
    # Cohere's are [heads, width]
    for module in (attention, cohere.modeling_cohere.CohereAttention(config, 0)):
        assert "over all heads together" in str(reason_against(registry.get("olmo2"), module))
    attention = subject_named("olmo2").model.model.layers[0].self_attn
    assert "not one head's width" in str(reason_against(registry.get("llama"), attention))


def test_a_layer_of_phi3_has_a_configuration_of_its_own():
    subject = subject_named("phi3")
    name = subject.sites[1].name
    small = assert_exact(subject, subject.mask({name: [2, 3, 4]}))
    assert small.config.num_attention_heads == 6
    assert [layer.self_attn.config.num_attention_heads for layer in small.model.layers] == [6, 3, 6]
    cut = small.model.layers[1].self_attn
    for implementation in ("eager", "sdpa"):
        small.set_attn_implementation(implementation)
        assert cut.config._attn_implementation == implementation
    again = subject.mask({name: [2, 3]})
    hp.prune_(small, again, sites=hp.find_sites(small, policy="free"))
    assert not hasattr(cut.config.shared, "shared")
    twin = copy.deepcopy(small)
    assert twin.model.layers[1].self_attn.config.shared is twin.config


def test_a_latent_cache_does_not_shrink():
    subject = subject_named("deepseek_v3")
    scores = hp.score(subject.model, [{**subject.batch, "labels": subject.batch["input_ids"]}])
    with pytest.raises(InvalidValue, match=r"Budget\.keep_kv: .*no KV cache that shrinks"):
        hp.select(scores, hp.Budget(keep_kv=0.5))
    assert {cost.kv_bytes for row in scores.costs.units for cost in row} == {0}
    small = assert_exact(subject, subject.ragged())
    for model in (small, subject.model):
        held = bytes_held(model, subject.batch)
        assert kv_bytes(model, subject.batch) * 3 * 7 == held == bytes_held(small, subject.batch)
    hp.prune_(small, subject.mask({subject.sites[0].name: []}) & subject.ragged())
    assert kv_bytes(small, subject.batch) * 2 == scores.costs.total.kv_bytes


@pytest.mark.parametrize("family", ["falcon", "falcon-mqa"])
def test_falcon_caches_what_its_costs_say(family):
    """The new architecture repeats keys before it caches them: one a query head."""
    subject = subject_named(family)
    for model in (subject.model, assert_exact(subject, subject.ragged(1))):
        held = bytes_held(model, subject.batch)
        assert kv_bytes(model, subject.batch) * 3 * 7 == held


def test_falcon_splits_groups_of_unlike_size():
    subject = subject_named("falcon")
    keep = {subject.sites[0].name: [0, 2, 3], subject.sites[1].name: [0, 1, 2, 4]}
    small = assert_exact(subject, subject.mask(keep))
    assert small.transformer.h[0].self_attention.headprune_repeats == (1, 2)
    small.generate(input_ids=subject.batch["input_ids"][:1], max_new_tokens=3)


def test_uneven_groups_are_refused_where_one_module_attends_to_two_sequences():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    sizes |= {"hidden_size": 16, "intermediate_size": 24, "head_dim": 4, "vocab_size": 50}
    sides = [transformers.T5GemmaModuleConfig(**sizes) for _ in range(2)]
    config = transformers.T5GemmaConfig(encoder=sides[0], decoder=sides[1], vocab_size=50)
    model = transformers.T5GemmaForConditionalGeneration(config)
    sites = hp.find_sites(model, policy="free")
    (cross,) = (site.name for site in sites if site.kind == "cross")
    with pytest.raises(UnsupportedModel, match="cut to groups of one size"):
        hp.prune_(model, mask_of(sites, {cross: [0, 1, 2]}), sites=sites)
    assert hp.find_sites(model, policy="free") == sites


def test_code_that_reads_its_heads_from_the_configuration_is_refused():
    """Moonshine's: a cut module would still be viewed with all heads."""
    side = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    sides = {f"{name}_{key}": n for name in ("encoder", "decoder") for key, n in side.items()}
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24}
    model = built("MoonshineForConditionalGeneration", **sizes, **sides)
    with pytest.raises(UnsupportedModel, match="it has 'head_dim_padding'"):
        hp.find_sites(model)
    # One class attends to its own sequence and to the encoder's.
    attentions = {n: m for n, m in model.named_modules() if n.endswith("_attn")}
    kinds = {name.split("model.")[-1]: _grouped.kind(m, name) for name, m in attentions.items()}
    assert kinds == {
        "encoder.layers.0.self_attn": "self",
        "decoder.layers.0.self_attn": "causal",
        "decoder.layers.0.encoder_attn": "cross",
    }


SIZES = {"vocab_size": 50, "d_model": 16, "max_position_embeddings": 64}
for _side in ("encoder", "decoder"):
    SIZES |= {f"{_side}_layers": 1, f"{_side}_attention_heads": 4, f"{_side}_ffn_dim": 24}
T5_SIZES = {"vocab_size": 50, "num_layers": 1, "num_heads": 4}
T5_SIZES |= {"d_model": 16, "d_kv": 4, "d_ff": 24}


def built(name, **settings):
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings))


def first(model, ending):
    return next(m for n, m in model.named_modules() if n.endswith(ending))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BartModel", {}),
        ("NllbMoeModel", {"num_experts": 2}),  # its decoder's attention says nothing of causality
    ],
)
def test_kinds_are_told_apart(name, settings):
    sites = hp.find_sites(built(name, **SIZES, **settings))
    kinds = {(s.name.partition(".")[0], s.name.endswith("self_attn")): s.kind for s in sites}
    expected = {("encoder", True): "self", ("decoder", True): "causal", ("decoder", False): "cross"}
    assert kinds == expected


@pytest.mark.parametrize(
    ("name", "settings", "where", "words"),
    [
        ("LEDModel", {"attention_window": 4}, "decoder.layers.0.self_attn", "width from its input"),
        (
            "FSMTModel",
            {"langs": ["a", "b"], "src_vocab_size": 50, "tgt_vocab_size": 50},
            *("self_attn", "'cache_key'"),
        ),
        ("PegasusXModel", {"block_size": 4}, "encoder.layers.0.self_attn", "'block_size'"),
        ("AutoformerModel", {"prediction_length": 2}, "self_attn", "'autocorrelation_factor'"),
    ],
)
def test_relatives_of_bart_that_are_refused(name, settings, where, words):
    module = first(built(name, **SIZES, **settings), where)
    assert words in str(reason_against(registry.get("bart"), module))


def test_relatives_of_t5_match_their_own_layout_or_none():
    longt5, umt5 = built("LongT5Model", **T5_SIZES), built("UMT5Model", **T5_SIZES)
    local, cross = first(longt5, "LocalSelfAttention"), first(longt5, "EncDecAttention")
    assert "'local_radius'" in str(reason_against(registry.get("t5"), local))
    assert reason_against(registry.get("t5"), cross) is None
    assert reason_against(registry.get("umt5"), cross) is not None
    for module in (first(umt5, "SelfAttention"), first(umt5, "EncDecAttention")):
        assert reason_against(registry.get("umt5"), module) is None
        assert reason_against(registry.get("t5"), module) is not None
