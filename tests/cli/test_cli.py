"""The command line: output, exit codes, one message an error, and JSON where a machine may read."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

import headprune as hp
from headprune.cli._shared import guarded
from headprune.cli.main import app

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 16,
}
COMMANDS = (
    *(
        "run",
        "prune",
        "inspect",
        "init",
        "ls",
        "show",
        "validate",
        "score",
        "agree",
        "explain",
        "diff",
    ),
    *("sweep", "pick", "bench", "report"),
)


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def console(*arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from headprune.cli.main import main; main()",
        *map(str, arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that runs in a second or two: a tiny ViT on the digits."""
    vit = {**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 1}
    raw = {
        "name": "tiny",
        "description": "for tests",
        "task": "image_classification",
        "device": "cpu",
        "model": {"class_name": "ViTForImageClassification", "config": vit},
        "data": {"path": "sklearn:digits", "holdout": 100, "test_holdout": 1400, "calibration": 32},
        "train": {"epochs": 1, "batch_size": 64},
        "score": {"scorer": "taylor", "random_draws": 1},
        "select": {"keep_heads": 0.5},
        "recover": [{"method": "mean_fold"}],
    }
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def finished(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    result = call("run", recipe_file, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["headprune"], record["status"]) == ("RunRecord", "done")
    assert "[prune]" in result.stderr
    return out


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    BertForSequenceClassification(
        BertConfig(vocab_size=30, max_position_embeddings=16, **SMALL)
    ).save_pretrained(folder)
    return folder


# --- start-up
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["--version"], ["ls"]])
def test_light_commands_import_no_torch_and_few_modules(arguments: list[str]) -> None:
    # Modules are counted, not seconds: seconds depend on what else the machine does.
    # `benchmarks/startup.py` measures seconds.
    script = (
        "import sys\n"
        f"sys.argv = ['headprune', *{arguments!r}]\n"
        "from headprune.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print('modules', len(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    modules = int(done.stdout.rsplit("modules ", 1)[1])
    # Measured: 232 to 451; a Python without any import has about 60.
    assert modules < 600


def test_help_names_every_command() -> None:
    text = call("--help").stdout
    assert all(command in text for command in COMMANDS)


def test_version_says_what_a_bug_report_needs() -> None:
    lines = call("--version").stdout.splitlines()
    found = dict(line.split(" ", 1) for line in lines)
    assert lines[0] == f"headprune {hp.__version__}"
    assert list(found) == ["headprune", "python", "torch", "transformers", "platform", "device"]
    assert found["torch"] == torch.__version__, "with its build, such as +cpu"
    assert found["python"] == platform.python_version()
    assert "cores" in found["device"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "--debug" in result.stdout


# --- reading commands
# --------------------------------------------------------------------------------------------


def test_ls_lists_every_registry() -> None:
    found = json.loads(call("ls", "--json").stdout)
    assert list(found) == ["recipes", "presets", "layouts", "scorers", "selectors", "recoveries"]
    assert {"digits-vit", "trec-minilm", "llama-stories"} <= set(found["recipes"])
    assert list(found["layouts"]) == hp.layouts.registry.names()
    assert list(found["scorers"]) == hp.scoring.registry.names()
    assert list(found["selectors"]) == hp.selection.registry.names()
    assert list(found["recoveries"]) == hp.recovery.registry.names()
    assert all(line for entries in found.values() for line in entries.values())
    text = call("ls").stdout
    assert all(name in text for entries in found.values() for name in entries)


def test_show_gives_a_recipe_that_runs_as_it_is(tmp_path: Path) -> None:
    result = call("show", "llama-stories", "--set", "model.path=/some/folder")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["data"]["path"] == "/some/folder/stories.jsonl"
    (tmp_path / "shown.yaml").write_text(result.stdout)
    assert call("show", tmp_path / "shown.yaml").stdout == result.stdout
    assert json.loads(call("show", "digits-vit", "--json").stdout)["select"]["keep_heads"] == 16


def test_validate_many_with_all_their_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\nscor: {}\nscore: {scorer: tailor}\n")
    result = call("validate", "digits-vit", bad)
    assert result.exit_code == 2
    assert "digits-vit: valid" in result.stdout
    for words in (
        "Did you mean 'score'?",
        "Did you mean 'taylor'",
        "task: must be given",
        "model: must be given",
    ):
        assert words in result.stderr
    first, second = json.loads(call("validate", "digits-vit", bad, "--json").stdout)
    assert (first["valid"], second["valid"]) == (True, False)
    assert {"scor", "score.scorer", "task", "model", "data", "select"} <= {
        e["path"] for e in second["errors"]
    }
    assert call("validate", "digits-vit", "llama-stories", "trec-minilm").exit_code == 0


def test_inspect(bert: Path, tmp_path: Path) -> None:
    found = json.loads(call("inspect", bert, "--json").stdout)
    assert [(row["heads"], row["units"], row["layout"]) for row in found["sites"]] == [
        (4, 4, "bert")
    ] * 2
    assert found["totals"]["heads"] == 8
    assert 0 < found["totals"]["prunable_params"] < found["totals"]["params"]
    assert found["not_taken"] == []
    text = call("inspect", bert).stdout
    assert "bert.encoder.layer.1.attention" in text
    assert "8 heads in 8 prune units" in text


class OddAttention(torch.nn.Module):
    """Attention that no layout describes."""

    def __init__(self) -> None:
        super().__init__()
        self.W_q = torch.nn.Linear(8, 8)


def test_inspect_says_why_a_module_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from headprune.data import models

    model = torch.nn.Sequential(hp.MultiHeadAttention(8, 2), OddAttention())
    monkeypatch.setattr(models, "open_model", lambda path: model)
    result = call("inspect", "odd")
    assert result.exit_code == 0
    assert "2 heads in 2 prune units" in result.stdout
    assert "not taken: 1 (OddAttention; near to no layout, made of W_q)" in result.stderr
    (other,) = json.loads(call("inspect", "odd", "--json").stdout)["not_taken"]
    assert (other["module"], other["class"]) == ("1", "OddAttention")


# --- running
# -----------------------------------------------------------------------------------------------------


def test_run_leaves_everything_and_prints_the_record(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    files = {
        "record.json",
        "history.jsonl",
        "rows.json",
        "plan.json",
        "scores.json",
        "scores.samples.safetensors",
    }
    files |= {"report.html", "report.md", "recipe.yaml", "attention.json", "scores-magnitude.json"}
    assert names - {".lock"} == files | {"model", "base"}  # which the system may keep, or not
    assert (
        call("report", finished / "record.json", "--out", finished.parent / "again").exit_code == 0
    )
    again = (finished.parent / "again" / "report.html").read_text()
    assert again == (finished / "report.html").read_text()
    assert json.loads(call("report", finished, "--json").stdout)["html"].endswith("report.html")
    assert 'id="attention"' in again
    assert '<option value="2">magnitude</option>' in again


def test_records_are_compared_on_one_page(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "record.json").write_text((finished / "record.json").read_text())
    result = call("report", finished, other, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["html"] == str(tmp_path / "out" / "comparison.html")
    assert (tmp_path / "out" / "comparison.md").read_text().startswith("# tiny · other\n")
    result = call("report", finished, other)
    assert result.exit_code == 2
    assert "--out: must be given, to compare several records" in result.stderr


def test_a_report_without_what_lies_beside_it_still_works(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text((finished / "record.json").read_text())
    assert call("report", tmp_path).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert 'id="heads"' in page
    assert 'id="attention"' not in page
    (tmp_path / "attention.json").write_text("{")
    result = call("report", tmp_path)
    assert result.exit_code == 2
    assert "attention.json" in result.stderr


def test_run_does_not_overwrite(recipe_file: Path, finished: Path) -> None:
    result = call("run", recipe_file, "--out", finished)
    assert result.exit_code == 2
    assert "a finished run" in result.stderr
    assert "--overwrite" in result.stderr


def test_scoring_stops_when_the_set_is_settled(recipe_file: Path) -> None:
    more = ["--set", "data.calibration=256", "--set", "score.batch_size=16", "--json"]
    scores = [
        hp.HeadScores.from_json(result.stdout)
        for options in (["--until-stable", 3], ["--set", "score.until.k=3"], [])
        if (result := call("score", recipe_file, *options, *more)).exit_code == 0
    ]
    assert len(scores) == 3
    assert scores[0] == scores[1]
    assert "the set of the 3 lowest is" in scores[0].notes[-1]
    assert scores[2].notes == ()
    refused = call("score", recipe_file, "--until-stable", 0)
    assert refused.exit_code == 2
    assert "score.until.k: must be greater than or equal to 1" in refused.stderr


def test_score_then_prune_then_bench(recipe_file: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    result = call("score", recipe_file, "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == hp.HeadScores.load(out).to_dict()

    small = tmp_path / "small"
    base = ["prune", "--model", finished / "base", "--out", small]
    result = call(*base, "--scores", out, "--keep", "0.5", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)["report"]
    assert sum(map(len, report["removed"].values())) == 4
    assert report["params_after"] < report["params_before"]
    assert report["max_difference"] <= 1e-5
    assert report["warnings"] == []
    again = call(*base, "--scores", out, "--keep", "3")
    assert again.exit_code == 2
    assert "a new or an empty folder" in again.stderr
    one_each = call(
        *base[:-1],
        tmp_path / "other",
        "--scores",
        out,
        "--keep-params",
        "0.9",
        "--min-heads",
        2,
        "--json",
    )
    assert one_each.exit_code == 0, one_each.stderr
    found = json.loads(one_each.stdout)["report"]
    assert 0 < found["params_after"] <= 0.9 * found["params_before"]
    none = call(*base[:-1], tmp_path / "none", "--scores", out, "--keep", 1)
    assert none.exit_code == 2
    assert "must be at least 2, got 1" in none.stderr
    free = call(
        *base[:-1], tmp_path / "free", "--scores", out, "--keep", 1, "--min-heads", 0, "--json"
    )
    assert free.exit_code == 0, free.stderr
    assert sum(map(len, json.loads(free.stdout)["report"]["removed"].values())) == 7

    timing = [
        "bench",
        finished / "base",
        small,
        "--batch",
        1,
        "--batch",
        2,
        "--seconds",
        0.01,
        "--json",
    ]
    measured = json.loads(call(*timing).stdout)
    assert [row["batch"] for row in measured["speed"]] == [1, 2]
    heads = next(row for row in measured["size"] if row["name"] == "heads")
    assert (heads["original"], heads["pruned"]) == (8, 4)
    assert "batch 2" in call(*timing[:-1]).stdout


def test_prune_by_plan_equals_the_run(finished: Path, tmp_path: Path) -> None:
    result = call(
        "prune",
        "--model",
        finished / "base",
        "--plan",
        finished / "plan.json",
        "--out",
        tmp_path / "small",
    )
    assert result.exit_code == 0, result.stderr
    assert "removed 4 heads" in result.stdout
    kept = [site.heads for site in hp.find_sites(hp.from_pretrained(tmp_path / "small"))]
    assert kept == [site.heads for site in hp.find_sites(hp.from_pretrained(finished / "model"))]


# --- bad input
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "digit-vit"], "Did you mean 'digits-vit'"),
        (
            ["run", "digits-vit", "--set", "score.scorer=tailor"],
            "score.scorer: .*|Did you mean 'taylor'",
        ),
        (["run", "digits-vit", "--set", "scoer.x=1"], "Did you mean 'score'"),
        (["run", "digits-vit", "--set", "nonsense"], "written key=value"),
        (
            ["run", "digits-vit", "--set", "select.keep_heads=0"],
            "select.keep_heads: must be a count >= 1",
        ),
        (["show", "none.yaml"], "existing recipe file"),
        (["validate", "none.yaml"], "existing recipe file"),
        (["inspect", "./none"], "MODEL: must be an existing folder"),
        (["report", "none.json"], "a readable RunRecord file"),
        (["prune", "--model", "./none", "--out", "x"], "one of --plan, --scores, --data"),
        (
            ["prune", "--model", "./none", "--out", "x", "--scores", "s.json"],
            "--keep: must be given",
        ),
        (
            ["prune", "--model", "./none", "--out", "x", "--scores", "s.json", "--keep", "half"],
            "a count of heads",
        ),
        (
            ["prune", "--model", "./none", "--out", "x", "--plan", "p.json", "--keep", "1"],
            "left out with --plan",
        ),
        (
            ["prune", "--model", "./none", "--out", "x", "--plan", "p.json", "--min-heads", "1"],
            "left out with --plan",
        ),
        (
            [
                "prune",
                "--model",
                "./none",
                "--out",
                "x",
                "--scores",
                "s.json",
                "--keep",
                "1",
                "--keep-macs",
                "0.9",
            ],
            "got --keep and --keep-macs",
        ),
        (["bench", "./a", "./b"], "ORIGINAL: must be an existing folder"),
        (["bench", ".", ".", "--device", "gpu"], "auto, cpu or cuda"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert any(part in result.stderr for part in words.replace(".*", "").split("|"))
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_usage_errors_are_bad_input_too() -> None:
    assert call("run").exit_code == 2
    assert call("rum").exit_code == 2
    assert call("ls", "--jsn").exit_code == 2


def test_plan_for_another_model(finished: Path, bert: Path, tmp_path: Path) -> None:
    result = call(
        "prune", "--model", bert, "--plan", finished / "plan.json", "--out", tmp_path / "small"
    )
    assert result.exit_code == 2
    assert "plan: must be for a model with" in result.stderr
    assert not (tmp_path / "small").exists()


@pytest.mark.filterwarnings("default")  # as outside of the tests, where a warning is no error
def test_plan_for_other_weights_is_a_warning(finished: Path, tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    model = ViTForImageClassification.from_pretrained(finished / "base")
    with torch.no_grad():
        model.classifier.weight.add_(1.0)
    model.save_pretrained(tmp_path / "other")
    common = ["prune", "--model", tmp_path / "other", "--plan", finished / "plan.json"]
    result = call(*common, "--out", tmp_path / "small")
    assert result.exit_code == 0, result.stderr
    assert (
        "warning: the plan was made for a model of the same structure with other weights"
        in result.stderr
    )


@pytest.mark.parametrize(
    "text", ["{", '{"headprune": "HeadScores"}', '{"headprune": "RunRecord", "version": 99}', ""]
)
def test_corrupt_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    result = call("report", tmp_path / "record.json")
    assert result.exit_code == 2
    assert "record.json" in result.stderr
    assert not (tmp_path / "report.html").exists()


def test_damaged_checkpoint(finished: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(finished / "model", tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    result = call("inspect", folder)
    assert result.exit_code == 2
    assert "model.safetensors" in result.stderr


def test_a_model_without_known_attention(tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetModel

    ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])).save_pretrained(
        tmp_path
    )
    result = call("inspect", tmp_path)
    assert result.exit_code == 2
    assert "must be a model with attention that headprune knows" in result.stderr


def test_failures_exit_with_1_and_debug_shows_the_traceback(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headprune.run import stages

    def broken(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(stages, "cut", broken)
    result = call("run", recipe_file, "--out", tmp_path)
    assert result.exit_code == 1
    assert "error: RuntimeError: no such luck (--debug shows where)" in result.stderr
    assert "Traceback" not in result.stderr
    assert hp.RunRecord.load(tmp_path / "record.json").error == "RuntimeError: no such luck"
    result = call("run", recipe_file, "--out", tmp_path, "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert call("report", tmp_path).exit_code == 0  # a broken run has a report too


@pytest.mark.skipif(os.name == "nt", reason="Windows delivers Ctrl-C to whole consoles only")
@pytest.mark.slow
def test_ctrl_c_leaves_a_record_and_exits_with_1(recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # A shell's background job inherits an ignored SIGINT, and Python keeps it; the user's
    # foreground process does not.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    # Modules of others may swallow an interrupt while they are imported (regex, in a __del__):
    # imported before.
    start += "; import regex, transformers.trainer"
    command = [sys.executable, "-c", f"{start}; from headprune.cli.main import main; main()"]
    command += ["run", str(recipe_file), "--out", str(out), "--set", "train.epochs=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if (out / "record.json").is_file() and hp.RunRecord.load(
                out / "record.json"
            ).stage == "train":
                break
            time.sleep(0.1)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, errors
    assert errors.rstrip().endswith("interrupted")
    assert "Traceback" not in errors
    record = hp.RunRecord.load(out / "record.json")
    assert (record.status, record.stage) == ("interrupted", "train")
    assert record.rows["train"]["rows"] > 0
    assert call("report", out).exit_code == 0


def test_console_script_reports_errors_without_traceback(tmp_path: Path) -> None:
    done = console("run", "digit-vit", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: recipe: must be")


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise on Windows")
def test_a_reader_that_went_away_is_no_error_to_tell_of() -> None:
    """``headprune ls | head``: the first line is all that is read."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from headprune.cli.main import main; main()", "ls"]
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.filterwarnings("default")  # as outside of the tests, where a warning is no error
def test_only_warnings_that_are_for_users_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded(False):
        warnings.warn("the weights are others", UserWarning, stacklevel=1)
        warnings.warn("this will go", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: the weights are others\n"


def test_an_interrupt_is_said_in_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, guarded(True):
        raise KeyboardInterrupt
    assert (ended.value.exit_code, capsys.readouterr().err) == (1, "interrupted\n")


def test_bench_takes_threads(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    short = ("--seconds", 0.01, "--batch", 1, "--length", 4)
    assert call("bench", bert, bert, *short, "--threads", 3).exit_code == 0
    assert taken == [3]
    assert call("bench", bert, bert, *short, "--threads", 0).exit_code == 2


def test_bench_beyond_what_a_model_can_read(bert: Path) -> None:
    for more in ([], ["--length", 8, "--length", 17]):  # 128 by default
        result = call("bench", bert, bert, "--seconds", 0.01, *more)
        assert result.exit_code == 2, result.output
        assert "error: --length: must be at most 16, what the models can read" in result.stderr
    assert call("bench", bert, bert, "--seconds", 0.01, "--batch", 1, "--length", 16).exit_code == 0
