"""``propose_layouts``: layouts for attention modules that no layout is registered for.

The search runs on a copy in fp64. One forward pass shows where softmax attention is computed, over
how many heads, and from which projections (``flow.py``, ``trace.py``, ``reach.py``). Sizes suggest
what else has an axis of heads (``guess.py``). A guess counts once it has passed the whole proof
(``search.py``, ``prove.py``); ``properties.py`` names why all guesses failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel, VerificationFailed
from headprune.core.layout import AttentionLayout
from headprune.core.layout_data import SeenKind
from headprune.core.mixin import original_class
from headprune.detect.prove import Scratch, error_line, prove
from headprune.detect.search import Refusal, build, search, with_distinct_widths
from headprune.detect.trace import AttentionCore, attention_cores
from headprune.model.running import batch_size, call, device_of, to_device, undisturbed
from headprune.model.sites import Sites, find_sites

#: For each layout, by its name: its modules, and the largest |gated - pruned| of its proof.
_Proofs = dict[str, tuple[tuple[str, ...], float]]


class Proposals(tuple[AttentionLayout, ...]):
    """Proven layouts, to be passed as ``find_sites(model, layouts=...)``.

    Attributes:
        found: For each layout, by its name: its modules, and the largest |gated - pruned| of its
            proof.
        refused: The attention modules that no layout fits, and why.
    """

    found: _Proofs
    refused: tuple[Refusal, ...]

    def __new__(
        cls,
        layouts: Iterable[AttentionLayout],
        found: _Proofs,
        refused: Iterable[Refusal],
    ) -> Proposals:
        self = super().__new__(cls, layouts)
        self.found = found
        self.refused = tuple(refused)
        return self

    def __reduce__(self) -> Any:
        return Proposals, (tuple(self), self.found, self.refused)

    def __str__(self) -> str:
        lines = []
        for name, (modules, difference) in self.found.items():
            lines.append(f"{name}: {len(modules)} modules, |gated - pruned| <= {difference:.1e}")
        lines += [f"refused: {refusal}" for refusal in self.refused]
        return "\n".join(lines) or "nothing to propose: every softmax attention has a layout"


def propose_layouts(
    model: nn.Module, example: Any, layouts: Iterable[AttentionLayout] = ()
) -> Proposals:
    """Propose layouts for attention modules that none is registered for, each with a proof.

    The proof compares the gated and the pruned model in fp64, with gradients, on a copy. It does
    not cover code that the example does not run (another mask, a cache): give an example like your
    data, with padding.

    Args:
        model: Any module; it does not change.
        example: A batch that it takes, of two or more examples.
        layouts: Layouts of your own, which are tried first.

    Returns:
        The layouts. ``.refused`` says which modules none fits and why.

    Raises:
        InvalidValue: an example that the model does not take, or of one row.
        UnsupportedModel: a model that cannot be copied.

    >>> import torch
    >>> from torch import nn
    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.n, self.everything, self.end = 4, nn.Linear(16, 48), nn.Linear(16, 16)
    ...
    ...     def forward(self, x):
    ...         q, k, v = self.everything(x).unflatten(-1, (self.n, 3, -1)).permute(3, 0, 2, 1, 4)
    ...         return self.end(
    ...             nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    ...         )
    >>> model = nn.Sequential(Mine(), Mine())
    >>> found = propose_layouts(model, torch.randn(3, 5, 16))
    >>> print(find_sites(model, layouts=found))
    0: 4 heads of width 4 (detected_mine, self)
    1: 4 heads of width 4 (detected_mine, self)
    """
    # A layer of a proposed layout keeps at least one head: a batch cannot prove that a cache works
    # without. A module is causal where no token of the example saw a later one, which masks of
    # flex_attention do not show, or where its name or flags say so.
    layouts = tuple(layouts)  # read twice
    _check(model, example)

    # 1. Run the model, and see where it computes attention.
    try:
        scratch = Scratch(model, example)
    except VerificationFailed as error:
        _check_own_run(model, example)
        random = error.got == "random outputs"
        name = "random in evaluation mode" if random else "does not run in fp64"
        return _refused_whole(model, name, str(error))
    cores = attention_cores(scratch)
    taken = _taken(scratch.model, layouts)
    if not cores and not taken:
        seen = "none was seen on this example"
        return _refused_whole(model, "no softmax attention", seen)

    # 2. Search a layout for each group of like modules that no layout fits yet.
    proposals = _search_all(scratch, _groups(scratch, cores), taken)

    # 3. All layouts together.
    proposals = _compatible(scratch, proposals, layouts)
    causal = {core.name for core in cores if core.softmax.causal}
    return _with_kinds(scratch, proposals, layouts, causal)


def _search_all(scratch: Scratch, groups: list[list[AttentionCore]], taken: list[str]) -> Proposals:
    """Search a layout for each group of cores.

    Args:
        scratch: The model.
        groups: The groups, inner modules first.
        taken: Names of the modules that layouts fit already.
    """
    proofs: _Proofs = {}
    chosen: list[AttentionLayout] = []
    refused: list[Refusal] = []
    taken = list(taken)
    for group in groups:
        group = [core for core in group if not _is_covered(core.name, taken)]
        if not group:
            continue
        result = search(scratch, group)
        if not isinstance(result, Refusal):
            result = with_distinct_widths(scratch, result, group, groups)
        if isinstance(result, Refusal):
            refused.append(result)
            continue
        layout, difference = result
        layout = _named(scratch, layout, group, chosen)
        if layout not in chosen:
            chosen.append(layout)
        # One layout may take several groups.
        names = tuple(core.name for core in group)
        earlier, largest = proofs.get(layout.name, ((), 0.0))
        proofs[layout.name] = (*earlier, *names), max(largest, difference)
        taken += names
    # In the order of the model, not of the search.
    order = list(dict(scratch.model.named_modules()))
    for name, (modules, difference) in proofs.items():
        proofs[name] = tuple(sorted(modules, key=order.index)), difference
    return Proposals(chosen, proofs, refused)


def _check(model: nn.Module, example: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue("model", "a torch.nn.Module", type(model).__name__)
    n_examples = batch_size(example, "example")
    if n_examples < 2:
        hint = "With one, gates on the wrong axis pass for right ones."
        raise InvalidValue("example", "a batch of two or more examples", n_examples, hint)


def _check_own_run(model: nn.Module, example: Any) -> None:
    """Raise ``InvalidValue`` where the model does not take the example in its own type either."""
    try:
        with undisturbed(model), torch.no_grad():
            call(model, to_device(example, device_of(model)))
    except Exception as error:
        raise InvalidValue("example", "a batch that the model takes", error_line(error)) from error


def _refused_whole(model: nn.Module, property: str, reason: str) -> Proposals:
    """No layout, and one refusal for the whole model."""
    return Proposals((), {}, [Refusal(("",), type(model).__name__, property, reason)])


def _groups(scratch: Scratch, cores: list[AttentionCore]) -> list[list[AttentionCore]]:
    """Cores of one build, with as many heads of one width, inner modules first."""
    groups: dict[Any, list[AttentionCore]] = {}
    for core in sorted(cores, key=lambda core: -core.name.count(".")):
        key = build(scratch, core), core.heads, core.softmax.head_dim
        groups.setdefault(key, []).append(core)
    return list(groups.values())


def _taken(model: nn.Module, layouts: tuple[AttentionLayout, ...]) -> list[str]:
    """Names of the modules that layouts fit already."""
    return [site.name for site in _sites_or_none(model, layouts)]


def _is_covered(name: str, taken: list[str]) -> bool:
    """Whether a module is one of these, or inside or around one."""
    inside = f"{name}." if name else ""  # every module is inside the model itself
    for other in taken:
        if other == name or not other:
            return True
        if name.startswith(f"{other}.") or other.startswith(inside):
            return True
    return False


def _named(
    scratch: Scratch,
    layout: AttentionLayout,
    group: list[AttentionCore],
    chosen: list[AttentionLayout],
) -> AttentionLayout:
    """The chosen layout that is the same, or this one with a new name."""
    for other in chosen:
        if replace(other, name=layout.name) == layout:
            return other
    # Named after the modules' class, with a number from the second layout on.
    kind = original_class(scratch.model.get_submodule(group[0].name))
    snake_case = re.sub(r"(?<=[a-zA-Z0-9])(?=[A-Z][a-z])", "_", kind.__name__).lower()
    used = {other.name for other in chosen}
    name = f"detected_{snake_case}"
    number = 1
    while name in used:
        number += 1
        name = f"detected_{snake_case}_{number}"
    return replace(layout, name=name)


def _compatible(
    scratch: Scratch, proposals: Proposals, layouts: tuple[AttentionLayout, ...]
) -> Proposals:
    """Drop proposed layouts that fit further modules, where their proof fails.

    All layouts are tried in turn on every module, the proposed ones before the registered ones.
    """
    kept = list(proposals)
    refused = list(proposals.refused)
    # Without one layout, the next one may fit its modules: start again after each that is dropped.
    dropped = True
    while dropped:
        dropped = False
        sites = _sites_or_none(scratch.model, (*layouts, *kept))
        for layout in kept:
            own = Sites((s for s in sites if s.layout == layout.name), [layout])
            modules = proposals.found[layout.name][0]
            error = _error_elsewhere(scratch, own, modules)
            if error is not None:
                reason = f"it also matches modules where its proof fails: {error}"
                property = "head counts kept elsewhere"
                refused.append(Refusal(modules, layout.name, property, reason))
            # Where it has no sites, earlier layouts fit all of its modules.
            if error is not None or not own:
                kept.remove(layout)
                dropped = True
                break
    proofs = {layout.name: proposals.found[layout.name] for layout in kept}
    return Proposals(kept, proofs, refused)


def _error_elsewhere(
    scratch: Scratch, sites: Sites, modules: tuple[str, ...]
) -> HeadPruneError | None:
    """Why sites at further modules are not exact; None where they are."""
    if not sites or {site.name for site in sites} == set(modules):
        return None
    try:
        prove(scratch, sites)
    except HeadPruneError as error:
        return error
    return None


def _with_kinds(
    scratch: Scratch,
    proposals: Proposals,
    layouts: tuple[AttentionLayout, ...],
    causal: set[str],
) -> Proposals:
    """The same layouts, which call modules causal that were seen to be."""
    sites = _sites_or_none(scratch.model, (*layouts, *proposals))
    with_kinds = []
    for layout in proposals:
        names = [site.name for site in sites if site.layout == layout.name]
        seen = tuple(name for name in names if name in causal)
        if seen:
            all_causal = len(seen) == len(names)
            # None also fits modules of a deeper model of the same classes.
            layout = replace(layout, kind=SeenKind(None if all_causal else seen))
        with_kinds.append(layout)
    return Proposals(with_kinds, proposals.found, proposals.refused)


def _sites_or_none(model: nn.Module, layouts: Iterable[AttentionLayout]) -> Sites:
    try:
        return find_sites(model, layouts)
    except UnsupportedModel:
        return Sites((), ())
