"""``score``: importance of every head of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from headprune.core.units import by_site
from headprune.core.version import __version__
from headprune.model.fingerprint import fingerprint, weights_digest
from headprune.model.losses import Loss, default_loss
from headprune.model.offloaded import check_in_memory
from headprune.model.processes import Processes, Workers
from headprune.model.refusals import check_unshared
from headprune.model.running import device_of, nested_tensors, packing, undisturbed
from headprune.model.sites import BoundSite, Sites, bind, not_taken, sites_of, unwrap
from headprune.scoring import registry
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, units_per_site
from headprune.scoring._resume_cache import ResumeCache, opened
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
    scorer: str | Scorer | list[str | Scorer] | tuple[str | Scorer, ...] = "surgeon",
    *,
    loss: Loss | None = None,
    sites: Iterable[AttentionSite] | None = None,
    until: Stable | None = None,
    processes: Processes | None = None,
    folder: str | Path | None = None,
    progress: bool | None = None,
) -> HeadScores | tuple[HeadScores, ...]:
    """Measure how important each head is, without changing the model.

    Scores do not depend on the batch size or on padding.

    Args:
        model: A model with known attention, run in evaluation mode; a compiled one runs uncompiled.
        batches: What the model takes, with labels where the scorer needs a loss. Scorers without
            data take None; the scores then lack costs.
        scorer: A registered name, a configured scorer, or several.
        loss: ``(model, batch) -> Tensor[batch]``; the default covers Transformers' task heads.
        sites: Default ``find_sites(model)``.
        until: ``hp.Stable(k=...)`` stops reading when the k lowest are settled.
        processes: ``hp.Processes()`` shares the batches among processes.
        folder: Keeps results; the same call resumes.
        progress: Show a progress bar; None shows it on a terminal.

    Returns:
        HeadScores, or a tuple of them for several scorers.

    Raises:
        UnknownName: no such scorer.
        InvalidValue: unusable data, labels or loss.
        UnsupportedModel: no known attention, or weights out of reach.
        ProcessFailed: another process failed or did not answer.
        NotWritten: the folder cannot be written.

    >>> import torch
    >>> from headprune import MultiHeadAttention
    >>> model = torch.nn.Sequential(MultiHeadAttention(8, 2))
    >>> scores = score(
    ...     model, [torch.randn(4, 5, 8)] * 2, loss=lambda m, x: m(x).square().mean((1, 2))
    ... )
    >>> scores.n_examples, len(scores.values[0])
    (8, 2)
    """
    # 1. Check what is asked for.
    is_single = isinstance(scorer, (str, Scorer))
    named = _named_scorers(scorer)
    _check_arguments(batches, until, processes)

    # 2. Bind the sites of the model.
    model = unwrap(model)
    bound = bind(model, sites)
    located = sites_of(bound)
    _check_has_heads(located)
    _check_neurons(named, located)
    check_in_memory(model, _LOAD, known=True)
    check_unshared(model, ((b, b.layout.gate) for b in bound if b.site.heads))
    mark = fingerprint(model, located)
    not_covered = not_taken(model, list(located) if sites is None else sites)
    # Found before `undisturbed`, which turns packing off.
    packs = packing(model)

    group = nullcontext(Workers()) if processes is None else processes.together()
    with group as workers, undisturbed(model):
        # 3. Check that all processes do the same.
        if workers.size > 1:
            _check_processes(workers, model, mark, batches, named, until)

        # 4. Run the first batch: what the model costs, and whether the loss is its own.
        scorers = tuple(s for _, s in named)
        problem = ScoringProblem(
            model,
            bound,
            batches,
            loss or default_loss,
            progress,
            workers=workers,
            scorers=scorers,
        )
        _run_first_batch(problem, until)
        notes = (*problem.notes, *_zeros_in_padding(problem, packs))

        # 5. Estimate; what the batches give is kept in the folder.
        own = _own_folder(folder, workers)
        call: dict[str, str] = {}
        if own is not None:
            call = _call(model, named, until, loss, mark, bound)
        with problem.explained(), _opened(problem, own, call) as problem.cache:
            estimates = _estimates(problem, named, until)

    # 6. Say what was measured, and on what.
    results = []
    for (name, s), estimate in zip(named, estimates, strict=True):
        # Scorers without data run no model, so that notes about it do not concern them.
        known = notes if s.needs_data else ()
        every = (*known, *_notes(s, estimate), *coverage_note(not_covered))
        results.append(_result(problem, mark, name, s, estimate, every))
    return results[0] if is_single else tuple(results)


def _named_scorers(
    scorer: str | Scorer | list[str | Scorer] | tuple[str | Scorer, ...],
) -> list[tuple[str, Scorer]]:
    """``(registered name, configured scorer)`` of all scorers that are asked for."""
    # A name can be iterated, too.
    wanted = [scorer] if isinstance(scorer, (str, Scorer)) else list(scorer)
    if not wanted:
        raise InvalidValue("scorer", "a scorer or several", "an empty list")
    return [registry.resolve(s, Scorer, "score(scorer=)") for s in wanted]


def _check_arguments(batches: Any, until: Any, processes: Any) -> None:
    """Refuse arguments of another type."""
    if not isinstance(until, Stable | None):
        raise InvalidValue("score(until=)", "hp.Stable(k=...)", type(until).__name__)
    if not isinstance(processes, Processes | None):
        raise InvalidValue("score(processes=)", "hp.Processes(...)", type(processes).__name__)
    # Any of these can be iterated, but not as batches.
    if isinstance(batches, (Mapping, Tensor, str)):
        got = f"a single {type(batches).__name__}"
        hint = "Wrap a single batch in a list: [batch]."
        raise InvalidValue("batches", "an iterable of batches", got, hint)


def _check_has_heads(sites: Sites) -> None:
    if not any(site.heads for site in sites):
        hint = "Earlier cuts removed every head; load the uncut model."
        raise UnsupportedModel("the model", "one with a head", "no head at any site", hint)


def _check_neurons(named: Sequence[tuple[str, Scorer]], sites: Sites) -> None:
    """Refuse scorers of attention maps where feed-forwards are among the sites."""
    for name, scorer in named:
        if not scorer.scores_neurons and any(site.is_feed_forward for site in sites):
            must = "one that scores neurons, with feed-forwards among the sites"
            hint = "It reads attention maps; score the sites of find_sites(model) with it."
            raise InvalidValue("score(scorer=)", must, repr(name), hint)


def _run_first_batch(problem: ScoringProblem, until: Stable | None) -> None:
    """Measure the model's costs, and choose the loss; keep batches that several scorers read."""
    with_data = [s for s in problem.scorers if s.needs_data]
    # With until=, all scorers read a batch before the next one comes.
    if until is None and len(with_data) > 1:
        problem.keep_batches()
    with problem.explained():
        problem.measure_costs()
        problem.choose_loss(any(s.reads_loss for s in with_data))


def _estimates(
    problem: ScoringProblem, named: list[tuple[str, Scorer]], until: Stable | None
) -> list[Estimate]:
    """The estimate of every scorer, from all batches or until they are settled."""
    if until is not None:
        return read_until(problem, named, until)
    return [scorer.estimate(problem) for _, scorer in named]


def _opened(
    problem: ScoringProblem, folder: Path | None, call: dict[str, str]
) -> AbstractContextManager[ResumeCache]:
    """The resume cache of a call, which its first losses tell from others."""
    first_losses = [] if folder is None else problem.first_losses()
    return opened(folder, call, first_losses, _tolerance(problem.model))


def _result(
    problem: ScoringProblem,
    mark: ModelFingerprint,
    name: str,
    scorer: Scorer,
    e: Estimate,
    notes: tuple[str, ...],
) -> HeadScores:
    """The scores of one scorer.

    Args:
        problem: The problem, after all passes.
        mark: The model's fingerprint.
        name: The scorer's registered name.
        scorer: The scorer.
        e: Its estimate.
        notes: All notes, those of the estimate too.
    """
    settings = scorer.settings
    if e.choice is not None:
        # `auto` gives the scores of the scorer that it chose.
        name = e.choice.best.scorer
        settings = registry.get(name)(**e.choice.best.settings).settings
    sizes = units_per_site(problem.bound)
    # Plain numbers of tensors: HeadScores knows no torch.
    standard_errors = samples = curvature = None
    if e.standard_errors is not None:
        standard_errors = by_site(e.standard_errors.tolist(), sizes)
    if e.samples is not None:
        samples = Samples.of(e.samples.detach().cpu().numpy())
    if e.curvature is not None:
        curvature = Curvature.of(e.curvature.detach().cpu().numpy())
    return HeadScores(
        sites=tuple(sites_of(problem.bound)),
        values=by_site(e.values.tolist(), sizes),
        standard_errors=standard_errors,
        scorer=name,
        settings=settings,
        n_examples=e.n_examples,
        model=mark,
        data=problem.data if scorer.needs_data else None,
        seed=e.seed,
        costs=problem.costs,
        samples=samples,
        notes=notes,
        curvature=curvature,
        choice=e.choice,
        ladders=e.ladders,
        bundling=e.bundling,
    )


def _own_folder(folder: str | Path | None, workers: Workers) -> Path | None:
    """Where this process keeps what its batches give; None where the call has no folder."""
    if not isinstance(folder, str | Path | None) or folder == "":
        raise InvalidValue("score(folder=)", "a folder's path", repr(folder))
    # All processes must ask, also those without a folder: agreeing is an exchange.
    where = "" if folder is None else str(Path(folder).absolute())
    hint = "Give all of them a folder that they share."
    workers.agree("score(folder=)", "the same in every process", where, hint)
    if folder is None:
        return None
    # Processes have other batches each, so that another number of them starts over.
    return Path(folder) / f"{workers.rank}-of-{workers.size}"


def _call(
    model: nn.Module,
    named: list[tuple[str, Scorer]],
    until: Stable | None,
    loss: Loss | None,
    mark: ModelFingerprint,
    bound: list[BoundSite],
) -> dict[str, str]:
    """What tells a call from others, but for its batches; keys and values are those of a file."""
    # Device, autocast and kernels change the rounding of what the batches give.
    device = device_of(bound[0].module)
    autocast: Any = "off"
    if torch.is_autocast_enabled(device.type):
        autocast = torch.get_autocast_dtype(device.type)
    kernels = getattr(getattr(model, "config", None), "_attn_implementation", None)
    versions = [
        f"headprune {__version__}",
        f"torch {version('torch')}",
        f"transformers {version('transformers')}",
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
    """A function's qualified name; of a partial one with its arguments."""
    if isinstance(function, partial):
        return f"{_name(function.func)} of {function.args!r}, {function.keywords!r}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{name}"


def _tolerance(model: nn.Module) -> float:
    """Largest relative difference between losses of one call: threads add in any order."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(1e-5, *(4 * torch.finfo(kind).eps for kind in kinds))


def _check_processes(
    workers: Workers,
    model: nn.Module,
    mark: ModelFingerprint,
    batches: Any,
    named: list[tuple[str, Scorer]],
    until: Stable | None,
) -> None:
    """Refuse processes that do not all do the same, and models whose weights are divided."""
    check_whole(model, "one whose weights are whole in every process, where they share batches")
    weights = f"{mark.structure} {weights_digest(model)}"
    _check_alike(workers, weights, batches, [(name, s.settings) for name, s in named], until)


def _check_alike(workers: Workers, mark: str, batches: Any, *asked: Any) -> None:
    """Refuse processes that differ, and loaders that deal out the data among the processes."""
    # Attributes of loaders that give each process other batches.
    n_shares = max(
        getattr(getattr(batches, "sampler", None), "num_replicas", 1),
        # What accelerator.prepare() made.
        getattr(getattr(batches, "batch_sampler", None), "num_processes", 1),
        getattr(getattr(batches, "dataset", None), "num_processes", 1),
    )
    kind = type(batches).__name__
    if n_shares > 1 or kind == "DataLoaderDispatcher":
        must = "the same full set in every process: headprune shares the batches itself"
        hint = (
            "Give the plain DataLoader: without a DistributedSampler, and from before"
            " accelerator.prepare()."
        )
        raise InvalidValue("batches", must, f"a {kind} that gives each process a part", hint)
    must = "called with the same scorers and until= in every process"
    workers.agree("score()", must, repr(asked))
    hint = "Load the same checkpoint everywhere, and set one seed before a new task head is drawn."
    workers.agree("the model", "the same in every process, to the last weight", mark, hint)


def _notes(scorer: Scorer, estimate: Estimate) -> tuple[str, ...]:
    """The scorer's notes; also why there is no standard error, if it does not say so."""
    if not scorer.needs_data or estimate.n_examples != 1:
        return estimate.notes
    # With a capital or a small letter.
    if any("tandard error" in note for note in estimate.notes):
        return estimate.notes
    return (*estimate.notes, "No standard error: the scores rest on a single example.")


def _zeros_in_padding(problem: ScoringProblem, packs: list[nn.Module]) -> tuple[str, ...]:
    """A note where encoders that pack padded batches put zeros at padding, and losses show it."""
    if not packs:
        return ()
    # Losses of the first batch, as they are judged here and as the model's users get them.
    judged = torch.tensor(problem.first_losses())
    with nested_tensors(packs, made=True):
        packed = torch.tensor(problem.first_losses())
    if judged.shape == packed.shape:
        close = torch.allclose(judged, packed, rtol=1e-3, atol=1e-4, equal_nan=True)
        if close:
            return ()
    cause = (
        "In evaluation and without gradients PyTorch's encoder puts zeros at padding, and the model"
        " reads them"
    )
    advice = (
        "Leave padding out of what follows the encoder, or build it with"
        " enable_nested_tensor=False."
    )
    return (f"{cause}: its losses then differ from those that were scored here. {advice}",)
