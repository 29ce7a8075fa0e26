"""The last word on a checkpoint that others load: what comes back is what was saved, in tensors and
in outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.attention.kept_heads import weights_of
from headprune.checkpoints.building import save_as
from headprune.core.errors import InvalidValue, NotWritten, VerificationFailed
from headprune.core.files import writing
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
    made = example_batch(model)
    try:
        if made is not None:
            sample_outputs(model, made)
            return made
    except Exception as error:  # a model may refuse a made-up batch in any way
        got = (
            f"none, and {type(model).__name__} does not take a made-up one"
            f" ({' '.join(str(error).split())[:120]})"
        )
    else:
        got = f"none, and none can be made up for {type(model).__name__}"
    raise InvalidValue(
        "example", "a batch the model takes, to compare what was saved with what loads", got
    )


def written_and_proven(
    kind: Any,
    config: Any,
    model: Any,
    folder: Path,
    max_shard_size: int | str,
    original_names: bool,
    example: Any,
) -> None:
    """Writes a model as ``kind`` with ``config``, loads it as a reader would, and compares the two.

    Raises:
        NotWritten: there is no room, or no right to write there.
        VerificationFailed: it cannot be written or loaded, a tensor is missing or differs in shape,
            dtype or a single bit, or the outputs differ by more than rounding.
    """
    where, must = f"{type(model).__name__} as written and loaded by Transformers", "what was saved"
    options: dict[str, Any] = {
        "dtype": model.dtype,
        "output_loading_info": True,
        "local_files_only": True,
    }
    if implementation := getattr(model.config, "_attn_implementation", None):
        options["attn_implementation"] = implementation
    try:
        with quiet():
            with writing(folder):
                save_as(kind, config, model, folder, max_shard_size, original_names)
            loaded, info = kind.from_pretrained(folder, **options)
        got = sample_outputs(loaded.to(device_of(model)), example)
    except NotWritten:
        raise
    # Writing reverses conversions and loading checks shapes, each failing in its own way.
    except Exception as error:
        raise VerificationFailed(
            where, must, f"no model: {' '.join(str(error).split())[:300]}"
        ) from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            raise VerificationFailed(
                where, must, f"{what.replace('_', ' ')}: {sorted(map(str, info[what]))[:3]}"
            )
    ours, theirs = state_of(model), weights_of(loaded)
    for name in {**ours, **theirs}:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or a.dtype != b.dtype or not torch.equal(a.to(b.device), b):
            raise VerificationFailed(where, must, f"another tensor {name!r}")
    difference = compare(sample_outputs(model, example), got)
    if not difference.holds:
        off = f"outputs that are {difference.maximum:.3e} off"
        raise VerificationFailed(where, f"{must}, up to {difference.tolerance:.1e}", off)


def same_tensors(kind: Any, part: Any, folder: Path) -> None:
    """Loads a part of a written model by itself and compares its tensors.

    Raises:
        VerificationFailed: it does not load, or a tensor is not what was saved, to the last bit.
    """
    where = f"{type(part).__name__} out of the written folder, loaded by Transformers"
    try:
        with quiet():
            loaded = kind.from_pretrained(
                folder, dtype=part.dtype, local_files_only=True
            ).state_dict()
    except Exception as error:
        got = f"no model: {' '.join(str(error).split())[:300]}"
        raise VerificationFailed(where, "the saved model's part", got) from error
    for name, tensor in state_of(part).items():
        if name not in loaded or not torch.equal(loaded[name], tensor.cpu()):
            raise VerificationFailed(where, "the saved model's part", f"another tensor {name!r}")


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers without progress bars, as they are not ours to show."""
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
