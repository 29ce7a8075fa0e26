"""``save_pretrained`` and ``from_pretrained``: a cut model in a folder, in our own form or in one
that others open."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from headprune.attention.sharded import check_whole
from headprune.checkpoints import card, companions, own, plain, proof, remote_code, transformers_4
from headprune.checkpoints.building import fresh
from headprune.checkpoints.manifest import MANIFEST as MANIFEST
from headprune.checkpoints.manifest import Manifest
from headprune.checkpoints.weights import INDEX, SHARDS, WEIGHTS, check_shard_size, read
from headprune.core.errors import (
    CheckpointError,
    HeadPruneError,
    InvalidValue,
    UnsupportedModel,
    VerificationFailed,
)
from headprune.core.files import settle, staged
from headprune.core.heads import AttentionSite
from headprune.core.layout import FOLDED_ATTRIBUTE
from headprune.core.opening import read_bytes
from headprune.core.plan import PruningPlan
from headprune.model.cut import cut_
from headprune.model.fingerprint import check_plan, fingerprint
from headprune.model.offloaded import offloaded
from headprune.model.sites import BoundSite, Sites, bind, find_sites, unwrap

Format = Literal["headprune", "transformers", "remote-code"]
FORMATS: tuple[Format, ...] = get_args(Format)
_MODELLING = "modeling_headprune_*.py"


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    sites: Iterable[AttentionSite] | None = None,
    *,
    format: Format = "headprune",
    processor: Any = None,
    plan: PruningPlan | None = None,
    example: Any = None,
    max_shard_size: int | str = "50GB",
) -> Path:
    """Writes a (cut) model to ``folder``, with a model card section that states what was cut.

    - ``headprune``: every cut model, bit for bit; ``hp.from_pretrained`` opens it.
    - ``transformers``: those whose head counts the configuration can say; Transformers alone opens
      it.
    - ``remote-code``: those that no class of ours corrects; Transformers opens it with
      ``trust_remote_code=True``.

    The last two are loaded again and compared with the model, tensor by tensor and in outputs,
    before anything is put into ``folder``.

    Args:
        model: The model; a ``torch.compile`` wrapper is saved as the model inside.
        folder: Made if it does not exist; files of an earlier save are replaced.
        sites: Default ``find_sites(model)``.
        format: See above, and ``applicable_formats``.
        processor: A tokenizer or processor, or several, whose files go into the folder too.
        plan: The plan by which the model was cut, for the model card.
        example: A batch the model takes, to compare outputs with what loads; by default one is made
            up.
        max_shard_size: Bytes, or text such as ``"5GB"``: larger models are written in several
            files.

    Returns:
        The folder. All is written beside its place first: on an error the folder is as it was.

    Raises:
        CheckpointError: ``folder`` is a file, or a tensor has no data (meta device).
        NotWritten: there is no room, or no right to write there.
        UnsupportedModel: the format cannot hold this cut; the message says why.
        VerificationFailed: what was written does not come back as it was saved; nothing of it is
            left.
    """
    model = unwrap(model)
    folder = Path(folder)
    check_whole(model, "one whose weights are whole in this process, to be saved")
    if format not in FORMATS:
        raise InvalidValue("format", f"one of {', '.join(FORMATS)}", repr(format))
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(str(folder), "a folder", "a file")
    if processor is not None:
        companions.check(processor)
    check_shard_size(max_shard_size)
    bound = bind(model, sites)
    with staged(folder, in_place_of=(MANIFEST, WEIGHTS, INDEX, SHARDS, _MODELLING)) as place:
        if format == "headprune":
            own.write(model, bound, place, max_shard_size)
        else:
            _write_for_others(model, bound, place, format, example, max_shard_size)
        write_card(model, [b.site for b in bound], folder, format, plan, place)
        if processor is not None:
            companions.save(processor, place)
    return folder


def write_card(
    model: nn.Module,
    sites: Iterable[AttentionSite],
    folder: Path,
    format: Format,
    plan: PruningPlan | None,
    place: Path,
) -> None:
    """Writes the model card of ``folder`` with its section on what was cut to ``place``, which is
    to become it; a model on the meta device will do."""
    built: Any = fresh(model)
    if built is not None:
        built.tie_weights()  # an embedding that is also the output counts once
    before = None if built is None else sum(p.numel() for p in built.parameters())
    text = card.section(model, sites, _loading(model, format, folder), plan, before)
    old = folder / card.CARD
    card.write(
        place, text, card.hub_name(model), read_bytes(old).decode() if old.is_file() else None
    )


def applicable_formats(
    model: nn.Module, sites: Iterable[AttentionSite] | None = None
) -> dict[Format, str | None]:
    """Which formats can hold a (cut) model: None for those that can, else the reason why not.

    Nothing is written; ``save_pretrained`` proves what it writes besides.
    """
    model = unwrap(model)
    bound = bind(model, sites)
    return {
        "headprune": None,
        "transformers": _reason_against(plain.config_of_cut, model, bound),
        "remote-code": _reason_against(remote_code.description_of_cut, model, bound),
    }


def _reason_against(tried: Callable[[nn.Module, list[BoundSite]], Any], *cut: Any) -> str | None:
    try:
        tried(*cut)
    except UnsupportedModel as error:
        return f"it is {error.must}, got {error.got}"
    return None


def from_pretrained(
    folder: str | Path, model: nn.Module | None = None, sites: Iterable[AttentionSite] | None = None
) -> nn.Module:
    """Loads what ``save_pretrained`` wrote in our own form, in evaluation mode and on the CPU.

    A folder of Transformers 4 whose configuration has ``pruned_heads`` is opened, too.

    Args:
        folder: A checkpoint folder.
        model: For a class that is not a Transformers one: a freshly built full-size model, which is
            cut and filled.
        sites: Of ``model``, where it has layouts of your own.

    Returns:
        The cut model.

    Raises:
        CheckpointError: the folder is not one of ours, is incomplete or damaged, or is for another
            model.
    """
    folder = Path(folder)
    settle(folder)
    if model is None and not (folder / MANIFEST).is_file() and transformers_4.pruned_heads(folder):
        return transformers_4.opened(folder)
    manifest = own.read_manifest(folder)
    tensors = read(folder, manifest)
    if model is None:
        model = own.build(folder, manifest)
    elif not isinstance(model, nn.Module):
        raise InvalidValue(
            "model", "a freshly built full-size torch.nn.Module", type(model).__name__
        )
    return filled(folder, manifest, tensors, model, sites)


def filled(
    folder: Path,
    manifest: Manifest,
    tensors: dict[str, Tensor],
    model: nn.Module,
    sites: Iterable[AttentionSite] | None = None,
) -> nn.Module:
    """A freshly built full-size model, cut as a folder's manifest says, with the folder's tensors
    in place; as it was, on an error."""
    try:
        located = (
            sites
            if isinstance(sites, Sites)
            else find_sites(model)
            if sites is None
            else Sites(sites, ())
        )
        if offloaded(model):
            raise UnsupportedModel("model", "a freshly built one", "one that accelerate offloads")
        check_plan(model, located, manifest.mask)
        permitted = (s.permitting(manifest.mask.kept(s.name)) for s in located)
        located = Sites(permitted, located.layouts.values(), located.not_taken)
        bound = bind(model, located)
        if fingerprint(model, [b.site for b in bound]).structure != manifest.structure:
            raise CheckpointError(
                str(folder), f"a checkpoint of {type(model).__name__}", manifest.model_class
            )
        undo = cut_(model, bound, manifest.mask)
    except CheckpointError:
        raise
    except HeadPruneError as error:
        hint = "Pass from_pretrained(folder, model=...) the full-size model that it was cut from."
        raise CheckpointError(
            str(folder), "a checkpoint of this model", str(error).rstrip("."), hint
        ) from error
    try:
        own.fill_(model, manifest, tensors, folder)
    except BaseException:
        undo.restore()
        raise
    for b in bound:
        heads = {f.site: f.heads for f in manifest.folded}.get(b.site.name, ())
        if heads:
            b.gate.__dict__[FOLDED_ATTRIBUTE] = heads
    return model.eval()


def _write_for_others(
    model: Any,
    bound: list[BoundSite],
    place: Path,
    format: Format,
    example: Any,
    max_shard_size: int | str,
) -> None:
    """Writes to ``place`` and proves what is there.

    Some families have other names and packings on disk, and turning back into them can corrupt
    projections that are no longer equally large; such a model is written under the module's own
    names, which load as well.
    """
    alone = format == "transformers"
    config = plain.config_of_cut(model, bound) if alone else None
    description = {} if alone else remote_code.description_of_cut(model, bound)
    example = proof.example_for(model, example)
    failure: VerificationFailed | None = None
    for original_names in (True, False):
        kind, body = (type(model), None) if alone else remote_code.write_code(model, place)
        config = config if alone else remote_code.config_of_cut(model, description)
        try:
            proof.written_and_proven(
                kind, config, model, place, max_shard_size, original_names, example
            )
            if body is not None:
                proof.same_tensors(body, model.base_model, place)
        except VerificationFailed as error:
            failure = failure or error
            for path in place.iterdir():
                path.unlink() if path.is_file() else shutil.rmtree(path)
            continue
        return
    assert failure is not None
    raise failure


def _loading(model: nn.Module, format: Format, folder: Path) -> str:
    kind = type(model).__name__
    names = remote_code.auto_classes(model) if format == "remote-code" else []
    more = "" if fresh(model) is not None else f", model={kind}(...)"
    auto = next((n for n in names if n not in ("AutoModelForPreTraining",)), kind)
    return card.LOADING[format].format(kind=kind, auto=auto, folder=folder.name, more=more)
