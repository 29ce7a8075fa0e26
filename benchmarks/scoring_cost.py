"""What scoring costs, each measurement beside what it is compared with, in one process and in
interleaved rounds.

    python benchmarks/scoring_cost.py                  # 2 CPU threads, 5 to 8 minutes
    python benchmarks/scoring_cost.py --device cuda
    python benchmarks/scoring_cost.py --width 96 --middle 48 --rounds 2 --out cost.json      # a
    quick look

Encoders of BERT's shape with random weights, in evaluation mode, so that dropout weighs on nobody:
one of MiniLM's size (6 layers x 12 heads, width 384) and one of 12 layers x 12 heads (width 768);
for ablations, where the slow way runs the model 145 times a batch, one of 12 x 12 of width 384, the
shape of MiniLM-L12-H384.

- ``first_order``: ``hp.score(..., "taylor")``, and with ``fisher`` and ``taylor2`` beside it,
  against the forward and backward pass with all weights requiring gradients, over the same batches.
  What a call does once, whatever the number of batches (costs and fingerprint of the model), is
  timed by itself in the same round, and taken off; ``whole`` has it in, for as few batches as are
  run here.
- ``leave_one_out``: ``LeaveOneOut()`` against ``LeaveOneOut(replay=False)``, whole calls, with the
  proof on two examples that comes once a call, over several batches where they are small; ``once``
  is the same call for the last layer's heads on two examples, which is little more than the proof.
  A loop with ``hp.gated`` that is written out here runs every fourth head, counted four times. At
  the given batch sizes, for longer examples at 1 only, and at the batch size where the machine is
  saturated: twice as many examples are at most 10 % more examples a second in a plain forward pass.
- ``memory``: the peak of what tensors take beyond weights and batches, in ``taylor`` and in the
  forward and backward pass with frozen weights, where the embeddings' output asks for the gradient.
  On a GPU that is the allocator's own count; on a CPU it is the sum of every allocation that
  torch's profiler reports, which no other process disturbs.
- ``throughput``: examples a second of a whole ``hp.score(..., "taylor")`` with MiniLM's size over
  ``--examples`` examples in batches of 32, which lie on the CPU as from a loader; on a GPU also
  under ``torch.autocast`` in bf16, with gates and their gradients in fp32, and how often Python
  waited for the GPU, by torch's own count, in the call and in as many forward passes of the model
  alone.

A ratio is the median over rounds, with the 10th and 90th percentile; a round is one call of each,
the order turning. Writes one JSON record with device, versions, commit and the seconds of every
round.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

import headprune as hp
from headprune.bench.latency import no_collection, synchronize
from headprune.core.files import write_atomic
from headprune.data.models import resolve_device
from headprune.model.running import to_device
from headprune.run.surroundings import git_commit, hardware, versions

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies

RECORDS = Path(__file__).parent / "records"
FIRST_ORDER: list[Any] = ["taylor", "fisher", "taylor2"]
SHARE = 4  # the written-out loop runs one head in so many

Batches: TypeAlias = "list[dict[str, Tensor]]"
Ways: TypeAlias = "Mapping[str, Callable[[], Any]]"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    studies.add_device(parser)
    parser.add_argument("--threads", type=int, default=2, help="of torch, on a CPU")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--width", type=int, default=768, help="of the 12-layer encoder, a multiple of 12"
    )
    parser.add_argument(
        "--middle", type=int, default=384, help="width of MiniLM's size and of the ablated encoder"
    )
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=4, help="of first-order scores")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=512,
        help="in a batch, for first-order scores and memory",
    )
    parser.add_argument(
        "--batches", type=int, default=2, help="a measurement, for first-order scores and memory"
    )
    parser.add_argument("--examples", type=int, default=1024, help="for throughput")
    parser.add_argument("--ablation-rounds", type=int, default=3)
    parser.add_argument(
        "--ablation-tokens", type=int, default=128, help="a measurement, in 1 to 4 batches"
    )
    parser.add_argument(
        "--small", type=int, nargs="+", default=[1, 4], help="batch sizes of ablations"
    )
    parser.add_argument(
        "--largest", type=int, default=64, help="batch size at which the search for saturation ends"
    )
    parser.add_argument(
        "--aside",
        action="store_true",
        help="leave another machine's record alone, begin one beside it",
    )
    parser.add_argument(
        "--out", type=Path, help="default benchmarks/records/scoring-cost-DEVICE.json"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs the measurements and returns the record's path."""
    args = arguments(argv)
    device = resolve_device(args.device)
    out: Path = args.out or RECORDS / f"scoring-cost-{args.device}.json"
    record, out = begun(args, device, out)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        for part in args.only:
            if part in record:
                continue
            start = perf_counter()
            record[part] = PARTS[part](args, device)
            record["seconds"] += perf_counter() - start
            record["stamps"][part] = {"created": studies.now(), "git_commit": git_commit()}
            write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    finally:
        torch.set_num_threads(threads)
    print(out)
    return out


def begun(args: argparse.Namespace, device: torch.device, out: Path) -> tuple[dict[str, Any], Path]:
    """A record without parts, or the one at ``out`` if it has the same settings on the same
    machine.

    Returns:
        The record, and its path: one beside ``out`` with ``--aside``, where another record lies
        there.
    """
    here = hardware(device)
    same: dict[str, Any] = {
        "benchmark": "scoring_cost",
        "settings": {
            name: value
            for name, value in vars(args).items()
            if name not in ("out", "only", "aside")
        },
        "versions": versions(),
        "where": here.get("gpu", here["processor"]),
    }
    record, out = studies.there(out, same, args.aside)
    if record is not None and "stamps" in record:
        return record, out
    about = {
        "created": studies.now(),
        "git_commit": git_commit(),
        "hardware": here,
        "seconds": 0.0,
        "stamps": {},
    }
    return {**same, **about}, out


# ------------------------------------------------------------------------------------------------
# what is measured


def first_order(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """``taylor`` and its likes against forward and full backward, a row for each model and
    length."""
    rows = []
    for layers, width in ((6, args.middle), (12, args.width)):
        model = encoder(layers, width, args, device)
        for tokens in args.tokens:
            batches = draw(args, max(1, args.batch_tokens // tokens), tokens, args.batches, device)
            ways = first_order_ways(model, batches)
            interleaved(ways, 1, device)  # warms up
            times = interleaved(ways, args.rounds, device)
            once, full = times["once"], times["forward + full backward"]
            taylor, three = times["taylor"], times["taylor + fisher + taylor2"]
            ratios = {
                "taylor / full": spread((taylor - once) / full),
                "three / taylor": spread((three - once) / (taylor - once)),
                "taylor / full, whole": spread(taylor / full),
                "three / taylor, whole": spread(three / taylor),
            }
            rows.append({**shape(model, batches), "ratios": ratios, "seconds": listed(times)})
            told("first order", rows[-1])
    return rows


def first_order_ways(model: nn.Module, batches: Batches) -> Ways:
    def score(scorers: Any) -> Callable[[], Any]:
        return lambda: hp.score(model, batches, scorers, progress=False)

    def full() -> None:
        for batch in batches:
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)

    return {
        "forward + full backward": full,
        "taylor": score("taylor"),
        "taylor + fisher + taylor2": score(FIRST_ORDER),
        "once": score("random"),  # reads no data: what every call does besides
    }


def leave_one_out(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The fast way against whole passes, a row for each length and batch size."""
    rows = []
    model = encoder(12, args.middle, args, device)
    for tokens in args.tokens:
        saturated, rates = saturation(model, args, tokens, device)
        for size in sorted({*(args.small if tokens == min(args.tokens) else [1]), saturated}):
            batches = draw(
                args, size, tokens, min(4, max(1, args.ablation_tokens // (size * tokens))), device
            )
            found: dict[str, Tensor] = {}
            times = interleaved(ablation_ways(model, batches, found), args.ablation_rounds, device)
            fast, loop = times["fast"], times["hp.gated, a share of heads"] * SHARE
            ratios = {
                "naive / fast": spread(times["naive"] / fast),
                "hp.gated loop / fast": spread(loop / fast),
                "once / fast": spread(times["once, at most"] / fast),
            }
            row = {
                **shape(model, batches),
                "saturated": size == saturated,
                "ratios": ratios,
                "seconds": listed(times),
            }
            row["largest_difference"] = largest_difference(found)
            rows.append({**row, "forward_examples_per_second": rates})
            told("leave one out" + (", saturated" if size == saturated else ""), rows[-1])
    return rows


def ablation_ways(model: nn.Module, batches: Batches, found: dict[str, Tensor]) -> Ways:
    """The ways; each leaves its scores in ``found``."""

    def score(name: str, replay: bool) -> Callable[[], Any]:
        def run() -> None:
            scores = hp.score(model, batches, hp.scoring.LeaveOneOut(replay=replay), progress=False)
            if any("whole pass" in note for note in scores.notes):
                raise RuntimeError(f"{name}: {scores.notes}")  # nothing would be measured
            found[name] = torch.tensor([value for row in scores.values for value in row])

        return run

    def loop() -> None:
        found["hp.gated"] = gated_loop(model, batches)[::SHARE]

    last = hp.find_sites(model)[-1:]
    two = [{name: tensor[:2] for name, tensor in batches[0].items()}]
    return {
        "fast": score("fast", True),
        "naive": score("naive", False),
        "hp.gated, a share of heads": loop,
        "once, at most": lambda: hp.score(
            model, two, hp.scoring.LeaveOneOut(), sites=last, progress=False
        ),
    }


@torch.no_grad()
def gated_loop(model: nn.Module, batches: Batches) -> Tensor:
    """``leave_one_out`` of every fourth head as one would write it, NaN elsewhere; ``[heads]``."""
    sites = hp.find_sites(model)
    heads = [(site, i) for site in sites for i in range(len(site.heads))]
    rises = torch.full((len(heads),), torch.nan, dtype=torch.float64)
    rises[::SHARE] = 0
    count = sum(len(batch["labels"]) for batch in batches)
    for batch in batches:
        base = losses(model, batch)
        for number in range(0, len(heads), SHARE):
            site, place = heads[number]
            gate = torch.ones(len(site.heads), device=base.device)
            gate[place] = 0
            with hp.gated(model, {site.name: gate}, sites):
                rises[number] += (losses(model, batch) - base).sum().double().cpu() / count
    return rises


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    return functional.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def largest_difference(found: Mapping[str, Tensor]) -> dict[str, float]:
    """Of the fast way's scores from the others', in the unit of the loss, which is about 1."""
    fast = found["fast"].double()
    from_loop = fast[::SHARE] - found["hp.gated"]
    return {
        "naive": float((fast - found["naive"]).abs().max()),
        "hp.gated loop": float(from_loop.abs().max()),
    }


def saturation(
    model: nn.Module, args: argparse.Namespace, tokens: int, device: torch.device
) -> tuple[int, dict[str, float]]:
    """The batch size from which twice as many bring at most 10 % more examples a second; and the
    rates tried."""
    rates: dict[int, float] = {}
    size = 1
    while True:
        (batch,) = draw(args, size, tokens, 1, device)
        with torch.no_grad():
            times = interleaved({"forward": lambda batch=batch: model(**batch)}, 8, device)[
                "forward"
            ]  # type: ignore[misc]
        rates[size] = size / float(np.median(times[1:]))
        if (size > 1 and rates[size] <= 1.1 * rates[size // 2]) or size * 2 > args.largest:
            break
        size *= 2
    grows = size > 1 and rates[size] > 1.1 * rates[size // 2]
    return (size if grows or size == 1 else size // 2), {str(k): v for k, v in rates.items()}


def memory(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Peaks of ``taylor`` and of a frozen forward and backward pass, a row for each model and
    length."""
    rows = []
    for layers, width in ((6, args.middle), (12, args.width)):
        model = encoder(layers, width, args, device)
        for tokens in args.tokens:
            batches = draw(
                args, max(1, args.batch_tokens // tokens), tokens, 2, device
            )  # the second shows leftovers
            taylor = peak(
                lambda b=batches, m=model: hp.score(m, b, "taylor", progress=False), device
            )  # type: ignore[misc]
            frozen = peak(lambda b=batches, m=model: frozen_pass(m, b), device)  # type: ignore[misc]
            weights = sum(p.numel() * p.element_size() for p in model.parameters())
            n_bytes = {"taylor": taylor, "frozen forward + backward": frozen, "weights": weights}
            ratios = {
                "taylor / frozen": taylor / frozen,
                "taylor / frozen, with weights": (taylor + weights) / (frozen + weights),
            }
            rows.append({**shape(model, batches), "ratios": ratios, "bytes": n_bytes})
            told("memory", rows[-1])
    return rows


def throughput(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Examples a second of ``taylor``, a row for each length and precision."""
    rows = []
    model = encoder(6, args.middle, args, device)
    for tokens in args.tokens:
        size = min(32, args.examples)
        batches = draw(args, size, tokens, args.examples // size, torch.device("cpu"))
        for mixed in (False, True) if device.type == "cuda" else (False,):
            ways = {
                name: partial(in_precision, way, mixed)
                for name, way in throughput_ways(model, batches).items()
            }
            interleaved(ways, 1, device)
            times = interleaved(ways, args.rounds, device)
            read = size * len(batches)
            ratios = {
                f"{name}, examples a second": spread(read / found) for name, found in times.items()
            }
            row = {
                **shape(model, batches),
                "precision": "bf16, gates fp32" if mixed else "fp32",
                "ratios": ratios,
            }
            row["waits"] = {name: waits(way, device) for name, way in ways.items()}
            rows.append({**row, "examples": read, "seconds": listed(times)})
            told(f"throughput, {row['precision']}", rows[-1])
    return rows


def throughput_ways(model: nn.Module, batches: Batches) -> Ways:
    device = next(model.parameters()).device

    @torch.no_grad()
    def forward() -> None:
        for batch in batches:
            model(**to_device(batch, device))

    return {
        "taylor": lambda: hp.score(model, batches, "taylor", progress=False),
        "forward": forward,
    }


def in_precision(run: Callable[[], Any], mixed: bool) -> None:
    with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
        run()


def waits(run: Callable[[], Any], device: torch.device) -> int | None:
    """How often Python waits for the GPU in ``run``; None on a CPU, where there is nothing to wait
    for."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # Not "synchronizing" alone: setting the mode warns of itself with that word, once a process.
    return sum("called a synchronizing" in str(warning.message) for warning in seen)


def frozen_pass(model: nn.Module, batches: Batches) -> None:
    """Backward to the embeddings' output, through activations only."""
    before = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    handle = model.get_input_embeddings().register_forward_hook(
        lambda m, i, out: out.requires_grad_()
    )  # type: ignore[operator]
    try:
        for batch in batches:
            model(**batch).loss.backward()
    finally:
        handle.remove()
        for parameter, needed in zip(model.parameters(), before, strict=True):
            parameter.requires_grad_(needed)


def peak(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that tensors take at most while ``run`` runs, beyond those that were there."""
    run()  # what is kept for ever after a first call is no part of it
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = sorted(
        (e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"]
    )
    return int(np.cumsum([event["args"]["Bytes"] for event in changes]).max())


# ------------------------------------------------------------------------------------------------
# how it is measured


def encoder(layers: int, width: int, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """BERT with random weights; drawn wider than at the start of training, so that heads matter."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=args.vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=4 * width,
        max_position_embeddings=max(*args.tokens, 128),
        initializer_range=0.05,
    )
    return BertForSequenceClassification(config).to(device).eval()


def draw(
    args: argparse.Namespace, size: int, tokens: int, count: int, device: torch.device
) -> Batches:
    """Batches of random tokens without padding."""
    generator = torch.Generator().manual_seed(size * tokens)
    batches = []
    for _ in range(count):
        ids = torch.randint(args.vocabulary, (size, tokens), generator=generator)
        labels = torch.randint(2, (size,), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        batches.append({k: v.to(device) for k, v in batch.items()})
    return batches


def interleaved(ways: Ways, rounds: int, device: torch.device) -> dict[str, np.ndarray]:
    """Seconds of every round by way; a round is a call of each, and begins with another one than
    the round before."""
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    with no_collection():
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                synchronize(device)
                start = perf_counter()
                ways[name]()
                synchronize(device)
                times[name].append(perf_counter() - start)
    return {name: np.array(found) for name, found in times.items()}


def spread(ratios: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(ratios, (10, 50, 90))
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def shape(model: nn.Module, batches: Batches) -> dict[str, Any]:
    config: Any = model.config
    size, tokens = batches[0]["input_ids"].shape
    sizes = {
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "width": config.hidden_size,
    }
    return {**sizes, "batch": size, "tokens": tokens, "batches": len(batches)}


def listed(times: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: found.tolist() for name, found in times.items()}


def told(what: str, row: Mapping[str, Any]) -> None:
    """Prints a row."""
    size = "{layers} x {heads}, width {width}, {batches} x {batch} x {tokens} tokens".format(**row)
    cells = []
    for name, ratio in row["ratios"].items():
        text = (
            f"{ratio:.3f}"
            if isinstance(ratio, float)
            else "{median:.3f} ({p10:.3f}..{p90:.3f})".format(**ratio)
        )
        cells.append(f"{name} {text}")
    print(f"{what}; {size}: {'; '.join(cells)}", flush=True)


PARTS: dict[str, Callable[[argparse.Namespace, torch.device], list[dict[str, Any]]]] = {
    "first_order": first_order,
    "leave_one_out": leave_one_out,
    "memory": memory,
    "throughput": throughput,
}

if __name__ == "__main__":
    main()
