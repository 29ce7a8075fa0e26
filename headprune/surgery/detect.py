"""``propose_layouts``: layouts for attention modules that nobody described, each proven on an example or refused.

The search runs on a copy in fp64. Where softmax attention happens is seen by running the model (``trace.py``), what
may be heads is guessed from sizes (``guess.py``), and a guess counts once it has passed the whole proof (``prove.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from headprune.core.errors import HeadPruneError, UnsupportedModel, VerificationFailed
from headprune.core.heads import AttentionSite, Policy
from headprune.core.layout import AttentionLayout
from headprune.core.mixin import original_class
from headprune.model.running import batch_size
from headprune.model.sites import Sites, find_sites, geometry, reason_against
from headprune.surgery.guess import guesses, kind_of
from headprune.surgery.properties import why_not
from headprune.surgery.prove import ROUNDING, Scratch, cut_difference, masks, prove
from headprune.surgery.trace import Core, cores


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
        return f"{self.modules[0] or 'the model itself'}{more} ({self.kind}): {self.property}: {self.reason}"


class Proposals(tuple[AttentionLayout, ...]):
    """Proven layouts, to be passed as ``find_sites(model, layouts=...)``.

    Attributes:
        found: For each layout, by its name: the modules it is for, and the largest |gated - pruned| of its proof.
        refused: The attention modules that no layout takes, and why.
    """

    found: dict[str, tuple[tuple[str, ...], float]]
    refused: tuple[Refusal, ...]

    def __new__(
        cls,
        layouts: Iterable[AttentionLayout],
        found: dict[str, tuple[tuple[str, ...], float]],
        refused: Iterable[Refusal],
    ) -> Proposals:
        self = super().__new__(cls, layouts)
        self.found, self.refused = found, tuple(refused)
        return self

    def __reduce__(self) -> Any:
        return Proposals, (tuple(self), self.found, self.refused)

    def __str__(self) -> str:
        lines = [f"{n}: {len(m)} modules, |gated - pruned| <= {d:.1e}" for n, (m, d) in self.found.items()]
        lines += [f"refused: {r}" for r in self.refused]
        return "\n".join(lines) or "nothing to propose: every softmax attention has a layout"


def propose_layouts(model: nn.Module, example: Any, layouts: Iterable[AttentionLayout] = ()) -> Proposals:
    """Layouts for the attention modules of ``model`` that none is registered for; each has proven itself.

    Proven means, in fp64 on a copy with shaken weights: gates of zero change the output; a gate an example lands on
    that example; and |gated - pruned| <= 1e-10 of the largest output for each head alone, for ragged masks and with
    two units left, gradients included. A layer of a proposed layout keeps at least one head, because a batch cannot
    prove that a cache works without. What depends on code that the example does not run (another mask, a cache) is
    not proven: give an example that is like your data, with padding.

    Args:
        model: Any module; it stays as it is.
        example: A batch that it takes; two or more examples.
        layouts: Layouts of your own, which are tried before.

    Returns:
        The layouts; ``.refused`` says which modules were not taken and why, printing it shows both.

    >>> import torch
    >>> from torch import nn
    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.n, self.everything, self.end = 4, nn.Linear(16, 48), nn.Linear(16, 16)
    ...     def forward(self, x):
    ...         q, k, v = self.everything(x).unflatten(-1, (self.n, 3, -1)).permute(3, 0, 2, 1, 4)
    ...         return self.end(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    >>> model = nn.Sequential(Mine(), Mine())
    >>> found = propose_layouts(model, torch.randn(3, 5, 16))
    >>> print(find_sites(model, layouts=found))
    0: 4 heads of width 4 (detected_mine, self)
    1: 4 heads of width 4 (detected_mine, self)
    """
    layouts = tuple(layouts)
    try:
        scratch = Scratch(model, example)
        seen = cores(scratch)
    except VerificationFailed as error:
        return Proposals((), {}, [Refusal(("",), type(model).__name__, "does not run in fp64", str(error))])
    modules = dict(scratch.model.named_modules())
    taken = _taken(scratch.model, layouts)
    alike: dict[Any, list[Core]] = {}
    for core in sorted(seen, key=lambda c: -c.name.count(".")):  # inner ones first
        alike.setdefault(_build(modules[core.name]), []).append(core)
    proven: dict[str, tuple[tuple[str, ...], float]] = {}
    chosen: list[AttentionLayout] = []
    refused: list[Refusal] = []
    for cores_alike in alike.values():
        group = [c for c in cores_alike if not _covered(c.name, taken)]
        if not group:
            continue
        answer = _search(scratch, group)
        if isinstance(answer, Refusal):
            refused.append(answer)
            continue
        layout, difference = answer
        same = next((c for c in chosen if replace(c, name=layout.name) == layout), None)
        layout = same or replace(layout, name=_name(original_class(modules[group[0].name]), proven))
        before, worst = proven.get(layout.name, ((), 0.0))
        proven[layout.name] = (*before, *(c.name for c in group)), max(worst, difference)
        taken += [c.name for c in group]
        chosen += [] if same else [layout]
    order = list(modules)
    proven = {n: (tuple(sorted(m, key=order.index)), d) for n, (m, d) in proven.items()}
    return _apart(scratch, Proposals(chosen, proven, refused), layouts)


def _taken(model: nn.Module, layouts: tuple[AttentionLayout, ...]) -> list[str]:
    return [s.name for s in _sites_or_none(model, layouts)]


def _covered(name: str, taken: list[str]) -> bool:
    """Whether a module is one of these, inside of one, or around one."""
    own = f"{name}." if name else ""
    return any(t == name or name.startswith(f"{t}.") or not t or t.startswith(own) for t in taken)


def _build(module: nn.Module) -> Any:
    """What modules of one build have in common: class, parameters and their shapes."""
    return original_class(module), tuple((n, tuple(p.shape)) for n, p in module.named_parameters())


def _name(kind: type, used: Iterable[str]) -> str:
    snake = re.sub(r"(?<=[a-zA-Z0-9])(?=[A-Z][a-z])", "_", kind.__name__).lower()
    name, n = f"detected_{snake}", 1
    while name in used:
        n += 1
        name = f"detected_{snake}_{n}"
    return name


def _search(scratch: Scratch, group: list[Core]) -> tuple[AttentionLayout, float] | Refusal:
    """The first guess that proves itself on all modules of one build, with the difference; or why there is none."""
    first, failures = group[0], []
    for guess in guesses(scratch.model.get_submodule(first.name), first, batch_size(scratch.example)):
        try:
            sites = sites_by(scratch.model, guess, [c.name for c in group])
        except HeadPruneError:
            continue  # the sizes do not fit
        try:
            if not cut_difference(scratch, sites, masks(sites)[0]) <= ROUNDING:
                raise VerificationFailed("the pruned model", "equal to the gated one", "other outputs")
            difference = prove(scratch, sites)
        except Exception as error:  # whatever the model's own code raises when it is cut wrongly
            failures.append(error)
            continue
        return _with_policies(scratch, guess, sites), difference
    return Refusal(
        tuple(c.name for c in group),
        original_class(scratch.model.get_submodule(first.name)).__name__,
        *why_not(scratch.model.get_submodule(first.name), first, failures),
    )


def _with_policies(scratch: Scratch, layout: AttentionLayout, sites: Sites) -> AttentionLayout:
    """The layout with those policies of shared key/value heads that are proven too."""
    if layout.policies == ("group",) or all(s.policy == "balanced" for s in sites):
        return layout
    try:
        prove(scratch, sites_by(scratch.model, layout, [s.name for s in sites], "balanced"))
    except Exception:
        return replace(layout, policies=("group",))
    return layout


def sites_by(model: nn.Module, layout: AttentionLayout, names: Iterable[str], policy: Policy = "group") -> Sites:
    """The sites at these modules, of this layout and no other.

    Raises:
        UnsupportedModel: a module that it does not fit.
    """
    sites = []
    for name in names:
        module = model.get_submodule(name)
        against = reason_against(layout, module)
        if against is not None:
            raise UnsupportedModel(name, f"of layout {layout.name!r}", type(module).__name__, against)
        now = geometry(layout, module)
        mine: Policy = "balanced" if now.n_kv_heads == 1 < now.n_query_heads else policy
        numbers = now.n_query_heads, now.n_kv_heads, now.head_dim, now.value_dim, tuple(range(now.n_query_heads))
        sites.append(AttentionSite(name, layout.name, kind_of(module, name), *numbers, policy=mine))
    return Sites(sites, [layout])


def _apart(scratch: Scratch, proposals: Proposals, layouts: tuple[AttentionLayout, ...]) -> Proposals:
    """Drops layouts that take modules they fail on when all are tried in turn, the proposed before the registered."""
    kept, refused = list(proposals), list(proposals.refused)
    settled = False
    while not settled:
        settled = True
        sites = _sites_or_none(scratch.model, (*layouts, *kept))
        for layout in kept:
            own = Sites((s for s in sites if s.layout == layout.name), [layout])
            meant = proposals.found[layout.name][0]
            try:
                if own and {s.name for s in own} != set(meant):
                    prove(scratch, own)
            except Exception as error:
                refused.append(Refusal(meant, layout.name, "head counts kept elsewhere", f"not on all alike: {error}"))
                own = Sites((), ())
            if not own:  # it failed, or earlier ones take all of its modules
                kept.remove(layout)
                settled = False
                break
    found = {layout.name: proposals.found[layout.name] for layout in kept}
    return Proposals(kept, found, refused)


def _sites_or_none(model: nn.Module, layouts: Iterable[AttentionLayout]) -> Sites:
    try:
        return find_sites(model, layouts)
    except UnsupportedModel:
        return Sites((), ())
