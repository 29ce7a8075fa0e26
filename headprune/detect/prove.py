"""The whole proof that sites of a model are cut exactly, in fp64 on a scratch copy: what a guessed
layout must pass.

``prune_`` compares one plan on a batch (``verify.py``). Here nothing is known to be right yet, so
every way in which a wrong layout could pass by luck is tried: each head alone, ragged masks, two
units left, gradients, gates an example.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import UnsupportedModel, VerificationFailed
from headprune.core.heads import AttentionSite, HeadMask
from headprune.gating.context import gated
from headprune.model.cut import cut_
from headprune.model.double import Doubled, double_
from headprune.model.running import (
    batch_size,
    call,
    default_dtype,
    device_of,
    outputs,
    over_tensors,
    to_device,
    undisturbed,
)
from headprune.model.sites import Sites, bind, unwrap

#: Largest difference of a cut that is exact, relative to the largest output: rounding of fp64 in
#: another order.
ROUNDING = 1e-10


class Scratch:
    """A copy of a model to try cuts on: fp64 throughout, evaluation mode, the same random numbers
    in every run.

    Its weights are shaken, because fresh ones (biases of zero, norms and scales of one) would hide
    mistakes.

    Args:
        model: Stays as it is.
        example: A batch it takes.

    Attributes:
        full: The outputs of all heads.
        random: Whether other random numbers give other outputs, although it is in evaluation mode.

    Raises:
        UnsupportedModel: it cannot be copied.
        VerificationFailed: it does not run in fp64, or not twice alike.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            self.model = double_(_copied(unwrap(model))).eval()
        moved = to_device(example, device_of(self.model))
        self.example = over_tensors(moved, lambda t: t.double() if t.is_floating_point() else t)
        fresh = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._shake()
        if not _finite(self._first()):  # shaken weights may overflow where the model's own do not
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(fresh[name])
        self.full = self._first()
        if not _finite(self.full):
            raise VerificationFailed(
                "the example", "one on which the model's outputs are finite", "none that is"
            )
        if largest(self.run(), self.full) > 0:
            raise VerificationFailed(
                "the model", "one that gives the same outputs twice", "random outputs"
            )
        self.random = largest(self.run(seed=1), self.full) > 0

    def _shake(self) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.grad = None
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                    spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                    parameter.add_(noise.to(parameter.device), alpha=0.02 + 0.1 * spread)

    def _first(self) -> list[Tensor]:
        try:
            return self.run()
        except Exception as error:
            got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise VerificationFailed(
                "the model", "one that runs in fp64 on the example", got
            ) from error

    def run(self, graph: bool = False, seed: int = 0) -> list[Tensor]:
        """Every output that is a number."""
        with self.running(seed), Doubled(), torch.set_grad_enabled(graph):
            return outputs(call(self.model, self.example))

    @contextmanager
    def running(self, seed: int = 0) -> Iterator[None]:
        """The same random numbers each time, and fp64 where a model makes a tensor and names no
        type."""
        with undisturbed(self.model, frozen=False), default_dtype(torch.float64):
            torch.manual_seed(seed)
            yield

    def gradients(self, inside: tuple[str, ...]) -> list[Tensor]:
        """Of an objective that weighs every output in its own way, with respect to the parameters
        no cut touches."""
        kept = [
            p
            for n, p in self.model.named_parameters()
            if p.requires_grad and not n.startswith(inside)
        ]
        parts = [_objective(t) for t in self.run(graph=True) if t.requires_grad]
        value = torch.stack([torch.zeros((), dtype=torch.float64), *parts]).sum()
        if not kept or not value.requires_grad:
            return []
        return [g for g in torch.autograd.grad(value, kept, allow_unused=True) if g is not None]


def largest(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, relative to the largest output (or 1); infinite where shapes or the
    places of NaN differ."""
    if [t.shape for t in got] != [t.shape for t in expected]:
        return float("inf")
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if not a.numel():
            continue
        a, b = a.detach().double(), b.detach().double()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        a, b = a[a.isfinite()], b[b.isfinite()]
        if a.numel():
            worst = max(worst, float((a - b).abs().max()) / max(1.0, float(b.abs().max())))
    return worst


def cut_difference(
    scratch: Scratch, sites: Sites, mask: HeadMask, gradients: bool = False
) -> float:
    """|gated - pruned| for one mask, of outputs and, if asked, of gradients; the scratch model is
    put back.

    Raises:
        UnsupportedModel: what must not be cut.
        VerificationFailed: the pruned model does not run.
    """
    inside = tuple(f"{s.name}." if s.name else "" for s in sites)
    with gated(scratch.model, mask, sites):
        expected = scratch.run()
        wanted = scratch.gradients(inside) if gradients else []
    undo = cut_(scratch.model, bind(scratch.model, sites), mask)
    try:
        worst = largest(scratch.run(), expected)
        return max(worst, largest(scratch.gradients(inside), wanted)) if gradients else worst
    except Exception as error:  # whatever the model's own code raises when it is cut wrongly
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise VerificationFailed("the pruned model", "one that runs on the example", got) from error
    finally:
        undo.restore()


def prove(scratch: Scratch, sites: Sites) -> float:
    """The largest |gated - pruned| over all masks.

    Args:
        scratch: The model.
        sites: Those to prove, all of them together.

    Raises:
        VerificationFailed: gates without effect or on the wrong example, or a cut that is not the
            gated model.
    """
    if all(len(s.units) < 2 for s in sites):
        raise VerificationFailed(
            "the sites", "some with a unit to remove and one to keep", "one unit each"
        )
    _check_effects(scratch, sites)
    _check_examples(scratch, sites)
    _check_independence(scratch)
    worst = 0.0
    for index, mask in enumerate(masks(sites)):
        difference = cut_difference(scratch, sites, mask, gradients=index < 2)
        if not difference <= ROUNDING:
            got = f"a difference of {difference:.1e} with {mask.n_heads - mask.n_kept} heads gone"
            raise VerificationFailed(
                "the pruned model", f"equal to the gated one up to {ROUNDING:.0e}", got
            )
        worst = max(worst, difference)
    return worst


def masks(sites: Iterable[AttentionSite]) -> list[HeadMask]:
    """Ragged ones, each part alone gone (at all sites together), and two parts left; none that
    leaves no head.

    All of them are such as the sites' policies allow. A part is a unit; under ``balanced`` also one
    head of each group.
    """
    sites = [s for s in sites if s.heads]
    counts = {s.name: s.n_query_heads for s in sites}
    found: list[dict[str, Iterable[int]]] = []
    for seed in range(3):
        draw = random.Random(seed)
        found.append({s.name: _ragged(s, draw, i + seed) for i, s in enumerate(sites)})
    present = {s.name: list(s.heads) for s in sites}
    alone = {s.name: [sorted(set(s.heads) - set(p)) for p in _parts(s)] for s in sites}
    found += [
        {
            name: (*keeps, present[name])[min(gone, len(keeps))] or present[name]
            for name, keeps in alone.items()
        }
        for gone in range(max(map(len, alone.values()), default=0))
    ]
    found.append({s.name: _last_two(s) for s in sites})
    return [HeadMask.from_keep(keep, counts) for keep in found]


def first_gone(sites: Iterable[AttentionSite]) -> HeadMask:
    """The mask without each site's first part: what is tried first, for few heads may broadcast
    where more do not."""
    return masks(sites)[3]


def _balanced(site: AttentionSite) -> bool:
    return site.policy == "balanced" and site.bundles is None and len(site.groups) > 1


def _parts(site: AttentionSite) -> list[tuple[int, ...]]:
    """The smallest sets of heads that may leave a site alone."""
    if not _balanced(site):
        return list(site.units)
    across = [tuple(group[i] for group in site.groups) for i in range(min(map(len, site.groups)))]
    return [*(across if len(across) > 1 else []), *site.groups]


def _ragged(site: AttentionSite, draw: random.Random, number: int) -> list[int]:
    """Heads that stay: so many units or, under ``balanced``, so many heads of some groups, drawn at
    random."""
    if not _balanced(site):
        kept = draw.sample(site.units, 1 + number % max(1, len(site.units) - 1))
        return sorted(h for unit in kept for h in unit)
    groups = draw.sample(site.groups, 1 + number % len(site.groups))
    n_heads = 1 + draw.randrange(min(map(len, groups)))
    return sorted(h for group in groups for h in draw.sample(group, n_heads))


def _last_two(site: AttentionSite) -> list[int]:
    if _balanced(site):
        return sorted(group[-1] for group in site.groups[-2:])
    return sorted(h for unit in site.units[-2:] for h in unit)


def _check_effects(scratch: Scratch, sites: Sites) -> None:
    for site in sites:
        with gated(
            scratch.model, {site.name: torch.zeros(len(site.heads), dtype=torch.float64)}, sites
        ):
            if largest(scratch.run(), scratch.full) == 0:
                must = "one whose heads change the example's outputs"
                raise VerificationFailed(
                    f"the gates of {site.name}", must, "no effect of gates of zero"
                )


def _check_examples(scratch: Scratch, sites: Sites) -> None:
    """A gate an example must land on that example: where outputs have a row an example, only its
    row changes."""
    n = batch_size(scratch.example, "example")
    for chosen in range(n if n > 1 else 0):
        row = torch.ones(n, 1, dtype=torch.float64)
        row[chosen] = 0.0
        gates = {s.name: row.expand(n, len(s.heads)) for s in sites}
        with gated(scratch.model, gates, sites):
            got = scratch.run()
        changed = [
            _changed_rows(a, b)
            for a, b in zip(got, scratch.full, strict=True)
            if a.ndim and a.shape[0] == n
        ]
        if changed and [chosen] not in changed:
            must = f"the gates of example {chosen} only"
            raise VerificationFailed("a gate an example", must, f"changes in examples {changed[0]}")


def _check_independence(scratch: Scratch) -> None:
    """An example must be an example: another input there changes nothing elsewhere.

    The first axis of a model that takes the sequence first holds tokens, which attend to each
    other, though a gate of one of them may change that one alone.
    """
    n = batch_size(scratch.example, "example")
    if n < 2:
        return

    def other(t: Tensor) -> Tensor:
        if not t.ndim or t.shape[0] != n:
            return t
        t = t.clone()
        t[1] = t[0]
        return t

    mine, scratch.example = scratch.example, over_tensors(scratch.example, other)
    try:
        got = scratch.run()
    except Exception:  # what the copy no longer fits together; the example itself runs
        return
    finally:
        scratch.example = mine
    changed = [
        _changed_rows(a, b)
        for a, b in zip(got, scratch.full, strict=False)
        if a.ndim and a.shape[0] == n
    ]
    if any(changed) and [1] not in changed:
        must = "examples on the first axis, none of which changes what the model makes of another"
        hint = "Give the model an input with the examples first, and let it turn the axes."
        raise VerificationFailed(
            "the example", must, f"changes in rows {max(changed, key=len)} for row 1", hint
        )


def _changed_rows(got: Tensor, expected: Tensor) -> list[int]:
    return [i for i in range(len(got)) if largest([got[i]], [expected[i]]) > ROUNDING]


def _objective(output: Tensor) -> Tensor:
    output = output[output.isfinite()]
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
    return (output * weights).sum() + (output**2).mean()


def _copied(model: nn.Module) -> nn.Module:
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        must = "a model of Python code, which can be watched"
        raise UnsupportedModel(type(model).__name__, must, "one with modules compiled by torch.jit")
    try:
        return copy.deepcopy(model)
    except Exception as error:
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        hint = (
            "Replace torch.nn.utils.weight_norm by torch.nn.utils.parametrizations.weight_norm, or"
            " remove it."
        )
        must = "a model that copy.deepcopy copies, for cuts are tried on a copy"
        raise UnsupportedModel(
            type(model).__name__, must, got, hint if "weight_norm" in got else ""
        ) from error


def _finite(found: list[Tensor]) -> bool:
    return any(t.numel() for t in found) and not any(bool(t.isnan().any()) for t in found)
