"""Environments of serving engines, which the long tests make in a folder that is kept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

#: ``make test-long`` names the folder.
FOLDER = os.environ.get("HEADPRUNE_SERVING", "")
#: A folder of a pretrained Llama, or empty: then there are random models only.
STORIES = os.environ.get("HEADPRUNE_STORIES", "")


def python_of(serving: ModuleType, name: str) -> Path:
    """The Python of an environment of ``benchmarks/serving.py``; without one, the test is skipped."""
    if not FOLDER:
        pytest.skip("HEADPRUNE_SERVING names no folder for environments")
    try:
        python: Path = serving.environment(Path(FOLDER), name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the environment {name} cannot be made here: {error}")
    return python
