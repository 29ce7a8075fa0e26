"""Levels of a feed-forward: how many neurons it may keep, so that choices stay few."""

from __future__ import annotations

#: Levels above the one without neurons.
LEVELS = 12
#: Widths are multiples of one of these: 64 and 8 suit matrix kernels. It is the largest with which
#: a feed-forward has room for ``LEVELS`` widths.
_MULTIPLES = (64, 8, 1)


def level_widths(n_neurons: int, n_uncut: int | None = None) -> tuple[int, ...]:
    """Return the numbers of neurons that may be kept, from none to all.

    Args:
        n_neurons: Neurons that are present.
        n_uncut: Neurons before any cut, by default as many. A second cut keeps to the multiple of
            the first.

    >>> level_widths(1536)
    (0, 128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536)
    >>> level_widths(320, 1536)
    (0, 64, 128, 192, 256, 320)
    >>> level_widths(100)
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 100)
    """
    size = n_uncut or n_neurons
    multiple = next(m for m in _MULTIPLES if size >= LEVELS * m or m == 1)
    widths = {0, n_neurons}
    for level in range(1, LEVELS):
        width = level * n_neurons / LEVELS
        widths.add(min(n_neurons, round(width / multiple) * multiple))
    return tuple(sorted(widths))
