"""Cutting a checkpoint from file to file gives the folder that loading, cutting and saving gives,
byte for byte."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from typer.testing import CliRunner

import headprune as hp
from headprune.checkpoints import slices, streaming
from headprune.checkpoints.streaming import prune_checkpoint
from headprune.cli.main import app
from headprune.core.errors import (
    CheckpointError,
    HeadPruneError,
    InvalidValue,
    NotWritten,
    UnsupportedModel,
)
from headprune.core.heads import HeadMask
from headprune.core.plan import PruningPlan
from headprune.model.saves import RECORD
from headprune.model.sites import find_sites
from tests.scripts import benchmark

#: Sizes that most configurations share, and those of some.
COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES = {
    "LlamaForCausalLM": {**COMMON, "num_attention_heads": 4, "num_key_value_heads": 2},
    "BertForSequenceClassification": {**COMMON, "num_attention_heads": 4, "num_labels": 3},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "ViTForImageClassification": {**COMMON, "num_attention_heads": 4, "image_size": 32},
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4},
}
BERT, LLAMA, WEIGHTS = "BertForSequenceClassification", "LlamaForCausalLM", "model.safetensors"


def saved(name, folder, dtype=torch.float32, **more):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    words = {} if name.startswith("ViT") else {"vocab_size": 61}
    model = kind(kind.config_class(**{**words, **SIZES[name], **more})).to(dtype).eval()
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def write(tensors, path):
    save_file(tensors, path, metadata={"format": "pt"})


def ragged(model):
    keep, sites = {}, find_sites(model)
    for i, site in enumerate(sites):
        units = site.units[i % 2 : i % 2 + 1 + i // 2] or site.units[:1]
        keep[site.name] = [head for unit in units for head in unit]
    return HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        (LLAMA, torch.float32, "50GB"),
        (BERT, torch.bfloat16, "15KB"),
        ("GPT2LMHeadModel", torch.bfloat16, "50GB"),
        ("ViTForImageClassification", torch.float32, "15KB"),
        ("T5ForConditionalGeneration", torch.float32, "15KB"),
    ],
)
def test_the_same_folder_as_by_loading(name, dtype, size, tmp_path):
    model, one, two = tmp_path / "model", tmp_path / "a" / "small", tmp_path / "b" / "small"
    saved(name, model, dtype)
    if size == "15KB":
        (model / "generation_config.json").unlink(missing_ok=True)
    loaded = getattr(transformers, name).from_pretrained(model, dtype="auto").eval()
    mask = ragged(loaded)
    hp.prune_(loaded, mask)
    hp.save_pretrained(loaded, one, max_shard_size=size)
    report = prune_checkpoint(model, mask, two, max_shard_size=size)
    assert report.params_after == sum(p.numel() for p in loaded.parameters()) < report.params_before
    assert files(one) == files(two)
    assert len(list(one.glob("*.safetensors"))) > (size == "15KB")
    again = hp.from_pretrained(two)
    assert_close(dict(again.state_dict()), dict(loaded.state_dict()), rtol=0, atol=0)


def test_a_cut_of_a_cut_is_the_union(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model, one, two = tmp_path / "model", tmp_path / "a" / "small", tmp_path / "b" / "small"
    names = [s.name for s in find_sites(saved(LLAMA, model, **heads))]
    first, second = (
        HeadMask.from_keep(dict.fromkeys(names, kept), dict.fromkeys(names, 8))
        for kept in (range(6), range(2, 8))
    )
    prune_checkpoint(model, first, tmp_path / "once")
    prune_checkpoint(tmp_path / "once", second, one)
    prune_checkpoint(model, first & second, two)
    assert files(one) == files(two)


def test_a_cut_folder_of_another_format_is_refused(tmp_path):
    model = saved(LLAMA, tmp_path / "model").eval()
    sites = find_sites(model)
    counts = {site.name: site.n_query_heads for site in sites}
    mask = HeadMask.from_keep({site.name: site.units[0] for site in sites}, counts)
    hp.prune_(model, mask)
    hp.save_pretrained(model, tmp_path / "small", format="transformers")
    model.save_pretrained(tmp_path / "own")
    for folder in ("small", "own"):
        with pytest.raises(CheckpointError, match="or one of the format headprune"):
            prune_checkpoint(tmp_path / folder, mask, tmp_path / "again")


def test_what_recovery_added_is_kept(tmp_path):
    """Biases that a projection never had, and the heads whose mean they hold."""
    model, one, two = saved(LLAMA, tmp_path / "model"), tmp_path / "a" / "m", tmp_path / "b" / "m"
    batch = {"input_ids": torch.randint(61, (4, 9)), "labels": torch.randint(61, (4, 9))}
    whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    hp.prune_(model, ragged(model))
    hp.recover_(model, [batch], "mean_fold", teacher=whole)
    hp.save_pretrained(model, one)
    prune_checkpoint(one, HeadMask.full(find_sites(model)), two)
    assert files(two) == files(one)


def test_plans_know_their_model(tmp_path):
    model, out = saved(BERT, tmp_path / "model"), tmp_path / "out"
    batch = {"input_ids": torch.randint(61, (4, 9)), "labels": torch.tensor([0, 1, 2, 0])}
    plan = hp.select(hp.score(model, [batch]), hp.Budget(keep_heads=0.5))
    assert prune_checkpoint(tmp_path / "model", plan, tmp_path / "small").warnings == ()
    saved(BERT, tmp_path / "other", initializer_range=0.1)
    (note,) = prune_checkpoint(tmp_path / "other", plan, tmp_path / "noted").warnings
    assert "other weights" in note
    saved("ViTForImageClassification", tmp_path / "vit")
    with pytest.raises(HeadPruneError, match="like the plan's"):
        prune_checkpoint(tmp_path / "vit", plan, out)
    assert not out.exists()


def test_tied_embeddings_are_stored_once_and_must_be_equal(tmp_path):
    model = saved(LLAMA, tmp_path / "model", tie_word_embeddings=True)
    mask, both, stored = ragged(model), tmp_path / "both", []
    model.config.save_pretrained(both)
    twice = {n: t.clone() for n, t in model.state_dict().items()}
    write(twice, both / WEIGHTS)
    for source, out in ((tmp_path / "model", tmp_path / "small"), (both, tmp_path / "small2")):
        prune_checkpoint(source, mask, out)
        again = hp.from_pretrained(out)
        assert again.lm_head.weight is again.model.embed_tokens.weight
        stored.append(load_file(out / WEIGHTS).keys())
    assert stored[0] == stored[1]
    twice["lm_head.weight"][3, 4] += 1
    write(twice, both / WEIGHTS)
    with pytest.raises(UnsupportedModel, match="two that differ"):
        prune_checkpoint(both, mask, tmp_path / "small3")


def test_tensors_that_are_none_of_the_models_are_named(tmp_path):
    model, folder = saved(BERT, tmp_path / "model"), tmp_path / "model"
    for path in folder.glob("model*"):
        path.unlink()
    write({**model.state_dict(), "bert.position_ids": torch.arange(9)}, folder / WEIGHTS)
    (note,) = prune_checkpoint(folder, ragged(model), tmp_path / "small").warnings
    assert note == "1 tensors in the folder do not belong to the model: bert.position_ids"


def test_bad_folders(tmp_path):
    model, folder = saved(BERT, tmp_path / "model"), tmp_path / "model"
    mask, out, state = ragged(model), tmp_path / "out", model.state_dict()
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    index = folder / "model.safetensors.index.json"
    kept = {path: path.read_bytes() for path in (first, second, index)}

    def refused(words, source=folder, into=out):
        with pytest.raises((CheckpointError, InvalidValue, UnsupportedModel), match=words):
            prune_checkpoint(source, mask, into)
        for path, data in kept.items():
            path.write_bytes(data)
        assert not out.exists()

    refused("a new or an empty folder", into=folder)
    refused("neither", source=tmp_path)
    first.write_bytes(kept[first][:-5])
    refused("a valid safetensors file")
    for weights in ({"a": "../outside.safetensors"}, [1], None, {"a": 3}):
        index.write_text(json.dumps({**json.loads(kept[index]), "weight_map": weights}))
        refused("must be")
    tensors = load_file(first)
    write({**load_file(second), **tensors}, second)
    refused(rf"must be the only file with \S+, got {first.name} has it too")
    odd = {next(iter(tensors)): {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}
    header = json.dumps(odd).encode()
    second.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    refused(rf"{second.name}: .*: must be one of U64, .*, got F8_E8M0")
    own = [s for s in slices.stored_tensors(folder).values() if s.path == second]
    last = max(own, key=lambda tensor: tensor.start)
    second.write_bytes(kept[second][:-1])
    with pytest.raises(CheckpointError, match="must be unchanged while it is read, got a file th"):
        slices.read(last)
    write(state, folder / WEIGHTS)  # Transformers would take this one, whatever is in it
    refused("One of the two is of an earlier save")
    for path in kept:
        path.unlink()
    kept.clear()
    write({k: t for k, t in state.items() if "layer.1" not in k}, folder / WEIGHTS)
    refused(r"a folder with a tensor 'bert\.encoder\.layer\.1")
    write({k: t.double() for k, t in state.items()}, folder / WEIGHTS)
    refused("float32 of shape")


def test_models_whose_tensors_are_others_in_memory_are_refused(tmp_path):
    def refused(model, words):
        with pytest.raises((UnsupportedModel, CheckpointError), match=words):
            prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "model")

    model = saved("T5ForConditionalGeneration", tmp_path / "model", torch.float16)
    refused(model, "got T5ForConditionalGeneration, which keeps some in float32")
    config = transformers.NomicBertConfig(**COMMON, num_attention_heads=4, vocab_size=50)
    nomic = transformers.NomicBertModel(config).eval()
    nomic.save_pretrained(tmp_path / "model")
    refused(
        nomic,
        r"whose tensors are those of the model in memory, got '.*Wqkv.*', which Transformers merges",
    )
    llama = saved(LLAMA, tmp_path / "llama")
    hp.prune_(llama, ragged(llama))
    for names, words in ((None, "no class of Transformers is named"), ([LLAMA], "it runs the mod")):
        hp.save_pretrained(llama, tmp_path / "model", format="remote-code")
        path = tmp_path / "model" / "config.json"
        # As older folders are, which have no record of the cut.
        config = json.loads(path.read_text())
        config.pop(RECORD)
        path.write_text(json.dumps({**config, **({"architectures": names} if names else {})}))
        refused(llama, words)


def test_a_cut_that_makes_tensors_anew_is_refused(tmp_path, monkeypatch):
    """As that of a layout would be which gives a module a table for its heads."""
    model, cut = saved(BERT, tmp_path / "model"), streaming.cut_

    def new(model):
        model.bert.register_buffer("table", torch.zeros(2))

    def longer(model):
        model.classifier.bias = torch.nn.Parameter(torch.zeros(7))

    for change, name in ((new, "bert.table"), (longer, "classifier.bias")):
        changed = lambda m, *rest, change=change: (cut(m, *rest), change(m))[0]  # noqa: E731
        monkeypatch.setattr(streaming, "cut_", changed)
        with pytest.raises(UnsupportedModel, match=f"got one that makes or changes {name} in"):
            prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["50GB", "15KB"])
def test_a_flipped_bit_is_refused_where_there_are_hashes(size, tmp_path):
    model, out = saved(BERT, tmp_path / "model"), tmp_path / "out"
    hp.save_pretrained(model, tmp_path / "own", max_shard_size=size)
    shard = sorted((tmp_path / "own").glob("*.safetensors"))[-1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(CheckpointError, match=r"that headprune\.json describes .* other contents"):
        prune_checkpoint(tmp_path / "own", ragged(model), out)
    assert not out.exists()
    shard.write_bytes(whole)
    prune_checkpoint(tmp_path / "own", ragged(model), out)


def test_what_another_process_put_there_in_the_meantime_is_kept(tmp_path, monkeypatch):
    model, save = saved(BERT, tmp_path / "model"), slices.save

    def late(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("another's")
        save(*arguments)

    monkeypatch.setattr(slices, "save", late)
    with pytest.raises(NotWritten, match=r"a new or an empty folder, got one with config\.json"):
        prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "out")
    assert files(tmp_path / "out") == {"config.json": b"another's"}
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_slices_of_every_dimension_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "PIECE", 24)
    file, again, cut = (tmp_path / f"{name}.safetensors" for name in ("model", "again", "cut"))
    numbers = torch.randint(0, 255, (5, 4, 6), generator=torch.Generator().manual_seed(0))
    tensors = {f"t{i}": numbers.to(d) for i, d in enumerate(slices._TYPES.values())}
    tensors |= {"empty": torch.zeros(3, 0), "scalar": torch.tensor(3.5), "é": torch.ones(2).bool()}
    write(tensors, file)
    stored = slices.stored_tensors(tmp_path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = slices.read(stored[name])
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert found.tolist() == tensor.tolist(), name
    slices.save({n: slices.Slice(s) for n, s in stored.items()}, again)
    assert again.read_bytes() == file.read_bytes()
    for dimension, rows in ((0, (1, 2, 4)), (1, (0, 3)), (2, (5,)), (1, ())):
        chosen = {n: s for n, s in stored.items() if n.startswith("t")}
        slices.save({n: slices.Slice(s, dimension, rows) for n, s in chosen.items()}, cut)
        for name, tensor in load_file(cut).items():
            places = torch.tensor(rows, dtype=torch.long)
            expected = numbers.index_select(dimension, places).to(tensor.dtype)
            assert tensor.shape == expected.shape
            assert tensor.tolist() == expected.tolist(), name


@pytest.fixture
def command(tmp_path):
    model = saved(LLAMA, tmp_path / "model")
    (tmp_path / "model" / "LICENSE").write_text("free")
    PruningPlan(ragged(model)).save(tmp_path / "plan.json")
    given = ["prune", "--model", tmp_path / "model", "--out", tmp_path / "small", "--streaming"]
    return lambda *more: CliRunner().invoke(app, [*map(str, [*given, *more])])


def test_what_fails_late_or_is_killed_leaves_nothing_in_the_way(command, tmp_path, monkeypatch):
    """The tokenizer comes last; and a killed process leaves a folder as large as the model."""
    plan, small = ("--plan", tmp_path / "plan.json"), tmp_path / "small"

    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "copyfile", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        )
        result = command(*plan)
    assert result.exit_code == 2
    words = f"{small}: must be a place that can be written to, got No space left"
    assert words in result.stderr
    assert not small.exists()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", Mock(side_effect=SystemExit(9)))
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert command(*plan).exit_code == 9
    assert len(list(tmp_path.glob(".small.*.part/model.safetensors"))) == 1
    result = command(*plan)
    assert result.exit_code == 0, result.output
    assert "file to file; not compared with the gated model" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"model", "plan.json", "small"}
    assert (small / "LICENSE").read_text() == "free"
    mask = PruningPlan.load(tmp_path / "plan.json").mask
    for site in find_sites(hp.from_pretrained(small)):
        assert site.heads == mask.kept(site.name)


def test_what_the_command_needs(command, tmp_path):
    for arguments, words in (
        (["--data", "rows.csv", "--keep", "0.5"], "--streaming: must be given with --plan"),
        (["--plan", tmp_path / "plan.json", "--format", "transformers"], "must be headprune"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2
        assert words in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(),
    reason="the most memory a process held is told by Linux",
)
def test_a_cut_on_disk_never_holds_much_more_than_a_shard(tmp_path):
    script = benchmark("streaming")
    sizes = ["--layers", "8", "--width", "1024", "--vocabulary", "2048", "--shard", "60000000"]
    arguments = ["--work", str(tmp_path), *sizes]
    script.checkpoint(script.arguments(arguments))
    command = [sys.executable, str(script.__file__), *arguments, "--way", "streamed"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shards = [path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")]
    assert len(shards) >= 5, "one shard of a model is the model"
    found = json.loads(told.splitlines()[-1])
    assert found["peak"] - found["libraries"] < 1.1 * max(shards)
