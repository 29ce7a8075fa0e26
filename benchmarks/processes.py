"""How much faster several processes score than one: the same batches, shared by
``hp.score(processes=)``.

    OMP_NUM_THREADS=1 python benchmarks/processes.py

A random Llama is scored by first-order importance (a forward and a backward pass a batch) and by
leave-one-out (many passes a batch). For every number of processes a group is started once; each
process has one thread and its own copy of the model, and scores once before any time is taken. Then
the groups take turns, round by round, while the others wait at a pipe: what slows the machine slows
them alike. The time is that of the first process, from the call to the scores that all have put
together; the efficiency is the throughput over that of one process, divided by the number of
processes. The scores of every group are compared with those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import headprune as hp

sys.path.insert(0, str(Path(__file__).resolve().parent))
from studies import RECORDS, header, keep

SCORERS = ("taylor", "leave_one_out")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[1, 2],
        help="sizes of groups; 1 must be among them",
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8, help="examples a batch")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--scorers", nargs="+", default=list(SCORERS))
    parser.add_argument("--out", type=Path, default=RECORDS / "processes.json")
    parser.add_argument(
        "--workers", type=Path, help="this is a process of a group that meets in this folder"
    )
    args = parser.parse_args(argv)
    if 1 not in args.processes:
        parser.error("--processes must have 1, what the others are compared with")
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Measures and returns the record's path; in a process of a group, scores whenever it is
    asked to."""
    args = arguments(argv)
    if args.workers is not None:
        work(args)
        return Path(args.out)
    words = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as home:
        groups = {size: Workers(size, Path(home, str(size)), words) for size in args.processes}
        try:
            scores = {size: group.asked("scores") for size, group in groups.items()}
            rounds = [
                {size: group.asked("time") for size, group in groups.items()}
                for _ in range(args.rounds)
            ]
        finally:
            for group in groups.values():
                group.end()
    record: dict[str, Any] = {
        **header("processes"),
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "workers")},
        "rows": [
            row(name, size, rounds, scores, args)
            for name in args.scorers
            for size in args.processes
        ],
    }
    for r in record["rows"]:
        speed = f"{r['examples_per_second']:8.2f} examples/s, efficiency {r['efficiency']:.3f}"
        print(
            f"{r['scorer']:16} {r['processes']} processes  {speed}, largest difference"
            f" {r['difference']:.1e}"
        )
    keep(record, args.out)
    print(args.out)
    return Path(args.out)


def row(
    name: str, size: int, rounds: list[dict[int, Any]], scores: dict[int, Any], args: Any
) -> dict[str, Any]:
    """The time that a group took, and by how much its scores differ from those of one process, relative to
    the largest."""
    seconds = [times[size][name] for times in rounds]
    faster = [times[1][name] / times[size][name] for times in rounds]  # in the same round
    one, found = np.array(scores[1][name]), np.array(scores[size][name])
    return {
        "scorer": name,
        "processes": size,
        "seconds": seconds,
        "examples_per_second": args.batches * args.batch / float(np.median(seconds)),
        "speedup": float(np.median(faster)),
        "efficiency": float(np.median(faster)) / size,
        "difference": float(abs(found - one).max() / abs(one).max()),
    }


class Workers:
    """Processes that score together when asked."""

    def __init__(self, size: int, folder: Path, words: list[str]) -> None:
        folder.mkdir()
        command = [sys.executable, __file__, *words, "--workers", str(folder)]
        shared = {**os.environ, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.members = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}, **pipes)
            for rank in range(size)
        ]

    def asked(self, what: str) -> Any:
        """The first process's answer, when all have answered."""
        for member in self.members:
            member.stdin.write(what + "\n")  # type: ignore[union-attr]
            member.stdin.flush()  # type: ignore[union-attr]
        answers = [member.stdout.readline() for member in self.members]  # type: ignore[union-attr]
        return json.loads(answers[0])

    def end(self) -> None:
        for member in self.members:
            member.kill()
            member.communicate()


def work(args: argparse.Namespace) -> None:
    """Work as a process of a group: a line in, a line out."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{args.workers}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    model, data = llama(args), tokens(args)

    def once(name: str) -> hp.HeadScores:
        return hp.score(model, data, name, processes=hp.Processes(), progress=False)

    for line in sys.stdin:
        answer: dict[str, Any] = {}
        for name in args.scorers:
            torch.distributed.barrier()
            start = perf_counter()
            found = once(name)
            seconds = perf_counter() - start
            answer[name] = (
                seconds
                if line.strip() == "time"
                else [v for values in found.values for v in values]
            )
        print(json.dumps(answer), flush=True)


def llama(args: argparse.Namespace) -> torch.nn.Module:
    """The same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {
        "hidden_size": args.width,
        "intermediate_size": 2 * args.width,
        "num_hidden_layers": args.layers,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, max_position_embeddings=args.tokens, **sizes, **heads)
    )


def tokens(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (args.batches, args.batch, args.tokens)
    drawn = torch.randint(1024, shape, generator=generator)
    return [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in drawn]


if __name__ == "__main__":
    main()
