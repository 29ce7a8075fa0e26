"""Prove in fp64, on a copy, that cuts of a model's sites are exact.

``prune_`` compares one plan on one batch (``verify.py``). A guessed layout could pass that by luck,
so more is compared here: each head removed alone, ragged masks, two units kept, gradients, and one
gate per example.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
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

#: Largest difference of an exact cut, relative to the largest output: fp64 that rounds in another
#: order.
ROUNDING = 1e-10

#: How many masks with random heads are tried.
_N_RAGGED = 3


class Scratch:
    """A copy of a model to try cuts on, in fp64 and evaluation mode.

    Every run draws the same random numbers. Noise is added to its weights, because fresh ones
    (biases of zero, norms and scales of one) would hide mistakes.

    Args:
        model: It does not change.
        example: A batch it takes.

    Attributes:
        full: The outputs with all heads.
        random: Whether other random numbers give other outputs, although it is in evaluation mode.

    Raises:
        UnsupportedModel: it cannot be copied.
        VerificationFailed: it does not run in fp64, or two runs differ.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        # 1. The copy. Some modules draw random numbers when they are copied or converted.
        with torch.random.fork_rng(devices=[]):
            self.model = double_(_copied(unwrap(model))).eval()
        moved = to_device(example, device_of(self.model))
        self.example = over_tensors(moved, lambda t: t.double() if t.is_floating_point() else t)

        # 2. Other weights than fresh ones.
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._add_noise()
        if not _is_finite(self._first_run()):  # noise may cause an overflow: do without
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(own[name])

        # 3. The outputs that gated and pruned models are compared with.
        self.full = self._first_run()
        if not _is_finite(self.full):
            must = "one on which the model's outputs are no NaN"
            raise VerificationFailed("the example", must, "NaN, or no outputs")
        if largest_difference(self.run(), self.full) > 0:
            must = "one that gives the same outputs twice"
            raise VerificationFailed("the model", must, "random outputs")
        self.random = largest_difference(self.run(seed=1), self.full) > 0

    def _add_noise(self) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.grad = None
                if not parameter.is_floating_point():
                    continue
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                # A constant tensor and a single number have no spread: they get 0.02.
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                parameter.add_(noise.to(parameter.device), alpha=0.02 + 0.1 * spread)

    def _first_run(self) -> list[Tensor]:
        try:
            return self.run()
        except Exception as error:
            must = "one that runs in fp64 on the example"
            raise VerificationFailed("the model", must, error_line(error)) from error

    def run(self, graph: bool = False, seed: int = 0) -> list[Tensor]:
        """Every output that is a number."""
        with self.running(seed), Doubled(), torch.set_grad_enabled(graph):
            return outputs(call(self.model, self.example))

    @contextmanager
    def running(self, seed: int = 0) -> Iterator[None]:
        """Fix the random numbers, and make fp64 the type of tensors that name none."""
        with undisturbed(self.model, frozen=False), default_dtype(torch.float64):
            torch.manual_seed(seed)
            yield

    def gradients(self, inside: tuple[str, ...]) -> list[Tensor]:
        """Gradients of a weighted sum of all outputs, for parameters that no cut changes.

        Args:
            inside: Prefixes of the names of the others.
        """
        # Parameters of cut modules have other shapes.
        uncut = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not name.startswith(inside):
                uncut.append(parameter)
        terms = [torch.zeros((), dtype=torch.float64)]  # stack needs one
        terms += [_objective(t) for t in self.run(graph=True) if t.requires_grad]
        objective = torch.stack(terms).sum()
        if not uncut or not objective.requires_grad:
            return []
        gradients = torch.autograd.grad(objective, uncut, allow_unused=True)
        return [g for g in gradients if g is not None]


def largest_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, relative to the largest output or 1.

    Infinite where shapes differ, or the places of NaN and infinity.
    """
    if len(actual) != len(expected):
        return float("inf")
    largest = 0.0
    for a, b in zip(actual, expected, strict=True):
        if a.shape != b.shape:
            return float("inf")
        a = a.detach().double()
        b = b.detach().double()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        # Masked positions may be infinite.
        a = a[a.isfinite()]
        b = b[b.isfinite()]
        if a.numel():
            difference = float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
            largest = max(largest, difference)
    return largest


def error_line(error: Exception) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def cut_difference(
    scratch: Scratch, sites: Sites, mask: HeadMask, gradients: bool = False
) -> float:
    """Largest |gated - pruned| for one mask, relative to the largest output.

    The scratch model is restored afterwards.

    Args:
        scratch: The model.
        sites: Its sites.
        mask: The heads to keep.
        gradients: Whether gradients are compared too.

    Raises:
        UnsupportedModel: something that must not be cut.
        VerificationFailed: the pruned model does not run.
    """
    inside = tuple(f"{s.name}." if s.name else "" for s in sites)
    # 1. Gates of zero for the removed heads.
    with gated(scratch.model, mask, sites):
        expected = scratch.run()
        expected_gradients = scratch.gradients(inside) if gradients else []
    # 2. The cut.
    undo = cut_(scratch.model, bind(scratch.model, sites), mask)
    try:
        difference = largest_difference(scratch.run(), expected)
        if gradients:
            actual_gradients = scratch.gradients(inside)
            difference = max(difference, largest_difference(actual_gradients, expected_gradients))
        return difference
    except Exception as error:  # a model that is cut wrongly may raise anything
        must = "one that runs on the example"
        raise VerificationFailed("the pruned model", must, error_line(error)) from error
    finally:
        undo.restore()


def prove(scratch: Scratch, sites: Sites) -> float:
    """Prove that cuts of these sites are exact.

    Args:
        scratch: The model.
        sites: All of them are cut together.

    Returns:
        The largest |gated - pruned| over all masks, relative to the largest output.

    Raises:
        VerificationFailed: gates without effect or on the wrong example, or a cut that differs from
            the gated model.
    """
    if all(len(s.units) < 2 for s in sites):
        must = "with two units or more at one of them"
        raise VerificationFailed("the sites", must, "one unit each")
    # 1. Gates act on the heads of their site and on their example.
    _check_effects(scratch, sites)
    _check_examples(scratch, sites)
    _check_independence(scratch)

    # 2. Cuts equal gates; gradients cost more and are compared for two masks.
    largest = 0.0
    for index, mask in enumerate(masks(sites)):
        difference = cut_difference(scratch, sites, mask, gradients=index < 2)
        if not difference <= ROUNDING:  # NaN fails too
            must = f"equal to the gated one up to {ROUNDING:.0e}"
            n_removed = mask.n_heads - mask.n_kept
            got = f"a difference of {difference:.1e} with {n_removed} heads removed"
            raise VerificationFailed("the pruned model", must, got)
        largest = max(largest, difference)
    return largest


def masks(sites: Iterable[AttentionSite]) -> list[HeadMask]:
    """Masks to prove: ragged ones, each part removed alone, two units kept.

    Every site keeps a head, and all masks obey the sites' policies. A part is a unit; under
    ``balanced`` also one head of each group. Parts are removed at all sites at once.
    """
    sites = [s for s in sites if s.heads]
    counts = {s.name: s.n_query_heads for s in sites}
    kept: list[dict[str, Iterable[int]]] = []
    # Another number of units at every site, and with every seed.
    for seed in range(_N_RAGGED):
        draw = random.Random(seed)
        kept.append({s.name: _ragged(s, draw, i + seed) for i, s in enumerate(sites)})
    n_parts = max(map(len, map(_parts, sites)), default=0)
    for index in range(n_parts):
        without: dict[str, Iterable[int]] = {s.name: _without_part(s, index) for s in sites}
        kept.append(without)
    kept.append({s.name: _last_two(s) for s in sites})
    return [HeadMask.from_keep(heads, counts) for heads in kept]


def mask_without_first(sites: Iterable[AttentionSite]) -> HeadMask:
    """The mask without each site's first part.

    It is tried first: it keeps many heads, and a few could fit a wrong shape by broadcasting.
    """
    return masks(sites)[_N_RAGGED]


def _is_balanced(site: AttentionSite) -> bool:
    return site.policy == "balanced" and site.bundles is None and len(site.groups) > 1


def _parts(site: AttentionSite) -> list[tuple[int, ...]]:
    """The smallest sets of heads that can be removed from a site."""
    if not _is_balanced(site):
        return list(site.units)
    # The first heads of all groups, then the second ones, as far as every group has them.
    across = list(zip(*site.groups, strict=False))
    if len(across) < 2:
        return list(site.groups)
    return [*across, *site.groups]


def _without_part(site: AttentionSite, index: int) -> list[int]:
    """The heads of a site without one part; all where it has no other."""
    parts = _parts(site)
    removed = parts[index] if index < len(parts) else ()
    return sorted(set(site.heads) - set(removed)) or list(site.heads)


def _ragged(site: AttentionSite, draw: random.Random, number: int) -> list[int]:
    """Random heads to keep: whole units, or equally many of some groups."""
    if not _is_balanced(site):
        units = draw.sample(site.units, 1 + number % max(1, len(site.units) - 1))
        return sorted(chain.from_iterable(units))
    groups = draw.sample(site.groups, 1 + number % len(site.groups))
    n_heads = 1 + draw.randrange(min(map(len, groups)))
    kept: list[int] = []
    for group in groups:
        kept += draw.sample(group, n_heads)
    return sorted(kept)


def _last_two(site: AttentionSite) -> list[int]:
    """The last two units or, under ``balanced``, the last head of the last two groups."""
    if _is_balanced(site):
        return sorted(group[-1] for group in site.groups[-2:])
    return sorted(chain.from_iterable(site.units[-2:]))


def _check_effects(scratch: Scratch, sites: Sites) -> None:
    """Gates of zero at any one site must change the outputs."""
    for site in sites:
        gates = {site.name: torch.zeros(len(site.heads), dtype=torch.float64)}
        with gated(scratch.model, gates, sites):
            if largest_difference(scratch.run(), scratch.full) == 0:
                must = "a module whose heads change the example's outputs"
                got = "the same outputs with all its gates at zero"
                raise VerificationFailed(site.name, must, got)


def _check_examples(scratch: Scratch, sites: Sites) -> None:
    """Gates of one example must change that example's outputs only."""
    n = batch_size(scratch.example, "example")
    if n < 2:
        return
    for chosen in range(n):
        row = torch.ones(n, 1, dtype=torch.float64)  # gates: [examples, heads]
        row[chosen] = 0.0
        gates = {s.name: row.expand(n, len(s.heads)) for s in sites}
        with gated(scratch.model, gates, sites):
            changed = _changed_examples(scratch.run(), scratch.full, n)
        # Outputs that combine examples, such as a loss, are no evidence against it.
        if changed and [chosen] not in changed:
            where = f"a gate of zero for example {chosen}"
            must = "without effect on other examples"
            raise VerificationFailed(where, must, f"changes in examples {changed[0]}")


def _check_independence(scratch: Scratch) -> None:
    """Another input in one row must change no other row's outputs.

    The first axis of a model that takes the sequence first holds tokens, which attend to each
    other, though a gate of one of them may change that one alone.
    """
    n = batch_size(scratch.example, "example")
    if n < 2:
        return

    def with_row_repeated(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != n:
            return tensor
        tensor = tensor.clone()
        tensor[1] = tensor[0]
        return tensor

    example = scratch.example
    scratch.example = over_tensors(example, with_row_repeated)
    try:
        outputs_now = scratch.run()
    except Exception:  # row 1 does not fit the rest of the example; the example itself runs
        return
    finally:
        scratch.example = example
    changed = _changed_examples(outputs_now, scratch.full, n)
    if any(changed) and [1] not in changed:
        must = "examples on the first axis, none of which changes what the model makes of another"
        got = f"changes in rows {max(changed, key=len)} for row 1"
        hint = "Give the model an input with the examples first, and let it turn the axes."
        raise VerificationFailed("the example", must, got, hint)


def _changed_examples(actual: list[Tensor], expected: list[Tensor], n: int) -> list[list[int]]:
    """Rows that differ, for each output with one row per example."""
    changed = []
    for a, b in zip(actual, expected, strict=False):
        if a.ndim and a.shape[0] == n:
            changed.append(_changed_rows(a, b))
    return changed


def _changed_rows(actual: Tensor, expected: Tensor) -> list[int]:
    rows = []
    for row in range(len(actual)):
        difference = largest_difference([actual[row]], [expected[row]])
        if difference > ROUNDING:
            rows.append(row)
    return rows


def _objective(output: Tensor) -> Tensor:
    """A number that depends on every finite output in its own way."""
    output = output[output.isfinite()]
    # Weights, so that opposite changes do not cancel; squares, so that signs are compared too.
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
    return (output * weights).sum() + (output**2).mean()


def _copied(model: nn.Module) -> nn.Module:
    name = type(model).__name__
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        must = "a model of Python code, which can be watched"
        raise UnsupportedModel(name, must, "one with modules compiled by torch.jit")
    try:
        return copy.deepcopy(model)
    except Exception as error:
        must = "a model that copy.deepcopy copies, for cuts are tried on a copy"
        got = error_line(error)
        hint = ""
        if "weight_norm" in got:
            hint = (
                "Replace torch.nn.utils.weight_norm by"
                " torch.nn.utils.parametrizations.weight_norm, or remove it."
            )
        raise UnsupportedModel(name, must, got, hint) from error


def _is_finite(values: list[Tensor]) -> bool:
    """Whether there are outputs, and none is NaN."""
    n_values = 0
    for tensor in values:
        if bool(tensor.isnan().any()):
            return False
        n_values += tensor.numel()
    return n_values > 0
