"""A lock on a folder: one process at a time, and a dead process does not keep it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headprune.core.errors import InvalidValue
from headprune.core.files import write_errors

LOCK = ".lock"
_HINT = "Wait for it, or give another folder with --out."


@contextmanager
def locked(folder: Path, what: str, hint: str = _HINT) -> Iterator[None]:
    """Keep other processes out of a folder; make the folder if it does not exist.

    The lock is the operating system's. It ends with its process, however that ends; an empty file
    remains.

    Args:
        folder: The folder.
        what: The work that is done there.
        hint: What to try where another process holds the lock.

    Raises:
        InvalidValue: another process holds it, it is a file, or its lock is a link.
        NotWritten: no permission to write there, or no disk space.
    """
    from filelock import FileLock, Timeout

    if folder.exists() and not folder.is_dir():
        raise InvalidValue(str(folder), "a folder", "a file", "Give another one.")
    path = folder / LOCK
    if path.is_symlink():  # some versions of filelock would empty its target
        raise InvalidValue(str(path), "a file", "a link to another place", "Remove it.")
    if path.exists() and not path.is_file():
        raise InvalidValue(str(path), "a file", "something else", "Remove it.")
    with ExitStack() as stack:
        # Only errors of taking the lock are translated, not those of the work under it.
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(path, timeout=0))
            except Timeout:
                got = f"{what} that is running there"
                raise InvalidValue(str(folder), "free", got, hint) from None
        yield
