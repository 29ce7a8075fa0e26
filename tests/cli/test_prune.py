"""``headprune prune`` and ``score``: dtypes and policies that stay, adapters, licences, and folders
that run code."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from typer.testing import CliRunner

import headprune as hp
from headprune.cli.main import app
from headprune.core.scores import ModelFingerprint
from headprune.data.models import open_model
from headprune.layouts import registry
from headprune.model.fingerprint import fingerprint
from tests.laws.support import shaken


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def saved(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model: Any = shaken(registry.get(name).tiny(0)[0], norms=False).to(dtype).eval()
    model.save_pretrained(folder / "base")
    return model


def planned(folder: Path, model: nn.Module) -> hp.HeadMask:
    """An uneven plan, as a file: another number of units at every site."""
    sites = hp.find_sites(model)
    keep = {s.name: [h for unit in s.units[: 1 + i % 2] for h in unit] for i, s in enumerate(sites)}
    mask = hp.HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})
    hp.PruningPlan(mask).save(folder / "plan.json")
    return mask


def prune(folder: Path, *more: object, model: str = "base") -> Any:
    return call(
        "prune",
        "--model",
        folder / model,
        "--plan",
        folder / "plan.json",
        "--out",
        folder / "out",
        *more,
    )


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_half_precision_stays(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved(tmp_path, name, dtype)
    mask = planned(tmp_path, model)
    result = prune(tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["report"]["max_difference"] is not None
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    loaded = hp.from_pretrained(tmp_path / "out")
    hp.prune_(model, mask)
    for (key, a), (_, b) in zip(
        loaded.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert_close(a, b, rtol=0, atol=0, msg=key)
    found = json.loads(call("inspect", tmp_path / "base", "--json").stdout)
    assert found["dtype"] == str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- policies


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama in ``base`` and a recipe over token numbers."""
    folder = tmp_path_factory.mktemp("stories")
    saved(folder, "llama")
    draw = random.Random(0)
    rows = [
        {"input_ids": [1, *draw.choices(range(3, 29), k=draw.randint(6, 20))]} for _ in range(30)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    raw = {
        "name": "tiny",
        "description": "for tests",
        "task": "causal_lm",
        "device": "cpu",
        "model": {"path": str(folder / "base")},
        "data": {
            "path": str(folder / "rows.jsonl"),
            "tokens": "input_ids",
            "holdout": 5,
            "test_holdout": 5,
        },
        "select": {"keep_heads": 0.5, "policy": "balanced"},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(raw))
    return folder


@pytest.mark.parametrize(("policy", "units"), [("group", 3), ("free", 6), (None, 6)])
def test_score_with_a_policy_and_prune_by_it(
    policy: str | None, units: int, stories: Path, tmp_path: Path
) -> None:
    more = ["--policy", policy] if policy else []
    result = call("score", stories / "tiny.yaml", *more, "--out", tmp_path / "scores.json")
    assert result.exit_code == 0, result.output
    scores = hp.HeadScores.load(tmp_path / "scores.json")
    assert {s.policy for s in scores.sites} == {policy or "balanced"}, (
        "the recipe's, where none is given"
    )
    assert [len(s.units) for s in scores.sites] == [units] * 3
    command = [
        "prune",
        "--model",
        stories / "base",
        "--scores",
        tmp_path / "scores.json",
        "--keep",
        12,
    ]
    result = call(*command, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (f"note: {policy or 'balanced'}: " in result.stdout) == (policy != "group")
    assert (
        sum(
            len(s.heads) for s in hp.find_sites(hp.from_pretrained(tmp_path / "out"), policy="free")
        )
        == 12
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"keep 12 heads, policy {policy or 'balanced'}" in card


def test_a_run_cuts_under_the_policy_of_its_recipe(stories: Path, tmp_path: Path) -> None:
    more = [
        "--set",
        "select.policy=free",
        "--set",
        "select.keep_heads=7",
        "--set",
        "score.random_draws=1",
    ]
    result = call("run", stories / "tiny.yaml", "--out", tmp_path / "out", *more)
    assert result.exit_code == 0, result.output
    assert "    free: " in result.stderr
    record = hp.RunRecord.load(tmp_path / "out" / "record.json")
    assert record.plan is not None
    assert (record.plan.policy, record.plan.mask.n_kept) == (
        "free",
        7,
    ), "no multiple of a group's two heads"
    assert {p.what for p in record.proofs} == {"outputs", "generation", "reload"}


def test_a_policy_that_does_not_exist(stories: Path) -> None:
    result = call("score", stories / "tiny.yaml", "--policy", "fre")
    assert result.exit_code == 2
    assert (
        "select.policy: must be 'group', 'balanced' or 'free', got 'fre'. Did you mean 'free'?"
        in result.stderr
    )


# ---------------------------------------------------------------- PEFT


@pytest.fixture
def adapted(tmp_path: Path) -> Callable[[str], nn.Module]:
    """Writes a base model and LoRA adapters for it; returns the merged model."""
    peft = pytest.importorskip("peft")

    def make(name: str) -> nn.Module:
        targets = {"llama": ["q_proj", "k_proj", "v_proj", "o_proj"], "bert": ["query", "value"]}[
            name
        ]
        task = {"llama": "CAUSAL_LM", "bert": "SEQ_CLS"}[name]
        config = peft.LoraConfig(
            target_modules=targets, r=2, task_type=task, init_lora_weights=False
        )
        saved(tmp_path, name)
        model = peft.get_peft_model(open_model(str(tmp_path / "base")), config)
        model.save_pretrained(tmp_path / "adapters")
        merged: nn.Module = model.merge_and_unload()
        return merged

    return make


IGNORED = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks


@IGNORED
def test_adapters_are_merged_on_request_only(adapted: Any, tmp_path: Path) -> None:
    merged = adapted("llama")
    mask = planned(tmp_path, merged)
    result = prune(tmp_path, model="adapters")
    assert result.exit_code == 2
    assert "--model: must be a whole model, or given with --merge-adapters, got " in result.stderr
    assert not (tmp_path / "out").exists()
    result = prune(tmp_path, "--merge-adapters", model="adapters")
    assert result.exit_code == 0, result.output
    hp.prune_(merged, mask)
    ids = {"input_ids": torch.arange(3, 15).reshape(2, 6)}
    assert_close(hp.from_pretrained(tmp_path / "out")(**ids).logits, merged(**ids).logits)


@IGNORED
def test_whole_models_have_no_adapters_to_merge(tmp_path: Path) -> None:
    planned(tmp_path, saved(tmp_path, "bert"))
    result = prune(tmp_path, "--merge-adapters")
    assert result.exit_code == 2
    assert (
        "--merge-adapters: must be left out for a model without a folder of adapters"
        in result.stderr
    )


@IGNORED
def test_adapters_are_inspected_merged_and_refused_by_recipes(
    adapted: Any, stories: Path, tmp_path: Path
) -> None:
    adapted("bert")
    found = json.loads(call("inspect", tmp_path / "adapters", "--json").stdout)
    assert found["model"] == "BertForSequenceClassification"
    assert found["totals"]["heads"] == 12
    result = call("score", stories / "tiny.yaml", "--set", f"model.path={tmp_path / 'adapters'}")
    assert result.exit_code == 2
    assert "model.path: must be a folder with a whole model" in result.stderr
    assert "--merge-adapters" in result.stderr


@IGNORED
def test_adapters_without_their_base(adapted: Any, tmp_path: Path) -> None:
    adapted("bert")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    result = call("inspect", tmp_path / "adapters")
    assert result.exit_code == 2
    assert "error: MODEL: its base model: must be an existing folder or a hub name" in result.stderr
    config = tmp_path / "adapters" / "adapter_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None})
    )
    result = call("inspect", tmp_path / "adapters")
    assert result.exit_code == 2
    assert (
        "must be adapters that name their base model, got none in adapter_config.json"
        in result.stderr
    )


# ---------------------------------------------------------------- what travels, and what is refused
# early


def test_the_licence_and_words_of_the_card_travel(tmp_path: Path) -> None:
    planned(tmp_path, saved(tmp_path, "bert"))
    (tmp_path / "base" / "README.md").write_text(
        "---\nlicense: mit\n---\n# Small BERT\n\nTrained on news.\n"
    )
    (tmp_path / "base" / "LICENSE.txt").write_text("MIT")
    result = prune(tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "MIT"
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith(
        "---\nlicense: mit\n---\n# Small BERT\n\nTrained on news.\n\n<!-- headprune: begin -->\n"
    )
    assert "those of the model before the cut" in card
    (tmp_path / "out").rename(tmp_path / "cut")
    assert prune(tmp_path, model="cut").exit_code == 0
    again = (tmp_path / "out" / "README.md").read_text()
    assert again.count("## Attention heads") == again.count("license: mit") == 1


@pytest.mark.parametrize("size", ["banana", "0GB", "1.2.3GB", "5"])
def test_a_shard_size_that_is_none_is_refused_before_any_work(size: str, tmp_path: Path) -> None:
    planned(tmp_path, saved(tmp_path, "bert"))
    result = prune(tmp_path, "--max-shard-size", size)
    assert result.exit_code == 2
    assert f"--max-shard-size: must be bytes, or text such as '5GB', got '{size}'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_plan_for_another_family_names_what_is_missing(tmp_path: Path) -> None:
    planned(tmp_path, saved(tmp_path, "llama"))
    saved(tmp_path, "bert")
    result = prune(tmp_path)
    assert result.exit_code == 2
    words = (
        "must be for a model with 6 heads at 'model.layers.0.self_attn', like the plan's, got one"
        " without such a site"
    )
    assert words in result.stderr


def test_a_format_that_cannot_hold_a_cut_is_refused_in_a_whole_sentence(tmp_path: Path) -> None:
    planned(tmp_path, saved(tmp_path, "llama"))
    result = prune(tmp_path, "--format", "transformers")
    assert result.exit_code == 2
    words = (
        "got 'transformers': it is for the same number of heads in every layer, got layers with 2,"
        " 4, 2 heads. Those"
    )
    assert words in result.stderr


def test_a_folder_that_runs_code_is_opened_by_no_command(stories: Path, tmp_path: Path) -> None:
    planned(tmp_path, saved(tmp_path, "llama"))
    assert prune(tmp_path, "--format", "remote-code").exit_code == 0
    words = f"AutoModelForCausalLM.from_pretrained('{tmp_path / 'out'}', trust_remote_code=True)"
    for command in (["inspect", tmp_path / "out"], ["bench", tmp_path / "base", tmp_path / "out"]):
        result = call(*command)
        assert result.exit_code == 2
        assert "a checkpoint in the format 'remote-code'" in result.stderr
        assert words in result.stderr
        assert "ignore_mismatched_sizes" not in result.stderr
    result = call("score", stories / "tiny.yaml", "--set", f"model.path={tmp_path / 'out'}")
    assert result.exit_code == 2
    assert (
        "model.path: must be a model that Transformers or headprune opens by itself"
        in result.stderr
    )


# ---------------------------------------------------------------- models that no inputs can be made
# up for


@pytest.fixture
def listener(tmp_path: Path) -> Any:
    """A tiny Whisper, which takes spectrograms."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    sides = {
        f"{side}_{name}": 2
        for side in ("encoder", "decoder")
        for name in ("layers", "attention_heads")
    }
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {
        "d_model": 8,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "num_mel_bins": 4,
        "vocab_size": 20,
    }
    config = WhisperConfig(max_source_positions=8, max_target_positions=8, **sizes, **sides, **ends)
    model = WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "base")
    return model


def test_a_cut_that_nothing_can_be_compared_with_says_so(listener: Any, tmp_path: Path) -> None:
    mask = planned(tmp_path, listener)
    result = prune(tmp_path)
    assert result.exit_code == 0, result.output
    said = "no inputs could be made up for this model; the cut is not compared with the gated model"
    assert result.stderr.count(f"warning: {said}") == 1
    assert hp.find_sites(hp.from_pretrained(tmp_path / "out"))[1].heads == mask.kept(
        "model.encoder.layers.1.self_attn"
    )


def test_bench_needs_inputs(listener: Any, tmp_path: Path) -> None:
    result = call("bench", tmp_path / "base", tmp_path / "base")
    assert result.exit_code == 2
    assert (
        "ORIGINAL: must be a model that takes tokens, images or waves, got WhisperForCond"
        in result.stderr
    )


# ---------------------------------------------------------------- from file to file


def test_streaming_needs_a_folder(tmp_path: Path) -> None:
    hp.PruningPlan(hp.HeadMask.from_keep({}, {"a": 2})).save(tmp_path / "plan.json")
    given = ("--plan", tmp_path / "plan.json", "--out", tmp_path / "out", "--streaming")
    result = call("prune", "--model", "someone/something", *given)
    assert result.exit_code == 2
    assert (
        "--model: must be a folder with --streaming, got 'someone/something'. Download it first: hf"
        in result.stderr
    )


def test_streaming_as_json_and_with_what_a_user_should_know(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama")
    mask = planned(tmp_path, model)
    (tmp_path / "base" / "LICENSE").write_text("free")
    result = prune(tmp_path, "--streaming", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert hp.PruningPlan.from_dict(data["plan"]).mask == mask
    assert (data["format"], data["copied"], data["out"]) == (
        "headprune",
        ["LICENSE"],
        str(tmp_path / "out"),
    )
    report = data["report"]
    assert report["params_after"] < report["params_before"]
    assert report["warnings"] == []
    hp.PruningPlan(mask, model=ModelFingerprint(*other_weights(model))).save(tmp_path / "plan.json")
    shutil.rmtree(tmp_path / "out")
    result = prune(tmp_path, "--streaming")
    assert result.exit_code == 0, result.output
    assert "warning: " in result.stderr
    assert f"wrote {tmp_path / 'out'} (format headprune, LICENSE)" in result.stdout


def other_weights(model: nn.Module) -> tuple[str, str]:
    """The model's structure, with weights that it does not have."""
    return fingerprint(model, hp.find_sites(model)).structure, "0" * 16
