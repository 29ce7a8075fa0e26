"""``headprune bench``: sizes and speed of two saved models, side by side."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.cli._shared import AsJson, Debug, Quiet, echo, emit, guarded, on_terminal, watching
from headprune.core.errors import InvalidValue

if TYPE_CHECKING:
    from headprune.core.record import SizeRow, SpeedRow


def bench(
    original: Annotated[
        str, typer.Argument(help="The model before the cut: a folder or hub name.")
    ],
    pruned: Annotated[str, typer.Argument(help="The model after it.")],
    batch: Annotated[
        list[int] | None, typer.Option(help="Examples a call; may be repeated. Default 1 and 32.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens an example; may be repeated. Default 128.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="About how long each batch and length is timed.")
    ] = 5.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time two models in turn, in one process, and compare their sizes."""
    with guarded(debug):
        import torch

        from headprune.bench.latency import compare_latency, shaped_batch
        from headprune.bench.size import sizes
        from headprune.data.models import longest_input, open_model, resolve_device
        from headprune.model.examples import example_batch
        from headprune.run.subject import quiet as quiet_libraries
        from headprune.run.surroundings import hardware

        if device not in ("auto", "cpu", "cuda"):
            raise InvalidValue("--device", "auto, cpu or cuda", repr(device))
        quiet_libraries()
        place = resolve_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        models = open_model(original, "ORIGINAL").to(place), open_model(pruned, "PRUNED").to(place)
        example = example_batch(models[0])
        if example is None:
            raise InvalidValue(
                "ORIGINAL", "a model that takes tokens, images or waves", type(models[0]).__name__
            )
        lengths = length or [128]
        limits = [
            limit
            for limit in map(longest_input, models)
            if limit is not None and "input_ids" in example
        ]
        if limits and max(lengths) > min(limits):
            raise InvalidValue(
                "--length", f"at most {min(limits)}, what the models can read", max(lengths)
            )
        example = shaped_batch(example, 2, max(lengths)) if "input_ids" in example else example
        weights, batches = sizes(*models, example), batch or [1, 32]
        watching(quiet)["say"](
            f"timing {len(batches) * len(lengths)} sizes, {seconds:g} s each or longer"
        )
        speed = compare_latency(
            *models,
            partial(shaped_batch, example),
            batches,
            lengths,
            seconds=seconds,
            progress=on_terminal(quiet),
        )
        if as_json:
            emit(
                {
                    "hardware": hardware(place),
                    "size": list(map(asdict, weights)),
                    "speed": list(map(asdict, speed)),
                }
            )
        else:
            _print(weights, speed)


def _print(weights: tuple[SizeRow, ...], speed: tuple[SpeedRow, ...]) -> None:
    for row in weights:
        share = f" ({100 * (row.pruned / row.original - 1):+.1f} %)" if row.original else ""
        echo(f"{row.name}: {row.original:,.0f} -> {row.pruned:,.0f}{share}")
    for cell in speed:
        times: list[Any] = [f"{1e3 * t:.2f}" for t in (cell.original_p50, cell.pruned_p50)]
        interval = f"{cell.ratio:.2f}x [{cell.low:.2f}, {cell.high:.2f}]"
        echo(
            f"batch {cell.batch} x {cell.length}: {times[0]} -> {times[1]} ms, {interval},"
            f" {cell.rounds} rounds"
        )
