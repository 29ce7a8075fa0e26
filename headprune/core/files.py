"""Files and folders written whole or not at all, and their hashes.

New data is written to a temporary place in the same folder. When all of it is on the disk, it is
renamed into place. A process that is killed leaves the old file or the new one, and perhaps a
hidden ``.<name>.*.part``. A full disk leaves the old file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path

from headprune.core.errors import HeadPruneError, NotWritten
from headprune.core.opening import opened, read_bytes

#: Ending of the name of a temporary file or folder; the name begins with a dot.
PART = ".part"
#: Ending of a temporary folder that is complete, while its files are renamed into place.
_WHOLE = ".whole" + PART
#: Name of the file in it that lists the old files to remove.
_REMOVED = ".gone" + PART

_AS_BEFORE = "The old files are unchanged. Make room there, or give another place."
_IN_PLACE = "Some new files may be in place already. Make room there, and write it again."


def not_written(path: str | Path, error: BaseException, hint: str = _AS_BEFORE) -> BaseException:
    """Translate an error of the system into a NotWritten that names ``path``.

    Our own errors, and errors of other kinds, are returned unchanged.
    """
    # Errors of the user's own code inside the block must come through unchanged.
    if isinstance(error, HeadPruneError) or not (isinstance(error, OSError) or _is_io(error)):
        return error
    got = getattr(error, "strerror", None) or " ".join(str(error).split())
    return NotWritten(str(path), "a place that can be written to", got, hint)


def _is_io(error: BaseException) -> bool:
    """Whether an error of safetensors means that a file could not be written.

    Safetensors has no class for such errors.
    """
    if type(error).__name__ != "SafetensorError":
        return False
    return "I/O error" in str(error) or "IoError" in str(error)


@contextlib.contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Translate errors of the system inside the block into NotWritten.

    Raises:
        NotWritten: the system refused to write.
    """
    try:
        yield
    except Exception as error:
        translated = not_written(path, error)
        if translated is error:
            raise
        raise translated from error


@contextlib.contextmanager
def atomic_paths() -> Iterator[Callable[[str | Path], Path]]:
    """Write several files of one folder together: all of them, or none.

    Yields a function that gives the temporary path of a file's own path. When the block ends
    without an error, all files are flushed to the disk first. Then they are renamed into place one
    right after the other, in the order in which they were asked for. On an error none is.

    Raises:
        NotWritten: the system refused to write.
    """
    places: dict[Path, Path] = {}
    modes: dict[Path, int] = {}
    hint = _AS_BEFORE

    def temporary_of(path: str | Path) -> Path:
        path = Path(path)
        temporary = _temporary(path.parent, path.name)
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        modes[temporary] = os.fstat(handle).st_mode  # 0o666 without the bits of the user's umask
        os.close(handle)
        places[path] = temporary
        return temporary

    try:
        yield temporary_of
        # 1. All files are on the disk.
        for temporary, mode in modes.items():
            _apply_mode(temporary, mode)
            _flush(temporary)
        # 2. From the first rename on the old state is lost.
        for path, temporary in places.items():
            os.replace(temporary, path)
            hint = _IN_PLACE
        # 3. The new names are on the disk too.
        for folder in dict.fromkeys(path.parent for path in places):
            _flush(folder)
    except BaseException as error:
        for temporary in places.values():
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        translated = not_written(next(iter(places), ""), error, hint)
        if translated is error:
            raise
        raise translated from error


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Write one file, whole or not at all: yields the temporary path to write to.

    Raises:
        NotWritten: the system refused to write.
    """
    with atomic_paths() as temporary_of:
        yield temporary_of(path)


def write_atomic(path: str | Path, data: bytes) -> Path:
    """Write ``data`` to ``path``, whole or not at all; return the path."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
    return Path(path)


@contextlib.contextmanager
def staged(
    folder: str | Path, alone: bool = False, in_place_of: Sequence[str] = ()
) -> Iterator[Path]:
    """Write a folder's files together: yields the temporary folder to write to.

    When the block ends without an error, all files are flushed to the disk first. A new folder then
    appears whole, by one rename. In a folder that exists, files are renamed into place one right
    after the other, and its other files are kept. If a process is killed meanwhile,
    ``finish_renames`` or the next call moves the rest. On an error nothing changes, except for an
    error during the renames, which says so. Temporary folders of killed processes are deleted.

    Args:
        folder: The folder.
        alone: Refuse any other file in it at the end, also one of another process.
        in_place_of: Patterns of old files to remove, unless new ones have their names.

    Raises:
        NotWritten: the system refused to write, or something is there.
    """
    staging = _Staging(Path(folder))
    try:
        yield staging.place
        staging.put_in_place(alone, in_place_of)
    except BaseException as error:
        translated = not_written(folder, error, staging.hint)
        if not isinstance(translated, NotWritten):
            raise
        # The user knows the folder, not the temporary one.
        where = translated.where.replace(str(staging.place), str(folder))
        raise NotWritten(where, translated.must, translated.got, translated.hint) from error
    finally:
        staging.close()


class _Staging:
    """A temporary folder, locked by this process, whose files are to be put into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_new = not folder.exists()
        # Inside a folder that exists: a rename needs one and the same disk.
        self.home = folder.parent if self.is_new else folder
        self.hint = _AS_BEFORE
        with write_errors(folder):
            self.home.mkdir(parents=True, exist_ok=True)
            finish_renames(folder)
            _remove_dead(self.home, folder.name)
            self.place, self._lock = _locked_place(self.home, folder.name)

    def put_in_place(self, alone: bool, in_place_of: Sequence[str]) -> None:
        # 1. Everything is on the disk before anything is renamed.
        paths = sorted(self.place.rglob("*"))
        for path in (*paths, self.place):
            _apply_mode(path, self.place.stat().st_mode)
            _flush(path)
        in_the_way = occupied(self.folder) if alone else []
        if in_the_way:
            must = "a new or an empty folder"
            raise NotWritten(str(self.folder), must, f"one with {in_the_way[0]}", _AS_BEFORE)

        # 2. One rename for a new folder, one per file for another.
        if self.is_new and not self.folder.exists():
            os.replace(self.place, self.folder)
            self.hint = _IN_PLACE
        else:
            names = {path.relative_to(self.place) for path in paths}
            self._put_files_in_place(self._old_files(in_place_of, names))
        _flush(self.home)

    def _old_files(self, patterns: Sequence[str], new: set[Path]) -> list[str]:
        """Files of the folder that match a pattern and are not replaced."""
        old: set[Path] = set()
        for pattern in patterns:
            old.update(path.relative_to(self.folder) for path in self.folder.glob(pattern))
        return sorted(map(str, old - new))

    def _put_files_in_place(self, removed: list[str]) -> None:
        if not self.is_new:
            # With this name ``finish_renames`` completes the work if this process is killed now.
            write_atomic(self.place / _REMOVED, json.dumps(removed).encode())
            whole = self.place.with_suffix(_WHOLE)
            os.replace(self.place, whole)
            self.place = whole
            _flush(self.home)
        self.hint = _IN_PLACE
        _move_files(self.place, self.folder, removed)

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _temporary(home: Path, name: str) -> Path:
    """A new temporary path."""
    return home / f".{name}.{secrets.token_hex(4)}{PART}"


def _apply_mode(path: Path, mode: int) -> None:
    """Give a file the read and write rights of ``mode``.

    Some libraries write files that nobody else may read.
    """
    wanted, now = mode & 0o666, path.stat().st_mode & 0o777
    if path.is_file() and now != wanted:
        os.chmod(path, wanted)


def _locked_place(home: Path, name: str) -> tuple[Path, int | None]:
    """Make a temporary folder and lock it."""
    while True:
        place = _temporary(home, name)
        os.mkdir(place)
        lock = _hold(place)
        if lock is None:
            time.sleep(0.05)  # folders cannot be locked here, or another process deletes this one
        if place.exists():
            return place, lock
        # Another process took it for a dead one's before it was locked, and deleted it.
        if lock is not None:
            os.close(lock)


def _hold(folder: Path) -> int | None:
    """Lock a folder, so that others do not take it for a dead process's.

    Returns:
        A handle; the lock lasts until it is closed or this process ends. None where another process
        holds the folder, or folders cannot be locked.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def finish_renames(folder: Path) -> None:
    """Complete the renames of a process that was killed while it put files into ``folder``.

    Without write permission nothing happens. Folders may come from anywhere: nothing outside of
    this one is touched, whatever lies in it.
    """
    with contextlib.suppress(OSError):
        for place in _abandoned(folder, r".*", _WHOLE):
            removed = _names(place / _REMOVED)
            paths = [path for path in place.rglob("*") if path.is_dir()]
            # Through a link files would be written outside of the folder.
            has_link = any((folder / path.relative_to(place)).is_symlink() for path in paths)
            if removed is not None and not has_link:
                _move_files(place, folder, removed)
                _flush(folder)
                shutil.rmtree(place, ignore_errors=True)


def _names(path: Path) -> list[str] | None:
    """Read a list of file names; None where it has paths to other folders, or anything else."""
    try:
        names = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(names, list) or not all(map(_is_plain_name, names)):
        return None
    return names


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name == Path(name).name and "\0" not in name


def _abandoned(home: Path, name: str, ending: str) -> Iterator[Path]:
    """Yield temporary folders that no process holds; each is locked meanwhile.

    Args:
        home: Where they lie.
        name: A pattern of the name that they are for.
        ending: How their names end.
    """
    for path in home.glob(f".*{ending}"):
        is_ours = re.fullmatch(rf"\.{name}\.[0-9a-f]{{8}}{re.escape(ending)}", path.name)
        if not is_ours or not path.is_dir() or path.is_symlink():
            continue
        lock = _hold(path)
        if lock is None:
            continue
        try:
            yield path
        finally:
            os.close(lock)


def _remove_dead(home: Path, name: str) -> None:
    """Delete folders for ``name`` that no process holds; they may be as large as a model."""
    for path in _abandoned(home, re.escape(name), PART):
        shutil.rmtree(path, ignore_errors=True)


def _move_files(place: Path, folder: Path, removed: Sequence[str]) -> None:
    """Move everything from ``place`` into ``folder``; delete ``removed`` there. Safe to repeat."""
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    paths = [path.relative_to(place) for path in sorted(place.rglob("*")) if path.name != _REMOVED]
    # Sorted paths: a folder comes before its files.
    for path in paths:
        if (place / path).is_dir():
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            os.replace(place / path, folder / path)
    for path in (Path(), *paths):
        if (folder / path).is_dir():
            _flush(folder / path)


def occupied(folder: Path, allowed: Container[str] = ()) -> list[str]:
    """List what stands in the way of a new folder.

    Temporary files do not count. They are another process's, which ``staged(alone=True)`` finds at
    the end, or a dead one's, which it deletes.

    Args:
        folder: The folder.
        allowed: Names that may be there.
    """
    if not folder.is_dir():
        return [folder.name] if os.path.lexists(folder) else []
    names = [path.name for path in folder.iterdir() if not path.name.endswith(PART)]
    return sorted(name for name in names if name not in allowed)


def pruned_name(model: str) -> str:
    """Return the name of what a model becomes, after its folder or its name on the hub.

    >>> pruned_name("models/my bert/"), pruned_name("owner/name")
    ('my-bert-pruned', 'name-pruned')
    """
    name = Path(os.path.abspath(model)).name
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-._")[:90]
    return f"{plain or 'mine'}-pruned"


def append_line(path: str | Path, line: str) -> None:
    """Add a line to a file of lines; it is on the disk when this returns.

    Half a line of a killed process is ended first. A link is not followed: its target may lie
    elsewhere. Half of a surrogate pair, which no file can hold, is escaped as in JSON.

    Raises:
        NotWritten: the system refused to write; the file is as it was.
    """
    with write_errors(path), open(path, "ab+", buffering=0, opener=_unlinked) as file:
        # The last byte shows whether the last line is complete.
        before = file.seek(0, os.SEEK_END)
        file.seek(max(0, before - 1))
        has_half_line = file.read(1) not in (b"", b"\n")
        text = f"\n{line}\n" if has_half_line else f"{line}\n"
        try:
            unwritten = text.encode(errors="backslashreplace")
            while unwritten:
                # An unbuffered file may take a part of the bytes.
                unwritten = unwritten[file.write(unwritten) :]
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise


def _unlinked(path: str, flags: int) -> int:
    """Open a file, but follow no link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def remove_parts(folder: Path) -> None:
    """Delete temporary files of killed processes in a folder that nobody writes to now."""
    for path in folder.glob(f".*{PART}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return  # Windows has no such call
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with opened(path) as file:
        for piece in iter(partial(file.read, 1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()
