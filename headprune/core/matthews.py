"""Matthews correlation from sums over examples, so that any draw of them can be scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def matthews(sums: Floats, judged: Any) -> Floats:
    """Matthews correlation of labels and predictions; 1 where all are right.

    ``(c s - sum_k t_k p_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))``. Of s labels, c are
    predicted right, t_k are of class k, and p_k are predicted to be of class k (Gorodkin 2004,
    equation (8); for two classes Matthews 1975). As in scikit-learn, 0 where all labels, or all
    predictions, are of one class.

    Args:
        sums: ``[..., 1 + 2 * classes]``: c, then t, then p.
        judged: ``[...]``: s.

    Returns:
        ``[...]``.

    >>> import numpy as np
    >>> (
    ...     float(matthews(np.array([4.0, 2, 2, 2, 2]), 4.0)),
    ...     float(matthews(np.array([2.0, 2, 2, 4, 0]), 4.0)),
    ... )
    (1.0, 0.0)
    """
    import numpy as np

    judged = np.asarray(judged, dtype=np.float64)
    right = sums[..., 0]
    labels, predictions = np.split(sums[..., 1:], 2, axis=-1)  # [..., classes] each
    covariance = right * judged - (labels * predictions).sum(-1)
    label_variance = judged**2 - (labels**2).sum(-1)
    prediction_variance = judged**2 - (predictions**2).sum(-1)
    return _ratio(covariance, np.sqrt(label_variance * prediction_variance))


def _ratio(covariance: Floats, spread: Floats) -> Floats:
    """Divide; 0 where all labels or predictions are of one class, so that ``spread`` is 0."""
    import numpy as np

    ratio: Floats = np.where(spread > 0, covariance / np.where(spread > 0, spread, 1.0), 0.0)
    return ratio


def worst_example(base: Floats, other: Floats, judged: float) -> tuple[Floats, Floats]:
    """Find the further example that separates the correlations of two models most.

    One model predicts it right, the other wrong.

    Args:
        base: ``[1 + 2 * classes]``, sums of the model that is right.
        other: The same of the model that is wrong.
        judged: Labels in each.

    Returns:
        The example's row for each model, ``[1 + 2 * classes]``.
    """
    import numpy as np

    n_classes = (len(base) - 1) // 2
    if n_classes < 2:  # no answer can be wrong
        return np.ones_like(base), np.ones_like(base)
    classes = np.arange(n_classes)
    # All labels and predictions that the example could have.
    after_base = _after(base, judged, 1.0, classes, classes)  # [label]
    after_other = _after(other, judged, 0.0, classes[:, None], classes[None])  # [label, prediction]
    drops = after_base[:, None] - after_other
    drops[classes, classes] = -np.inf  # here the other model would be right
    drops[base[1 : 1 + n_classes] == 0] = -np.inf  # classes that no label has
    label, predicted = divmod(int(drops.argmax()), n_classes)
    one = np.eye(n_classes)
    right_row = np.array([1.0, *one[label], *one[label]])
    wrong_row = np.array([0.0, *one[label], *one[predicted]])
    return right_row, wrong_row


def _after(sums: Floats, judged: float, right: float, label: Any, predicted: Any) -> Floats:
    """The correlation after one more example, for arrays of its label and prediction.

    Only the sums of the formula are updated: a thousand classes take a million numbers, not a
    thousand times as many.
    """
    import numpy as np

    labels, predictions = np.split(sums[1:], 2)
    # Sums over classes of t p, t^2 and p^2, where t[label] and p[predicted] grow by 1.
    same = np.equal(label, predicted)
    products = labels @ predictions + predictions[label] + labels[predicted] + same
    label_squares = labels @ labels + 2 * labels[label] + 1
    prediction_squares = predictions @ predictions + 2 * predictions[predicted] + 1
    total = judged + 1
    covariance = (sums[0] + right) * total - products
    spread = np.sqrt((total**2 - label_squares) * (total**2 - prediction_squares))
    return _ratio(covariance, spread)
