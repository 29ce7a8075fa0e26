"""Open files that may come from anywhere: only regular files, and only texts that fit in memory.

A device gives endless data, and opening a FIFO waits for a writer. Links are followed; their target
must be a regular file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO, Any

from headprune.core.errors import HeadPruneError, InvalidValue

#: Largest text that is read, in bytes. Plans, scores, records, tables and cards are far smaller.
LONGEST = 1 << 28

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotAFile(InvalidValue, OSError):
    """The path is no regular file, or the file is far too long."""

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError's own keeps only two of the arguments.
        return type(self), (self.where, self.must, self.got, self.hint)


def check_file(path: str | Path) -> None:
    """Refuse a path that is no regular file; for other libraries, which open files by name.

    Raises:
        NotAFile: a folder, a FIFO, a socket or a device, or a link to one.
        OSError: no such file, or no permission to read it.
    """
    _check(os.stat(path).st_mode, path)


def opened(path: str | Path) -> IO[bytes]:
    """Open a regular file to be read.

    Raises:
        NotAFile: a folder, a FIFO, a socket or a device, or a link to one.
        OSError: it cannot be opened.
    """
    check_file(path)  # before it is opened: some devices act on that
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115, the caller closes it
    try:
        _check(os.fstat(file.fileno()).st_mode, path)  # it may have been replaced meanwhile
    except NotAFile:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, longest: int = LONGEST) -> bytes:
    """Read all of a regular file.

    Raises:
        NotAFile: no regular file, or longer than ``longest`` bytes, which are not read then.
        OSError: it cannot be read.
    """
    data = b""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= longest:
            # One byte more shows that the file has grown.
            data = file.read(longest + 1) or b""
    size = max(size, len(data))
    if size > longest:
        must = f"a file of at most {longest:,} bytes"
        raise NotAFile(str(path), must, f"one of {size:,} bytes")
    return data


def read_text(path: str | Path, longest: int = LONGEST) -> str:
    """Read all of a regular file in UTF-8; every line end becomes a newline.

    Raises:
        NotAFile: no regular file, or longer than ``longest`` bytes.
        OSError: it cannot be read.
        UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path, longest).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def reason(error: BaseException) -> object:
    """The cause that an error names, for a message that names the file itself."""
    if isinstance(error, HeadPruneError):
        return error.got
    return getattr(error, "strerror", None) or error


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting for a writer, if a FIFO has replaced it meanwhile."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        hint = "A link counts as what it leads to." if os.path.islink(path) else ""
        raise NotAFile(str(path), "a regular file", kind, hint)
