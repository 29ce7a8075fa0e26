"""The checkpoint of a training: one file, replaced as a whole, that records which training it
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

#: What the readers of a damaged file's parts raise.
_UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
)
_HINT = "Give another folder, or delete that file to start over."


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return what a training changes: parameters that require a gradient, and buffers.

    The tensors share memory with the model.
    """
    frozen = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            frozen.add(name)
    tensors = {}
    for name, value in weights_of(model).items():
        if isinstance(value, Tensor) and name not in frozen:
            tensors[name] = value.detach()
    return tensors


def load_weights_(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy saved ``weights`` into the model."""
    with weights_change(), torch.no_grad():
        for name, tensor in weights(model).items():
            tensor.copy_(saved[name])


def identity(
    model: nn.Module, teacher: nn.Module | None, settings: Mapping[str, Any]
) -> dict[str, str]:
    """Describe a training by what another one must share to continue it.

    Args:
        model: Its parameters' names, shapes and types count, and the values of those that are
            frozen.
        teacher: All of its values count.
        settings: Settings and numbers by name.

    Returns:
        JSON or a digest by name.
    """
    structure = []
    for name, parameter in model.named_parameters():
        shape, dtype = list(parameter.shape), str(parameter.dtype)
        structure.append((name, shape, dtype, parameter.requires_grad))
    parts = {name: json.dumps(value, sort_keys=True) for name, value in settings.items()}
    parts["the model's structure"] = _sha256(json.dumps(structure).encode())
    # Trained weights change, and are in the checkpoint itself.
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    parts["the model's frozen weights"] = _sha256(*sampled_bytes(frozen))
    parts["the teacher"] = "none"
    if teacher is not None:
        parts["the teacher"] = _sha256(*sampled_bytes(teacher.parameters()))
    return parts


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class Keeper:
    """Keeps one training's checkpoint in a folder.

    Args:
        folder: The folder, created when it is needed.
        every: Steps between checkpoints.
        own: The training's ``identity``.
        file: Name of the file in the folder.
        leave: Whether to write a checkpoint at the end of the training, and to keep it.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        own: Mapping[str, str],
        file: str = FILE,
        leave: bool = False,
    ) -> None:
        self.path = folder / file
        self.every = every
        self.own = dict(own)
        self.leave = leave

    def due(self, step: int, over: bool) -> bool:
        """Whether to write a checkpoint after a step, which may end the training (``over``)."""
        return self.leave if over else step % self.every == 0

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint as a whole.

        Raises:
            NotWritten: no disk space, or no permission to write there.
        """
        with atomic_path(self.path) as path:
            try:
                torch.save({"identity": self.own, **state}, path)
            except RuntimeError as error:
                # torch raises this for a full disk.
                raise OSError(str(error).partition("\n")[0]) from error

    def load(self) -> dict[str, Any] | None:
        """Return the checkpoint, on the CPU; None if there is none.

        Raises:
            CheckpointError: one of another training, or none of ours.
        """
        if not self.path.exists():
            return None
        try:
            check_file(self.path)
            # torch.load checks no checksum.
            with zipfile.ZipFile(self.path) as file:
                damaged = file.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not match")
            # weights_only: other pickled files could run code.
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
            theirs = dict(state["identity"])
        except _UNREADABLE as error:
            must = "a checkpoint that a training wrote"
            got = f"{type(error).__name__} on reading it"
            raise CheckpointError(str(self.path), must, got, _HINT) from error
        names = sorted(theirs.keys() | self.own.keys())
        differing = [name for name in names if theirs.get(name) != self.own.get(name)]
        if differing:
            got = f"that of another, which differs in {', '.join(differing)}"
            raise CheckpointError(str(self.path), "the checkpoint of this training", got, _HINT)
        return state

    def finish(self) -> None:
        """Delete the checkpoint of a training that is over, unless it is to be kept."""
        if not self.leave:
            self.path.unlink(missing_ok=True)
