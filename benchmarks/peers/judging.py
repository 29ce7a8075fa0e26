"""What is read out of the peers' answers, by the same code for all: quality, speed, and paired
differences.

What the labels are says how quality is measured: by the accuracy of classes (integers), by the
accuracy of next tokens (integers ``[examples, tokens]``), or by Spearman's correlation with grades
(floating-point numbers).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from scipy.stats import rankdata, spearmanr

#: Resamples behind an interval.
DRAWS = 2000


#: A label that does not count: of a token that is padding.
IGNORED = -100


def answers(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """One number an example, ``[examples]``: whether its largest logit is its label's, the share of
    its next tokens of which that is true, or the grade that the model gives."""
    wanted = "1" if _grades(labels) else "classes"
    shape = [*labels.shape, wanted]
    if logits.shape[:-1] != labels.shape or (_grades(labels) and logits.shape[-1] != 1):
        raise ValueError(f"logits must be {shape}, not {list(logits.shape)}")
    if _grades(labels):
        return logits[:, 0]
    found: np.ndarray
    if labels.ndim == 1:
        found = logits.argmax(1) == labels
        return found.astype(np.float32)
    following = labels[:, 1:]
    counted = following != IGNORED
    found = (logits[:, :-1].argmax(2) == following) & counted
    return (found.sum(1) / counted.sum(1)).astype(np.float32)


def has_quality(answered: np.ndarray, labels: np.ndarray) -> bool:
    """Whether there is an order to correlate; classes and tokens are always right or wrong."""
    return not _grades(labels) or bool(np.isfinite(answered).all() and np.ptp(answered) > 0)


def quality(answered: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy, or the correlation with grades."""
    if _grades(labels):
        return float(spearmanr(answered, labels).statistic)
    return float(answered.mean())


def _grades(labels: np.ndarray) -> bool:
    return labels.dtype.kind == "f"


def speed(shape: tuple[int, int], rounds: list[list[float]]) -> dict[str, Any]:
    """Medians of both models, and of base / small, with a 95 % bootstrap interval over the
    rounds."""
    times = np.array(rounds)
    ratios = times[:, 0] / times[:, 1]
    draws = np.random.default_rng(0).integers(0, len(ratios), (DRAWS, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), (2.5, 97.5))
    base, small = np.median(times, axis=0) * 1e3
    found = {"ratio": np.median(ratios), "low": low, "high": high, "base_ms": base, "ms": small}
    batch, length = shape
    return {
        "batch": batch,
        "length": length,
        **{k: round(float(v), 4) for k, v in found.items()},
        "rounds": len(times),
    }


def difference(pairs: list[tuple[np.ndarray, np.ndarray]], labels: np.ndarray) -> dict[str, float]:
    """Quality of the first less that of the second, mean over draws, and a paired 95 % interval
    over examples.

    Args:
        pairs: For every draw of calibration rows, the ``answers`` of both.
        labels: Of the examples.
    """
    if _grades(labels):
        apart = np.mean([quality(a, labels) - quality(b, labels) for a, b in pairs])
        resampled = [_correlations(a, labels) - _correlations(b, labels) for a, b in pairs]
        low, high = np.percentile(np.mean(resampled, axis=0), (2.5, 97.5))
    else:
        per_example = np.mean([a - b for a, b in pairs], axis=0)
        apart = per_example.mean()
        low, high = np.percentile(per_example[_drawn(len(labels), DRAWS)].mean(1), (2.5, 97.5))
    found = {"difference": apart, "low": low, "high": high}
    return {k: round(float(v), 5) for k, v in found.items()}


def _drawn(n: int, resamples: int) -> np.ndarray:
    """Examples of every resample, ``[resamples, examples]``; the same for all models."""
    return np.random.default_rng(0).integers(0, n, (resamples, n))


def _correlations(answered: np.ndarray, grades: np.ndarray) -> np.ndarray:
    """Spearman's correlation in every resample, ``[resamples]``.

    A model is compared with many others: its correlations are computed once.
    """
    values = (np.asarray(v, np.float64).tobytes() for v in (answered, grades))
    return _correlations_of(*values, DRAWS)


@lru_cache(maxsize=512)
def _correlations_of(answered: bytes, grades: bytes, resamples: int) -> np.ndarray:
    ranks, others = _ranks(answered, resamples), _ranks(grades, resamples)
    found: np.ndarray = (ranks * others).sum(1)
    return found / np.sqrt(np.square(ranks).sum(1) * np.square(others).sum(1))


@lru_cache(maxsize=2)
def _ranks(values: bytes, resamples: int) -> np.ndarray:
    """Ranks in every resample less their mean, ``[resamples, examples]``."""
    numbers = np.frombuffer(values)
    found: np.ndarray = rankdata(numbers[_drawn(len(numbers), resamples)], axis=1)
    return found - found.mean(axis=1, keepdims=True)
