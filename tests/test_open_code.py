"""Open code: no circle of imports, no nested comprehension, no long docstring, no tangled function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "headprune"
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


def test_the_search_for_faults_finds_them() -> None:
    nested = "x = [[a for a in b] for b in c]"
    branches = "\n".join(f"    if a == {n}: pass" for n in range(COMPLEXITY))
    code = f'{nested}\ndef f(a):\n{branches}\ndef g():\n    """{"word " * (WORDS + 1)}"""\n'
    assert len(list(faults(ast.parse(code)))) == 3


def test_the_package_reads_openly() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        found = list(faults(ast.parse(path.read_text(encoding="utf-8"))))
        assert found == [], path
