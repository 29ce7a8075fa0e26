"""How much faster without some of its heads, at what accuracy: the study behind docs/tradeoff.md,
on a CPU or a GPU.

    python benchmarks/tradeoff.py --task sst2 --data path/to/sst2 --work runs/tradeoff --device cuda
    python benchmarks/tradeoff.py --task trec --data path/to/trec --work runs/tradeoff --small --out
    /tmp/tradeoff.json python benchmarks/tradeoff.py --figure           # docs/tradeoff.md and its
    figures, from the records

Parts, each a kind of row of the record:

- ``quality``: by way and budget, a row for every draw of calibration rows, on test rows that
  nothing was chosen on; when all draws are there, ``paired``: the difference from the base, mean
  over draws, with its 95 % bootstrap interval over examples. ``dense + finetune`` trains the whole
  model as long as the others are trained after their cut, so that training is not taken for
  recovery; ways that train are compared with it, too.
- ``kv``: a decoder with grouped queries loses half of its groups: bytes of the cache, tokens a
  second. It is random, for neither depends on the weights.
- ``sizes``: parameters, bytes on disk, KV bytes.
- ``attention``: the attention modules alone at long inputs, and the models, beside their limits.
- ``gpu``: latency and GPU time of the whole model and all cut ones, cell by cell (``gpu_time.py``),
  with the machine's ceilings; on a GPU by default, in place of ``attention`` and ``speed``.
- ``speed``: the whole model and all cut ones in interleaved rounds for every batch x length x dtype
  x attention x torch.compile, with peak memory, clocks, and what multiply-adds alone would allow.

A row is written as soon as it is there, and a run that is started again goes on after the last one;
``--minutes`` ends it cleanly before a machine is taken away. Parts may be run one after the other,
speed on an idle machine. The speed is that of the model that ``--timed`` makes of the first draw.
Answers stay in ``--work``, for the paired intervals.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import headprune as hp
from headprune.bench.size import sizes
from headprune.core.files import atomic_path
from headprune.data.models import resolve_device
from headprune.model.running import device_of
from headprune.run.surroundings import git_commit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
import tradeoff_page
from determinism import reproducible
from encoder_tasks import TITLES, Cosine, Task, encoder_task
from pipelines import interval
from studies import RECORDS
from tradeoff_gpu import gpu_rows
from tradeoff_speed import Cell, attention_rows, bytes_on_disk, speed_rows
from tradeoff_times import DTYPES, GRID

#: In the order in which they are measured: what takes longest is last.
PARTS = ("quality", "kv", "sizes", "gpu", "attention", "speed")
#: What is measured where nothing else is asked for.
USUAL = {
    "cpu": ["quality", "kv", "sizes", "attention", "speed"],
    "cuda": ["quality", "kv", "sizes", "gpu"],
}
#: Of the whole model: nothing is cut.
DENSE = "dense + finetune"
#: Way of choosing and recovering: scorer, selector, recoveries; ``finetune`` needs labels.
WAYS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "random": ("random", "global_topk", ()),
    "magnitude": ("magnitude", "global_topk", ()),
    "taylor": ("taylor", "global_topk", ()),
    "surgeon": ("surgeon", "global_topk", ()),
    "surgeon + lstsq": ("surgeon", "global_topk", ("lstsq",)),
    "surgeon + finetune": ("surgeon", "global_topk", ("lstsq", "finetune")),
}


def encoder(args: argparse.Namespace) -> Task:
    return encoder_task(
        args.task,
        args.data,
        args.model,
        args.work,
        args.calibration,
        args.epochs,
        args.judged,
        args.device,
    )


#: Makes a task by name. A task of another kind is one entry: a function that returns an
#: ``encoder_tasks.Task``, or what has its attributes (model, calibration, judged, answers, quality,
#: recover_).
TASKS: dict[str, Callable[[argparse.Namespace], Task]] = dict.fromkeys(TITLES, encoder)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = studies.parser(__doc__, "tradeoff", TASKS, GRID["kept"])
    studies.add_device(parser)
    parser.add_argument("--threads", type=int, default=2, help="of torch, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: by the device")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--timed", choices=list(WAYS), default="surgeon", help="the way whose models are timed"
    )
    parser.add_argument(
        "--epochs", type=float, help="of fine-tuning; default 2 for SST-2, 1 for TREC"
    )
    parser.add_argument(
        "--judged", type=int, help="judge by the first so many rows only, to try the script"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=GRID["batch"])
    parser.add_argument("--lengths", type=int, nargs="+", default=GRID["length"])
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["float32", "bfloat16"],
        help="default: fp32, on a GPU bf16 too",
    )
    parser.add_argument(
        "--attention", nargs="+", choices=["eager", "sdpa"], default=GRID["attention"]
    )
    parser.add_argument("--compile", nargs="+", choices=["off", "on"], default=["off", "on"])
    parser.add_argument("--attention-lengths", type=int, nargs="+", default=[512])
    parser.add_argument("--attention-batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--no-memory", action="store_true", help="measure no peaks")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512], help="of the decoder")
    parser.add_argument("--new-tokens", type=int, default=64, help="of the decoder")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="about how long each cell is timed"
    )
    studies.add_minutes(parser)
    parser.add_argument(
        "--small", action="store_true", help="minutes on a CPU: two budgets, one draw, few cells"
    )
    args = studies.parsed(parser, argv)
    args.dtypes = args.dtypes or DTYPES[args.device]
    args.parts = args.parts or USUAL[args.device]
    if args.small:
        args.budgets, args.seeds, args.seconds = (
            args.budgets[1:3] or args.budgets,
            1,
            min(args.seconds, 1.0),
        )
        args.batch_sizes, args.lengths = args.batch_sizes[::2], args.lengths[:2]
        args.attention, args.compile, args.attention_batches = (
            ["sdpa"],
            ["off"],
            args.attention_batches[:1],
        )
        args.prompts = args.prompts[:1]
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or draws; returns the path that was written."""
    args = arguments(argv)
    if args.figure:
        return tradeoff_page.draw(args.records, args.docs)
    over = studies.clock(args)
    device, threads = resolve_device(args.device), torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        task = TASKS[args.task](args)
        same = about(args, task, device)
        out: Path = args.out or RECORDS / f"tradeoff-{args.task}-{args.device}.json"
        out = studies.aside(out, same) if args.aside else out
        model = (
            Path(args.model).name if Path(args.model).is_dir() else args.model
        )  # where it lay is nobody's business
        record = studies.begun(out, same, device, git_commit=git_commit(), model=model)
        record["rows"] = [row for row in record["rows"] if studies.settled(row)]
        for row in studies.in_time(rows(args, task, device, record), over):
            record["rows"].append({**row, **studies.stamp()})
            studies.keep(record, out)
            shown = [value for name, value in row.items() if name != "right"][:10]
            print(*(f"{v:.4g}" if isinstance(v, float) else v for v in shown), flush=True)
    finally:
        torch.set_num_threads(threads)
    print(out)
    return out


def about(args: argparse.Namespace, task: Task, device: torch.device) -> dict[str, Any]:
    """What a record must agree on before rows are added to it: model, rows, settings and kind of
    GPU."""
    answers = task.answers(task.model, "test")
    same: dict[str, Any] = {
        "benchmark": "tradeoff",
        "task": args.task,
        "device": args.device,
        "timed": args.timed,
        "calibration": args.calibration,
        "small": args.small,
        "weights": studies.weights_of(task.model),
        "heads": sum(len(site.heads) for site in hp.find_sites(task.model)),
        "judged": len(answers),
        "base": task.quality(answers, "test"),
    }
    return same | studies.gpu(device)


def rows(
    args: argparse.Namespace, task: Task, device: torch.device, record: dict[str, Any]
) -> Iterator[dict[str, Any] | list[dict[str, Any]]]:  # fmt: skip
    """What is missing, part by part."""
    done = list(record["rows"])
    if "quality" in args.parts:
        store = (
            args.work / f"tradeoff-answers-{args.task}-{record['weights'][:12]}-{args.calibration}"
        )
        yield from quality_rows(args, task, done, store)
    if "kv" in args.parts:
        names = ["dtype", "batch", "prompt", "asked"]
        yield from kv_rows(
            args, device, {tuple(r[name] for name in names) for r in done if r["what"] == "kv"}
        )
    if {"sizes", "gpu", "attention", "speed"} & set(args.parts):
        base = timed_part(task.model)
        known: dict[str, hp.HeadScores] = {}
        plans = {kept: planned(task, args.timed, kept, 0, known) for kept in args.budgets}
        cuts = {kept: timed_part(cut(task, plan)) for kept, plan in plans.items()}
        batch = task.judged["test"][0]
        example = {
            k: v for k, v in batch.get("first", batch).items() if k not in ("labels", "label")
        }
        have = {r["kept"] for r in done if r["what"] == "sizes"}
        if "sizes" in args.parts:
            yield from (
                size_row(base, cuts[kept], example, kept) for kept in cuts if kept not in have
            )
        if "gpu" in args.parts:
            for found in gpu_rows(base, cuts, example, args, done):
                yield [
                    {**r, "cut": digest(plans[r["kept"]])} if "kept" in r else r
                    for r in studies.listed(found)
                ]
        seen = {(r["kept"], r["length"], r["batch"]) for r in done if r["what"] == "attention"}
        if "attention" in args.parts:
            yield from attention_rows(base, cuts, example, args, seen)
        names = [field.name for field in fields(Cell)]
        cells = {
            (r["kept"], Cell(*(r[name] for name in names))) for r in done if r["what"] == "speed"
        }
        if "speed" in args.parts:
            yield from speed_rows(base, cuts, example, args, cells)


# ------------------------------------------------------------------------------------------------
# accuracy


def quality_rows(
    args: argparse.Namespace, task: Task, done: list[dict[str, Any]], store: Path
) -> Iterator[dict[str, Any]]:  # fmt: skip
    whole = task.answers(task.model, "test")
    everything = sum(len(site.heads) for site in hp.find_sites(task.model))
    wanted = [(way, kept) for way in args.ways for kept in args.budgets]
    wanted += [(DENSE, everything)] if any("finetune" in WAYS[way][2] for way in args.ways) else []
    wanted = [
        one for one in wanted if not (task.grades and "finetune" in recoveries(one[0]))
    ]  # trained on labels
    have = {(row["way"], row["kept"], row["seed"]) for row in done if row["what"] == "quality"}
    unpack(done, store, len(whole))
    for seed in range(args.seeds):
        known: dict[str, hp.HeadScores] = {}
        for way, kept in wanted:
            file, there = answers_file(store, way, kept, seed), (way, kept, seed) in have
            if there and file.is_file():
                continue
            plan = None if way == DENSE else planned(task, way, kept, seed, known)
            small = copy.deepcopy(task.model) if plan is None else cut(task, plan)
            for name in recoveries(way):
                recover_(task, small, name, seed)
            answers = task.answers(small, "test")
            keep_answers(file, answers)
            if there:  # measured elsewhere: only its answers were missing
                continue
            said = {
                "what": "quality",
                "way": way,
                "kept": kept,
                "seed": seed,
                "threads": torch.get_num_threads(),
            }
            said |= {"cut": digest(plan)} if plan is not None else {}
            yield said | {"quality": task.quality(answers, "test"), **studies.packed(answers)}
    compared = {
        (row["way"], row["kept"], row["draws"], row["against"])
        for row in done
        if row["what"] == "paired"
    }
    for way, kept in wanted:
        for against in (
            "base",
            *([DENSE] if "finetune" in recoveries(way) and way != DENSE else []),
        ):
            if (way, kept, args.seeds, against) in compared:
                continue
            theirs = [
                whole
                if against == "base"
                else np.load(answers_file(store, DENSE, everything, seed))
                for seed in range(args.seeds)
            ]
            ours = [np.load(answers_file(store, way, kept, seed)) for seed in range(args.seeds)]
            said = {
                "what": "paired",
                "way": way,
                "kept": kept,
                "draws": args.seeds,
                "against": against,
            }
            yield said | interval(task, "test", list(zip(ours, theirs, strict=True)))


def recoveries(way: str) -> tuple[str, ...]:
    """What is done after the cut."""
    return WAYS[way][2] if way in WAYS else ("finetune",)


def answers_file(store: Path, way: str, kept: int, seed: int) -> Path:
    return store / f"{way.replace(' ', '')}-{kept}-{seed}.npy"


def keep_answers(path: Path, answers: np.ndarray) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, answers)


def unpack(done: list[dict[str, Any]], store: Path, count: int) -> None:
    """Write the answers that a record brought from another machine to the files that this one
    lacks."""
    for row in done:
        file = (
            answers_file(store, row["way"], row["kept"], row["seed"])
            if row["what"] == "quality"
            else None
        )
        if file is not None and "right" in row and not file.is_file():
            keep_answers(file, studies.unpacked(row["right"], count))


def planned(
    task: Task, way: str, kept: int, seed: int, known: dict[str, hp.HeadScores]
) -> hp.PruningPlan:
    """The plan of a way, with the calibration rows of a draw; ``known`` keeps scores by scorer."""
    name, selector, _ = WAYS[way]
    if name not in known:
        scorer = hp.scoring.Random(seed=seed) if name == "random" else name
        known[name] = task.score(task.calibration(seed), scorer)
    return hp.select(known[name], hp.Budget(keep_heads=kept), selector)


def recover_(task: Task, small: nn.Module, name: str, seed: int) -> None:
    if (
        name == "finetune"
    ):  # by the calibration rows, for one short training that every way can have
        tune = hp.recovery.Finetune(epochs=3, learning_rate=5e-5, warmup_ratio=0.1, seed=seed)
        with reproducible(device_of(small)):
            hp.recover_(small, task.calibration(seed), tune)
    else:
        lstsq = hp.recovery.Lstsq(ridge=0.3, feed_forward=True)
        task.recover_(small, task.calibration(seed), lstsq)


# ------------------------------------------------------------------------------------------------
# speed and size


def cut(task: Task, plan: hp.PruningPlan) -> nn.Module:
    small = copy.deepcopy(task.model)
    hp.prune_(small, plan)
    return small


def digest(plan: hp.PruningPlan) -> str:
    """Which heads stay, in a few letters: so that a record shows that quality and speed are of one
    cut."""
    kept = [(row.site, sorted(row.kept)) for row in plan.mask.rows]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:12]


def timed_part(model: nn.Module) -> nn.Module:
    """Of a pair of sentences, the encoder is what runs."""
    return model.encoder if isinstance(model, Cosine) else model


def size_row(base: nn.Module, small: nn.Module, example: Any, kept: int) -> dict[str, Any]:
    counted = {row.name: [row.original, row.pruned] for row in sizes(base, small, example)}
    return {
        "what": "sizes",
        "kept": kept,
        **counted,
        "bytes on disk": [bytes_on_disk(m) for m in (base, small)],
    }


def kv_rows(
    args: argparse.Namespace, device: torch.device, done: set[Any]
) -> Iterator[dict[str, Any]]:
    """A Llama with 8 groups of 4 query heads, and the same without every second group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    narrow = {"hidden_size": 64, "intermediate_size": 128} if args.small else {"hidden_size": 1024}
    given = {
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
    }
    config = LlamaConfig(**given | narrow, num_attention_heads=32, num_key_value_heads=8)
    base = LlamaForCausalLM(config).to(device).eval()
    sites = hp.find_sites(base)
    keep = {site.name: [head for group in site.units[::2] for head in group] for site in sites}
    small = copy.deepcopy(base)
    hp.prune_(small, hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites}))
    for dtype in args.dtypes:
        pair = [copy.deepcopy(m).to(getattr(torch, dtype)) for m in (base, small)]
        for prompt, batch in itertools.product(args.prompts, (1, 8)):
            if (dtype, batch, prompt, args.new_tokens) in done:
                continue
            (row,) = hp.bench.compare_decoding(
                *pair, [batch], [prompt], args.new_tokens, seconds=args.seconds
            )
            about = {
                "what": "kv",
                "dtype": dtype,
                "batch": batch,
                "prompt": prompt,
                "asked": args.new_tokens,
            }
            about |= {"new_tokens": row.new_tokens, "hidden_size": config.hidden_size}
            about |= {"layers": config.num_hidden_layers, "threads": torch.get_num_threads()}
            about |= {
                "bytes": [row.original_bytes, row.pruned_bytes],
                "tokens_a_second": row.tokens_per_second(),
            }
            yield {**about, "prefill": vars(row.prefill), "decode": vars(row.decode)}


if __name__ == "__main__":
    studies.leave(main())
