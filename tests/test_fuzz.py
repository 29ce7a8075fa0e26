"""Damaged files of every kind that we read: an error in words or a value, never a crash, a hang or
a written file.

Each mutation has a number, and the number alone makes it. ``make test`` tries some of each kind;
``make test-long`` thousands.
"""

import os
import random
import warnings
from pathlib import Path

import pytest
import torch

from headprune.core.errors import HeadPruneError
from tests.fuzzing import alarm
from tests.kinds_of_files import KINDS, TRAINED, Kind, save_plan, training_of

#: Seconds of work that one damaged file may take: far above what a sound one takes on a slow
#: machine.
PATIENCE = 20
#: Reading rows takes a tenth of a second each time, opening adapters the same.
SLOW = {"timings": 0.5, "adapter": 0.2, "adapter weights": 0.2}
SLOW |= dict.fromkeys(("csv", "tsv", "jsonl", "json rows", "parquet"), 0.3)
#: PEFT asks Transformers by an old name.
IGNORED = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def try_some(name, numbers, folder):
    """Reads so many damaged files; how many were refused and how many were read all the same.

    The folders lie deep enough in ``folder`` that a way out of them by some ``..`` ends in it
    still, where any change is seen: a file that is new, gone, or written.
    """
    kind, found = KINDS[name], {"refused": 0, "read": 0}
    deep = folder / "a" / "b" / "c"
    sound, here = deep / "sound", deep / "here"
    for made in (sound, here):
        made.mkdir(parents=True)
    kind.make(sound)
    whole = (sound / kind.file).read_bytes()
    kind.read(sound)
    before = os.getcwd()
    os.chdir(here)
    try:
        for number in numbers:
            (sound / kind.file).write_bytes(kind.damage(whole, random.Random(f"{name} {number}")))
            everything = seen_in(folder)
            try:
                with alarm(PATIENCE), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    kind.read(sound)
                found["read"] += 1
            except HeadPruneError as refusal:
                found["refused"] += 0 < len(str(refusal).strip()) < 50_000
            except BaseException as error:
                said = f"{type(error).__name__}: {str(error)[:500]}"
                raise AssertionError(f"{name} {number}: {said}") from error
            assert seen_in(folder) == everything, f"{name} {number} wrote something"
    finally:
        os.chdir(before)
    assert sum(found.values()) == len(numbers), "an error without words, or far too many of them"
    assert found["refused"] or not kind.refuses
    return found


def seen_in(folder):
    """Every file under a folder, with its length and the time when it was written last."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("where", ["../../HACKED", "../sound/neighbour", "new"])
def test_what_a_reader_writes_is_seen(where, tmp_path, monkeypatch):
    def make(folder):
        save_plan(folder)
        (folder / "neighbour").write_text("a")

    sound = [True]  # the first time that it is read

    def read(folder):
        if not sound:
            Path(where).write_text("b")
        sound.clear()

    monkeypatch.setitem(KINDS, "a reader that writes", Kind("plan.json", make, read))
    with pytest.raises(AssertionError, match="a reader that writes 0 wrote something"):
        try_some("a reader that writes", range(1), tmp_path)


@IGNORED
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(name, tmp_path):
    try_some(name, range(round(30 * SLOW.get(name, 1))), tmp_path)


@IGNORED
@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_damaged_files(name, tmp_path):
    found = try_some(name, range(100, 100 + round(500 * SLOW.get(name, 1))), tmp_path)
    print(f"{name}: {found}")


def test_no_flipped_bit_of_a_training_is_gone_on_with(tmp_path):
    """``torch.load`` compares no checksum, so that most of them would make other weights."""
    draw, keeper = random.Random(0), training_of(tmp_path)
    weights = torch.randn(100, generator=torch.Generator().manual_seed(0))
    keeper.save({**TRAINED, "weights": {"w": weights}})
    whole, refused = keeper.path.read_bytes(), 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        keeper.path.write_bytes(damaged)
        try:
            state = keeper.load()
        except HeadPruneError:
            refused += 1
            continue
        assert torch.equal(state["weights"]["w"], weights)
        assert state["step"] == TRAINED["step"]
    assert refused
