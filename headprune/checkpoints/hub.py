"""``push_to_hub``: a cut model and its card in a repository of the Hugging Face hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from headprune.checkpoints import card, gguf_file
from headprune.checkpoints.checkpoint import OURS, save_pretrained
from headprune.core.display import escape
from headprune.core.errors import InvalidValue, NotWritten, reason_of
from headprune.core.files import write_atomic
from headprune.core.opening import read_bytes

#: Begins the line of the card on the licence.
_LICENCE = "- Licence: "


def push_to_hub(
    model: nn.Module,
    name: str,
    *,
    licence: str | None = None,
    private: bool | None = None,
    **saving: Any,
) -> str:
    """Save a model as ``save_pretrained`` does, and upload it to the Hugging Face hub.

    The model card states the kept heads, the plan, metrics, scores and proofs of ``record=``, the
    licence, and how to load the model.

    Args:
        model: A cut or whole model.
        name: The repository, ``owner/name``; made if it does not exist.
        licence: The hub's name of the licence, such as ``"apache-2.0"``; default that of the base
            model, if its card is here.
        private: Whether a new repository is private; default what its owner has set.
        saving: What ``save_pretrained`` takes by keyword: ``format``, ``processor``, ``plan``,
            ``record``, ``example``, ``max_shard_size``.

    Returns:
        The address of the commit.

    Raises:
        InvalidValue: a name that the hub does not allow.
        NotWritten: no access to the hub, or no permission to write there.
    """
    check_access(name)
    with tempfile.TemporaryDirectory() as place:
        folder = save_pretrained(model, Path(place) / name.rpartition("/")[2], **saving)
        return upload(folder, name, licence or licence_of(model), private)


def check_access(name: str, where: str = "name") -> None:
    """Check a repository's name and that the hub knows the user, before any long work.

    Raises:
        InvalidValue: a name that the hub does not allow.
        NotWritten: the hub cannot be reached, or nobody is logged in.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError as error:
        raise InvalidValue(where, "a repository, owner/name", repr(name), str(error)) from error
    if name.count("/") != 1:
        raise InvalidValue(where, "a repository, owner/name", repr(name))
    try:
        HfApi().whoami()
    except (OSError, ValueError) as error:
        raise _not_written(name, error) from error


def upload(folder: Path, name: str, licence: str | None = None, private: bool | None = None) -> str:
    """Upload a folder of ``save_pretrained``, without its subfolder ``run``.

    Its card gets the licence, and loads the model by the repository's name.

    Args:
        folder: The folder.
        name: The repository, ``owner/name``.
        licence: As the hub names it; default what the card states.
        private: Whether a new repository is private.

    Returns:
        The address of the commit.

    Raises:
        NotWritten: no access to the hub, or no permission to write there.
    """
    from huggingface_hub import HfApi

    _finish_card(folder, name, licence)
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Upload a model cut by headprune",
            ignore_patterns=["run/*"],  # it names paths and rows of the user's
            delete_patterns=list(OURS),  # of an earlier push, unless this one has them too
        )
    except (OSError, ValueError) as error:
        raise _not_written(name, error) from error
    return str(commit.commit_url)


def licence_of(model: nn.Module) -> str | None:
    """The licence in the card of the folder that a model was loaded from; None without one."""
    from huggingface_hub import metadata_load

    path = Path(card.origin(model)) / card.CARD
    metadata = metadata_load(path) if card.origin(model) and path.is_file() else None
    return (metadata or {}).get("license")


def _finish_card(folder: Path, name: str, licence: str | None) -> None:
    """Put the licence and the repository's name into the card."""
    from huggingface_hub import metadata_load, metadata_save

    path = folder / card.CARD
    metadata = metadata_load(path) or {}
    licence = licence or metadata.get("license")
    if licence:
        metadata_save(path, {**metadata, "license": licence})
    before, begin, rest = read_bytes(path).decode().partition(card.BEGIN)
    section, end, after = rest.partition(card.END)
    # In the repository the folder has another name.
    section = section.replace(f"from_pretrained({folder.name!r}", f"from_pretrained({name!r}")
    download = f"Llama.from_pretrained({name!r}, {gguf_file.FILE!r})"
    section = section.replace(f"Llama('{folder.name}/{gguf_file.FILE}')", download)
    lines = [line for line in section.split("\n") if not line.startswith(_LICENCE)]
    words = escape(licence) if licence else "not stated here; that of the base model applies"
    place = next(i for i, line in enumerate(lines) if line.startswith("- Model: "))
    lines.insert(place, f"{_LICENCE}{words}")
    write_atomic(path, (before + begin + "\n".join(lines) + end + after).encode())


def _not_written(name: str, error: Exception) -> NotWritten:
    must = "a repository of the hub that you may write to"
    reason = reason_of(error)
    return NotWritten(name, must, reason, "Log in: hf auth login, with a token that may write.")
