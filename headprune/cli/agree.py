"""``headprune agree``: how alike several scores order the heads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli._shared import AsJson, Debug, emit, guarded, say
from headprune.cli._shared import show as show_value


def agree(
    files: Annotated[
        list[Path],
        typer.Argument(help="Two or more files of scores, as `headprune score` writes them."),
    ],
    k: Annotated[
        int | None,
        typer.Option("--k", help="Compare the sets of the K lowest; by default half of the units."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Draw the picture to this file (png, svg, pdf).")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare scores of one model: Spearman, Kendall tau-b and Jaccard of the k lowest, with
    intervals."""
    with guarded(debug):
        from headprune.core.errors import InvalidValue
        from headprune.core.scores import HeadScores
        from headprune.report.agreement import draw_agreement
        from headprune.scoring._agreement import agreement

        twice = next(
            (p for i, p in enumerate(files) if p.resolve() in {q.resolve() for q in files[:i]}),
            None,
        )
        if twice is not None:
            raise InvalidValue("files", "different from one another", f"{twice} twice")
        scores = [HeadScores.load(path) for path in files]
        names = [path.stem for path in files]
        found = agreement(
            *scores, k=k, names=names if len(set(names)) == len(names) else [str(p) for p in files]
        )
        if out is not None:
            say(f"wrote {draw_agreement(found, out)}")
        if as_json:
            emit(found.to_dict())
        else:
            show_value(found)
