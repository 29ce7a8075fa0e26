"""One process at a time in a folder: a lock that a dead process does not keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headprune.core.errors import InvalidValue
from headprune.core.files import writing

LOCK = ".lock"
_HINT = "Wait for it, or give another folder with --out."


@contextmanager
def locked(folder: Path, what: str, hint: str = _HINT) -> Iterator[None]:
    """Keeps a second process out of a folder, which is made where it is not there.

    The lock is the operating system's and ends with its process, however that ends; only an empty
    file stays.

    Args:
        folder: The folder.
        what: What runs there, in words.
        hint: What to try where another process has it.

    Raises:
        InvalidValue: another process has it, it is a file, or its lock is a link.
        NotWritten: no right to write there, or no room.
    """
    from filelock import FileLock, Timeout

    if folder.exists() and not folder.is_dir():
        raise InvalidValue(str(folder), "a folder", "a file", "Give another one.")
    if (folder / LOCK).is_symlink():  # some versions of filelock would empty what it names
        raise InvalidValue(str(folder / LOCK), "a file", "a link to another place", "Take it away.")
    if (folder / LOCK).exists() and not (folder / LOCK).is_file():
        raise InvalidValue(str(folder / LOCK), "a file", "something else", "Take it away.")
    with ExitStack() as stack:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(folder / LOCK, timeout=0))
            except Timeout:
                raise InvalidValue(
                    str(folder), "free", f"{what} that is running there", hint
                ) from None
        yield
