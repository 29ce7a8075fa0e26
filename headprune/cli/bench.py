"""``headprune bench``: compare sizes and speed of two saved models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.cli._shared import AsJson, Debug, Quiet, echo, emit, guarded, on_terminal, watching
from headprune.core.errors import InvalidValue

if TYPE_CHECKING:
    from torch import nn

    from headprune.core.record import SizeRow, SpeedRow


def bench(
    original: Annotated[
        str, typer.Argument(help="The model before the cut: a folder or hub name.")
    ],
    pruned: Annotated[str, typer.Argument(help="The model after it.")],
    batch: Annotated[
        list[int] | None, typer.Option(help="Examples per call; may be repeated. Default 1 and 32.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens per example; may be repeated. Default 128.")
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
        from headprune.data.models import open_model, resolve_device
        from headprune.model.examples import example_batch
        from headprune.run.subject import quiet as quiet_libraries
        from headprune.run.surroundings import hardware

        # 1. Open both models.
        if device not in ("auto", "cpu", "cuda"):
            raise InvalidValue("--device", "auto, cpu or cuda", repr(device))
        quiet_libraries()
        place = resolve_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        models = (
            open_model(original, "ORIGINAL").to(place),
            open_model(pruned, "PRUNED").to(place),
        )

        # 2. Make inputs up. Only tokens have a length that can be chosen.
        example = example_batch(models[0])
        if example is None:
            must = "a model that takes tokens, images or waves"
            raise InvalidValue("ORIGINAL", must, type(models[0]).__name__)
        lengths, batches = length or [128], batch or [1, 32]
        if "input_ids" in example:
            _check_length(models, lengths)
            example = shaped_batch(example, 2, max(lengths))

        # 3. Count and time.
        weights = sizes(*models, example)
        n_cells = len(batches) * len(lengths)
        watching(quiet)["say"](f"timing {n_cells} sizes, {seconds:g} s each or longer")
        speed = compare_latency(
            *models,
            partial(shaped_batch, example),
            batches,
            lengths,
            seconds=seconds,
            progress=on_terminal(quiet),
        )
        if as_json:
            size_rows, speed_rows = list(map(asdict, weights)), list(map(asdict, speed))
            emit({"hardware": hardware(place), "size": size_rows, "speed": speed_rows})
        else:
            _print_tables(weights, speed)


def _check_length(models: Sequence[nn.Module], lengths: Sequence[int]) -> None:
    """Refuse lengths that one of the models cannot read."""
    from headprune.data.models import longest_input

    # Position embeddings limit some models; None is no limit.
    limits = list(map(longest_input, models))
    known = [limit for limit in limits if limit is not None]
    if known and max(lengths) > min(known):
        must = f"at most {min(known)}, what the models can read"
        raise InvalidValue("--length", must, max(lengths))


def _print_tables(weights: tuple[SizeRow, ...], speed: tuple[SpeedRow, ...]) -> None:
    """Print sizes and speed for people."""
    # Sizes, with the change in percent.
    for row in weights:
        line = f"{row.name}: {row.original:,.0f} -> {row.pruned:,.0f}"
        if row.original:
            line += f" ({100 * (row.pruned / row.original - 1):+.1f} %)"
        echo(line)
    # Medians of one forward pass, and the ratio with its interval.
    for cell in speed:
        before, after = 1e3 * cell.original_p50, 1e3 * cell.pruned_p50
        ratio = f"{cell.ratio:.2f}x [{cell.low:.2f}, {cell.high:.2f}]"
        times = f"{before:.2f} -> {after:.2f} ms"
        echo(f"batch {cell.batch} x {cell.length}: {times}, {ratio}, {cell.rounds} rounds")
