"""BLEU from sacrebleu's counts of n-grams, so that any draw of sentences can be scored."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: Longest n-grams.
ORDER = 4


def bleu(counts: Floats, reference: Floats) -> Floats:
    """BLEU as a fraction of 1 (Papineni et al. 2002, section 2.3).

    Equals sacrebleu's (Post 2018) divided by 100.

    ``min(1, exp(1 - reference / length)) · (p_1 p_2 p_3 p_4)^(1/4)``, where ``p_n`` is the share of
    the translations' n-grams that are in their references, and ``length`` the number of 1-grams.
    Orders without any match are smoothed as in sacrebleu (method ``exp``): the k-th of them counts
    1 / 2^k of an n-gram. Without a match at all, or without an n-gram of some order, it is 0.

    Args:
        counts: ``[..., 8]``: matches of 1- to 4-grams, then all 1- to 4-grams, summed over
            sentences.
        reference: ``[...]``: tokens of the references.

    Returns:
        ``[...]``.

    >>> import numpy as np
    >>> float(bleu(np.array([4.0, 3, 2, 1, 4, 3, 2, 1]), np.array(4.0)))
    1.0
    """
    import numpy as np

    matches = counts[..., :ORDER]  # [..., orders]
    total = counts[..., ORDER:]  # [..., orders]
    unmatched = matches == 0
    smoothed = np.where(unmatched, 0.5 ** np.cumsum(unmatched, axis=-1), matches)
    precision = smoothed / np.maximum(total, 1)  # no division by zero for empty translations
    brevity = np.exp(np.minimum(0.0, 1 - reference / np.maximum(total[..., 0], 1)))
    value = brevity * np.exp(np.log(precision).mean(axis=-1))
    # Smoothing alone would give an empty or wholly wrong translation a score above 0.
    is_defined = (total > 0).all(-1) & (matches > 0).any(-1)
    return np.where(is_defined, value, 0.0)
