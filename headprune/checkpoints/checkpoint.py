"""``save_pretrained`` and ``from_pretrained``: cut models in folders, in four formats."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from headprune.attention.sharded import check_whole
from headprune.checkpoints import (
    card,
    companions,
    described,
    gguf_file,
    own,
    proof,
    remote_code,
    transformers_4,
)
from headprune.checkpoints.manifest import MANIFEST as MANIFEST
from headprune.checkpoints.manifest import Manifest
from headprune.checkpoints.weights import INDEX, SHARDS, WEIGHTS, check_shard_size, read
from headprune.core.errors import (
    CheckpointError,
    HeadPruneError,
    InvalidValue,
    UnsupportedModel,
    VerificationFailed,
    reason_of,
)
from headprune.core.files import finish_renames, sha256_file, staged
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.layout import FOLDED_ATTRIBUTE
from headprune.core.layout_data import layout_from
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.model.building import fresh
from headprune.model.cut import cut_
from headprune.model.fingerprint import check_plan, fingerprint
from headprune.model.offloaded import count_parameters, offloaded
from headprune.model.plain_config import config_of_cut
from headprune.model.saves import MODELLING, record_of
from headprune.model.sites import (
    BoundSite,
    Sites,
    all_cut_sites,
    bind,
    has_cut_neurons,
    sites_for,
    unwrap,
)

Format = Literal["headprune", "transformers", "remote-code", "gguf"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: Files of an earlier save that a new one takes the place of.
OURS = (MANIFEST, WEIGHTS, INDEX, SHARDS, MODELLING, gguf_file.FILE)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    sites: Iterable[AttentionSite] | None = None,
    *,
    format: Format | Literal["auto"] = "headprune",
    processor: Any = None,
    plan: PruningPlan | None = None,
    record: RunRecord | None = None,
    example: Any = None,
    max_shard_size: int | str = "50GB",
    dtype: gguf_file.Dtype | None = None,
) -> Path:
    """Write a model to a folder, with a model card that states what was cut.

    - ``headprune``: every cut model, bit for bit; ``hp.from_pretrained`` opens it.
    - ``transformers``: head counts that a configuration can express.
    - ``remote-code``: cuts that need no class of headprune; opens with ``trust_remote_code=True``.
    - ``auto``: ``transformers`` where it can hold the cut, else ``headprune``.
    - ``gguf``: llama.cpp opens it.

    Those for Transformers are loaded and compared with the model first.

    Args:
        model: Cut or whole; a ``torch.compile`` wrapper is taken.
        folder: An earlier save is replaced.
        sites: Default ``find_sites(model)`` and cut feed-forwards.
        format: See above, and ``applicable_formats``.
        processor: Tokenizers or processors to save too.
        plan: By which the model was cut, for the model card.
        record: Of its run, for the card.
        example: To compare outputs; default one made up.
        max_shard_size: Bytes, or ``"5GB"``; larger models get several files.
        dtype: Of ``gguf``: f32, f16, bf16 or q8_0.

    Returns:
        The folder. On an error it is unchanged.

    Raises:
        CheckpointError: ``folder`` is a file, or a tensor is on the meta device.
        NotWritten: no disk space or no permission.
        UnsupportedModel: the format cannot hold this cut.
        VerificationFailed: the model that loads differs from the saved one.
    """
    # 1. Check everything before anything is written.
    model = unwrap(model)
    folder = Path(folder)
    check_whole(model, "one whose weights are whole in this process, to be saved")
    if format not in ("auto", *FORMATS):
        raise InvalidValue("format", f"one of auto, {', '.join(FORMATS)}", repr(format))
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(str(folder), "a folder", "a file")
    if processor is not None:
        companions.check(processor)
    check_shard_size(max_shard_size)
    if sites is None:
        bound = bind(model, all_cut_sites(model))
    else:
        bound = bind(model, sites)
        _check_no_cut_beyond(model, bound)
    if format == "auto":
        format = automatic_format(_reason_against(config_of_cut, model, bound))
    gguf_file.check_dtype(dtype, format)
    as_gguf = None
    if format == "gguf":
        gguf_file.check_installed()
        as_gguf = gguf_file.description_of_cut(model, bound)

    # 2. Write to a temporary folder, which takes the place of the old files at the end.
    old = OURS if as_gguf is None else (*OURS, *gguf_file.STALE)
    with staged(folder, in_place_of=old) as place:
        if format == "headprune":
            own.write(model, bound, place, max_shard_size)
        elif as_gguf is None:
            _write_for_others(model, bound, place, format, example, max_shard_size)
        write_card(model, [b.site for b in bound], folder, format, plan, place, record)
        if processor is not None:
            companions.save(processor, place)
        if as_gguf is not None:  # last, for it holds the tokenizer too
            gguf_file.write(model, as_gguf, place, dtype)
    return folder


def _check_no_cut_beyond(model: nn.Module, bound: list[BoundSite]) -> None:
    """Refuse sites without the feed-forwards that lost neurons: such a folder would not load."""
    if not has_cut_neurons(model):
        return
    given = {b.site.name for b in bound}
    for site in all_cut_sites(model):
        is_cut = len(site.heads) < site.n_query_heads
        if site.is_feed_forward and is_cut and site.name not in given:
            must = "all sites that were cut, feed-forwards too"
            raise InvalidValue("sites", must, f"none of {site.name}", "Leave sites= out.")


def write_card(
    model: nn.Module,
    sites: Iterable[AttentionSite],
    folder: Path,
    format: Format,
    plan: PruningPlan | None,
    place: Path,
    record: RunRecord | None = None,
) -> None:
    """Write the model card of a folder, with its section on what was cut.

    Args:
        model: The cut model; its weights may be on the meta device.
        sites: Its sites.
        folder: The checkpoint folder, whose card may have other text.
        format: Of the checkpoint.
        plan: The plan by which the model was cut, if that is known.
        place: Where the card is written: a folder that is to replace ``folder``.
        record: Of the run that cut the model.
    """
    if plan is None and record is not None:
        plan = record.plan
    params_before = None
    whole: Any = fresh(model)
    if whole is not None:
        whole.tie_weights()  # an embedding that is also the output counts once
        params_before = count_parameters(whole)
    loading = _loading(model, format, folder)
    text = card.section(model, sites, loading, plan, params_before, record)
    path = folder / card.CARD
    old = card.read(path) if path.is_file() else None
    card.write(place, text, card.hub_name(model), old)


def applicable_formats(
    model: nn.Module, sites: Iterable[AttentionSite] | None = None
) -> dict[Format, str | None]:
    """Decide which formats can hold a cut or whole model; writes nothing.

    ``save_pretrained`` also proves what it writes.

    Args:
        model: The model.
        sites: Default ``find_sites(model)`` and cut feed-forwards.

    Returns:
        None for each format that can hold it, else the reason why not.
    """
    model = unwrap(model)
    bound = bind(model, all_cut_sites(model) if sites is None else sites)
    return {
        "headprune": None,
        "transformers": _reason_against(config_of_cut, model, bound),
        "remote-code": _reason_against(remote_code.description_of_cut, model, bound),
        "gguf": _reason_against(gguf_file.description_of_cut, model, bound),
    }


def automatic_format(reason_against_transformers: str | None) -> Format:
    """Choose ``transformers`` for ``auto`` if no reason is given against it, else ``headprune``."""
    return "headprune" if reason_against_transformers else "transformers"


def _reason_against(
    describe: Callable[[nn.Module, list[BoundSite]], Any], model: nn.Module, bound: list[BoundSite]
) -> str | None:
    """Why a format cannot describe a cut; None where it can."""
    try:
        describe(model, bound)
    except UnsupportedModel as error:
        return f"it is {error.must}, got {error.got}"
    return None


def from_pretrained(
    folder: str | Path,
    model: nn.Module | None = None,
    sites: Iterable[AttentionSite] | None = None,
    plan: PruningPlan | HeadMask | None = None,
) -> nn.Module:
    """Load a folder of a cut model in any format, on the CPU, in evaluation mode.

    That is one of ``hp.save_pretrained``, of the cut model's own ``save_pretrained``, of Trainer or
    the hub, or one of Transformers 4 whose configuration has ``pruned_heads``.

    Args:
        folder: A checkpoint folder, or a repository of the hub, ``owner/name``.
        model: For a class that is no Transformers class: a freshly built full-size model, which is
            cut and filled.
        sites: Of ``model``, where it has layouts of your own that are no data.
        plan: By which the model was cut, for a folder that does not say so: one that
            ``model.save_pretrained`` wrote with an earlier headprune.

    Returns:
        The cut model.

    Raises:
        CheckpointError: files are missing, damaged or changed, or the checkpoint is of another
            model.
        InvalidValue: a plan for a folder that says itself what was cut.
    """
    folder = _local(folder)
    if plan is not None and not isinstance(plan, (PruningPlan, HeadMask)):
        must = "the PruningPlan or HeadMask that the model was cut by"
        raise InvalidValue("from_pretrained(plan=)", must, type(plan).__name__)
    # Finish or undo a save that was interrupted.
    finish_renames(folder)
    is_ours = (folder / MANIFEST).is_file() and not _is_pushed_over(folder)
    if model is None and not is_ours and transformers_4.pruned_heads(folder):
        _refuse("the configuration's pruned_heads say", plan=plan, sites=sites)
        return transformers_4.opened(folder)
    if is_ours:
        _refuse(f"{MANIFEST} says", plan=plan)
    if plan is not None or (not is_ours and described.is_described(folder)):
        return described.opened(folder, plan, model, sites)
    # Tensors are read before a model is built or changed.
    manifest = own.read_manifest(folder)
    tensors = read(folder, manifest)
    if model is None:
        model = own.build(folder, manifest)
    elif not isinstance(model, nn.Module):
        raise InvalidValue(
            "model", "a freshly built full-size torch.nn.Module", type(model).__name__
        )
    return filled(folder, manifest, tensors, model, sites)


def _refuse(who_says: str, **arguments: Any) -> None:
    """Refuse arguments that say what the folder says itself."""
    for name, value in arguments.items():
        if value is not None:
            must = f"left out, because {who_says} which heads the model has"
            raise InvalidValue(f"from_pretrained({name}=)", must, type(value).__name__)


def _is_pushed_over(folder: Path) -> bool:
    """Whether Transformers wrote over a folder of ours: its uploads remove no file."""
    if not described.is_described(folder):
        return False
    return sha256_file(folder / "config.json") != own.read_manifest(folder).config_sha256


def _local(folder: str | Path) -> Path:
    """The folder, downloaded where it is the name of a repository."""
    if Path(folder).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(folder)):
        return Path(folder)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder)))
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        must = "an existing folder, or a repository of the hub that can be reached"
        raise CheckpointError(str(folder), must, reason) from error


def filled(
    folder: Path,
    manifest: Manifest,
    tensors: dict[str, Tensor],
    model: nn.Module,
    sites: Iterable[AttentionSite] | None = None,
) -> nn.Module:
    """Cut a full-size model by a manifest, and fill it with a folder's tensors.

    On an error the model is unchanged.

    Args:
        folder: The checkpoint folder, for errors.
        manifest: Its manifest.
        tensors: Its tensors, by name.
        model: The model, freshly built.
        sites: Default ``find_sites(model)`` and cut feed-forwards.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: the manifest or the tensors do not fit the model.
    """
    try:
        bound = _sites_to_cut(folder, manifest, model, sites)
        undo = cut_(model, bound, manifest.mask)
    except CheckpointError:
        raise
    except HeadPruneError as error:
        must = "a checkpoint of this model"
        hint = "Pass from_pretrained(folder, model=...) the full-size model that it was cut from."
        raise CheckpointError(str(folder), must, str(error).rstrip("."), hint) from error
    try:
        own.fill_(model, manifest, tensors, folder)
    except BaseException:  # an interrupt too
        undo.restore()
        raise
    # Which removed heads' mean outputs the biases hold.
    folded = {f.site: f.heads for f in manifest.folded}
    for b in bound:
        heads = folded.get(b.site.name, ())
        if heads:
            b.gate.__dict__[FOLDED_ATTRIBUTE] = heads
    return model.eval()


def _sites_to_cut(
    folder: Path, manifest: Manifest, model: nn.Module, sites: Iterable[AttentionSite] | None
) -> list[BoundSite]:
    """The sites of a full-size model, which must have the structure that a manifest states."""
    if sites is None:
        layouts = list(map(layout_from, manifest.layouts))
        located = sites_for(model, manifest.mask.sites, layouts=layouts)
    else:
        located = sites if isinstance(sites, Sites) else Sites(sites, ())
    if offloaded(model):
        raise UnsupportedModel("model", "a freshly built one", "one that accelerate offloads")
    check_plan(model, located, manifest.mask)
    # The policy that allows the cut is not stored.
    permitted = (s.permitting(manifest.mask.kept(s.name)) for s in located)
    bound = bind(model, Sites(permitted, located.layouts.values(), located.not_taken))
    if fingerprint(model, [b.site for b in bound]).structure != manifest.structure:
        must = f"a checkpoint of {type(model).__name__}"
        raise CheckpointError(str(folder), must, manifest.model_class)
    return bound


def _write_for_others(
    model: Any,
    bound: list[BoundSite],
    place: Path,
    format: Format,
    example: Any,
    max_shard_size: int | str,
) -> None:
    """Write a folder that Transformers loads, and prove it by loading it.

    Some families have other names and packings on disk, and converting back to them can corrupt
    projections that are no longer equally large. Such a model is written under the module's own
    names, which load as well.
    """
    is_remote = format == "remote-code"
    # Whether the format can hold the cut is known before an example is made up.
    if is_remote:
        description = remote_code.description_of_cut(model, bound)
        against = remote_code.reason_against_vllm(model, bound)
        if against:
            warnings.warn(f"vLLM cannot serve this folder: {against}", UserWarning, stacklevel=3)
    else:
        config = config_of_cut(model, bound)
        config.headprune = record_of(model, config).to_dict()
    example = proof.example_for(model, example)
    failure: VerificationFailed | None = None  # of the first try
    for original_names in (True, False):
        kind, body = type(model), None
        if is_remote:
            kind, body = remote_code.write_code(model, place)
            config = remote_code.config_of_cut(model, description, bound)
            config.headprune = record_of(model).to_dict()
        try:
            proof.written_and_proven(
                kind, config, model, place, max_shard_size, original_names, example
            )
            if body is not None:
                proof.same_tensors(body, model.base_model, place)
            return
        except VerificationFailed as error:
            failure = failure or error
            _clear(place)
    assert failure is not None
    raise failure


def _clear(folder: Path) -> None:
    """Remove all files in a folder."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)


def _loading(model: nn.Module, format: Format, folder: Path) -> str:
    """Python code that loads a folder."""
    kind = type(model).__name__
    auto = kind
    if format == "remote-code":
        # AutoModelForPreTraining loads the same classes as a more specific one.
        names = [n for n in remote_code.auto_classes(model) if n != "AutoModelForPreTraining"]
        auto = names[0] if names else kind
    more = "" if fresh(model) is not None else f", model={kind}(...)"
    return card.LOADING[format].format(kind=kind, auto=auto, folder=folder.name, more=more)
