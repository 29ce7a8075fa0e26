"""Scripts of the repository that are no part of the package, loaded as modules."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def script(path):
    """A fresh module of the file's code."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses look their module up while they are made
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = before
    return module


def benchmark(name):
    """A script of ``benchmarks``."""
    return script(BENCHMARKS / f"{name}.py")
