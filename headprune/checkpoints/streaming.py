"""``prune_checkpoint``: cuts a checkpoint on disk by a plan, tensor by tensor, without ever loading
the model.

The model is built without memory for its weights, cut as ``prune_`` cuts, and so says which rows
and columns of which tensor stay; those are copied from file to file. The result is the folder that
``save_pretrained`` writes, byte for byte. No input goes through the model: that a cut equals the
gated model is proven where the plan is tried, or afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.checkpoints import companions, own, slices, weights
from headprune.checkpoints.building import no_memory
from headprune.checkpoints.checkpoint import filled, write_card
from headprune.checkpoints.foreign import check_folder, few_modules
from headprune.checkpoints.manifest import MANIFEST
from headprune.checkpoints.slices import Slice, Stored
from headprune.checkpoints.weights import check_shard_size
from headprune.core.coverage import coverage_note
from headprune.core.errors import CheckpointError, InvalidValue, UnsupportedModel
from headprune.core.files import occupied, settle, staged
from headprune.core.heads import HeadMask
from headprune.core.plan import PruningPlan
from headprune.model.classes import class_name_of, class_named
from headprune.model.cut import cut_, kept_rows_of
from headprune.model.fingerprint import check_plan, sample_positions
from headprune.model.running import default_dtype
from headprune.model.sites import bind, find_sites

_WHOLE = "Load the model and cut it with prune_, or without --streaming."


@dataclass(frozen=True)
class StreamReport:
    """What ``prune_checkpoint`` did.

    Args:
        removed: Original indices of the heads that left, by site.
        params_before, params_after: Parameters of the whole model.
        bytes_read, bytes_written: Of weights.
        warnings: What a user should know.
        copied: Files that were copied as they are.
    """

    removed: tuple[tuple[str, tuple[int, ...]], ...]
    params_before: int
    params_after: int
    bytes_read: int
    bytes_written: int
    warnings: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()

    def __str__(self) -> str:
        share = 100 * (1 - self.params_after / self.params_before)
        heads = sum(len(gone) for _, gone in self.removed)
        sizes = f"{self.params_before:,} -> {self.params_after:,} parameters (-{share:.1f} %)"
        return f"removed {heads} heads, {sizes}, file to file; not compared with the gated model"


def prune_checkpoint(
    folder: str | Path,
    plan: PruningPlan | HeadMask,
    out: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    copy_companions: bool = False,
) -> StreamReport:
    """Cuts the model in ``folder`` by a plan and writes it to ``out`` in our own form.

    Memory stays at that of PyTorch and the model's buffers and some tens of megabytes, whatever the
    model's size.

    Args:
        folder: A Transformers model with safetensors files, whole or cut by headprune before.
        plan: Kept heads in original indices.
        out: A new or an empty folder.
        max_shard_size: Bytes, or text such as ``"5GB"``: larger models are written in several
            files.
        copy_companions: Copy tokenizer, processor, licence and the words of the model's card, too.

    Raises:
        InvalidValue: ``out`` is not empty.
        NotWritten: the system refused to write, or something is in ``out`` by the time all is
            written.
        CheckpointError: a folder without such files, or a damaged one.
        PlanMismatch: the plan is for a model of another structure.
        UnsupportedModel: a model whose tensors have other names, packings or types in files than in
            memory, or a cut that is more than rows and columns; ``prune_`` takes those.
    """
    folder, out = Path(folder), Path(out)
    check_shard_size(max_shard_size)
    if occupied(out):
        raise InvalidValue("out", "a new or an empty folder", str(out))
    settle(folder)
    stored = slices.stored_tensors(folder)
    model, tables = _skeleton(folder, stored)
    if not (folder / MANIFEST).is_file():
        stored = _renamed(model, stored, folder)
    sources = _sources(model, stored, tables, folder)
    mask, policy = (plan.mask, plan.policy) if isinstance(plan, PruningPlan) else (plan, "group")
    sites = find_sites(model, policy=policy)
    bound = bind(model, sites)
    warnings = check_plan(
        model, [b.site for b in bound], plan, lambda name, tensor: _sample(sources, name, tensor)
    )
    warnings = [*warnings, *coverage_note(sites.not_taken)]
    gone = tuple(
        (b.site.name, tuple(h for h in b.site.heads if h not in mask.kept(b.site.name)))
        for b in bound
    )
    rows = kept_rows_of(model, bound, mask)
    before = sum(p.numel() for p in model.parameters())
    cut_(model, bound, mask)
    bound = bind(model, [b.site for b in bound])
    cut = {name: Slice(source, *rows.get(name, (0, None))) for name, source in sources.items()}
    _check(model, cut, tables)
    with staged(out, alone=True) as place:
        own.write(model, bound, place, max_shard_size, cut)
        known = plan if isinstance(plan, PruningPlan) else None
        write_card(model, [b.site for b in bound], out, "headprune", known, place)
        copied = companions.copy(str(folder), place) if copy_companions else ()
    used = set(sources.values())
    unused = sorted(name for name, source in stored.items() if source not in used)
    if unused:
        names = ", ".join(unused[:3]) + (" ..." if len(unused) > 3 else "")
        warnings = [
            *warnings,
            f"{len(unused)} tensors of the folder are none of the model's: {names}",
        ]
    after = sum(p.numel() for p in model.parameters())
    read = sum(source.n_bytes for source in used)
    written = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return StreamReport(
        tuple(g for g in gone if g[1]), before, after, read, written, tuple(warnings), tuple(copied)
    )


def _skeleton(folder: Path, stored: dict[str, Stored]) -> tuple[nn.Module, frozenset[str]]:
    """The folder's model without memory for its weights, cut as it was saved; and which buffers are
    stored besides."""
    if (folder / MANIFEST).is_file():
        return _cut_before(folder, stored)
    import transformers

    check_folder(folder)
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind: Any = class_named(class_name_of(config))
        if kind is None:
            raise ValueError(
                f"no class of Transformers is named in its architectures: {config.architectures}"
            )
        if getattr(config, "headprune_heads", None) is not None:
            raise ValueError("it runs the modelling file beside its weights")
        floats = [s.dtype for s in stored.values() if s.dtype.is_floating_point]
        dtype = config.dtype or (floats[0] if floats else torch.float32)
        with no_memory(), default_dtype(dtype), few_modules(folder / "config.json"):
            model: Any = kind(config)
        if kind.can_generate():
            own_file = (folder / "generation_config.json").is_file()
            as_loaded = (
                {} if own_file else {"config_file_name": "config.json", "_from_model_config": True}
            )
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                folder, **as_loaded
            )
    except (
        Exception
    ) as error:  # a wrong number in a configuration breaks a constructor in any way it likes
        raise CheckpointError(
            str(folder), "a folder with a model of Transformers", str(error), _WHOLE
        ) from error
    model.tie_weights()
    strict = getattr(kind, "_keep_in_fp32_modules_strict", None)
    wide = strict or (dtype == torch.float16 and getattr(kind, "_keep_in_fp32_modules", None))
    if wide and dtype != torch.float32:
        must = "a model whose tensors have one type in memory"
        raise UnsupportedModel(
            str(folder), must, f"{kind.__name__}, which keeps some in float32", _WHOLE
        )
    return model.eval(), frozenset()


def _cut_before(folder: Path, stored: dict[str, Stored]) -> tuple[nn.Module, frozenset[str]]:
    """The same of a folder of ours; its buffers are read, for they are small and compared with a
    new model's."""
    manifest = own.read_manifest(folder)
    weights.check(folder, manifest)
    model = own.build(folder, manifest)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = {
        name: slices.read(s)
        if name in buffers
        else torch.empty(s.shape, dtype=s.dtype, device="meta")
        for name, s in stored.items()
    }
    return filled(folder, manifest, tensors, model), frozenset(manifest.tables)


def _renamed(model: Any, stored: dict[str, Stored], folder: Path) -> dict[str, Stored]:
    """The tensors under the names that the model has for them; families had others before, and
    still have on disk.

    Raises:
        UnsupportedModel: tensors that Transformers merges or splits when it loads them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(model)
    names = [change for change in changes if isinstance(change, WeightRenaming)]
    shapes = [change for change in changes if isinstance(change, WeightConverter)]
    state, found = weights_of(model), {}
    for old, source in stored.items():
        new, merged = rename_source_key(old, names, shapes, model.base_model_prefix, state)
        if merged is not None:
            must = "a folder whose tensors are those of the model"
            raise UnsupportedModel(
                str(folder), must, f"{old!r}, one of several that make {new!r}", _WHOLE
            )
        found[new] = source
    return found


def _sources(
    model: nn.Module, stored: dict[str, Stored], tables: frozenset[str], folder: Path
) -> dict[str, Stored]:
    """Where every tensor of the state dict lies; one that is shared lies under one of its names.

    Raises:
        UnsupportedModel: a tensor that is not there under its own name, or has another shape or
            type there.
    """
    state = weights_of(model, keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    found = {}
    for name, tensor in [
        *state.items(),
        *((t, dict(model.named_buffers())[t]) for t in sorted(tables)),
    ]:
        there = next((n for n in (name, *names.get(id(tensor), ())) if n in stored), None)
        if there is None:
            got = f"none; it has {', '.join(sorted(stored)[:3])} ..."
            raise UnsupportedModel(
                str(folder), f"a folder with a tensor {name!r}, as the model has it", got, _WHOLE
            )
        source = stored[there]
        if source.shape != tuple(tensor.shape) or source.dtype != tensor.dtype:
            must = f"{_words(tensor.dtype)} of shape {list(tensor.shape)}, as in memory"
            raise UnsupportedModel(
                f"{folder}: {there}",
                must,
                f"{_words(source.dtype)} of shape {list(source.shape)}",
                _WHOLE,
            )
        found[name] = source
    for name, tensor in state.items():
        others = [n for n in names[id(tensor)] if n in stored and stored[n] != found[name]]
        if others and any(
            a != b for a, b in zip(_bytes(found[name]), _bytes(stored[others[0]]), strict=True)
        ):
            must = f"a folder in which {name!r} and {others[0]!r} are the same, as in the model"
            raise UnsupportedModel(str(folder), must, "two that differ", _WHOLE)
    return found


def _bytes(stored: Stored) -> Any:
    return Slice(stored).pieces()


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sample(sources: dict[str, Stored], name: str, tensor: Tensor) -> bytes:
    return slices.sampled(sources[name], sample_positions(tensor.numel()))


def _check(model: nn.Module, cut: dict[str, Slice], tables: frozenset[str]) -> None:
    """Checks that the cut model has just these tensors, and that the cut did no more than shorten
    them.

    Raises:
        UnsupportedModel: a layout whose cut makes or changes tensors in another way.
    """
    state = weights_of(model)
    foreign = sorted((state.keys() ^ cut.keys()) - tables)
    shapes = [n for n, tensor in state.items() if n in cut and tuple(tensor.shape) != cut[n].shape]
    if foreign or shapes:
        got = f"one that makes or changes {', '.join([*foreign, *shapes][:3])} in another way"
        raise UnsupportedModel(
            type(model).__name__, "one whose cut leaves rows and columns away", got, _WHOLE
        )
