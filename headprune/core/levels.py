"""Levels of a feed-forward: how many neurons it may keep, so that choices stay few."""

from __future__ import annotations

#: Levels above the one without neurons.
LEVELS = 12
#: Widths are multiples of one of these: 64 and 8 suit matrix kernels. It is the largest with which
#: a feed-forward has room for ``LEVELS`` widths.
_MULTIPLES = (64, 8, 1)


def level_widths(n_neurons: int) -> tuple[int, ...]:
    """Return the numbers of neurons that may be kept, from none to all.

    >>> level_widths(1536)
    (0, 128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536)
    >>> level_widths(100)
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 100)
    """
    multiple = next(m for m in _MULTIPLES if n_neurons >= LEVELS * m or m == 1)
    widths = {0, n_neurons}
    for level in range(1, LEVELS):
        width = level * n_neurons / LEVELS
        widths.add(min(n_neurons, round(width / multiple) * multiple))
    return tuple(sorted(widths))
