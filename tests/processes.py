"""Several processes for tests, as ``torchrun`` would start them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.scripts import ROOT


@contextmanager
def started(
    size: int, command: Sequence[str], **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that know their rank; none of them outlives the block."""
    same = {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    ranks = map(str, range(size))
    each = [{**os.environ, **same, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(command, env=env, cwd=ROOT, **pipes) for env in each]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


@contextmanager
def forked(size: int, work: str, folder: Path, *more: str, **environment: str) -> Iterator[Any]:
    """The same for a function of ``tests/processes_work.py``; the processes come from the fork
    server of ``killing``, which has imported everything."""
    from tests import killing, processes_work

    running = []
    for rank in range(size):
        known = {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
        given = (known, work, str(folder), *more)
        running.append(killing.context.Process(target=processes_work.in_process, args=given))
    try:
        for process in running:
            process.start()
        yield running
    finally:
        for process in running:
            process.kill()
            process.join()


def together(size: int, work: str, folder: Path, *more: str, **environment: str) -> None:
    """Runs it in so many processes, all of which must end well."""
    with forked(size, work, folder, *more, **environment) as running:
        for process in running:
            process.join(600)
        assert [process.exitcode for process in running] == [0] * size
