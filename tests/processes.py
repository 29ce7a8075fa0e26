"""Several processes for tests, as ``torchrun`` would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.scripts import ROOT


@contextmanager
def started(
    size: int, command: Sequence[str], **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that know their rank; none of them outlives the block."""
    shared = {
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    each = [
        {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(command, env=env, cwd=ROOT, **pipes) for env in each]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def together(
    size: int, work: str, folder: Path, *more: str, timeout: float = 600, **environment: str
) -> None:
    """Runs a function of ``tests/processes_work.py`` in so many processes, all of which must end
    well."""
    command = [sys.executable, "-m", "tests.processes_work", work, str(folder), *more]
    with started(size, command, **environment) as running:
        said = [process.communicate(timeout=timeout)[0] for process in running]
        assert not any(process.returncode for process in running), "\n".join(said)
