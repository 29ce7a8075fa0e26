"""The picture of an Agreement: every pair a row, every measure a panel, intervals as lines; drawn with matplotlib."""

from __future__ import annotations

import math
from pathlib import Path

from headprune.core.agreement import MEASURES, Agreement
from headprune.core.errors import InvalidValue
from headprune.core.files import atomic_path


def draw_agreement(agreement: Agreement, path: str | Path) -> Path:
    """Writes the picture, whole or not at all; the file's ending says the format (png, svg, pdf).

    Raises:
        InvalidValue: a format that matplotlib does not write.
    """
    from matplotlib.figure import Figure  # never pyplot: it keeps figures and looks for a screen

    path = Path(path)
    n = len(agreement.pairs)
    figure = Figure(figsize=(10, 1.4 + 0.35 * n), layout="constrained")
    known = sorted(figure.canvas.get_supported_filetypes())
    kind = path.suffix.removeprefix(".").lower()
    if kind not in known:
        raise InvalidValue(str(path), f"a picture that ends in one of {', '.join(known)}", repr(path.suffix))
    figure.suptitle(agreement.title, fontsize=10)
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    for panel, name, label in zip(panels, MEASURES, agreement.header[1:], strict=True):
        left = 0.0  # agreement worse than chance widens the axis
        for y, pair in enumerate(agreement.pairs):
            measure = getattr(pair, name)
            left = min(left, *(v for v in (measure.value, measure.low) if v is not None and not math.isnan(v)), 0.0)
            if measure.low is not None and measure.high is not None:
                panel.plot([measure.low, measure.high], [y, y], color="#2171b5", linewidth=2)
            if not math.isnan(measure.value):
                panel.plot(measure.value, y, "o", color="#08306b")
        panel.set_title(label, fontsize=9)
        panel.set_xlim(left - 0.05, 1.05)
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(n), [agreement.label(p) for p in agreement.pairs])
    panels[0].set_ylim(n - 0.5, -0.5)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)
    return path
