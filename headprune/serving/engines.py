"""The engines of ``serve-check``: what each needs, and how it runs a model.

Most engines run the opened model: a function here prepares it once and returns a forward pass.
vLLM and llama.cpp open the folder by themselves (``servers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from headprune.checkpoints.export import GraphStep, export_onnx, free_axes
from headprune.core.errors import UnsupportedModel
from headprune.model.running import outputs

#: Inputs by name.
Inputs = Mapping[str, Tensor]
#: From inputs to every floating-point output.
Forward = Callable[[Inputs], list[Tensor]]


@dataclass(frozen=True)
class Engine:
    """One engine.

    Args:
        packages: The modules it imports; the first has its version.
        install: What installs it.
        prepare: From model, example and a folder for files to its forward pass; None for an engine
            that opens the folder by itself.
        exact: Whether it computes in fp32, so that it must give the same answers.
    """

    packages: tuple[str, ...]
    install: str
    prepare: Callable[[nn.Module, Inputs, Path], Forward] | None = None
    exact: bool = True


def in_torch(model: nn.Module, example: Inputs, place: Path) -> Forward:
    """The model as it is."""
    step = GraphStep(model, cache=False)
    return lambda inputs: outputs(step.run(dict(inputs), []))


def in_torch_export(model: nn.Module, example: Inputs, place: Path) -> Forward:
    """The program of ``torch.export``, for any number of rows and tokens."""
    step = GraphStep(model, cache=False)
    free = {name: free_axes(tensor) for name, tensor in example.items()}
    program = torch.export.export(step, (dict(example), []), dynamic_shapes=(free, [])).module()
    return lambda inputs: list(program(dict(inputs), []))


def _onnx_file(model: nn.Module, example: Inputs, place: Path) -> Path:
    """The model's ONNX file, which several engines share."""
    path = place / "model.onnx"
    if not path.is_file():
        export_onnx(model, example, path)
    return path


def _session(path: Path) -> Forward:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    # An input that changes nothing is not in the graph.
    names = [i.name for i in session.get_inputs()]

    def forward(inputs: Inputs) -> list[Tensor]:
        arrays = session.run(None, {name: inputs[name].numpy() for name in names})
        return [torch.from_numpy(array) for array in arrays]

    return forward


def in_onnxruntime(model: nn.Module, example: Inputs, place: Path) -> Forward:
    """ONNX Runtime on the CPU."""
    return _session(_onnx_file(model, example, place))


def in_onnxruntime_int8(model: nn.Module, example: Inputs, place: Path) -> Forward:
    """ONNX Runtime with dynamic quantization to 8 bits."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = place / "model-int8.onnx"
    # Sums of products of signed weights overflow on an x86 processor without VNNI.
    quantize_dynamic(_onnx_file(model, example, place), path, weight_type=QuantType.QUInt8)
    kinds = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    if not any("Integer" in kind for kind in kinds):
        raise UnsupportedModel("the ONNX file", "one with layers that were quantised", "none")
    return _session(path)


def in_openvino(model: nn.Module, example: Inputs, place: Path) -> Forward:
    """OpenVINO on the CPU, from the ONNX file."""
    import openvino

    core = openvino.Core()
    # By default it may compute in 16 bits.
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(_onnx_file(model, example, place), "CPU", exact)
    names = [i.any_name for i in compiled.inputs]

    def forward(inputs: Inputs) -> list[Tensor]:
        found = compiled({name: inputs[name].numpy() for name in names})
        return [torch.from_numpy(found[i].copy()) for i in range(len(compiled.outputs))]

    return forward


def in_torchao_int8(model: nn.Module, example: Inputs, place: Path) -> Forward:
    """Plain torch, with torchao's weights of 8 bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    before = {name: type(p) for name, p in model.named_parameters()}
    quantize_(model, Int8WeightOnlyConfig())
    if before == {name: type(p) for name, p in model.named_parameters()}:
        raise UnsupportedModel("the model", "one with layers that torchao quantises", "none")
    return in_torch(model, example, place)


_ONNX = ("onnxruntime", "onnx", "onnxscript")
#: Every engine, by its name in the table.
ENGINES = {
    "headprune": Engine(("headprune",), "", in_torch),
    "transformers": Engine(("transformers",), "pip install transformers", in_torch),
    "torch.export": Engine(("torch",), "pip install torch", in_torch_export),
    "onnxruntime": Engine(_ONNX, f"pip install {' '.join(_ONNX)}", in_onnxruntime),
    "openvino": Engine(
        ("openvino", *_ONNX), f"pip install openvino {' '.join(_ONNX)}", in_openvino
    ),
    "onnxruntime-int8": Engine(
        _ONNX, f"pip install {' '.join(_ONNX)}", in_onnxruntime_int8, exact=False
    ),
    "torchao-int8": Engine(("torchao",), "pip install torchao", in_torchao_int8, exact=False),
    "vllm": Engine(("vllm",), "pip install vllm, in an environment of its own"),
    "llama.cpp": Engine(("llama_cpp",), "pip install llama-cpp-python"),
}
