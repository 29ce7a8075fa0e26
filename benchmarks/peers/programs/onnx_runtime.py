"""ONNX Runtime: in fp32, with dynamic INT8 and with static INT8, of the uncut or of our cut model's
ONNX file."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from protocol import Cut, Job, Run, main, pretrained, running
from torch import Tensor

#: The operators that dynamic quantisation takes: linear layers and embeddings. Attention as one
#: operator is not among them: ONNX Runtime 1.32 cannot load its own quantised form of it.
QUANTISED = ["MatMul", "Gemm", "Gather"]


def cut(job: Job) -> Cut:
    job.only_cpu("this package of ONNX Runtime")
    base, out = pretrained(job.base, job.device), job.out / "model.onnx"
    start = perf_counter()
    WAYS[job.settings["way"]](job, str(job.given), str(out))
    seconds = {"cut": perf_counter() - start}

    def save(folder: Path) -> str:
        shutil.copy(out, folder / "model.onnx")
        return "an ONNX file"

    return Cut(running(base), session(out, job.threads), save, seconds)


def fp32(job: Job, source: str, out: str) -> None:
    shutil.copy(source, out)


def dynamic(job: Job, source: str, out: str) -> None:
    quantise(prepared(job, source), out)


def quantise(source: str, out: str) -> None:
    """Dynamic INT8 of an optimised file, with a scale for each channel of a weight."""
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    quantization.quantize_dynamic(
        source,
        out,
        per_channel=True,
        op_types_to_quantize=QUANTISED,
        weight_type=integers(quantization),
    )


def integers(quantization: Any) -> Any:
    """Signed integers, ONNX Runtime's default, where the processor adds their products in 32 bits.

    An x86 processor without VNNI adds two such products in 16 bits, where they overflow (ONNX
    Runtime's page on quantisation): its weights must be unsigned. Static quantisation takes
    unsigned weights beside unsigned activations only.
    """
    processor = Path("/proc/cpuinfo")
    flags = processor.read_text() if processor.is_file() else ""
    overflows = "avx2" in flags and "vnni" not in flags
    return quantization.QuantType.QUInt8 if overflows else quantization.QuantType.QInt8


def static(job: Job, source: str, out: str) -> None:
    """Quantise and dequantise nodes around matrix products, ranges of the calibration rows, weights
    per channel."""
    quantization: Any = importlib.import_module("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            # They are sorted by length: every n-th, so that long rows have their part in the
            # ranges.
            batches = job.batches("calibration")
            batches = batches[-1 :: -max(1, len(batches) // job.settings["batches"])]
            self.rows: Iterator[dict[str, Any]] = iter(
                [{k: v.numpy() for k, v in b.items()} for b in batches]
            )

        def get_next(self) -> dict[str, Any] | None:
            return next(self.rows, None)

    kind = integers(quantization)
    quantization.quantize_static(
        prepared(job, source),
        out,
        Reader(),
        per_channel=True,
        op_types_to_quantize=["MatMul", "Gemm"],
        activation_type=kind,
        weight_type=kind,
    )


def prepared(job: Job, source: str) -> str:
    """The file that is quantised."""
    found = str(job.out / "prepared.onnx")
    optimise(source, found)
    return found


def optimise(source: str, out: str) -> None:
    """Optimised first, as its manual asks, and without the exporter's shapes, at which dynamic
    quantisation stops."""
    onnx: Any = importlib.import_module("onnx")
    inference: Any = importlib.import_module("onnxruntime.quantization.shape_inference")
    inference.quant_pre_process(source, out, skip_symbolic_shape=True)
    model = onnx.load(out)
    del model.graph.value_info[:]
    onnx.save(model, out)


WAYS = {"fp32": fp32, "dynamic": dynamic, "static": static}


def session(path: Path, threads: int) -> Run:
    """An ONNX file's logits, in ONNX Runtime on the CPU."""
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    # Its threads wait for more by spinning, which would slow down the base model whose turn is
    # next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, Tensor]) -> Any:
        return made.run(None, {k: v.numpy() for k, v in inputs.items()})[0]

    return run


def load(job: Job, folder: Path) -> Run:
    return session(folder / "model.onnx", job.threads)


if __name__ == "__main__":
    main(cut, load)
