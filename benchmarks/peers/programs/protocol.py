"""What the runner and a peer's program agree on. It needs NumPy and PyTorch alone, so every
environment can run it.

A program is called twice, ``python PROGRAM job.json cut`` and then, in a fresh process,
``python PROGRAM job.json load``, and leaves ``cut.json`` with ``cut.npz``, or ``load.json`` with
``load.npz``, beside the job. A third call, ``time``, times what was saved anew. What goes wrong is
an answer, too: ``error``, with the place in the code. Nothing is judged here: logits and raw times
go back.

A program hands two functions to ``main``: ``cut(job) -> Cut`` makes the smaller model,
``load(job, folder) -> Run`` loads what ``Cut.save`` wrote, and nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: A model's inputs to its logits: ``[examples, classes]``, or ``[examples, tokens, vocabulary]``.
Run = Callable[[dict[str, Tensor]], Any]
#: Rows of the base model's logits that go back, by which the runner sees that all started from the
#: same weights.
FIRST = 64
#: What must not weigh on the clock: calls of each model before a shape is timed.
WARMUP = 2
_PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxsim",
    "textpruner",
    "torch-pruning",
)


@dataclass(frozen=True)
class Job:
    """What a program is asked for; paths are absolute.

    Args:
        base: Folder of the uncut model as Transformers saves it.
        rows: Files by purpose (calibration, train, validation, test): one array a model input, and
            ``label``.
        given: What the peer starts from where that is not ``base``: a folder of ours, or an ONNX
            file.
        kept: Heads kept in the whole model. Below 1 it is the share of the layers' multiply-adds
            that is kept, of heads and neurons together. None where a peer cuts nothing.
        heads: Heads of the whole model.
        tokens: Of an example, where multiply-adds are counted.
        settings: Of the peer, from the roster.
        train: How the base model was trained, for peers that train.
        device: ``cpu`` or ``cuda``.
        threads: Of PyTorch and ONNX Runtime.
        batch: Rows of a batch, but for timing.
        shapes: Examples and tokens to time; tokens are 0 for images.
        seconds: About how long a shape is timed.
        seed: Of everything drawn.
        out: Folder of the job.
    """

    base: Path
    rows: dict[str, Path]
    given: Path | None
    kept: float | None
    heads: int
    tokens: int
    settings: dict[str, Any]
    train: dict[str, Any]
    device: str
    threads: int
    batch: int
    shapes: list[tuple[int, int]]
    seconds: float
    seed: int
    out: Path

    @classmethod
    def read(cls, path: Path) -> Job:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = {purpose: Path(file) for purpose, file in found.pop("rows").items()}
        paths = {k: Path(found.pop(k)) for k in ("base", "given") if found.get(k) is not None}
        return cls(**{"given": None, **found, **paths, "rows": rows, "out": path.parent})

    @property
    def of_share(self) -> bool:
        """Whether the budget is a share of the multiply-adds, for heads and neurons."""
        return self.kept is not None and self.kept < 1

    @property
    def saved(self) -> Path:
        return self.out / "saved"

    def arrays(self, purpose: str) -> dict[str, np.ndarray]:
        """The rows of a purpose; padded ones on the right."""
        with np.load(self.rows[purpose], allow_pickle=False) as file:
            return dict(file)

    def batches(
        self, purpose: str, size: int | None = None, labels: bool = False
    ) -> list[dict[str, Tensor]]:
        """Batches in the order of the file, cut to their longest row; with ``labels`` for a
        loss."""
        rows = self.arrays(purpose)
        return list(batches_of(rows, size or self.batch, labels, self.device))

    def only_cpu(self, what: str) -> None:
        if self.device != "cpu":
            raise RuntimeError(f"{what} runs on the CPU only; asked for {self.device}")


def batches_of(
    rows: dict[str, np.ndarray], size: int, labels: bool = False, device: str = "cpu"
) -> Iterator[dict[str, Tensor]]:
    """Batches of rows in their order, cut to their longest one."""
    for start in range(0, len(rows["label"]), size):
        some = {k: v[start : start + size] for k, v in rows.items()}
        if "attention_mask" in some:
            longest = int(some["attention_mask"].sum(1).max())
            some = {k: v[:, :longest] if v.ndim == 2 else v for k, v in some.items()}
        label = some.pop("label")
        found = some | {"labels": label} if labels else some
        yield {k: torch.from_numpy(np.ascontiguousarray(v)).to(device) for k, v in found.items()}


@dataclass
class Cut:
    """A peer's result.

    Args:
        base: The uncut model, in this environment.
        small: The model after it.
        save: ``(folder) -> how``: writes it there, and says in words by what means.
        seconds: What it took: ``score``, ``cut``, ``train``.
        heads: Heads kept in every layer, counted in the weights.
        notes: What a reader of the record should know.
        neurons: Neurons kept in every layer, likewise; None where none are removed.
    """

    base: Run
    small: Run
    save: Callable[[Path], str]
    seconds: dict[str, float]
    heads: list[int] | None = None
    notes: list[str] = field(default_factory=list)
    neurons: list[int] | None = None


def main(cut: Callable[[Job], Cut], load: Callable[[Job, Path], Run]) -> None:
    """Does one part of a job (``cut``, ``load`` or ``time``) and writes its answer."""
    job, half = Job.read(Path(sys.argv[1])), sys.argv[2]
    warnings.filterwarnings("ignore")  # an older peer has many
    random.seed(job.seed)
    np.random.seed(job.seed)
    torch.manual_seed(job.seed)
    torch.set_num_threads(job.threads)
    answer: dict[str, Any] = {"versions": versions()}
    arrays: dict[str, np.ndarray] = {}
    try:
        for library in (
            "transformers",
            "onnxruntime",
        ):  # some programs would import them while memory is watched
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
        if half == "cut":
            _cut(job, cut, answer, arrays)
        elif half == "load":
            _load(job, load, answer, arrays)
        else:
            base = running(pretrained(job.base, job.device))
            answer["rounds"] = _rounds(job, base, load(job, job.saved))
    except Exception as error:  # whatever a peer raises is its row in the table
        answer["error"] = words(error)
    np.savez_compressed(job.out / f"{half}.npz", **arrays)
    (job.out / f"{half}.json").write_text(json.dumps(answer, indent=1), encoding="utf-8")


def _cut(
    job: Job, cut: Callable[[Job], Cut], answer: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    peak = Peak(job.device)
    made = cut(job)
    answer["memory"] = peak.mebibytes()
    answer |= {"seconds": made.seconds, "heads": made.heads, "notes": made.notes}
    answer["neurons"] = made.neurons
    if made.heads is not None and not job.of_share and sum(made.heads) != job.kept:
        made.notes.append(f"kept {sum(made.heads)} heads where {job.kept} were asked for")
    arrays["base"] = logits(made.base, job.batches("test"), most=FIRST)
    arrays |= {split: logits(made.small, job.batches(split)) for split in ("validation", "test")}
    answer["rounds"] = _rounds(job, made.base, made.small)
    try:
        job.saved.mkdir()
        answer["saved_by"] = made.save(job.saved)
    except Exception as error:
        answer["not_saved"] = words(error)


def _rounds(job: Job, base: Run, small: Run) -> list[list[list[float]]]:
    """Rounds of every shape of a job."""
    rows = job.arrays("test")
    return [rounds(job, base, small, shaped(rows, *shape, job.device)) for shape in job.shapes]


def _load(
    job: Job,
    load: Callable[[Job, Path], Run],
    answer: dict[str, Any],
    arrays: dict[str, np.ndarray],
) -> None:
    peak = Peak(job.device)
    run = load(job, job.saved)
    arrays["test"] = logits(run, job.batches("test"))
    answer["memory"] = peak.mebibytes()


def logits(run: Run, batches: list[dict[str, Tensor]], most: int | None = None) -> np.ndarray:
    """Of all batches, or of their first ``most`` rows; those of tokens padded on the right with
    zeros."""
    found: list[np.ndarray] = []
    for batch in batches:
        if most is not None and sum(map(len, found)) >= most:
            break
        values = run(batch)
        found.append(
            np.asarray(values.detach().float().cpu() if isinstance(values, Tensor) else values)
        )
    if found[0].ndim == 3:
        widest = max(values.shape[1] for values in found)
        found = [np.pad(v, ((0, 0), (0, widest - v.shape[1]), (0, 0))) for v in found]
    return np.concatenate(found)[:most]


def shaped(rows: dict[str, np.ndarray], batch: int, length: int, device: str) -> dict[str, Tensor]:
    """Inputs of a wanted size, rows and tokens repeated or cut off, nothing padded."""
    found = {}
    for name, values in rows.items():
        if name == "label":
            continue
        values = values[np.arange(batch) % len(values)]
        if length and values.ndim == 2:
            values = values[:, np.arange(length) % int(rows["attention_mask"].sum(1).min())]
            values = np.ones_like(values) if name == "attention_mask" else values
        found[name] = torch.from_numpy(np.ascontiguousarray(values)).to(device)
    return found


def rounds(
    job: Job, base: Run, small: Run, inputs: dict[str, Tensor], least: int = 10
) -> list[list[float]]:
    """Seconds of ``[base, small]``, one call of each a round; which goes first alternates."""
    runs = base, small
    for run in runs * WARMUP:
        _timed(run, inputs, job.device)
    found: list[list[float]] = []
    gc.collect()
    gc.disable()
    try:
        while len(found) < least or len(found) % 2 or sum(map(sum, found)) < job.seconds:
            took = [0.0, 0.0]
            for which in (0, 1) if len(found) % 2 == 0 else (1, 0):
                took[which] = _timed(runs[which], inputs, job.device)
            found.append(took)
    finally:
        gc.enable()
    return found


def _timed(run: Run, inputs: dict[str, Tensor], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    run(inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start


class Peak:
    """The highest memory since it was made, less what was in use then: of the GPU, or of the
    process (Linux)."""

    def __init__(self, device: str) -> None:
        self.device = device
        gc.collect()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / 2**20
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
            except OSError:
                self.before = float("nan")
            else:
                self.before = _status("VmRSS")

    def mebibytes(self) -> float | None:
        """None where it cannot be known."""
        after = (
            torch.cuda.max_memory_allocated() / 2**20 if self.device == "cuda" else _status("VmHWM")
        )
        return None if np.isnan(after - self.before) else round(after - self.before, 1)


def _status(key: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(
        (int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), float("nan")
    )


def versions() -> dict[str, str]:
    """Of Python and of what is installed of the packages that matter."""
    found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in _PACKAGES}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}


def words(error: BaseException) -> str:
    """What a user would see last, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())
    where = (
        f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {text[:600]}{where}"


# ------------------------------------------------------------------------------- what several
# programs share


def pretrained(folder: Path, device: str) -> nn.Module:
    """A classifier, or a model of language, out of a folder as Transformers saves it; in evaluation
    mode."""
    import transformers

    (kind,) = transformers.AutoConfig.from_pretrained(folder).architectures
    found: nn.Module = getattr(transformers, kind).from_pretrained(folder).to(device).eval()
    return found


def running(model: nn.Module) -> Run:
    """Its logits, without a graph."""

    def run(inputs: dict[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(**inputs).logits
        return found

    return run


def saving(model: Any) -> Callable[[Path], str]:
    """``save_pretrained``, as safetensors."""

    def save(folder: Path) -> str:
        model.save_pretrained(folder)
        return "save_pretrained, from_pretrained"

    return save


def head_width(model: Any) -> int:
    """Channels of a head in the uncut configuration."""
    return int(model.config.hidden_size // model.config.num_attention_heads)


def heads_kept(model: nn.Module, width: int) -> list[int]:
    """Heads of every layer, by the rows of its query projections, whatever a version of
    Transformers calls them."""
    names = "query", "q_proj"
    found = (getattr(module, name, None) for module in model.modules() for name in names)
    return [len(query.weight) // width for query in found if isinstance(query, nn.Linear)]


def feed_forward(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    """The projections to neurons and from them, of a layer of a BERT, a ViT or a Llama."""
    if hasattr(layer, "mlp") and hasattr(layer.mlp, "up_proj"):
        return layer.mlp.up_proj, layer.mlp.down_proj
    if hasattr(layer, "mlp"):
        return layer.mlp.fc1, layer.mlp.fc2
    return layer.intermediate.dense, layer.output.dense


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of a BERT, a ViT or a Llama."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def neurons_kept(model: nn.Module) -> list[int]:
    """Neurons of every layer's feed-forward."""
    return [len(feed_forward(layer)[0].weight) for layer in layers_of(model)]


def layer_macs(config: Any, tokens: int) -> tuple[int, int]:
    """Multiply-adds of one layer per token, of its attention and of its feed-forward.

    With width D, T tokens and F neurons that is ``4 D² + 2 T D`` and ``2 D F``.
    """
    width = config.hidden_size
    return 4 * width**2 + 2 * tokens * width, 2 * width * config.intermediate_size


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
