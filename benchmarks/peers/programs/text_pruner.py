"""TextPruner's ``TransformerPruner`` with its own iterative scores, an uneven number of heads a
layer; of a share of the multiply-adds, also of neurons."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from protocol import (
    Cut,
    Job,
    Run,
    head_width,
    heads_kept,
    layer_macs,
    main,
    neurons_kept,
    pretrained,
    running,
)
from torch import Tensor

#: A BERT's inputs in the order of its forward; without the last one, the second sentence of a pair
#: would count as the first.
TRACED = ("input_ids", "attention_mask", "token_type_ids")


def cut(job: Job) -> Cut:
    package = importlib.import_module("textpruner")
    base = pretrained(job.base, job.device)
    small = copy.deepcopy(base)
    general = package.GeneralConfig(use_device=job.device, output_dir=str(job.out / "textpruner"))
    heads, neurons = targets(job, base.config)
    target = package.TransformerPruningConfig(
        target_ffn_size=neurons,
        target_num_of_heads=heads,
        n_iters=job.settings["iterations"],
        pruning_method="iterative",
        head_even_masking=False,
        ffn_even_masking=not job.of_share,
    )
    batches = job.batches("calibration", labels=True)
    pruner = package.TransformerPruner(small, target, general)
    scoring = 0.0
    score = pruner.get_importance_score

    def timed(*args: object, **named: object) -> object:
        nonlocal scoring
        start = perf_counter()
        found = score(*args, **named)
        scoring += perf_counter() - start
        return found

    pruner.get_importance_score = timed
    start = perf_counter()
    pruner.prune(batches, save_model=False)
    seconds = {"score": scoring, "cut": perf_counter() - start - scoring}
    small.eval()
    example = job.batches("test", size=2)[0]

    def save(folder: Path) -> str:
        """TorchScript, as its manual says for uneven heads."""
        pruner.output_dir = pruner.general_config.output_dir = str(folder)
        pruner.save_jit_model(in_order(example), "traced")
        return "save_jit_model (TorchScript), torch.jit.load"

    kept = neurons_kept(small) if job.of_share else None
    heads = heads_kept(small, head_width(base))
    return Cut(running(base), running(small), save, seconds, heads, neurons=kept)


def targets(job: Job, config: Any) -> tuple[int, int]:
    """Heads and neurons of a layer on average.

    Of a share of the multiply-adds, heads are the nearest number to that share of them; neurons get
    what remains.
    """
    if not job.of_share:
        return heads_a_layer(job.kept, config.num_hidden_layers), config.intermediate_size
    attention, neurons = layer_macs(config, job.tokens)
    heads = max(1, round(job.kept * config.num_attention_heads))
    remaining = job.kept * (attention + neurons)
    remaining -= heads / config.num_attention_heads * attention
    return heads, max(1, round(remaining / (2 * config.hidden_size)))


def heads_a_layer(kept: int, layers: int) -> int:
    if kept % layers:
        raise ValueError(
            f"target_num_of_heads must be whole heads a layer on average, not {kept} in {layers}"
            " layers"
        )
    return kept // layers


def in_order(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What TorchScript is called with; some tokenizers give no types."""
    return tuple(inputs[name] for name in TRACED if name in inputs)


def load(job: Job, folder: Path) -> Run:
    model = torch.jit.load(
        str(folder / "traced" / "pytorch_model.ts"), map_location=job.device
    ).eval()

    def run(inputs: dict[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            found = model(*in_order(inputs))
        logits: Tensor = found["logits"] if isinstance(found, dict) else found[0]
        return logits

    return run


if __name__ == "__main__":
    main(cut, load)
