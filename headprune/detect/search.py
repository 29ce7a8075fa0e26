"""Search one layout for modules of one build: try guesses until one passes the proof."""

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
from headprune.core.layout_data import kind_of
from headprune.core.mixin import original_class
from headprune.detect.guess import guesses, head_counts, numbers
from headprune.detect.properties import Attempt, why_not
from headprune.detect.prove import (
    ROUNDING,
    Scratch,
    cut_difference,
    mask_without_first,
    prove,
)
from headprune.detect.reach import Influence, feature_influence, latent_projection
from headprune.detect.trace import AttentionCore
from headprune.model.running import batch_size
from headprune.model.sites import Sites, geometry, lookup, reason_against

#: How many guesses are tried for each number of heads; each costs a forward pass or two.
_GUESSES = 150


@dataclass(frozen=True)
class Refusal:
    """Attention modules of one build for which no layout could be proven.

    Args:
        modules: Their qualified names.
        kind: Their class.
        property: Why, a key of ``detect.properties.PROPERTIES``.
        reason: What was measured or seen.
    """

    modules: tuple[str, ...]
    kind: str
    property: str
    reason: str

    def __str__(self) -> str:
        first = self.modules[0] or "the model itself"
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{first}{more} ({self.kind}): {self.property}: {self.reason}"


def build(scratch: Scratch, core: AttentionCore) -> Any:
    """A key that modules of one build share: class, parameters and their shapes."""
    module = scratch.model.get_submodule(core.name)
    return original_class(module), tuple((n, tuple(p.shape)) for n, p in module.named_parameters())


def search(scratch: Scratch, group: list[AttentionCore]) -> tuple[AttentionLayout, float] | Refusal:
    """Try guesses on all modules of one build.

    Returns:
        The first layout that passes the proof, with its largest |gated - pruned|; or why none does.
    """
    first = group[0]
    names = [core.name for core in group]
    module = scratch.model.get_submodule(first.name)
    n_examples = batch_size(scratch.example)
    attempts: list[Attempt] = []
    # Measured and tried for one module of the group; the proof covers all.
    influence: Influence = {}
    unfit: HeadPruneError | None = None
    # Gates at one place remove a head only if its output has no other way out.
    gate = first.gate if len(first.outlets) == 1 and not first.leaks else None
    if gate is not None:
        for n_query in head_counts(first, n_examples):
            if n_query < 2:  # no head to remove and one to keep
                continue
            influence = feature_influence(scratch, first, n_query)
            if latent_projection(first, influence):  # no guess can be right
                break
            candidates = guesses(module, first, gate, n_query, influence, n_examples)
            for guess in islice(candidates, _GUESSES):
                try:
                    sites = sites_by(scratch.model, guess, names)
                except HeadPruneError as error:  # the sizes do not fit
                    unfit = error
                    continue
                result = _attempt(scratch, sites)
                if isinstance(result, float):
                    return _with_policies(scratch, guess, sites), result
                attempts.append(result)
    kind = original_class(module).__name__
    return Refusal(tuple(names), kind, *why_not(scratch, first, influence, attempts, unfit))


class _OperationCounter(TorchFunctionMode):
    """Counts operations while it is active."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _attempt(scratch: Scratch, sites: Sites) -> float | Attempt:
    """The largest |gated - pruned| of sites that pass the proof, or how they failed."""
    completed = False
    with _OperationCounter() as operations:
        try:
            # One mask first: most wrong guesses fail here, for a fraction of the whole proof.
            difference = cut_difference(scratch, sites, mask_without_first(sites))
            completed = True
            if not difference <= ROUNDING:
                raise VerificationFailed(
                    "the pruned model", "equal to the gated one", "other outputs"
                )
            return prove(scratch, sites)
        except HeadPruneError as error:
            module = _failing_module(scratch, error.__cause__)
            return Attempt(sites, error, completed, operations.count, module)


def _failing_module(scratch: Scratch, error: BaseException | None) -> str:
    """The innermost module whose code was running when an error was raised."""
    if error is None:
        return ""
    names = {id(module): name for name, module in scratch.model.named_modules()}
    innermost = ""
    # The last frame of a method of a module is the innermost one.
    step = error.__traceback__
    while step is not None:
        innermost = names.get(id(step.tb_frame.f_locals.get("self")), innermost)
        step = step.tb_next
    return innermost


def with_distinct_widths(
    scratch: Scratch,
    proven: tuple[AttentionLayout, float],
    group: list[AttentionCore],
    groups: list[list[AttentionCore]],
) -> tuple[AttentionLayout, float] | Refusal:
    """Restrict a layout to an attribute's value where equal modules have other heads.

    Args:
        scratch: The model.
        proven: A layout, and the largest |gated - pruned| of its proof.
        group: The cores that it is for.
        groups: All groups of cores.

    Returns:
        The same layout where no other group has modules of one build with these; the restricted one
        where an attribute differs between them; else the refusal.
    """
    layout, difference = proven
    assert isinstance(layout.head_dim, int)
    rivals = _like_modules(scratch, group, groups)
    if not rivals:
        return proven

    # An attribute whose value all of these modules have, and none of the others.
    own = _numbers_of(scratch, group)
    others = []
    for rival in rivals:
        others += _numbers_of(scratch, rival)
    for path, value in own[0].items():
        if _values(own, path) == {value} and value not in _values(others, path):
            return replace(layout, head_dim=WidthWhere(path, value, layout.head_dim)), difference

    counts = " and ".join(str(cores[0].heads) for cores in (group, *rivals))
    reason = f"modules of the same sizes have {counts} heads, and no attribute tells which"
    kind = original_class(scratch.model.get_submodule(group[0].name)).__name__
    modules = tuple(core.name for core in group)
    return Refusal(modules, kind, "head counts kept elsewhere", reason)


def _like_modules(
    scratch: Scratch, group: list[AttentionCore], groups: list[list[AttentionCore]]
) -> list[list[AttentionCore]]:
    """The other groups whose modules are of the same build."""
    own_build = build(scratch, group[0])
    # ``group`` may be a part of one of them.
    others = [other for other in groups if group[0] not in other]
    return [other for other in others if build(scratch, other[0]) == own_build]


def _numbers_of(scratch: Scratch, cores: list[AttentionCore]) -> list[dict[str, int]]:
    return [numbers(scratch.model.get_submodule(core.name)) for core in cores]


def _values(modules: list[dict[str, int]], path: str) -> set[int | None]:
    """The values that modules have for an attribute."""
    return {numbers_of.get(path) for numbers_of in modules}


@dataclass(frozen=True)
class WidthWhere:
    """``AttentionLayout.head_dim`` of only those modules whose attribute ``path`` has a value."""

    path: str
    value: int
    width: int

    def __call__(self, module: Any) -> int:
        actual = lookup(module, self.path)
        if actual != self.value:
            where = f"{type(module).__name__}.{self.path}"
            raise UnsupportedModel(where, f"{self.value} for this layout", actual)
        return self.width


def _with_policies(scratch: Scratch, layout: AttentionLayout, sites: Sites) -> AttentionLayout:
    """The layout with only those policies of shared key/value heads that are proven."""
    if layout.policies == ("group",) or all(s.policy == "balanced" for s in sites):
        return layout
    # ``group`` was proven; ``balanced`` removes other sets of heads.
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
        UnsupportedModel: a module that the layout does not fit.
    """
    sites = []
    for name in names:
        module = model.get_submodule(name)
        # As find_sites decides, but for this layout alone.
        against = reason_against(layout, module)
        if against is not None:
            must = f"of layout {layout.name!r}"
            raise UnsupportedModel(name, must, type(module).__name__, against)
        now = geometry(layout, module)
        # All heads share one key/value head: they can only be removed one by one.
        multi_query = now.n_kv_heads == 1 < now.n_query_heads
        site = AttentionSite(
            name,
            layout.name,
            kind_of(module, name),
            now.n_query_heads,
            now.n_kv_heads,
            now.head_dim,
            now.value_dim,
            tuple(range(now.n_query_heads)),
            policy="balanced" if multi_query else policy,
            grouping=layout.grouping,
            least=0 if layout.refusal(module) is None else 1,
        )
        sites.append(site)
    return Sites(sites, [layout])
