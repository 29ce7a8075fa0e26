"""Makes a cut model's own ``save_pretrained`` record which heads the model has.

Trainer, ``push_to_hub`` and users call ``model.save_pretrained``, not ours. Its ``config.json``
describes the full model, which does not fit the weights. So the first cut of a process wraps that
method. For a cut model it writes the same weights, and a ``config.json`` with what
``hp.from_pretrained`` needs (``CutRecord``); for every other model it does what it did. A process
that unpickles a cut model wraps it too (``torch.load``, ``multiprocessing``): the pickled record of
heads names a function of this module.

Where one head count holds for all layers, plain Transformers opens the folder. Elsewhere it stops
with an error that names headprune: the configuration names a weights file that does not exist, and
that name is the message.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import KEPT_HEADS, weights_of
from headprune.attention.linear import is_conv1d
from headprune.core.codec import EMPTY, FrozenDict, Value, leaves
from headprune.core.errors import HeadPruneError
from headprune.core.files import write_atomic
from headprune.core.heads import HeadMask, SiteKeep
from headprune.core.layout import (
    FOLDED_ATTRIBUTE,
    STATE_ATTRIBUTE,
    AttentionLayout,
    HeadState,
)
from headprune.core.layout_data import data_of
from headprune.core.opening import read_bytes
from headprune.core.version import __version__
from headprune.layouts import is_builtin
from headprune.model.building import fresh
from headprune.model.plain_config import config_of_cut
from headprune.model.sites import BoundSite, all_cut_sites, bind, layouts_of_cuts

#: The key of ``config.json`` that holds a ``CutRecord``.
RECORD = "headprune"
#: The key by which Transformers finds the weights.
WEIGHTS_FILE = "transformers_weights"
#: What Transformers looks for, and does not find, where the layers differ.
ONLY_HEADPRUNE = "weights cut by headprune, open them with headprune.from_pretrained.safetensors"
#: Marks the method that is wrapped already.
_WRAPPED = "_headprune_describes"
#: Modelling files of the format "remote-code".
MODELLING = "modeling_headprune_*.py"
#: Files of the other formats, which describe the save that is replaced.
_STALE = ("headprune.json", MODELLING)
#: The model card, and what encloses the section on the cut.
CARD = "README.md"
BEGIN = "<!-- headprune: begin -->"
END = "<!-- headprune: end -->"


@dataclass(frozen=True)
class CutRecord(Value):
    """What was cut, beside the weights in ``config.json``.

    Args:
        mask: The heads of every module that was cut.
        config: The full model's settings that differ in the file, by dotted name.
        biases: Biases of projections that the class does not have.
        buffers: Types of tables that a new model has in another type, by name.
        folded: Removed heads whose mean output a bias holds, by site.
        layouts: Layouts that are no files of this library, as data.
        added: Settings that the full model does not have.
        library: The version of headprune.
        dtype: The type of floating-point weights; None in records of earlier versions.
        dtypes: Types of weights that have another one, by name.
        variant: Of the weights' file names, as Transformers calls it.
    """

    mask: HeadMask
    config: FrozenDict = EMPTY
    biases: tuple[str, ...] = ()
    buffers: FrozenDict = EMPTY
    folded: FrozenDict = EMPTY
    layouts: tuple[FrozenDict, ...] = ()
    added: tuple[str, ...] = ()
    library: str = __version__
    dtype: str | None = None
    dtypes: FrozenDict = EMPTY
    variant: str | None = None


def describe_saves() -> None:
    """Have ``save_pretrained`` of Transformers describe the cut models that it writes."""
    transformers = sys.modules.get("transformers")
    # Without Transformers the model is none of its models.
    if transformers is None or hasattr(transformers.PreTrainedModel.save_pretrained, _WRAPPED):
        return
    save = transformers.PreTrainedModel.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        # Adapters are written alone; a file in the folder's place is refused by Transformers.
        is_other = getattr(self, "_hf_peft_config_loaded", False) or Path(save_directory).is_file()
        if is_other or not any(_cut_modules(self)):
            return save(self, save_directory, *args, **kwargs)
        config, record = described(self)
        # A variant may be given by its place.
        given = inspect.signature(save).bind(self, save_directory, *args, **kwargs).arguments
        record = replace(record, variant=given.get("variant"))
        extra: dict[str, Any] = {RECORD: record.to_dict()}
        if config is None:
            config = copy.deepcopy(self.config)
            extra[WEIGHTS_FILE] = ONLY_HEADPRUNE
            # Turning projections of unequal parts back into a family's own packing corrupts them.
            kwargs.setdefault("save_original_format", False)
        with _configured(self, config, extra):
            result = save(self, save_directory, *args, **kwargs)
        if given.get("is_main_process", True):
            _remove_stale(Path(save_directory))
        return result

    setattr(save_pretrained, _WRAPPED, True)
    transformers.PreTrainedModel.save_pretrained = save_pretrained


# Pickles of cut models name this function and the fields of HeadState: both are a file format.
def _unpickled(values: Mapping[str, Any]) -> HeadState:
    """Make the record of heads of a module that is unpickled, and have its saves described."""
    describe_saves()
    return HeadState(**values)


def _pickled(state: HeadState) -> tuple[Any, ...]:
    return _unpickled, ({field.name: getattr(state, field.name) for field in fields(state)},)


copyreg.pickle(HeadState, _pickled)


def _remove_stale(folder: Path) -> None:
    """Remove what an earlier save in a format of ours said of the weights it had."""
    for pattern in _STALE:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    card = folder / CARD
    if card.is_file():
        before, begin, rest = read_bytes(card).decode(errors="surrogateescape").partition(BEGIN)
        _, end, after = rest.partition(END)
        if begin and end:
            text = before + after.removeprefix("\n")
            write_atomic(card, text.encode(errors="surrogateescape"))


def described(model: Any) -> tuple[Any, CutRecord]:
    """Describe a cut model of Transformers for its ``config.json``.

    Returns:
        The configuration that Transformers builds the cut model from, None where there is none; and
        the record of the cut.
    """
    config = _plain_config(model)
    return config, record_of(model, config)


def record_of(model: Any, config: Any = None) -> CutRecord:
    """The record of a cut model.

    Args:
        model: The model.
        config: The configuration that is written, where it is not the full model's.
    """
    changed: dict[str, Any] = {}
    added: tuple[str, ...] = ()
    if config is not None:
        now = dict(leaves(config.to_dict()))
        full = dict(leaves(model.config.to_dict()))
        changed = {name: full[name] for name in full if now.get(name) != full[name]}
        added = tuple(name for name in now if name not in full)
    rows, folded = [], {}
    for name, module, state in _cut_modules(model):
        rows.append(SiteKeep(name, state.n_query_heads, state.heads))
        for part in own_parts(module):
            if FOLDED_ATTRIBUTE in part.__dict__:
                folded[name] = part.__dict__[FOLDED_ATTRIBUTE]
    new = fresh(model)
    return CutRecord(
        HeadMask(tuple(rows)),
        FrozenDict(changed),
        added_biases(model, new),
        FrozenDict(_table_types(model, new)),
        FrozenDict(folded),
        as_data(layouts_of_cuts(model)),
        added,
        dtype=_name_of(model.dtype),
        dtypes=FrozenDict(_other_dtypes(model)),
    )


def as_data(layouts: Iterable[AttentionLayout]) -> tuple[FrozenDict, ...]:
    """Return the layouts that are not built in, if they can be stored as data."""
    stored = [data_of(layout) for layout in layouts if not is_builtin(layout)]
    return tuple(data for data in stored if data is not None)


def added_biases(model: nn.Module, new: nn.Module | None) -> tuple[str, ...]:
    """Biases of projections that a new model does not have; all where ``new`` is None."""
    own: set[str] = set() if new is None else set(new.state_dict())
    biases = []
    for path, module in model.named_modules():
        is_projection = isinstance(module, nn.Linear) or is_conv1d(module)
        name = f"{path}.bias".lstrip(".")
        if is_projection and module._parameters.get("bias") is not None and name not in own:
            biases.append(name)
    return tuple(biases)


def _table_types(model: nn.Module, new: nn.Module | None) -> dict[str, str]:
    """Types of tables that no file stores, where a new model has them in another type."""
    known = {} if new is None else dict(new.named_buffers())
    in_state = model.state_dict(keep_vars=True).keys()
    types = {}
    for name, table in model.named_buffers():
        is_table = name in known and name not in in_state and table.is_floating_point()
        if is_table and known[name].dtype != table.dtype:
            types[name] = _name_of(table.dtype)
    return types


def set_table_types_(model: nn.Module, types: FrozenDict) -> None:
    """Round tables of a new model as the saved model's were."""
    tables = dict(model.named_buffers())
    for name, kind in types.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        owner._buffers[name.rpartition(".")[2]] = tables[name].to(getattr(torch, kind))


def _other_dtypes(model: Any) -> dict[str, str]:
    """Types of floating-point weights that are not the model's, by name."""
    types = {}
    for name, tensor in weights_of(model).items():
        if tensor.is_floating_point() and tensor.dtype != model.dtype:
            types[name] = _name_of(tensor.dtype)
    return types


def set_dtypes_(model: nn.Module, record: CutRecord) -> None:
    """Give weights the types that they were saved in; Transformers keeps some in float32."""
    if record.dtype is None:
        return
    for name, tensor in weights_of(model, keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(getattr(torch, record.dtypes.get(name, record.dtype)))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cut_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, HeadState]]:
    """Every cut module with its name and its record of heads."""
    for name, module in model.named_modules():
        state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
        if state is not None and len(state.heads) < state.n_query_heads:
            yield name, module, state


def own_parts(module: nn.Module) -> set[nn.Module]:
    """The parts of a cut module but those of another one inside: a layer may hold attention."""
    own = set(module.modules())
    for _, inside, _ in _cut_modules(module):
        if inside is not module:
            own.difference_update(inside.modules())
    return own


def _plain_config(model: Any) -> Any:
    """A configuration from which Transformers builds the cut model; None where there is none."""
    try:
        bound = bind(model, all_cut_sites(model))
        config = config_of_cut(model, bound)
    # Weights that are spread over processes fit no layout.
    except HeadPruneError:
        return None
    new = fresh(model, config)
    assert new is not None
    built = dict(new.named_modules(remove_duplicate=False))
    for b in bound:
        if not _computes_as(b, built[b.site.name]):
            return None
    return config


def _computes_as(b: BoundSite, built: nn.Module) -> bool:
    """Whether a module that was built small has the numbers that the cut one computes with."""
    if b.layout.is_feed_forward:  # its weights alone decide, and were compared
        return True
    if KEPT_HEADS in b.module._buffers:  # its weights alone do not decide
        return False
    parts = dict(built.named_modules())
    for path, module in b.module.named_modules():
        numbers = {**vars(parts[path]), **parts[path]._buffers}
        for name, value in {**vars(module), **module._buffers}.items():
            other = numbers.get(name)
            if isinstance(value, Tensor) and value.shape != getattr(other, "shape", None):
                return False
            if type(value) in (int, float, tuple, str) and value != other:
                return False
    return True


@contextmanager
def _configured(model: Any, config: Any, extra: dict[str, Any]) -> Iterator[None]:
    """Give a model another configuration, which writes more keys, inside the block."""

    def to_json_file(path: Any, use_diff: bool = True) -> None:
        del config.__dict__["to_json_file"]  # it is no setting
        settings = {**json.loads(config.to_json_string(use_diff=use_diff)), **extra}
        write_atomic(Path(path), (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode())

    own = model.config
    # In place of the method: Transformers drops keys that it knows, and checks the others' types.
    config.__dict__["to_json_file"] = to_json_file
    model.config = config
    try:
        yield
    finally:
        model.config = own
