"""BLEU from counts of n-grams, so that it can be taken of any draw of sentences; the counts are
sacrebleu's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: Longest n-grams.
ORDER = 4


def bleu(counts: Floats, reference: Floats) -> Floats:
    """BLEU as a fraction of 1, Papineni et al. 2002, section 2.3; equals sacrebleu's (Post 2018)
    divided by 100.

    ``min(1, exp(1 - reference / length)) · (p_1 p_2 p_3 p_4)^(1/4)``, where ``p_n`` is the share of
    the translations' n-grams that are in their references, and ``length`` the number of 1-grams.
    Orders without any match are smoothed as in sacrebleu (method ``exp``): the k-th of them counts
    1 / 2^k of an n-gram. Without a match at all, or without an n-gram of some order, it is 0.

    Args:
        counts: ``[..., 8]``: matches of 1- to 4-grams and then n-grams in all, summed over
            sentences.
        reference: ``[...]``: tokens of the references.

    >>> import numpy as np
    >>> float(bleu(np.array([4.0, 3, 2, 1, 4, 3, 2, 1]), np.array(4.0)))
    1.0
    """
    import numpy as np

    right, total = counts[..., :ORDER], counts[..., ORDER:]
    without = right == 0
    smoothed = np.where(without, 0.5 ** np.cumsum(without, axis=-1), right)
    precision = smoothed / np.maximum(total, 1)
    brevity = np.exp(np.minimum(0.0, 1 - reference / np.maximum(total[..., 0], 1)))
    value = brevity * np.exp(np.log(precision).mean(axis=-1))
    return np.where((total > 0).all(-1) & (right > 0).any(-1), value, 0.0)
