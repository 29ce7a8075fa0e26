"""Our own checkpoint format: it holds every cut model, bit for bit.

A folder holds ``model.safetensors`` or its shards, under the module's own parameter names, and
``headprune.json``. That of a Transformers model also holds ``config.json`` and
``generation_config.json`` of the full model. Where something was cut, ``config.json`` names weights
that are not there: so plain Transformers stops with an error that names headprune. Loading builds
the full model without memory for its weights, cuts it, and puts the stored tensors in place.
Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.checkpoints import slices
from headprune.checkpoints.foreign import check_config, check_files, check_settings, few_modules
from headprune.checkpoints.manifest import MANIFEST, Folded, Manifest
from headprune.checkpoints.weights import WEIGHTS, distinct, written
from headprune.core.errors import CheckpointError, HeadPruneError
from headprune.core.files import sha256_file, write_atomic
from headprune.core.heads import HeadMask
from headprune.core.layout import FOLDED_ATTRIBUTE
from headprune.core.version import __version__
from headprune.model.building import fresh, no_memory
from headprune.model.classes import class_named
from headprune.model.fingerprint import fingerprint
from headprune.model.offloaded import OffloadedTensor, offloaded, tied
from headprune.model.saves import (
    ONLY_HEADPRUNE,
    RECORD,
    WEIGHTS_FILE,
    added_biases,
    as_data,
)
from headprune.model.sites import BoundSite


def write(
    model: nn.Module,
    bound: list[BoundSite],
    folder: Path,
    max_shard_size: int | str,
    elsewhere: Mapping[str, slices.Slice | OffloadedTensor] | None = None,
) -> Manifest:
    """Write weights, configuration and manifest.

    Args:
        model: The model.
        bound: Its sites.
        folder: Where all goes; files of an earlier save are replaced once all are written.
        max_shard_size: Bytes, or text such as ``"5GB"``.
        elsewhere: By name, where the tensors of a model on the meta device are; default, those that
            accelerate offloads.

    Returns:
        The manifest.
    """
    away = offloaded(model) if elsewhere is None else {}
    elsewhere = elsewhere or away

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        slices.save({name: elsewhere.get(name, tensor) for name, tensor in tensors.items()}, path)

    # 1. All tensors to store, shared ones once.
    new = fresh(model)
    tables = _tables(model, new)
    state = {**weights_of(model, keep_vars=True), **tables}
    _retie(state, tied(model, away))
    stored, aliases = distinct(state, elsewhere)

    # 2. Weights first, for the manifest has their hashes.
    config = _config_text(model, bound)
    folder.mkdir(parents=True, exist_ok=True)
    with written(stored, folder, max_shard_size, save if elsewhere else None) as (sha256, shards):
        manifest = Manifest(
            model_class=type(model).__name__,
            transformers=new is not None,
            structure=fingerprint(model, [b.site for b in bound]).structure,
            mask=HeadMask.full(b.site for b in bound),
            aliases=aliases,
            added_biases=added_biases(model, new),
            tables=tuple(tables),
            folded=tuple(Folded(b.site.name, getattr(b.gate, FOLDED_ATTRIBUTE, ())) for b in bound),
            config_sha256=None if config is None else hashlib.sha256(config).hexdigest(),
            weights_sha256=sha256,
            library=__version__,
            shards=tuple(shards),
            layouts=as_data({b.layout.name: b.layout for b in bound}.values()),
        )
        if config is not None:
            _save_config(model, config, folder)
    # The manifest last: a folder without one is not loaded.
    manifest.save(folder / MANIFEST)
    return manifest


def _retie(state: dict[str, Any], first_of: Mapping[str, str]) -> None:
    """Make tied tensors one again, which accelerate offloads under each of their names."""
    for name, first in first_of.items():
        if name in state and first in state:
            state[name] = state[first]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        CheckpointError: there is none, or one that we cannot read.
    """
    check_files(folder)
    if not (folder / MANIFEST).is_file():
        must = "a folder that save_pretrained wrote"
        if not folder.is_dir():
            raise CheckpointError(str(folder), must, "no such folder")
        hint = (
            "If model.save_pretrained wrote it after a cut, pass from_pretrained(folder, plan=...),"
            " the plan. A model that was not cut is loaded by Transformers; a folder in the format"
            " 'gguf' by llama.cpp."
        )
        raise CheckpointError(str(folder), must, f"no {MANIFEST} in it", hint)
    try:
        return Manifest.load(folder / MANIFEST)
    except HeadPruneError as error:
        must = "a manifest that we can read"
        raise CheckpointError(str(folder / MANIFEST), must, str(error)) from error


def build(folder: Path, manifest: Manifest) -> nn.Module:
    """The full-size model of a folder, without memory for its weights.

    Raises:
        CheckpointError: not a Transformers class, or a configuration that is missing, wrong or
            changed.
    """
    import transformers

    kind: Any = class_named(manifest.model_class)
    if not manifest.transformers or kind is None:
        got = f"class {manifest.model_class!r}"
        hint = (
            "Pass from_pretrained(folder, model=...) a freshly built full-size model; it is cut and"
            " filled."
        )
        raise CheckpointError(str(folder), "a Transformers model", got, hint)
    path = folder / "config.json"
    _check_config_file(path, manifest)
    try:
        config = kind.config_class.from_pretrained(folder)
        config.__dict__.pop(WEIGHTS_FILE, None)  # only plain Transformers stops at it
        with no_memory(), few_modules(path):
            model: nn.Module = kind(config)
        if kind.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    # A wrong number in a configuration breaks a constructor in any way it likes.
    except Exception as error:
        raise CheckpointError(str(path), "a valid configuration", str(error)) from error
    return model


def _check_config_file(path: Path, manifest: Manifest) -> None:
    """Check that a configuration is the saved one, of a possible model."""
    if not path.is_file():  # Transformers would take the defaults of the class
        raise CheckpointError(str(path), "a valid configuration", "no such file")
    if sha256_file(path) != manifest.config_sha256:
        must = f"the file that {MANIFEST} describes (SHA-256 {str(manifest.config_sha256)[:12]}...)"
        hint = "To change a setting, load the model, change model.config, and save it again."
        raise CheckpointError(str(path), must, "a file with other contents", hint)
    check_config(path)


def _add_biases(
    modules: Mapping[str, nn.Module], manifest: Manifest, tensors: Mapping[str, Tensor]
) -> None:
    """Give projections the biases that recovery added to them, without memory yet."""
    for name in manifest.added_biases:
        owner = modules.get(name.rpartition(".")[0])
        if owner is not None and getattr(owner, "bias", None) is None and name in tensors:
            bias = torch.empty_like(tensors[name], device="meta")
            owner.register_parameter("bias", nn.Parameter(bias))


def fill_(model: nn.Module, manifest: Manifest, tensors: dict[str, Tensor], folder: Path) -> None:
    """Put the stored tensors in place of a cut model's own, shared ones shared.

    Args:
        model: The cut model, without memory for its weights or with any.
        manifest: The folder's manifest.
        tensors: The folder's tensors, by name.
        folder: The folder, for errors.

    Raises:
        CheckpointError: tensors are missing, unknown, or of another shape or kind.
    """
    modules = dict(model.named_modules(remove_duplicate=False))

    # 1. Biases that recovery added.
    _add_biases(modules, manifest, tensors)

    # 2. Which tensors the model needs, and which there are.
    expected = weights_of(model, keep_vars=True)
    tables = dict(model.named_buffers(remove_duplicate=False))
    expected.update((name, tables[name]) for name in manifest.tables if name in tables)
    stored_as = {a.name: a.stored for a in manifest.aliases}
    available = dict(tensors)
    for name, stored in stored_as.items():
        if stored in tensors:
            available[name] = tensors[stored]
    _check_tensors(type(model).__name__, manifest, expected, available, folder)

    # 3. One parameter for all names of a tensor.
    parameters: dict[str, nn.Parameter] = {}
    for name, old in expected.items():
        owner_name, _, attribute = name.rpartition(".")
        owner = modules[owner_name]
        # Set directly: register_buffer would make a persistent one of a table.
        if not isinstance(old, nn.Parameter):
            owner._buffers[attribute] = available[name]
            continue
        stored = stored_as.get(name, name)
        if stored not in parameters:
            parameters[stored] = nn.Parameter(available[name], requires_grad=old.requires_grad)
        owner._parameters[attribute] = parameters[stored]


def _check_tensors(
    model_class: str,
    manifest: Manifest,
    expected: Mapping[str, Tensor],
    available: Mapping[str, Tensor],
    folder: Path,
) -> None:
    """Check that the stored tensors are those of the model."""
    where = folder / WEIGHTS
    missing = sorted(expected.keys() - available.keys())
    # A newer class may lack a table.
    unknown = sorted(available.keys() - expected.keys() - set(manifest.tables))
    if missing or unknown:
        got = (
            f"{len(missing)} missing ({', '.join(missing[:3])}), {len(unknown)} unknown"
            f" ({', '.join(unknown[:3])})"
        )
        raise CheckpointError(str(where), f"exactly the tensors of {model_class}", got)
    for name, old in expected.items():
        new = available[name]
        if old.shape != new.shape and name not in manifest.tables:
            must = f"of shape {list(old.shape)}"
            raise CheckpointError(f"{where}: {name}", must, list(new.shape))
        # Any floating-point type will do: a model may be stored in another one.
        if old.is_floating_point() != new.is_floating_point():
            raise CheckpointError(f"{where}: {name}", f"of a type like {old.dtype}", new.dtype)


def _tables(model: nn.Module, new: nn.Module | None) -> dict[str, Tensor]:
    """Floating-point buffers that the state dict leaves out and a new model has otherwise.

    Args:
        model: The model.
        new: A new model of its class; None where none can be built.
    """
    known = {} if new is None else dict(new.named_buffers(remove_duplicate=False))
    in_state = model.state_dict(keep_vars=True).keys()
    tables = {}
    for name, table in model.named_buffers():
        if name in in_state or not table.is_floating_point():
            continue
        # A buffer that no new model has could not be put back.
        if new is not None and name not in known:
            continue
        built = known.get(name)
        if built is None or built.dtype != table.dtype or not torch.equal(built, table.cpu()):
            tables[name] = table
    return tables


def _config_text(model: nn.Module, bound: list[BoundSite]) -> bytes | None:
    """The configuration of a Transformers model as it is stored."""
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        return None
    # All settings, because defaults may change between versions of Transformers.
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config.pop(RECORD, None)  # of a cut before, where Transformers opened the model
    hint = "A folder with this setting cannot be opened. Remove it from model.config."
    check_settings("model.config", config, hint)
    if any(len(b.site.heads) < b.site.n_query_heads for b in bound):
        config[WEIGHTS_FILE] = ONLY_HEADPRUNE
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _save_config(model: Any, config: bytes, folder: Path) -> None:
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    write_atomic(folder / "config.json", config)
