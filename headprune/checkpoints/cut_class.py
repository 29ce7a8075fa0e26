"""A class of Transformers that is cut as soon as it is built, so that Transformers fills it.

Its reader knows each family's names and packings of tensors on disk, shards and types.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from headprune.core.errors import CheckpointError, HeadPruneError, reason_of


def filled_by_transformers(
    kind: Any, config: Any, folder: Path, cut_: Callable[[nn.Module], object], what: str
) -> nn.Module:
    """Build a model, cut it, and have Transformers fill it from a folder.

    Args:
        kind: A class of Transformers.
        config: The full model's configuration.
        folder: The folder.
        cut_: Cuts the full model in place.
        what: What the folder must hold, for errors.

    Returns:
        The cut model, in evaluation mode.

    Raises:
        CheckpointError: weights that do not fit the cut model.
    """

    class Cut(kind):
        """The class, cut as soon as it is built."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            cut_(self)

    # Transformers looks up how a family's tensors are stored by both.
    Cut.__name__, Cut.__module__ = kind.__name__, kind.__module__
    try:  # mismatched sizes are reported below
        model, info = Cut.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
        )
    except HeadPruneError:
        raise
    # Files may break readers and constructors in any way.
    except Exception as error:
        reason = reason_of(error)
        raise CheckpointError(str(folder), what, reason) from error
    wrong = sorted(info["missing_keys"]) + sorted(key[0] for key in info["mismatched_keys"])
    if wrong:
        got = f"{len(wrong)} missing or of another shape: {', '.join(wrong[:3])}"
        raise CheckpointError(str(folder), what, got)
    # A bias that recovery added would be lost, and the model another one.
    unknown = sorted(key for key in info["unexpected_keys"] if key.endswith(".bias"))
    if unknown:
        raise CheckpointError(str(folder), what, f"unknown biases: {', '.join(unknown[:3])}")
    # The subclass has done its work.
    model.__class__ = kind
    filled: nn.Module = model.eval()
    return filled
