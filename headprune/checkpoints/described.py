"""Open folders that a cut model's own ``save_pretrained`` wrote: Trainer's, the hub's.

Their ``config.json`` holds a ``CutRecord`` (``model/saves.py``). Older ones lack it; for them the
plan says what was cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.checkpoints.cut_class import filled_by_transformers, names_in_model
from headprune.checkpoints.foreign import check_folder, check_weights, read_object
from headprune.core.errors import CheckpointError, HeadPruneError, InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.layout import FOLDED_ATTRIBUTE, AttentionLayout
from headprune.core.layout_data import layout_from
from headprune.core.opening import check_file
from headprune.core.plan import PruningPlan
from headprune.model.classes import class_named
from headprune.model.cut import cut_
from headprune.model.saves import RECORD, WEIGHTS_FILE, CutRecord, set_dtypes_, set_table_types_
from headprune.model.sites import BoundSite, Sites, bind, sites_for

_CONFIGURATION = "a model's configuration"
#: Keys of the format 'remote-code', whose file is not run here; the last two are for vLLM.
_CODE = (
    "auto_map",
    "headprune_heads",
    "headprune_biases",
    "per_layer_config",
    "allow_global_per_layer_attribute_access",
)
#: In front of the names of that format's classes.
_CODE_CLASS = "HeadPruned"


def is_described(folder: Path) -> bool:
    """Whether a folder's configuration says which heads its model has."""
    try:
        return RECORD in read_object(folder / "config.json", _CONFIGURATION)
    except CheckpointError:  # no file, or no JSON: other readers have a better error
        return False


def opened(
    folder: Path,
    plan: PruningPlan | HeadMask | None = None,
    model: nn.Module | None = None,
    sites: Iterable[AttentionSite] | None = None,
) -> nn.Module:
    """Open a folder by its record, or by the plan that its model was cut by.

    Args:
        folder: The folder.
        plan: For a folder without a record.
        model: One of the class, where it is the user's own, derived from one of Transformers.
        sites: Of the full model, where a layout is no data.

    Returns:
        The cut model, in evaluation mode, with its heads' original indices.

    Raises:
        CheckpointError: a damaged record, no class of Transformers, or weights of another cut.
    """
    # 1. What the folder says.
    path = folder / "config.json"
    check_folder(folder)
    settings = read_object(path, _CONFIGURATION)
    stored = settings.pop(RECORD, None)
    settings.pop(WEIGHTS_FILE, None)
    if "headprune_heads" in settings:
        for key in _CODE:
            settings.pop(key, None)
    record, layouts = _record(folder, stored, plan)
    for name in record.added:
        _section(settings, name).pop(name.rpartition(".")[2], None)
    for name, value in record.config.items():
        _section(settings, name)[name.rpartition(".")[2]] = value
    names = settings.get("architectures") or [""]
    kind = _class(folder, str(names[0]), model)
    settings["architectures"] = [kind.__name__]

    # 2. The full model, cut and filled.
    config = _configuration(kind, settings, path)
    check_weights(kind, folder, config)

    def cut_as_recorded_(model: nn.Module) -> None:
        bound = _bound(folder, model, record.mask, layouts, sites)
        cut_(model, bound, record.mask)
        add_biases_(model, record.biases if plan is None else _biases_in(folder, model))
        set_dtypes_(model, record)  # Transformers reads each tensor in the type that is there

    what = f"all weights of a {kind.__name__} with the heads that were kept"
    filled = filled_by_transformers(kind, config, folder, cut_as_recorded_, what, record.variant)

    # 3. What neither weights nor configuration hold.
    try:
        set_table_types_(filled, record.buffers)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(str(path), "types of the model's tables", str(error)) from error
    set_dtypes_(filled, record)  # some classes have some tensors read as float32
    for b in _bound(folder, filled, record.mask, layouts, sites):
        heads = record.folded.get(b.site.name)
        if heads:
            b.gate.__dict__[FOLDED_ATTRIBUTE] = tuple(heads)
    return filled


def _class(folder: Path, name: str, model: nn.Module | None) -> Any:
    """The class of a folder's model."""
    kind: Any = class_named(name.removeprefix(_CODE_CLASS)) if model is None else type(model)
    if kind is None or not hasattr(kind, "config_class"):
        must = "a model of a class of Transformers"
        hint = "Pass model=, one of your own class, if that derives from a class of Transformers."
        raise CheckpointError(str(folder), must, f"architectures {name!r}", hint)
    return kind


def _record(
    folder: Path, stored: Any, plan: PruningPlan | HeadMask | None
) -> tuple[CutRecord, list[AttentionLayout]]:
    """The record of a folder, or one made of the plan; and the layouts in it."""
    if plan is not None:
        if stored is not None:
            must = "left out, because the folder says which heads its model has"
            raise InvalidValue("from_pretrained(plan=)", must, type(plan).__name__)
        return CutRecord(plan.mask if isinstance(plan, PruningPlan) else plan), []
    try:
        record = CutRecord.from_dict(stored, f"{folder / 'config.json'}: {RECORD}")
        return record, list(map(layout_from, record.layouts))
    except HeadPruneError as error:
        raise CheckpointError(str(folder), "a record that we can read", str(error)) from error


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of a configuration that holds a setting of a dotted name."""
    for part in name.split(".")[:-1]:
        settings = settings.setdefault(part, {})
        if not isinstance(settings, dict):
            raise CheckpointError(name, "a setting of this configuration", repr(settings))
    return settings


def _configuration(kind: Any, settings: dict[str, Any], path: Path) -> Any:
    try:
        return kind.config_class.from_dict(settings)
    # A wrong value breaks a configuration in any way it likes.
    except Exception as error:
        raise CheckpointError(str(path), "a valid configuration", str(error)) from error


def _bound(
    folder: Path,
    model: nn.Module,
    mask: HeadMask,
    layouts: list[AttentionLayout],
    sites: Iterable[AttentionSite] | None,
) -> list[BoundSite]:
    """The sites of a full model that a mask names."""
    if sites is None:
        found = sites_for(model, mask.sites, layouts=layouts)
    else:
        found = sites if isinstance(sites, Sites) else Sites(sites, ())
    have = {site.name: site.n_query_heads for site in found}
    for row in mask.rows:
        if have.get(row.site) != row.n_heads:
            must = f"one of a model with {row.n_heads} heads at {row.site!r}"
            hint = "Pass sites=find_sites(model, layouts=...) for a layout of your own."
            got = f"a {type(model).__name__} with {have.get(row.site, 'no')} heads there"
            raise CheckpointError(str(folder), must, got, hint)
    named = [s.permitting(mask.kept(s.name)) for s in found if s.name in mask.sites]
    return bind(model, Sites(named, found.layouts.values()))


def _biases_in(folder: Path, model: nn.Module) -> tuple[str, ...]:
    """Names that all biases in a folder's files have in a model."""
    from safetensors import safe_open

    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        check_file(path)
        with safe_open(path, framework="pt") as file:
            names += [name for name in file.keys() if name.endswith(".bias")]  # noqa: SIM118
    # The model may not have the bias yet, but it has the weight beside it.
    weights = [f"{name.removesuffix('bias')}weight" for name in names]
    found = names_in_model(model, weights).values()
    return tuple(f"{name.removesuffix('weight')}bias" for name, _ in found)


def add_biases_(model: nn.Module, names: Iterable[str]) -> None:
    """Give projections biases that recovery adds; their numbers are not set."""
    modules = dict(model.named_modules())
    for name in names:
        owner: Any = modules.get(name.rpartition(".")[0])
        weight = getattr(owner, "weight", None)
        if isinstance(owner, nn.Linear) and owner.bias is None:
            empty = torch.empty(owner.out_features, dtype=weight.dtype, device=weight.device)
            owner.register_parameter("bias", nn.Parameter(empty))
