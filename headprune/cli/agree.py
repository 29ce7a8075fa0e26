"""``headprune agree``: compare the order of heads by several scores."""

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
    """Compare scores of one model by Spearman, Kendall tau-b and Jaccard of the k lowest."""
    with guarded(debug):
        from headprune.core.scores import HeadScores
        from headprune.report.agreement import draw_agreement
        from headprune.run.reporting import check_different
        from headprune.scoring._agreement import agreement

        # 1. Load the scores, and name them by their files.
        check_different("files", files)
        scores = list(map(HeadScores.load, files))
        names = [path.stem for path in files]
        if len(set(names)) < len(names):  # files of the same name in different folders
            names = list(map(str, files))
        # 2. Compare them.
        result = agreement(*scores, k=k, names=names)
        if out is not None:
            say(f"wrote {draw_agreement(result, out)}")
        if as_json:
            emit(result.to_dict())
        else:
            show_value(result)
