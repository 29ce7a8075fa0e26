"""The matrix of the laws itself: which families are in it, and that all their attentions are
found."""

from __future__ import annotations

from headprune.layouts import registry
from headprune.model.sites import reason_against
from tests.laws import chosen
from tests.laws.families import FAMILIES, KEEP_A_HEAD, ONE_EACH, implementations, over
from tests.laws.support import Subject

#: Families that must never drop out of the matrix; variants of one (falcon-mqa) count once.
NAMED = """
albert bart beit bert blip bloom camembert clip cohere2 deberta-v2 deberta-v3 deepseek_v3 deit dinov2 dinov3 distilbert
electra falcon gemma2 gemma3 gpt2 gpt_neo gpt_neox gpt_oss gptj granite hubert llama llava m2m_100 marian mbart mistral
mixtral modernbert mpnet mt5 olmo2 opt pegasus phi phi3 qwen2 qwen3 qwen3_next roberta siglip smollm3 starcoder2 swin t5
vit wav2vec2 wavlm whisper xlm-roberta
"""

#: Families with attentions of other layouts too: which, by a part of the module's name.
MIXED = {
    "blip": {"text_decoder": "bert"},
    "llava": {"vision_tower": "bart"},
    "siglip": {"vision_model.head": "torch_multi_head"},
}


def test_every_layout_names_a_family_and_no_family_twice() -> None:
    names = [family for _, family in FAMILIES]
    assert len(names) == len(set(names))
    assert {layout for layout, _ in FAMILIES} == {
        name for name in registry.names() if not registry.get(name).is_feed_forward
    }
    known = {"diffusers-style", "x_transformers.Encoder", "x_transformers.Decoder"}
    assert known <= KEEP_A_HEAD < set(names)


def test_the_matrix_covers_the_models_that_people_have() -> None:
    named = set(NAMED.split())
    assert len(named) >= 45
    assert named <= {family for _, family in FAMILIES}


def test_the_matrix_has_both_kernels() -> None:
    """Most models have both; a test that asks for a kernel asks no fewer of them."""
    kernels = [kernel for pair in FAMILIES for kernel in implementations(*pair)]
    assert kernels.count("eager") > 60
    assert kernels.count("sdpa") > 50


@over()
def test_every_attention_of_the_model_is_a_site_of_its_layout(subject: Subject) -> None:
    others = MIXED.get(subject.family, {})
    for site in subject.sites:
        expected = [layout for part, layout in others.items() if part in site.name] or [
            subject.layout.name
        ]
        assert [site.layout] == expected, site.name
        module = subject.model.get_submodule(site.name)
        assert reason_against(registry.get(site.layout), module) is None
    assert {s.layout for s in subject.sites} == {subject.layout.name, *others.values()}
    inside = tuple(f"{s.name}." if s.name else "" for s in subject.sites)
    own = {s.name for s in subject.sites}
    for name, module in subject.model.named_modules():
        holds = any(site.startswith(f"{name}.") for site in own)
        if (
            type(module).__name__.endswith(("Attention", "SelfAttention"))
            and list(module.parameters())
            and not holds
        ):
            assert name in own or name.startswith(inside), (
                f"{name} ({type(module).__name__}) was not found"
            )


@over([pair for pair in FAMILIES if not registry.is_builtin(pair[0])])
def test_every_count_of_a_plugins_layout_is_an_attribute(subject: Subject) -> None:
    """A misspelt name would be passed over, and the cut module would keep its old count.

    Layouts of the library also name attributes that other versions of a class have.
    """
    for site in subject.sites:
        if site.layout != subject.layout.name:
            continue
        module = subject.model.get_submodule(site.name)
        for path, _ in subject.layout.counts:
            missing = object()
            found = module
            for name in path.split("."):
                found = getattr(found, name, missing)
            assert found is not missing, f"layout {site.layout}: no attribute {path!r}"


def test_the_core_tries_a_family_of_every_layout() -> None:
    first = chosen.first_families()
    assert first < {*FAMILIES}
    assert {layout for layout, _ in first} == {layout for layout, _ in FAMILIES}
    assert {*ONE_EACH} <= first, "their feed-forwards are of other layouts than their attention"
