"""A classifier in ONNX Runtime with dynamic INT8 weights, called as the PyTorch model is."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from headprune.checkpoints.export import export_onnx


class InInt8(nn.Module):
    """A model as ONNX Runtime runs it after dynamic INT8 quantisation, per channel, on the CPU.

    Args:
        model: A classifier that takes tokens.
        example: Inputs by name, without labels.
    """

    def __init__(self, model: nn.Module, example: Mapping[str, Tensor]) -> None:
        super().__init__()
        # Whoever asks for the model's device and dtype looks at its parameters.
        self.anchor = nn.Parameter(torch.zeros(()), requires_grad=False)
        with tempfile.TemporaryDirectory() as folder:
            exported, quantised = Path(folder, "model.onnx"), Path(folder, "int8.onnx")
            export_onnx(model, example, exported)
            quantise(exported, quantised)
            self.session = session(quantised)
        self.names = {given.name for given in self.session.get_inputs()}

    def forward(self, labels: Tensor | None = None, **inputs: Tensor) -> SequenceClassifierOutput:
        given = {name: value.numpy() for name, value in inputs.items() if name in self.names}
        logits = torch.from_numpy(self.session.run(None, given)[0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def quantise(source: Path, out: Path) -> None:
    """Quantise an ONNX file, optimised first, as the manual of ONNX Runtime asks."""
    onnx: Any = importlib.import_module("onnx")
    inference: Any = importlib.import_module("onnxruntime.quantization.shape_inference")
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    prepared = source.with_name("prepared.onnx")
    inference.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    # Dynamic quantisation stops at the shapes that the exporter wrote.
    model = onnx.load(str(prepared))
    del model.graph.value_info[:]
    onnx.save(model, str(prepared))
    quantization.quantize_dynamic(str(prepared), str(out), per_channel=True)


def session(path: Path) -> Any:
    """Open an ONNX file on as many threads as PyTorch has."""
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    # Threads that spin while they wait would slow down the other model, whose turn is next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
