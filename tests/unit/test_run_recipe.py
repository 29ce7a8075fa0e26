"""Recipes as data: reading, overriding, references, and every error at once."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from headprune.core.errors import InvalidValue, UnknownName
from headprune.core.plan import Budget
from headprune.recipes.reading import locate, override, parse_yaml, read_raw
from headprune.recipes.references import interpolate
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import RecipeError, check_recipe, load_recipe, recipe_yaml

GOOD: dict[str, Any] = {
    "name": "test",
    "description": "for tests",
    "task": "text_classification",
    "model": {"path": "somewhere"},
    "data": {"path": "rows.jsonl", "text": "text"},
    "select": {"keep_heads": 0.5},
}


def good(**changes: Any) -> dict[str, Any]:
    return override(
        GOOD, [f"{k.replace('__', '.')}={yaml.safe_dump(v)}" for k, v in changes.items()]
    )


def problems(raw: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        check_recipe(raw)
    return {p.where: str(p) for p in caught.value.problems}


def test_numbers_of_yaml_1_2():
    data = parse_yaml("{a: 1e-3, b: 1.5e3, c: -2E4, d: e3, e: '1e-3', f: 12, g: 1.0e-3}", "here")
    assert data == {"a": 1e-3, "b": 1500.0, "c": -2e4, "d": "e3", "e": "1e-3", "f": 12, "g": 1e-3}


def test_bad_yaml():
    python = "!!python/object/apply:os.system ['true']"
    for text in ("a: [1", "a: 1\na: 2", python, "? [1, 2]\n: 3", "\t- a"):
        with pytest.raises(InvalidValue, match="here: must be valid YAML"):
            parse_yaml(text, "here")


def test_a_recipe_is_a_mapping(tmp_path):
    path = tmp_path / "r.yaml"
    for text in ("", "- a", "just text", "1: 2"):
        path.write_text(text)
        with pytest.raises(InvalidValue, match="must be a YAML mapping"):
            read_raw(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidValue, match="must be a readable recipe"):
        read_raw(path)


def test_recipes_are_found_by_name_and_path(tmp_path):
    assert locate("digits-vit").name == "digits-vit.yaml"
    own = tmp_path / "own.yaml"
    own.write_text("a: 1")
    assert locate(own) == own
    with pytest.raises(UnknownName, match="Did you mean 'digits-vit'"):
        locate("digit-vit")
    with pytest.raises(InvalidValue, match="existing recipe file"):
        locate(tmp_path / "none.yaml")
    with pytest.raises(InvalidValue, match="a folder"):
        locate(tmp_path)


def test_override_makes_sections_and_reaches_into_lists_and_leaves_the_original():
    raw = {"recover": [{"method": "finetune"}], "train": None}
    nested = ["recover.0.settings.epochs=3", "train.epochs=2"]
    done = override(raw, [*nested, "out=a=b", "x=null", "y=[1, 2]"])
    assert done.pop("recover") == [{"method": "finetune", "settings": {"epochs": 3}}]
    assert done == {"train": {"epochs": 2}, "out": "a=b", "x": None, "y": [1, 2]}
    assert raw == {"recover": [{"method": "finetune"}], "train": None}


def test_bad_overrides():
    for setting, words in (
        ("name", "written key=value"),
        ("=1", "written key=value"),
        ("a..b=1", "written key=value"),
        ("name.x=1", "a key inside name"),
        ("items.2=1", "an item of items, 0 to 1"),
        ("items.x=1", "an item of items"),
        ("name=[1", "valid YAML"),
    ):
        with pytest.raises(InvalidValue, match=words):
            override({"name": "a", "items": [1, 2]}, [setting])


def test_references_are_followed_and_keep_types():
    raw = {"a": {"b": 3, "c": "x"}, "d": "${a.b}", "e": "${a.c}/${a.b}/y", "f": ["${d}"]}
    raw["g"] = "$a {a}"
    data, wrong = interpolate(raw)
    assert not wrong
    assert (data["d"], data["e"], data["f"], data["g"]) == (3, "x/3/y", [3], "$a {a}")


def test_bad_references():
    for raw, words in (
        ({"model": {"path": "x"}, "p": "${model.pth}"}, "p: must be .*Did you mean 'model.path'"),
        ({"a": "${b}", "b": "${a}"}, "free of circular references"),
        ({"a": "x${a}"}, "free of circular references"),
        ({"a": None, "b": "${a}/x"}, "b: must be a reference to a key that has a value.*--set a="),
    ):
        _, wrong = interpolate(raw)
        with pytest.raises(InvalidValue, match=words):
            raise wrong[0]


def test_defaults_are_filled_in_and_the_result_is_a_recipe_again():
    recipe = check_recipe(good())
    assert isinstance(recipe, Recipe)
    assert (recipe.folder, recipe.model.dtype) == ("runs/test", None)
    assert (recipe.score.scorer, recipe.score.until) == ("auto", None)
    assert (recipe.select.budget, recipe.select.policy) == (Budget(keep_heads=0.5), "group")
    for given in (recipe, load_recipe("trec-minilm"), load_recipe("llama-stories")):
        assert check_recipe(yaml.safe_load(recipe_yaml(given))) == given


WRONG = {"epochs": "x", "schedule": "lin", "learning_rat": 1}


def test_all_errors_at_once_each_with_path_and_suggestion():
    raw = {
        "name": "bad run",
        "descripton": "x",
        "task": "text_clasification",
        "seed": -1,
        "model": {"path": "a", "config": {"x": 1}},
        "data": {"path": "${model.pth}/x", "label": 3, "holdout": 1.5, "textt": "a"},
        "score": {"scorer": "tailor"},
        "select": {"keep_heads": 0, "settings": {"min_head": 2}},
        "recover": [{"method": "finetun"}, {"method": "finetune", "settings": WRONG}, 5],
        "bench": {"batch_sizes": [0, 1]},
        "train": {"epochs": 0, "schedule": "abc"},
    }
    found = problems(raw)
    assert set(found) == {
        *("name", "description", "descripton", "task", "seed", "model.config", "data.path"),
        *("data.label", "data.holdout", "data.textt", "score.scorer", "select.keep_heads"),
        *("select.settings.min_head", "bench.batch_sizes.0", "train.epochs", "train.schedule"),
        *("recover.0.method", "recover.2", "recover.1.settings.epochs"),
        *("recover.1.settings.schedule", "recover.1.settings.learning_rat"),
    }
    for path, closest in (
        ("descripton", "description"),
        ("task", "text_classification"),
        ("data.path", "model.path"),
        ("score.scorer", "taylor"),
        ("select.settings.min_head", "min_heads"),
        ("recover.1.settings.learning_rat", "learning_rate"),
    ):
        assert f"Did you mean '{closest}'" in found[path]


DIGITS = {"class_name": "ViTModel"}
HALF = {"keep_heads": 0.5}
NAMED = {**HALF, "selector": "iterative"}
FEW = {"speedup": 1.2, "latency": {"batch_size": 0}}
FOLD, FOULD = [{"method": "mean_fold"}], [{"method": "mean_fould"}]
UNTIL = {"scorer": "taylor", "until": {"k": 2}}
WATCHED = {"method": "finetune", "settings": {"checkpoint_every": 5}}
REDUCE = {"scorer": "taylor", "settings": {"reduce": "exampel"}}
BLOCK = {"scorer": "taylor", "settings": {"block": 8}}
UNKNOWN = {"selector": "local_search", "settings": {"inner": "nope"}, "keep_heads": 0.5}
INNER = {"inner": "iterative"}


SINGLE: list[tuple[dict[str, Any], str, str]] = [
    ({"model": {}}, "model", "got none"),
    ({"model__class_name": "BertModel"}, "model", "got path and class_name"),
    ({"model": "folder"}, "model", "a section with keys of its own"),
    ({"data__text": None}, "data.text", "the column with text"),
    ({"data__tokens": "ids"}, "data.tokens", "left out"),
    ({"task": "causal_lm", "data__tokens": "ids"}, "data", "got both"),
    ({"task": "causal_lm", "data__text": None}, "data", "got neither"),
    ({"task": "image_classification"}, "data.text", "left out"),
    ({"data__normalise": True}, "data.normalise", "has its own"),
    ({"data__holdout": 0}, "data.holdout", "greater than"),
    ({"data__labels": [1, "1"]}, "data.labels", "a list without repetitions"),
    ({"task": "regression", "data__labels": [1, 2]}, "data.labels", "has no classes"),
    ({"select": {}}, "select", "exactly one of"),
    ({"select__keep_kv": 0.5}, "select", "got keep_heads, keep_kv"),
    ({"select__keep_heads": 0}, "select.keep_heads", "a count >= 1 or a fraction"),
    ({"select__keep_heads": 1.5}, "select.keep_heads", "a count >= 1 or a fraction"),
    ({"select__length": 4}, "select.length", "with keep_macs only"),
    ({"select__selector": "globl"}, "select.selector", "Did you mean 'global_topk'"),
    ({"select__policy": "fre"}, "select.policy", "Did you mean 'free'?"),
    ({"select": UNKNOWN}, "select.settings", "a registered selector, got 'nope'"),
    ({"score": REDUCE}, "score.settings.reduce", "one of example"),
    ({"score": BLOCK}, "score.settings.block", "with reduce='batch' only"),
    ({"score__batch_size": 0}, "score.batch_size", "greater than or equal to 1"),
    ({"score__batch_size": "8"}, "score.batch_size", "valid integer"),
    ({"score__settings": [1]}, "score.settings", "a section with keys of its own"),
    ({"preset": "kwon2022", "score": 3}, "score", "a section with keys of its own"),
    ({"seed": True}, "seed", "valid integer"),
    ({"device": "gpu"}, "device", "'auto', 'cpu' or 'cuda'"),
    ({"train": {"lr": 1}}, "train.lr", "a known key"),
    ({"recover": [{"settings": {}}]}, "recover.0.method", "given"),
    ({"recover": {"method": "mean_fold"}}, "recover", "list"),
    ({"threads": 0}, "threads", "greater than or equal to 1"),
    # sound and models of one's own
    ({"task": "audio_classification"}, "data.text", "left out for audio_classification"),
    ({"data__seconds": 0.5}, "data.seconds", "left out: only audio_classification"),
    ({"model": {"import_path": "a.b"}}, "model.import_path", "package.module:name"),
    ({"model": {"import_path": "a:b", **DIGITS}}, "model", "got class_name and import_path"),
    ({"model": {**DIGITS, "layouts": "a:b"}}, "model.layouts", "only a model by import_path"),
    ({"model": {"import_path": "a:b"}}, "model.import_path", "image_classification or"),
    # speed, and heads that must be kept
    ({"select": {"speedup": 1}}, "select.speedup", "a number above 1"),
    ({"select__speedup": 1.2}, "select", "got keep_heads, speedup"),
    ({"select": {"speedup": 1.2, "length": 8}}, "select.length", "keep_macs"),
    ({"select": FEW}, "select.latency.batch_size", "greater than or equal to 1"),
    ({"select__latency": {"batch_size": 8}}, "select.latency", "speedup"),
    ({"select": {"sites": {"self": {"speedup": 0.9}}}}, "select.sites.self.speedup", "1"),
    ({"select__must_keep": {"a": 1}}, "select.must_keep.a", "list"),
    # selectors that look at the model
    ({"select__recover": FOLD}, "select.recover", "global_topk"),
    ({"select": {**NAMED, "recover": FOULD}}, "select.recover.0.method", "mean_fold"),
    ({"select": {**NAMED, "settings": INNER}}, "select.settings.inner", "needs scores alone"),
    ({"select": {**NAMED, "settings": {"step": 3}}}, "select.settings.step", "'steps'"),
    # stages
    ({"gradual": {"stages": 0}}, "gradual.stages", "greater than or equal to 1"),
    ({"gradual": {"settings": {"patience": 2}}}, "gradual.settings.patience", "left out"),
    ({"gradual": {"settings": {"step": 3}}}, "gradual.settings.step", "'steps'"),
    ({"gradual": {}, "select": {"speedup": 1.2}}, "select.speedup", "gradual"),
    ({"gradual": {}, "select": {"sites": {"self": HALF}}}, "select.sites", "gradual"),
    ({"gradual": {}, "select": {**NAMED, "recover": FOLD}}, "select.recover", "gradual"),
    ({"gradual": {}, "score": UNTIL}, "score.until", "gradual"),
    ({"recover": [WATCHED]}, "recover.0.settings.checkpoint_every", "left out"),
    ({"model__dtype": "int8"}, "model.dtype", "bfloat16"),
]


def test_single_errors():
    for changes, path, words in SINGLE:
        found = problems(good(**changes))
        assert list(found) == [path], (changes, found)
        assert words in found[path], changes


def test_reading_may_stop_when_a_set_is_settled():
    low = {"k": 0, "confidence": 1.0}
    for scorer, until, words in (
        ("magnitude", {"k": 3}, {"until": "left out for a scorer that uses no data"}),
        ("auto", {"k": 3}, {"until": "score.scorer=taylor"}),
        ("taylor", {"confidence": 0.9}, {"until.k": "given"}),
        ("taylor", low, {"until.k": "greater", "until.confidence": "less"}),
    ):
        found = problems(good(score={"scorer": scorer, "until": until}))
        assert list(found) == [f"score.{key}" for key in words]
        for key, said in words.items():
            assert said in found[f"score.{key}"]
    taken = check_recipe(good(score={"scorer": "taylor", "until": {"k": 3}})).score.until
    assert taken.k == 3


def test_settings_that_depend_on_each_other_are_judged_together():
    settings = {"block": 8, "reduce": "batch"}
    assert check_recipe(good(score={"scorer": "taylor", "settings": settings})).score.scorer
