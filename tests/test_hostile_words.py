"""Words out of files in texts that something reads: a model's card, what a folder's code is, lines
to paste."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import headprune as hp
from headprune.checkpoints import card
from headprune.cli.main import app
from headprune.core.errors import InvalidValue
from headprune.data.models import open_model
from headprune.recipes.validate import load_recipe
from headprune.report import repeat
from tests.report_records import record_of
from tests.tiny_models import bert
from tests.tiny_recipe import TINY
from tests.unit.test_formats import EMPTY, cut

SHELL = "a; touch HACKED #"


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    "name",
    [
        "org/x\nlicense: mit",
        f"x\n---\n# money\n<img onerror=a>{card.END}[here](http://evil)",
        "org/x # y",
        "a`b|c",
        "m\udcff",
        "org/\u202ex",
    ],
)
def test_a_card_says_what_a_model_was_loaded_from_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    model, _ = cut("llama", EMPTY)
    model.config._name_or_path = "a"
    hp.save_pretrained(model, tmp_path / "plain")
    model.config._name_or_path = name
    hp.save_pretrained(model, tmp_path / "named")
    plain, named = (
        (tmp_path / place / card.CARD).read_text("utf-8") for place in ("plain", "named")
    )
    facts = yaml.safe_load(named.split("---\n")[1])
    assert facts == {"tags": ["headprune"]}, "what is no name of the hub is not told to it"
    assert len(named.splitlines()) == len(plain.splitlines()) - 1, (
        "the name of the hub's model is left out"
    )
    line = next(line for line in named.splitlines() if line.startswith("- Base model: "))
    assert "<" not in line.replace(r"\<", "")
    assert "`" not in line.replace(r"\`", "")


@pytest.mark.parametrize("name", ["1.10", "null", "yes", "org/some-model_2.0"])
def test_a_name_of_the_hub_is_text_whatever_it_looks_like(name: str, tmp_path: Path) -> None:
    model, _ = cut("llama", EMPTY)
    model.config._name_or_path = name
    hp.save_pretrained(model, tmp_path)
    assert (
        yaml.safe_load((tmp_path / card.CARD).read_text().split("---\n")[1])["base_model"] == name
    )


def test_names_of_classes_and_sites_end_no_code_in_a_card() -> None:
    assert card._code("model.layers[0].self_attn") == "`model.layers[0].self_attn`"
    assert card._code("x`|<img>\n# T") == r"x\`\|\<img\> \# T"


@pytest.mark.filterwarnings("always:.*names code of others")
def test_who_trusts_a_folder_with_a_modelling_file_runs_no_other_code(tmp_path: Path) -> None:
    """The base model's tokenizer and pipelines may name code of a repository: it was never looked
    at."""
    base, out = bert(tmp_path / "base"), tmp_path / "out"
    evil = {"AutoTokenizer": ["evil/repo--code.Tok", None]}
    changed(
        base / "config.json",
        custom_pipelines={"text-classification": {"impl": "evil/repo--code.Pipe"}},
    )
    changed(base / "tokenizer_config.json", auto_map=evil)
    (base / "processor_config.json").write_text(
        json.dumps({"image_processor": [{"auto_map": evil, "size": 3}]})
    )
    (base / "vocab_lists.json").write_text("no JSON")
    sites = hp.find_sites(open_model(str(base)))
    keep = {site.name: [0] if i else [0, 1] for i, site in enumerate(sites)}
    mask = hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})
    plan = hp.PruningPlan(mask).save(tmp_path / "plan.json")
    args = ["prune", "--model", base, "--plan", plan, "--out", out, "--format", "remote-code"]
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 0, result.output
    for name in ("processor_config.json", "tokenizer_config.json"):
        assert f"warning: {name} names code of others, which is left out: " in result.output
    assert "evil" not in "".join(path.read_text(errors="replace") for path in out.glob("*.json"))
    assert json.loads((out / "processor_config.json").read_text()) == {
        "image_processor": [{"size": 3}]
    }
    assert (out / "vocab_lists.json").read_text() == "no JSON"
    plainly = [str(a) for a in args[:-1]] + ["headprune"]
    plainly[plainly.index(str(out))] = str(tmp_path / "plainly")
    assert CliRunner().invoke(app, plainly).exit_code == 0
    assert (
        json.loads((tmp_path / "plainly" / "tokenizer_config.json").read_text())["auto_map"] == evil
    ), "as it was"


@pytest.mark.parametrize("name", [f"package:{SHELL}/m", "package:a\nerror: b/m"])
def test_no_package_is_to_be_installed_whose_name_is_none(name: str) -> None:
    with pytest.raises(InvalidValue, match="no package") as refusal:
        open_model(name)
    assert refusal.value.hint == "Give a folder: --set MODEL=FOLDER."


def test_adapters_name_no_package(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = {
        "peft_type": "LORA",
        "target_modules": ["query"],
        "base_model_name_or_path": "package:some_package/m",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidValue, match="base model is a folder or on the hub, got 'package:some_package/m'"
    ):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("auto_map", "named"),
    [
        ({f"AutoModelFor{SHELL}": "m.M", "AutoModelForMaskedLM": "m.N"}, "AutoModelForMaskedLM"),
        ({"AutoModel\n\nerror: x": "m.M"}, "AutoModel"),
        ({"AutoModelForPreTraining": "m.M"}, "AutoModel"),
        ([1], "AutoModel"),
        (None, "AutoModel"),
    ],
)
def test_the_line_that_loads_a_folder_with_code_names_a_class_of_transformers(
    auto_map: Any, named: str, tmp_path: Path
) -> None:
    folder = bert(tmp_path / "model")
    changed(
        folder / "config.json",
        headprune_heads={},
        **({} if auto_map is None else {"auto_map": auto_map}),
    )
    with pytest.raises(InvalidValue, match="which runs the modelling file") as refusal:
        open_model(str(folder))
    assert (
        f"In Python: transformers.{named}.from_pretrained('{folder}', trust_remote_code=True). "
        in refusal.value.hint
    )


def test_a_setting_to_give_is_one_word_for_a_shell(tmp_path: Path) -> None:
    recipe = {
        **TINY,
        "model": {**TINY["model"], "config": {SHELL: None, "b": f"${{model.config.{SHELL}}}"}},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(hp.core.errors.HeadPruneError) as refusal:
        load_recipe(tmp_path / "recipe.yaml")
    said = next(line for line in str(refusal.value).splitlines() if "Give it: " in line).partition(
        "Give it: "
    )[2]
    assert shlex.split(said) == ["--set", f"model.config.{SHELL}=..."]


def test_a_folder_that_begins_like_an_option_is_a_folder() -> None:
    record = record_of()
    words = shlex.split(
        repeat.command(
            replace(record, recipe={**record.recipe, "task": "x", "out": "--out=/tmp/x"})
        )
    )
    assert words == [
        "headprune",
        "run",
        "./--out=/tmp/x/recipe.yaml",
        "--out",
        "./--out=/tmp/x-again",
    ]
