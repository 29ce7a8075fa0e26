"""Checkpoints that load without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.checkpoints import building, checkpoint, proof
from headprune.checkpoints.checkpoint import applicable_formats
from headprune.core.errors import (
    CheckpointError,
    InvalidValue,
    NotWritten,
    UnsupportedModel,
    VerificationFailed,
)
from headprune.core.heads import HeadMask
from headprune.layouts import registry
from tests.laws.support import shaken


def tiny(name: str, family: str | None = None) -> tuple[Any, dict[str, Any]]:
    model, batch = registry.get(name).tiny(0, family)
    return shaken(model, norms=False).eval(), batch


def cut(name: str, units: list[list[int]], policy: Any = "group") -> tuple[Any, dict[str, Any]]:
    """A model cut to these units, layer by layer."""
    model, batch = tiny(name)
    sites = hp.find_sites(model, policy=policy)
    keep = {s.name: [h for i in us for h in s.units[i]] for s, us in zip(sites, units, strict=True)}
    hp.prune_(
        model, HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}), batch, sites
    )
    return model, batch


UNIFORM, UNEVEN, EMPTY = [[0, 1], [1, 2], [0, 2]], [[0], [0, 1, 2], [1, 2]], [[], [0, 2], [1]]


def test_the_public_names() -> None:
    assert checkpoint.FORMATS == ("headprune", "transformers", "remote-code")


CASES = {
    ("vit", "transformers"): UNIFORM,
    ("llama", "transformers"): UNIFORM,
    ("bert", "remote-code"): UNEVEN,
    ("vit", "remote-code"): EMPTY,
    ("gpt2", "remote-code"): EMPTY,
    ("llama", "remote-code"): EMPTY,
}

LOADS = """
import json, sys, warnings
sys.modules["headprune"] = None  # an import of it fails
import torch, transformers as hf
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
for folder, auto, trust in json.loads(sys.argv[1]):
    more = {"trust_remote_code": True} if trust else {}
    model = getattr(hf, auto).from_pretrained(folder + "/model", **more)
    batch = load_file(folder + "/batch.safetensors")
    got = {"logits": model(**batch).logits.detach()}
    if model.can_generate():
        ids = batch["input_ids"][:2]
        got["generated"] = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    save_file(got, folder + "/got.safetensors")
"""
AUTO = {"vit": "AutoModelForImageClassification", "bert": "AutoModelForSequenceClassification"}


@pytest.fixture(scope="module")
def elsewhere(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """What a process without headprune gets from each checkpoint, beside what the saved model
    gave."""
    home = tmp_path_factory.mktemp("elsewhere")
    jobs, results = [], {}
    for (name, form), units in CASES.items():
        model, batch = cut(name, units)
        if (name, form) == (
            "llama",
            "remote-code",
        ):  # gives projections biases that the class does not have
            method = hp.recovery.Lstsq(feed_forward=True)
            assert hp.recover_(model, [batch], method, tiny(name)[0]).metrics["biases_added"] > 3
        batch = {k: v for k, v in batch.items() if k != "labels"}
        folder = home / f"{name}-{form}"
        hp.save_pretrained(model, folder / "model", format=form)  # type: ignore[arg-type]
        safetensors.torch.save_file(batch, folder / "batch.safetensors")
        jobs.append((str(folder), AUTO.get(name, "AutoModelForCausalLM"), form == "remote-code"))
        results[name, form] = {"saved": model(**batch).logits.detach()}
        if model.can_generate():
            ids = batch["input_ids"][:2]
            generated = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
            results[name, form]["saved_generated"] = generated
    environment = {
        "HF_MODULES_CACHE": str(home / "modules"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "",
        "HOME": str(home),
    }
    command = [sys.executable, "-c", LOADS, json.dumps(jobs)]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=home
    )
    assert process.returncode == 0, process.stderr
    for (folder, _, _), key in zip(jobs, CASES, strict=True):
        results[key].update(safetensors.torch.load_file(f"{folder}/got.safetensors"))
    return results


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_process_without_headprune_gets_the_same_numbers(
    case: tuple[str, str], elsewhere: Any
) -> None:
    assert_close(elsewhere[case]["logits"], elsewhere[case]["saved"], rtol=0, atol=0)
    if "saved_generated" in elsewhere[case]:
        assert_close(elsewhere[case]["generated"], elsewhere[case]["saved_generated"])


def test_a_transformers_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    model, batch = cut("llama", UNIFORM)
    before = json.loads(model.config.to_json_string())
    assert (
        hp.save_pretrained(model, tmp_path / "small", format="transformers") == tmp_path / "small"
    )
    assert json.loads(model.config.to_json_string()) == before, (
        "the model's own configuration stays"
    )
    files = {p.name for p in (tmp_path / "small").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert {p.name for p in tmp_path.iterdir()} == {"small"}, "nothing is left beside it"
    loaded, info = hf.LlamaForCausalLM.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not any(info.values())
    assert (
        loaded.config.num_attention_heads,
        loaded.config.num_key_value_heads,
        loaded.config.head_dim,
    ) == (4, 2, 4)
    assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    with pytest.raises(
        CheckpointError, match=r"no headprune\.json in it. A folder in the format 'transformers'"
    ):
        hp.from_pretrained(tmp_path / "small")


def test_heads_of_other_groups_in_equal_number_are_uniform(tmp_path: Path) -> None:
    model, _ = cut("llama", [[0, 2, 4], [1, 3, 5], [0, 3, 4]], policy="balanced")
    assert applicable_formats(model)["transformers"] is None
    hp.save_pretrained(model, tmp_path / "small", format="transformers")
    config = hf.AutoConfig.from_pretrained(tmp_path / "small")
    assert (config.num_attention_heads, config.num_key_value_heads) == (3, 3)


@pytest.mark.parametrize(
    ("name", "units", "words"),
    [
        ("llama", UNEVEN, "the same number of heads in every layer, got layers with 2, 6, 4 heads"),
        ("llama", EMPTY, r"a head in every layer, got none kept in model\.layers\.0\.self_attn"),
        ("llama", [[0, 1, 2]] * 3, None),
        (
            "bert",
            UNIFORM,
            "head counts that the configuration can say, got with these counts BertForSequence",
        ),
        ("gpt2", UNIFORM, "head counts that the configuration can say"),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(
    name: str, units: Any, words: str | None, tmp_path: Path
) -> None:
    model, _ = cut(name, units)
    reason = applicable_formats(model)["transformers"]
    if words is None:
        assert reason is None, "nothing is cut"
        return
    with pytest.raises(UnsupportedModel, match=words):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
    assert reason is not None
    assert list(tmp_path.iterdir()) == []


def test_a_count_that_the_configurations_validator_refuses(tmp_path: Path) -> None:
    model, _ = tiny("llama")
    config = hf.LlamaConfig(
        **{**model.config.to_dict(), "num_attention_heads": 6, "num_key_value_heads": 6}
    )
    model = hf.LlamaForCausalLM(config).eval()
    keep = {s.name: range(5) for s in hp.find_sites(model)}  # 24 is no multiple of 5
    hp.prune_(model, HeadMask.from_keep(keep, dict.fromkeys(keep, 6)))
    with pytest.raises(UnsupportedModel, match=r"LlamaConfig refuses them: .* not a multiple"):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
    hp.save_pretrained(model, tmp_path / "small", format="remote-code")


def test_the_modelling_file_is_needed_and_shown(tmp_path: Path) -> None:
    model, _ = cut("llama", UNEVEN)
    hp.save_pretrained(model, tmp_path, format="remote-code")
    text = (tmp_path / "modeling_headprune_llama.py").read_text()
    assert "import headprune" not in text
    assert "class HeadPrunedLlamaForCausalLM(LlamaForCausalLM)" in text
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["headprune_heads"]["model.layers.0.self_attn"]["heads"] == [0, 1]
    assert "model.layers.1.self_attn" not in config["headprune_heads"], "it keeps every head"
    with pytest.raises(
        RuntimeError, match="mismatch"
    ):  # without the opt-in nothing runs and nothing loads
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_correction_of_ours_does_not_travel(tmp_path: Path) -> None:
    model, _ = cut(
        "mpnet", [[0], [0, 1], *[[0, 1, 2]] * (len(hp.find_sites(tiny("mpnet")[0])) - 2)]
    )
    words = "modules that run their own code, got .* of headprune corrects"
    assert "run their own code" in str(applicable_formats(model)["remote-code"])
    with pytest.raises(UnsupportedModel, match=words):
        hp.save_pretrained(model, tmp_path / "small", format="remote-code")


def test_a_bias_that_recovery_added_needs_one_of_our_formats() -> None:
    model, _ = cut("llama", UNIFORM)
    projection = model.model.layers[0].self_attn.o_proj
    projection.bias = nn.Parameter(torch.ones(projection.out_features))
    formats = applicable_formats(model)
    assert "o_proj.bias" in str(formats["transformers"])
    assert formats["remote-code"] is None
    assert formats["headprune"] is None


def test_a_class_that_transformers_does_not_have() -> None:
    formats = applicable_formats(nn.Sequential(hp.MultiHeadAttention(16, 4)))
    assert formats["headprune"] is None
    assert "a class of Transformers, got Sequential" in str(formats["transformers"])
    assert "a class of Transformers, got Sequential" in str(formats["remote-code"])


def test_an_unknown_format_and_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = cut("vit", UNIFORM)
    with pytest.raises(
        InvalidValue,
        match="format: must be one of headprune, transformers, remote-code, got 'onnx'",
    ):
        hp.save_pretrained(model, tmp_path / "small", format="onnx")  # type: ignore[arg-type]
    monkeypatch.setattr(proof, "example_batch", lambda model: None)
    with pytest.raises(
        InvalidValue, match=r"example: must be a batch the model takes.* none can be made up"
    ):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
    hp.save_pretrained(model, tmp_path / "small", format="transformers", example=batch)


def test_a_made_up_example_that_the_model_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = cut("vit", UNIFORM)
    monkeypatch.setattr(proof, "example_batch", lambda model: {"words": torch.zeros(1)})
    with pytest.raises(
        InvalidValue, match=r"got none, and ViTFor\w+ does not take a made-up one \(.*NoneType.*\)"
    ):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")


@pytest.mark.parametrize("name", ["classifier", "attributes", "modules", "auto"])
def test_what_the_modelling_file_cannot_say_is_refused(name: str, tmp_path: Path) -> None:
    model, _ = cut("bert", UNEVEN)
    attention = model.bert.encoder.layer[0].attention
    if name == "classifier":
        model.classifier = nn.Linear(model.config.hidden_size, 7)
        words = r"tensors that the class has, cut inside of attentions, got classifier\.weight"
    elif name == "attributes":
        attention.sizes = (1, [2, None])
        hp.save_pretrained(model, tmp_path / "said", format="remote-code")
        config = json.loads((tmp_path / "said" / "config.json").read_text())
        assert config["headprune_heads"]["bert.encoder.layer.0.attention"]["attributes"][
            "sizes"
        ] == [1, [2, None]]
        attention.sizes = (1, [2, object()])
        words = r"attributes that JSON holds, got bert\.encoder\.layer\.0\.attention\.sizes"
    elif name == "modules":
        attention.extra = nn.Identity()
        words = r"modules that the class has, got bert\.encoder\.layer\.0\.attention\.extra"
    else:
        model = hf.GPT2DoubleHeadsModel(
            hf.GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=20)
        )
        words = "one of Transformers' Auto classes loads, got GPT2DoubleHeadsModel"
    assert name == "auto" or applicable_formats(model)["headprune"] is None
    with pytest.raises(UnsupportedModel, match=words):
        hp.save_pretrained(model, tmp_path / "small", format="remote-code")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("fails", "kind", "words"),
    [
        (OSError(28, "No space left on device"), NotWritten, "got No space left on device"),
        (
            ValueError("no\nconversion"),
            VerificationFailed,
            "must be what was saved, got no model: no conversion",
        ),
        (None, VerificationFailed, r"got missing keys: \['model\.norm\.weight'\]"),
    ],
)
def test_what_is_not_written_or_not_whole_is_not_kept(
    fails: Exception | None,
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = cut("llama", UNIFORM)

    def lossy(*arguments: Any) -> None:
        if fails is not None:
            raise fails
        building.save_as(*arguments)
        *_, folder, _, _ = arguments
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        del tensors["model.norm.weight"]
        safetensors.torch.save_file(
            tensors, folder / "model.safetensors", metadata={"format": "pt"}
        )

    monkeypatch.setattr(proof, "save_as", lossy)
    with pytest.raises(kind, match=words):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("corrupt", ["first time", "always"])
def test_what_does_not_come_back_is_not_kept(
    corrupt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the names on disk are of a fused projection that is split into equal thirds
    again."""
    model, _ = cut("llama", UNIFORM)

    def swapped(*arguments: Any) -> None:
        building.save_as(*arguments)
        *_, folder, _, original_names = arguments
        if original_names or corrupt == "always":
            tensors = safetensors.torch.load_file(folder / "model.safetensors")
            names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "kv"]
            tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]].clone()
            safetensors.torch.save_file(
                tensors, folder / "model.safetensors", metadata={"format": "pt"}
            )

    monkeypatch.setattr(proof, "save_as", swapped)
    if corrupt == "first time":
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
        loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "small")
        assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
        return
    with pytest.raises(
        VerificationFailed, match=r"another tensor 'model\.layers\.0\.self_attn\.k_proj\.weight'"
    ):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
    assert list(tmp_path.iterdir()) == []


def test_other_arithmetic_on_the_same_tensors_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = cut("llama", UNIFORM)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9  # what the configuration does not know
    with pytest.raises(VerificationFailed, match=r"what was saved, up to .* got outputs that are"):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
    hp.save_pretrained(model, tmp_path / "small", format="remote-code")  # records the attribute


def test_a_fused_projection_on_disk(tmp_path: Path) -> None:
    """NomicBert is stored with one fused matrix a layer, split into thirds when it is loaded."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    model: Any = hf.NomicBertModel(hf.NomicBertConfig(**sizes, num_hidden_layers=2)).eval()
    keep = {s.name: (0, 2) for s in hp.find_sites(model)}
    hp.prune_(model, HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
    hp.save_pretrained(model, tmp_path, format="transformers")
    assert any(
        "Wqkv" in name for name in safetensors.torch.load_file(tmp_path / "model.safetensors")
    )
    assert_close(
        hf.NomicBertModel.from_pretrained(tmp_path).state_dict(), model.state_dict(), rtol=0, atol=0
    )


def test_half_precision_stays(tmp_path: Path) -> None:
    model, _ = cut("llama", UNEVEN)
    hp.save_pretrained(model.bfloat16(), tmp_path, format="remote-code")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_another_format_in_the_same_folder_replaces_the_files(tmp_path: Path) -> None:
    model, _ = cut("llama", UNIFORM)
    hp.save_pretrained(model, tmp_path, max_shard_size=4000)
    hp.save_pretrained(model, tmp_path, format="remote-code")
    hp.save_pretrained(model, tmp_path, format="transformers")
    files = {p.name for p in tmp_path.iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    hp.save_pretrained(model, tmp_path)
    assert [len(s.heads) for s in hp.find_sites(hp.from_pretrained(tmp_path))] == [4, 4, 4]
