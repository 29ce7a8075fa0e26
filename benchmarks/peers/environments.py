"""Virtual environments of the peers, one a file of ``requirements``, whose versions are all pinned.

    python benchmarks/peers/environments.py --environments FOLDER
    python benchmarks/peers/environments.py --environments FOLDER --names onnx --pip=--index-url=URL

Each takes 1 to 1.5 GB with a CPU build of PyTorch (``--pip=--extra-index-url=...`` where the index
gives another one). An environment that is there and was made of the same pins is left alone; one
that cannot be made leaves pip's words in ``FOLDER/NAME.json``, and they are that peer's row in the
table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"


def names() -> list[str]:
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environments", type=Path, required=True, help="folder that they are made in"
    )
    parser.add_argument("--names", nargs="+", choices=names(), default=names())
    parser.add_argument(
        "--pip", action="append", default=[], help="an argument of pip install; may be given again"
    )
    args = parser.parse_args(argv)
    found = {name: make(args.environments, name, args.pip) for name in args.names}
    for name, state in found.items():
        print(f"{name:16} {'ready' if state['ok'] else state['error']}")
    return 0 if all(state["ok"] for state in found.values()) else 1


def make(folder: Path, name: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """One environment, unless it is there; what is known of it is also in ``FOLDER/NAME.json``."""
    pins = digest(name)
    if state(folder, name).get("pins") == pins and state(folder, name)["ok"]:
        return state(folder, name)
    place, start = folder / name, perf_counter()
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    pip = [
        str(python(folder, name)),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
        *more,
        "-r",
    ]
    error = _error([sys.executable, "-m", "venv", str(place)])
    error = error or _error([*pip, str(REQUIREMENTS / f"{name}.txt")])
    if error is None and _alone(name).is_file():
        error = _error([*pip, str(_alone(name)), "--no-deps"])
    found = {
        "pins": pins,
        "ok": error is None,
        "error": error,
        "seconds": round(perf_counter() - start),
    }
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    return found


def _error(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())[-600:]


def _alone(name: str) -> Path:
    """What is installed without what it asks for."""
    return REQUIREMENTS / f"{name}.no-deps"


def digest(name: str) -> str:
    pins = (
        path.read_bytes() for path in (REQUIREMENTS / f"{name}.txt", _alone(name)) if path.is_file()
    )
    return hashlib.sha256(b"".join(pins)).hexdigest()


def state(folder: Path, name: str) -> dict[str, Any]:
    """What is known of an environment; empty where it was never made."""
    path = folder / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def python(folder: Path, name: str) -> Path:
    return folder / name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


if __name__ == "__main__":
    sys.exit(main())
