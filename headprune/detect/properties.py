"""Name the property for which an attention module is refused.

Each property has one name, which every refusal quotes and docs/refusals.md lists. What one run of
the uncut model shows is checked first (``trace.py``), then why the best of the failed guesses
failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from headprune.attention.linear import feature_count
from headprune.core.errors import HeadPruneError, UnsupportedModel
from headprune.detect.prove import Scratch, mask_without_first
from headprune.detect.reach import Influence, influences_all, latent_projection
from headprune.detect.trace import AttentionCore, Projection, attention_cores
from headprune.model.cut import cut_
from headprune.model.sites import Sites, bind

#: Name of a property, and what it means. docs/refusals.md is written from this table.
PROPERTIES: dict[str, str] = {
    "norm across heads": (
        "A norm over several heads stands between the attention and its output projection, so the"
        " kept heads would change when one is removed. A gate at the output projection is then not"
        " the removal of a head."
    ),
    "norm over the whole projection": (
        "Queries or keys are normalised over all heads at once, so that cutting the "
        "projection changes every head's norm."
    ),
    "talking heads": (
        "A matrix mixes the heads' scores or probabilities with each other: no head can be removed"
        " alone."
    ),
    "depends on all heads": (
        "What a head computes depends on other heads, on how many there are, or on its place among"
        " them: a softmax over heads, slopes or a scale computed from the count, code for the first"
        " heads."
    ),
    "no output projection": (
        "No projection of its own takes the heads' outputs side by side, so there is no place "
        "for gates; or one native function does everything and calls none."
    ),
    "more than one output": (
        "The heads' outputs go to a second projection too, or leave the module by another way than "
        "its output projection, so that gates at one place do not remove a head."
    ),
    "heads not side by side": (
        "The output projection's input or a projection's features are not whole heads one after"
        " another (heads share an axis with examples or tokens, are in another order, or come after"
        " the width)."
    ),
    "latent keys": (
        "One projection makes a part of every head's keys: a batch does not show what a head "
        "keeps in the cache. Registered layouts know some."
    ),
    "heads made by other modules": (
        "Queries, keys or values come from a projection outside of the module."
    ),
    "projections that are no matrices": (
        "Queries, keys, values or the output are made by a convolution, a bare tensor or another"
        " layer that is no plain floating-point matrix (parametrised, quantised and adapted ones"
        " too)."
    ),
    "head counts kept elsewhere": (
        "The module's code takes a count or a width of its heads from where no cut can change it"
        " for this module alone: a configuration that layers share, a closure, a number in the"
        " code, its input's width, a bias that arrives for all heads."
    ),
    "one head": "There is a single head; a cut would take the whole layer.",
    "shared tensors": (
        "A tensor of the attention, or one that it makes for all its heads, is used elsewhere in"
        " the model too (tied weights, a position bias that one layer computes for the others)."
    ),
    "no effect on the example": "Gates of zero change no output, so the example proves nothing.",
    "random in evaluation mode": (
        "Its outputs depend on random numbers although it is in evaluation mode (dropout that is"
        " always on). A cut changes which numbers are drawn, so outputs cannot be compared."
    ),
    "does not run in fp64": (
        "The model does not run in fp64 on the example, or gives NaN, so nothing is proven."
    ),
    "no softmax attention": (
        "No softmax of products of queries and keys was seen on the example (state spaces, "
        "Fourier, linear attention, additive scores, routers)."
    ),
    "no layout found": (
        "Nothing of the above was seen, and no layout that was tried fits or proves itself."
    ),
}


#: How many cut models are run again to explain a refusal.
_MOST_RERUNS = 8

#: Name of a property, and what was seen.
Finding = tuple[str, str]


@dataclass(frozen=True)
class Attempt:
    """A guess that failed.

    Args:
        sites: As the guess describes them.
        error: Why it failed.
        completed: Whether a cut model ran to its end.
        operations: Number of operations that ran before the error.
        module: The module whose code failed.
    """

    sites: Sites
    error: HeadPruneError
    completed: bool
    operations: int
    module: str


def why_not(
    scratch: Scratch,
    core: AttentionCore,
    influence: Influence,
    attempts: list[Attempt],
    unfit: HeadPruneError | None,
) -> Finding:
    """Name the property for which a core is refused, and what was seen.

    Args:
        scratch: The model.
        core: A core for which every guess failed.
        influence: Of the features of its projections on its heads' outputs.
        attempts: The failed guesses.
        unfit: Why the sizes of the last guess did not fit, if one did not.
    """
    module = scratch.model.get_submodule(core.name)
    for check in _CHECKS:
        finding = check(core, module)
        if finding is not None:
            return finding
    return _from_influence(core, influence) or _from_attempts(scratch, core, attempts, unfit)


# 1. What one run of the uncut model shows. Each check relies on those before it.


def _check_made_here(core: AttentionCore, module: nn.Module) -> Finding | None:
    """The module calls projections of the queries, keys and values."""
    if core.softmax.fused:
        return "no output projection", "one native function does it all"
    if _inputs(core):
        return None
    # Weights that are applied by the module's own code.
    matrices = [n for n, p in module.named_parameters(recurse=False) if p.ndim > 1]
    seen = f"they come from {', '.join(core.outside[:3]) or 'nowhere in this module'}"
    if matrices:
        seen = f"bare tensors {', '.join(matrices)}"
    if matrices and len(core.outlets) < 2:
        return "projections that are no matrices", seen
    return "heads made by other modules", seen


def _check_one_outlet(core: AttentionCore, module: nn.Module) -> Finding | None:
    """Exactly one projection takes the heads' outputs."""
    if not core.outlets:
        return "no output projection", "no projection is given the heads' outputs"
    if core.leaks or len(core.outlets) > 1:
        others = ", ".join(repr(p.path) for p in core.outlets[1:]) or "the module's own output"
        return "more than one output", f"{others} beside {core.outlets[0].path!r}"
    return None


def _check_matrices(core: AttentionCore, module: nn.Module) -> Finding | None:
    """No projection is a convolution."""
    # The only projections that are no matrices.
    convolutions = [p.path for p in (*_inputs(core), core.outlets[0]) if not p.linear]
    if convolutions:
        return "projections that are no matrices", _classes(module, convolutions)
    return None


def _check_talking(core: AttentionCore, module: nn.Module) -> Finding | None:
    """Nothing mixes the heads' scores or probabilities."""
    if not core.softmax.mixers:
        return None
    # Paths in the module.
    mixers = sorted(m.removeprefix(f"{core.name}.") for m in core.softmax.mixers)
    return "talking heads", f"scores or probabilities pass {', '.join(mixers)}"


def _check_norms(core: AttentionCore, module: nn.Module) -> Finding | None:
    """No norm spans more than one head."""
    softmax = core.softmax
    for norm in core.norms:
        name = norm.name.removeprefix(f"{core.name}.")
        # Where the width of a head is not known, no norm is refused.
        if norm.of == "context" and norm.width > (softmax.value_dim or norm.width):
            place = f"comes before {core.outlets[0].path!r}"
            return "norm across heads", f"{name!r} over {norm.width} features {place}"
        if norm.of == "scores" and norm.width > (softmax.head_dim or norm.width):
            seen = f"{name!r} spans {norm.width} features of {core.heads} heads"
            return "norm over the whole projection", seen
    return None


def _check_softmax(core: AttentionCore, module: nn.Module) -> Finding | None:
    """The softmax of several heads runs over the keys."""
    if core.heads == 1:
        return "one head", "the softmax sees one head"
    if not core.softmax.last:
        return "depends on all heads", "its softmax runs over another axis than the last"
    return None


def _check_plain(core: AttentionCore, module: nn.Module) -> Finding | None:
    """Every projection computes no more than the product with its weight."""
    odd = []
    for projection in (*_inputs(core), core.outlets[0]):
        part = module.get_submodule(projection.path)
        if not _is_plain(part):
            odd.append(projection.path)
    if odd:
        return "projections that are no matrices", _classes(module, odd)
    return None


def _check_untied(core: AttentionCore, module: nn.Module) -> Finding | None:
    """No projection has two places in the module, and none lies outside."""
    # A module that is registered twice has two paths.
    names: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        names.setdefault(id(part), []).append(path)
    for projection in (*_inputs(core), core.outlets[0]):
        tied = names[id(module.get_submodule(projection.path))]
        if len(tied) > 1:
            return "shared tensors", f"{' and '.join(map(repr, tied))} are one module"
    if core.outside:
        return "heads made by other modules", f"{', '.join(core.outside[:3])} lies outside"
    return None


_CHECKS: tuple[Callable[[AttentionCore, nn.Module], Finding | None], ...] = (
    _check_made_here,
    _check_one_outlet,
    _check_matrices,
    _check_talking,
    _check_norms,
    _check_softmax,
    _check_plain,
    _check_untied,
)


def _inputs(core: AttentionCore) -> list[Projection]:
    """Projections of the queries, keys and values that the module called."""
    wanted = {*core.query_key_paths, *core.value_paths}
    return [p for p in core.before if p.path in wanted]


def _classes(module: nn.Module, paths: list[str]) -> str:
    each = []
    for path in dict.fromkeys(paths):
        kind = type(module.get_submodule(path)).__name__
        each.append(f"{path!r} is a {kind}")
    return ", ".join(each)


def _is_plain(part: nn.Module) -> bool:
    """Whether a projection is plain, and computes no more than the product with its weight."""
    try:
        n_in = feature_count(part, "in")
    except UnsupportedModel:
        return False
    weight: Tensor = part.get_parameter("weight")
    x = torch.linspace(-1, 1, 2 * n_in, dtype=weight.dtype, device=weight.device).view(2, n_in)
    bias = part._parameters.get("bias")
    with torch.no_grad():
        # A Conv1D keeps its weight as [in, out].
        expected = x @ (weight.T if isinstance(part, nn.Linear) else weight)
        if bias is not None:
            expected = expected + bias
        return bool(torch.allclose(expected, part(x)))


# 2. What the gradients of the uncut model show.


def _from_influence(core: AttentionCore, influence: Influence) -> Finding | None:
    """Features that influence several heads, or lie in another order than the heads."""
    latent = latent_projection(core, influence)
    if latent:
        return "latent keys", f"{latent!r} makes a part of every head's keys"
    for path in (*core.value_paths, *core.query_key_paths):
        if path in influence:
            finding = _from_features(path, influence[path])
            if finding is not None:
                return finding
    return None


def _from_features(path: str, influence: Tensor) -> Finding | None:
    """What the influence of one projection's features, ``[heads, features]``, shows."""
    if not influence.any() or influences_all(influence):
        return None
    n_heads, n_features = influence.shape
    heads_per_feature = influence.sum(0)  # [features]
    if int(heads_per_feature.max()) == 1:
        wrong_order = _wrong_order(path, influence)
        if wrong_order:
            return "heads not side by side", wrong_order
    elif bool((heads_per_feature == n_heads).any()):
        seen = f"one feature of {path!r} changes all {n_heads} heads' outputs"
        return "depends on all heads", seen
    if n_features % n_heads and n_features > n_heads:
        seen = f"the {n_features} features of {path!r} do not divide into {n_heads} heads"
        return "heads not side by side", seen
    return None


def _wrong_order(path: str, influence: Tensor) -> str:
    """How features of single heads are out of order; empty where they are not."""
    n_heads = len(influence)
    head_of = [int(column.nonzero()[0]) for column in influence.T if column.any()]
    n_runs = len(list(groupby(head_of)))
    # Queries, keys and values that one projection makes are up to three runs for each head.
    if n_runs > 3 * n_heads:
        return f"features of {path!r} alternate between heads"
    if sorted(head_of) != head_of and n_runs == n_heads:
        return f"{path!r} and the output projection order the heads differently"
    return ""


# 3. What the failed guesses show.


def _from_attempts(
    scratch: Scratch, core: AttentionCore, attempts: list[Attempt], unfit: HeadPruneError | None
) -> Finding:
    """Why the guess failed that came closest to a proof."""
    if scratch.random:
        return "random in evaluation mode", "two runs with different random numbers differ"
    finding = _from_other_outputs(scratch, core, attempts)
    if finding is not None:
        return finding
    best = max(attempts, key=_progress, default=None)
    if best is None:
        return "no layout found", _unfit_sizes(core) if unfit is None else str(unfit)
    return _from_error(best) or _from_cut(scratch, core, best)


def _from_other_outputs(
    scratch: Scratch, core: AttentionCore, attempts: list[Attempt]
) -> Finding | None:
    """A cut model that computes with just the kept heads, but gives other outputs."""
    compared = [a for a in attempts if a.completed and "pruned model" in str(a.error)]
    # Each takes a cut and a run.
    for attempt in compared[:_MOST_RERUNS]:
        n_kept, n_computed = _heads_after_cut(scratch, core, attempt)
        if n_kept == n_computed:
            seen = f"cut to {n_kept} heads, it computes as many but gives other outputs"
            return "depends on all heads", seen
    return None


def _progress(attempt: Attempt) -> tuple[bool, bool, bool, int]:
    """How close a guess came to a proof, most important first."""
    # A failure in another module means that the cut modules themselves ran.
    has_counts = any(layout.counts for layout in attempt.sites.layouts.values())
    return _failed_outside(attempt), has_counts, attempt.completed, attempt.operations


def _unfit_sizes(core: AttentionCore) -> str:
    width = core.context_width if core.gate and core.gate.input_shape else "unknown"
    heads = core.heads or "unknown"
    return f"the sizes of its projections fit no packing of {heads} heads in a width of {width}"


def _from_error(attempt: Attempt) -> Finding | None:
    """The property that the error of a failed guess states."""
    text = str(attempt.error)
    # 1. By its text: messages of model/cut.py and model/refusals.py, then of detect/prove.py.
    for pattern, name in (
        ("shared with|it is shared|a projection of its own|attention alone", "shared tensors"),
        ("all its gates at zero", "no effect on the example"),
        ("two units or more", "one head"),
    ):
        if re.search(pattern, text):
            return name, text
    # 2. By its class: all else that the cut refuses is a projection that is no plain matrix.
    if isinstance(attempt.error, UnsupportedModel):
        return "projections that are no matrices", text
    # 3. Gates that fit the wrong axis, or none.
    if re.search("^gates|a gate of zero for example", text):
        return "heads not side by side", text
    return None


def _from_cut(scratch: Scratch, core: AttentionCore, attempt: Attempt) -> Finding:
    """What a model that was cut by a failed guess does."""
    if _failed_outside(attempt):
        seen = f"{attempt.module!r} takes what it makes for all heads: {attempt.error.got}"
        return "shared tensors", seen
    if not attempt.completed:
        return "head counts kept elsewhere", str(attempt.error.got)
    n_kept, n_computed = _heads_after_cut(scratch, core, attempt)
    if n_computed and n_computed != n_kept:
        seen = f"cut to {n_kept} heads, its code still makes {n_computed}"
        return "head counts kept elsewhere", seen
    return "no layout found", str(attempt.error)


def _failed_outside(attempt: Attempt) -> bool:
    """Whether the cut modules ran, and another module's code failed."""
    if attempt.completed or not attempt.module:
        return False
    inside = tuple(f"{site.name}." for site in attempt.sites)
    # "." stands for the model itself: then no code lies outside.
    return "." not in inside and not f"{attempt.module}.".startswith(inside)


def _heads_after_cut(scratch: Scratch, core: AttentionCore, attempt: Attempt) -> tuple[int, int]:
    """How many heads a cut keeps, and how many the module's code then computes."""
    mask = mask_without_first(attempt.sites)  # it ran with this one
    undo = cut_(scratch.model, bind(scratch.model, attempt.sites), mask)
    try:
        heads = [c.heads for c in attention_cores(scratch) if c.name == core.name]
    finally:
        undo.restore()
    return len(mask.kept(core.name)), heads[0] if heads else 0
