"""Checkpoints of cut models: safetensors, the original configuration, and which heads are left.

A folder holds ``model.safetensors`` (the module's own parameter names), ``config.json`` and ``generation_config.json``
as the full model had them, where it is a Transformers one, and ``headprune.json``. Loading builds the full model
without memory for its weights (parameters on the meta device), cuts it, and puts the stored tensors in place, so
that uneven head counts come back bit for bit. Nothing is pickled.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.codec import Value
from headprune.core.errors import CheckpointError, HeadPruneError, InvalidValue
from headprune.core.files import atomic_path, sha256_file, write_atomic
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.layout import FOLDED_ATTRIBUTE
from headprune.core.version import __version__
from headprune.model.cut import cut_
from headprune.model.fingerprint import check_plan, fingerprint
from headprune.model.sites import BoundSite, Sites, bind, find_sites, unwrap

WEIGHTS = "model.safetensors"
MANIFEST = "headprune.json"


@dataclass(frozen=True)
class Alias:
    """A tensor that is stored once under another name, because both names share it."""

    name: str
    stored: str


@dataclass(frozen=True)
class Folded:
    """Heads (original indices) whose mean output the bias of a site's output projection holds."""

    site: str
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Manifest(Value):
    """What a checkpoint folder needs besides weights and configuration.

    Args:
        model_class: Class of the model, found in Transformers by this name; or the user's own class.
        transformers: Whether it is a Transformers class, built from ``config.json``.
        structure: Fingerprint of the uncut model's structure.
        mask: The heads that are left.
        aliases: Shared tensors, for example tied embeddings.
        added_biases: Output projections that were given a bias by recovery.
        tables: Buffers that a model builds for itself and that are stored because a new model's may differ, for
            example rotary angles that were rounded by ``model.bfloat16()``.
        folded: Which heads the biases hold, see ``recovery/mean_fold.py``.
        config_sha256: Hash of ``config.json``, where there is one.
        weights_sha256: Hash of the weights file.
        library: Version of headprune that wrote it.
    """

    model_class: str
    transformers: bool
    structure: str
    mask: HeadMask
    aliases: tuple[Alias, ...]
    added_biases: tuple[str, ...]
    tables: tuple[str, ...]
    folded: tuple[Folded, ...]
    config_sha256: str | None
    weights_sha256: str
    library: str


def save_pretrained(model: nn.Module, folder: str | Path, sites: Iterable[AttentionSite] | None = None) -> Path:
    """Writes a (cut) model to ``folder``; ``from_pretrained`` gives it back bit for bit.

    Args:
        model: The model; a ``torch.compile`` wrapper is saved as the model inside.
        folder: Made if it does not exist; files of an earlier save are replaced.
        sites: Default ``find_sites(model)``.

    Returns:
        The folder.

    Raises:
        CheckpointError: ``folder`` is a file, or a tensor has no data (meta device).
    """
    from safetensors.torch import save_file

    model = unwrap(model)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(str(folder), "a folder", "a file")
    bound = bind(model, sites)
    fresh = _fresh(model)
    tables = _tables(model, fresh)
    stored, aliases = _distinct({**model.state_dict(keep_vars=True), **tables})
    config = _config_text(model)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / WEIGHTS) as temporary:  # nothing of an earlier save is replaced before all this went well
        save_file(stored, temporary, metadata={"format": "pt"})
        manifest = Manifest(
            model_class=type(model).__name__,
            transformers=fresh is not None,
            structure=fingerprint(model, [b.site for b in bound]).structure,
            mask=HeadMask.full(b.site for b in bound),
            aliases=aliases,
            added_biases=_added_biases(bound, fresh),
            tables=tuple(tables),
            folded=tuple(Folded(b.site.name, getattr(b.gate, FOLDED_ATTRIBUTE, ())) for b in bound),
            config_sha256=None if config is None else hashlib.sha256(config).hexdigest(),
            weights_sha256=sha256_file(temporary),
            library=__version__,
        )
        if config is not None:
            _save_config(model, config, folder)
    manifest.save(folder / MANIFEST)
    return folder


def from_pretrained(
    folder: str | Path, model: nn.Module | None = None, sites: Iterable[AttentionSite] | None = None
) -> nn.Module:
    """Loads what ``save_pretrained`` wrote, in evaluation mode and on the CPU.

    Args:
        folder: A checkpoint folder.
        model: For a class that is not a Transformers one: a freshly built full-size model, which is cut and filled.
        sites: Of ``model``, where it has layouts of your own.

    Returns:
        The cut model.

    Raises:
        CheckpointError: the folder is not one of ours, is incomplete or damaged, or is for another model.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    tensors = _weights(folder, manifest)
    if model is None:
        model = _build(folder, manifest)
    elif not isinstance(model, nn.Module):
        raise InvalidValue("model", "a freshly built full-size torch.nn.Module", type(model).__name__)
    try:
        located = sites if isinstance(sites, Sites) else find_sites(model) if sites is None else Sites(sites, ())
        check_plan(model, located, manifest.mask)
        located = Sites((s.permitting(manifest.mask.kept(s.name)) for s in located), located.layouts.values())
        bound = bind(model, located)
        if fingerprint(model, [b.site for b in bound]).structure != manifest.structure:
            raise CheckpointError(str(folder), f"a checkpoint of {type(model).__name__}", manifest.model_class)
        undo = cut_(model, bound, manifest.mask)
    except CheckpointError:
        raise
    except HeadPruneError as error:
        hint = "Pass from_pretrained(folder, model=...) the full-size model that it was cut from."
        raise CheckpointError(str(folder), "a checkpoint of this model", str(error), hint) from error
    try:
        _fill_(model, manifest, tensors, folder)
    except BaseException:
        undo.restore()
        raise
    for b in bound:
        heads = {f.site: f.heads for f in manifest.folded}.get(b.site.name, ())
        if heads:
            b.gate.__dict__[FOLDED_ATTRIBUTE] = heads
    return model.eval()


def _fresh(model: nn.Module) -> nn.Module | None:
    """The model as ``from_pretrained`` will build it, without memory; None for a class that we cannot find by name."""
    import transformers

    if getattr(transformers, type(model).__name__, None) is not type(model):
        return None
    with _no_memory():
        return type(model)(copy.deepcopy(model.config))


def _tables(model: nn.Module, fresh: nn.Module | None) -> dict[str, Tensor]:
    """Floating-point buffers that the state dict leaves out, unless a new model has the very same."""
    known = {} if fresh is None else dict(fresh.named_buffers(remove_duplicate=False))
    stored = model.state_dict(keep_vars=True).keys()
    tables = {}
    for name, table in model.named_buffers():
        if name in stored or not table.is_floating_point() or (fresh is not None and name not in known):
            continue
        new = known.get(name)
        if new is None or new.dtype != table.dtype or not torch.equal(new, table.cpu()):
            tables[name] = table
    return tables


def _distinct(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], tuple[Alias, ...]]:
    """The tensors of a state dict with every shared one once, and the other names of those."""
    first: dict[tuple[Any, ...], str] = {}
    stored: dict[str, Tensor] = {}
    memory: set[int] = set()
    aliases: list[Alias] = []
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(name, "a tensor", type(tensor).__name__, "Extra state cannot be stored.")
        if tensor.device.type == "meta":
            raise CheckpointError(name, "a tensor with data", "one on the meta device")
        key = (id(tensor),) if not tensor.numel() else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key in first:
            aliases.append(Alias(name, first[key]))
        else:
            first[key] = name
            stored[name] = tensor.detach().contiguous()
            if (place := stored[name].untyped_storage().data_ptr()) in memory:  # safetensors refuses overlapping views
                stored[name] = stored[name].clone()
            memory.add(place)
    return stored, tuple(aliases)


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


def _biased_gates(bound: list[BoundSite]) -> list[str]:
    """Names of the output projections' biases."""
    names = [f"{b.site.name}.{b.layout.gate}".lstrip(".") for b in bound if getattr(b.gate, "bias", None) is not None]
    return [f"{name}.bias" for name in names]


def _added_biases(bound: list[BoundSite], fresh: nn.Module | None) -> tuple[str, ...]:
    """Biases of output projections that a freshly built model does not have; all of them where none can be built."""
    have = set() if fresh is None else set(fresh.state_dict())
    return tuple(name for name in _biased_gates(bound) if name not in have)


@contextmanager
def _no_memory() -> Iterator[None]:
    """Parameters on the meta device; buffers are real, because tables such as rotary angles are not stored."""
    from accelerate import init_empty_weights

    # Some classes draw numbers for a parameter before they make it one.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        yield


def _manifest(folder: Path) -> Manifest:
    if not (folder / MANIFEST).is_file():
        got = f"no {MANIFEST} in it" if folder.is_dir() else "no such folder"
        raise CheckpointError(str(folder), "a folder that save_pretrained wrote", got)
    try:
        return Manifest.load(folder / MANIFEST)
    except HeadPruneError as error:
        raise CheckpointError(str(folder / MANIFEST), "a manifest that we can read", str(error)) from error


def _weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(str(path), "the model's weights", "no such file")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(str(path), "a valid safetensors file", str(error), "Copy the folder again.") from error
    if sha256_file(path) != manifest.weights_sha256:
        must = f"the file that {MANIFEST} describes (SHA-256 {manifest.weights_sha256[:12]}...)"
        raise CheckpointError(str(path), must, "a file with other contents", "Copy the folder again.")
    return tensors


def _build(folder: Path, manifest: Manifest) -> nn.Module:
    import transformers

    kind: Any = getattr(transformers, manifest.model_class, None)
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not (manifest.transformers and known):
        hint = "Pass from_pretrained(folder, model=...) a freshly built full-size model; it is cut and filled."
        raise CheckpointError(str(folder), "a Transformers model", f"class {manifest.model_class!r}", hint)
    if not (folder / "config.json").is_file():  # Transformers would take the defaults of the class
        raise CheckpointError(str(folder / "config.json"), "a valid configuration", "no such file")
    try:
        config = kind.config_class.from_pretrained(folder)
        with _no_memory():
            model: nn.Module = kind(config)
        if kind.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    except Exception as error:  # a wrong number in a configuration breaks a constructor in any way it likes
        raise CheckpointError(str(folder / "config.json"), "a valid configuration", str(error)) from error
    if sha256_file(folder / "config.json") != manifest.config_sha256:
        must = f"the file that {MANIFEST} describes (SHA-256 {str(manifest.config_sha256)[:12]}...)"
        hint = "To change a setting, load the model, change model.config, and save it again."
        raise CheckpointError(str(folder / "config.json"), must, "a file with other contents", hint)
    return model


def _fill_(model: nn.Module, manifest: Manifest, tensors: dict[str, Tensor], folder: Path) -> None:
    """Puts the stored tensors in place of the model's own, shared ones shared."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in manifest.added_biases:
        owner = modules.get(name.rpartition(".")[0])
        if owner is not None and getattr(owner, "bias", None) is None and name in tensors:
            owner.register_parameter("bias", nn.Parameter(torch.empty_like(tensors[name], device="meta")))
    expected = model.state_dict(keep_vars=True)
    tables = dict(model.named_buffers(remove_duplicate=False))
    expected.update({name: tables[name] for name in manifest.tables if name in tables})
    available = {**tensors, **{a.name: tensors[a.stored] for a in manifest.aliases if a.stored in tensors}}
    missing = sorted(expected.keys() - available.keys())
    foreign = sorted(available.keys() - expected.keys() - set(manifest.tables))  # a newer class may lack a table
    if missing or foreign:
        got = f"{len(missing)} missing ({', '.join(missing[:3])}), {len(foreign)} unknown ({', '.join(foreign[:3])})"
        raise CheckpointError(str(folder / WEIGHTS), f"exactly the tensors of {type(model).__name__}", got)
    for name, old in expected.items():
        if old.shape != available[name].shape and name not in manifest.tables:
            must = f"of shape {list(old.shape)}"
            raise CheckpointError(f"{folder / WEIGHTS}: {name}", must, list(available[name].shape))
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
