"""``propose_layouts``: layouts for attention modules that nobody described, each proven on an
example or refused.

The search runs on a copy in fp64. Where softmax attention happens, over how many heads and of which
projections, is seen by running the model (``flow.py``, ``trace.py``, ``reach.py``); what else is
made of heads is guessed from sizes (``guess.py``); and a guess counts once it has passed the whole
proof (``search.py``, ``prove.py``). What fails is refused by name (``properties.py``).
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
from headprune.core.mixin import original_class
from headprune.detect.guess import SeenKind
from headprune.detect.prove import Scratch, prove
from headprune.detect.search import Refusal, build, search, told_apart
from headprune.detect.trace import Core, cores
from headprune.model.running import batch_size, call, device_of, to_device, undisturbed
from headprune.model.sites import Sites, find_sites


class Proposals(tuple[AttentionLayout, ...]):
    """Proven layouts, to be passed as ``find_sites(model, layouts=...)``.

    Attributes:
        found: For each layout, by its name: the modules it is for, and the largest |gated - pruned|
            of its proof.
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
        lines = [
            f"{n}: {len(m)} modules, |gated - pruned| <= {d:.1e}"
            for n, (m, d) in self.found.items()
        ]
        lines += [f"refused: {r}" for r in self.refused]
        return "\n".join(lines) or "nothing to propose: every softmax attention has a layout"


def propose_layouts(
    model: nn.Module, example: Any, layouts: Iterable[AttentionLayout] = ()
) -> Proposals:
    """Layouts for the attention modules of ``model`` that none is registered for; each has proven
    itself.

    Proven means, in fp64 on a copy with shaken weights: gates of zero change the output; a gate an
    example lands on that example; and |gated - pruned| <= 1e-10 of the largest output for each head
    alone, for ragged masks and with two units left, gradients included. A layer of a proposed
    layout keeps at least one head, because a batch cannot prove that a cache works without. What
    depends on code that the example does not run (another mask, a cache) is not proven: give an
    example that is like your data, with padding. A module is ``causal`` where no token of the
    example saw a later one (which masks of ``flex_attention`` do not show), or where its name or
    flags say so.

    Args:
        model: Any module; it stays as it is.
        example: A batch that it takes; two or more examples.
        layouts: Layouts of your own, which are tried before.

    Returns:
        The layouts; ``.refused`` says which modules were not taken and why, printing it shows both.

    Raises:
        InvalidValue: an example that the model does not take, or a single one.
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
    layouts = tuple(layouts)
    _check(model, example)
    try:
        scratch = Scratch(model, example)
    except VerificationFailed as error:
        _check_own_run(model, example)
        name = (
            "random in evaluation mode" if error.got == "random outputs" else "does not run in fp64"
        )
        return Proposals((), {}, [Refusal(("",), type(model).__name__, name, str(error))])
    seen = cores(scratch)
    taken = _taken(scratch.model, layouts)
    if not seen and not taken:
        none = Refusal(
            ("",), type(model).__name__, "no softmax attention", "none was seen on this example"
        )
        return Proposals((), {}, [none])
    proven: dict[str, tuple[tuple[str, ...], float]] = {}
    chosen: list[AttentionLayout] = []
    refused: list[Refusal] = []
    groups = _alike(scratch, seen, taken)
    for group in groups:
        group = [c for c in group if not _covered(c.name, taken)]
        if not group:
            continue
        answer = search(scratch, group)
        if not isinstance(answer, Refusal):
            answer = told_apart(scratch, answer, group, groups)
        if isinstance(answer, Refusal):
            refused.append(answer)
            continue
        layout, difference = answer
        same = next((c for c in chosen if replace(c, name=layout.name) == layout), None)
        kind = original_class(scratch.model.get_submodule(group[0].name))
        layout = same or replace(layout, name=_name(kind, proven))
        before, worst = proven.get(layout.name, ((), 0.0))
        proven[layout.name] = (*before, *(c.name for c in group)), max(worst, difference)
        taken += [c.name for c in group]
        chosen += [] if same else [layout]
    order = [name for name, _ in scratch.model.named_modules()]
    proven = {n: (tuple(sorted(m, key=order.index)), d) for n, (m, d) in proven.items()}
    proposals = _apart(scratch, Proposals(chosen, proven, refused), layouts)
    return _with_kinds(scratch, proposals, layouts, [c.name for c in seen if c.softmax.causal])


def _check(model: nn.Module, example: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue("model", "a torch.nn.Module", type(model).__name__)
    n_examples = batch_size(example, "example")
    if n_examples < 2:
        hint = "With one, gates that land on the wrong axis are not told from right ones."
        raise InvalidValue("example", "a batch of two or more examples", n_examples, hint)


def _check_own_run(model: nn.Module, example: Any) -> None:
    """Whether it was the example's fault that the model did not run."""
    try:
        with undisturbed(model), torch.no_grad():
            call(model, to_device(example, device_of(model)))
    except Exception as error:
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise InvalidValue("example", "a batch that the model takes", got) from error


def _alike(scratch: Scratch, seen: list[Core], taken: list[str]) -> list[list[Core]]:
    """Cores of one build together, inner ones first: of one class, with parameters, heads and
    widths of one size."""
    groups: dict[Any, list[Core]] = {}
    for core in sorted(seen, key=lambda c: -c.name.count(".")):
        key = build(scratch, core), core.heads, core.softmax.head_dim
        groups.setdefault(key, []).append(core)
    return list(groups.values())


def _taken(model: nn.Module, layouts: tuple[AttentionLayout, ...]) -> list[str]:
    return [s.name for s in _sites_or_none(model, layouts)]


def _covered(name: str, taken: list[str]) -> bool:
    """Whether a module is one of these, inside of one, or around one."""
    own = f"{name}." if name else ""
    return any(t == name or name.startswith(f"{t}.") or not t or t.startswith(own) for t in taken)


def _name(kind: type, used: Iterable[str]) -> str:
    snake = re.sub(r"(?<=[a-zA-Z0-9])(?=[A-Z][a-z])", "_", kind.__name__).lower()
    name, n = f"detected_{snake}", 1
    while name in used:
        n += 1
        name = f"detected_{snake}_{n}"
    return name


def _apart(
    scratch: Scratch, proposals: Proposals, layouts: tuple[AttentionLayout, ...]
) -> Proposals:
    """Drops layouts that take modules they fail on when all are tried in turn, the proposed before
    the registered."""
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
            except HeadPruneError as error:
                refused.append(
                    Refusal(
                        meant,
                        layout.name,
                        "head counts kept elsewhere",
                        f"not on all alike: {error}",
                    )
                )
                own = Sites((), ())
            if not own:  # it failed, or earlier ones take all of its modules
                kept.remove(layout)
                settled = False
                break
    found = {layout.name: proposals.found[layout.name] for layout in kept}
    return Proposals(kept, found, refused)


def _with_kinds(
    scratch: Scratch, proposals: Proposals, layouts: tuple[AttentionLayout, ...], causal: list[str]
) -> Proposals:
    """The same layouts, which call causal what was seen to be."""
    sites = _sites_or_none(scratch.model, (*layouts, *proposals))
    kept = []
    for layout in proposals:
        taken = [s.name for s in sites if s.layout == layout.name]
        seen = tuple(name for name in taken if name in causal)
        if seen:
            layout = replace(layout, kind=SeenKind(None if len(seen) == len(taken) else seen))
        kept.append(layout)
    return Proposals(kept, proposals.found, proposals.refused)


def _sites_or_none(model: nn.Module, layouts: Iterable[AttentionLayout]) -> Sites:
    try:
        return find_sites(model, layouts)
    except UnsupportedModel:
        return Sites((), ())
