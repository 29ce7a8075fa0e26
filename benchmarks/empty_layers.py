"""What a layer without heads and neurons still costs: its norms and its residual sums.

    python benchmarks/empty_layers.py

Of small models of six layers, four lose all heads and neurons. That model is timed beside one of
two layers, in interleaved rounds, and so is the whole model. ``one_budget_page.py`` writes the
sentence of docs/one-budget.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

import headprune as hp

sys.path.insert(0, str(Path(__file__).resolve().parent))
from studies import RECORDS, header, keep

LAYERS, EMPTY = 6, 4
WIDTH = 384
TEXTS = {"vocab_size": 1000, "hidden_size": WIDTH, "num_attention_heads": 12}
SIZES = {
    "Bert": {**TEXTS, "intermediate_size": 4 * WIDTH},
    "Llama": {**TEXTS, "intermediate_size": 1024, "num_key_value_heads": 4, "use_cache": False},
    "ViT": {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 6},
}


def main(argv: Sequence[str] | None = None) -> Path:
    """Measures and returns the record's path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="per pair of models")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens of texts")
    parser.add_argument("--out", type=Path, default=RECORDS / "empty-layers.json")
    args = parser.parse_args(argv)
    rows = []
    for family in SIZES:
        rows.append({"family": family, **measured(family, args)})
        print(rows[-1], flush=True)
    keep({**header("empty-layers"), "batch": args.batch, "rows": rows}, args.out)
    return args.out


def measured(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a whole layer and of an empty one."""
    torch.manual_seed(0)
    whole, short = model_of(family, LAYERS), model_of(family, LAYERS - EMPTY)
    empty = emptied(copy.deepcopy(whole))
    inputs = inputs_of(family, args)

    def milliseconds(model: nn.Module) -> float:
        """By how much a model of six layers is slower than one of two, by layer."""
        (row,) = hp.bench.compare_latency(
            model, short, lambda *_: inputs, [args.batch], [args.length], seconds=args.seconds
        )
        return 1e3 * (row.original_p50 - row.pruned_p50) / EMPTY

    return {"whole_ms": milliseconds(whole), "empty_ms": milliseconds(empty)}


def model_of(family: str, n_layers: int) -> Any:
    """A model with random weights."""
    config = getattr(hf, f"{family}Config")(**SIZES[family], num_hidden_layers=n_layers)
    return getattr(hf, f"{family}Model")(config).eval()


def emptied(model: nn.Module) -> nn.Module:
    """The model without the heads and neurons of its last layers."""
    sites = hp.find_sites(model, feed_forward=True)
    kept = {}
    for kind in (False, True):
        of_kind = [site for site in sites if site.is_feed_forward is kind]
        for number, site in enumerate(of_kind):
            kept[site.name] = site.heads if number < LAYERS - EMPTY else ()
    hp.prune_(model, hp.HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in sites}))
    return model


def inputs_of(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """A batch of random tokens, or of random pictures of 197 patches."""
    if family == "ViT":
        return {"pixel_values": torch.randn(args.batch, 3, 224, 224)}
    return {"input_ids": torch.randint(TEXTS["vocab_size"], (args.batch, args.length))}


def sentence(records: Path) -> str:
    """By family, an empty layer's share of a whole layer's time; empty without a record."""
    path = records / "empty-layers.json"
    if not path.is_file():
        return ""
    shares = [
        f"{max(0.0, row['empty_ms'] / row['whole_ms']):.0%} ({row['family']})"
        for row in json.loads(path.read_text())["rows"]
    ]
    return (
        "A layer without heads and neurons multiplies no matrices, but still runs its norms, for"
        f" {', '.join(shares)} of a whole layer's time."
    )


if __name__ == "__main__":
    main()
