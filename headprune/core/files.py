"""Files and folders written whole or not at all, and their hashes.

What is written lies beside its place until all of it is on the disk, and takes its place by a rename. A process that is
killed leaves the old file or the new one, and perhaps a hidden ``.<name>.*.part``; a full disk leaves the old file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from headprune.core.errors import HeadPruneError, NotWritten

#: How the name of what is not whole yet ends; it begins with a dot.
PART = ".part"


def not_written(path: str | Path, error: BaseException) -> BaseException:
    """What the system says while ``path`` is written, in our words; an error of ours, or of another kind, as it is."""
    if isinstance(error, HeadPruneError) or not (isinstance(error, OSError) or _is_io(error)):
        return error
    got = getattr(error, "strerror", None) or " ".join(str(error).split())
    hint = "What was there before is as it was. Make room there, or give another place."
    return NotWritten(str(path), "a place that can be written to", got, hint)


def _is_io(error: BaseException) -> bool:
    """Whether an error of safetensors, which has no class of its own for it, says that a file could not be written."""
    return type(error).__name__ == "SafetensorError" and ("I/O error" in str(error) or "IoError" in str(error))


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """For what makes files by other ways than the ones below.

    Raises:
        NotWritten: for what the system says inside of the block.
    """
    try:
        yield
    except Exception as error:
        told = not_written(path, error)
        if told is error:
            raise
        raise told from error


@contextlib.contextmanager
def atomic_paths() -> Iterator[Callable[[str | Path], Path]]:
    """For files of one folder that belong together: yields what gives a temporary path beside a file's own.

    When the block ends well, all of them are brought to the disk first, and then take their places one right after the
    other, in the order in which they were asked for. On an error none does.

    Raises:
        NotWritten: the system refused to write.
    """
    places: dict[Path, Path] = {}

    def beside(path: str | Path) -> Path:
        path = Path(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        os.close(handle)
        places[path] = Path(name)
        return places[path]

    try:
        yield beside
        for temporary in places.values():
            os.chmod(temporary, 0o644)
            _to_disk(temporary)
        for path, temporary in places.items():
            os.replace(temporary, path)
        for folder in dict.fromkeys(path.parent for path in places):
            _to_disk(folder)
    except BaseException as error:
        for temporary in places.values():
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        told = not_written(next(iter(places), ""), error)
        if told is error:
            raise
        raise told from error


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside ``path``; what is written there takes its place when the block ends well.

    Raises:
        NotWritten: the system refused to write.
    """
    with atomic_paths() as beside:
        yield beside(path)


def write_atomic(path: str | Path, data: bytes) -> Path:
    """Writes ``data`` to ``path``, whole or not at all; returns the path."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
    return Path(path)


@contextlib.contextmanager
def staged(folder: str | Path) -> Iterator[Path]:
    """Gives a temporary folder; what is written there takes its place in ``folder`` when the block ends well.

    All of it is brought to the disk first. A folder that was not there appears whole, by one rename; in one that was,
    files take their places one right after the other, and others stay. On an error nothing changes.

    Raises:
        NotWritten: the system refused to write.
    """
    folder = Path(folder)
    new = not folder.exists()
    with writing(folder):
        (folder.parent if new else folder).mkdir(parents=True, exist_ok=True)
        home = folder.parent if new else folder  # inside, so that both are on one disk
        place = Path(tempfile.mkdtemp(dir=home, prefix=f".{folder.name}.", suffix=PART))
    try:
        yield place
        found = sorted(place.rglob("*"))
        for path in (*found, place):
            _to_disk(path)
        if new and not folder.exists():
            os.chmod(place, 0o755)
            os.replace(place, folder)
        else:
            _into_places(place, [path.relative_to(place) for path in found], folder)
        _to_disk(home)
    except BaseException as error:
        told = not_written(folder, error)
        if not isinstance(told, NotWritten):
            raise
        where = told.where.replace(str(place), str(folder))  # which the user knows
        raise NotWritten(where, told.must, told.got, told.hint) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _into_places(place: Path, names: list[Path], folder: Path) -> None:
    for name in names:
        if (place / name).is_dir():
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            os.replace(place / name, folder / name)
    for name in names:
        if (folder / name).is_dir():
            _to_disk(folder / name)


def append_line(path: str | Path, line: str) -> None:
    """Adds a line to a file of lines, on the disk when this returns; half a line of a killed process is ended first.

    Raises:
        NotWritten: the system refused to write; the file is as it was.
    """
    with writing(path), open(path, "ab+", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        file.seek(max(0, before - 1))
        begun = file.read(1) not in (b"", b"\n")
        try:
            left = ("\n" * begun + line + "\n").encode()
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, before)
            raise


def remove_parts(folder: Path) -> None:
    """Takes away what killed processes left half written in a folder that nobody else writes to now."""
    for path in folder.glob(f".*{PART}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no such call
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
