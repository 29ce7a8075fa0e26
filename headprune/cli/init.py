"""``headprune init``: write a commented recipe for a model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import (
    AsJson,
    Debug,
    LabelColumn,
    PairColumn,
    TextColumn,
    echo,
    emit,
    guarded,
    say,
)


def init(
    model: Annotated[str, typer.Option(help="A model folder, hub name, or package:NAME/FOLDER.")],
    data: Annotated[
        str,
        typer.Option(
            help="A csv, tsv, json, parquet or txt file, a folder with splits, or a hub name."
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(help="The task, if the model's class and the columns do not determine it."),
    ] = None,
    text: TextColumn = None,
    text_pair: PairColumn = None,
    label: LabelColumn = None,
    keep: Annotated[
        str, typer.Option(help="Heads to keep: a count, or a fraction such as 0.5.")
    ] = "0.5",
    out: Annotated[
        Path | None, typer.Option(help="The recipe's file; default NAME.yaml. `-` prints it.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a commented recipe for a model and data; asks and runs nothing."""
    with guarded(debug):
        from headprune.core.errors import InvalidValue
        from headprune.core.files import write_atomic
        from headprune.core.plan import read_keep
        from headprune.data.guess import guess
        from headprune.run.subject import quiet

        amount = str(read_keep(keep, "--keep"))
        # 1. Guess the recipe from the model's class and the data's columns.
        quiet()
        guessed = guess(
            model, data, task=task, text=text, text_pair=text_pair, label=label, keep=amount
        )
        recipe = guessed.recipe()
        # 2. Choose the file; `-` is standard output.
        path = out or Path(f"{recipe.name}.yaml")
        printed = str(path) == "-"
        if not printed and path.exists():
            raise InvalidValue("--out", "a new file", str(path), "Give another name with --out.")
        # 3. Print the recipe, or what it was guessed from, and write the file.
        if as_json:
            written = None if printed else str(path)
            emit({"out": written, "why": list(guessed.why), "recipe": recipe.model_dump()})
        elif printed:
            echo(guessed.text, nl=False)
        for line in guessed.why:
            say(line)
        if not printed:
            write_atomic(path, guessed.text.encode())
            say(f"wrote {path}; next: headprune run {path} --dry-run")
