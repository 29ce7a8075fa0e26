"""GGUF files: read by gguf's own reader and by Transformers, and what the format cannot say."""

import json
import re
import subprocess

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.checkpoints import gguf_file, gguf_tokenizer
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import HeadMask
from tests.command_line import done, refused
from tests.laws.support import mask_of, mask_of_units
from tests.scripts import benchmark
from tests.serving_environments import python_of

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
UNEVEN = [[0, 1, 2], [2], [1, 3]]
EMPTY = [[], [1], []]
#: With a ridge that is given every projection gets a bias.
ALL_BIASES = hp.recovery.Lstsq(ridge=0.3)


def model_of(name, **more):
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**{**SIZES, **more})
    return getattr(hf, f"{name}ForCausalLM")(config).eval()


def cut(model, groups):
    hp.prune_(model, mask_of_units(hp.find_sites(model), groups))
    return model


def written(model, folder, **more):
    hp.save_pretrained(model, folder, format="gguf", **more)
    return gguf.GGUFReader(folder / "model.gguf")


def setting(reader, name):
    architecture = reader.fields["general.architecture"].contents()
    return reader.fields[f"{architecture}.{name}"].contents()


def tensors(reader):
    return {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize(
    ("name", "groups"),
    [("Llama", [[0, 2], [1, 3], [0, 1]]), ("Mistral", None), ("Qwen2", None), ("Qwen3", None)],
)
def test_an_even_model_is_what_transformers_reads_from_the_file(name, groups, tmp_path):
    more = {
        # Heads that together are as wide as the model, as the architecture of Qwen 2 has them.
        "Qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
        "Qwen3": {"head_dim": 128},  # Transformers takes this width, whatever the file says
    }
    model = model_of(name, sliding_window=None, **more.get(name, {}))
    if groups is not None:
        cut(model, groups)
    written(model, tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        assert_close(loaded(ids).logits, model(ids).logits)


def test_an_uneven_model_states_the_counts_of_every_layer(tmp_path):
    model = cut(model_of("Llama"), UNEVEN)
    sites = hp.find_sites(model, feed_forward=True)
    hp.prune_(model, mask_of(sites, {"model.layers.1.mlp": range(40)}) & HeadMask.full(sites))
    reader = written(model, tmp_path)
    assert reader.fields["general.architecture"].contents() == "deci"
    assert setting(reader, "attention.head_count") == [6, 2, 4]
    assert setting(reader, "attention.head_count_kv") == [3, 1, 2]
    assert setting(reader, "feed_forward_length") == [64, 40, 64]
    # llama.cpp turns neighbours, Transformers halves: [heads, 2, width / 2] and its transpose.
    queries = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    halves = queries.reshape(6, 2, 4, 32).swapaxes(1, 2).reshape(48, 32)
    stored = tensors(reader)
    np.testing.assert_array_equal(stored["blk.0.attn_q.weight"].data, halves)
    values = model.model.layers[0].self_attn.v_proj.weight.detach().numpy()
    np.testing.assert_array_equal(stored["blk.0.attn_v.weight"].data, values)


def test_added_biases_and_layers_without_heads(tmp_path):
    model = model_of("Llama")
    ids = torch.randint(3, 300, (8, 12), generator=torch.Generator().manual_seed(0))
    whole = model_of("Llama")
    hp.recover_(cut(model, EMPTY), [{"input_ids": ids}], ALL_BIASES, teacher=whole)
    reader = written(model, tmp_path / "biases")
    # A bias needs a head of zeros in front of it.
    assert setting(reader, "attention.head_count") == [1, 2, 1]
    stored = tensors(reader)
    assert not stored["blk.2.attn_q.weight"].data.any()
    bias = model.model.layers[2].self_attn.o_proj.bias.detach().numpy()
    np.testing.assert_array_equal(stored["blk.2.attn_output.bias"].data, bias)
    assert bias.any()
    # Without one, only the first layer does.
    reader = written(cut(model_of("Llama"), EMPTY), tmp_path / "plain")
    assert setting(reader, "attention.head_count") == [1, 2, 0]
    assert "blk.2.attn_norm.weight" not in tensors(reader)


def test_an_uneven_qwen3_has_fused_projections(tmp_path):
    model = cut(model_of("Qwen3", tie_word_embeddings=True), UNEVEN)
    reader = written(model, tmp_path)
    assert reader.fields["general.architecture"].contents() == "openelm"
    attention = model.model.layers[1].self_attn
    parts = [getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    fused = tensors(reader)["blk.1.attn_qkv.weight"].data
    np.testing.assert_array_equal(fused, torch.cat(parts).detach().numpy())


def test_llama_3s_rotary_factors(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = model_of("Llama", rope_parameters=rope)
    factors = tensors(written(model, tmp_path))["rope_freqs.weight"].data
    default = 1.0 / 10000.0 ** (np.arange(0, 8, 2) / 8)
    expected = default / model.model.rotary_emb.inv_freq.numpy()
    assert expected.max() > 1
    np.testing.assert_allclose(factors, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "worst"), [("f32", 0.0), ("f16", 6e-4), ("bf16", 5e-3), ("q8_0", 6e-3)]
)
def test_dtypes(dtype, worst, tmp_path):
    model = model_of("Llama", intermediate_size=72)
    stored = tensors(written(model, tmp_path, dtype=dtype))
    up = stored["blk.0.ffn_up.weight"]
    assert up.tensor_type.name == dtype.upper()
    got = gguf.dequantize(up.data, up.tensor_type)
    weight = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    assert np.abs(got - weight).max() <= worst * np.abs(weight).max()
    assert stored["blk.0.ffn_norm.weight"].tensor_type.name == "F32"
    if dtype == "q8_0":  # rows of 72 numbers are no blocks of 32
        assert stored["blk.0.ffn_down.weight"].tensor_type.name == "F16"


#: Tokenizers of bytes, by llama.cpp's name for how they split text.
SPLITS = {"llama 3": "llama-bpe", "qwen 2": "qwen2"}


def tokenizer(kind, around="$A"):
    """A small BPE tokenizer: of bytes, as GPT-2's and others', or as SentencePiece makes them.

    ``around`` has the tokens that it puts around a text.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    texts = ["the cat sat on the mat", "a cat and a hat that sat"]
    of_bytes = kind in ("bytes", *SPLITS)
    if of_bytes:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind in SPLITS:
            pattern = tokenizers.Regex(gguf_tokenizer.SPLITS[SPLITS[kind]])
            split = pre_tokenizers.Split(pattern, behavior="isolated")
            in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            made.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
        alphabet = []
    if kind == "lower case":
        made.normalizer = normalizers.Lowercase()
    special = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if of_bytes:
        special = special[:2]
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    numbers = [(text, made.token_to_id(text)) for text in special[:3]]
    made.post_processor = processors.TemplateProcessing(single=around, special_tokens=numbers)
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("around", "bos", "eos"),
    [("$A", False, False), ("<s> $A", True, False), ("<s> $A </s>", True, True)],
)
@pytest.mark.parametrize(("kind", "model_name"), [("bytes", "gpt2"), ("sentencepiece", "llama")])
def test_the_tokenizer_travels(kind, model_name, around, bos, eos, tmp_path):
    own = tokenizer(kind, around)
    reader = written(model_of("Llama"), tmp_path, processor=own)
    facts = {name: f.contents() for name, f in reader.fields.items() if "tokenizer" in name}
    assert facts["tokenizer.ggml.model"] == model_name
    assert facts["tokenizer.ggml.add_bos_token"] is bos
    assert facts["tokenizer.ggml.add_eos_token"] is eos
    tokens = facts["tokenizer.ggml.tokens"]
    assert len(tokens) == 300
    assert tokens[: len(own)] == own.convert_ids_to_tokens(range(len(own)))
    assert facts["tokenizer.ggml.eos_token_id"] == own.eos_token_id
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    if kind == "bytes":
        assert facts["tokenizer.ggml.pre"] == "gpt-2"
        assert facts["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    else:
        # Earlier merges have higher scores.
        score = dict(zip(tokens, facts["tokenizer.ggml.scores"], strict=True))
        made = [score["".join(pair)] for pair in merges]
        assert made == sorted(made, reverse=True)
        assert facts["tokenizer.ggml.add_space_prefix"] is True


@pytest.mark.long
@pytest.mark.parametrize("around", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "llama 3", "qwen 2"])
def test_llama_cpp_splits_text_as_transformers_does(kind, around, tmp_path):
    python = python_of(benchmark("serving"), "llama_cpp")
    own = tokenizer(kind, around)
    hp.save_pretrained(model_of("Llama"), tmp_path, format="gguf", processor=own)
    texts = ["the cat sat on the mat", "a hat", "1234 that's"]
    code = (
        "import json, sys, llama_cpp\n"
        "model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)\n"
        "print(json.dumps([model.tokenize(text.encode()) for text in sys.argv[2:]]))"
    )
    command = [str(python), "-c", code, str(tmp_path / "model.gguf"), *texts]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [own(text)["input_ids"] for text in texts]


def _with_bias():
    model = cut(model_of("Qwen3", tie_word_embeddings=True), UNEVEN)
    projection = model.model.layers[1].self_attn.o_proj
    projection.bias = nn.Parameter(torch.ones(projection.out_features))
    return model


def _free():
    model = model_of("Llama")
    sites = hp.find_sites(model, policy="free")
    hp.prune_(model, mask_of(sites, {site.name: [0, 1, 2] for site in sites}), sites=sites)
    return model


def _large():
    model = model_of("Llama")
    nn.init.constant_(model.model.layers[1].mlp.up_proj.weight, 1e5)
    return model


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
#: A model, its tokenizer's kind and what stands around a text, more options, and the refusal.
REFUSED = {
    "family": (lambda: model_of("Gemma2"), (), {}, "one of LlamaForCausalLM, .*, got Gemma2ForCau"),
    "free": (_free, (), {}, "share key/value heads evenly"),
    "bias": (_with_bias, (), {}, r"without this bias, got o_proj\.bias in layer 1.*head_rescale"),
    "output": (
        lambda: cut(model_of("Qwen3", tie_word_embeddings=False), UNEVEN),
        *((), {}, "output is its embedding"),
    ),
    "activation": (lambda: model_of("Llama", hidden_act="gelu"), (), {}, "'silu', got 'gelu'"),
    "rotary": (
        lambda: model_of("Llama", rope_parameters=DYNAMIC),
        *((), {}, "rotary positions of type default, linear, llama3"),
    ),
    "normalizer": (
        lambda: model_of("Llama"),
        *(("lower case",), {}, "normalizers among NFC.*processor=None"),
    ),
    "rows": (
        lambda: model_of("Llama", vocab_size=100),
        *(("bytes",), {}, "below the 100 rows.*processor=None"),
    ),
    "around": (
        lambda: model_of("Llama"),
        ("bytes", "$A <s>"),
        *({}, r"nothing but bos and eos to a text, got \['a', '<s>'\].*processor=None"),
    ),
    "16 bits": (_large, (), {"dtype": "f16"}, r"got 100000 in blk\.1\.ffn_up\.weight.*'bf16'"),
    "dtype": (_large, (), {"dtype": "q4_k"}, "one of f32, f16, bf16, q8_0"),
    "format": (_large, (), {"dtype": "f16", "format": "headprune"}, "format 'gguf' only"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_file_cannot_say_is_refused(case, tmp_path):
    make, own, more, words = REFUSED[case]
    options = {"format": "gguf", "processor": tokenizer(*own) if own else None, **more}
    kind = InvalidValue if case in ("dtype", "format") else UnsupportedModel
    with pytest.raises(kind, match=words):
        hp.save_pretrained(make(), tmp_path / "small", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_with_code_of_its_own(tmp_path):
    tokenizer("bytes").save_pretrained(tmp_path)
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(UnsupportedModel, match="one that Transformers opens"):
        gguf_tokenizer.check(tmp_path, 300)


def test_without_the_package_nothing_is_written(tmp_path, monkeypatch):
    found = gguf_file.importlib.util.find_spec

    def without_gguf(name, *more):
        return None if name == "gguf" else found(name, *more)

    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", without_gguf)
    with pytest.raises(InvalidValue, match=r"package gguf.* pip install gguf"):
        hp.save_pretrained(model_of("Llama"), tmp_path / "small", format="gguf")
    message = refused(f"prune --model m --plan p --format gguf --out {tmp_path}/small")
    assert "package gguf" in message
    assert list(tmp_path.iterdir()) == []


def test_an_older_save_for_transformers_is_replaced(tmp_path):
    model = model_of("Llama")
    hp.save_pretrained(model, tmp_path, format="transformers")
    hp.save_pretrained(model, tmp_path, format="gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "model.gguf"}


def test_the_context_ends_where_a_window_would_begin(tmp_path):
    reader = written(model_of("Mistral", sliding_window=48), tmp_path)
    assert setting(reader, "context_length") == 48


def test_on_the_command_line(tmp_path):
    model = model_of("Llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer("bytes").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "LICENSE").write_text("free")
    kept = {site.name: (0, 1) for site in hp.find_sites(model)}
    plan = hp.PruningPlan(HeadMask.from_keep(kept, dict.fromkeys(kept, 8)))
    plan.save(tmp_path / "plan.json")
    common = f"prune --model {tmp_path}/model --plan {tmp_path}/plan.json"
    line = f"{common} --format gguf"
    done(f"{line} --dtype q8_0 --out {tmp_path}/small")
    reader = gguf.GGUFReader(tmp_path / "small" / "model.gguf")
    assert tensors(reader)["blk.0.attn_output.weight"].tensor_type.name == "F16"
    assert reader.fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    done(f"{line} --no-tokenizer --out {tmp_path}/bare")
    names = {path.name for path in (tmp_path / "bare").iterdir()}
    assert names == {"LICENSE", "README.md", "model.gguf"}
    for wrong, words in (
        (f"{line} --dtype q2", "--dtype: must be one of f32"),
        (f"{common} --dtype f16", "--dtype: must be given with format 'gguf' only"),
        (f"{common} --no-tokenizer", "--no-tokenizer: must be given with --format gguf only"),
    ):
        assert words in refused(f"{wrong} --out {tmp_path}/other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("kind", "format", "words"),
    [
        ("Gemma2", "gguf", "one of LlamaForCausalLM"),
        ("Llama", "gguf", "normalizers among NFC.*prune --no-tokenizer"),
        ("GPT2", "transformers", "a cut that the configuration can state"),
        ("Olmo2", "remote-code", "modules that run their own code"),
    ],
)
def test_a_run_on_data_does_not_begin_for_a_format_that_holds_no_cut(kind, format, words, tmp_path):
    config = getattr(hf, f"{kind}Config")(**SIZES, pad_token_id=0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer("lower case").save_pretrained(tmp_path / "model")
    rows = "".join(f"the cat sat on the mat {i}\n" for i in range(40))
    (tmp_path / "rows.txt").write_text(rows)
    line = f"prune --model {tmp_path}/model --data {tmp_path}/rows.txt --keep 0.5"
    message = refused(f"{line} --format {format} --out {tmp_path}/small")
    assert re.search(words, " ".join(message.split())), message
    assert not (tmp_path / "small").exists()
