"""One process at a time in a folder: the lock of runs and sweeps, which a dead process does not keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headprune.core.errors import InvalidValue
from headprune.core.files import writing

LOCK = ".lock"


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Keeps a second run or sweep out of a folder, which is made where it is not there.

    The lock is the operating system's and ends with its process, however that ends; only an empty file stays.

    Args:
        folder: The folder.
        what: What runs there, in words.

    Raises:
        InvalidValue: another process has it, or it is a file.
        NotWritten: no right to write there, or no room.
    """
    from filelock import FileLock, Timeout

    if folder.exists() and not folder.is_dir():
        raise InvalidValue(str(folder), "a folder", "a file", "Give another one with --out.")
    with ExitStack() as stack:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(folder / LOCK, timeout=0))
            except Timeout:
                hint = "Wait for it, or give another folder with --out."
                raise InvalidValue(str(folder), "free", f"{what} that is running there", hint) from None
        yield
