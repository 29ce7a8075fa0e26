"""Matthews correlation of classes from sums over examples, so that it can be taken of any draw of
them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def matthews(sums: Floats, judged: Any) -> Floats:
    """The correlation of labels and predictions: 1 where all are right, 0 where predictions tell
    nothing.

    ``(c s - sum_k t_k p_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))``, where of s judged
    labels c are predicted right, t_k are of class k and p_k are predicted to be: Gorodkin 2004,
    equation (8), which for two classes is Matthews 1975. 0 where all labels, or all predictions,
    are of one class, as in scikit-learn.

    Args:
        sums: ``[..., 1 + 2 * classes]``: c, then t, then p.
        judged: ``[...]``: s.

    >>> import numpy as np
    >>> (
    ...     float(matthews(np.array([4.0, 2, 2, 2, 2]), 4.0)),
    ...     float(matthews(np.array([2.0, 2, 2, 4, 0]), 4.0)),
    ... )
    (1.0, 0.0)
    """
    import numpy as np

    judged = np.asarray(judged, dtype=np.float64)
    right, both = sums[..., 0], sums[..., 1:]
    labels, predictions = np.split(both, 2, axis=-1)
    together = right * judged - (labels * predictions).sum(-1)
    of_labels = judged**2 - (labels**2).sum(-1)
    of_predictions = judged**2 - (predictions**2).sum(-1)
    spread = np.sqrt(of_labels * of_predictions)
    found: Floats = np.where(spread > 0, together / np.where(spread > 0, spread, 1.0), 0.0)
    return found


def worst_example(base: Floats, other: Floats, judged: float) -> tuple[Floats, Floats]:
    """One more example, right in one model and wrong in another: the one that parts their
    correlations most.

    Args:
        base: ``[1 + 2 * classes]``, sums of the model that is right.
        other: The same of the one that is wrong.
        judged: Labels in each.

    Returns:
        The example's row for each model.
    """
    import numpy as np

    n_classes = (len(base) - 1) // 2
    if n_classes < 2:  # no answer can be wrong
        return np.ones_like(base), np.ones_like(base)
    classes = np.arange(n_classes)
    after_base = _after(base, judged, 1.0, classes, classes)  # [label]
    after_other = _after(other, judged, 0.0, classes[:, None], classes[None])  # [label, prediction]
    drops = after_base[:, None] - after_other
    drops[classes, classes] = -np.inf  # right, not wrong
    drops[base[1 : 1 + n_classes] == 0] = -np.inf
    label, predicted = divmod(int(drops.argmax()), n_classes)
    one = np.eye(n_classes)
    return np.array([1.0, *one[label], *one[label]]), np.array([0.0, *one[label], *one[predicted]])


def _after(sums: Floats, judged: float, right: float, label: Any, predicted: Any) -> Floats:
    """The correlation after one more example of a label with a prediction, for arrays of both.

    Only the sums that the formula reads are changed, so that a thousand classes take a million
    numbers and no more.
    """
    import numpy as np

    labels, predictions = np.split(sums[1:], 2)
    same = np.equal(label, predicted)
    together = labels @ predictions + predictions[label] + labels[predicted] + same
    of_labels = labels @ labels + 2 * labels[label] + 1
    of_predictions = predictions @ predictions + 2 * predictions[predicted] + 1
    total = judged + 1
    spread = np.sqrt((total**2 - of_labels) * (total**2 - of_predictions))
    top = (sums[0] + right) * total - together
    found: Floats = np.where(spread > 0, top / np.where(spread > 0, spread, 1.0), 0.0)
    return found
