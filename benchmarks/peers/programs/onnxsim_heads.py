"""onnxsim's head pruning of an ONNX file, by weights, or by weights times activations; as many
heads in every layer.

It finds no attention in the file that PyTorch's exporter writes today, simplified or not. It does
in one of the older TorchScript exporter whose attention ONNX Runtime's optimizer has fused
(``fuse``).
"""

from __future__ import annotations

import importlib
import math
import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

import onnx_runtime
import torch
from protocol import Cut, Job, Run, head_width, main, pretrained, running


def cut(job: Job) -> Cut:
    job.only_cpu("onnxsim with ONNX Runtime")
    onnx: Any = importlib.import_module("onnx")
    onnxsim: Any = importlib.import_module("onnxsim")
    model, out = pretrained(job.base, job.device), job.out / "model.onnx"
    whole = fused(job) if job.settings["fuse"] else onnxsim.simplify(onnx.load(str(job.given)))[0]
    sparsity, start = 1 - job.kept / job.heads, perf_counter()
    if job.settings["importance"] == "wanda":
        rows = [{k: v.numpy() for k, v in batch.items()} for batch in job.batches("calibration")]
        small = onnxsim.apply_attention_head_wanda_pruning(
            whole, calibration_data=rows, sparsity=sparsity
        )
    else:
        small = onnxsim.apply_attention_head_pruning(whole, sparsity=sparsity)
    seconds = {"cut": perf_counter() - start}
    # A head has four matrices of the model's width by its own, and three biases.
    width, size = model.config.hidden_size, head_width(model)
    gone = (weights(whole) - weights(small)) / (4 * width * size + 3 * size)
    if gone == 0:
        raise RuntimeError("removed no head, and said nothing")
    notes = [] if gone == job.heads - job.kept else [f"{gone:.2f} heads' weights gone"]
    onnx.save(small, str(out))

    def save(folder: Path) -> str:
        shutil.copy(out, folder / "model.onnx")
        return "an ONNX file"

    return Cut(running(model), onnx_runtime.session(out, job.threads), save, seconds, notes=notes)


def fused(job: Job) -> Any:
    """The base model as an ONNX graph with one node for each attention."""
    optimizer: Any = importlib.import_module("onnxruntime.transformers.optimizer")
    model: Any = pretrained(job.base, job.device)
    model.set_attn_implementation("eager")
    inputs, path = job.batches("test", size=4)[0], str(job.out / "exported.onnx")
    axes = {
        name: dict(enumerate("nt" if value.ndim == 2 else "n")) for name, value in inputs.items()
    }
    names = {"input_names": list(inputs), "output_names": ["logits"], "dynamic_axes": axes}
    torch.onnx.export(
        _Logits(model, list(inputs)),
        tuple(inputs.values()),
        path,
        **names,
        dynamo=False,
        opset_version=17,
    )
    kind = "vit" if "pixel_values" in inputs else "bert"
    sizes = {"num_heads": model.config.num_attention_heads, "hidden_size": model.config.hidden_size}
    return optimizer.optimize_model(path, model_type=kind, opt_level=0, **sizes).model


class _Logits(torch.nn.Module):
    """A model whose inputs have an order and whose output is a tensor, as the older exporter wants
    it."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self.names, tensors, strict=True))).logits
        return logits


def weights(model: Any) -> int:
    """Numbers in the float32 tensors of a graph."""
    return sum(
        math.prod(tensor.dims) for tensor in model.graph.initializer if tensor.data_type == 1
    )


def load(job: Job, folder: Path) -> Run:
    return onnx_runtime.session(folder / "model.onnx", job.threads)


if __name__ == "__main__":
    main(cut, load)
