"""A checkpoint cut on disk beside the same cut in memory: peak memory, time, and whether the
folders are equal.

    python benchmarks/streaming.py --work FOLDER              # a Llama of a billion parameters, 2.2
    GB in bf16 python benchmarks/streaming.py --work FOLDER --layers 2 --width 256 --vocabulary 512
    --out FOLDER/record.json

The model has random weights, made tensor by tensor and saved in shards; the plan keeps a random
half of each layer's KV groups, another number in every layer. Either way runs in a process of its
own, one after the other, and tells the most memory that it ever held (``VmHWM``) and what it held
once the libraries were there.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

import headprune as hp
from headprune.checkpoints.streaming import prune_checkpoint
from headprune.core.heads import HeadMask
from headprune.core.plan import PruningPlan
from headprune.data.models import open_model
from headprune.model.building import no_memory

sys.path.insert(0, str(Path(__file__).resolve().parent))
from studies import RECORDS, header, keep

WAYS = ("streamed", "loaded")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for the checkpoints, two and a half of them",
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--shard", type=int, default=500_000_000, help="bytes of a shard")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--way", choices=WAYS, help="(used inside) cut what lies in --work this way, and tell"
    )
    parser.add_argument("--out", type=Path, default=RECORDS / "streaming.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measures and returns the record's path."""
    args = arguments(argv)
    if args.way is not None:
        print(json.dumps(cut(args)))
        return args.out
    args.work.mkdir(parents=True, exist_ok=True)
    model = checkpoint(args)
    files = sorted((args.work / "model").glob("*.safetensors"))
    rows = []
    for _ in range(args.rounds):
        for way in WAYS:
            shutil.rmtree(args.work / way, ignore_errors=True)
            sizes = ["--layers", str(args.layers), "--shard", str(args.shard)]
            command = [sys.executable, __file__, "--work", str(args.work), "--way", way, *sizes]
            told = subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout.splitlines()[-1]
            rows.append(
                {
                    "way": way,
                    **json.loads(told),
                    **({"equal": equal(args.work)} if way == WAYS[-1] else {}),
                }
            )
            print(rows[-1], flush=True)
    record = {
        **header("streaming"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": sum(f.stat().st_size for f in files),
        "largest_shard": max(f.stat().st_size for f in files),
        "shards": len(files),
        "rows": rows,
    }
    keep(record, args.out)
    print(args.out)
    return args.out


def checkpoint(args: argparse.Namespace) -> Any:
    """Writes the model and its plan, unless they are there; returns it without memory for its
    weights."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=args.vocabulary,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with no_memory():
        model = transformers.LlamaForCausalLM(config)
    folder = args.work / "model"
    if folder.is_dir():
        return model
    unfinished = args.work / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    config.save_pretrained(unfinished)
    shards: list[dict[str, torch.Size]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        if size + 2 * tensor.numel() > args.shard and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.shape
        size += 2 * tensor.numel()
    draw = torch.Generator().manual_seed(0)
    places = {}
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {
            n: torch.empty(s, dtype=torch.bfloat16).normal_(0, 0.02, generator=draw)
            for n, s in shapes.items()
        }
        save_file(made, unfinished / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shapes, file)
    index = {"metadata": {"total_size": 2 * sum(t.numel() for t in model.state_dict().values())}}
    (unfinished / "model.safetensors.index.json").write_text(
        json.dumps({**index, "weight_map": places})
    )
    sites, chance = hp.find_sites(model), random.Random(0)
    kept = {
        s.name: [h for u in chance.sample(s.units, chance.randint(2, 6)) for h in u] for s in sites
    }
    PruningPlan(HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in sites})).save(
        args.work / "plan.json"
    )
    unfinished.rename(folder)
    return model


def cut(args: argparse.Namespace) -> dict[str, Any]:
    """One way, in this process."""
    plan, source, out = (
        PruningPlan.load(args.work / "plan.json"),
        args.work / "model",
        args.work / args.way / "small",
    )
    import transformers

    _ = transformers.LlamaForCausalLM  # imported on demand
    before, start = held("VmRSS"), perf_counter()
    if args.way == "streamed":
        prune_checkpoint(source, plan, out, max_shard_size=args.shard)
    else:
        model = open_model(str(source), "model")
        hp.prune_(model, plan)
        hp.save_pretrained(model, out, plan=plan, max_shard_size=args.shard)
    return {"seconds": perf_counter() - start, "libraries": before, "peak": held("VmHWM")}


def held(key: str) -> int:
    """Bytes of memory that this process holds, or held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def equal(work: Path) -> bool:
    """Whether both ways left the same files, byte for byte."""
    one, two = (work / way / "small" for way in WAYS)
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, two)]
    if names[0] != names[1]:
        return False
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in names[0])


if __name__ == "__main__":
    main()
