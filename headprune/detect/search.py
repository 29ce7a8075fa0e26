"""The search for one layout: guesses for the modules of one build, tried one after another until
one proves itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from headprune.core.errors import HeadPruneError, UnsupportedModel, VerificationFailed
from headprune.core.heads import AttentionSite, Policy
from headprune.core.layout import AttentionLayout
from headprune.core.mixin import original_class
from headprune.detect.guess import guesses, head_counts, kind_of, numbers
from headprune.detect.properties import Attempt, why_not
from headprune.detect.prove import ROUNDING, Scratch, cut_difference, first_gone, prove
from headprune.detect.reach import Reach, latent, reach
from headprune.detect.trace import Core
from headprune.model.running import batch_size
from headprune.model.sites import Sites, geometry, lookup, reason_against

#: How many guesses a number of heads is worth; each costs a forward pass or two.
_GUESSES = 150


@dataclass(frozen=True)
class Refusal:
    """Attention modules of one build for which no layout could be proven.

    Args:
        modules: Their qualified names.
        kind: Their class.
        property: Why, one of ``surgery.properties.PROPERTIES``.
        reason: What was seen.
    """

    modules: tuple[str, ...]
    kind: str
    property: str
    reason: str

    def __str__(self) -> str:
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return (
            f"{self.modules[0] or 'the model itself'}{more} ({self.kind}): {self.property}:"
            f" {self.reason}"
        )


def build(scratch: Scratch, core: Core) -> Any:
    """What modules of one build have in common: class, parameters and their shapes."""
    module = scratch.model.get_submodule(core.name)
    return original_class(module), tuple((n, tuple(p.shape)) for n, p in module.named_parameters())


def search(scratch: Scratch, group: list[Core]) -> tuple[AttentionLayout, float] | Refusal:
    """The first guess that proves itself on all modules of one build, with the difference; or why
    there is none."""
    first, names = group[0], [c.name for c in group]
    module, n_examples = scratch.model.get_submodule(first.name), batch_size(scratch.example)
    attempts: list[Attempt] = []
    reached: Reach = {}
    unfit: HeadPruneError | None = None
    gate = first.gate if len(first.outlets) == 1 and not first.leaks else None
    for n_query in [n for n in head_counts(first, n_examples) if n > 1] if gate else []:
        assert gate is not None
        reached = reach(scratch, first, n_query)
        if latent(first, reached):
            break
        for guess in islice(guesses(module, first, gate, n_query, reached, n_examples), _GUESSES):
            try:
                sites = sites_by(scratch.model, guess, names)
            except HeadPruneError as error:  # the sizes do not fit
                unfit = error
                continue
            answer = _tried(scratch, sites)
            if isinstance(answer, float):
                return _with_policies(scratch, guess, sites), answer
            attempts.append(answer)
    kind = original_class(module).__name__
    return Refusal(tuple(names), kind, *why_not(scratch, first, reached, attempts, unfit))


class _Steps(TorchFunctionMode):
    """Counts operations."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _tried(scratch: Scratch, sites: Sites) -> float | Attempt:
    """The difference of sites that prove themselves, or how they failed."""
    ran = False
    with _Steps() as steps:
        try:
            difference = cut_difference(scratch, sites, first_gone(sites))
            ran = True
            if not difference <= ROUNDING:
                raise VerificationFailed(
                    "the pruned model", "equal to the gated one", "other outputs"
                )
            return prove(scratch, sites)
        except HeadPruneError as error:
            return Attempt(sites, error, ran, steps.count, _place(scratch, error.__cause__))


def _place(scratch: Scratch, error: BaseException | None) -> str:
    """The innermost module whose code was running when an error was raised."""
    names = {id(module): name for name, module in scratch.model.named_modules()}
    found, step = "", error.__traceback__ if error is not None else None
    while step is not None:
        found = names.get(id(step.tb_frame.f_locals.get("self")), found)
        step = step.tb_next
    return found


def told_apart(
    scratch: Scratch,
    answer: tuple[AttentionLayout, float],
    group: list[Core],
    groups: list[list[Core]],
) -> tuple[AttentionLayout, float] | Refusal:
    """The same layout, bound to an attribute's value where modules of the same sizes have other
    heads."""
    layout, difference = answer
    assert isinstance(layout.head_dim, int)

    def values(cores_alike: list[Core]) -> list[dict[str, int]]:
        return [numbers(scratch.model.get_submodule(c.name)) for c in cores_alike]

    names = {c.name for c in group}
    rivals = [
        g
        for g in groups
        if names.isdisjoint(c.name for c in g) and build(scratch, g[0]) == build(scratch, group[0])
    ]
    if not rivals:
        return answer
    own, others = values(group), [v for g in rivals for v in values(g)]
    for path, value in own[0].items():
        if all(v.get(path) == value for v in own) and all(v.get(path) != value for v in others):
            return replace(layout, head_dim=WidthWhere(path, value, layout.head_dim)), difference
    seen = " and ".join(str(g[0].heads) for g in (group, *rivals))
    reason = f"modules of the same sizes have {seen} heads, and no attribute tells which"
    kind = original_class(scratch.model.get_submodule(group[0].name)).__name__
    return Refusal(tuple(c.name for c in group), kind, "head counts kept elsewhere", reason)


@dataclass(frozen=True)
class WidthWhere:
    """``AttentionLayout.head_dim`` of modules whose attribute ``path`` has a value, and of no
    others."""

    path: str
    value: int
    width: int

    def __call__(self, module: Any) -> int:
        found = lookup(module, self.path)
        if found != self.value:
            raise UnsupportedModel(
                f"{type(module).__name__}.{self.path}", f"{self.value} for this layout", found
            )
        return self.width


def _with_policies(scratch: Scratch, layout: AttentionLayout, sites: Sites) -> AttentionLayout:
    """The layout with those policies of shared key/value heads that are proven too."""
    if layout.policies == ("group",) or all(s.policy == "balanced" for s in sites):
        return layout
    try:
        prove(scratch, sites_by(scratch.model, layout, [s.name for s in sites], "balanced"))
    except VerificationFailed:
        return replace(layout, policies=("group",))
    return layout


def sites_by(
    model: nn.Module, layout: AttentionLayout, names: Iterable[str], policy: Policy = "group"
) -> Sites:
    """The sites at these modules, of this layout and no other.

    Raises:
        UnsupportedModel: a module that it does not fit.
    """
    sites = []
    for name in names:
        module = model.get_submodule(name)
        against = reason_against(layout, module)
        if against is not None:
            raise UnsupportedModel(
                name, f"of layout {layout.name!r}", type(module).__name__, against
            )
        now = geometry(layout, module)
        mine: Policy = "balanced" if now.n_kv_heads == 1 < now.n_query_heads else policy
        counted = (
            now.n_query_heads,
            now.n_kv_heads,
            now.head_dim,
            now.value_dim,
            tuple(range(now.n_query_heads)),
        )
        kind = kind_of(module, name)
        least = 0 if layout.refusal(module) is None else 1
        sites.append(
            AttentionSite(
                name,
                layout.name,
                kind,
                *counted,
                policy=mine,
                grouping=layout.grouping,
                least=least,
            )
        )
    return Sites(sites, [layout])
