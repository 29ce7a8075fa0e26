"""The checkpoint of a training: one file, written whole or not at all, that knows which training it
belongs to."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.core.errors import CheckpointError
from headprune.core.files import atomic_path
from headprune.core.opening import check_file
from headprune.model.fingerprint import sampled_bytes
from headprune.model.precision import weights_change

FILE = "finetune.pt"

#: What a damaged file makes the readers of its parts raise.
_UNREADABLE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError),
    *(RuntimeError, OSError, EOFError, LookupError, TypeError, ValueError),
)
_HINT = "Give another folder, or take that file away to begin anew."


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What a training changes: parameters that need a gradient, and buffers. The tensors
    themselves, no copies."""
    frozen = {
        name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    return {
        k: v.detach()
        for k, v in weights_of(model).items()
        if isinstance(v, Tensor) and k not in frozen
    }


def load_weights_(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copies them into the model."""
    with weights_change(), torch.no_grad():
        for name, tensor in weights(model).items():
            tensor.copy_(saved[name])


def identity(
    model: nn.Module, teacher: nn.Module | None, told: Mapping[str, Any]
) -> dict[str, str]:
    """What two trainings have in common if one can continue the other, each part as JSON or a
    digest.

    Args:
        model: Its parameters' names, shapes and types count, and the values of those that are
            frozen.
        teacher: All of its values count.
        told: Settings and numbers.
    """
    structure = [
        (n, list(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()
    ]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return {
        **{name: json.dumps(value, sort_keys=True) for name, value in told.items()},
        "the model's structure": _sha256(json.dumps(structure).encode()),
        "the model's frozen weights": _sha256(*sampled_bytes(frozen)),
        "the teacher": _sha256(*sampled_bytes(teacher.parameters()))
        if teacher is not None
        else "none",
    }


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class Keeper:
    """Keeps one training's checkpoint in a folder.

    Args:
        folder: The folder, made when it is needed.
        every: Steps between checkpoints.
        own: The training's ``identity``.
        file: Its name there.
        leave: Whether one of the training's end is written, and stays.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        own: Mapping[str, str],
        file: str = FILE,
        leave: bool = False,
    ) -> None:
        self.path, self.every, self.own, self.leave = folder / file, every, dict(own), leave

    def due(self, step: int, over: bool) -> bool:
        """Whether a checkpoint is wanted after a step, with which the training is ``over``."""
        return self.leave if over else step % self.every == 0

    def save(self, state: Mapping[str, Any]) -> None:
        """Writes the checkpoint in place of the one before, whole or not at all.

        Raises:
            NotWritten: there is no room for it, or no right to write.
        """
        with atomic_path(self.path) as path:
            try:
                torch.save({"identity": self.own, **state}, path)
            except RuntimeError as error:  # what torch makes of a full disk
                raise OSError(str(error).partition("\n")[0]) from error

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, on the CPU; None where there is none.

        Raises:
            CheckpointError: one of another training, or none of ours.
        """
        if not self.path.exists():
            return None
        try:
            check_file(self.path)
            with zipfile.ZipFile(self.path) as file:
                if (damaged := file.testzip()) is not None:  # torch.load looks at no checksum
                    raise ValueError(f"the checksum of {damaged} is another")
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
            theirs = dict(state["identity"])
        except _UNREADABLE as error:
            got = f"{type(error).__name__} on reading it"
            raise CheckpointError(
                str(self.path), "a checkpoint that a training left there", got, _HINT
            ) from error
        differing = sorted(
            k for k in theirs.keys() | self.own.keys() if theirs.get(k) != self.own.get(k)
        )
        if differing:
            got = f"that of another, which differs in {', '.join(differing)}"
            raise CheckpointError(str(self.path), "the checkpoint of this training", got, _HINT)
        return state

    def finish(self) -> None:
        """Takes the checkpoint away, if it is not to stay: its training is over."""
        if not self.leave:
            self.path.unlink(missing_ok=True)
