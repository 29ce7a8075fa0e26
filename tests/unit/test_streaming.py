"""Cutting a checkpoint from file to file gives the folder that loading, cutting and saving gives,
byte for byte."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
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
from headprune.model.sites import find_sites
from tests.scripts import benchmark

SIZES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 61,
    },
    "BertForSequenceClassification": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 61,
        "num_labels": 3,
    },
    "GPT2LMHeadModel": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 61,
        "n_positions": 32,
    },
    "ViTForImageClassification": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "image_size": 8,
        "patch_size": 4,
    },
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    },
}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    own = {} if name.startswith(("GPT2", "T5")) else LAYERS
    model = kind(kind.config_class(**{**own, **SIZES[name], **more})).to(dtype).eval()
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def ragged(model: Any) -> HeadMask:
    """Another share of every layer, by whole groups."""
    sites = find_sites(model)
    keep = {
        s.name: [h for u in s.units[i % 2 : i % 2 + 1 + i // 2] for h in u] or list(s.units[0])
        for i, s in enumerate(sites)
    }
    return HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(SIZES))
@pytest.mark.parametrize("size", ["50GB", "15KB"])
def test_the_same_folder_as_by_loading(
    name: str, dtype: torch.dtype, size: str, tmp_path: Path
) -> None:
    saved(name, tmp_path / "model", dtype)
    if size == "15KB":
        (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    loaded = getattr(transformers, name).from_pretrained(tmp_path / "model", dtype="auto").eval()
    mask = ragged(loaded)
    hp.prune_(loaded, mask)
    hp.save_pretrained(loaded, tmp_path / "a" / "small", max_shard_size=size)
    report = prune_checkpoint(
        tmp_path / "model", mask, tmp_path / "b" / "small", max_shard_size=size
    )
    assert report.params_after == sum(p.numel() for p in loaded.parameters()) < report.params_before
    one, two = files(tmp_path / "a" / "small"), files(tmp_path / "b" / "small")
    assert one.keys() == two.keys()
    assert len([f for f in one if f.endswith(".safetensors")]) > (size == "15KB")
    assert [f for f in one if one[f] != two[f]] == []
    again = hp.from_pretrained(tmp_path / "b" / "small")
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), loaded.state_dict().values(), strict=True)
    )


def test_a_cut_of_a_cut_is_the_union(tmp_path: Path) -> None:
    model = saved(
        "LlamaForCausalLM", tmp_path / "model", num_attention_heads=8, num_key_value_heads=4
    )
    sites = find_sites(model)
    n_heads = {s.name: s.n_query_heads for s in sites}
    first = HeadMask.from_keep({s.name: range(6) for s in sites}, n_heads)
    second = HeadMask.from_keep({s.name: range(2, 8) for s in sites}, n_heads)
    prune_checkpoint(tmp_path / "model", first, tmp_path / "once")
    prune_checkpoint(tmp_path / "once", second, tmp_path / "a" / "small")
    prune_checkpoint(tmp_path / "model", first & second, tmp_path / "b" / "small")
    assert files(tmp_path / "a" / "small") == files(tmp_path / "b" / "small")


def test_what_recovery_added_stays(tmp_path: Path) -> None:
    """Biases that a projection never had, and the heads whose mean they hold."""
    model = saved("LlamaForCausalLM", tmp_path / "model")
    batch = {"input_ids": torch.randint(61, (4, 9)), "labels": torch.randint(61, (4, 9))}
    whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    hp.prune_(model, ragged(model))
    hp.recover_(model, [batch], "mean_fold", teacher=whole)
    hp.save_pretrained(model, tmp_path / "a" / "small")
    second = HeadMask.from_keep(
        {
            s.name: s.heads[: max(1, len(s.heads) // 2)]
            for s in find_sites(model, policy="balanced")
        },
        {s.name: s.n_query_heads for s in find_sites(model)},
    )
    prune_checkpoint(
        tmp_path / "a" / "small", HeadMask.full(find_sites(model)), tmp_path / "b" / "small"
    )
    assert files(tmp_path / "b" / "small") == files(tmp_path / "a" / "small")
    assert second.n_kept <= HeadMask.full(find_sites(model)).n_kept


def test_plans_know_their_model(tmp_path: Path) -> None:
    model = saved("BertForSequenceClassification", tmp_path / "model")
    batch = {"input_ids": torch.randint(61, (4, 9)), "labels": torch.tensor([0, 1, 2, 0])}
    plan = hp.select(hp.score(model, [batch]), hp.Budget(keep_heads=0.5))
    assert prune_checkpoint(tmp_path / "model", plan, tmp_path / "b" / "small").warnings == ()
    other = saved("BertForSequenceClassification", tmp_path / "other", initializer_range=0.1)
    assert other is not None
    (note,) = prune_checkpoint(tmp_path / "other", plan, tmp_path / "noted").warnings
    assert "other weights" in note
    saved("ViTForImageClassification", tmp_path / "vit")
    with pytest.raises(HeadPruneError, match="like the plan's"):
        prune_checkpoint(tmp_path / "vit", plan, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_tied_embeddings_are_stored_once_and_must_be_equal(tmp_path: Path) -> None:
    model = saved("LlamaForCausalLM", tmp_path / "model", tie_word_embeddings=True)
    mask = ragged(model)
    prune_checkpoint(tmp_path / "model", mask, tmp_path / "small")
    again: Any = hp.from_pretrained(tmp_path / "small")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    twice = {n: t.clone() for n, t in model.state_dict().items()}
    both = tmp_path / "both"
    model.config.save_pretrained(both)
    save_file(twice, both / "model.safetensors", metadata={"format": "pt"})
    prune_checkpoint(both, mask, tmp_path / "small2")
    assert (
        load_file(tmp_path / "small2" / "model.safetensors").keys()
        == load_file(tmp_path / "small" / "model.safetensors").keys()
    )
    twice["lm_head.weight"][3, 4] += 1
    save_file(twice, both / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="two that differ"):
        prune_checkpoint(both, mask, tmp_path / "small3")


def test_tensors_that_are_none_of_the_models_are_named(tmp_path: Path) -> None:
    model = saved("BertForSequenceClassification", tmp_path / "model")
    extra = {**model.state_dict(), "bert.embeddings.position_ids": torch.arange(9)}
    for path in (tmp_path / "model").glob("model*"):
        path.unlink()
    save_file(extra, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    report = prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "small")
    assert report.warnings == (
        "1 tensors of the folder are none of the model's: bert.embeddings.position_ids",
    )


def test_bad_folders(tmp_path: Path) -> None:
    model = saved("BertForSequenceClassification", tmp_path / "model")
    mask = ragged(model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidValue, match="a new or an empty folder"):
        prune_checkpoint(tmp_path / "model", mask, tmp_path / "full")
    with pytest.raises(CheckpointError, match="neither"):
        prune_checkpoint(tmp_path, mask, tmp_path / "out")
    shard = next((tmp_path / "model").glob("*-00001-of-*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="a valid safetensors file"):
        prune_checkpoint(tmp_path / "model", mask, tmp_path / "out")
    shard.write_bytes(whole)
    index = tmp_path / "model" / "model.safetensors.index.json"
    facts = json.loads(index.read_text())
    for bad in (
        {"weight_map": {"a": "../outside.safetensors"}},
        {"weight_map": [1]},
        {},
        {"weight_map": {"a": 3}},
    ):
        index.write_text(json.dumps({**facts, "weight_map": None, **bad}))
        with pytest.raises(CheckpointError):
            prune_checkpoint(tmp_path / "model", mask, tmp_path / "out")
    index.unlink()
    tensors = {k: t for k, t in model.state_dict().items() if "layer.1" not in k}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"a folder with a tensor 'bert\.encoder\.layer\.1"):
        prune_checkpoint(tmp_path / "model", mask, tmp_path / "out")
    save_file(
        {k: t.double() for k, t in model.state_dict().items()},
        tmp_path / "model" / "model.safetensors",
    )
    with pytest.raises(UnsupportedModel, match="float32 of shape"):
        prune_checkpoint(tmp_path / "model", mask, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_shards(tmp_path: Path) -> None:
    model = saved("BertForSequenceClassification", tmp_path / "model")
    first, second = sorted((tmp_path / "model").glob("*.safetensors"))[:2]
    kept = second.read_bytes()
    save_file({**load_file(second), **load_file(first)}, second, metadata={"format": "pt"})
    name = next(iter(load_file(first)))
    with pytest.raises(
        CheckpointError, match=rf"must be the only file with \S+, got {first.name} has it too"
    ):
        prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "out")
    header = json.dumps({name: {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    second.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(
        CheckpointError, match=rf"{second.name}: {name}: must be one of U64, .*, got F8_E8M0"
    ):
        prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "out")
    second.write_bytes(kept)
    stored = slices.stored_tensors(tmp_path / "model")
    last = max((s for s in stored.values() if s.path == second), key=lambda s: s.start)
    second.write_bytes(kept[:-1])
    with pytest.raises(
        CheckpointError,
        match=rf"{second.name}: must be left alone while it is read, got a file that",
    ):
        slices.read(last)
    assert not (tmp_path / "out").exists()


def test_what_is_read_whole_is_what_was_stored(tmp_path: Path) -> None:
    tensors = {
        f"t{i}": torch.arange(6).view(2, 3).to(d) for i, d in enumerate(slices._TYPES.values())
    }
    tensors |= {f"{name}-empty": t[:0].clone() for name, t in tensors.items()} | {
        "one": torch.tensor(3)
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = {name: slices.read(s) for name, s in slices.stored_tensors(tmp_path).items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tolist() == tensor.tolist(), name


def test_models_whose_tensors_are_others_in_memory_are_refused(tmp_path: Path) -> None:
    model = saved("T5ForConditionalGeneration", tmp_path / "t5", torch.float16)
    words = "one type in memory, got T5ForConditionalGeneration, which keeps some in float32"
    with pytest.raises(UnsupportedModel, match=words):
        prune_checkpoint(tmp_path / "t5", ragged(model), tmp_path / "out")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    nomic: Any = transformers.NomicBertModel(
        transformers.NomicBertConfig(**sizes, num_hidden_layers=2)
    ).eval()
    nomic.save_pretrained(tmp_path / "nomic")
    with pytest.raises(
        UnsupportedModel,
        match=r"whose tensors are those of the model, got '.*Wqkv.*', one of several",
    ):
        prune_checkpoint(tmp_path / "nomic", ragged(nomic), tmp_path / "out")
    llama = saved("LlamaForCausalLM", tmp_path / "llama")
    hp.prune_(llama, ragged(llama))
    hp.save_pretrained(llama, tmp_path / "code", format="remote-code")
    config = json.loads((tmp_path / "code" / "config.json").read_text())
    for kind, words in (
        (
            config["architectures"],
            r"no class of Transformers is named in its architectures: \['HeadPrunedLlama",
        ),
        (["LlamaForCausalLM"], "it runs the modelling file beside its weights"),
    ):
        (tmp_path / "code" / "config.json").write_text(
            json.dumps({**config, "architectures": kind})
        )
        with pytest.raises(CheckpointError, match=words):
            prune_checkpoint(tmp_path / "code", ragged(llama), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cut_that_makes_tensors_anew_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a layout would be which gives a module a table for its heads."""
    model, cut = saved("BertForSequenceClassification", tmp_path / "model"), streaming.cut_

    def new(model: Any) -> None:
        model.bert.register_buffer("table", torch.zeros(2))

    def longer(model: Any) -> None:
        model.classifier.bias = torch.nn.Parameter(torch.zeros(7))

    for change, name in ((new, "bert.table"), (longer, "classifier.bias")):
        monkeypatch.setattr(
            streaming, "cut_", lambda m, *rest, change=change: (cut(m, *rest), change(m))[0]
        )
        with pytest.raises(
            UnsupportedModel,
            match=f"only removes rows and columns, got one that makes or changes {name} in",
        ):
            prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_two_kinds_of_weights_is_refused(tmp_path: Path) -> None:
    """Transformers would take the single file, whatever is in it."""
    model = saved("BertForSequenceClassification", tmp_path / "model")
    save_file(
        model.state_dict(), tmp_path / "model" / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(CheckpointError, match="left from an earlier save"):
        prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["50GB", "15KB"])
def test_a_flipped_bit_is_refused_where_there_are_hashes(size: str, tmp_path: Path) -> None:
    model = saved("BertForSequenceClassification", tmp_path / "model")
    hp.save_pretrained(model, tmp_path / "own", max_shard_size=size)
    shard = sorted((tmp_path / "own").glob("*.safetensors"))[-1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(
        CheckpointError,
        match=r"the file that headprune\.json describes .* got a file with other contents",
    ):
        prune_checkpoint(tmp_path / "own", ragged(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shard.write_bytes(whole)
    prune_checkpoint(tmp_path / "own", ragged(model), tmp_path / "out")


def test_what_another_process_put_there_in_the_meantime_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved("BertForSequenceClassification", tmp_path / "model")
    write = slices.save

    def late(*arguments: Any) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("another's")
        write(*arguments)

    monkeypatch.setattr(slices, "save", late)
    with pytest.raises(NotWritten, match=r"a new or an empty folder, got one with config\.json"):
        prune_checkpoint(tmp_path / "model", ragged(model), tmp_path / "out")
    assert files(tmp_path / "out") == {"config.json": b"another's"}
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_slices_of_every_dimension_in_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "PIECE", 24)
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"t{i}": torch.randint(0, 255, (5, 4, 6), generator=draw).to(d)
        for i, d in enumerate(slices._TYPES.values())
        if not d.is_complex and d.itemsize > 1
    }
    tensors |= {"empty": torch.zeros(3, 0), "scalar": torch.tensor(3.5), "é": torch.ones(2).bool()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = slices.stored_tensors(tmp_path)
    slices.save({n: slices.Slice(s) for n, s in stored.items()}, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()
    for dimension, rows in ((0, (1, 2, 4)), (1, (0, 3)), (2, (5,)), (1, ())):
        cut = {n: slices.Slice(s, dimension, rows) for n, s in stored.items() if n.startswith("t")}
        slices.save(cut, tmp_path / "cut.safetensors")
        found = load_file(tmp_path / "cut.safetensors")
        for name, tensor in found.items():
            expected = (
                tensors[name]
                .view(torch.uint8)
                .reshape(*tensors[name].shape, -1)
                .index_select(dimension, torch.tensor(rows, dtype=torch.long))
            )
            assert torch.equal(tensor.view(torch.uint8).reshape(expected.shape), expected)


def test_what_fails_late_or_is_killed_leaves_nothing_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer comes last; and a killed process leaves a folder as large as the model."""
    model = saved("LlamaForCausalLM", tmp_path / "model")
    (tmp_path / "model" / "LICENSE").write_text("free")
    PruningPlan(ragged(model)).save(tmp_path / "plan.json")
    given = [
        "prune",
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "small"),
        "--streaming",
    ]
    given += ["--plan", str(tmp_path / "plan.json")]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", failing(OSError(errno.ENOSPC, "No space left on device")))
        result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert (
        f"{tmp_path / 'small'}: must be a place that can be written to, got No space left"
        in result.stderr
    )
    assert not (tmp_path / "small").exists()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", failing(SystemExit(9)))
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert CliRunner().invoke(app, given).exit_code == 9
    assert len(list(tmp_path.glob(".small.*.part/model.safetensors"))) == 1
    assert CliRunner().invoke(app, given).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"model", "plan.json", "small"}
    assert (tmp_path / "small" / "LICENSE").read_text() == "free"


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_from_the_command_line(tmp_path: Path) -> None:
    model = saved("LlamaForCausalLM", tmp_path / "model")
    (tmp_path / "model" / "LICENSE").write_text("free")
    plan = PruningPlan(ragged(model))
    plan.save(tmp_path / "plan.json")
    given = [
        "prune",
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "small"),
        "--streaming",
    ]
    result = CliRunner().invoke(app, [*given, "--plan", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "file to file; not compared with the gated model" in result.stdout
    assert (tmp_path / "small" / "LICENSE").read_text() == "free"
    assert find_sites(hp.from_pretrained(tmp_path / "small"))[0].heads == plan.mask.kept(
        "model.layers.0.self_attn"
    )
    for arguments, words in (
        (["--data", "rows.csv", "--keep", "0.5"], "--streaming: must be given with --plan"),
        (
            ["--plan", str(tmp_path / "plan.json"), "--format", "transformers"],
            "--format: must be headprune",
        ),
    ):
        result = CliRunner().invoke(
            app, [*given[:-2], str(tmp_path / "other"), "--streaming", *arguments]
        )
        assert result.exit_code == 2
        assert words in result.stderr


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(),
    reason="the most memory a process held is told by Linux",
)
def test_a_cut_on_disk_never_holds_much_more_than_a_shard(tmp_path: Path) -> None:
    """In a process of its own: above the libraries at most a tenth more than the largest of five
    shards."""
    script = benchmark("streaming")
    sizes = ["--layers", "8", "--width", "1024", "--vocabulary", "2048", "--shard", "60000000"]
    arguments = ["--work", str(tmp_path), *sizes]
    script.checkpoint(script.arguments(arguments))
    command = [sys.executable, str(script.__file__), *arguments, "--way", "streamed"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[
        -1
    ]
    shards = [path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")]
    assert len(shards) >= 5, "one shard of a model is the model"
    found = json.loads(told)
    assert found["peak"] - found["libraries"] < 1.1 * max(shards)
