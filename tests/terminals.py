"""Commands on a terminal of their own."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

#: headprune's command line in a process of its own.
HEADPRUNE = [sys.executable, "-c", "from headprune.cli.main import main; main()"]


def terminal() -> tuple[int, int]:
    """Both ends of a terminal: where to read, and where to write."""
    parent, child = pty.openpty()
    # Without a size no bar has room.
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    return parent, child


def on_terminal(
    arguments: list[str],
    folder: Path | None = None,
    program: Sequence[str] = HEADPRUNE,
    around: Mapping[str, str] = os.environ,
    **environment: str,
) -> tuple[str, int]:
    """What ``headprune``, or another program, with these arguments writes to a terminal, and its
    exit status."""
    parent, child = terminal()
    command, env = [*program, *arguments], {**around, **environment}
    running = subprocess.Popen(command, cwd=folder, env=env, stdout=child, stderr=child)
    os.close(child)
    said = read_all(parent)
    return said, running.wait(600)


def read_all(parent: int) -> str:
    """What was written to a terminal, once nobody holds its other end; closes it."""
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
    return said.decode().replace("\r\n", "\n")
