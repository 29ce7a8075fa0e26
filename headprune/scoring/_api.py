"""``score``: importance of every head of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from headprune.attention.sharded import check_whole
from headprune.core.coverage import coverage_note
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.core.samples import Curvature, Samples
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.core.version import __version__
from headprune.model.fingerprint import fingerprint, weights_digest
from headprune.model.losses import Loss, default_loss
from headprune.model.offloaded import check_in_memory
from headprune.model.processes import Processes, Workers
from headprune.model.running import device_of, nested_tensors, packing, undisturbed
from headprune.model.sites import BoundSite, bind, not_taken, unwrap
from headprune.scoring import registry
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.scoring._resume_cache import opened
from headprune.scoring._stopping import Stable, read_until

_LOAD = "Load the model into memory, or with a device_map and without preload_module_classes."


@overload
def score(
    model: nn.Module,
    batches: Iterable[Any] | None = ...,
    scorer: str | Scorer = ...,
    *,
    loss: Loss | None = ...,
    sites: Iterable[AttentionSite] | None = ...,
    until: Stable | None = ...,
    processes: Processes | None = ...,
    folder: str | Path | None = ...,
    progress: bool | None = ...,
) -> HeadScores: ...


@overload
def score(
    model: nn.Module,
    batches: Iterable[Any] | None,
    scorer: list[str | Scorer] | tuple[str | Scorer, ...],
    *,
    loss: Loss | None = ...,
    sites: Iterable[AttentionSite] | None = ...,
    until: Stable | None = ...,
    processes: Processes | None = ...,
    folder: str | Path | None = ...,
    progress: bool | None = ...,
) -> tuple[HeadScores, ...]: ...


def score(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    scorer: str | Scorer | list[str | Scorer] | tuple[str | Scorer, ...] = "taylor",
    *,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    until: Stable | None = None,
    processes: Processes | None = None,
    folder: str | Path | None = None,
    progress: bool | None = None,
) -> HeadScores | tuple[HeadScores, ...]:
    """Measures how important each head is; the model is left exactly as it was.

    Scores do not depend on the batch size or on padding: each example has its own loss and its own
    gates.

    Args:
        model: A model with known attention; run in evaluation mode. A compiled model is run
            uncompiled.
        batches: Any iterable of what the model takes, with labels where the scorer needs a loss.
            Scorers without data take None, but then the scores cannot say what the units cost.
        scorer: A registered name, a configured scorer, or several of them; several share their
            passes over the data. The default is the cheapest that reads the loss, and works for
            any loss; ``"auto"`` tries several on held-out rows, for one budget and refit.
        loss: ``(model, batch) -> Tensor[batch]``; the default covers the usual Transformers heads.
        sites: Default ``find_sites(model)``.
        until: ``hp.Stable(k=...)`` stops reading batches when the set of the k lowest is settled;
            the notes of the scores say after how many examples. The batches must come in random
            order.
        processes: ``hp.Processes()`` shares the batches among the processes of
            ``torch.distributed``; every process makes this call, with the same whole batches, and
            gets the scores of one process. None shares nothing.
        folder: A folder for this call alone. What the batches gave is kept there now and then, up
            to 4 GiB, and the same call, with the same batches in the same order, goes on after it
            if it was killed, to the same scores. Of a loss its name and what it makes of the first
            examples are compared; one that draws random numbers draws others. What is not kept
            begins anew: ``ggn``, the pool of ``resample``, the cuts and refits of ``auto``, and
            scorers of your own that iterate ``problem.passes``. The folder stays until you take it
            away.
        progress: Show a progress bar; None shows it on a terminal.

    Returns:
        HeadScores, or a tuple of them if several scorers were asked for; with the per-example
        numbers of scorers that have them (``scores.samples``), and with the curvature of ``fisher``
        and ``ggn`` (``scores.curvature``).

    Raises:
        UnknownName: no such scorer.
        InvalidValue: no data, no labels, a loss that is not finite (the message names the batch);
            batches that can be read only once for a scorer that reads them again; slopes of the
            loss that are zero but for rounding, for a scorer that goes by them.
        UnsupportedModel: no known attention in the model, or weights that are neither in memory nor
            offloaded by accelerate, module by module.
        ProcessFailed: another process failed, is gone, or did not answer in time.
        NotWritten: there is no room in the folder, or no right to write there.

    >>> import torch
    >>> from headprune import MultiHeadAttention
    >>> model = torch.nn.Sequential(MultiHeadAttention(8, 2))
    >>> scores = score(
    ...     model, [torch.randn(4, 5, 8)] * 2, loss=lambda m, x: m(x).square().mean((1, 2))
    ... )
    >>> scores.n_examples, len(scores.values[0])
    (8, 2)
    """
    wanted = [scorer] if isinstance(scorer, (str, Scorer)) else list(scorer)
    named = [registry.resolve(s, Scorer, "score(scorer=)") for s in wanted]
    scorers = [s for _, s in named]
    if not scorers:
        raise InvalidValue("scorer", "a scorer or several", "an empty list")
    if not isinstance(until, Stable | None):
        raise InvalidValue("score(until=)", "hp.Stable(k=...)", type(until).__name__)
    if not isinstance(processes, Processes | None):
        raise InvalidValue("score(processes=)", "hp.Processes(...)", type(processes).__name__)
    if isinstance(batches, (Mapping, Tensor, str)):
        hint = "Wrap a single batch in a list: [batch]."
        raise InvalidValue(
            "batches", "an iterable of batches", f"a single {type(batches).__name__}", hint
        )
    model = unwrap(model)
    bound = bind(model, sites)
    if not any(b.site.heads for b in bound):
        raise UnsupportedModel("the model", "one with a head left", "no head at any site")
    check_in_memory(model, _LOAD, known=True)
    mark = fingerprint(model, [b.site for b in bound])
    beyond = not_taken(model, [b.site for b in bound] if sites is None else sites)
    packs = packing(model)
    with (
        nullcontext(Workers()) if processes is None else processes.together() as workers,
        undisturbed(model),
    ):
        if workers.size > 1:
            check_whole(
                model, "one whose weights are whole in every process, where they share batches"
            )
            whole_mark = f"{mark.structure} {weights_digest(model)}"
            _check_alike(
                workers, whole_mark, batches, [(name, s.settings) for name, s in named], until
            )
        problem = ScoringProblem(
            model, bound, batches, loss or default_loss, progress, workers=workers
        )
        problem.shared["scorers"] = tuple(scorers)  # those that read the same gather it in one pass
        if until is None and sum(s.needs_data for s in scorers) > 1:
            problem.keep()
        with problem.explained():
            problem.measure()
            problem.judge(any(s.needs_data and s.reads_loss for s in scorers))
        known = (*problem.notes, *_zeros_in_padding(problem, packs))
        own = _own_folder(folder, workers)
        call = _call(model, named, until, loss, mark, bound) if own else {}
        with (
            problem.explained(),
            opened(own, call, problem.seen() if own else [], _close(model)) as problem.shelf,
        ):
            estimates = (
                read_until(problem, named, until)
                if until
                else [s.estimate(problem) for s in scorers]
            )
    results = tuple(
        HeadScores(
            sites=tuple(b.site for b in bound),
            values=_by_site(bound, e.values),
            standard_errors=(
                None if e.standard_errors is None else _by_site(bound, e.standard_errors)
            ),
            scorer=e.choice.best.scorer if e.choice else name,
            settings=(
                registry.get(e.choice.best.scorer)(**e.choice.best.settings).settings
                if e.choice
                else s.settings
            ),
            n_examples=e.n_examples,
            model=mark,
            data=problem.data if s.needs_data else None,
            seed=e.seed,
            costs=problem.costs,
            samples=None if e.samples is None else Samples.of(e.samples.detach().cpu().numpy()),
            notes=(*(known if s.needs_data else ()), *_notes(s, e), *coverage_note(beyond)),
            curvature=(
                None if e.curvature is None else Curvature.of(e.curvature.detach().cpu().numpy())
            ),
            choice=e.choice,
        )
        for (name, s), e in zip(named, estimates, strict=True)
    )
    return results[0] if isinstance(scorer, (str, Scorer)) else results


def _own_folder(folder: str | Path | None, workers: Workers) -> Path | None:
    """Where this process keeps what its batches give."""
    if not isinstance(folder, str | Path | None) or folder == "":
        raise InvalidValue("score(folder=)", "a folder's path", repr(folder))
    where = "" if folder is None else str(Path(folder).absolute())
    workers.agree(
        "score(folder=)",
        "the same in every process",
        where,
        "Give all of them a folder that they share.",
    )
    return None if folder is None else Path(folder) / f"{workers.rank}-of-{workers.size}"


def _call(
    model: nn.Module,
    named: list[tuple[str, Scorer]],
    until: Stable | None,
    loss: Loss | None,
    mark: ModelFingerprint,
    bound: list[BoundSite],
) -> dict[str, str]:
    """What tells a call from others, but for its batches."""
    device = device_of(bound[0].module)
    autocast = (
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else "off"
    )
    kernels = getattr(getattr(model, "config", None), "_attn_implementation", None)
    versions = [
        f"headprune {__version__}",
        *(f"{name} {version(name)}" for name in ("torch", "transformers")),
    ]
    return {
        "scorers": repr([(name, scorer.settings) for name, scorer in named]),
        "until": repr(until),
        "the loss": _name(loss),
        "the model": f"{mark.structure} {mark.weights}",
        "sites": repr([(b.site.name, b.site.heads, b.site.units) for b in bound]),
        "device": f"{device}, autocast {autocast}, attention {kernels}",
        "versions": ", ".join(versions),
    }


def _name(function: Any) -> str:
    """What a function is called, with what it was given before."""
    if isinstance(function, partial):
        return f"{_name(function.func)} of {function.args!r}, {function.keywords!r}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{name}"


def _close(model: nn.Module) -> float:
    """How far losses of one call may be apart, relative: threads add in another order."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(1e-5, *(4 * torch.finfo(kind).eps for kind in kinds))


def _check_alike(workers: Workers, mark: str, batches: Any, *asked: Any) -> None:
    """Refuses processes that do not all do the same, and loaders that deal out the data, which the
    processes do."""
    sampler, by_batch, rows = (
        getattr(batches, name, None) for name in ("sampler", "batch_sampler", "dataset")
    )
    parts = [
        getattr(sampler, "num_replicas", 1),
        *(getattr(x, "num_processes", 1) for x in (by_batch, rows)),
    ]
    if max(parts) > 1 or type(batches).__name__ == "DataLoaderDispatcher":
        must = "the same, whole ones in every process, which share them themselves"
        hint = (
            "Give the loader without a DistributedSampler, and as it was before"
            " accelerator.prepare()."
        )
        raise InvalidValue("batches", must, f"a {type(batches).__name__} that deals them out", hint)
    workers.agree(
        "score()", "called with the same scorers and until= in every process", repr(asked)
    )
    hint = (
        "Load the same checkpoint everywhere, and seed what is drawn when a model gets a new head."
    )
    workers.agree("the model", "the same in every process, to the last weight", mark, hint)


def _by_site(bound: list[Any], flat: Tensor) -> tuple[tuple[float, ...], ...]:
    sizes = [len(b.site.units) for b in bound]
    return tuple(tuple(map(float, row)) for row in flat.split(sizes))


def _notes(scorer: Scorer, estimate: Estimate) -> tuple[str, ...]:
    """The scorer's notes, and what it may have left to us: why there is no standard error."""
    if (
        scorer.needs_data
        and estimate.n_examples == 1
        and not any("tandard error" in n for n in estimate.notes)
    ):
        return (*estimate.notes, "No standard error: the scores rest on a single example.")
    return estimate.notes


def _zeros_in_padding(problem: ScoringProblem, packs: list[nn.Module]) -> tuple[str, ...]:
    """What there is to say of encoders that, packing padded batches, put zeros where the padding
    was."""
    if not packs:
        return ()
    judged = torch.tensor(problem.seen())
    with nested_tensors(packs, made=True):
        packed = torch.tensor(problem.seen())
    if judged.shape == packed.shape and torch.allclose(
        judged, packed, rtol=1e-3, atol=1e-4, equal_nan=True
    ):
        return ()
    said = (
        "In evaluation and without gradients PyTorch's encoder puts zeros at padding, and the model"
        " reads them"
    )
    advice = (
        "Leave padding out of what follows the encoder, or build it with"
        " enable_nested_tensor=False."
    )
    return (f"{said}: its losses are others then than those that were judged here. {advice}",)
