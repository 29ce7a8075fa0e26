"""A classifier in ONNX Runtime with dynamic INT8 weights, called as the PyTorch model is."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from headprune.checkpoints.export import export_onnx

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers" / "programs"))
from onnx_runtime import optimise, quantise, session
from roster import ATTENTION_AS_ONE


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
            paths = [Path(folder, name) for name in ("model.onnx", "prepared.onnx", "int8.onnx")]
            exported, prepared, quantised = paths
            export_onnx(model, example, exported, opset=ATTENTION_AS_ONE)
            optimise(str(exported), str(prepared))
            quantise(str(prepared), str(quantised))
            self.run = session(quantised, torch.get_num_threads())
        self.names = set(example)

    def forward(self, labels: Tensor | None = None, **inputs: Tensor) -> SequenceClassifierOutput:
        given = {name: value for name, value in inputs.items() if name in self.names}
        logits = torch.from_numpy(self.run(given))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
