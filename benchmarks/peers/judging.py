"""What is read out of the peers' answers, by the same code for all: accuracy, speed, and paired
differences."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Resamples behind an interval.
DRAWS = 2000


def right(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether each example's largest logit is its label's."""
    if logits.shape[:1] != labels.shape or logits.ndim != 2:
        raise ValueError(f"logits must be [{len(labels)}, classes], not {list(logits.shape)}")
    found: np.ndarray = (logits.argmax(1) == labels).astype(np.float32)
    return found


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


def difference(pairs: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Accuracy of the first less that of the second, mean over draws, and a paired 95 % interval
    over examples.

    Args:
        pairs: For every draw of calibration rows, whether each example is right, of both.
    """
    per_example = np.mean([a - b for a, b in pairs], axis=0)
    n = len(per_example)
    draws = np.random.default_rng(0).integers(0, n, (DRAWS, n))
    low, high = np.percentile(per_example[draws].mean(1), (2.5, 97.5))
    found = {"difference": per_example.mean(), "low": low, "high": high}
    return {k: round(float(v), 5) for k, v in found.items()}
