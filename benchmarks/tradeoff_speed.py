"""Speed and memory of a model before and after a cut, one row for every cell of a grid, for
``tradeoff.py``."""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headprune as hp
from headprune.bench.latency import Effort, in_turn, shaped_batch, speed_row
from headprune.bench.recording import fresh, recorded
from headprune.model.costs import measure_costs
from headprune.model.running import call, device_of, to_device, undisturbed
from headprune.model.sites import bind

sys.path.insert(0, str(Path(__file__).resolve().parent))
from compiled import compiling
from gpu_time import state
from scoring_cost import peak

#: Among heads kept: nothing is cut.
WHOLE = -1


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
    return [
        Cell(*c)
        for c in itertools.product(
            args.dtypes, args.attention, compiled, args.lengths, args.batch_sizes
        )
    ]


def speed_rows(
    base: nn.Module, cuts: dict[int, nn.Module], example: Any, args: Any, done: set[Any]
) -> Iterator[dict[str, Any]]:
    """A row for each cell and cut that is not ``done``; the whole model and all cuts of a cell are
    timed in turn.

    Args:
        base: The whole model, on its device.
        cuts: By heads kept, the model cut to them.
        example: A batch; rows and tokens of it make the inputs.
        args: Of ``tradeoff.py``.
        done: ``(kept, Cell)`` that are there already.
    """
    for way, cells in itertools.groupby(grid(args), key=lambda cell: cell.way):
        made: dict[int, nn.Module] = {}
        for cell in cells:
            missing = [kept for kept in cuts if (kept, cell) not in done]
            if not missing:
                continue
            for kept, model in ((WHOLE, base), *((kept, cuts[kept]) for kept in missing)):
                if kept not in made:
                    made[kept] = prepared(model, *way)
            about = {"what": "speed", **asdict(cell), "threads": torch.get_num_threads()}
            try:
                with compiling(cell.compiled) as graphs:
                    found = measured(
                        [made[kept] for kept in (WHOLE, *missing)], example, cell, args
                    )
                    counted = graphs(len(found) + 1)
            except (
                RuntimeError
            ) as error:  # of the memory, or of a compiler: the cell is said to fail
                if device_of(base).type == "cuda":
                    torch.cuda.empty_cache()
                words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                yield from ({**about, "kept": kept, "error": words} for kept in missing)
                continue
            for kept, row in zip(missing, found, strict=True):
                yield {
                    **about,
                    "kept": kept,
                    **row,
                    **counted,
                    **limits(base, cuts[kept], example, cell.length),
                }


def prepared(model: nn.Module, dtype: str, attention: str, compiled: bool) -> nn.Module:
    """A copy in a dtype, with an attention implementation, compiled or not."""
    made: Any = copy.deepcopy(model).to(getattr(torch, dtype)).eval()
    if hasattr(made, "set_attn_implementation"):
        made.set_attn_implementation(attention)
    # Every shape gets code of its own, as in serving with fixed shapes.
    return torch.compile(made, dynamic=False) if compiled else made  # type: ignore[no-any-return]


def measured(models: list[nn.Module], example: Any, cell: Cell, args: Any) -> list[dict[str, Any]]:
    """For every model after the first, which is the whole one: latency of both, peak memory, and
    clocks.

    All run in turn, so that the whole model's times are the same in all rows.
    """
    device = device_of(models[0])
    batch = to_device(shaped_batch(example, cell.batch, cell.length), device)
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(undisturbed(model, compiled=True))
        stack.enter_context(torch.inference_mode())
        runs: list[Callable[[], Any]] = [partial(call, model, batch) for model in models]
        effort = effort_of(args, len(models))
        for run in runs * effort.warmup:
            run()
        before = clocks(device)
        times = in_turn(runs, device, effort)
        about: dict[str, Any] = {"clocks": [before, clocks(device)]}
        peaks = None if cell.compiled or args.no_memory else [peak(run, device) for run in runs]
    rows = []
    for place in range(1, len(models)):
        row = vars(speed_row(cell.batch, cell.length, times[:, [0, place]], seed=0))
        found: dict[str, Any] = {
            k: v for k, v in row.items() if k not in ("batch", "length")
        } | about
        found["throughput"] = [cell.batch / row["original_p50"], cell.batch / row["pruned_p50"]]
        found["weight_bytes"] = [weight_bytes(models[i]) for i in (0, place)]
        if peaks is not None:
            found["peak_bytes"] = [peaks[0], peaks[place]]
        rows.append(found)
    return rows


def effort_of(args: Any, models: int) -> Effort:
    """As long a model as if two were compared for ``--seconds``."""
    return Effort(args.seconds * models / 2, 3, 10, 200)


def weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def limits(base: nn.Module, small: nn.Module, example: Any, length: int) -> dict[str, Any]:
    """What multiply-adds alone would allow, of the model and of its attention; and both models'
    ``macs``."""
    batch = shaped_batch(example, 1, length)
    costs = [measure_costs(model, bind(model), batch) for model in (base, small)]
    whole = [table.total.macs(length) for table in costs]
    attention = [sum(u.macs(length) for site in table.units for u in site) for table in costs]
    return {
        "limit": whole[0] / whole[1],
        "attention_limit": attention[0] / attention[1],
        "macs": whole,
    }


def attention_rows(
    base: nn.Module, cuts: dict[int, nn.Module], example: Any, args: Any, done: set[Any]
) -> Iterator[dict[str, Any]]:
    """At long inputs: the attention modules alone, given what goes into them in a pass, and the
    models; all in turn."""
    for length, batch in itertools.product(args.attention_lengths, args.attention_batches):
        missing = [kept for kept in cuts if (kept, length, batch) not in done]
        if not missing:
            continue
        models, device = [base, *(cuts[kept] for kept in missing)], device_of(base)
        inputs = to_device(shaped_batch(example, batch, length), device)
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(undisturbed(model))
            stack.enter_context(torch.inference_mode())
            parts = [attention_of(model, inputs) for model in models]
            wholes = [partial(call, model, inputs) for model in models]
            alone, whole = (
                in_turn(runs, device, effort_of(args, len(models))) for runs in (parts, wholes)
            )
        for place, kept in enumerate(missing, 1):
            about = {"what": "attention", "kept": kept, "length": length, "batch": batch}
            about["threads"] = torch.get_num_threads()
            rows = {
                name: vars(speed_row(batch, length, times[:, [0, place]], seed=0))
                for name, times in (("alone", alone), ("model", whole))
            }
            yield {**about, **rows, **limits(base, cuts[kept], example, length)}


def attention_of(model: nn.Module, inputs: Any) -> Callable[[], None]:
    """Calls every attention module of a model as one pass of it does, one after the other."""
    seen = recorded(model, bind(model), inputs)
    runs = [(model.get_submodule(name), run) for name, found in seen.items() for _, run in found]

    def run_all() -> None:
        for module, run in runs:
            module(*fresh(run.args), **fresh(run.kwargs))

    return run_all


# ------------------------------------------------------------------------------------------------
# sizes


def bytes_on_disk(model: nn.Module) -> int:
    """Of the weights in a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        hp.save_pretrained(model, folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------------
# the processor's clock


def clocks(device: torch.device) -> dict[str, Any] | None:
    """What the processor runs at; None where the system does not say."""
    if device.type == "cuda":
        return state(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return {"cpu_mhz": round(sum(found) / len(found))} if found else None
