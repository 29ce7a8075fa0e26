"""Scripts of the repository that are no part of the package, loaded as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def script(path: Path) -> ModuleType:
    """A fresh module of the file's code."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def benchmark(name: str) -> ModuleType:
    """A script of ``benchmarks``."""
    return script(BENCHMARKS / f"{name}.py")
