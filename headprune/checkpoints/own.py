"""Our own form of a checkpoint: complete for every cut model, and bit for bit.

A folder holds ``model.safetensors`` or its shards (the module's own parameter names),
``config.json`` and ``generation_config.json`` as the full model had them, where it is a
Transformers one, and ``headprune.json``. Loading builds the full model without memory for its
weights, cuts it, and puts the stored tensors in place, so that uneven head counts come back.
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
from headprune.attention.linear import is_conv1d
from headprune.checkpoints import slices
from headprune.checkpoints.building import fresh, no_memory
from headprune.checkpoints.foreign import check_config, check_files, few_modules
from headprune.checkpoints.manifest import MANIFEST, Folded, Manifest
from headprune.checkpoints.weights import WEIGHTS, distinct, written
from headprune.core.errors import CheckpointError, HeadPruneError
from headprune.core.files import sha256_file, write_atomic
from headprune.core.heads import HeadMask
from headprune.core.layout import FOLDED_ATTRIBUTE
from headprune.core.version import __version__
from headprune.model.classes import class_named
from headprune.model.fingerprint import fingerprint
from headprune.model.offloaded import OffloadedTensor, offloaded, tied
from headprune.model.sites import BoundSite


def write(
    model: nn.Module,
    bound: list[BoundSite],
    folder: Path,
    max_shard_size: int | str,
    elsewhere: Mapping[str, slices.Slice | OffloadedTensor] | None = None,
) -> Manifest:
    """Writes weights, configuration and manifest; nothing of an earlier save is replaced before all
    went well.

    Args:
        model: The model.
        bound: Its sites.
        folder: Where all goes.
        max_shard_size: Bytes, or text such as ``"5GB"``.
        elsewhere: By name, where the tensors of a model on the meta device lie; default, what
            accelerate offloads.
    """
    away = offloaded(model) if elsewhere is None else {}
    elsewhere = elsewhere or away

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        slices.save({name: elsewhere.get(name, tensor) for name, tensor in tensors.items()}, path)

    new = fresh(model)
    tables = _tables(model, new)
    state = {**weights_of(model, keep_vars=True), **tables}
    state.update(
        {
            name: state[first]
            for name, first in tied(model, away).items()
            if {name, first} <= state.keys()
        }
    )
    stored, aliases = distinct(state, elsewhere)
    config = _config_text(model)
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
        )
        if config is not None:
            _save_config(model, config, folder)
    manifest.save(folder / MANIFEST)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        CheckpointError: there is none, or one that we cannot read.
    """
    check_files(folder)
    if not (folder / MANIFEST).is_file():
        got = f"no {MANIFEST} in it" if folder.is_dir() else "no such folder"
        hint = (
            "A folder in the format 'transformers' or 'remote-code' is loaded by Transformers, see"
            " its README.md."
        )
        raise CheckpointError(
            str(folder), "a folder that save_pretrained wrote", got, hint if folder.is_dir() else ""
        )
    try:
        return Manifest.load(folder / MANIFEST)
    except HeadPruneError as error:
        raise CheckpointError(
            str(folder / MANIFEST), "a manifest that we can read", str(error)
        ) from error


def build(folder: Path, manifest: Manifest) -> nn.Module:
    """The full-size model of a folder, without memory for its weights.

    Raises:
        CheckpointError: not a Transformers class, or a configuration that is missing, wrong or
            changed.
    """
    import transformers

    kind: Any = class_named(manifest.model_class)
    if not (manifest.transformers and kind is not None):
        hint = (
            "Pass from_pretrained(folder, model=...) a freshly built full-size model; it is cut and"
            " filled."
        )
        raise CheckpointError(
            str(folder), "a Transformers model", f"class {manifest.model_class!r}", hint
        )
    if not (folder / "config.json").is_file():  # Transformers would take the defaults of the class
        raise CheckpointError(str(folder / "config.json"), "a valid configuration", "no such file")
    if sha256_file(folder / "config.json") != manifest.config_sha256:
        must = f"the file that {MANIFEST} describes (SHA-256 {str(manifest.config_sha256)[:12]}...)"
        hint = "To change a setting, load the model, change model.config, and save it again."
        raise CheckpointError(str(folder / "config.json"), must, "a file with other contents", hint)
    check_config(folder / "config.json")
    try:
        config = kind.config_class.from_pretrained(folder)
        with no_memory(), few_modules(folder / "config.json"):
            model: nn.Module = kind(config)
        if kind.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    except (
        Exception
    ) as error:  # a wrong number in a configuration breaks a constructor in any way it likes
        raise CheckpointError(
            str(folder / "config.json"), "a valid configuration", str(error)
        ) from error
    return model


def fill_(model: nn.Module, manifest: Manifest, tensors: dict[str, Tensor], folder: Path) -> None:
    """Puts the stored tensors in place of the model's own, shared ones shared."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in manifest.added_biases:
        owner = modules.get(name.rpartition(".")[0])
        if owner is not None and getattr(owner, "bias", None) is None and name in tensors:
            owner.register_parameter(
                "bias", nn.Parameter(torch.empty_like(tensors[name], device="meta"))
            )
    expected = weights_of(model, keep_vars=True)
    tables = dict(model.named_buffers(remove_duplicate=False))
    expected.update({name: tables[name] for name in manifest.tables if name in tables})
    available = {
        **tensors,
        **{a.name: tensors[a.stored] for a in manifest.aliases if a.stored in tensors},
    }
    missing = sorted(expected.keys() - available.keys())
    foreign = sorted(
        available.keys() - expected.keys() - set(manifest.tables)
    )  # a newer class may lack a table
    if missing or foreign:
        got = (
            f"{len(missing)} missing ({', '.join(missing[:3])}), {len(foreign)} unknown"
            f" ({', '.join(foreign[:3])})"
        )
        raise CheckpointError(
            str(folder / WEIGHTS), f"exactly the tensors of {type(model).__name__}", got
        )
    for name, old in expected.items():
        if old.shape != available[name].shape and name not in manifest.tables:
            must = f"of shape {list(old.shape)}"
            raise CheckpointError(f"{folder / WEIGHTS}: {name}", must, list(available[name].shape))
        if old.is_floating_point() != available[name].is_floating_point():
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name}", f"of a type like {old.dtype}", available[name].dtype
            )
    placed: dict[str, Tensor] = {}
    for name, old in expected.items():
        stored = {a.name: a.stored for a in manifest.aliases}.get(name, name)
        owner_name, _, attribute = name.rpartition(".")
        owner = modules[owner_name]
        if isinstance(old, nn.Parameter):
            if stored not in placed:
                placed[stored] = nn.Parameter(available[name], requires_grad=old.requires_grad)
            owner._parameters[attribute] = placed[stored]
        else:
            owner._buffers[attribute] = available[name]


def _tables(model: nn.Module, new: nn.Module | None) -> dict[str, Tensor]:
    """Floating-point buffers that the state dict leaves out, unless a new model has the very
    same."""
    known = {} if new is None else dict(new.named_buffers(remove_duplicate=False))
    stored = model.state_dict(keep_vars=True).keys()
    tables = {}
    for name, table in model.named_buffers():
        if (
            name in stored
            or not table.is_floating_point()
            or (new is not None and name not in known)
        ):
            continue
        built = known.get(name)
        if built is None or built.dtype != table.dtype or not torch.equal(built, table.cpu()):
            tables[name] = table
    return tables


def _config_text(model: nn.Module) -> bytes | None:
    """The configuration of a Transformers model as it is stored."""
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        return None
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _save_config(model: Any, config: bytes, folder: Path) -> None:
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    write_atomic(folder / "config.json", config)


def added_biases(model: nn.Module, new: nn.Module | None) -> tuple[str, ...]:
    """Biases of projections that a freshly built model does not have; all of them where none can be
    built."""
    have = set() if new is None else set(new.state_dict())
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) or is_conv1d(m)]
    biases = [
        f"{n}.bias".lstrip(".")
        for n in linear
        if model.get_submodule(n)._parameters.get("bias") is not None
    ]
    return tuple(name for name in biases if name not in have)
