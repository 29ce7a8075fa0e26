"""The properties for which an attention is refused: one name each, quoted by every refusal and
listed in the docs.

What can be seen in one run is asked first (``trace.py``), then what the furthest of the guesses
that failed came to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from headprune.attention.linear import feature_count
from headprune.core.errors import HeadPruneError, UnsupportedModel
from headprune.detect.prove import Scratch, first_gone
from headprune.detect.reach import Reach, latent, of_all
from headprune.detect.trace import Core, cores
from headprune.model.cut import cut_
from headprune.model.sites import Sites, bind

#: Name of a property, and what it means. docs/refusals.md is written from this table.
PROPERTIES: dict[str, str] = {
    "norm across heads": (
        "A norm over several heads stands between the attention and its output projection, so the"
        " heads that stay would change when one leaves. A gate at the output projection is then not"
        " the removal of a head."
    ),
    "norm over the whole projection": (
        "Queries or keys are normalised over all heads at once, so that cutting the "
        "projection changes every head's norm."
    ),
    "talking heads": (
        "A matrix mixes the heads' scores or probabilities with each other: no head can leave"
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
        "The heads' outputs go to a second projection too, or leave the module beside its output "
        "projection, so that gates at one place do not remove a head."
    ),
    "heads not side by side": (
        "The output projection's input or a projection's features are not whole heads one after"
        " another (examples or tokens on one axis with others, heads in another order, a width that"
        " runs first)."
    ),
    "latent keys": (
        "One projection makes a part of every head's keys: a batch does not tell what a head "
        "then leaves in the cache. Registered layouts know some."
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
        "Its outputs depend on random numbers although it is in evaluation mode (dropout that "
        "never ends), and another number of heads draws others."
    ),
    "does not run in fp64": (
        "The model does not run in fp64 on the example, or not twice alike, so nothing is proven."
    ),
    "no softmax attention": (
        "No softmax of products of queries and keys was seen on the example (state spaces, "
        "Fourier, linear attention, additive scores, routers)."
    ),
    "no layout found": (
        "Nothing of the above was seen, and no layout that was tried fits or proves itself."
    ),
}


#: How many cut models are looked at.
_LOOKED_AT = 8


@dataclass(frozen=True)
class Attempt:
    """A guess that failed: its sites, the error, and how many operations its cut model ran before
    that.

    Args:
        sites: As the guess describes them.
        error: Why it failed.
        ran: Whether the cut model ran to its end.
        steps: Operations that it ran.
        where: The module whose code failed.
    """

    sites: Sites
    error: HeadPruneError
    ran: bool
    steps: int
    where: str


def why_not(
    scratch: Scratch,
    core: Core,
    reached: Reach,
    attempts: list[Attempt],
    unfit: HeadPruneError | None,
) -> tuple[str, str]:
    """The property for which a core is refused, and what was seen; after all guesses failed."""
    module = scratch.model.get_submodule(core.name)
    return _seen(core, module, reached) or _of_failure(scratch, core, attempts, unfit)


def _seen(core: Core, module: nn.Module, reached: Reach) -> tuple[str, str] | None:
    """What one run of the uncut model shows."""
    softmax = core.softmax
    if softmax.fused:
        return "no output projection", "one native function does it all"
    made = [p for p in core.before if p.path in (*core.scoring, *core.valued)]
    if not made:
        bare = [n for n, p in module.named_parameters(recurse=False) if p.ndim > 1]
        name = (
            "projections that are no matrices"
            if bare and not core.outlets[1:]
            else "heads made by other modules"
        )
        where = ", ".join(core.elsewhere[:3]) or "nowhere in this module"
        return name, f"bare tensors {', '.join(bare)}" if bare else f"they come from {where}"
    if not core.outlets:
        return "no output projection", "no projection is given the heads' outputs"
    if core.leaks or len(core.outlets) > 1:
        others = ", ".join(repr(p.path) for p in core.outlets[1:]) or "the module's own output"
        return "more than one output", f"{others} beside {core.outlets[0].path!r}"
    curved = [p.path for p in (*made, core.outlets[0]) if not p.linear]
    if curved:
        return "projections that are no matrices", _kinds(module, curved)
    gate, n_heads = core.outlets[0], core.heads
    if softmax.mixers:
        mixers = sorted(m.removeprefix(f"{core.name}.") for m in softmax.mixers)
        return "talking heads", f"scores or probabilities pass {', '.join(mixers)}"
    for name, width, what in core.norms:
        where = name.removeprefix(f"{core.name}.")
        if what == "context" and width > (softmax.width or width):
            return (
                "norm across heads",
                f"{where!r} over {width} features comes before {gate.path!r}",
            )
        if what == "scores" and softmax.head_dim is not None and width > softmax.head_dim:
            return (
                "norm over the whole projection",
                f"{where!r} spans {width} features of {n_heads} heads",
            )
    if n_heads == 1:
        return "one head", "the softmax sees one head"
    if not softmax.last:
        return "depends on all heads", "its softmax runs over another axis than the last"
    odd = [p.path for p in (*made, gate) if not _plain(module.get_submodule(p.path))]
    if odd:
        return "projections that are no matrices", _kinds(module, odd)
    names: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        names.setdefault(id(part), []).append(path)
    tied = next(
        (n for p in (*made, gate) if len(n := names[id(module.get_submodule(p.path))]) > 1), None
    )
    if tied:
        return "shared tensors", f"{' and '.join(map(repr, tied))} are one module"
    if core.elsewhere:
        return "heads made by other modules", f"{', '.join(core.elsewhere[:3])} lies outside"
    return _of_reach(core, reached)


def _of_reach(core: Core, reached: Reach) -> tuple[str, str] | None:
    """What the features of the projections tell: those of a value that reach several heads, those
    out of order."""
    shared = latent(core, reached)
    if shared:
        return "latent keys", f"{shared!r} makes a part of every head's keys"
    for path in (*core.valued, *core.scoring):
        reaching = reached.get(path)
        if reaching is None or not reaching.any() or of_all(reaching):
            continue
        n_heads, features = reaching.shape
        per_feature = reaching.sum(0)
        if int(per_feature.max()) == 1:
            head_of = [int(column.nonzero()[0]) for column in reaching.T if column.any()]
            runs = 1 + sum(a != b for a, b in pairwise(head_of))
            if runs > 3 * n_heads:
                return "heads not side by side", f"features of {path!r} alternate between heads"
            if sorted(head_of) != head_of and runs == n_heads:
                return (
                    "heads not side by side",
                    f"{path!r} and the output projection order the heads differently",
                )
        elif bool((per_feature[per_feature > 0] == n_heads).any()):
            return (
                "depends on all heads",
                f"one feature of {path!r} changes all {n_heads} heads' outputs",
            )
        if features % n_heads and features > n_heads:
            return (
                "heads not side by side",
                f"the {features} features of {path!r} are no {n_heads} heads",
            )
    return None


def _of_failure(
    scratch: Scratch, core: Core, attempts: list[Attempt], unfit: HeadPruneError | None
) -> tuple[str, str]:
    """What the guess came to that got furthest: of those whose counts follow the cut, the one that
    ran longest."""
    if scratch.random:
        return "random in evaluation mode", "two runs with different random numbers differ"
    for attempt in [a for a in attempts if a.ran and re.search("pruned model", str(a.error))][
        :_LOOKED_AT
    ]:
        kept, now = _heads_after(scratch, core, attempt)
        if kept == now:
            return (
                "depends on all heads",
                f"cut to {kept} heads, each in its place, they compute other numbers",
            )

    def far(a: Attempt) -> tuple[bool, bool, bool, int]:
        return (
            _outside(a),
            any(layout.counts for layout in a.sites.layouts.values()),
            a.ran,
            a.steps,
        )

    best = max(attempts, key=far, default=None)
    if best is None:
        width = core.gate.given[-1] if core.gate and core.gate.given else "unknown"
        heads = core.heads or "unknown"
        sizes = (
            f"the sizes of its projections fit no packing of {heads} heads in a width of {width}"
        )
        return "no layout found", sizes if unfit is None else str(unfit)
    text = str(best.error)
    for pattern, name in (
        ("shared|cut in one way|of its own|alone", "shared tensors"),
        ("no effect", "no effect on the example"),
        ("a unit to remove", "one head"),
    ):
        if re.search(pattern, text):
            return name, text
    if isinstance(best.error, UnsupportedModel):
        return "projections that are no matrices", text
    if re.search("^gates|gates of example|a gate an example", text):
        return "heads not side by side", text
    if _outside(best):
        return (
            "shared tensors",
            f"{best.where!r} takes what it makes for all heads: {best.error.got}",
        )
    if not best.ran:
        return "head counts kept elsewhere", str(best.error.got)
    kept, now = _heads_after(scratch, core, best)
    if now and now != kept:
        return "head counts kept elsewhere", f"cut to {kept} heads, its code still makes {now}"
    return "no layout found", text


def _outside(attempt: Attempt) -> bool:
    """Whether the cut modules ran, and another module's code failed."""
    own = tuple(f"{s.name}." for s in attempt.sites)
    return (
        not attempt.ran
        and bool(attempt.where)
        and "." not in own
        and not f"{attempt.where}.".startswith(own)
    )


def _heads_after(scratch: Scratch, core: Core, best: Attempt) -> tuple[int, int]:
    """How many heads a cut leaves, and how many its code then makes of them."""
    mask = first_gone(best.sites)  # it ran with it
    undo = cut_(scratch.model, bind(scratch.model, best.sites), mask)
    try:
        now = next((c.heads for c in cores(scratch) if c.name == core.name), 0)
    finally:
        undo.restore()
    return len(mask.kept(core.name)), now


def _kinds(module: nn.Module, paths: list[str]) -> str:
    return ", ".join(
        f"{path!r} is a {type(module.get_submodule(path)).__name__}"
        for path in dict.fromkeys(paths)
    )


def _plain(part: nn.Module) -> bool:
    """Whether a projection is plain, and computes no more than the product with its weight."""
    try:
        n_in = feature_count(part, "in")
    except UnsupportedModel:
        return False
    weight: Tensor = part.get_parameter("weight")
    x = torch.linspace(-1, 1, 2 * n_in, dtype=weight.dtype, device=weight.device).view(2, n_in)
    bias = part._parameters.get("bias")
    with torch.no_grad():
        made = x @ (weight.T if isinstance(part, nn.Linear) else weight) + (
            0 if bias is None else bias
        )
        return bool(torch.allclose(made, part(x)))
