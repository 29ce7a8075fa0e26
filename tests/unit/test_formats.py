"""Checkpoints that load without this package."""

import contextlib
import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.checkpoints import proof
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
from headprune.model import building
from tests.laws.support import mask_of, mask_of_units, shaken

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(name, family=None):
    model, batch = registry.get(name).tiny(0, family)
    return shaken(model, norms=False).eval(), batch


def cut(name, units, policy="group"):
    model, batch = tiny(name)
    sites = hp.find_sites(model, policy=policy)
    hp.prune_(model, mask_of_units(sites, units), batch, sites)
    return model, batch


def without_some_neurons(model):
    """Cuts the feed-forwards to unlike sizes; the second keeps none."""
    sites = hp.find_sites(model, feed_forward=True)
    neurons = [site for site in sites if site.is_feed_forward]
    keep = {site.name: site.heads[:: 2 + place] for place, site in enumerate(neurons)}
    keep[neurons[1].name] = ()
    counts = {site.name: site.n_query_heads for site in sites}
    hp.prune_(model, hp.HeadMask.from_keep(keep, counts))


UNIFORM, UNEVEN, EMPTY = [[0, 1], [1, 2], [0, 2]], [[0], [0, 1, 2], [1, 2]], [[], [0, 2], [1]]


#: A class, how it is cut, and its format: every format, with every kind of cut that it can hold.
CASES = {
    ("vit", "transformers"): UNIFORM,
    ("bert", "remote-code"): UNEVEN,
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


def outputs_of(model, batch):
    """What ``LOADS`` gets too."""
    found = {"logits": model(**batch).logits.detach()}
    if model.can_generate():
        how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        found["generated"] = model.generate(batch["input_ids"][:2], **how)
    return found


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    home = tmp_path_factory.mktemp("elsewhere")
    jobs, results = [], {}
    for (name, form), units in CASES.items():
        model, batch = cut(name, units)
        if (name, form) == ("llama", "remote-code"):
            # Gives projections biases that the class does not have.
            method = hp.recovery.Lstsq(ridge=0.3, feed_forward=True)
            assert hp.recover_(model, [batch], method, tiny(name)[0]).metrics["biases_added"] > 3
        if form == "remote-code":
            without_some_neurons(model)
        if name == "gpt2":
            model = model.bfloat16()
        batch = {k: v for k, v in batch.items() if k != "labels"}
        folder = home / f"{name}-{form}"
        # A decoder without heads in a layer is what vLLM cannot serve.
        says = pytest.warns(UserWarning, match=r"vLLM .*layers\.0\..* min_heads=1")
        with says if (name, form) == ("llama", "remote-code") else contextlib.nullcontext():
            hp.save_pretrained(model, folder / "model", format=form)
        safetensors.torch.save_file(batch, folder / "batch.safetensors")
        jobs.append((str(folder), AUTO.get(name, "AutoModelForCausalLM"), form == "remote-code"))
        results[name, form] = outputs_of(model, batch)
    cache = {"HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1", "HOME": str(home)}
    command = [sys.executable, "-c", LOADS, json.dumps(jobs)]
    options = {"capture_output": True, "text": True, "check": False}
    process = subprocess.run(command, **options, env={**cache, "PATH": ""}, cwd=home)
    assert process.returncode == 0, process.stderr
    return {
        key: (results[key], safetensors.torch.load_file(f"{folder}/got.safetensors"))
        for (folder, _, _), key in zip(jobs, CASES, strict=True)
    }


def test_a_decoder_that_vllm_cannot_serve_when_it_is_cut(tmp_path):
    model, _ = cut("gpt2", [[0], [0, 1], [0]])
    with pytest.warns(UserWarning, match=r"vLLM .*GPT2LMHeadModel: where format 'transformers'"):
        hp.save_pretrained(model, tmp_path / "gpt2", format="remote-code")


def test_a_decoder_without_some_neurons_is_not_said_to_lack_heads(tmp_path, recwarn):
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=20)).eval()
    sites = hp.find_sites(model, feed_forward=True)
    kept = {site.name: site.heads[:8] for site in sites if site.is_feed_forward}
    hp.prune_(model, hp.HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in sites}))
    hp.save_pretrained(model, tmp_path, format="remote-code")
    assert not [one for one in recwarn if "vLLM" in str(one.message)]


def test_a_decoder_with_a_layer_without_neurons_is_nothing_for_vllm(tmp_path):
    model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL)).eval()
    sites = hp.find_sites(model, feed_forward=True)
    kept = {site.name: site.heads for site in sites}
    kept["model.layers.0.mlp"] = ()
    hp.prune_(model, hp.HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in sites}))
    words = r"vLLM .*layers\.0\.mlp has no neurons: select with min_heads=1"
    with pytest.warns(UserWarning, match=words):
        hp.save_pretrained(model, tmp_path, format="remote-code")


def test_vllm_reads_the_width_of_heads(tmp_path):
    # A configuration without a width divides the model's by the heads, which are fewer now.
    model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL)).eval()
    assert not hasattr(model.config, "head_dim")
    hp.prune_(model, [[1, 1, 0, 0], [0, 0, 1, 1]])
    hp.save_pretrained(model, tmp_path, format="remote-code")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["head_dim"] == 8
    assert config["per_layer_config"]["0"]["num_attention_heads"] == 2


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_process_without_headprune_gets_the_same_numbers(case, elsewhere):
    saved, found = elsewhere[case]
    assert_close(found, saved, rtol=0, atol=0)


def test_head_counts_of_every_layer_are_where_vllm_reads_them(tmp_path):
    model, _ = cut("llama", UNEVEN)
    hp.save_pretrained(model, tmp_path, format="remote-code")
    config = json.loads((tmp_path / "config.json").read_text())
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    assert config["allow_global_per_layer_attribute_access"] is True
    for number, kept in enumerate(UNEVEN):
        counts = {"num_attention_heads": len(kept) * group, "num_key_value_heads": len(kept)}
        # Transformers writes only what differs from the whole model.
        stated = {
            **{name: config[name] for name in counts},
            **config["per_layer_config"].get(str(number), {}),
        }
        assert stated == counts


def test_a_transformers_checkpoint_is_an_ordinary_one(tmp_path):
    units = [[0, 2, 4], [1, 3, 5], [0, 3, 4]]
    (model, batch), folder = cut("llama", units, policy="balanced"), tmp_path / "small"
    before = json.loads(model.config.to_json_string())
    assert hp.save_pretrained(model, folder, format="transformers") == folder
    assert json.loads(model.config.to_json_string()) == before, "the model's own is as it was"
    files = {p.name for p in folder.iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert {p.name for p in tmp_path.iterdir()} == {"small"}, "nothing lies beside it"
    loaded, info = hf.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    config = loaded.config
    counts = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert counts == (3, 3, 4)
    assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    again = hp.from_pretrained(folder)
    assert [s.heads for s in hp.find_sites(again)] == [tuple(heads) for heads in units]


@pytest.mark.parametrize(
    ("name", "units", "words"),
    [
        ("llama", UNEVEN, "the same number of heads in every layer, got layers with 2, 6, 4 heads"),
        ("llama", EMPTY, r"a head in every layer, got none kept in model\.layers\.0\.self_attn"),
        ("bert", UNIFORM, "a cut that the configuration can state, got with these counts Bert"),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(name, units, words, tmp_path):
    model, _ = cut(name, units)
    assert applicable_formats(model)["transformers"] is not None
    with pytest.raises(UnsupportedModel, match=words):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
    assert list(tmp_path.iterdir()) == []


def test_which_formats_apply_is_told_without_saving():
    model, _ = tiny("llama")
    assert set(applicable_formats(model).values()) == {None}, "nothing is cut"
    projection = model.model.layers[0].self_attn.o_proj
    projection.bias = nn.Parameter(torch.ones(projection.out_features))  # as recovery adds it
    formats = applicable_formats(model)
    assert "o_proj.bias" in str(formats.pop("transformers"))
    assert set(formats.values()) == {None}
    own = applicable_formats(nn.Sequential(hp.MultiHeadAttention(16, 4)))
    assert own.pop("headprune") is None
    assert all("a class of Transformers, got Sequential" in str(reason) for reason in own.values())
    corrected, _ = tiny("mpnet")
    hp.prune_heads_(corrected, {0: [1]})
    assert "run their own code" in str(applicable_formats(corrected)["remote-code"])


def test_a_count_that_the_configurations_validator_refuses(tmp_path):
    counts = {"num_attention_heads": 6, "num_key_value_heads": 6}
    config = hf.LlamaConfig(**{**tiny("llama")[0].config.to_dict(), **counts})
    model = hf.LlamaForCausalLM(config).eval()
    keep = {s.name: range(5) for s in hp.find_sites(model)}  # 24 is no multiple of 5
    hp.prune_(model, HeadMask.from_keep(keep, dict.fromkeys(keep, 6)))
    with pytest.raises(UnsupportedModel, match=r"LlamaConfig refuses them: .* not a multiple"):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")


def test_the_modelling_file_is_needed_and_shown(tmp_path):
    model, _ = cut("llama", UNEVEN)
    hp.save_pretrained(model.bfloat16(), tmp_path, format="remote-code")
    text = (tmp_path / "modeling_headprune_llama.py").read_text()
    assert "import headprune" not in text
    assert "class HeadPrunedLlamaForCausalLM(LlamaForCausalLM)" in text
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["headprune_heads"]["model.layers.0.self_attn"]["heads"] == [0, 1]
    assert "model.layers.1.self_attn" not in config["headprune_heads"], "it keeps every head"
    with pytest.raises(RuntimeError, match="mismatch"):  # without the opt-in nothing loads
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_unknown_format_and_examples_that_do_not_serve(tmp_path, monkeypatch):
    (model, batch), folder = cut("vit", UNIFORM), tmp_path / "small"
    words = "format: must be one of auto, headprune, transformers, remote-code, gguf, got 'onnx'"
    with pytest.raises(InvalidValue, match=words):
        hp.save_pretrained(model, folder, format="onnx")
    for made_up, words in (
        (None, r"example: must be a batch the model takes.* none can be made up"),
        ({"words": torch.zeros(1)}, r"ViTFor\w+ does not take a made-up one \(.*NoneType.*\)"),
    ):
        monkeypatch.setattr(proof, "example_batch", lambda model, made_up=made_up: made_up)
        with pytest.raises(InvalidValue, match=words):
            hp.save_pretrained(model, folder, format="transformers")
    hp.save_pretrained(model, folder, format="transformers", example=batch)


def changed(name):
    """A model that no modelling file of ours can say, and why."""
    if name == "free":  # heads that share unevenly need code of headprune
        model, _ = tiny("llama")
        sites = hp.find_sites(model, policy="free")
        kept = {site.name: [0, 1, site.n_query_heads - 1] for site in sites}
        hp.prune_(model, mask_of(sites, kept), sites=sites)
        return model, "policy group or balanced"
    model, _ = cut("bert", UNEVEN)
    attention = model.bert.encoder.layer[0].attention
    if name == "classifier":
        model.classifier = nn.Linear(model.config.hidden_size, 7)
        return model, r"as the class makes them, got a new or cut tensor classifier\.weig"
    if name == "attributes":
        attention.sizes = (1, [2, object()])
        return model, r"attributes that JSON holds, got bert\.encoder\.layer\.0\.attention\.sizes"
    if name == "modules":
        attention.extra = nn.Identity()
        return (
            model,
            r"modules of the class, got a new one, bert\.encoder\.layer\.0\.attention\.extra",
        )
    config = hf.GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=20)
    words = "one of Transformers' Auto classes loads, got GPT2DoubleHeadsModel"
    return hf.GPT2DoubleHeadsModel(config), words


@pytest.mark.parametrize("name", ["free", "classifier", "attributes", "modules", "auto"])
def test_what_the_modelling_file_cannot_say_is_refused(name, tmp_path):
    model, words = changed(name)
    assert name == "auto" or applicable_formats(model)["headprune"] is None
    with pytest.raises(UnsupportedModel, match=words):
        hp.save_pretrained(model, tmp_path / "small", format="remote-code")
    assert not (tmp_path / "small").exists()


FAILS = {
    "disk": (OSError(28, "No space left on device"), NotWritten, "got No space left on device"),
    "words": (ValueError("no\nconversion"), VerificationFailed, "got no model: no conversion"),
    "norm": (None, VerificationFailed, r"got missing keys: \['model\.norm\.weight'\]"),
    "swapped": (None, VerificationFailed, r"another tensor 'model\.layers\.0\.self_attn\.k_proj"),
    "swapped once": (None, None, ""),
}


@pytest.mark.parametrize("case", FAILS)
def test_what_is_not_written_or_not_whole_is_not_kept(case, tmp_path, monkeypatch):
    """Swapped as where the names on disk are of a fused projection that is split into equal thirds
    again."""
    (model, _), folder = cut("llama", UNIFORM), tmp_path / "small"
    error, kind, words = FAILS[case]

    def lossy(*arguments):
        if error is not None:
            raise error
        building.save_as(*arguments)
        *_, place, _, original_names = arguments
        tensors = safetensors.torch.load_file(place / "model.safetensors")
        if case == "norm":
            del tensors["model.norm.weight"]
        elif original_names or case == "swapped":
            key, value = (f"model.layers.0.self_attn.{p}_proj.weight" for p in "kv")
            tensors[key], tensors[value] = tensors[value], tensors[key].clone()
        safetensors.torch.save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(proof, "save_as", lossy)
    if kind is None:
        hp.save_pretrained(model, folder, format="transformers")
        loaded = hf.LlamaForCausalLM.from_pretrained(folder)
        assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
        return
    with pytest.raises(kind, match=words):
        hp.save_pretrained(model, folder, format="transformers")
    assert list(tmp_path.iterdir()) == []


def test_other_arithmetic_on_the_same_tensors_is_found(tmp_path):
    model, _ = cut("llama", UNIFORM)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9  # what the configuration does not know
        layer.self_attn.sizes = (1, [2, None])
    with pytest.raises(VerificationFailed, match=r"what was saved, up to .* got outputs that are"):
        hp.save_pretrained(model, tmp_path / "small", format="transformers")
    hp.save_pretrained(model, tmp_path / "small", format="remote-code")  # records the attributes
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    heads = config["headprune_heads"]["model.layers.0.self_attn"]
    assert heads["attributes"]["sizes"] == [1, [2, None]]


def test_a_fused_projection_on_disk(tmp_path):
    """NomicBert is stored with one fused matrix a layer, split into thirds when it is loaded."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    model = hf.NomicBertModel(hf.NomicBertConfig(**sizes, num_hidden_layers=2)).eval()
    keep = {s.name: (0, 2) for s in hp.find_sites(model)}
    hp.prune_(model, HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
    hp.save_pretrained(model, tmp_path, format="transformers")
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert any("Wqkv" in name for name in stored)
    loaded = hf.NomicBertModel.from_pretrained(tmp_path)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_another_format_in_the_same_folder_replaces_the_files(tmp_path):
    model, _ = cut("llama", UNIFORM)
    for form in ("headprune", "remote-code", "transformers"):  # all of them in several files
        hp.save_pretrained(model, tmp_path, format=form, max_shard_size=4000)
        assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    hp.save_pretrained(model, tmp_path, format="transformers")
    files = {p.name for p in tmp_path.iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    hp.save_pretrained(model, tmp_path)
    assert [len(s.heads) for s in hp.find_sites(hp.from_pretrained(tmp_path))] == [4, 4, 4]
    with pytest.raises(CheckpointError, match="must be bytes, or text such as '5GB', got 'big'"):
        hp.save_pretrained(model, tmp_path, max_shard_size="big")


# --- in several files


@pytest.fixture
def sharded(tmp_path):
    model, _ = cut("bert", EMPTY)
    return hp.save_pretrained(model, tmp_path / "sharded", max_shard_size="3KB")


def test_shards_come_back_bit_for_bit(sharded):
    model, batch = cut("bert", EMPTY)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in sharded.glob("model-*-of-*.safetensors"))
    assert set(index["weight_map"].values()) == set(files)
    assert len(files) > 2
    assert not (sharded / "model.safetensors").exists()
    loaded = hp.from_pretrained(sharded)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def rename(file, old, new):
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("damage", ["missing", "flipped", "index", "no index", "path"])
def test_a_damaged_shard_is_refused_in_words(sharded, damage):
    first, second, *_ = sorted(sharded.glob("model-*-of-*.safetensors"))
    index, manifest = sharded / "model.safetensors.index.json", sharded / "headprune.json"
    flipped = second.read_bytes()[:-1] + b"\xff"
    do, words = {
        "missing": (second.unlink, f"{second.name}: must be the model's weights, got no such file"),
        "flipped": (lambda: second.write_bytes(flipped), "other contents. Copy the folder again"),
        "index": (lambda: rename(index, first.name, second.name), "a file with other contents"),
        "no index": (index.unlink, "the index of the model's weights, got no such file"),
        "path": (lambda: rename(manifest, '"model-0', '"../model-0'), r"folder, got \.\./model-0"),
    }[damage]
    do()
    with pytest.raises(CheckpointError, match=words):
        hp.from_pretrained(sharded)
