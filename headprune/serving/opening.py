"""Open a folder for ``serve-check``: the reference, and as plain Transformers opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from headprune.checkpoints.checkpoint import MANIFEST
from headprune.checkpoints.described import is_described
from headprune.checkpoints.foreign import check_folder, read_object
from headprune.checkpoints.proof import quiet
from headprune.core.errors import CheckpointError, InvalidValue
from headprune.data.models import open_model
from headprune.model.classes import class_name_of, class_named

_GGUF_HINT = "Give --reference FOLDER, the same model in another format."


def reference(folder: Path, trust: bool) -> nn.Module:
    """Open a model in fp32: with headprune where that saved or cut it, else with Transformers.

    Args:
        folder: The model's folder.
        trust: Whether code in the folder may run.

    Raises:
        InvalidValue: no model there, or one with code of its own that is not trusted.
        CheckpointError: a damaged folder.
    """
    if not folder.is_dir():
        raise InvalidValue("FOLDER", "an existing folder", str(folder))
    check_folder(folder)
    if not (folder / "config.json").is_file() and ggufs(folder):
        must = "a folder with weights that Transformers or headprune reads"
        raise InvalidValue("FOLDER", must, f"{folder}, GGUF files only", _GGUF_HINT)
    if not runs_code(folder):
        return open_model(str(folder), "FOLDER").float()
    if not trust:
        hint = "Read that file, then give --trust-remote-code."
        raise InvalidValue("FOLDER", "a folder without code", f"{folder}, which has some", hint)
    return with_transformers(folder, trust)


def with_transformers(folder: Path, trust: bool) -> nn.Module:
    """Open a model in fp32 as plain Transformers does.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape. Transformers would fill
            the gaps with random numbers.
    """
    import transformers

    check_folder(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    auto_map = getattr(config, "auto_map", None) or {}
    names = [name for name in auto_map if name.startswith("AutoModel")]
    # Classes with a task's head come first: AutoModel opens the body alone.
    names.sort(key=lambda name: (name == "AutoModelForPreTraining", name == "AutoModel"))
    kind: Any = class_named(class_name_of(config)) or transformers.AutoModel
    if names:
        kind = getattr(transformers, names[0])
    with quiet():
        model, info = kind.from_pretrained(
            folder, trust_remote_code=trust, dtype="float32", output_loading_info=True
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            got = f"{problem.replace('_', ' ')}: {sorted(map(str, info[problem]))[:3]}"
            raise CheckpointError(str(folder), "a folder with every tensor of its class", got)
    opened: nn.Module = model.eval()
    return opened


def opens_plainly(folder: Path) -> bool:
    """Whether plain Transformers opens a folder; tried only for folders that headprune opens."""
    if not is_headprunes(folder):
        return True
    try:
        with_transformers(folder, trust=False)
    except Exception:  # how it fails on shapes differs between versions
        return False
    return True


def is_headprunes(folder: Path) -> bool:
    """Whether headprune opens a folder: one in its own format, or of ``model.save_pretrained``."""
    return (folder / MANIFEST).is_file() or (is_described(folder) and not runs_code(folder))


def runs_code(folder: Path) -> bool:
    """Whether Transformers would run code out of a folder."""
    path = folder / "config.json"
    return path.is_file() and "auto_map" in read_object(path, "a model's configuration")


def ggufs(folder: Path) -> list[Path]:
    """GGUF files of a folder."""
    return sorted(folder.glob("*.gguf"))
