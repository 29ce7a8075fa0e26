"""Everything that is read from a path, with a FIFO, a device, a socket or a folder in its place:
each reader ends soon.

What is tried runs in a process of its own that is ended where it waits: neither a reader that hangs
nor one that fills the memory takes the tests along.
"""

import ast
import multiprocessing
import os
import pickle
import resource
import shutil
import socket
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

import pytest

import headprune as hp
from headprune.core import opening
from headprune.core.errors import HeadPruneError
from headprune.core.opening import NotAFile, check_file, opened, read_bytes, read_text
from headprune.data.sources import check_pictures
from headprune.run.progress import Finished
from tests.kinds_of_files import KINDS, sum_timings, take_finished

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has none of these in its folders"
)

PACKAGE = Path(hp.__file__).parent
#: Seconds for a reader, far above what any takes; and memory beyond what the process has.
PATIENCE, MEMORY = 60, 2 << 30


def _finished(folder):
    take_finished(folder)
    Finished.load(folder / ".work" / "score.json")


#: Readers without the copy of the folder that those of KINDS make: it would fail by itself.
UNCOPIED = {"finished stage": _finished, "timings": sum_timings}


def _socket(path):
    """Bound from its own folder: the path of a socket has about a hundred characters."""
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def _link_to_fifo(path):
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


IN_PLACE = {
    "FIFO": os.mkfifo,
    "link to a FIFO": _link_to_fifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "socket": _socket,
    "folder": Path.mkdir,
}


def _in_child(action, answer):
    if sys.platform == "linux":
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY, own + MEMORY))
    warnings.simplefilter("ignore")
    try:
        action()
        answer.send(("read", ""))
    except HeadPruneError as error:
        answer.send(("refused", str(error)))
    except BaseException:
        answer.send(("broken", traceback.format_exc()[-2000:]))
    finally:
        answer.close()
        os._exit(0)


def outcome(action):
    """What became of an action, and its words: read, refused (an error of ours), broken (another),
    or waiting."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(action, there))
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(PATIENCE) else ("waiting", "")
    except EOFError:
        return "broken", "the process was ended"
    finally:
        child.kill()
        child.join()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # that processes fork beside threads
@pytest.mark.parametrize("name", KINDS)
def test_every_reader_ends_where_no_file_is(name, tmp_path):
    kind, sound = KINDS[name], tmp_path / "sound"
    sound.mkdir()
    kind.make(sound)
    for what in ("FIFO", "link to a device", "folder"):  # all others in the test below
        folder = tmp_path / what
        shutil.copytree(sound, folder)
        (folder / kind.file).unlink()
        IN_PLACE[what](folder / kind.file)
        told, words = outcome(partial(UNCOPIED.get(name, kind.read), folder))
        allowed = ("refused",) if kind.refuses else ("refused", "read")
        assert told in allowed, f"{name}, {what}: {told} {words}"
        assert told == "read" or 0 < len(words) < 5000


@pytest.mark.parametrize("what", IN_PLACE)
def test_the_one_reader_takes_regular_files_alone(what, tmp_path):
    path = tmp_path / "a.json"
    IN_PLACE[what](path)
    for read in (check_file, opened, read_bytes, read_text):
        start = time.monotonic()
        with pytest.raises(NotAFile, match="must be a regular file, got a ") as refused:
            read(path)
        assert time.monotonic() - start < 5
        assert isinstance(refused.value, OSError)
        assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_what_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    """Another process may put a FIFO there between the look and the opening."""
    os.mkfifo(path := tmp_path / "a.json")
    monkeypatch.setattr(opening, "check_file", lambda path: None)
    assert outcome(lambda: read_bytes(path))[0] == "refused"


def test_files_and_links_to_files_are_read(tmp_path):
    file, link = tmp_path / "a", tmp_path / "b"
    file.write_bytes("é\r\nb\n".encode())
    link.symlink_to("a")
    assert read_bytes(link) == read_bytes(file, 6) == "é\r\nb\n".encode()
    assert read_text(link) == file.read_text(encoding="utf-8") == "é\nb\n"
    with pytest.raises(NotAFile, match="must be a file of at most 5 bytes, got one of 6 bytes"):
        read_bytes(file, 5)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_a_file_of_nothing_but_a_length_is_not_read(tmp_path):
    with open(tmp_path / "record.json", "wb") as file:
        file.truncate(1 << 40)
    told, words = outcome(lambda: hp.RunRecord.load(tmp_path / "record.json"))
    assert (told, "at most 268,435,456 bytes" in words) == ("refused", True)


def test_rows_that_name_a_fifo_in_place_of_a_picture_are_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    os.mkfifo(tmp_path / "a.png")
    features = datasets.Features({"image": datasets.Image()})
    rows = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}, features=features)
    assert outcome(lambda: check_pictures(rows, "image"))[0] == "refused"


#: Calls that open a file by its name, and where they may stand: files of the package or of the
#: system, and what comes right after ``check_file``.
OPENING = ("open", "read_text", "read_bytes", "load_file", "safe_open", "ZipFile")
ALLOWED = {
    "core/opening.py": "the one place",
    "report/html.py": "a template of ours",
    "checkpoints/remote_code.py": "a template of ours",
    "core/registry.py": "an installed package",
    "serving/asking.py": "what serving/check.py wrote",
    "serving/servers.py": "what serving/check.py wrote; it runs without headprune",
    "run/surroundings.py": "what the system says of itself",
    "cli/prune.py": "what was written a moment ago",
    "cli/_shared.py": "the null device",
    "core/files.py": "places that are written to",
    "data/sound.py": "bytes in memory",
}


def openings(source):
    """Lines that open a file by its name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            ours = called in ("read_text", "read_bytes")
            modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
            writes = any(mode in ("wb", "ab+", "x") for mode in modes)
            if called.rpartition(".")[2] in OPENING and not ours and not writes:
                found.append(node.lineno)
    return found


def test_the_look_for_openings_sees_them():
    source = "Path(a).read_text()\nopen(a)\nread_text(a)\nopen(a, 'wb')\nsafe_open(a, 'np')"
    assert openings(source) == [1, 2, 5]


def test_files_are_opened_in_one_place():
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).as_posix() in ALLOWED:
            continue
        text = path.read_text(encoding="utf-8")
        for number in openings(text):
            before = "\n".join(text.splitlines()[max(0, number - 12) : number])
            looked = "check_file(" in before or "_metadata_of(" in before
            assert looked, f"{path.name}:{number} opens a file that nobody looked at"
