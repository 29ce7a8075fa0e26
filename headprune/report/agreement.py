"""The picture file of an `Agreement`: a row per pair, a panel per measure."""

from __future__ import annotations

from pathlib import Path

from headprune.core.agreement import MEASURES, Agreement
from headprune.core.errors import InvalidValue
from headprune.core.files import atomic_path
from headprune.report import plot


def draw_agreement(agreement: Agreement, path: str | Path) -> Path:
    """Write the picture, whole or not at all; the ending gives the format (png, svg, pdf).

    Raises:
        InvalidValue: a format that matplotlib does not write.
    """
    import matplotlib
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    path = Path(path)
    n = len(agreement.pairs)
    figure = Figure(figsize=(10, 1.4 + 0.35 * n), layout="constrained")
    known = sorted(figure.canvas.get_supported_filetypes())
    kind = path.suffix.removeprefix(".").lower()
    if kind not in known:
        raise InvalidValue(
            str(path), f"a picture that ends in one of {', '.join(known)}", repr(path.suffix)
        )
    # Names in files are not to become LaTeX commands.
    with matplotlib.rc_context({"text.usetex": False}):
        figure.suptitle(plot.plain(agreement.title), fontsize=10)
        plot.agreement(agreement, axes=figure.subplots(1, len(MEASURES), sharey=True))
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150)
    return path
