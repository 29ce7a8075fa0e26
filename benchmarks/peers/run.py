"""headprune beside what else one could use: the same weights, rows and judging code, every peer in
its own environment.

    python benchmarks/peers/environments.py --environments FOLDER
    python benchmarks/peers/run.py --task sst2 --data path/to/sst2 --work runs/peers \\
        --environments FOLDER
    python benchmarks/peers/run.py --task digits --work runs/peers --environments FOLDER
    python benchmarks/peers/run.py --task stories --data path/to/stories260k --work runs/peers \\
        --environments FOLDER
    python benchmarks/peers/run.py --figure            # docs/peers.md, from the records

Budgets are heads, feed-forwards as they are (``--budgets``), or shares of the layers'
multiply-adds, kept by heads and neurons together (``--shares``).

The base model is trained once and written as a plain Transformers folder, the rows as arrays; a
peer's program (``programs``) gets both with a job in JSON, makes its smaller model, and hands back
logits, raw times, the saved model and what it took. A second process loads what was saved, alone.
Times are rounds of the base model and the smaller one in turn, in one process. A peer that cannot
do it has its error in the table.

A row of the record is one peer with one budget and one draw of calibration rows, written
as soon as it is there; a run that is started again goes on after the last one (``--again`` repeats
rows with an error). The first draw is timed, so run it on an idle machine (``--seeds 1``), or time
what it saved once more when the machine is idle (``--retime``); further draws can come later,
beside other work. Logits stay in ``--work``, for the paired comparisons with headprune; without
them, on another machine, comparisons that the record has stay, and new ones need both rows there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import environments
import judging
import page
import studies
import subjects
from regret import ROWS
from roster import IMAGE, LANGUAGE, OWN, PEERS, REFERENCE, TEXT, TITLES, TRAINED, Peer
from studies import RECORDS, now
from subjects import Subject

HERE = Path(__file__).resolve().parent
#: The draw whose models are timed.
TIMED = 0
#: Heads kept by default, of 72 and of 32.
BUDGETS = {**dict.fromkeys(TEXT, (36, 24, 14)), "digits": (16, 8)}
#: Models that are no encoder of texts.
MODELS = {"digits": "digits-vit", "stories": "stories260k"}
#: Shares of the layers' multiply-adds kept by default, of heads and neurons together.
SHARES = (0.6, 0.42, 0.25)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = studies.parser(__doc__, "peers", TITLES, [])
    parser.set_defaults(calibration=None)
    parser.add_argument("--environments", type=Path, help="folder of the peers' environments")
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        help="of the layers' multiply-adds kept, in heads and neurons together; given alone, there"
        " are no rows of --budgets, and the other way round",
    )
    studies.add_device(parser)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[128], help="tokens; images have their own"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="about how long each shape is timed"
    )
    parser.add_argument(
        "--epochs", type=float, help="of training the base model; default: the task's own"
    )
    parser.add_argument(
        "--judged", type=int, help="judge by the first so many rows only, to try the script"
    )
    parser.add_argument(
        "--train-rows", type=int, help="peers that train see so many rows only, to try the script"
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one half of a job")
    studies.add_minutes(parser)
    parser.add_argument("--again", action="store_true", help="try rows with an error again")
    parser.add_argument(
        "--retime",
        action="store_true",
        help="time the rows that are there once more, and no others",
    )
    args = parser.parse_args(argv)
    if not args.figure:
        needed = ("task", "work", "environments", *(() if args.task in IMAGE else ("data",)))
        if lacking := [name for name in needed if getattr(args, name) is None]:
            parser.error(f"give --{', --'.join(lacking)}, or --figure")
        if not args.budgets and not args.shares:
            args.budgets, args.shares = list(BUDGETS.get(args.task, ())), list(SHARES)
        if args.task in LANGUAGE and args.budgets:
            parser.error(f"--budgets: heads alone are not compared on {args.task}; give --shares")
        if args.task in LANGUAGE and args.epochs is not None:
            parser.error(f"--epochs: the model of {args.task} comes trained")
        if args.task in MODELS and args.model != parser.get_default("model"):
            parser.error(f"--model: {args.task} has a model of its own, {MODELS[args.task]}")
        if args.calibration is None:
            args.calibration = ROWS.get(args.task, 512)
        args.shares = args.shares or []
        if not all(0 < share < 1 for share in args.shares):
            parser.error(f"--shares: must lie between 0 and 1, got {args.shares}")
        args.work = args.work.resolve()
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or writes the page; returns the path that was
    written."""
    args = arguments(argv)
    if args.figure:
        return page.write(args.records, args.docs)
    check_environments(args)
    over = studies.clock(args)
    subject = subjects.subject(args)
    out: Path = (
        args.out or RECORDS / f"peers-{args.task}{'-cuda' if args.device == 'cuda' else ''}.json"
    )
    record = begin(args, subject, out)
    # An earlier call may have been killed between a row and its comparison.
    compare(args, subject, record, out)
    for peer, kept, seed in wanted(args, subject.layers):
        name = (peer.name, kept, seed)
        done = next((row for row in record["rows"] if key(row) == name), None)
        if args.retime:
            if done is not None and "speed" in done:
                done |= timed_again(args, subject, peer, kept, seed)
                studies.keep(record, out)
            continue
        if done is not None and not (args.again and "error" in done):
            continue
        if over():
            break
        row = measured(args, subject, peer, kept, seed)
        record["rows"] = [other for other in record["rows"] if other is not done] + [row]
        studies.keep(record, out)
        print(
            f"{peer.name:40} {kept or '-':>3} {seed} {row.get('test', row.get('error'))}",
            flush=True,
        )
        compare(args, subject, record, out)
    print(out)
    return out


def check_environments(args: argparse.Namespace) -> None:
    """Refuses to begin where an environment was never made: that is no failure of the peer's."""
    needed = {peer.environment for peer, _, _ in wanted(args)}
    lacking = sorted(needed - {OWN, *_made(args)})
    if lacking:
        script = "benchmarks/peers/environments.py"
        raise SystemExit(
            f"No environment {', '.join(lacking)}: run {script} first, or name other --peers."
        )


def _made(args: argparse.Namespace) -> list[str]:
    names = {peer.environment for peer in PEERS.values()} - {OWN}
    return [name for name in names if environments.state(args.environments, name)]


def begin(args: argparse.Namespace, subject: Subject, out: Path) -> dict[str, Any]:
    """The record without rows, or the one that lies at ``out``, if it is of the same model, rows
    and shapes."""
    same: dict[str, Any] = {
        "benchmark": "peers",
        "task": args.task,
        "model": MODELS.get(args.task, args.model),
        "weights": subject.weights,
        "heads": subject.heads,
        "rows_used": subject.rows,
        "train": subject.train,
        "shapes": [list(shape) for shape in shapes(args)],
        "device_used": args.device,
        "threads": args.threads,
    }
    device = torch.device(args.device)
    return studies.begun(out, same | studies.gpu(device), device, git_commit=git_commit())


def shapes(args: argparse.Namespace) -> list[tuple[int, int]]:
    lengths = [0] if args.task in IMAGE else args.lengths
    return [(batch, length) for length in lengths for batch in args.batch_sizes]


def wanted(args: argparse.Namespace, layers: int = 1) -> Iterator[tuple[Peer, float | None, int]]:
    """Peer, budget and draw of every row.

    Ours come before those that start from its result. What keeps as many heads in every layer has
    no row where that is no whole number.
    """
    for peer in sorted(
        (PEERS[name] for name in args.peers),
        key=lambda peer: (peer.given or "").startswith(REFERENCE),
    ):
        if args.task in peer.tasks:
            heads = [kept for kept in args.budgets if not (peer.even and kept % layers)]
            for kept in filter(peer.meets, (*heads, *args.shares, None)):
                for seed in range(min(args.seeds, peer.draws or args.seeds)):
                    yield peer, kept, seed


def key(row: dict[str, Any]) -> tuple[str, float | None, int]:
    return row["peer"], row["kept"], row["seed"]


def measured(
    args: argparse.Namespace, subject: Subject, peer: Peer, kept: float | None, seed: int
) -> dict[str, Any]:
    """One row: what a peer did, or why it could not."""
    row: dict[str, Any] = {
        "peer": peer.name,
        "kept": kept,
        "seed": seed,
        "environment": peer.environment,
    }
    try:
        python = interpreter(args.environments, peer)
        job = written(args, subject, peer, kept, seed)
        cut = answer(args, python, peer, job, "cut")
        row |= {
            k: cut[k]
            for k in ("versions", "seconds", "heads", "neurons", "notes")
            if cut.get(k) is not None
        }
        row |= judged(args, subject, job, cut)
        row["loads_back"] = loaded(args, python, peer, job, cut)
        row["memory_mib"] = {"cut": cut["memory"], "run": row["loads_back"].pop("memory", None)}
    except Failure as error:
        row["error"] = tidied(str(error), args)
    return {**row, "created": now()}


def timed_again(
    args: argparse.Namespace, subject: Subject, peer: Peer, kept: float | None, seed: int
) -> dict[str, Any]:
    """The speed of the model that a row saved, measured by a process of its own."""
    job = folder_of(args, subject, peer.name, kept, seed) / "job.json"
    found = answer(args, interpreter(args.environments, peer), peer, job, "time")
    return {"speed": speeds(args, found), "timed": now()}


def speeds(args: argparse.Namespace, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Ratios at every shape, out of the rounds that a program hands back."""
    pairs = zip(shapes(args), answer["rounds"], strict=True)
    return [judging.speed(shape, rounds) for shape, rounds in pairs]


class Failure(Exception):
    """A peer could not do it; the words are its row."""


def tidied(text: str, args: argparse.Namespace) -> str:
    """Without folders of this machine."""
    for folder, word in (
        (args.work, "WORK"),
        (args.environments.resolve(), "ENVIRONMENTS"),
        (HERE, "peers"),
    ):
        text = text.replace(str(folder), word)
    return text.replace(sys.prefix, "PREFIX")


def interpreter(folder: Path, peer: Peer) -> str:
    """Python of the peer's environment."""
    if peer.environment == OWN:
        return sys.executable
    state = environments.state(folder, peer.environment)
    if not state["ok"]:
        raise Failure(f"its environment cannot be made: {state['error']}")
    return str(environments.python(folder, peer.environment))


# ---------------------------------------------------------------------------------------------- one
# job


def folder_of(
    args: argparse.Namespace, subject: Subject, name: str, kept: float | None, seed: int
) -> Path:
    """Where a job and its answers lie."""
    plain = "".join(c if c.isalnum() else "-" for c in name)
    return subject.folder / f"jobs-{args.device}" / f"{plain}-{kept or 'whole'}-{seed}"


def written(
    args: argparse.Namespace, subject: Subject, peer: Peer, kept: float | None, seed: int
) -> Path:
    """The job's file, in a fresh folder."""
    folder = folder_of(args, subject, peer.name, kept, seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = {p: str(subject.file(p, seed)) for p in ("calibration", "train", "validation", "test")}
    settings = dict(peer.settings)
    if peer.program == "smaller":
        settings |= {"before": str(subject.before)}
    job = {
        "base": str(subject.base),
        "rows": rows,
        "given": given(args, subject, peer, kept, seed),
        "kept": kept,
        "heads": subject.heads,
        "tokens": subject.tokens or max(args.lengths),
        "settings": settings,
        "train": subject.train,
        "device": args.device,
        "threads": args.threads,
        "batch": subjects.BATCH,
        "shapes": shapes(args) if seed == TIMED else [],
        "seconds": args.seconds,
        "seed": seed,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job, indent=1))
    return path


def given(
    args: argparse.Namespace, subject: Subject, peer: Peer, kept: float | None, seed: int
) -> str | None:
    """What a peer starts from in place of the base model."""
    if peer.given is None:
        return None
    folder = subject.base
    if peer.given.startswith(REFERENCE):
        folder = folder_of(args, subject, REFERENCE, kept, seed) / "saved"
        if not folder.is_dir():
            raise Failure(
                f"{REFERENCE} has saved nothing to start from; run it first, with the same budget"
                " and draw"
            )
    if not peer.given.endswith("onnx"):
        return str(folder)
    # With attention as one operator, PyTorch's exporter writes rotary positions that ONNX Runtime
    # cannot run.
    opset = None if args.task in LANGUAGE else peer.settings.get("opset")
    name = folder.name if opset is None else f"{folder.name}-{opset}"
    out = folder.parent / f"{name}.onnx"
    try:
        return str(subjects.onnx_file(folder, subject.file("test", 0), out, opset))
    except Exception as error:  # an exporter raises anything
        raise Failure(
            f"no ONNX file: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
        ) from error


def answer(
    args: argparse.Namespace, python: str, peer: Peer, job: Path, half: str
) -> dict[str, Any]:
    """What a program left; its error, and its death, are raised."""
    command = [python, str(HERE / "programs" / f"{peer.program}.py"), str(job), half]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(args.threads))
    environ = (
        {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        | threads
        | {"HF_HUB_OFFLINE": "1"}
    )
    if peer.environment == OWN:  # with the packages that were carried to a machine without an index
        carried = os.environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(studies.ROOT), *([carried] if carried else [])]
        )
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=args.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"took more than {args.timeout:g} s") from None
    found = job.with_name(f"{half}.json")
    if done.returncode or not found.is_file():
        raise Failure(f"exit status {done.returncode}: {' '.join(done.stderr.split())[-600:]}")
    data: dict[str, Any] = json.loads(found.read_text())
    if "error" in data:
        raise Failure(data["error"])
    return data


def array(job: Path, half: str, name: str) -> np.ndarray:
    """One of the arrays that a program handed back."""
    with np.load(job.with_name(f"{half}.npz"), allow_pickle=False) as file:
        found: np.ndarray = file[name]
    return found


def judged(
    args: argparse.Namespace, subject: Subject, job: Path, cut: dict[str, Any]
) -> dict[str, Any]:
    """Quality, speed and size on disk."""
    found: dict[str, Any] = {}
    for split in ("validation", "test"):
        labels = subject.labels(split)
        answers = judging.answers(array(job, "cut", split), labels)
        if not judging.has_quality(answers, labels):
            raise Failure(f"its {split} grades are all the same or not finite")
        found[split] = round(judging.quality(answers, labels), 5)
    first = subject.first()
    apart = float(np.abs(array(job, "cut", "base") - first).max())
    if not apart < 1e-2 * np.abs(first).max():
        raise Failure(f"its base model is another one: logits differ by {apart:.2g}")
    if cut["rounds"]:
        found["speed"] = speeds(args, cut)
    files = [path for path in job.with_name("saved").rglob("*") if path.is_file()]
    found["bytes"] = sum(path.stat().st_size for path in files) or None
    return found


def loaded(
    args: argparse.Namespace, python: str, peer: Peer, job: Path, cut: dict[str, Any]
) -> dict[str, Any]:
    """Whether what was saved, loaded by a fresh process, says the same on the test rows."""
    if "not_saved" in cut:
        return {"ok": False, "error": tidied(cut["not_saved"], args)}
    try:
        found = answer(args, python, peer, job, "load")
    except Failure as error:
        return {"ok": False, "by": cut["saved_by"], "error": tidied(str(error), args)}
    apart = float(np.abs(array(job, "load", "test") - array(job, "cut", "test")).max())
    return {
        "ok": apart < 1e-3,
        "by": cut["saved_by"],
        "difference": apart,
        "memory": found["memory"],
    }


def compare(args: argparse.Namespace, subject: Subject, record: dict[str, Any], out: Path) -> None:
    """Writes the paired differences into the record."""
    before = {
        (line["peer"], line["kept"], line["reference"], line["reference_kept"]): line
        for line in record.get("compared", ())
    }
    record["compared"] = compared(args, subject, record["rows"], before)
    studies.keep(record, out)


def compared(
    args: argparse.Namespace,
    subject: Subject,
    rows: list[dict[str, Any]],
    before: Mapping[Any, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Every peer against what it is compared with: paired differences, draw by draw.

    A line of ``before`` stays where its logits are gone, as the record came from another machine,
    if it is of as many draws.
    """
    found = []
    by = {key(row): row for row in rows if "error" not in row}
    budgets = sorted({kept for _, kept, _ in by if kept is not None}, reverse=True)
    for name, kept in dict.fromkeys((peer, kept) for peer, kept, _ in by):
        for other, its in opponents(name, kept, budgets):
            seeds = [s for p, k, s in by if (p, k) == (name, kept)]
            # What has one draw only is compared with that one.
            pairs = [(s, s if (other, its, s) in by else 0) for s in seeds]
            if all((other, its, theirs) in by for _, theirs in pairs):
                line: dict[str, Any] = {
                    "peer": name,
                    "kept": kept,
                    "reference": other,
                    "reference_kept": its,
                }
                line["draws"] = len(seeds)
                both = [((name, kept, a), (other, its, b)) for a, b in pairs]
                try:
                    found.append(line | differences(args, subject, both))
                except FileNotFoundError as error:
                    earlier = before.get((name, kept, other, its))
                    stays = earlier is not None and earlier["draws"] == line["draws"]
                    what = "comparison stays" if stays else "is not compared"
                    print(f"{name} {kept} with {other} {its}: {what}, no {error.filename}")
                    if earlier is not None and stays:
                        found.append(earlier)
    return found


def differences(
    args: argparse.Namespace, subject: Subject, pairs: Sequence[Sequence[tuple[Any, Any, int]]]
) -> dict[str, Any]:
    """The paired difference on each split, from pairs of rows by peer, budget and draw.

    Raises:
        FileNotFoundError: the logits of a row are gone.
    """
    found = {}
    for split in ("validation", "test"):
        answers = [tuple(answered(args, subject, *one, split) for one in pair) for pair in pairs]
        found[split] = judging.difference(answers, subject.labels(split))
    return found


def opponents(
    name: str, kept: float | None, budgets: Sequence[float]
) -> list[tuple[str, float | None]]:
    """Peers and budgets that a row is compared with.

    What cuts nothing is compared with the base model and with our cut ones; what cuts with ours of
    the same budget; what has trained as often as our trained one with that; what starts from our
    cut model with the same of the whole one.
    """
    if name in ("unpruned", REFERENCE):
        return []
    whole = name.removeprefix(f"{REFERENCE} + ")
    if whole in PEERS and whole != name:
        return [(REFERENCE, kept), (whole, None)]
    if kept is None:
        return [("unpruned", None), *((REFERENCE, its) for its in budgets)]
    often = PEERS[TRAINED].trains if TRAINED in PEERS else None
    return [
        (REFERENCE, kept),
        *([(TRAINED, kept)] if PEERS[name].trains == often and name != TRAINED else []),
    ]


def answered(
    args: argparse.Namespace, subject: Subject, name: str, kept: float | None, seed: int, split: str
) -> np.ndarray:  # fmt: skip
    """One number an example."""
    job = folder_of(args, subject, name, kept, seed) / "job.json"
    written = job.with_name("cut.npz").stat().st_mtime_ns
    return _answered(job, written, split, subject.file(split, 0))


@lru_cache(maxsize=4096)
def _answered(job: Path, written: int, split: str, rows: Path) -> np.ndarray:
    """Every row is compared with many others, and logits of a language are large: they are read
    once, or again where another run has ``written`` them."""
    return judging.answers(array(job, "cut", split), subjects.labels_of(rows))


if __name__ == "__main__":
    main()
