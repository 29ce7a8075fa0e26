"""Files that come from anywhere are opened here: regular ones alone, and text of a length that can
be held.

A device gives data without end, and opening a FIFO waits for a writer. Links are followed; what
they lead to counts.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO, Any

from headprune.core.errors import HeadPruneError, InvalidValue

#: Bytes of a text that is read whole: plans, scores, records, tables, cards. Far above any of them.
LONGEST = 1 << 28

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotAFile(InvalidValue, OSError):
    """Something else than a regular file, or one that is far too long, stands where a file is
    read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.where,
            self.must,
            self.got,
            self.hint,
        )  # OSError's own keeps two of them


def check_file(path: str | Path) -> None:
    """Refuses what is there and is no regular file; for readers of others, which open files by
    their names.

    Raises:
        NotAFile: a folder, a FIFO, a socket or a device, or a link to one.
        OSError: no such file, or no right to look.
    """
    _check(os.stat(path).st_mode, path)


def opened(path: str | Path) -> IO[bytes]:
    """A regular file, opened to be read.

    Raises:
        NotAFile: a folder, a FIFO, a socket or a device, or a link to one.
        OSError: it cannot be opened.
    """
    check_file(path)  # before it is opened: some devices act on that
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115, the caller closes it
    try:
        _check(os.fstat(file.fileno()).st_mode, path)  # another may have taken its place
    except NotAFile:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, longest: int = LONGEST) -> bytes:
    """All of a regular file.

    Raises:
        NotAFile: it is none, or longer than ``longest`` bytes, which are not read then.
        OSError: it cannot be read.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > longest else file.read(longest + 1) or b""
    if max(size, len(data)) > longest:
        raise NotAFile(
            str(path),
            f"a file of at most {longest:,} bytes",
            f"one of {max(size, len(data)):,} bytes",
        )
    return data


def read_text(path: str | Path, longest: int = LONGEST) -> str:
    """All of a regular file in UTF-8, line ends as they are in a text file.

    Raises:
        NotAFile: it is none, or longer than ``longest`` bytes.
        OSError: it cannot be read.
        UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path, longest).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def reason(error: BaseException) -> object:
    """What an error says, for a message that names the file itself."""
    return (
        error.got
        if isinstance(error, HeadPruneError)
        else getattr(error, "strerror", None) or error
    )


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; where a FIFO has taken its place since the look, without waiting for a writer
    of it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        hint = "A link counts as what it leads to." if os.path.islink(path) else ""
        raise NotAFile(str(path), "a regular file", kind, hint)
