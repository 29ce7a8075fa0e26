"""``headprune prune`` and ``score``: dtypes and policies are kept, adapters, licences, and folders
that run code."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.testing import assert_close

import headprune as hp
from headprune.core.scores import ModelFingerprint
from headprune.data.models import open_model
from headprune.layouts import registry
from headprune.model.fingerprint import fingerprint
from headprune.recipes.validate import load_recipe
from tests.command_line import done, json_of, refused
from tests.laws.support import shaken
from tests.recipe_fixtures import FIXTURES

IGNORED = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks


def saved(folder, name, dtype=torch.float32):
    """A layout's tiny model, saved in ``base``."""
    model = shaken(registry.get(name).tiny(0)[0], norms=False).to(dtype).eval()
    model.save_pretrained(folder / "base")
    return model


def planned(folder, model):
    """An uneven plan, as a file: another number of units at every site."""
    sites = hp.find_sites(model)
    keep = {s.name: [h for unit in s.units[: 1 + i % 2] for h in unit] for i, s in enumerate(sites)}
    mask = hp.HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})
    hp.PruningPlan(mask).save(folder / "plan.json")
    return mask


def prune(folder, more="", model="base"):
    """The command that cuts a model by the plan beside it into ``out``."""
    return f"prune --model {folder / model} --plan {folder}/plan.json --out {folder / 'out'} {more}"


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.bfloat16), ("bert", torch.float16)], ids=["bf16", "fp16"]
)
def test_half_precision_is_kept(name, dtype, tmp_path):
    model = saved(tmp_path, name, dtype)
    mask = planned(tmp_path, model)
    assert json_of(prune(tmp_path))["report"]["max_difference"] is not None
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    loaded = hp.from_pretrained(tmp_path / "out").state_dict()
    hp.prune_(model, mask)
    assert_close(loaded, dict(model.state_dict()), rtol=0, atol=0)
    assert json_of(f"inspect {tmp_path / 'base'}")["dtype"] == str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- policies


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A folder with a tiny Llama of 2 layers with 8 heads in 4 groups, and a recipe for it."""
    folder = tmp_path_factory.mktemp("stories")
    settings = [*FIXTURES["llama-stories"](folder), "recover=[]", "bench=null", "device=cpu"]
    settings += ["select.keep_kv=null", "select.keep_heads=0.5", "select.policy=balanced"]
    recipe = load_recipe("llama-stories", [*settings, "score.random_draws=1"])
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return folder


@pytest.mark.parametrize(("policy", "units"), [("group", 4), (None, 8)])
def test_score_with_a_policy_and_prune_by_it(policy, units, stories, tmp_path):
    more = f"--policy {policy}" if policy else ""
    scored, out = tmp_path / "scores.json", tmp_path / "out"
    done(f"score {stories / 'tiny.yaml'} {more} --out {scored}")
    scores, taken = hp.HeadScores.load(scored), policy or "balanced"  # the recipe's
    assert {site.policy for site in scores.sites} == {taken}
    assert [len(site.units) for site in scores.sites] == [units] * 2
    result = done(f"prune --model {stories} --scores {scored} --keep 12 --out {out}")
    assert (f"note: {taken}: " in result.stdout) == (policy != "group")
    sites = hp.find_sites(hp.from_pretrained(out), policy="free")
    assert sum(len(site.heads) for site in sites) == 12
    assert f"keep 12 heads, policy {taken}" in (out / "README.md").read_text()


def test_a_run_cuts_under_the_policy_of_its_recipe(stories, tmp_path):
    settings = "--set select.policy=free --set select.keep_heads=7"
    result = done(f"run {stories / 'tiny.yaml'} --out {tmp_path / 'out'} {settings}")
    assert "    free: " in result.stderr
    record = hp.RunRecord.load(tmp_path / "out" / "record.json")
    kept = record.plan.mask.n_kept
    assert (record.plan.policy, kept) == ("free", 7), "no multiple of a group's two heads"
    assert {proof.what for proof in record.proofs} == {"outputs", "generation", "reload"}
    assert "Did you mean 'free'?" in refused(f"score {stories / 'tiny.yaml'} --policy fre")


# ---------------------------------------------------------------- PEFT


@pytest.fixture
def adapted(tmp_path):
    """Writes a base model and LoRA adapters for it; returns the merged model."""
    peft = pytest.importorskip("peft")

    def make(name):
        targets = {"llama": ["q_proj", "k_proj", "v_proj", "o_proj"], "bert": ["query", "value"]}
        task = {"llama": "CAUSAL_LM", "bert": "SEQ_CLS"}[name]
        config = peft.LoraConfig(
            target_modules=targets[name], r=2, task_type=task, init_lora_weights=False
        )
        saved(tmp_path, name)
        model = peft.get_peft_model(open_model(str(tmp_path / "base")), config)
        model.save_pretrained(tmp_path / "adapters")
        return model.merge_and_unload()

    return make


@IGNORED
def test_adapters_are_merged_on_request_only(adapted, tmp_path):
    merged = adapted("llama")
    mask = planned(tmp_path, merged)
    message = refused(prune(tmp_path, model="adapters"))
    assert "--model: must be a whole model, or given with --merge-adapters" in message
    assert not (tmp_path / "out").exists()
    message = refused(prune(tmp_path, "--merge-adapters"))
    assert "--merge-adapters: must be given with a folder of PEFT adapters only" in message
    done(prune(tmp_path, "--merge-adapters", model="adapters"))
    hp.prune_(merged, mask)
    ids = {"input_ids": torch.arange(3, 15).reshape(2, 6)}
    assert_close(hp.from_pretrained(tmp_path / "out")(**ids).logits, merged(**ids).logits)


@IGNORED
def test_adapters_are_inspected_and_refused_by_recipes(adapted, stories, tmp_path):
    adapted("bert")
    folder = tmp_path / "adapters"
    found = json_of(f"inspect {folder}")
    assert (found["model"], found["totals"]["heads"]) == ("BertForSequenceClassification", 12)
    message = refused(f"score {stories / 'tiny.yaml'} --set model.path={folder}")
    assert "model.path: must be a folder with a whole model" in message
    assert "--merge-adapters" in message
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    assert "its base model: must be an existing folder" in refused(f"inspect {folder}")
    config = folder / "adapter_config.json"
    nameless = {**json.loads(config.read_text()), "base_model_name_or_path": None}
    config.write_text(json.dumps(nameless))
    assert "must be adapters that name their base model" in refused(f"inspect {folder}")


# ---------------------------------------------------------------- cards, and early refusals


def test_the_licence_and_words_of_the_card_are_copied(tmp_path):
    planned(tmp_path, saved(tmp_path, "bert"))
    base, out = tmp_path / "base", tmp_path / "out"
    words = "---\nlicense: mit\n---\n# Small BERT\n\nTrained on news.\n"
    (base / "README.md").write_text(words)
    (base / "LICENSE.txt").write_text("MIT")
    done(prune(tmp_path))
    assert (out / "LICENSE.txt").read_text() == "MIT"
    card = (out / "README.md").read_text()
    assert card.startswith(f"{words}\n<!-- headprune: begin -->\n")
    assert "describes the model before the cut" in card
    out.rename(tmp_path / "cut")
    done(prune(tmp_path, model="cut"))
    again = (out / "README.md").read_text()
    assert again.count("## Attention heads") == again.count("license: mit") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        *((f"--max-shard-size {size}", "bytes, or text such as '5GB'") for size in ("0GB", "5")),
        (
            "--format transformers",
            "it is for the same number of heads in every layer, got layers with 2, 4, 2 heads",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(more, words, tmp_path):
    planned(tmp_path, saved(tmp_path, "llama"))
    assert words in refused(prune(tmp_path, more))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_runs_code_is_opened_by_no_command(stories, tmp_path):
    planned(tmp_path, saved(tmp_path, "llama"))
    done(prune(tmp_path, "--format remote-code"))
    out = tmp_path / "out"
    # With the record of the cut the folder opens without its code; older folders lack it.
    done(f"inspect {out}")
    config = json.loads((out / "config.json").read_text())
    del config["headprune"]
    (out / "config.json").write_text(json.dumps(config))
    for command in (f"inspect {out}", f"bench {tmp_path / 'base'} {out}"):
        message = refused(command)
        assert "a checkpoint in the format 'remote-code'" in message
        assert f"AutoModelForCausalLM.from_pretrained('{out}', trust_remote_code=True)" in message
    message = refused(f"score {stories / 'tiny.yaml'} --set model.path={out}")
    assert "must be a model that Transformers or headprune opens by itself" in message


def test_a_model_that_no_inputs_can_be_made_up_for(tmp_path):
    """A tiny Whisper, which takes spectrograms: cut without a comparison, and not timed."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    names = ("encoder_layers", "encoder_attention_heads", "decoder_layers")
    sizes = dict.fromkeys((*names, "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 8)
    sizes |= {"max_source_positions": 8, "max_target_positions": 8, "num_mel_bins": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(vocab_size=20, **sizes, **ends)
    model = WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "base")
    mask = planned(tmp_path, model)
    said = done(prune(tmp_path)).stderr
    assert said.count("warning: no inputs could be made up for this model") == 1
    second = hp.find_sites(hp.from_pretrained(tmp_path / "out"))[1]
    assert second.heads == mask.kept("model.encoder.layers.1.self_attn")
    message = refused(f"bench {tmp_path / 'base'} {tmp_path / 'base'}")
    assert "ORIGINAL: must be a model that takes tokens, images or waves" in message


# ---------------------------------------------------------------- from file to file


def test_streaming_needs_a_folder(tmp_path):
    hp.PruningPlan(hp.HeadMask.from_keep({}, {"a": 2})).save(tmp_path / "plan.json")
    given = f"--plan {tmp_path / 'plan.json'} --out {tmp_path / 'out'} --streaming"
    message = refused(f"prune --model someone/something {given}")
    assert "--model: must be a folder with --streaming, got 'someone/something'" in message
    assert "Download it first: hf" in message


@pytest.mark.filterwarnings("default")  # as outside of the tests, where a warning is no error
def test_streaming_as_json_and_a_warning_about_other_weights(tmp_path):
    model, out = saved(tmp_path, "llama"), tmp_path / "out"
    mask = planned(tmp_path, model)
    (tmp_path / "base" / "LICENSE").write_text("free")
    found = json_of(prune(tmp_path, "--streaming"))
    assert hp.PruningPlan.from_dict(found["plan"]).mask == mask
    assert (found["format"], found["copied"]) == ("headprune", ["LICENSE"])
    assert found["report"]["params_after"] < found["report"]["params_before"]
    assert found["report"]["warnings"] == []
    other = ModelFingerprint(fingerprint(model, hp.find_sites(model)).structure, "0" * 16)
    hp.PruningPlan(mask, model=other).save(tmp_path / "plan.json")
    for more in ("", "--streaming"):
        shutil.rmtree(out)
        result = done(prune(tmp_path, more))
        said = "warning: the plan was made for a model of the same structure with other weights"
        assert said in result.stderr
        assert f"wrote {out} (format headprune, LICENSE)" in result.stdout
