"""Hostile files by hand: nothing in them is run, or believed beyond its folder.
What is shown of them is in test_hostile_words.py."""

import ast
import json
import pickle
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
import yaml

import headprune as hp
from headprune.checkpoints.streaming import prune_checkpoint
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.errors import CheckpointError, HeadPruneError, InvalidValue
from headprune.core.files import finish_renames
from headprune.core.scores import ModelFingerprint
from headprune.data.models import open_model
from headprune.data.sound import clip_of
from headprune.recipes.reading import _Loader, parse_yaml
from headprune.recipes.validate import load_recipe
from headprune.recovery._checkpoint import FILE, Keeper
from headprune.run.dry import dry_run
from headprune.run.journal import Journal
from headprune.run.progress import Finished, take_folder
from headprune.sweep.base import Base
from headprune.sweep.runs import PlannedRun, SweepRun
from headprune.sweep.tables import write_timings
from tests.command_line import call, done, refused
from tests.fuzzing import changed
from tests.report_records import record_of, sweep_table
from tests.tiny_models import bert
from tests.tiny_recipe import TINY

PACKAGE = Path(hp.__file__).parent


@pytest.fixture
def hacked(tmp_path):
    """A file that code out of a file would make; it must not be there at the end."""
    path = tmp_path / "HACKED"
    yield path
    assert not path.exists(), "code out of a file was run"


@pytest.fixture
def folder(tmp_path):
    """The folder of a sound model, for a test to damage."""
    return bert(tmp_path / "model")


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
def test_hostile_yaml_is_refused_in_words_and_soon(what, tmp_path, hacked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(HOSTILE_YAML[what], encoding="utf-8")
    start = time.process_time()
    assert 0 < len(refused("validate recipe.yaml")) < 20_000
    assert time.process_time() - start < 5


def test_overrides_are_read_within_the_same_limits():
    for text in ("!!python/name:os.system", "[" * 5000, "&a [*a]"):
        with pytest.raises(InvalidValue):
            load_recipe("digits-vit", [f"name={text}"])
    assert parse_yaml("[1, {a: 2}]", "here") == [1, {"a": 2}]  # what is sound is read


def test_the_one_yaml_loader_is_a_safe_one():
    assert issubclass(_Loader, yaml.SafeLoader)
    tags = [tag for tag in _Loader.yaml_constructors if tag]
    assert not any(tag.startswith("tag:yaml.org,2002:python") for tag in tags)


# ---------------------------------------------------------------- no code of ours could

FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "input"),
    *("os.system", "os.popen", "marshal.loads", "shelve.open"),
}
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
YAML_LOADERS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def danger(node):
    """Whether a call could run data: a loader of pickles, evaluation, a shell, others' modules."""
    name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
    first, last = name.split(".")[0], name.split(".")[-1]
    switches = ("allow_pickle", "shell", "trust_remote_code")
    return (
        name in FORBIDDEN
        or name.endswith((".from_pickle", ".read_pickle", "joblib.load"))
        or (first in LOADERS and last in ("load", "loads", "Unpickler"))
        or (name == "torch.load" and given.get("weights_only") != "True")
        or any(given.get(switch, "False") != "False" for switch in switches)
        or (name in YAML_LOADERS and "_Loader" not in ast.unparse(node))
    )


def dangers(source):
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [ast.unparse(node) for node in nodes if danger(node)]


#: These hand on the user's own ``--trust-remote-code``, which is off by default.
ON_REQUEST = {"cli/serve_check.py", "serving/opening.py", "serving/servers.py"}


def test_no_file_of_ours_could_run_data():
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).as_posix() in ON_REQUEST:
            continue
        assert dangers(path.read_text(encoding="utf-8")) == [], path


def test_the_look_for_dangers_sees_them():
    bad = (
        *("pickle.load(f)", "torch.load(f)", "eval(x)", "yaml.load(t, yaml.Loader)"),
        *("joblib.load(f)", "np.load(f, allow_pickle=True)", "subprocess.run(c, shell=True)"),
        "kind.from_pretrained(p, trust_remote_code=trusted)",
    )
    assert dangers("\n".join(bad)) == list(bad)
    good = ("torch.load(f, weights_only=True)", "model.eval()", "torch.compile(m)", "import pickle")
    assert dangers("\n".join(good)) == []


# ---------------------------------------------------------------- pickles


class Evil:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("bare", [False, True])
def test_a_pickle_in_place_of_weights_runs_nothing(bare, folder, tmp_path, hacked):
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    torch.save({"weight": Evil(hacked)}, weights)
    if bare:
        weights.write_bytes(pickle.dumps(Evil(hacked)))
    hp.PruningPlan(hp.HeadMask(())).save(tmp_path / "plan.json")
    prune = f"prune --model {folder} --plan {tmp_path / 'plan.json'} --out {tmp_path / 'out'}"
    for line in (f"inspect {folder}", f"bench {folder} {folder}", prune, f"{prune} --streaming"):
        result = call(line, input="y\n")
        assert result.exit_code == 2, result.output
        assert not hacked.exists(), line
    with pytest.raises(CheckpointError):
        hp.from_pretrained(folder)


# PEFT asks Transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_pickle_in_place_of_adapters_runs_nothing(folder, tmp_path, hacked):
    peft = pytest.importorskip("peft")
    model = transformers.BertForSequenceClassification.from_pretrained(folder)
    adapters = tmp_path / "adapters"
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    peft.get_peft_model(model, config).save_pretrained(adapters)
    open_model(str(adapters))  # sound so far
    (adapters / "adapter_model.safetensors").unlink()
    torch.save({"weight": Evil(hacked)}, adapters / "adapter_model.bin")
    with pytest.raises(HeadPruneError):
        open_model(str(adapters))


def test_a_pickle_in_place_of_a_training_runs_nothing(tmp_path, hacked):
    torch.save({"identity": {"a": "b"}, "weights": Evil(hacked)}, tmp_path / FILE)
    with pytest.raises(CheckpointError):
        Keeper(tmp_path, 1, {"a": "b"}).load()


# ---------------------------------------------------------------- code beside weights


def add_code(folder, hacked, **config):
    """Puts code into a model's folder that its configuration and its tokenizer's ask for."""
    classes = "class Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    code = f"from pathlib import Path\nPath({str(hacked)!r}).touch()\n{classes}"
    (folder / "evil.py").write_text(code)
    kinds = ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForCausalLM")
    auto = {"AutoConfig": "evil.Config", **dict.fromkeys(kinds, "evil.Model")}
    changed(folder / "config.json", auto_map=auto, **config)
    tools = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    changed(folder / "tokenizer_config.json", auto_map=tools, tokenizer_class="Unheard")


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "unheard-of", "architectures": ["Unheard"]}], ids=["known", "new"]
)
def test_no_command_runs_code_out_of_a_folder(config, folder, tmp_path, hacked):
    add_code(folder, hacked, **config)
    rows, recipe = tmp_path / "rows.csv", tmp_path / "recipe.yaml"
    rows.write_text("text,label\n" + "".join(f"w{i} w{i % 7},{i % 2}\n" for i in range(40)))
    raw = {**TINY, "task": "text_classification", "model": {"path": str(folder)}, "train": None}
    parts = dict.fromkeys(("calibration", "holdout", "test_holdout"), 8)
    raw["data"] = {"path": str(rows), "text": "text", **parts}
    recipe.write_text(yaml.safe_dump(raw))
    plan = hp.PruningPlan(hp.HeadMask(())).save(tmp_path / "plan.json")
    out = tmp_path / "out"
    for line in (
        f"inspect {folder}",
        f"bench {folder} {folder} --seconds 0.1 --length 4 --batch 1",
        f"prune --model {folder} --plan {plan} --out {out}",
        f"prune --model {folder} --plan {plan} --out {out} --streaming",
        f"prune --model {folder} --data {rows} --keep 0.5 --out {out / 'data'}",
        f"init --model {folder} --data {rows} --out -",
        f"validate {recipe}",
        f"show {recipe}",
        f"run {recipe} --dry-run",
        f"run {recipe} --out {out / 'run'}",
        f"score {recipe}",
        f"sweep {recipe} --grid keep=0.5 --out {out / 'sweep'}",
    ):
        result = call(line, input="y\n" * 5)
        assert not hacked.exists(), line
        assert "Traceback" not in result.output
        assert "Do you wish to run" not in result.output, line
        if config and not line.startswith(("validate", "show")):
            assert result.exit_code == 2, (line, result.output)


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "somebody/kernel"},
        {"experts_implementation": "somebody/kernel"},
        {"text_config": {"attn_implementation": {"": "somebody/kernel"}}},
        {"text_config": {"_attn_implementation": [["a/kernel"]]}},
    ],
)
def test_a_kernel_that_a_configuration_names_is_not_fetched(config, folder):
    changed(folder / "config.json", **config)
    with pytest.raises(CheckpointError, match="the name of an implementation that is installed"):
        open_model(str(folder))


# ---------------------------------------------------------------- adapters

ENDLESS, SOON = "(([a-z.0-9]+)+)+!", "must be names of modules, or patterns that match quickly"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"megatron_core": "evil", "megatron_config": {}}, "need no Megatron"),
        ({"megatron_core": "evil", "megatron_config": {"some": "module"}}, "need no Megatron"),
        ({"peft_type": "XLORA", "adapters": {"a": "/elsewhere"}}, "that can be merged"),
        ({"base_model_name_or_path": "package:some_package/m"}, "is a folder or on the hub"),
        ({"target_modules": ENDLESS}, f"target_modules: {SOON}"),
        ({"target_modules": "a?" * 30}, f"target_modules: {SOON}"),
        ({"target_modules": ".*" * 6 + "!"}, f"target_modules: {SOON}"),
        ({"target_modules": "(?:){1000000000}"}, f"target_modules: {SOON}"),
        ({"target_modules": "(" * 5000 + ")" * 5000}, f"target_modules: {SOON}"),
        ({"target_modules": "a" * 200_000 + "+"}, f"target_modules: {SOON}"),
        ({"exclude_modules": ENDLESS}, f"exclude_modules: {SOON}"),
        ({"modules_to_save": [".*.*!"] * 2000}, f"modules_to_save: {SOON}"),
        ({"rank_pattern": {"([a-z.]+)+!)(x": 4}}, f"rank_pattern: {SOON}"),
        ({"alpha_pattern": {"query": 4, "(.+)+!": 4}}, f"alpha_pattern: {SOON}"),
    ],
)
def test_adapters_that_name_modules_folders_or_long_patterns_are_refused(config, words, tmp_path):
    pytest.importorskip("peft")
    usual = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")}
    usual |= {"target_modules": ["query"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**usual, **config}))
    with pytest.raises((CheckpointError, InvalidValue)) as refusal:
        open_model(str(tmp_path))
    assert words in str(refusal.value)


# ---------------------------------------------------------------- recipes


def test_a_recipe_imports_what_it_names_only_when_it_is_run(tmp_path, hacked, monkeypatch):
    code = f"from pathlib import Path\nPath({str(hacked)!r}).touch()\n"
    (tmp_path / "evil_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    own, recipe = tmp_path / "own.yaml", tmp_path / "recipe.yaml"
    named = {"import_path": "evil_module:build", "layouts": "evil_module:LAYOUTS"}
    own.write_text(yaml.safe_dump({**TINY, "model": named}))
    done(f"validate {own}")
    done(f"show {own}")
    # Nowhere else is a name one of a module.
    recipe.write_text(yaml.safe_dump({**TINY, "recover": [{"method": "lstsq"}]}))
    for place in (
        *("model.class_name", "model.path", "model.dtype", "data.path", "data.tokenizer"),
        *("score.scorer", "select.selector", "preset", "task", "device", "recover.0.method"),
    ):
        for name in ("evil_module", "evil_module:build", "package:evil_module"):
            with pytest.raises(HeadPruneError):
                dry_run(recipe, [f"{place}={name}"], say=lambda line: None)
            assert not hacked.exists(), (place, name)
    with pytest.raises(HeadPruneError):  # it is what is named where names of modules are
        dry_run(own, say=lambda line: None)
    assert hacked.exists()
    hacked.unlink()


@pytest.mark.parametrize(
    "name", ["../x", "..", "a/b", "a\\b", "/tmp/x", "", "a\0b", "a\n", "~", "-rf", "${description}"]
)
def test_the_name_of_a_recipe_is_no_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = {**TINY, "description": "../x", "name": name}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw))
    assert "name: must be" in refused("run recipe.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


# ---------------------------------------------------------------- paths out of files


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("plan", plan)
            for plan in ("../plan.json", "/x", "plans/../../x.json", "javascript:x", 5)
        ),
        *(("run", run) for run in ("../x", "/x", "a/b", "..", "")),
    ],
)
def test_a_table_names_nothing_outside_of_its_sweep(key, value, tmp_path):
    table = sweep_table()
    first = FrozenDict({**table.rows[0], key: value})
    replace(table, rows=(first, *table.rows[1:])).save(tmp_path / "table.json")
    for line in (f"report {tmp_path}", f"pick {tmp_path} --max-drop 0.5 --out {tmp_path}/out"):
        assert f"rows[0].{key}: must be the name of a" in refused(line)
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize("field", ["base", "plan", "outcome"])
def test_a_run_of_a_sweep_names_no_file_outside(field):
    told = {"base": "ab", "plan": "cd", "outcome": "ef", field: "../../x"}
    with pytest.raises(InvalidValue, match=f"SweepRun.{field}"):
        SweepRun(EMPTY, EMPTY, 0, EMPTY, status="done", **told)


@pytest.mark.parametrize("name", ["", "..", "/etc/passwd", "model/../../x", "a\0b"])
def test_what_is_done_names_no_file_outside_of_its_folder(name, tmp_path):
    files, noted = FrozenDict({name: "0" * 64}), hp.RunRecord("a", "running", "s", "c")
    said = "must be the path of a file inside the folder"
    with pytest.raises(InvalidValue, match=f"Finished.files: {said}"):
        Finished("ab", files, noted)
    with pytest.raises(InvalidValue, match=f"Base.files: {said}"):
        Base("ab", files, ModelFingerprint("a", "b"), EMPTY, EMPTY)
    # A run that was killed, with such a mark, goes on without what it says.
    replace(record_of(), status="running").save(tmp_path / "record.json")
    sound = Finished("ab", FrozenDict({"scores.json": "0" * 64}), noted)
    mark = sound.save(tmp_path / ".work" / "score.json")
    mark.write_text(mark.read_text().replace('"scores.json"', json.dumps(name)))
    take_folder(tmp_path, False, Journal("a", {}, tmp_path, lambda line: None, progress=False))
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [".work", "history.jsonl", "record.json"]


def test_times_that_are_none_are_passed_over(tmp_path):
    odd = (b"[1]", b"\xff\xfe", b"[" * 5000, b'{"kind": [], "key": "p", "seconds": 1}')
    times = (b"", b', "seconds": "soon"', b', "seconds": 1.5')
    lines = [*odd, *(b'{"kind": "plans", "key": "p"' + more + b"}" for more in times)]
    (tmp_path / "timings.jsonl").write_bytes(b"\n".join(lines))
    run = PlannedRun("r", EMPTY, EMPTY, 0, load_recipe("sst2-minilm"), "s", "p")
    write_timings([run], {"r": SweepRun(EMPTY, EMPTY, 0, EMPTY, "ab", "failed")}, tmp_path)
    assert (tmp_path / "timings.csv").read_text().splitlines()[1] == '"r",0,,1.5,'


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "", "\ud800", 5])
def test_an_index_names_no_file_outside_of_its_folder(name, folder, tmp_path):
    (tmp_path / "other").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "other" / "model.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": {"classifier.bias": name}})
    for file in ("pytorch_model.bin.index.json", "model.safetensors.index.json"):
        (folder / file).write_text(index)
        with pytest.raises(CheckpointError, match="index"):
            open_model(str(folder))
    (folder / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(CheckpointError, match="index"):
        prune_checkpoint(folder, hp.HeadMask(()), tmp_path / "out")


def test_a_manifest_names_no_file_outside_of_its_folder(folder, tmp_path):
    model = transformers.BertModel.from_pretrained(folder)
    ours = hp.save_pretrained(model, tmp_path / "ours", max_shard_size="2KB")
    shards = json.loads((ours / "headprune.json").read_text())["shards"]
    name = shards[0]["file"]
    (ours / name).rename(tmp_path / name)
    shards[0]["file"] = f"../{name}"
    changed(ours / "headprune.json", shards=shards)
    with pytest.raises(CheckpointError, match="a manifest of files in its folder"):
        hp.from_pretrained(ours)


def test_data_that_names_a_device_is_not_read_for_ever(tmp_path):
    for name in ("/dev/zero", "..", "a\0b"):
        with pytest.raises(InvalidValue, match="the path of a file that can be read"):
            clip_of(name, "row 0", tmp_path)


def test_a_panic_of_a_library_in_rust_is_told_in_words(folder, monkeypatch):
    panic = type("PanicException", (BaseException,), {})
    panics = Mock(side_effect=panic("no entry found for key"))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", panics)
    with pytest.raises(InvalidValue, match="no entry found for key"):
        open_model(str(folder))


@pytest.mark.parametrize(
    "gone", ['["../victim"]', '["/victim"]', '{"a": 1}', "[" * 5000, "[3]", "not JSON", '[".."]']
)
def test_what_a_killed_save_wrote_touches_nothing_outside(gone, tmp_path):
    """A folder may bring such leftovers along."""
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    precious = [tmp_path / "victim", elsewhere / "a"]
    elsewhere.mkdir()
    for path in precious:
        path.write_text("precious")
    place = model / ".model.0123abcd.whole.part"
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "a").write_text("evil")
    (place / ".gone.part").write_text(gone)
    finish_renames(model)
    (model / "sub").symlink_to(elsewhere)
    (place / ".gone.part").write_text("[]")
    finish_renames(model)
    place.rename(elsewhere / "whole")
    place.symlink_to(elsewhere / "whole")
    (model / "sub").unlink()
    finish_renames(model)
    assert [path.read_text() for path in precious] == ["precious"] * 2
    assert (elsewhere / "whole" / "sub" / "a").read_text() == "evil", "where it was"
    assert {path.name for path in model.iterdir()} == {place.name}
