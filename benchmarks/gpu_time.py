"""How long a call keeps the GPU busy, beside how long its caller waits; and what the GPU did
meanwhile.

A small model in eager mode keeps Python busier than the GPU: its latency is the time of launching
kernels, and a cut changes nothing. So every cell has two times:

- *latency*: wall clock of the call, from an idle GPU to an idle GPU;
- *GPU time*: between two CUDA events around replays of a CUDA graph of the same call, so that no
  launch weighs.

Where the two are alike, the cell is GPU-bound; where latency is longer, it is launch-bound
(``bound``). Code that ``torch.compile`` has put into CUDA graphs by itself cannot be captured
again. Events around the call time it (``events``), and Python's work before the replay lies between
them.

Clocks are read, never locked. Energy is that of back-to-back replays alone. On a CPU there is only
the latency.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headprune.bench.latency import Effort, in_turn, rounds, speed_row, synchronize
from headprune.model.running import device_of, undisturbed

sys.path.insert(0, str(Path(__file__).resolve().parent))
from compiled import compiling

Run = Callable[[], Any]

#: Arithmetic by name: dtype of weights and inputs, and whether fp32 products may use TF32.
PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
}
#: How the model's code runs. The last two are modes of ``torch.compile``, which makes CUDA graphs
#: of its own.
CODES = ("eager", "reduce-overhead", "max-autotune")
#: A cell is GPU-bound where the GPU is busy for at least this share of the latency.
BUSY = 0.9
#: Replays are timed together until they take this long, because an event's clock has steps of half
#: a microsecond.
SPAN = 2e-3
#: The GPU works for so long before a cell is timed, so that its clock has risen.
WARM_UP = 0.3
#: Bytes that are overwritten to push a model out of the L2 cache (50 to 60 MB on today's largest
#: GPUs).
L2_FLUSH = 256 * 2**20


@contextmanager
def arithmetic(precision: str) -> Iterator[torch.dtype]:
    """Allow or forbid TF32 inside the block; yield the dtype that weights and inputs must have."""
    dtype, tf32 = PRECISIONS[precision]
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = tf32
        yield dtype
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


# ------------------------------------------------------------------------------------------------
# one cell


@dataclass(frozen=True)
class Cell:
    """One place of a grid.

    Args:
        precision: A key of ``PRECISIONS``.
        code: One of ``CODES``.
        attention: ``sdpa`` or ``eager``, Transformers' attention implementation.
        cold: The L2 cache is overwritten before every timed call.
        batch: Examples a call.
        tokens: Tokens an example.
    """

    precision: str
    code: str
    attention: str
    cold: bool
    batch: int
    tokens: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Cell:
        """The cell of a row."""
        return cls(*(row[field.name] for field in fields(cls)))

    @property
    def way(self) -> tuple[str, str, str]:
        """What a model is prepared for; the rest is a matter of its input."""
        return self.precision, self.code, self.attention


def prepared_(model: nn.Module, cell: Cell) -> nn.Module:
    """Give a model the cell's dtype and attention, in place; return it, or its compiled code."""
    dtype, _ = PRECISIONS[cell.precision]
    made: Any = model.to(dtype).eval()
    if hasattr(made, "set_attn_implementation"):
        made.set_attn_implementation(cell.attention)
    if cell.code == "eager":
        return made  # type: ignore[no-any-return]
    # Every shape gets code of its own, as in serving with fixed shapes.
    return torch.compile(made, dynamic=False, mode=cell.code)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Measuring:
    """How a cell is measured.

    Args:
        effort: Of each of the two times.
        cold: Overwrite the L2 cache before every timed call; then energy is not read.
        joules: Seconds of each of two windows in which a model's energy is read; 0 reads none.
    """

    effort: Effort
    cold: bool = False
    joules: float = 0.0


def compared(
    models: Sequence[nn.Module], call_of: Callable[[nn.Module], Run], cell: Cell, how: Measuring
) -> list[dict[str, Any]]:
    """Measure one cell: the first model beside every other one.

    Args:
        models: ``prepared_`` for the cell, the whole one first, on one device.
        call_of: Makes the call of a model with the cell's input, which leaves its results on the
            device.
        cell: What is measured.
        how: For how long.

    Returns:
        A row for every model after the first: the cell, what ``measured`` gives, and the kernels of
        attention.
    """
    device = device_of(models[0])
    with ExitStack() as stack:
        stack.enter_context(arithmetic(cell.precision))
        stack.enter_context(masks_of_eager_mode())
        stack.enter_context(torch.inference_mode())
        for model in models:
            stack.enter_context(undisturbed(model, compiled=True))
        facts = stack.enter_context(compiling(cell.code != "eager"))
        runs = [call_of(model) for model in models]
        eager = cell.code == "eager"
        backends = sorted({name for run in runs for name in sdpa_backends(run)}) if eager else []
        rows = measured(runs, device, cell.batch, cell.tokens, how, not eager, backends)
        counted = facts(len(models))
    return [{**asdict(cell), "backends": backends, **row, **counted} for row in rows]


def measured(
    runs: Sequence[Run],
    device: torch.device,
    batch: int,
    tokens: int,
    how: Measuring,
    graphed: bool = False,
    backends: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Compare the first call with every other one; return a row for each of the others.

    All calls of a cell run in turn, so that the first one's times are the same in all rows.

    Args:
        runs: Calls of the whole model and of its cuts, which leave their results on the GPU.
        device: Where they run.
        batch: Examples a call, for the rows.
        tokens: Tokens an example, for the rows.
        how: For how long, and what else is read.
        graphed: ``torch.compile`` has made CUDA graphs of the calls: they are not captured again.
        backends: Kernels of attention that the calls take; a graph with others is not used.

    Returns:
        Rows with ``call``, and on a GPU ``gpu`` with ``bound``, ``events`` of compiled code, or
        ``no_graph`` (why there is neither); ``state`` before and after, and ``joules`` a call.
    """
    if device.type != "cuda":
        times = {"call": in_turn(runs, device, how.effort)}
        return [
            _row(place, batch, tokens, times, {"state": [None, None]})
            for place in range(1, len(runs))
        ]
    found: dict[str, Any] = {}
    warm_up(runs[0], device)
    before = state(device)
    times = {"call": latencies(runs, device, how)}
    replays, why = (list(runs), None) if graphed else captured(runs, backends)
    if replays is None:
        found["no_graph"] = why
    else:
        times["events" if graphed else "gpu"] = gpu_seconds(replays, device, how)
        if how.joules and not how.cold:
            found["joules"] = energies(replays, device, how.joules)
    found["state"] = [before, state(device)]
    return [_row(place, batch, tokens, times, found) for place in range(1, len(runs))]


def _row(
    place: int, batch: int, tokens: int, times: Mapping[str, np.ndarray], found: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """One comparison of the cell: the first call with the one at ``place``."""
    pair = [0, place]
    row = dict(found)
    for name, seconds in times.items():
        row[name] = _speed(batch, tokens, seconds[:, pair])
    if "gpu" in row:
        row["bound"] = bound(row["call"], row["gpu"])
    joules = found.get("joules")
    if joules is not None:
        row["joules"] = [joules[i] for i in pair]
    return row


def _speed(batch: int, tokens: int, times: np.ndarray) -> dict[str, Any]:
    row = vars(speed_row(batch, tokens, times, seed=0))
    return {name: value for name, value in row.items() if name not in ("batch", "length")}


def bound(call: dict[str, Any], gpu: dict[str, Any]) -> str:
    """``gpu`` where both models keep the GPU busy nearly all the time, ``launch`` where Python
    takes longer."""
    shares = [gpu[f"{which}_p50"] / call[f"{which}_p50"] for which in ("original", "pruned")]
    return "gpu" if min(shares) >= BUSY else "launch"


# ------------------------------------------------------------------------------------------------
# time of the GPU alone


def captured(
    runs: Sequence[Run], backends: Sequence[str] = ()
) -> tuple[list[Run] | None, str | None]:
    """Make a CUDA graph of every call; return their replays, or why one could not be captured.

    What waits for the GPU, or copies from main memory, cannot be captured. A graph whose attention
    runs in other kernels than those of the call, ``backends``, is another computation, and is none
    of use.
    """
    try:
        graphs = [capture(run) for run in runs]
        others = {name for _, names in graphs for name in names} - set(backends)
        if others:
            return None, f"the graph takes other kernels than the call: {', '.join(sorted(others))}"
        return [graph.replay for graph, _ in graphs], None
    except (
        Exception
    ) as error:  # CUDA's and PyTorch's own kinds, and whatever a model raises half-way
        torch.cuda.synchronize()
        first = (str(error).splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {first[:200]}"


def capture(run: Run) -> tuple[torch.cuda.CUDAGraph, list[str]]:
    """Capture a call after three warm-up calls in a stream of their own, as PyTorch's documentation
    asks.

    Returns:
        The graph, and the kernels of its attention.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backends = sdpa_backends(run)
    return graph, backends


@contextmanager
def masks_of_eager_mode() -> Iterator[None]:
    """Have Transformers build the masks of eager mode while code is compiled or a graph is
    captured.

    Up to 5.17 it writes every mask out in full there, even one that hides nothing, because it
    cannot look at masks that are inputs; later versions do not. Ours hide nothing and are no
    inputs, and a mask that is written out keeps the flash kernel away.
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    before = getattr(masking_utils, "is_tracing", None)
    if before is None:
        yield
        return
    masking_utils.is_tracing = lambda *_: False
    try:
        yield
    finally:
        masking_utils.is_tracing = before


def latencies(runs: Sequence[Run], device: torch.device, how: Measuring) -> np.ndarray:
    """Seconds ``[rounds, runs]`` by the wall clock; the L2 cache is overwritten before every cold
    call."""
    if not how.cold:
        return in_turn(runs, device, how.effort)
    dirt = torch.empty(L2_FLUSH, dtype=torch.int8, device=device)

    def timed(which: int) -> tuple[float]:
        dirt.zero_()
        synchronize(device)
        begin = perf_counter()
        runs[which]()
        synchronize(device)
        return (perf_counter() - begin,)

    return rounds(timed, how.effort, len(runs))[:, :, 0]


def gpu_seconds(replays: Sequence[Run], device: torch.device, how: Measuring) -> np.ndarray:
    """Seconds ``[rounds, replays]`` between events; short replays are timed several at a time, cold
    ones alone."""
    dirt = torch.empty(L2_FLUSH, dtype=torch.int8, device=device) if how.cold else None
    counts = [1 if how.cold else _span(replay, device) for replay in replays]

    def timed(which: int) -> tuple[float]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if dirt is not None:
            dirt.zero_()
        start.record()
        for _ in range(counts[which]):
            replays[which]()
        end.record()
        end.synchronize()
        return (start.elapsed_time(end) / 1000 / counts[which],)

    return rounds(timed, how.effort, len(replays))[:, :, 0]


def _span(replay: Run, device: torch.device) -> int:
    """How many replays take about ``SPAN``."""
    replay()
    synchronize(device)
    begin = perf_counter()
    replay()
    synchronize(device)
    return max(1, min(64, round(SPAN / (perf_counter() - begin))))


def warm_up(run: Run, device: torch.device) -> None:
    """Keep the GPU busy until its clock has risen."""
    begin = perf_counter()
    while perf_counter() - begin < WARM_UP:
        run()
        synchronize(device)


# ------------------------------------------------------------------------------------------------
# what the driver says


class Driver:
    """NVML's view of one GPU; a reading is None where the package ``pynvml``, the driver or a
    counter is missing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _handle(self) -> tuple[Any, Any] | None:
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = uuid_of(self.device)
            if uuid is None:
                return pynvml, pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:  # NVML has an error class for each of its answers
            return None

    def _ask(self, question: Callable[[Any, Any], Any]) -> Any:
        if self._handle is None:
            return None
        try:
            return question(*self._handle)
        except Exception:  # this counter is not there
            return None

    def state(self) -> dict[str, Any] | None:
        """Clocks in MHz, watts, degrees Celsius, and the bits of NVML's reasons for a lower
        clock."""
        if self._handle is None:
            return None
        return {
            "sm_mhz": self._ask(
                lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
            ),
            "memory_mhz": self._ask(
                lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)
            ),
            "watts": self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            "celsius": self._ask(
                lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            "throttled": self._ask(
                lambda nvml, gpu: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
            ),
        }

    def joules(self) -> float | None:
        """Since the driver was loaded, of the whole GPU, idle power included."""
        found: float | None = self._ask(
            lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
        )
        return found


def state(device: torch.device) -> dict[str, Any] | None:
    """The GPU's clocks, power, temperature and throttling now; None on a CPU or without NVML."""
    return Driver(device).state() if device.type == "cuda" else None


def uuid_of(device: torch.device) -> str | None:
    """The GPU's name among all of the machine, or None where PyTorch does not give it.

    ``CUDA_VISIBLE_DEVICES`` may hide some GPUs: PyTorch's index then counts others than the
    driver's.
    """
    found = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    if not found:
        return None
    return found if found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"


def energies(replays: Sequence[Run], device: torch.device, seconds: float) -> list[float | None]:
    """Joules a call of each, over back-to-back replays: two windows of so many seconds, the second
    in reverse order."""
    driver = Driver(device)
    if driver.joules() is None:
        return [None] * len(replays)
    spent, calls = [0.0] * len(replays), [0] * len(replays)
    for which in (*range(len(replays)), *reversed(range(len(replays)))):
        count = _span(replays[which], device)
        synchronize(device)
        before, begin = driver.joules() or 0.0, perf_counter()
        while perf_counter() - begin < seconds:
            for _ in range(count):
                replays[which]()
            synchronize(device)
            calls[which] += count
        spent[which] += (driver.joules() or 0.0) - before
    return [joules / count for joules, count in zip(spent, calls, strict=True)]


# ------------------------------------------------------------------------------------------------
# attention's kernel


#: Kernel of ``scaled_dot_product_attention`` by the operator that PyTorch dispatches to.
BACKENDS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_attention_math": "math",
    "_safe_softmax": "math",
}


def sdpa_backends(run: Run) -> list[str]:
    """Names of the kernels that compute attention in one eager call; empty where it does not use
    SDPA.

    Every head count can get another kernel: a mask of ones keeps flash away, and so do odd head
    widths.
    """
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.name().removeprefix("aten::").partition(".")[0]
            if (
                name == "scaled_dot_product_attention"
            ):  # inference mode hands it over before a kernel is chosen
                with self:
                    return func.decompose(*args, **(kwargs or {}))
            if name in BACKENDS:
                seen.add(BACKENDS[name])
            return func(*args, **(kwargs or {}))

    with Watch():
        run()
    return sorted(seen)


# ------------------------------------------------------------------------------------------------
# ceilings


def ceilings(device: torch.device, small: bool = False) -> dict[str, float]:
    """What this very machine can do at most: bytes a second copied, and operations a second by
    precision.

    A large copy within the GPU's memory counts bytes read and written; a product of two square
    matrices of random numbers counts two operations per multiply-add. Medians of ten, after three
    to warm up.

    Args:
        device: Where.
        small: Sizes for trying the script.
    """
    side, length = (128, 2**20) if small else (8192, 2**32)
    found = {"copy_bytes": 2 * length / _copy_seconds(length, device)}
    for precision in PRECISIONS:
        found[f"{precision}_flops"] = 2 * side**3 / _product_seconds(side, precision, device)
    return found


def _copy_seconds(length: int, device: torch.device) -> float:
    source = torch.empty(length, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return _median_seconds(lambda: target.copy_(source), device)


def _product_seconds(side: int, precision: str, device: torch.device) -> float:
    with arithmetic(precision) as dtype:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        return _median_seconds(lambda: a @ b, device)


def _median_seconds(run: Run, device: torch.device) -> float:
    effort = Effort(0.0, 3, 10, 10)
    if device.type == "cuda":
        return float(np.median(gpu_seconds([run], device, Measuring(effort))))
    return float(np.median(in_turn([run], device, effort)))
