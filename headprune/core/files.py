"""Files and folders written whole or not at all, and their hashes.

What is written lies beside its place until all of it is on the disk, and takes its place by a
rename. A process that is killed leaves the old file or the new one, and perhaps a hidden
``.<name>.*.part``; a full disk leaves the old file.
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
from pathlib import Path

from headprune.core.errors import HeadPruneError, NotWritten
from headprune.core.opening import opened, read_bytes

#: How the name of what is not whole yet ends; it begins with a dot.
PART = ".part"
#: How it ends while what is in it takes its places, and the file there that names what goes for it.
_WHOLE, _GONE = ".whole" + PART, ".gone" + PART

_AS_BEFORE = "What was there before is as it was. Make room there, or give another place."
_IN_PLACE = "Some of what is new may be in its place already. Make room there, and write it again."


def not_written(path: str | Path, error: BaseException, hint: str = _AS_BEFORE) -> BaseException:
    """What the system says while ``path`` is written, in our words; an error of ours, or of another
    kind, as it is."""
    if isinstance(error, HeadPruneError) or not (isinstance(error, OSError) or _is_io(error)):
        return error
    got = getattr(error, "strerror", None) or " ".join(str(error).split())
    return NotWritten(str(path), "a place that can be written to", got, hint)


def _is_io(error: BaseException) -> bool:
    """Whether an error of safetensors, which has no class of its own for it, says that a file could
    not be written."""
    return type(error).__name__ == "SafetensorError" and (
        "I/O error" in str(error) or "IoError" in str(error)
    )


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
    """For files of one folder that belong together: yields what gives a temporary path beside a
    file's own.

    When the block ends well, all of them are brought to the disk first, and then take their places
    one right after the other, in the order in which they were asked for. On an error none does.

    Raises:
        NotWritten: the system refused to write.
    """
    places: dict[Path, Path] = {}
    modes: dict[Path, int] = {}
    hint = _AS_BEFORE

    def beside(path: str | Path) -> Path:
        path = Path(path)
        place = _part(path.parent, path.name)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        modes[place] = os.fstat(handle).st_mode  # what the user's umask leaves of it
        os.close(handle)
        places[path] = place
        return place

    try:
        yield beside
        for temporary, mode in modes.items():
            _open_to(temporary, mode)
            _to_disk(temporary)
        for path, temporary in places.items():
            os.replace(temporary, path)
            hint = _IN_PLACE
        for folder in dict.fromkeys(path.parent for path in places):
            _to_disk(folder)
    except BaseException as error:
        for temporary in places.values():
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        told = not_written(next(iter(places), ""), error, hint)
        if told is error:
            raise
        raise told from error


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside ``path``; what is written there takes its place when the block
    ends well.

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
def staged(
    folder: str | Path, alone: bool = False, in_place_of: Sequence[str] = ()
) -> Iterator[Path]:
    """Gives a temporary folder; what is written there takes its place in ``folder`` when the block
    ends well.

    All of it is brought to the disk first. A folder that was not there appears whole, by one
    rename; in one that was, files take their places one right after the other, and others stay;
    where a process is killed meanwhile, ``settle`` or the next call brings the rest of them there.
    On an error nothing changes, but for one that comes when they take their places, which says so.
    What killed processes left half written there goes.

    Args:
        folder: The folder.
        alone: Nothing else may be there in the end: not what another process put there in the
            meantime, either.
        in_place_of: Patterns of files that go when these come, unless they are among them.

    Raises:
        NotWritten: the system refused to write, or something is there.
    """
    folder = Path(folder)
    new = not folder.exists()
    home = folder.parent if new else folder  # inside, so that both are on one disk
    hint = _AS_BEFORE
    with writing(folder):
        home.mkdir(parents=True, exist_ok=True)
        settle(folder)
        _remove_dead(home, folder.name)
        place, held = _held_part(home, folder.name)
    try:
        yield place
        found = sorted(place.rglob("*"))
        for path in (*found, place):
            _open_to(path, place.stat().st_mode)
            _to_disk(path)
        if alone and (there := occupied(folder)):
            raise NotWritten(
                str(folder), "a new or an empty folder", f"one with {there[0]}", _AS_BEFORE
            )
        if new and not folder.exists():
            os.replace(place, folder)
            hint = _IN_PLACE
        else:
            names = {path.relative_to(place) for path in found}
            old = {
                path.relative_to(folder) for pattern in in_place_of for path in folder.glob(pattern)
            } - names
            gone = sorted(map(str, old))
            if not new:  # from here on these files are to come, whoever brings them
                write_atomic(place / _GONE, json.dumps(gone).encode())
                os.replace(place, place := place.with_suffix(_WHOLE))
                _to_disk(home)
            hint = _IN_PLACE
            _into_places(place, folder, gone)
        _to_disk(home)
    except BaseException as error:
        told = not_written(folder, error, hint)
        if not isinstance(told, NotWritten):
            raise
        where = told.where.replace(str(place), str(folder))  # which the user knows
        raise NotWritten(where, told.must, told.got, told.hint) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if held is not None:
            os.close(held)


def _part(home: Path, name: str) -> Path:
    """A new place for what is not whole yet."""
    return home / f".{name}.{secrets.token_hex(4)}{PART}"


def _open_to(path: Path, mode: int) -> None:
    """Lets those read and write a file whom the mode lets; some libraries put a file there that
    nobody else may see."""
    wanted, now = mode & 0o666, path.stat().st_mode & 0o777
    if path.is_file() and now != wanted:
        os.chmod(path, wanted)


def _held_part(home: Path, name: str) -> tuple[Path, int | None]:
    """A new folder that is held; another one where somebody found it in the moment before and took
    it away."""
    while True:
        place = _part(home, name)
        os.mkdir(place)
        held = _hold(place)
        if held is None:
            time.sleep(0.05)  # it cannot be held here, or is on its way out
        if place.exists():
            return place, held
        if held is not None:
            os.close(held)


def _hold(folder: Path) -> int | None:
    """Keeps others from taking a folder for a dead process's, as long as this process lives and
    what comes back is open; None where folders cannot be held."""
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


def settle(folder: Path) -> None:
    """Brings to their places what a process was killed over while it put files into ``folder``;
    without the right to do so the folder stays as it is.

    Folders come from anywhere: nothing outside of this one is touched, whatever lies in it.
    """
    with contextlib.suppress(OSError):
        for place in _dead(folder, r".*", _WHOLE):
            gone = _names(place / _GONE)
            into = [folder / path.relative_to(place) for path in place.rglob("*") if path.is_dir()]
            if gone is not None and not any(path.is_symlink() for path in into):
                _into_places(place, folder, gone)
                _to_disk(folder)
                shutil.rmtree(place, ignore_errors=True)


def _names(path: Path) -> list[str] | None:
    """Names of files beside each other, as a file has them; None where it has others, or anything
    else."""
    try:
        names = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None
    plain = isinstance(names, list) and all(
        isinstance(n, str) and n == Path(n).name and "\0" not in n for n in names
    )
    return names if plain else None


def _dead(home: Path, name: str, ending: str) -> Iterator[Path]:
    """Hidden folders of this ending, for a ``name`` by pattern, that nobody holds; held while they
    are looked at."""
    for path in home.glob(f".*{ending}"):
        known = re.fullmatch(rf"\.{name}\.[0-9a-f]{{8}}{re.escape(ending)}", path.name)
        if known and path.is_dir() and not path.is_symlink() and (held := _hold(path)) is not None:
            try:
                yield path
            finally:
                os.close(held)


def _remove_dead(home: Path, name: str) -> None:
    """Takes away folders for ``name`` that nobody holds, which may be as large as a model."""
    for path in _dead(home, re.escape(name), PART):
        shutil.rmtree(path, ignore_errors=True)


def _into_places(place: Path, folder: Path, gone: Sequence[str]) -> None:
    """What is in ``place`` goes into ``folder``, and files of other names go from there; may be
    done twice."""
    for name in gone:
        (folder / name).unlink(missing_ok=True)
    paths = [path.relative_to(place) for path in sorted(place.rglob("*")) if path.name != _GONE]
    for path in paths:
        if (place / path).is_dir():
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            os.replace(place / path, folder / path)
    for path in (Path(), *paths):
        if (folder / path).is_dir():
            _to_disk(folder / path)


def occupied(folder: Path, beside: Container[str] = ()) -> list[str]:
    """What stands in the way of a new folder: all that is there, but for ``beside`` and what is not
    whole yet.

    (Of another process, which ``staged(alone=True)`` then finds in its place; or of a dead one,
    which it takes away.)
    """
    if not folder.is_dir():
        return [folder.name] if os.path.lexists(folder) else []
    return sorted(
        p.name for p in folder.iterdir() if not p.name.endswith(PART) and p.name not in beside
    )


def append_line(path: str | Path, line: str) -> None:
    """Adds a line to a file of lines, on the disk when this returns; half a line of a killed
    process is ended first. A link is not followed: what it names lies elsewhere, and is not ours to
    change. Half of a surrogate pair, which no file can hold, is spelt as in JSON.

    Raises:
        NotWritten: the system refused to write; the file is as it was.
    """
    with writing(path), open(path, "ab+", buffering=0, opener=_unlinked) as file:
        before = file.seek(0, os.SEEK_END)
        file.seek(max(0, before - 1))
        begun = file.read(1) not in (b"", b"\n")
        try:
            left = ("\n" * begun + line + "\n").encode(errors="backslashreplace")
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise


def _unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def remove_parts(folder: Path) -> None:
    """Takes away what killed processes left half written in a folder that nobody else writes to
    now."""
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
    with opened(path) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
