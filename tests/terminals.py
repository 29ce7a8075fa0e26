"""Commands on a terminal of their own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

#: headprune's command line in a process of its own.
HEADPRUNE = [sys.executable, "-c", "from headprune.cli.main import main; main()"]


def on_terminal(arguments: list[str], folder: Path | None = None, **environment: str) -> tuple[str, int]:
    """What ``headprune`` with these arguments writes to a terminal, and its exit status."""
    parent, child = pty.openpty()
    command, around = [*HEADPRUNE, *arguments], {**os.environ, **environment}
    running = subprocess.Popen(command, cwd=folder, env=around, stdout=child, stderr=child)
    os.close(child)
    said = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # so Linux ends a terminal
            break
        if not part:
            break
        said += part
    os.close(parent)
    return said.decode().replace("\r\n", "\n"), running.wait(60)
