"""``prune_checkpoint``: cut a checkpoint on disk, tensor by tensor, without loading the model.

The model is built without memory for its weights and cut as ``prune_`` cuts. That shows which rows
and columns of which tensor are kept; those are copied from file to file. The result is the folder
that ``save_pretrained`` writes, byte for byte. No input goes through the model: that a cut equals
the gated model is proven where the plan is tried, or afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.checkpoints import companions, own, slices, weights
from headprune.checkpoints.checkpoint import filled, write_card
from headprune.checkpoints.cut_class import names_in_model
from headprune.checkpoints.described import is_described
from headprune.checkpoints.foreign import check_folder, few_modules
from headprune.checkpoints.manifest import MANIFEST
from headprune.checkpoints.slices import Slice, Stored
from headprune.checkpoints.weights import check_shard_size
from headprune.core.coverage import coverage_note
from headprune.core.errors import CheckpointError, InvalidValue, UnsupportedModel
from headprune.core.files import finish_renames, occupied, staged
from headprune.core.heads import HeadCounts, HeadMask, Policy
from headprune.core.plan import PruningPlan
from headprune.model.building import no_memory
from headprune.model.classes import class_name_of, class_named
from headprune.model.cut import cut_, kept_rows_of
from headprune.model.fingerprint import check_plan, sample_positions
from headprune.model.offloaded import count_parameters
from headprune.model.running import default_dtype
from headprune.model.sites import BoundSite, Sites, bind, find_sites, has_cut_neurons, sites_for

_WHOLE = "Load the model and cut it with prune_, or without --streaming."


@dataclass(frozen=True)
class StreamReport:
    """Result of ``prune_checkpoint``.

    Args:
        removed: Original indices of the removed heads, by site.
        params_before, params_after: Parameters of the whole model.
        bytes_read, bytes_written: Of weights.
        warnings: Facts that a user should know.
        copied: Names of the files that were copied unchanged.
        feed_forwards: Sites whose heads are neurons.
    """

    removed: tuple[tuple[str, tuple[int, ...]], ...]
    params_before: int
    params_after: int
    bytes_read: int
    bytes_written: int
    warnings: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    feed_forwards: tuple[str, ...] = ()

    def __str__(self) -> str:
        share = 100 * (self.params_after / self.params_before - 1)
        removed = HeadCounts.sum((len(hs), site in self.feed_forwards) for site, hs in self.removed)
        sizes = f"{self.params_before:,} -> {self.params_after:,} parameters ({share:+.1f} %)"
        return f"removed {removed}, {sizes}, file to file; not compared with the gated model"


def prune_checkpoint(
    folder: str | Path,
    plan: PruningPlan | HeadMask,
    out: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    copy_companions: bool = False,
) -> StreamReport:
    """Cut a folder's model and write it to another in our own format.

    Besides what PyTorch and the model's buffers need, memory grows by some tens of megabytes,
    whatever the model's size.

    Args:
        folder: A Transformers model with safetensors files, whole or cut by headprune before.
        plan: Kept heads in original indices.
        out: A new or an empty folder.
        max_shard_size: Bytes, or text such as ``"5GB"``; larger models get several files.
        copy_companions: Copy tokenizer, processor, licence and the text of the model's card, too.

    Returns:
        A report with the removed heads, sizes and warnings.

    Raises:
        InvalidValue: ``out`` is not empty.
        NotWritten: the system refused to write, or ``out`` is no longer empty at the end.
        CheckpointError: a folder without such files, or a damaged one.
        PlanMismatch: the plan is for a model of another structure.
        UnsupportedModel: a model whose tensors have other names, packings or types in files than in
            memory, or a cut that is more than rows and columns; ``prune_`` takes those.
    """
    # 1. Refuse what cannot work before any file is read.
    folder = Path(folder)
    out = Path(out)
    check_shard_size(max_shard_size)
    if occupied(out):
        raise InvalidValue("out", "a new or an empty folder", str(out))

    # 2. The model without memory for its weights, and where its tensors are.
    finish_renames(folder)
    stored = slices.stored_tensors(folder)
    model, tables = _skeleton(folder, stored)
    if not (folder / MANIFEST).is_file():
        # Our own format has the module's names.
        stored = _renamed(model, stored, folder)
    sources = _sources(model, stored, tables, folder)

    # 3. Its sites, and the removed heads.
    full_plan = plan if isinstance(plan, PruningPlan) else None
    mask = plan.mask if isinstance(plan, PruningPlan) else plan
    policy: Policy = "group" if full_plan is None else full_plan.policy
    named, sites = _located(model, mask, policy)

    def sample(name: str, tensor: Tensor) -> bytes:
        """Values of a tensor by which a plan recognises its model."""
        return slices.sampled(sources[name], sample_positions(tensor.numel()))

    warnings = list(check_plan(model, [b.site for b in bind(model, named)], plan, sample))
    warnings += coverage_note(sites.not_taken)
    mask = _over_all(mask, sites)
    bound = bind(model, sites)
    removed = _removed(bound, mask)

    # 4. The cut, and the rows and columns that it keeps.
    rows = kept_rows_of(model, bound, mask)
    params_before = count_parameters(model)
    cut_(model, bound, mask)
    params_after = count_parameters(model)
    bound = bind(model, [b.site for b in bound])
    # A tensor that no cut touches is copied whole.
    cut = {name: Slice(source, *rows.get(name, (0, None))) for name, source in sources.items()}
    _check_cut(model, cut, tables)

    # 5. The new folder.
    with staged(out, alone=True) as place:
        own.write(model, bound, place, max_shard_size, cut)
        write_card(model, [b.site for b in bound], out, "headprune", full_plan, place)
        copied = companions.copy(str(folder), place) if copy_companions else ()
    # Tied tensors have one source.
    used = set(sources.values())
    warnings += _unused_note(stored, used)
    return StreamReport(
        removed,
        params_before,
        params_after,
        bytes_read=sum(source.n_bytes for source in used),
        bytes_written=sum(path.stat().st_size for path in out.glob("*.safetensors")),
        warnings=tuple(warnings),
        copied=tuple(copied),
        feed_forwards=tuple(row.site for row in HeadMask.full(sites).rows if row.neurons),
    )


def _located(model: nn.Module, mask: HeadMask, policy: Policy) -> tuple[Sites, Sites]:
    """The sites that a mask names, and all: with feed-forwards if it names any or one was cut."""
    named = sites_for(model, mask.sites, policy)
    neurons = has_cut_neurons(model) or any(site.is_feed_forward for site in named)
    return named, find_sites(model, policy=policy, feed_forward=neurons)


def _over_all(mask: HeadMask, sites: Sites) -> HeadMask:
    """A mask that also keeps the present neurons of feed-forwards that it does not name."""
    others = [site for site in sites if site.is_feed_forward and site.name not in mask.sites]
    return HeadMask((*mask.rows, *HeadMask.full(others).rows))


def _removed(bound: list[BoundSite], mask: HeadMask) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The heads that a mask removes, for each site where it removes any."""
    removed = []
    for b in bound:
        kept = frozenset(mask.kept(b.site.name))
        heads = tuple(h for h in b.site.heads if h not in kept)
        if heads:
            removed.append((b.site.name, heads))
    return tuple(removed)


def _unused_note(stored: dict[str, Stored], used: set[Stored]) -> list[str]:
    """A warning of tensors that the model does not have; nothing where there are none."""
    unused = sorted(name for name, source in stored.items() if source not in used)
    if not unused:
        return []
    names = ", ".join(unused[:3]) + (" ..." if len(unused) > 3 else "")
    return [f"{len(unused)} tensors in the folder do not belong to the model: {names}"]


def _skeleton(folder: Path, stored: dict[str, Stored]) -> tuple[nn.Module, frozenset[str]]:
    """The folder's model without memory for its weights, cut as it was saved.

    Also the names of the buffers that are stored though the state dict leaves them out.
    """
    if (folder / MANIFEST).is_file():
        return _cut_before(folder, stored)
    check_folder(folder)
    if is_described(folder):
        must = "a folder of a whole model, or one of the format headprune"
        got = "another format of a cut model"
        raise CheckpointError(str(folder), must, got, _WHOLE)
    try:
        model, dtype = _built(folder, stored)
    # A wrong number in a configuration breaks a constructor in any way it likes.
    except Exception as error:
        must = "a folder with a model of Transformers"
        raise CheckpointError(str(folder), must, str(error), _WHOLE) from error
    model.tie_weights()
    _check_one_dtype(model, dtype, folder)
    return model.eval(), frozenset()


def _built(folder: Path, stored: dict[str, Stored]) -> tuple[Any, torch.dtype]:
    """A Transformers folder's model without memory for its weights, and the type of those."""
    import transformers

    # No code of the folder runs.
    config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind: Any = class_named(class_name_of(config))
    if kind is None:
        got = config.architectures
        raise ValueError(f"no class of Transformers is named in its architectures: {got}")
    if getattr(config, "headprune_heads", None) is not None:
        raise ValueError("it runs the modelling file beside its weights")
    # Without a type in the configuration, that of the first weights.
    dtype = config.dtype
    if not dtype:
        floats = [s.dtype for s in stored.values() if s.dtype.is_floating_point]
        dtype = floats[0] if floats else torch.float32
    with no_memory(), default_dtype(dtype), few_modules(folder / "config.json"):
        model: Any = kind(config)
    if kind.can_generate():
        options: dict[str, Any] = {}
        if not (folder / "generation_config.json").is_file():
            # As from_pretrained of a model does.
            options = {"config_file_name": "config.json", "_from_model_config": True}
        generation_config = transformers.GenerationConfig.from_pretrained(folder, **options)
        model.generation_config = generation_config
    return model, dtype


def _check_one_dtype(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Refuse a class that keeps some tensors in float32 when it is loaded in a lower type."""
    model_class = type(model)
    keeps = getattr(model_class, "_keep_in_fp32_modules_strict", None)
    # Transformers applies the other list to float16 alone.
    if dtype == torch.float16:
        keeps = keeps or getattr(model_class, "_keep_in_fp32_modules", None)
    if keeps and dtype != torch.float32:
        must = "a model whose tensors have one type in memory"
        got = f"{model_class.__name__}, which keeps some in float32"
        raise UnsupportedModel(str(folder), must, got, _WHOLE)


def _cut_before(folder: Path, stored: dict[str, Stored]) -> tuple[nn.Module, frozenset[str]]:
    """The same for a folder in our own format."""
    manifest = own.read_manifest(folder)
    # Every byte is read for the hashes: a damaged file must not be cut.
    weights.check(folder, manifest)
    model = own.build(folder, manifest)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = {}
    for name, source in stored.items():
        # Buffers are small, and are compared with a new model's when they are written.
        if name in buffers:
            tensors[name] = slices.read(source)
        else:
            tensors[name] = torch.empty(source.shape, dtype=source.dtype, device="meta")
    return filled(folder, manifest, tensors, model), frozenset(manifest.tables)


def _renamed(model: Any, stored: dict[str, Stored], folder: Path) -> dict[str, Stored]:
    """The tensors under the model's own names, where the family has others on disk.

    Raises:
        UnsupportedModel: tensors that Transformers merges or splits when it loads them.
    """
    renamed = {}
    for old, (new, is_converted) in names_in_model(model, stored).items():
        if is_converted:
            must = "a folder whose tensors are those of the model in memory"
            got = f"{old!r}, which Transformers merges or splits into {new!r}"
            raise UnsupportedModel(str(folder), must, got, _WHOLE)
        renamed[new] = stored[old]
    return renamed


def _sources(
    model: nn.Module, stored: dict[str, Stored], tables: frozenset[str], folder: Path
) -> dict[str, Stored]:
    """Where every tensor of the state dict is stored.

    Raises:
        UnsupportedModel: a tensor that is not there under its own name or that of one it is tied
            to, or has another shape or type there.
    """
    state = weights_of(model, keep_vars=True)
    tied: dict[int, list[str]] = {}  # all names of each tensor, by its id
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    # Tables are stored though the state dict leaves them out.
    buffers = dict(model.named_buffers())
    expected = dict(state)
    expected.update((name, buffers[name]) for name in sorted(tables))

    # 1. Each tensor under its own name, else under that of one it is tied to.
    sources = {}
    for name, tensor in expected.items():
        names = [name, *tied.get(id(tensor), ())]
        sources[name] = _source(names, tensor, stored, folder)

    # 2. Tied tensors that are stored twice must be equal.
    for name, tensor in state.items():
        for other in tied[id(tensor)]:
            if other not in stored or stored[other] == sources[name]:
                continue
            if not _equal(sources[name], stored[other]):
                must = f"a folder in which {name!r} and {other!r} are the same, as in the model"
                raise UnsupportedModel(str(folder), must, "two that differ", _WHOLE)
            break  # one is enough: each name has its turn
    return sources


def _source(names: list[str], tensor: Tensor, stored: dict[str, Stored], folder: Path) -> Stored:
    """Where a tensor is stored under the first of its names that the folder has."""
    for name in names:
        if name not in stored:
            continue
        source = stored[name]
        if source.shape != tuple(tensor.shape) or source.dtype != tensor.dtype:
            must = f"{_kind_of(tensor)}, as in memory"
            raise UnsupportedModel(f"{folder}: {name}", must, _kind_of(source), _WHOLE)
        return source
    must = f"a folder with a tensor {names[0]!r}, as the model has it"
    got = f"none; it has {', '.join(sorted(stored)[:3])} ..."
    raise UnsupportedModel(str(folder), must, got, _WHOLE)


def _equal(first: Stored, second: Stored) -> bool:
    """Whether two stored tensors of one shape and type have the same bytes."""
    pieces = zip(Slice(first).pieces(), Slice(second).pieces(), strict=True)
    return all(a == b for a, b in pieces)


def _kind_of(tensor: Tensor | Stored) -> str:
    """Type and shape of a tensor, as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _check_cut(model: nn.Module, cut: dict[str, Slice], tables: frozenset[str]) -> None:
    """Check that the cut only removed rows and columns of the model's tensors.

    Raises:
        UnsupportedModel: a layout whose cut makes or changes tensors in another way.
    """
    state = weights_of(model)
    # Tensors of only one of the two, then those of another shape.
    changed = sorted((state.keys() ^ cut.keys()) - tables)
    for name, tensor in state.items():
        if name in cut and tuple(tensor.shape) != cut[name].shape:
            changed.append(name)
    if changed:
        must = "one whose cut only removes rows and columns"
        got = f"one that makes or changes {', '.join(changed[:3])} in another way"
        raise UnsupportedModel(type(model).__name__, must, got, _WHOLE)
