"""Speed of a model and its cuts on a GPU, latency and GPU time, one row for every cell and cut, for
``tradeoff.py``.

On a CPU the same rows have a latency alone, so that the whole part can be tried there.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.bench.latency import Effort, shaped_batch
from headprune.model.running import device_of, to_device

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_time import Cell, Measuring, Run, ceilings, compared, prepared_
from tradeoff_speed import limits

#: Seconds of each of two windows in which a model's energy is read.
JOULES = 2.0
#: From so many tokens a call on, an encoder of MiniLM's size keeps a large GPU busy, and energy
#: says something.
BUSY_TOKENS = 128 * 512
#: ``torch.compile`` takes half a minute a model: so it is measured with one cut alone.
COMPILED_CUTS = 1


def grid() -> list[Cell]:
    """The study's cells, most telling first."""
    eager = ("eager", "sdpa", False)
    cells = [
        Cell("bfloat16", *eager, *size)
        for size in ((128, 512), (32, 128), (256, 128), (8, 128), (1, 128))
    ]
    cells += [
        Cell(name, *eager, *size)
        for name in ("float32", "tf32", "float16")
        for size in ((32, 128), (128, 512))
    ]
    cells += [
        Cell("bfloat16", *eager, *size)
        for size in ((256, 512), (128, 128), (32, 512), (8, 512), (1, 512))
    ]
    cells += [
        Cell("bfloat16", *eager, *size)
        for size in ((1, 32), (8, 32), (32, 32), (128, 32), (256, 32))
    ]
    cells += [Cell("bfloat16", "eager", "sdpa", True, *size) for size in ((32, 128), (1, 128))]
    cells += [
        Cell("bfloat16", "reduce-overhead", "sdpa", False, *size) for size in ((32, 128), (1, 128))
    ]
    cells += [Cell("bfloat16", "max-autotune", "sdpa", False, 32, 128)]
    return cells


def tiny_grid() -> list[Cell]:
    """Two precisions at one small shape, for trying the script."""
    return [Cell(precision, "eager", "sdpa", False, 2, 8) for precision in ("bfloat16", "float32")]


def gpu_rows(
    base: nn.Module,
    cuts: dict[int, nn.Module],
    example: dict[str, Any],
    args: Any,
    done: list[dict[str, Any]],
) -> Iterator[dict[str, Any] | list[dict[str, Any]]]:
    """A row for each cell and cut that is not ``done``, and one of what the machine can do at most.

    Args:
        base: The whole model, on its device.
        cuts: By heads kept, the model cut to them.
        example: A batch; rows and tokens of it make the inputs. Its mask of ones is taken away: it
            would keep the flash kernel from being used.
        args: Of ``tradeoff.py``.
        done: Rows that are there.
    """
    device = device_of(base)
    if not any(row["what"] == "ceiling" for row in done):
        yield {"what": "ceiling", **ceilings(device, args.small)}
    example = {name: value for name, value in example.items() if name != "attention_mask"}
    have = {(row["kept"], Cell.of(row)) for row in done if row["what"] == "gpu"}
    known = cache(lambda kept, tokens: limits(base, cuts[kept], example, tokens))
    for way, cells in itertools.groupby(
        tiny_grid() if args.small else grid(), key=lambda cell: cell.way
    ):
        made: dict[int | None, nn.Module] = {}  # None is the whole model
        for cell in cells:
            missing = [kept for kept in wanted(cuts, way) if (kept, cell) not in have]
            if not missing:
                continue
            for kept in (None, *missing):
                if kept not in made:
                    made[kept] = prepared_(
                        copy.deepcopy(base if kept is None else cuts[kept]), cell
                    )
            found = rows(made, missing, example, cell, args)
            yield [
                row if "error" in row else {**row, **known(row["kept"], cell.tokens)}
                for row in found
            ]


def wanted(cuts: dict[int, nn.Module], way: tuple[str, str, str]) -> list[int]:
    """Which cuts are measured: all, or under ``torch.compile`` the middle one."""
    budgets = list(cuts)
    return budgets if way[1] == "eager" else budgets[len(budgets) // 2 :][:COMPILED_CUTS]


def rows(
    made: dict[int | None, nn.Module], missing: list[int], example: dict[str, Any], cell: Cell, args: Any
) -> list[dict[str, Any]]:  # fmt: skip
    """One cell; where it cannot be run, its rows say why."""
    device = next(made[None].parameters()).device
    inputs = to_device(shaped_batch(example, cell.batch, cell.tokens), device)

    def call_of(model: nn.Module) -> Run:
        return lambda: model(**inputs)

    busy = (
        cell.code == "eager"
        and cell.precision == "bfloat16"
        and cell.batch * cell.tokens == BUSY_TOKENS
    )
    how = Measuring(Effort(args.seconds, 3, 10, 400), cell.cold, JOULES if busy else 0.0)
    about = {"what": "gpu", "threads": torch.get_num_threads()}
    try:
        found = compared([made[None], *(made[kept] for kept in missing)], call_of, cell, how)
    except (
        Exception
    ) as error:  # of the memory, a kernel, a compiler, a model: the next cell may run
        if device.type == "cuda":
            torch.cuda.empty_cache()
        first = (str(error).splitlines() or [""])[0]
        words = f"{type(error).__name__}: {first[:300]}"
        return [{**about, **vars(cell), "kept": kept, "error": words} for kept in missing]
    return [{**about, "kept": kept, **row} for kept, row in zip(missing, found, strict=True)]
