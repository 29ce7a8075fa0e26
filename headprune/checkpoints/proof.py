"""Prove a checkpoint for Transformers: the model that loads is the saved one.

Tensors must be equal to the last bit, outputs up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.core.errors import InvalidValue, NotWritten, VerificationFailed
from headprune.core.files import write_errors
from headprune.model.building import save_as
from headprune.model.examples import example_batch
from headprune.model.offloaded import state_of
from headprune.model.running import device_of
from headprune.surgery.verify import compare, sample_outputs


def example_for(model: nn.Module, example: Any) -> Any:
    """The user's example, or a made-up one that the model takes.

    Raises:
        InvalidValue: none was given and none can be made up.
    """
    if example is not None:
        return example
    # Token ids or images, by the configuration.
    made_up = example_batch(model)
    name = type(model).__name__
    must = "a batch the model takes, to compare what was saved with what loads"
    if made_up is None:
        raise InvalidValue("example", must, f"none, and none can be made up for {name}")
    try:
        sample_outputs(model, made_up)
    except Exception as error:  # a model may refuse a made-up batch in any way
        reason = " ".join(str(error).split())[:120]
        got = f"none, and {name} does not take a made-up one ({reason})"
        raise InvalidValue("example", must, got) from None
    return made_up


def written_and_proven(
    kind: Any,
    config: Any,
    model: Any,
    folder: Path,
    max_shard_size: int | str,
    original_names: bool,
    example: Any,
) -> None:
    """Write a model, load it as a reader would, and compare the two.

    Args:
        kind: The class as which it is written.
        config: The configuration with which it is written.
        model: The model.
        folder: Where to.
        max_shard_size: Bytes, or text such as ``"5GB"``.
        original_names: Whether tensors get the names and the packing that the family has on disk.
        example: A batch to compare outputs on.

    Raises:
        NotWritten: no disk space, or no permission to write there.
        VerificationFailed: it cannot be written or loaded, a tensor is missing or differs in shape,
            dtype or a single bit, or the outputs differ by more than rounding.
    """
    where = f"{type(model).__name__} as written and loaded by Transformers"
    must = "what was saved"
    # The same kernels in both, so that outputs differ by rounding only.
    options: dict[str, Any] = {
        "dtype": model.dtype,
        "output_loading_info": True,
        "local_files_only": True,
    }
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation:
        options["attn_implementation"] = implementation

    # 1. Write, load and run.
    try:
        with quiet():
            with write_errors(folder):
                save_as(kind, config, model, folder, max_shard_size, original_names)
            loaded, info = kind.from_pretrained(folder, **options)
        loaded_outputs = sample_outputs(loaded.to(device_of(model)), example)
    except NotWritten:
        raise
    # Writing reverses conversions and loading checks shapes, each failing in its own way.
    except Exception as error:
        got = f"no model: {' '.join(str(error).split())[:300]}"
        raise VerificationFailed(where, must, got) from error

    # 2. Compare the keys, the tensors and the outputs.
    for kind_of_key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        keys = info.get(kind_of_key)
        if keys:
            got = f"{kind_of_key.replace('_', ' ')}: {sorted(map(str, keys))[:3]}"
            raise VerificationFailed(where, must, got)
    saved, theirs = state_of(model), weights_of(loaded)
    for name in {**saved, **theirs}:
        if not _is_same(saved.get(name), theirs.get(name)):
            raise VerificationFailed(where, must, f"another tensor {name!r}")
    difference = compare(sample_outputs(model, example), loaded_outputs)
    if not difference.holds:
        got = f"outputs that are {difference.maximum:.3e} off"
        raise VerificationFailed(where, f"{must}, up to {difference.tolerance:.1e}", got)


def _is_same(saved: Tensor | None, loaded: Tensor | None) -> bool:
    """Whether both tensors are there, with the same type, shape and bits."""
    if saved is None or loaded is None or saved.dtype != loaded.dtype:
        return False
    return torch.equal(saved.to(loaded.device), loaded)


def same_tensors(kind: Any, part: Any, folder: Path) -> None:
    """Load a part of a written model by itself and compare its tensors.

    Args:
        kind: The part's class.
        part: The part of the saved model.
        folder: Where the whole model was written.

    Raises:
        VerificationFailed: it does not load, or a tensor differs from the saved one in any bit.
    """
    where = f"{type(part).__name__} out of the written folder, loaded by Transformers"
    must = "the saved model's part"
    options = {"dtype": part.dtype, "local_files_only": True}
    try:
        with quiet():
            loaded = kind.from_pretrained(folder, **options).state_dict()
    except Exception as error:
        got = f"no model: {' '.join(str(error).split())[:300]}"
        raise VerificationFailed(where, must, got) from error
    for name, tensor in state_of(part).items():
        if name not in loaded or not torch.equal(loaded[name], tensor.cpu()):
            raise VerificationFailed(where, must, f"another tensor {name!r}")


@contextmanager
def quiet() -> Iterator[None]:
    """Run Transformers without progress bars and warnings."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
