"""Which versions of Python, torch and Transformers the core of the tests was run with, and what
came of it.

    python benchmarks/compatibility.py --work FOLDER
    python benchmarks/compatibility.py --work FOLDER --index https://download.pytorch.org/whl/cpu
    python benchmarks/compatibility.py --work FOLDER --any-build

A row is a virtual environment in ``--work``, made from an interpreter that is installed here, with
one version of each, and the tests that say whether headprune works there: the laws on five layouts,
checkpoints, cuts, stored values of every version (`tests/golden`). Without torch, what needs none
is run: values, slabs, selectors. On Linux only builds of torch for processors alone are taken
(``+cpu``), because the others bring gigabytes; ``--index`` names a package index that has them, and
``--any-build`` takes the others where it has none. What is not to be had is a row, too, and says
what was missing. Rows stay in the record until they are run again, so that several machines may
fill it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pages import publish
from studies import RECORDS, ROOT, keep, now

from headprune.run.surroundings import git_commit

#: Tests that need a model.
WITH_TORCH = (
    "tests/laws/test_law_1_gates_leave_no_trace.py",
    "tests/laws/test_law_2_zero_is_off.py",
    "tests/laws/test_law_3_gated_is_pruned.py",
    "tests/laws/test_law_3_generation.py",
    "tests/laws/test_law_4_checkpoint.py",
    "tests/laws/test_law_4_what_survives.py",
    "tests/laws/test_law_5_composition.py",
    "tests/unit/test_checkpoint.py",
    "tests/unit/test_cut.py",
    "tests/unit/test_golden_checkpoint.py",
    "tests/unit/test_golden_sweep.py",
)
#: Tests that need none.
VALUES = (
    "tests/unit/test_core_codec.py",
    "tests/unit/test_core_heads.py",
    "tests/unit/test_core_refusals.py",
    "tests/unit/test_core_registry.py",
    "tests/unit/test_core_scores_plan_record.py",
    "tests/unit/test_core_slabs.py",
    "tests/unit/test_golden.py",
    "tests/unit/test_selection.py",
    "tests/unit/test_selection_answers.py",
    "tests/unit/test_selection_close.py",
    "tests/unit/test_selection_knapsack.py",
    "tests/unit/test_selection_quadratic.py",
    "tests/unit/test_selection_rules.py",
)
#: What those need of the package's dependencies.
LIGHT = ("numpy", "scipy", "safetensors", "pandas", "typing-extensions", "pyyaml", "rich")
SHOWN = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Cell:
    """One environment: versions, or None for an environment without them."""

    python: str
    torch: str | None = None
    transformers: str | None = None

    @property
    def name(self) -> str:
        parts = [
            f"python{self.python}",
            *(f"{n}{getattr(self, n)}" for n in SHOWN[:2] if getattr(self, n)),
        ]
        return "-".join(parts)

    @property
    def wanted(self) -> dict[str, str | None]:
        return {"python": self.python, "torch": self.torch, "transformers": self.transformers}

    def requirements(self, any_build: bool) -> list[list[str]]:
        """What pip is asked for, beside the package, in the order in which it is tried."""
        if self.torch is None:
            return [["--no-deps", "-e", str(ROOT)]]
        linux = platform.system() == "Linux"
        builds = [*(["+cpu"] if linux else []), *([""] if any_build or not linux else [])]
        return [
            [f"torch=={self.torch}{build}", f"transformers=={self.transformers}", "-e", str(ROOT)]
            for build in builds
        ]


#: Oldest and newest of what pyproject.toml allows, both ends of each range met by both ends of the
#: others.
CELLS = (
    Cell("3.10", "2.8.0", "5.14.0"),
    Cell("3.11", "2.13.0", "5.14.0"),
    Cell("3.11", "2.13.0", "5.23.0"),
    Cell("3.12", "2.8.0", "5.23.0"),
    Cell("3.13", "2.15.0", "5.14.0"),
    Cell("3.13", "2.15.0", "5.23.0"),
    *(Cell(python) for python in ("3.10", "3.11", "3.12", "3.13")),
)


class Missing(Exception):
    """What an environment lacks, in words."""


def main(argv: Sequence[str] | None = None, cells: Sequence[Cell] = CELLS) -> Path:
    """Runs the cells and returns the record's path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the environments, which are used again"
    )
    parser.add_argument("--index", action="append", default=[], help="a further package index")
    parser.add_argument(
        "--any-build",
        action="store_true",
        help="builds of torch with CUDA where there are no others",
    )
    parser.add_argument("--only", help="cells whose name has this in it")
    parser.add_argument("--out", type=Path, default=RECORDS / "compatibility.json")
    args = parser.parse_args(argv)
    record = (
        json.loads(args.out.read_text())
        if args.out.is_file()
        else {"benchmark": "compatibility", "rows": []}
    )
    for cell in cells:
        if args.only and args.only not in cell.name:
            continue
        row = {
            **cell.wanted,
            "created": now(),
            "git_commit": git_commit(),
            **tried(cell, args.work, args.index, args.any_build),
        }
        record["rows"] = [
            r for r in record["rows"] if any(r[k] != v for k, v in cell.wanted.items())
        ] + [row]
        order = [c.wanted for c in cells]
        record["rows"].sort(key=lambda r: _place(r, order))
        keep(record, args.out)
        print(f"{cell.name}: {said(row)}", flush=True)
    return Path(args.out)


def _place(row: dict[str, Any], order: list[dict[str, str | None]]) -> int:
    wanted = {key: row[key] for key in ("python", "torch", "transformers")}
    return order.index(wanted) if wanted in order else len(order)


def tried(cell: Cell, work: Path, index: Sequence[str], any_build: bool = False) -> dict[str, Any]:
    """The environment and what the tests said there; or what was missing."""
    found: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}"}
    try:
        python = environment(cell, work, index, any_build)
    except Missing as missing:
        return {**found, "missing": str(missing)}
    script = "import importlib.metadata as m, json, platform\n"
    script += "found = {d.metadata['name'].lower(): d.version for d in m.distributions()}\n"
    script += (
        "print(json.dumps({'python': platform.python_version()} | {n: found.get(n) for n in"
        f" {SHOWN}}}))"
    )
    versions = json.loads(
        subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    )
    files = VALUES if cell.torch is None else (*WITH_TORCH, *VALUES)
    start = perf_counter()
    counts, failed = run_tests(
        python, files, work / f"{cell.name}.xml", conftest=cell.torch is not None
    )
    return {
        **found,
        "versions": versions,
        "tests": counts,
        "failed": failed,
        "seconds": round(perf_counter() - start),
    }


def environment(cell: Cell, work: Path, index: Sequence[str], any_build: bool = False) -> Path:
    """The interpreter of the cell's environment, made where it is not there yet.

    Raises:
        Missing: no such Python, or a package that no index has for it.
    """
    folder = work / cell.name
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if (folder / "complete").is_file():
        return python
    subprocess.run(
        [interpreter(cell.python), "-m", "venv", "--clear", str(folder)],
        check=True,
        capture_output=True,
    )
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += [word for url in index for word in ("--extra-index-url", url)]
    light = [] if cell.torch else list(LIGHT)
    for ways in (cell.requirements(any_build), [["pytest>=8.2", *light]]):
        tries = (
            subprocess.run([*pip, *way], capture_output=True, text=True, check=False)
            for way in ways
        )
        said = []
        for done in tries:
            if done.returncode == 0:
                break
            said.append(why(done.stderr))
        else:
            raise Missing("; ".join(said))
    (folder / "complete").touch()
    return python


def interpreter(version: str) -> str:
    """A Python of this version that works: of the path, or of pyenv.

    Raises:
        Missing: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in (
        sys.executable,
        f"python{version}",
        *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"))),
    ):
        try:
            done = subprocess.run(
                [candidate, "-c", script], capture_output=True, text=True, check=False
            )
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    raise Missing(f"no Python {version} is installed here")


def why(stderr: str) -> str:
    """Of what pip said, the requirement that nothing was found for; else its last line."""
    if found := re.search(r"No matching distribution found for ([^\s(]+)", stderr):
        return f"no package {found[1]} for this Python and system on the index"
    return (stderr.strip().splitlines() or ["pip failed"])[-1]


def run_tests(
    python: Path, files: Sequence[str], report: Path, conftest: bool
) -> tuple[dict[str, int], list[str]]:
    """How many tests passed, failed and were skipped, and the names of those that failed."""
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *files,
    ]
    command += [] if conftest else ["--noconftest"]
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    report.unlink(missing_ok=True)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **threads},
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.is_file():
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = sorted(
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}" for case in bad
    )
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
    }, names


def said(row: dict[str, Any]) -> str:
    """A row's result in words."""
    if "missing" in row:
        return f"not run: {row['missing']}"
    counts = row["tests"]
    words = f"{counts['passed']} passed"
    words += f", {counts['failed']} failed" if counts["failed"] else ""
    return words + (f", {counts['skipped']} skipped" if counts["skipped"] else "")


def draw(records: Path, docs: Path) -> Path:
    """Writes docs/compatibility.md from the record."""
    rows = json.loads((records / "compatibility.json").read_text())["rows"]
    lines = []
    for row in rows:
        have = row.get("versions", row)
        scope = "models, values" if row["torch"] else "values, without torch"
        cells = [
            have["python"],
            row["torch"] and have["torch"],
            row["torch"] and have["transformers"],
            scope,
        ]
        lines.append(f"| {' | '.join(cell or '' for cell in cells)} | {said(row)} |")
    systems = ", ".join(dict.fromkeys(row["system"] for row in rows))
    text = PAGE.format(rows="\n".join(lines), systems=systems, **declared())
    ran = [row for row in rows if "missing" not in row]
    passed = sum(not row["tests"]["failed"] for row in ran)
    lead = (
        "For those who install headprune beside other versions of Python, torch and Transformers:"
        f" {passed} of the {len(ran)} combinations that were run pass all tests."
    )
    return publish(docs / "compatibility.md", lead, text)


def declared() -> dict[str, str]:
    """The ranges of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    patterns = {
        "python": r'^requires-python = "([^"]+)"',
        "torch": r'^  "torch([^"]+)"',
        "transformers": r'^  "transformers([^"]+)"',
    }
    found = {name: re.search(pattern, text, re.MULTILINE) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in found.items() if match}


PAGE = """\
<!-- Written by `make docs-figures` from benchmarks/records/compatibility.json; do not edit. -->
# Compatibility

pyproject.toml asks for Python {python}, torch {torch} and Transformers {transformers}. What of that was run, by
`python benchmarks/compatibility.py --work FOLDER` ({systems}), is this table; a row that was not run says what was
missing, and promises nothing.

*Models* are the laws on five layouts, checkpoints, cuts and every stored file of `tests/golden`; *values* are the
core's values and head-to-row arithmetic, and the selectors, which need no torch.

| Python | torch | Transformers | what was run | result |
| --- | --- | --- | --- | --- |
{rows}

Stored files carry the version of their schema. One of every kind and version that later
commands read lies in `tests/golden`, and the tests load them all: a release that could not read them would fail.
"""


if __name__ == "__main__":
    main()
