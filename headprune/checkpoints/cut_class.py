"""A class of Transformers that is cut as soon as it is built, so that Transformers fills it.

Its reader knows each family's names and packings of tensors on disk, shards and types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from headprune.attention.kept_heads import KEPT_HEADS, store_heads_, weights_of
from headprune.core.errors import CheckpointError, HeadPruneError, reason_of
from headprune.core.layout import STATE_ATTRIBUTE, HeadState


def filled_by_transformers(
    kind: Any,
    config: Any,
    folder: Path,
    cut_: Callable[[nn.Module], object],
    what: str,
    variant: str | None = None,
) -> nn.Module:
    """Build a model, cut it, and have Transformers fill it from a folder.

    Args:
        kind: A class of Transformers.
        config: The full model's configuration.
        folder: The folder.
        cut_: Cuts the full model in place.
        what: What the folder must hold, for errors.
        variant: Of the files' names, as Transformers calls it.

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
            _spare_cut_modules(self)

    # Transformers looks up how a family's tensors are stored by both.
    Cut.__name__, Cut.__module__ = kind.__name__, kind.__module__
    try:  # mismatched sizes are reported below
        model, info = Cut.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            variant=variant,
        )
    except HeadPruneError:
        raise
    # Files may break readers and constructors in any way.
    except Exception as error:
        reason = reason_of(error)
        raise CheckpointError(str(folder), what, reason) from error
    missing = _without_kept_heads_(model, info["missing_keys"])
    wrong = missing + sorted(key[0] for key in info["mismatched_keys"])
    if wrong:
        got = f"{len(wrong)} missing or of another shape: {', '.join(wrong[:3])}"
        raise CheckpointError(str(folder), what, got)
    # Without a bias that recovery added, the model would compute something else.
    unknown = sorted(key for key in info["unexpected_keys"] if key.endswith(".bias"))
    if unknown:
        raise CheckpointError(str(folder), what, f"unknown biases: {', '.join(unknown[:3])}")
    # The subclass has done its work.
    model.__class__ = kind
    _leave_files_(model)
    filled: nn.Module = model.eval()
    return filled


def _without_kept_heads_(model: nn.Module, missing: Iterable[str]) -> list[str]:
    """Missing tensors in order, without buffers of kept heads, which are made from the record.

    A model with offloaded buffers is saved without them.
    """
    others = []
    for key in sorted(missing):
        path, _, name = key.rpartition(".")
        if name == KEPT_HEADS:
            store_heads_(model.get_submodule(path), in_buffer=True)
        else:
            others.append(key)
    return others


def _spare_cut_modules(model: nn.Module) -> None:
    """Keep Transformers from drawing weights of modules whose cut form it cannot draw.

    It calls each family's code for that on all modules, though files hold their weights. That code
    divides by the width of a layer without heads, and ``nn.MultiheadAttention``'s own knows only
    one weight for queries, keys and values.
    """
    for module in model.modules():
        state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
        if state is not None and (not state.heads or isinstance(module, nn.MultiheadAttention)):
            module._is_hf_initialized = True  # type: ignore[assignment]


def _leave_files_(model: nn.Module) -> None:
    """Copy weights that lie in a file's pages into memory of their own.

    A file's tensors are at any address, and kernels round otherwise where memory is not aligned.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()


def names_in_model(model: Any, stored: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Map names on disk to the model's, and say which tensors Transformers merges or splits."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    state = weights_of(model)
    names = {}
    for old in stored:
        new, pattern = rename_source_key(old, renamings, converters, model.base_model_prefix, state)
        names[old] = (new, pattern is not None)
    return names
