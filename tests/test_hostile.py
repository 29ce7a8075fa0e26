"""Hostile files by hand: nothing in them is run, believed beyond its folder, or printed raw."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import pickle
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from rich.console import Console
from typer.testing import CliRunner

import headprune as hp
from headprune.checkpoints import foreign
from headprune.checkpoints.foreign import check_config
from headprune.checkpoints.streaming import prune_checkpoint
from headprune.cli.main import app
from headprune.core.agreement import Agreement, Measure, Pair
from headprune.core.codec import FrozenDict
from headprune.core.display import clean
from headprune.core.errors import CheckpointError, HeadPruneError, InvalidValue
from headprune.core.files import finish_renames
from headprune.core.record import RunRecord
from headprune.core.scores import ModelFingerprint
from headprune.core.sweeps import SweepTable
from headprune.data.models import open_model
from headprune.data.sound import clip_of
from headprune.maps.patterns import Pattern
from headprune.recipes.reading import parse_yaml
from headprune.recipes.validate import load_recipe
from headprune.recovery._checkpoint import FILE, Keeper
from headprune.report import render_html, render_markdown
from headprune.report.attention import attention_view
from headprune.report.explanation import explain
from headprune.run.dry import dry_run
from headprune.run.journal import Journal
from headprune.run.progress import Finished, take_folder
from headprune.sweep.base import Base
from headprune.sweep.runs import PlannedRun, SweepRun
from headprune.sweep.tables import _write_columns, write_timings
from tests.report_records import pictures_of, plan_of, record_of, sweep_table
from tests.tiny_models import bert
from tests.tiny_recipe import TINY

PACKAGE = Path(hp.__file__).parent
STEERING = "\x1b[2J\x1b]0;title\x07 \x9b31m \u202e \x08"


def call(*arguments: object, **more: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], **more)


@pytest.fixture
def hacked(tmp_path: Path) -> Iterator[Path]:
    """A file that code out of a file would make; it must not be there at the end."""
    path = tmp_path / "HACKED"
    yield path
    assert not path.exists(), "code out of a file was run"


class Evil:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


# ---------------------------------------------------------------- YAML

LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)
HOSTILE_YAML = {
    "a tag that runs code": "name: !!python/object/apply:pathlib.Path.touch [HACKED]",
    "a tag that imports": "name: !!python/name:os.system",
    "a tag of ours": "name: !include /etc/passwd",
    "a billion laughs": LAUGHS,
    "an alias of itself": "a: &a [*a]",
    "a merge": "a: &a {b: 1}\nc:\n  <<: *a",
    "deep lists": "a: " + "[" * 5000 + "]" * 5000,
    "deep mappings": "".join(f"{' ' * i}a:\n" for i in range(300)),
    "far too long": "a: " + "x" * 10_000_000,
    "two documents": "a: 1\n---\nb: 2",
    "a zero byte": "a: \0",
    "a key that is a list": "? [a]\n: b",
    "a number without end": f"seed: 0x{'f' * 5000}",
    "a number by sixties": f"seed: 1{':59' * 5000}",
    "thousands of keys": f"{{{', '.join(f'a{i}' for i in range(20_000))}}}",
}


@pytest.mark.parametrize("what", HOSTILE_YAML)
def test_hostile_yaml_is_refused_in_words_and_soon(
    what: str, tmp_path: Path, hacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(HOSTILE_YAML[what], encoding="utf-8")
    start = time.process_time()
    with pytest.raises(HeadPruneError) as refusal:
        load_recipe(tmp_path / "recipe.yaml")
    assert time.process_time() - start < 5
    assert 0 < len(str(refusal.value)) < 20_000
    result = call("validate", tmp_path / "recipe.yaml")
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_overrides_are_read_within_the_same_limits() -> None:
    for text in ("!!python/name:os.system", "[" * 5000, "&a [*a]"):
        with pytest.raises(InvalidValue):
            load_recipe("digits-vit", [f"name={text}"])
    assert parse_yaml("[1, {a: 2}]", "here") == [1, {"a": 2}]  # what is sound is read


# ---------------------------------------------------------------- no code of ours could


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _arguments(call: ast.Call) -> dict[str, str]:
    return {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg}


FORBIDDEN = (
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "input",
    "marshal.loads",
    "shelve.open",
)
LOADERS = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")


def dangers(source: str) -> list[str]:
    """What in a file could run data: loaders of pickles, evaluation, shells, other people's
    modules."""
    found = []
    tree = ast.parse(source)
    for name, call in _calls(tree):
        given = _arguments(call)
        if name in FORBIDDEN or name.endswith((".from_pickle", ".read_pickle", "joblib.load")):
            found.append(name)
        if name.split(".")[0] in LOADERS and name.split(".")[-1] in ("load", "loads", "Unpickler"):
            found.append(name)
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if given.get("allow_pickle", "False") != "False" or given.get("shell", "False") != "False":
            found.append(f"{name}({given})")
        if given.get("trust_remote_code", "False") != "False":
            found.append(f"{name}(trust_remote_code={given['trust_remote_code']})")
        if name in (
            "yaml.load",
            "yaml.unsafe_load",
            "yaml.full_load",
        ) and "_Loader" not in ast.unparse(call):
            found.append(name)
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_no_file_of_ours_could_run_data(path: Path) -> None:
    assert dangers(path.read_text(encoding="utf-8")) == []


def test_the_look_for_dangers_sees_them() -> None:
    assert (
        len(
            dangers(
                "import pickle, torch, yaml, joblib, numpy as"
                " np\npickle.load(f)\ntorch.load(f)\neval(x)"
            )
        )
        == 3
    )
    assert (
        len(dangers("yaml.load(t, yaml.Loader)\njoblib.load(f)\nnp.load(f, allow_pickle=True)"))
        == 3
    )
    assert (
        len(
            dangers(
                "subprocess.run(c, shell=True)\nkind.from_pretrained(p, trust_remote_code=trusted)"
            )
        )
        == 2
    )
    assert (
        dangers("torch.load(f, weights_only=True)\nmodel.eval()\ntorch.compile(m)\nimport pickle")
        == []
    )


def test_the_one_yaml_loader_is_a_safe_one() -> None:
    from headprune.recipes.reading import _Loader

    assert issubclass(_Loader, yaml.SafeLoader)
    assert not any(
        tag.startswith("tag:yaml.org,2002:python") for tag in _Loader.yaml_constructors if tag
    )


# ---------------------------------------------------------------- pickles


def _pickled(folder: Path, hacked: Path, name: str = "pytorch_model.bin") -> Path:
    """A model's folder whose weights are a pickle that runs code, twice: in PyTorch's own form, and
    bare."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save({"weight": Evil(hacked)}, folder / name)
    return folder


@pytest.mark.parametrize("bare", [False, True])
def test_a_pickle_in_place_of_weights_runs_nothing(
    bare: bool, tmp_path: Path, hacked: Path
) -> None:
    folder = _pickled(bert(tmp_path / "model"), hacked)
    if bare:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(hacked)))
    with pytest.raises(HeadPruneError):
        open_model(str(folder))
    hp.PruningPlan(hp.HeadMask(())).save(tmp_path / "plan.json")
    for command in (
        ("inspect", folder),
        ("bench", folder, folder),
        ("prune", "--model", folder, "--plan", tmp_path / "plan.json", "--out", tmp_path / "out"),
        (
            "prune",
            "--model",
            folder,
            "--plan",
            tmp_path / "plan.json",
            "--out",
            tmp_path / "out",
            "--streaming",
        ),
    ):
        result = call(*command, input="y\n")
        assert result.exit_code == 2, result.output
        assert not hacked.exists(), command
    with pytest.raises(CheckpointError):
        hp.from_pretrained(folder)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # PEFT asks Transformers by an old name
def test_a_pickle_in_place_of_adapters_runs_nothing(tmp_path: Path, hacked: Path) -> None:
    peft = pytest.importorskip("peft")
    bert(tmp_path / "base")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    folder = tmp_path / "adapters"
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    peft.get_peft_model(model, config).save_pretrained(folder)
    open_model(str(folder))  # sound so far
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"weight": Evil(hacked)}, folder / "adapter_model.bin")
    with pytest.raises(HeadPruneError):
        open_model(str(folder))


def test_a_pickle_in_place_of_a_training_runs_nothing(tmp_path: Path, hacked: Path) -> None:
    torch.save({"identity": {"a": "b"}, "weights": Evil(hacked)}, tmp_path / FILE)
    with pytest.raises(CheckpointError):
        Keeper(tmp_path, 1, {"a": "b"}).load()


# ---------------------------------------------------------------- code beside weights


def _with_code(folder: Path, hacked: Path, **config: Any) -> Path:
    """A model's folder with code that its configuration and its tokenizer's ask for."""
    code = f"from pathlib import Path\nPath({str(hacked)!r}).touch()\n"
    (folder / "evil.py").write_text(
        code + "class Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    )
    kinds = ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForCausalLM")
    auto = {"AutoConfig": "evil.Config", **dict.fromkeys(kinds, "evil.Model")}
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, "auto_map": auto, **config}))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told |= {
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]},
        "tokenizer_class": "Unheard",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "unheard-of", "architectures": ["Unheard"]}], ids=["known", "new"]
)
def test_no_command_runs_code_out_of_a_folder(
    config: dict[str, Any], tmp_path: Path, hacked: Path
) -> None:
    folder = _with_code(bert(tmp_path / "model"), hacked, **config)
    rows = "text,label\n" + "".join(f"w{i} w{i % 7},{i % 2}\n" for i in range(40))
    (tmp_path / "rows.csv").write_text(rows)
    raw = {**TINY, "task": "text_classification", "model": {"path": str(folder)}, "train": None}
    raw["data"] = {
        "path": str(tmp_path / "rows.csv"),
        "text": "text",
        "calibration": 8,
        "holdout": 8,
        "test_holdout": 8,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw))
    recipe = tmp_path / "recipe.yaml"
    hp.PruningPlan(hp.HeadMask(())).save(tmp_path / "plan.json")
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    commands: list[tuple[object, ...]] = [
        ("inspect", folder),
        ("bench", folder, folder, "--seconds", "0.1", "--length", "4", "--batch", "1"),
        ("prune", "--model", folder, "--plan", plan, "--out", out),
        ("prune", "--model", folder, "--plan", plan, "--out", out, "--streaming"),
        (
            "prune",
            "--model",
            folder,
            "--data",
            tmp_path / "rows.csv",
            "--keep",
            "0.5",
            "--out",
            out / "data",
        ),
        ("init", "--model", folder, "--data", tmp_path / "rows.csv", "--out", "-"),
        ("validate", recipe),
        ("show", recipe),
        ("run", recipe, "--dry-run"),
        ("run", recipe, "--out", out / "run"),
        ("score", recipe),
        ("sweep", recipe, "--grid", "keep=0.5", "--out", out / "sweep"),
    ]
    for command in commands:
        result = call(*command, input="y\n" * 5)
        assert not hacked.exists(), command
        assert "Traceback" not in result.output
        assert "Do you wish to run" not in result.output, command
        if config and command[0] not in ("validate", "show"):
            assert result.exit_code == 2, (command, result.output)


def test_a_kernel_that_a_configuration_names_is_not_fetched(tmp_path: Path) -> None:
    folder = bert(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        (folder / "config.json").write_text(json.dumps({**config, key: "somebody/kernel"}))
        with pytest.raises(
            CheckpointError, match=f"{key}: must be the name of an implementation that is installed"
        ):
            open_model(str(folder))
    for key, value in (
        ("attn_implementation", {"": "somebody/kernel"}),
        ("_attn_implementation", [["a/kernel"]]),
    ):
        (folder / "config.json").write_text(json.dumps({**config, "text_config": {key: value}}))
        with pytest.raises(
            CheckpointError, match=f"{key}: must be the name of an implementation that is installed"
        ):
            open_model(str(folder))


@pytest.mark.parametrize("inside", [{}, {"some": "module"}])
def test_adapters_that_name_a_module_are_refused(inside: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(bert(tmp_path / "base")),
        "megatron_core": "evil",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "megatron_config": inside}))
    with pytest.raises(InvalidValue, match="must be adapters that need no Megatron"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", "(([a-z.0-9]+)+)+!"),
        ("target_modules", "(a|a)" * 30),
        ("target_modules", "a?" * 30),
        ("target_modules", ".*" * 6 + "!"),
        ("target_modules", "(?:){1000000000}"),
        ("target_modules", "(" * 5000 + ")" * 5000),
        ("target_modules", "a" * 200_000 + "+"),
        ("exclude_modules", "(([a-z.0-9]+)+)+!"),
        ("feedforward_modules", "(?i:(Ab|aB)*)!"),
        ("modules_to_save", ["classifier", "(([a-z.0-9]+)+)+!"]),
        ("modules_to_save", [".*.*!"] * 2000),
        ("rank_pattern", {"(([a-z.0-9]+)+)+!": 4}),
        ("rank_pattern", {"([a-z.]+)+!)(x": 4}),
        ("alpha_pattern", {"query": 4, "(.+)+!": 4}),
        ("layers_pattern", "(.+)+!"),
    ],
)
def test_adapters_whose_patterns_search_for_ever_are_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(tmp_path / "base"),
        "target_modules": ["query"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(
        CheckpointError,
        match=rf"{key}: must be names of modules, or patterns that are soon searched",
    ):
        open_model(str(tmp_path))


def test_adapters_that_name_other_folders_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = {
        "peft_type": "XLORA",
        "base_model_name_or_path": str(tmp_path / "base"),
        "adapters": {"a": "/elsewhere"},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidValue, match="must be adapters that can be merged"):
        open_model(str(tmp_path))


# ---------------------------------------------------------------- recipes


def test_a_recipe_imports_what_it_names_only_when_it_is_run(
    tmp_path: Path, hacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_module.py").write_text(
        f"from pathlib import Path\nPath({str(hacked)!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = {"model": {"import_path": "evil_module:build", "layouts": "evil_module:LAYOUTS"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**TINY, **own}))
    assert call("validate", tmp_path / "own.yaml").exit_code == 0
    assert call("show", tmp_path / "own.yaml").exit_code == 0
    # Nowhere else is a name one of a module.
    places = [
        *(
            "model.class_name",
            "model.path",
            "data.path",
            "score.scorer",
            "select.selector",
            "preset",
            "task",
            "device",
        ),
        *("model.dtype", "data.tokenizer", "recover.0.method"),
    ]
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({**TINY, "recover": [{"method": "lstsq"}]})
    )
    for place in places:
        for name in ("evil_module", "evil_module:build", "package:evil_module"):
            with pytest.raises(HeadPruneError):
                dry_run(tmp_path / "recipe.yaml", [f"{place}={name}"], say=lambda line: None)
            assert not hacked.exists(), (place, name)
    with pytest.raises(HeadPruneError):  # it is what is named where names of modules are
        dry_run(tmp_path / "own.yaml", say=lambda line: None)
    assert hacked.exists()
    hacked.unlink()


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "..",
        ".",
        "a/b",
        "a\\b",
        "/tmp/x",
        "",
        "a\0b",
        "a\n",
        "~",
        "-rf",
        "${out}",
        "x" * 300,
    ],
)
def test_the_name_of_a_recipe_is_no_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**TINY, "name": name}))
    with pytest.raises(InvalidValue, match="name"):
        load_recipe(tmp_path / "recipe.yaml")
    assert call("run", tmp_path / "recipe.yaml").exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_name_that_another_key_holds_is_checked_as_well(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({**TINY, "description": "../x", "name": "${description}"})
    )
    with pytest.raises(InvalidValue, match="name: must be made of letters"):
        load_recipe(tmp_path / "recipe.yaml")


# ---------------------------------------------------------------- paths out of files


@pytest.mark.parametrize(
    "plan",
    ["../plan.json", "/etc/passwd", "plans/../../x.json", "javascript:alert(1)", "plans/a)b", 5],
)
def test_a_table_names_no_plan_outside_of_its_sweep(plan: Any, tmp_path: Path) -> None:
    table = sweep_table()
    rows = (replace_row(table.rows[0], plan=plan), *table.rows[1:])
    replace(table, rows=rows).save(tmp_path / "table.json")
    for command in (
        ("report", tmp_path),
        ("pick", tmp_path, "--max-drop", "0.5", "--out", tmp_path / "out"),
    ):
        result = call(*command)
        assert result.exit_code == 2
        assert "rows[0].plan: must be the name of a file of this sweep" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize("run", ["../x", "/x", "a/b", "..", ""])
def test_a_table_names_no_run_outside_of_its_sweep(run: str, tmp_path: Path) -> None:
    table = sweep_table()
    replace(table, rows=(replace_row(table.rows[0], run=run),)).save(tmp_path / "table.json")
    with pytest.raises(InvalidValue, match=r"rows\[0\].run"):
        SweepTable.load(tmp_path / "table.json")


def replace_row(row: Any, **changes: Any) -> Any:
    return type(row)({**row, **changes})


@pytest.mark.parametrize("field", ["base", "plan", "outcome"])
def test_a_run_of_a_sweep_names_no_file_outside(field: str, tmp_path: Path) -> None:
    told = {"base": "ab", "plan": "cd", "outcome": "ef", field: "../../x"}
    empty = hp.RunRecord("a", "done", "s", "c").recipe
    with pytest.raises(InvalidValue, match=f"SweepRun.{field}"):
        SweepRun(empty, empty, 0, empty, status="done", **told)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "model/../../x", "a\0b"])
def test_what_is_done_names_no_file_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    files, noted = FrozenDict({name: "0" * 64}), hp.RunRecord("a", "running", "s", "c")
    with pytest.raises(
        InvalidValue, match=r"Finished.files: must be the path of a file inside the folder"
    ):
        Finished("ab", files, noted)
    with pytest.raises(
        InvalidValue, match=r"Base.files: must be the path of a file inside the folder"
    ):
        Base("ab", files, ModelFingerprint("a", "b"), FrozenDict({}), FrozenDict({}))
    # A run that was killed, with such a mark, goes on without what it says.
    replace(record_of(), status="running").save(tmp_path / "record.json")
    sound = Finished("ab", FrozenDict({"scores.json": "0" * 64}), noted).save(
        tmp_path / ".work" / "score.json"
    )
    sound.write_text(sound.read_text().replace('"scores.json"', json.dumps(name)))
    take_folder(tmp_path, False, Journal("a", {}, tmp_path, lambda line: None, progress=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".work",
        "history.jsonl",
        "record.json",
    ]


def test_times_that_are_none_are_passed_over(tmp_path: Path) -> None:
    lines = [
        b"[1]",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"kind": [], "key": "p", "seconds": 1}',
        b'{"kind": "plans", "key": "p"}',
    ]
    lines += [
        b'{"kind": "plans", "key": "p", "seconds": "soon"}',
        b'{"kind": "plans", "key": "p", "seconds": 1.5}',
    ]
    (tmp_path / "timings.jsonl").write_bytes(b"\n".join(lines))
    run = PlannedRun("r", FrozenDict({}), FrozenDict({}), 0, load_recipe("sst2-minilm"), "s", "p")
    write_timings(
        [run],
        {"r": SweepRun(FrozenDict({}), FrozenDict({}), 0, FrozenDict({}), "ab", "failed")},
        tmp_path,
    )
    assert (tmp_path / "timings.csv").read_text().splitlines()[1] == '"r",0,,1.5,'


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "\ud800", 5]
)
def test_an_index_names_no_file_outside_of_its_folder(name: Any, tmp_path: Path) -> None:
    folder = bert(tmp_path / "model")
    (tmp_path / "other").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "other" / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"classifier.bias": name}}
    for file in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (folder / file).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="index"):
            open_model(str(folder))
        if file.startswith("model"):
            with pytest.raises(CheckpointError, match="index"):
                prune_checkpoint(folder, hp.HeadMask(()), tmp_path / "out")
        (folder / file).unlink()


def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    model = transformers.BertModel.from_pretrained(bert(tmp_path / "model"))
    folder = hp.save_pretrained(model, tmp_path / "ours", max_shard_size="2KB")
    manifest = json.loads((folder / "headprune.json").read_text())
    shard = manifest["shards"][0]["file"]
    (folder / shard).rename(tmp_path / shard)
    manifest["shards"][0]["file"] = f"../{shard}"
    (folder / "headprune.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="a manifest of files in its folder"):
        hp.from_pretrained(folder)


def test_data_that_names_a_device_is_not_read_for_ever(tmp_path: Path) -> None:
    for name in ("/dev/zero", "..", "a\0b"):
        with pytest.raises(InvalidValue, match="the path of a file that can be read"):
            clip_of(name, "row 0", tmp_path)


@pytest.mark.parametrize("value", [0.5, True, "BertModel", {}, [[]], ["no class"]])
def test_a_class_that_is_no_name_is_refused_or_passed_over(value: Any, tmp_path: Path) -> None:
    folder = bert(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": value}))
    with suppress(InvalidValue):
        assert type(open_model(str(folder))).__name__ == "BertModel"


def test_a_panic_of_a_library_in_rust_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panic = type("PanicException", (BaseException,), {})

    def panics(*_: object, **__: object) -> None:
        raise panic("no entry found for key")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", panics)
    with pytest.raises(InvalidValue, match="no entry found for key"):
        open_model(str(bert(tmp_path / "model")))


# ---------------------------------------------------------------- absurd sizes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("max_position_embeddings", 2**40),
        ("vocab_size", 2**31),
        ("intermediate_size", 2**25),
    ],
)
def test_a_configuration_of_no_model_is_refused_before_it_is_built(
    key: str, value: int, tmp_path: Path
) -> None:
    folder = bert(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=key if value > 2**26 else "weights beside it"):
        open_model(str(folder))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inner_group_num", 60_000_000),
        ("num_hidden_groups", 60_000_000),
        ("num_labels", 60_000_000),
        ("num_key_value_heads", 100_000),  # "value" is a part of its name
        ("num_layer_repeats", -(10**6)),
        ("warmup_steps", 10**6),  # and so is "eps"
        ("depths", [1024, 1024]),
        ("num_conv_layers", [[300, 300], [500, 0]]),
    ],
)
def test_counts_of_no_model_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for config in ({key: value}, {"text_config": [{key: value}]}):
        path.write_text(json.dumps(config))
        with pytest.raises(
            CheckpointError, match=rf"config.json: {key}: must be a number that a model can have"
        ):
            check_config(path)


@pytest.mark.parametrize(
    "text", ["[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900], ids=["lists", "objects"]
)
def test_a_configuration_that_is_nested_deep_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"a": {text}}}')
    with pytest.raises(CheckpointError, match="nested more than 40 deep"):
        check_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    "config",
    [
        {
            "vocab_size": 20_000_000,
            "ngram_vocab_size_base": 20_000_000,
            "intermediate_size": 73_728,
        },
        {"rope_theta": 10**9, "rope_parameters": {"full": {"rope_theta": 10**8, "factor": 10**6}}},
        {
            "eos_token_id": [200_001, 200_007],
            "image_token_index": 262_144,
            "begin_suppress_tokens": [220, 201_024],
        },
        {
            "max_position_embeddings": 10_485_760,
            "model_max_length": 1_048_576,
            "sliding_window": 131_072,
        },
        {
            "label2id": {"layers": 10**6},
            "cross_attention_layers": list(range(100)),
            "sampling_rate": 192_000,
        },
        {
            "num_attention_heads_per_layer": [64] * 80,
            "no_rope_layers": [1] * 2000,
            "depths": [3, 3, 27, 3],
        },
    ],
)
def test_numbers_of_models_are_believed(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_config(tmp_path / "config.json")


def test_numbers_that_multiply_are_stopped_while_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.AlbertModel(
        transformers.AlbertConfig(
            vocab_size=17,
            embedding_size=8,
            hidden_size=8,
            num_attention_heads=2,
            intermediate_size=8,
        )
    )
    hub, ours = tmp_path / "hub", hp.save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(hub)
    monkeypatch.setattr(foreign, "_MODULES", 1000)
    open_model(str(hub))  # sound so far
    hp.from_pretrained(ours)
    for folder in (hub, ours):
        config = json.loads((folder / "config.json").read_text())
        text = json.dumps({**config, "num_hidden_groups": 50, "inner_group_num": 50})
        (folder / "config.json").write_text(text)
    manifest = json.loads((ours / "headprune.json").read_text())
    manifest["config_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (ours / "headprune.json").write_text(json.dumps(manifest))
    for read in (
        lambda: open_model(str(hub)),
        lambda: hp.from_pretrained(ours),
        lambda: prune_checkpoint(hub, hp.HeadMask(()), tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match="a model of at most 1,000 modules"):
            read()
    torch.nn.ModuleList(
        torch.nn.Identity() for _ in range(1001)
    )  # and nothing is counted afterwards


def test_a_configuration_that_is_too_long_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bert(tmp_path / "model")
    monkeypatch.setattr(foreign, "_LONGEST", 10_000)
    open_model(str(folder))  # sound so far
    with open(folder / "config.json", "a") as file:
        file.write(" " * 10_000)
    with pytest.raises(CheckpointError, match="in a file of at most 10,000 bytes, got one of"):
        open_model(str(folder))


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    folder = bert(tmp_path / "model")
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
    }  # all sizes are the defaults: those of BERT base
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="weights beside it"):
        open_model(str(folder))


def test_a_mask_of_a_billion_heads_is_refused() -> None:
    text = (
        hp.HeadMask.from_keep({}, {"a": 4}).to_json().replace('"n_heads": 4', f'"n_heads": {10**9}')
    )
    with pytest.raises(InvalidValue, match="of 0 to 65,536 heads"):
        hp.HeadMask.from_json(text)


@pytest.mark.parametrize(
    "gone", ['["../victim"]', '["/victim"]', '{"a": 1}', "[" * 5000, "[3]", "not JSON", '[".."]']
)
def test_what_a_save_was_killed_over_touches_nothing_outside(gone: str, tmp_path: Path) -> None:
    """A folder may bring such leftovers along."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("precious")
    place = tmp_path / "model" / ".model.0123abcd.whole.part"
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "a").write_text("evil")
    (place / ".gone.part").write_text(gone)
    finish_renames(tmp_path / "model")
    (tmp_path / "model" / "sub").symlink_to(tmp_path / "elsewhere")
    (place / ".gone.part").write_text("[]")
    finish_renames(tmp_path / "model")
    place.rename(tmp_path / "elsewhere" / "whole")
    place.symlink_to(tmp_path / "elsewhere" / "whole")
    (tmp_path / "model" / "sub").unlink()
    finish_renames(tmp_path / "model")
    assert (
        (tmp_path / "victim").read_text()
        == (tmp_path / "elsewhere" / "a").read_text()
        == "precious"
    )
    assert (tmp_path / "elsewhere" / "whole" / "sub" / "a").read_text() == "evil", "where it was"
    assert {path.name for path in (tmp_path / "model").iterdir()} == {place.name}


# ---------------------------------------------------------------- what is shown


def nasty_record(text: str) -> RunRecord:
    """A record with a text in every place that a file can fill."""
    record = record_of()
    assert record.scores is not None
    sites = tuple(replace(s, name=f"{s.name}{text}") for s in record.scores.sites)
    scores = replace(record.scores, sites=sites, scorer=f"taylor{text}", notes=(text,), data=text)
    plan = replace(plan_of(scores), selector=f"by {text}", notes=(text,), scorer=scores.scorer)
    more = {
        "warnings": (text,),
        "error": text,
        "stage": text,
        "status": "failed",
        "git_commit": text,
        "name": text,
    }
    quality = tuple(replace(row, name=f"{row.name} {text}") for row in record.quality)
    settings = {
        name: type(record.recipe)({text: text})
        for name in ("recipe", "versions", "metrics", "rows")
    }
    return replace(record, scores=scores, plan=plan, quality=quality, **more, **settings)


def test_nothing_that_steers_a_terminal_reaches_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    record = nasty_record(STEERING)
    assert record.scores is not None
    assert record.plan is not None
    for name in ("a", "b"):
        record.save(tmp_path / name / "record.json")
        record.plan.save(tmp_path / name / "plan.json")
        record.scores.save(tmp_path / name / "scores.json")
    twice = {"settings": record.recipe, "seed": 5}
    replace(record.scores, **twice).save(tmp_path / "b" / "scores.json")
    (tmp_path / "odd.json").write_text(
        json.dumps({"headprune": "PruningPlan", "version": 1, STEERING: 1})
    )
    (tmp_path / "odd.yaml").write_text(
        json.dumps({**TINY, "description": STEERING, "no such key": STEERING})
    )
    (tmp_path / "fine.yaml").write_text(json.dumps({**TINY, "description": STEERING}))
    sweep = sweep_table()
    told = tuple(replace_row(row, error=STEERING) for row in sweep.failed)
    replace(sweep, failed=told).save(tmp_path / "sweep" / "table.json")
    commands: list[tuple[object, ...]] = [
        ("explain", tmp_path / "a"),
        ("diff", tmp_path / "a", tmp_path / "b"),
        ("diff", tmp_path / "a" / "plan.json", tmp_path / "b" / "plan.json"),
        ("agree", tmp_path / "a" / "scores.json", tmp_path / "b" / "scores.json"),
        ("report", tmp_path / "a"),
        ("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out"),
        ("report", tmp_path / "sweep"),
        ("show", tmp_path / "fine.yaml"),
        ("validate", tmp_path / "odd.yaml"),
        ("explain", tmp_path / "odd.json"),
    ]
    for command in commands:
        for more in ((), ("--json",)):
            result = call(*command, *more)
            assert result.exit_code == (2 if "odd" in str(command[1]) else 0), (
                command,
                result.output,
            )
            assert clean(result.output) == result.output, command
            if more and result.exit_code == 0:
                json.loads(result.stdout)
    for page in tmp_path.rglob("*.md"):
        assert clean(page.read_text(encoding="utf-8")) == page.read_text(encoding="utf-8")


def test_what_is_printed_in_colour_holds_no_colours_of_a_file() -> None:
    record = nasty_record("\x1b[5m[bold red]\\[/]\x9b")
    assert record.scores is not None
    measure = Measure(0.5, 0.25, 0.75)
    found = Agreement(
        (STEERING, "[bold]b"), 2, 5, 0.95, (Pair(0, 1, measure, measure, measure),), (STEERING,)
    )
    assert record.plan is not None
    values: tuple[Any, ...] = (
        record.scores,
        record.plan,
        found,
        record,
        explain(record.plan, record.scores),
    )
    for value in values:
        console = Console(force_terminal=True, width=250, color_system=None, file=io.StringIO())
        console.print(value.__rich__())
        shown = console.file.getvalue()
        assert "\x1b[5m" not in shown
        assert "\x9b" not in shown
        assert "[bold" in shown, "markup in a file is text"


def test_pages_and_notebooks_escape_what_files_say() -> None:
    text = (
        f"<script>alert(1)</script><img src=x onerror=alert(1)>\"'](javascript:alert(1)){STEERING}"
    )
    record = nasty_record(text)
    assert record.scores is not None
    assert record.plan is not None
    measure = Measure(0.5)
    found = Agreement((text, "b"), 2, 5, 0.95, (Pair(0, 1, measure, measure, measure),), (text,))
    parts = [record.scores._repr_html_(), record.plan._repr_html_(), found._repr_html_()]
    for page in (*parts, render_html(record)):
        assert clean(page) == page
        assert "<script>alert" not in page
        assert "<img" not in page
    markdown = render_markdown(record)
    outside = "\n".join(part for i, part in enumerate(markdown.split("```")) if i % 2 == 0)
    assert "<script" not in outside.replace("\\<script", "")
    assert not re.search(r"(?<!\\)\]\(javascript", outside)


def test_pictures_of_attention_hold_no_characters_that_steer() -> None:
    record = record_of()
    pictures = pictures_of(record)
    odd = Pattern(f"previous{STEERING}", 0.5, 0.1)
    sites = tuple(
        replace(s, kind=f"self{STEERING}", patterns=tuple(odd for _ in s.heads))
        for s in pictures.sites
    )
    view = attention_view(record, replace(pictures, sites=sites))
    assert view is not None
    for site in json.loads(view.data)["sites"]:
        for text in (site["kind"], *site["words"]):
            assert clean(text) == text


def test_the_card_of_a_model_escapes_what_a_plan_says(tmp_path: Path) -> None:
    model = hp.MultiHeadAttention(8, 2)
    notes = ("<!-- headprune: end -->\n# Free!\n<script>", "![x](http://somewhere/x.png)")
    plan = hp.PruningPlan(hp.HeadMask.full(hp.find_sites(model)), notes=notes, selector="`x`\n# y")
    hp.save_pretrained(model, tmp_path, plan=plan)
    card = (tmp_path / "README.md").read_text()
    assert card.count("<!-- headprune: end -->") == 1
    assert "\n# " not in card
    assert "<script" not in card.replace("\\<script", "")
    assert "![x]" not in card


@pytest.mark.parametrize("text", [r"$\frac$", "$x_1$", "$", r"\$"])
def test_pictures_draw_what_files_say_letter_by_letter(text: str, tmp_path: Path) -> None:
    """To matplotlib ``$`` begins a formula, and one that it cannot read ends the picture."""
    from matplotlib.figure import Figure

    from headprune.report.agreement import draw_agreement
    from headprune.report.tradeoff import draw_tradeoff, sweep_view

    record = nasty_record(text)
    table = sweep_table()
    first = table.keys[0]
    rows = [{**row, first: f"{row[first]}{text}"} for row in table.to_dict()["rows"]]
    table = SweepTable.from_dict({**table.to_dict(), "name": text, "rows": rows})
    measure = Measure(0.5)
    found = Agreement((text, "b"), 2, 5, 0.95, (Pair(0, 1, measure, measure, measure),), (text,))
    figure = Figure()
    axes = figure.subplots(1, 2)
    hp.plot.head_map(record.scores, record.plan, ax=axes[0])
    hp.plot.tradeoff(table, ax=axes[1])
    figure.savefig(tmp_path / "maps.png")
    draw_agreement(found, tmp_path / "agreement.png")
    draw_tradeoff(table, tmp_path / "tradeoff.svg")
    assert sweep_view(table).title.startswith(f"{text}: "), "a page has it as it is"
    drawn = [label.get_text() for label in axes[0].get_yticklabels()]
    assert all(words.replace(r"\$", "$").endswith(text.replace(r"\$", "$")) for words in drawn)


def test_pictures_hand_no_name_to_tex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``text.usetex`` a name would be LaTeX, which reads files; here it would fail, or not be
    installed."""
    import matplotlib
    from matplotlib import texmanager
    from matplotlib.figure import Figure

    from headprune.report.agreement import draw_agreement
    from headprune.report.tradeoff import draw_tradeoff
    from tests.report_records import maps_of

    def made(_: object, tex: str, *__: object, **___: object) -> None:
        given.append(tex)
        raise RuntimeError("LaTeX was asked")

    given: list[str] = []
    for name in ("make_tex", "make_dvi", "make_png", "get_text_width_height_descent"):
        monkeypatch.setattr(texmanager.TexManager, name, made)
    text = r"\input{secret}"
    record, maps, measure = nasty_record(text), maps_of(record_of(), 1, 4), Measure(0.5)
    maps = replace(
        maps, sites=tuple(replace(site, site=f"{site.site}{text}") for site in maps.sites)
    )
    found = Agreement((text, "b"), 2, 5, 0.95, (Pair(0, 1, measure, measure, measure),), (text,))
    table = replace(sweep_table(), name=text, metric=text)
    with matplotlib.rc_context({"text.usetex": True}):
        figure = Figure()
        axes = figure.subplots(3, 3)
        hp.plot.head_map(record.scores, record.plan, ax=axes[0, 0])
        hp.plot.tradeoff(table, ax=axes[0, 1])
        hp.plot.attention(maps, next(iter(maps)), ax=axes[0, 2])
        hp.plot.attention(maps, maps.sites[0].site, axes=axes[1:2])
        hp.plot.agreement(found, axes=axes[2])
        draw_agreement(found, tmp_path / "agreement.png")
        draw_tradeoff(table, tmp_path / "tradeoff.svg")
    texts = [t for t in figure.findobj(matplotlib.text.Text) if "secret" in t.get_text()]
    assert len(texts) >= 5
    assert not any(t.get_usetex() for t in texts)
    assert not given


def test_a_table_for_a_spreadsheet_holds_no_formula(tmp_path: Path) -> None:
    from pyarrow import parquet

    wide = [f"{sign}1" for sign in "\uff1d\uff0b\uff0d\uff20"]
    cells = [
        "=cmd|' /C calc'!A0",
        "@SUM(A1)",
        "+x",
        "-2+3+cmd|' /C calc'!A0",
        "\t=1",
        *wide,
        "-0.5",
        "taylor",
        None,
    ]
    rows = [{"scorer": cell, "drop": -0.5, "=1": 3} for cell in cells]
    _write_columns(rows, tmp_path / "table")
    head, *lines = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    assert head == '"scorer","drop","\'=1"'
    starts = [line.split(",")[0].strip('"')[:1] for line in lines]
    assert starts[:11] == ["'"] * 9 + ["-", "t"]
    assert all(line.endswith(",-0.5,3") for line in lines)
    assert parquet.read_table(tmp_path / "table.parquet").to_pylist() == rows, (
        "a table for programs is as it was"
    )
    _write_columns([{"scorer": "\n=1"}, {"scorer": "\r=1"}], tmp_path / "broken", (".csv",))
    assert (tmp_path / "broken.csv").read_bytes() == b'"scorer"\n"\'\n=1"\n"\'\r=1"\n'
