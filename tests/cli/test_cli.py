"""The command line: output, exit codes, one message an error, and JSON where a machine may read."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import click
import pytest
import torch
import typer
import yaml

import headprune as hp
from headprune.cli._shared import guarded
from headprune.cli.main import COMMANDS, app
from tests.command_line import call, done, json_of, refused
from tests.terminals import HEADPRUNE
from tests.tiny_models import bert
from tests.tiny_recipe import TINY, interrupt_after


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    """A recipe that runs in a second or two: a tiny ViT on the digits."""
    data = {**TINY["data"], "holdout": 100, "test_holdout": 1400}
    steps = {"score": {"scorer": "taylor", "random_draws": 1}, "recover": [{"method": "mean_fold"}]}
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **steps, "data": data}))
    return path


@pytest.fixture(scope="module")
def finished(recipe_file, tmp_path_factory):
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    result = done(f"run {recipe_file} --out {out} --json")
    record = json.loads(result.stdout)
    assert (record["headprune"], record["status"]) == ("RunRecord", "done")
    assert "[prune]" in result.stderr
    return out


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny BERT that reads 16 tokens at most."""
    torch.manual_seed(0)
    return bert(tmp_path_factory.mktemp("bert"), max_position_embeddings=16)


# ---------------------------------------------------------------- start-up and help


def test_light_commands_import_no_torch_and_few_modules():
    """Modules are counted, not seconds, which depend on what else the machine does."""
    script = (
        "import sys\n"
        "from headprune.cli.main import main\n"
        "for line in ('', '--help', 'run --help', '--version', 'ls'):\n"
        "    sys.argv = ['headprune', *line.split()]\n"
        "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print('modules', len(sys.modules))\n"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    # Measured: 451; a Python without any import has about 60.
    assert int(ended.stdout.rsplit("modules ", 1)[1]) < 600


def test_version_says_what_a_bug_report_needs():
    lines = done("--version").stdout.splitlines()
    assert lines[0] == f"headprune {hp.__version__}"
    assert [line.split()[0] for line in lines[1:4]] == ["python", "torch", "transformers"]


def test_every_command_has_help_with_an_example_that_it_understands():
    overview = done("--help").stdout
    assert "--install-completion" in overview
    group = typer.main.get_command(app)
    for command, example in COMMANDS.items():
        name = command.__name__.replace("_", "-")
        words = example.split()
        assert words[:2] == ["headprune", name]
        # An unknown option or a missing argument is an error.
        group.get_command(click.Context(click.Command("x")), name).make_context(name, words[2:])
        text = " ".join(done(f"{name} --help").stdout.split())
        assert all(part in text for part in (" ".join(words), "--json", "--debug"))
        assert name in overview


# ---------------------------------------------------------------- reading commands


def test_ls_lists_every_registry():
    found = json_of("ls")
    assert list(found) == ["recipes", "presets", "layouts", "scorers", "selectors", "recoveries"]
    assert {"digits-vit", "trec-minilm", "llama-stories"} <= set(found["recipes"])
    assert list(found["layouts"]) == hp.layouts.registry.names()
    assert list(found["scorers"]) == hp.scoring.registry.names()
    assert list(found["selectors"]) == hp.selection.registry.names()
    assert list(found["recoveries"]) == hp.recovery.registry.names()
    text = done("ls").stdout
    for entries in found.values():
        assert all(entries.values())
        assert all(name in text for name in entries)


def test_show_gives_a_recipe_that_runs_as_it_is(tmp_path):
    shown = done("show llama-stories --set model.path=/some/folder").stdout
    assert yaml.safe_load(shown)["data"]["path"] == "/some/folder/stories.jsonl"
    (tmp_path / "shown.yaml").write_text(shown)
    assert done(f"show {tmp_path / 'shown.yaml'}").stdout == shown
    assert json_of("show digits-vit")["select"]["keep_heads"] == 16


def test_validate_many_with_all_their_errors(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\nscor: {}\nscore: {scorer: tailor}\n")
    result = call(f"validate digits-vit {bad}")
    assert result.exit_code == 2
    assert "digits-vit: valid" in result.stdout
    for words in ("Did you mean 'score'?", "Did you mean 'taylor'", "task: must be given"):
        assert words in result.stderr
    first, second = json.loads(call(f"validate digits-vit {bad} --json").stdout)
    assert (first["valid"], second["valid"]) == (True, False)
    named = {error["path"] for error in second["errors"]}
    assert {"scor", "score.scorer", "task", "model", "data", "select"} <= named
    done("validate digits-vit llama-stories trec-minilm")


# ---------------------------------------------------------------- running


def test_run_writes_everything_that_a_report_needs(finished, tmp_path):
    files = {"record.json", "history.jsonl", "rows.json", "plan.json", "scores.json", "recipe.yaml"}
    files |= {"scores.samples.safetensors", "report.html", "report.md", "attention.json"}
    files |= {"answers.json"}
    files |= {"scores-magnitude.json", "model", "base"}
    # The system may keep a lock, or not.
    assert {path.name for path in finished.iterdir()} - {".lock"} == files
    made = json_of(f"report {finished / 'record.json'} --out {tmp_path}")
    assert made["html"] == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page == (finished / "report.html").read_text()
    assert 'id="attention"' in page
    assert '<option value="2">magnitude</option>' in page


def test_a_report_needs_only_the_record_and_compares_several(finished, tmp_path):
    other, out = tmp_path / "other", tmp_path / "out"
    other.mkdir()
    shutil.copy(finished / "record.json", other)
    found = json_of(f"report {finished} {other} --out {out}")
    assert found["html"] == str(out / "comparison.html")
    assert (out / "comparison.md").read_text().startswith("# tiny · other\n")
    assert "--out: must be given" in refused(f"report {finished} {other}")
    done(f"report {other}")
    assert 'id="attention"' not in (other / "report.html").read_text()
    (other / "attention.json").write_text("{")
    assert "attention.json" in refused(f"report {other}")


def test_run_does_not_overwrite(recipe_file, finished):
    message = refused(f"run {recipe_file} --out {finished}")
    assert "a finished run" in message
    assert "--overwrite" in message


def test_scoring_stops_when_the_set_is_settled(recipe_file):
    command = f"score {recipe_file} --set data.calibration=256 --set score.batch_size=16"
    option, setting = (
        hp.HeadScores.from_dict(json_of(f"{command} {words}"))
        for words in ("--until-stable 3", "--set score.until.k=3")
    )
    assert option == setting
    assert "the set of the 3 lowest is" in option.notes[-1]
    assert "score.until.k: must be" in refused(f"{command} --until-stable 0")


def test_score_then_prune_then_bench(recipe_file, finished, tmp_path):
    scores, small, base = tmp_path / "scores.json", tmp_path / "small", finished / "base"
    found = json_of(f"score {recipe_file} --out {scores}")
    assert found == hp.HeadScores.load(scores).to_dict()

    command = f"prune --model {base} --scores {scores} --out {tmp_path}"
    report = json_of(f"{command}/small --keep 0.5")["report"]
    assert sum(map(len, report["removed"].values())) == 4
    assert report["params_after"] < report["params_before"]
    assert report["max_difference"] <= 1e-5
    assert report["warnings"] == []
    assert "a new or an empty folder" in refused(f"{command}/small --keep 3")
    report = json_of(f"{command}/params --keep-params 0.9")["report"]
    assert 0 < report["params_after"] <= 0.9 * report["params_before"]
    assert "must be at least 2, got 1" in refused(f"{command}/none --keep 1")
    report = json_of(f"{command}/free --keep 1 --min-heads 0")["report"]
    assert sum(map(len, report["removed"].values())) == 7

    measured = json_of(f"bench {base} {small} --batch 1 --batch 2 --seconds 0.01")
    assert [row["batch"] for row in measured["speed"]] == [1, 2]
    heads = next(row for row in measured["size"] if row["name"] == "heads")
    assert (heads["original"], heads["pruned"]) == (8, 4)


def test_prune_by_plan_equals_the_run(finished, tmp_path):
    small = tmp_path / "small"
    result = done(
        f"prune --model {finished / 'base'} --plan {finished / 'plan.json'} --out {small}"
    )
    assert "removed 4 heads" in result.stdout
    kept = [site.heads for site in hp.find_sites(hp.from_pretrained(small))]
    assert kept == [site.heads for site in hp.find_sites(hp.from_pretrained(finished / "model"))]


def test_bench_takes_threads_and_lengths_that_the_models_can_read(encoder, monkeypatch):
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    command = f"bench {encoder} {encoder} --seconds 0.01 --batch 1"
    done(f"{command} --length 16 --threads 3")
    assert taken == [3]
    refused(f"{command} --length 4 --threads 0")
    for lengths in ("", "--length 8 --length 17"):  # 128 by default
        assert "--length: must be at most 16" in refused(f"{command} {lengths}")


# ---------------------------------------------------------------- bad input

GIVEN = "prune --model ./none --out x"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run", "Missing argument"),
        ("rum", "No such command"),
        ("ls --jsn", "No such option"),
        ("run digits-vit --set score.scorer=tailor", "Did you mean 'taylor'"),
        ("run digits-vit --set scoer.x=1", "Did you mean 'score'"),
        ("run digits-vit --set nonsense", "written key=value"),
        ("run digits-vit --set select.keep_heads=0", "select.keep_heads: must be a count >= 1"),
        ("show none.yaml", "existing recipe file"),
        ("validate none.yaml", "existing recipe file"),
        ("inspect ./none", "MODEL: must be an existing folder"),
        ("report none.json", "a readable RunRecord file"),
        (GIVEN, "one of --plan, --scores, --data"),
        (f"{GIVEN} --data a --plan b", "--plan and --data"),
        (f"{GIVEN} --data a", "--keep: must be given with --data"),
        (f"{GIVEN} --scores s.json", "--keep: must be given"),
        (f"{GIVEN} --scores s.json --keep half", "a count of heads"),
        (
            f"{GIVEN} --scores s.json --keep 1 --keep-macs 0.9",
            "must be the only budget, got --keep and --keep-macs",
        ),
        (f"{GIVEN} --plan p.json --keep 1", "left out with --plan"),
        (f"{GIVEN} --plan p.json --min-heads 1", "left out with --plan"),
        (f"{GIVEN} --plan p.json --task regression", "given with --data only"),
        ("bench ./a ./b", "ORIGINAL: must be an existing folder"),
        ("bench . . --device gpu", "auto, cpu or cuda"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(line, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(line)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_plan_for_another_model(finished, encoder, tmp_path):
    small = tmp_path / "small"
    message = refused(f"prune --model {encoder} --plan {finished / 'plan.json'} --out {small}")
    assert "plan: must be for a model with" in message
    assert not small.exists()


@pytest.mark.parametrize(
    "text", ["", "{", '{"headprune": "HeadScores"}', '{"headprune": "RunRecord", "version": 99}']
)
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    assert "record.json" in refused(f"report {tmp_path / 'record.json'}")
    assert not (tmp_path / "report.html").exists()


def test_a_damaged_checkpoint_is_named(finished, tmp_path):
    folder = shutil.copytree(finished / "model", tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "model.safetensors" in refused(f"inspect {folder}")


# ---------------------------------------------------------------- failures and interrupts


def test_failures_exit_with_1_and_debug_shows_the_traceback(recipe_file, tmp_path, monkeypatch):
    from headprune.run import stages

    def broken(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(stages, "cut", broken)
    result = call(f"run {recipe_file} --out {tmp_path}")
    assert result.exit_code == 1
    assert "error: RuntimeError: no such luck (--debug shows where)" in result.stderr
    assert "Traceback" not in result.stderr
    assert hp.RunRecord.load(tmp_path / "record.json").error == "RuntimeError: no such luck"
    result = call(f"run {recipe_file} --out {tmp_path} --debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    done(f"report {tmp_path}")  # a broken run has a report too


def test_ctrl_c_writes_a_record_and_exits_with_1(recipe_file, tmp_path, monkeypatch):
    interrupt_after(2, monkeypatch)
    result = call(f"run {recipe_file} --out {tmp_path} --debug")
    assert result.exit_code == 1
    assert result.stderr.endswith("interrupted\n")
    assert "Traceback" not in result.stderr
    found = hp.RunRecord.load(tmp_path / "record.json")
    assert (found.status, found.stage) == ("interrupted", "train")
    assert found.rows["train"]["rows"] > 0
    done(f"report {tmp_path}")


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise on Windows")
def test_a_reader_that_went_away_is_no_error_to_tell_of():
    """``headprune ls | head``: the first line is all that is read."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command, errors = [*HEADPRUNE, "ls"], subprocess.PIPE
        ended = subprocess.run(command, stdout=writing, stderr=errors, timeout=120, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.filterwarnings("default")  # as outside of the tests, where a warning is no error
def test_only_warnings_that_are_for_users_are_shown(capsys):
    with guarded(False):
        warnings.warn("the weights are others", UserWarning, stacklevel=1)
        warnings.warn("this will go", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: the weights are others\n"
