"""Law 4: save -> load gives the same model back, bit for bit: every layout, ragged plans, layers
without heads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn

import headprune as hp
from headprune.core.heads import HeadMask
from headprune.core.layout import STATE_ATTRIBUTE
from headprune.layouts import registry
from headprune.model.running import call, outputs
from tests.laws.support import DEEP, EXACT, TRANSFORMERS, picture, ragged

DECODERS = ["gpt2", "llama"]
DTYPES = [torch.float32, torch.bfloat16]


def fresh(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """The tiny model as its class builds it, with biases and norms that are no zeros and ones."""
    model, batch = registry.get(name).tiny(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval(), batch


def as_dtype(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def keep_some(model: nn.Module, **keep: list[int]) -> HeadMask:
    """A ragged mask, with other heads at the sites of these numbers (``s0=[...]``)."""
    sites = hp.find_sites(model)
    mask = ragged(sites)
    kept = {s.name: keep.get(f"s{i}", mask.kept(s.name)) for i, s in enumerate(sites)}
    return HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in sites})


def reload(name: str, folder: Path, seed: int = 5) -> nn.Module:
    """From the folder; for a module of the user's own, into a full-size one with other weights."""
    return (
        hp.from_pretrained(folder)
        if name in TRANSFORMERS
        else hp.from_pretrained(folder, model=fresh(name, seed)[0])
    )


def run(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        found = outputs(call(model, batch))
    assert found
    return found


def assert_same(loaded: nn.Module, model: nn.Module, batch: Any) -> None:
    """The same outputs, tensors, dtypes, classes and head counts."""
    for a, b in zip(run(loaded, batch), run(model, batch), strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert list(mine) == list(theirs)
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], **EXACT)
    assert hp.find_sites(loaded) == hp.find_sites(model)
    for (name, a), (other, b) in zip(loaded.named_modules(), model.named_modules(), strict=True):
        assert (name, type(a).__name__) == (other, type(b).__name__)
        assert getattr(a, STATE_ATTRIBUTE, None) == getattr(b, STATE_ATTRIBUTE, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty", [None, 0, 1, 2, "all"], ids=lambda e: f"empty={e}")
@pytest.mark.parametrize("name", DEEP)
def test_bit_for_bit(name: str, empty: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model, batch = fresh(name)
    model, batch = model.to(dtype), as_dtype(batch, dtype)
    n_sites = len(hp.find_sites(model))
    gone = range(n_sites) if empty == "all" else [] if empty is None else [empty % n_sites]
    hp.prune_(model, keep_some(model, **{f"s{i}": [] for i in gone}))
    assert hp.save_pretrained(model, tmp_path) == tmp_path
    loaded = reload(name, tmp_path)
    assert_same(loaded, model, batch)
    assert not any(m.training for m in loaded.modules())
    assert {p.dtype for p in loaded.parameters()} == {dtype}


@pytest.mark.parametrize("name", DEEP)
def test_nothing_is_left_on_the_meta_device(name: str, tmp_path: Path) -> None:
    model, _ = fresh(name)
    hp.prune_(model, keep_some(model, s0=[]))
    hp.save_pretrained(model, tmp_path)
    loaded = reload(name, tmp_path)
    for tensor_name, tensor in (*loaded.named_parameters(), *loaded.named_buffers()):
        assert tensor.device.type == "cpu", tensor_name
    for module in loaded.modules():  # tensors that are neither
        assert not any(isinstance(v, Tensor) and v.is_meta for v in vars(module).values())
    assert [n for n, _ in loaded.named_buffers()] == [n for n, _ in model.named_buffers()]
    for (n, a), (_, b) in zip(loaded.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, **EXACT, msg=n)


@pytest.mark.parametrize("name", DEEP)
def test_a_model_that_was_cut_twice(name: str, tmp_path: Path) -> None:
    model, batch = fresh(name)
    first = hp.find_sites(model)[0]
    hp.prune_(model, keep_some(model, s0=[h for u in first.units[1:] for h in u]))
    hp.prune_(model, keep_some(model, s0=[h for u in first.units[-1:] for h in u]))
    assert hp.find_sites(model)[0].heads == first.units[-1]
    hp.save_pretrained(model, tmp_path)
    loaded = reload(name, tmp_path)
    assert_same(loaded, model, batch)
    # And what was loaded can be cut further, saved and loaded again.
    for other in (loaded, model):
        hp.prune_(other, keep_some(other, s0=[], s1=[]))
    hp.save_pretrained(loaded, tmp_path / "again")
    assert_same(reload(name, tmp_path / "again"), model, batch)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_an_uncut_model_is_a_plain_transformers_folder(name: str, tmp_path: Path) -> None:
    model, batch = fresh(name)
    hp.save_pretrained(model, tmp_path)
    assert_same(hp.from_pretrained(tmp_path), model, batch)
    theirs = type(model).from_pretrained(tmp_path).eval()
    for a, b in zip(run(theirs, batch), run(model, batch), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_angles_that_were_rounded_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """``model.bfloat16()`` rounds the frequencies too, and no state dict holds them."""
    config = hf.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=8,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    model = hf.LlamaForCausalLM(config).eval().to(dtype)
    hp.prune_heads_(model, {0: [1]})
    hp.save_pretrained(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("model.rotary_emb.inv_freq" in stored) == (dtype == torch.bfloat16), (
        "stored only where it differs"
    )
    batch = {"input_ids": torch.randint(3, 50, (2, 48))}
    loaded = hp.from_pretrained(tmp_path)
    assert_same(loaded, model, batch)
    assert loaded.model.rotary_emb.inv_freq.dtype == model.model.rotary_emb.inv_freq.dtype


def test_rounded_tables_matter() -> None:
    """The test above can fail: rounded frequencies give other outputs."""
    config = hf.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=8,
    )
    model = hf.LlamaForCausalLM(config).eval().bfloat16()
    ids = torch.randint(3, 50, (2, 48))
    expected = run(model, {"input_ids": ids})
    exact = hf.LlamaForCausalLM(config).model.rotary_emb.inv_freq
    model.model.rotary_emb.inv_freq = exact
    assert not torch.equal(run(model, {"input_ids": ids})[0], expected[0])


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model, batch = fresh("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    hp.prune_(model, keep_some(model))
    hp.save_pretrained(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert len({"lm_head.weight", "transformer.wte.weight"} & names) == 1, "stored once"
    loaded = hp.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    with torch.no_grad():
        loaded.lm_head.weight.mul_(2.0)
        model.lm_head.weight.mul_(2.0)
    assert_same(loaded, model, batch)


def test_untied_embeddings_stay_untied(tmp_path: Path) -> None:
    model, batch = fresh("llama")
    hp.save_pretrained(model, tmp_path)
    loaded = hp.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert_same(loaded, model, batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty", [False, True], ids=["some heads", "no heads"])
def test_a_bias_of_a_recovery_comes_back(empty: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model, batch = fresh("llama")
    model = model.to(dtype)
    teacher = copy.deepcopy(model)
    hp.prune_(model, keep_some(model, **({"s1": []} if empty else {})))
    before = run(model, batch)
    report = hp.recover_(model, [batch], "mean_fold", teacher=teacher)
    assert "model.layers.1.self_attn.o_proj.bias" in report.changed
    assert not torch.equal(run(model, batch)[0], before[0])
    hp.save_pretrained(model, tmp_path)
    loaded = hp.from_pretrained(tmp_path)
    assert_same(loaded, model, batch)
    assert isinstance(loaded.model.layers[1].self_attn.o_proj.bias, nn.Parameter)


@pytest.mark.parametrize("empty", [False, True], ids=["some heads", "first layer empty"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_the_same(name: str, empty: bool, tmp_path: Path) -> None:
    model, batch = fresh(name)
    hp.prune_(model, keep_some(model, **({"s0": []} if empty else {})))
    model.generation_config.max_new_tokens = 9
    model.generation_config.repetition_penalty = 1.7
    hp.save_pretrained(model, tmp_path)
    loaded = hp.from_pretrained(tmp_path)
    ids = batch["input_ids"][:2]
    found, expected = (
        m.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)
        for m in (loaded, model)
    )
    assert found.shape == expected.shape
    assert ids.shape[1] < found.shape[1] <= ids.shape[1] + 9
    assert torch.equal(found, expected)
    assert loaded.generation_config.repetition_penalty == 1.7, "the model's own settings come back"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_folder_follows_the_conventions(name: str, tmp_path: Path) -> None:
    model, _ = fresh(name)
    hp.prune_(model, keep_some(model))
    hp.save_pretrained(model, tmp_path)
    files = {p.name for p in tmp_path.iterdir()}
    assert files - {"generation_config.json"} == {
        "model.safetensors",
        "config.json",
        "headprune.json",
        "README.md",
    }
    assert ("generation_config.json" in files) == (name in DECODERS)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    assert type(config) is type(model.config)
    assert config.architectures == [type(model).__name__]
    # The full model's configuration: the heads that are left stand in headprune.json.
    assert (
        config.num_attention_heads
        == model.config.num_attention_heads
        == hp.find_sites(model)[0].n_query_heads
    )
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    manifest = json.loads((tmp_path / "headprune.json").read_text())
    assert manifest["model_class"] == type(model).__name__
    assert set(load_file(tmp_path / "model.safetensors")) <= set(model.state_dict())


@pytest.mark.parametrize("empty", [False, True], ids=["some heads", "no heads"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_alone_does_not_load_a_cut_model_in_silence(
    name: str, empty: bool, tmp_path: Path
) -> None:
    model, _ = fresh(name)
    hp.prune_(model, keep_some(model, **({"s0": []} if empty else {})))
    hp.save_pretrained(model, tmp_path)
    for kind in (type(model), hf.AutoModel):
        with pytest.raises(OSError, match=r"headprune\.from_pretrained"):
            kind.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert "transformers_weights" not in hp.from_pretrained(tmp_path).config.to_dict()


@pytest.mark.parametrize("name", DEEP)
def test_saving_and_loading_disturb_nothing(name: str, tmp_path: Path) -> None:
    model, _ = fresh(name)
    hp.prune_(model, keep_some(model))
    model.train()
    config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
    before, state, default = picture(model), torch.get_rng_state(), torch.get_default_dtype()
    hp.save_pretrained(model, tmp_path)
    assert picture(model) == before
    assert config is None or model.config.to_dict() == config
    if name in TRANSFORMERS:
        hp.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == default
    assert nn.Linear(2, 2).weight.device.type == "cpu", "the building without memory is over"


def test_a_compiled_model_is_saved_as_the_model_inside(tmp_path: Path) -> None:
    model, batch = fresh("bert")
    hp.save_pretrained(torch.compile(model, backend="eager"), tmp_path)
    assert_same(hp.from_pretrained(tmp_path), model, batch)
    assert not any(n.startswith("_orig_mod") for n in load_file(tmp_path / "model.safetensors"))


def test_loaded_weights_can_be_trained(tmp_path: Path) -> None:
    model, batch = fresh("bert")
    hp.prune_(model, keep_some(model))
    hp.save_pretrained(model, tmp_path)
    loaded = hp.from_pretrained(tmp_path)
    assert all(p.requires_grad and p.is_leaf for p in loaded.parameters())
    loaded(**batch).loss.backward()
    assert all(p.grad is not None for p in loaded.parameters())
    hash_before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(2.0)
    assert (tmp_path / "model.safetensors").read_bytes() == hash_before, (
        "training does not write through to the file"
    )
