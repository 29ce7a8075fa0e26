"""Speed, memory and energy of a model before and after a cut, one row for every cell of a grid, for ``tradeoff.py``."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import headprune as hp
from headprune.bench.latency import compare_latency, shaped_batch, synchronize
from headprune.model.costs import measure_costs
from headprune.model.running import call, device_of, to_device, undisturbed
from headprune.model.sites import bind

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scoring_cost import peak


@dataclass(frozen=True)
class Cell:
    """One place of the grid.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        attention: ``eager`` or ``sdpa``.
        compiled: Under ``torch.compile``.
        length: Tokens an example.
        batch: Examples a call.
    """

    dtype: str
    attention: str
    compiled: bool
    length: int
    batch: int

    @property
    def way(self) -> tuple[str, str, bool]:
        """What a model has to be made for; batch and length are a matter of its input."""
        return self.dtype, self.attention, self.compiled


def grid(args: Any) -> list[Cell]:
    """All cells, those of one way together."""
    compiled = [{"off": False, "on": True}[word] for word in args.compile]
    return [Cell(*c) for c in itertools.product(args.dtypes, args.attention, compiled, args.lengths, args.batch_sizes)]


def speed_rows(
    base: nn.Module, cuts: dict[int, nn.Module], example: Any, args: Any, done: set[Any]
) -> Iterator[dict[str, Any]]:
    """A row for each cell and cut that is not ``done``, as soon as it is measured.

    Args:
        base: The whole model, on its device.
        cuts: By heads kept, the model cut to them.
        example: A batch; rows and tokens of it make the inputs.
        args: Of ``tradeoff.py``.
        done: ``(kept, Cell)`` that are there already.
    """
    for way, cells in itertools.groupby(grid(args), key=lambda cell: cell.way):
        missing = [(cell, kept) for cell in cells for kept in cuts if (kept, cell) not in done]
        if not missing:
            continue
        torch._dynamo.reset()
        whole = prepared(base, *way)
        small = {kept: prepared(cuts[kept], *way) for kept in {kept for _, kept in missing}}
        for cell, kept in missing:
            row = {"what": "speed", "kept": kept, **asdict(cell)}
            try:
                yield row | measured(whole, small[kept], example, cell, args) | limits(base, cuts[kept], example, cell)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                yield row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def prepared(model: nn.Module, dtype: str, attention: str, compiled: bool) -> nn.Module:
    """A copy in a dtype, with an attention implementation, compiled or not."""
    made: Any = copy.deepcopy(model).to(getattr(torch, dtype)).eval()
    if hasattr(made, "set_attn_implementation"):
        made.set_attn_implementation(attention)
    # Every shape gets code of its own, as in serving with fixed shapes.
    return torch.compile(made, dynamic=False) if compiled else made  # type: ignore[no-any-return]


def measured(whole: nn.Module, small: nn.Module, example: Any, cell: Cell, args: Any) -> dict[str, Any]:
    """Latency of both in turn, peak memory and energy of each, clocks before and after."""
    device = device_of(whole)
    batch = to_device(shaped_batch(example, cell.batch, cell.length), device)
    before = clocks(device)
    (row,) = compare_latency(
        whole, small, lambda *_: batch, [cell.batch], [cell.length], seconds=args.seconds, min_rounds=8
    )
    found: dict[str, Any] = {k: v for k, v in vars(row).items() if k not in ("batch", "length")}
    found["throughput"] = [cell.batch / row.original_p50, cell.batch / row.pruned_p50]
    found["clocks"] = [before, clocks(device)]
    runs = [lambda m=m: running(m, batch) for m in (whole, small)]
    if not cell.compiled and not args.no_memory:
        found["peak_bytes"] = [peak(run, device) for run in runs]
    if device.type == "cuda":
        found["joules_an_example"] = [energy(run, cell.batch, args.seconds) for run in runs]
    return found


def running(model: nn.Module, batch: Any) -> None:
    with undisturbed(model, compiled=True), torch.inference_mode():
        call(model, batch)


def limits(base: nn.Module, small: nn.Module, example: Any, cell: Cell) -> dict[str, float]:
    """What multiply-adds alone would allow: of the whole model, and of its attention (projections included)."""
    batch = shaped_batch(example, 1, cell.length)
    costs = [measure_costs(model, bind(model), batch) for model in (base, small)]
    whole = [table.total.macs(cell.length) for table in costs]
    attention = [sum(u.macs(cell.length) for site in table.units for u in site) for table in costs]
    return {"limit": whole[0] / whole[1], "attention_limit": attention[0] / attention[1]}


def attention_rows(
    base: nn.Module, cuts: dict[int, nn.Module], example: Any, args: Any, done: set[Any]
) -> Iterator[dict[str, Any]]:
    """The attention part alone by a latency table, and the model, at long inputs, beside their limits."""
    for length, batch in itertools.product(args.attention_lengths, args.attention_batches):
        missing = [kept for kept in cuts if (kept, length, batch) not in done]
        if not missing:
            continue
        table = hp.bench.latency_table(base, example, batch_size=batch, length=length, seconds=10 * args.seconds)
        alone = table.alone([row.site for row in table.sites])
        for kept in missing:
            heads = {site.name: len(site.heads) for site in hp.find_sites(cuts[kept])}
            cell = Cell("float32", "sdpa", False, length, batch)
            make = partial(shaped_batch, example)
            (whole,) = compare_latency(base, cuts[kept], make, [batch], [length], seconds=args.seconds)
            yield {
                "what": "attention",
                "kept": kept,
                "length": length,
                "batch": batch,
                "attention_seconds": [alone.whole, alone.predict(heads)],
                "attention_ratio": alone.whole / alone.predict(heads),
                "model": vars(whole),
                **limits(base, cuts[kept], example, cell),
                "notes": list(table.notes),
            }


# ------------------------------------------------------------------------------------------------ sizes


def bytes_on_disk(model: nn.Module) -> int:
    """Of the weights in a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        hp.save_pretrained(model, folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ the GPU's own words


def clocks(device: torch.device) -> dict[str, Any] | None:
    """What the processor runs at; None where the system does not say."""
    if device.type != "cuda":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        found = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        return {"cpu_mhz": round(sum(found) / len(found))} if found else None
    names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", f"--id={device.index or 0}", f"--query-gpu={','.join(names)}"]
    try:
        said = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(names, map(str.strip, said.stdout.strip().split(",")), strict=False))


def energy(run: Callable[[], Any], batch: int, seconds: float) -> float | None:
    """Joules an example by NVML's counter of the whole GPU; None without the package ``pynvml`` or such a counter."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        read: Callable[[], int] = lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))  # noqa: E731
        before, start, calls = read(), perf_counter(), 0
    except Exception:  # no package, no driver, no counter: NVML has an error class for each
        return None
    while perf_counter() - start < max(seconds, 0.5):  # the counter moves some ten times a second
        run()
        synchronize(torch.device("cuda"))
        calls += 1
    return (read() - before) / 1000 / (calls * batch)
