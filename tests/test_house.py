"""The house rules, run like any other test: ruff, mypy, imports, dead code, open code, no path of one
machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from headprune.core.version import __version__

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {".py", ".md", ".yaml", ".json", ".txt", ".ipynb", ".j2", ".js"}


def run(*command: str) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def texts(*folders: str) -> Iterator[tuple[Path, str]]:
    """Files of the repository that a person reads or writes."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SOURCES:
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_ruff_finds_nothing_and_would_format_nothing() -> None:
    run(sys.executable, "-m", "ruff", "check", ".")
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_mypy_finds_nothing() -> None:
    assert "no issues found" in run(sys.executable, "-m", "mypy")


def test_imports_go_down_only() -> None:
    lint = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert lint, "import-linter is not installed beside this Python"
    assert "0 broken" in run(lint)


@pytest.mark.long
def test_bandit_finds_nothing() -> None:
    run(sys.executable, "-m", "bandit", "-q", "-c", "pyproject.toml", "-r", "headprune")


#: Names that nothing in the repository says again, and who asks for them.
ASKED_FOR = {
    "Python": "__class__ __dir__ __getattr__ showwarning",
    "a module's repr and a state dict": "extra_repr get_extra_state set_extra_state",
    "Transformers' models": (
        "_is_hf_initialized _split_heads allow_global_per_layer_attribute_access attribute_map"
        " tie_word_embeddings"
    ),
    "the Transformers Trainer": (
        "_move_model_to_device _n_gpu _prepare_inputs compute_loss device_placement"
        " get_train_dataloader num_items_in_batch num_training_steps on_step_end on_train_begin"
        " return_outputs should_training_stop"
    ),
    "diffusers' and torch's attention, by our stand-ins": (
        "activation_relu_or_gelu Decoder inner_dim inner_kv_dim sliceable_head_dim"
    ),
    "layouts, by the name of file and class": (
        "NormedWithoutHeads OnlyResidual WithoutHeadsWithPositionBias"
    ),
    "scorers, by the name of file and class": "Ladder",
    "pydantic": "_default_selector _selector_of_ladders test_split validation_split",
    "tokenizers, Typer": "_main post_processor pre_tokenizer",
    "whoever reads a report's numbers": "bytes_read bytes_written",
}


def test_no_code_is_dead() -> None:
    """Vulture's findings at its lowest confidence, without what templates say and what others ask
    for."""
    command = [sys.executable, "-m", "vulture", "headprune", "tests", "docs", "benchmarks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    unused = r"^(headprune/[^:]+:\d+): unused .*? '(\w+)'"
    found = dict(re.findall(unused, done.stdout, re.MULTILINE))
    assert "__getattr__" in found.values(), "it looked at nothing"
    templates = [*(ROOT / "headprune" / "report" / "templates").iterdir()]
    templates += (ROOT / "headprune").rglob("*_template.txt")
    text = " ".join(path.read_text() for path in templates)
    allowed = set(" ".join(ASKED_FOR.values()).split()) | set(re.findall(r"\.(\w+)\b", text))
    assert {where: name for where, name in found.items() if name not in allowed} == {}


def test_every_module_says_what_it_is_for() -> None:
    for path, text in texts("headprune"):
        assert path.suffix != ".py" or not text or text.startswith('"""'), path


def test_no_record_names_a_path_of_one_machine() -> None:
    for path, text in texts("benchmarks/records"):
        assert not re.findall(r'"/[^"/]+/[^"]*"', text), path


def test_nobody_is_told_to_install_headprune_from_an_index() -> None:
    """It is installed from a clone: from an index comes nothing, or whatever somebody puts there
    under the name."""
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?headprune\b")
    assert wrong.search("pip install 'headprune[audio]'"), "the search itself"
    for path, text in texts("headprune", "recipes", "docs", "notebooks", "benchmarks"):
        assert not wrong.search(text), path
    for path in ROOT.glob("*.md"):
        assert not wrong.search(path.read_text(encoding="utf-8")), path


#: How secrets of well-known services and private keys begin; a scanner of random-looking text would
#: find our hashes.
SECRETS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE"
    r" KEY|\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bpypi-[A-Za-z0-9_-]{50,}"
    r"|(?i:password|secret|api_key|token)\s*[=:]\s*['\"][^'\"\s]{12,}['\"]"
)


def test_no_file_holds_a_secret() -> None:
    assert SECRETS.search("key = 'hf_" + "a" * 34 + "'"), "the scan itself"
    for path, text in texts("headprune", "tests", "recipes", "docs", "benchmarks", "notebooks"):
        found = SECRETS.search(text)
        assert not found, f"{path}: {found[0][:20]}"  # type: ignore[index]


def test_continuous_integration_does_not_go_without_a_browser() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    said = (ROOT / "tests" / "browser.py").read_text(encoding="utf-8")
    for name in ("BROWSER", "AXE"):
        assert re.search(rf"^\s*export HEADPRUNE_{name}=required$", text, re.MULTILINE)
        assert f'"{name}"' in said


def test_of_torch_script_only_what_pytorch_says_itself_is_no_error() -> None:
    said = "`torch.jit.script` is deprecated. Please switch to `torch.compile` or `torch.export`."
    for_314 = "`torch.jit.script` is not supported in Python 3.14+ and may break."
    for message in (said, for_314):
        warnings.warn_explicit(message, DeprecationWarning, "_script.py", 1, "torch.jit._script")
    for message, module in ((said, "headprune.model.cut"), ("another", "torch.jit._script")):
        with pytest.raises(DeprecationWarning):
            warnings.warn_explicit(message, DeprecationWarning, "a.py", 1, module)


def test_the_citation_has_the_version_of_the_package() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


# ---------------------------------------------------------------- open code

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension)
#: Most words of a docstring, and the largest complexity of a function.
WORDS, COMPLEXITY = 200, 15


def test_no_circle_of_imports() -> None:
    """Imports inside functions and for type checkers count, too."""
    imports = grimp.build_graph("headprune", cache_dir=None)
    graph = {name: imports.find_modules_directly_imported_by(name) for name in imports.modules}
    assert "headprune.core.heads" in graph["headprune.core.plan"], "the search itself"
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
    TopologicalSorter(graph).prepare()  # an error names the circle


def complexity(function: ast.AST) -> int:
    """One more than the branches; boolean operators and conditions of comprehensions count."""
    total = 1
    for node in ast.walk(function):
        total += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            total += len(node.ifs)
    return total


def faults(tree: ast.Module) -> Iterator[str]:
    """What a reader of a file would stumble over, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inner = (part for part in ast.walk(node) if part is not node)
            if any(isinstance(part, COMPREHENSIONS) for part in inner):
                yield f"{node.lineno}: nested comprehension"
        if isinstance(node, FUNCTIONS) and complexity(node) > COMPLEXITY:
            yield f"{node.lineno}: {node.name} has complexity {complexity(node)}"
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            n_words = len((ast.get_docstring(node) or "").split())
            if n_words > WORDS:
                yield f"docstring of {n_words} words: {getattr(node, 'name', 'the module')}"


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of every file of the package."""
    paths = sorted((ROOT / "headprune").rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_the_search_for_faults_finds_them() -> None:
    nested = "x = [[a for a in b] for b in c]"
    branches = "\n".join(f"    if a == {n}: pass" for n in range(COMPLEXITY))
    code = f'{nested}\ndef f(a):\n{branches}\ndef g():\n    """{"word " * (WORDS + 1)}"""\n'
    assert len(list(faults(ast.parse(code)))) == 3


def test_the_package_reads_openly() -> None:
    for path, tree in trees().items():
        assert list(faults(tree)) == [], path


def test_the_package_as_a_whole_stays_open() -> None:
    """At most 4 comprehensions per 100 statements, and 15 functions above complexity 12."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    comprehensions = sum(isinstance(node, COMPREHENSIONS) for node in nodes)
    hard = [node.name for node in nodes if isinstance(node, FUNCTIONS) and complexity(node) > 12]
    assert comprehensions <= 0.04 * statements
    assert len(hard) <= 15, hard
