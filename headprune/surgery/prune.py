"""``prune_``: heads leave for good; W_q, W_k, W_v and W_o shrink, and the result is proven equal to the gated model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnknownName, VerificationFailed
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.record import Proof
from headprune.gating.context import gated
from headprune.model.cut import Undo, cut_
from headprune.model.fingerprint import check_plan
from headprune.model.offloaded import count_parameters
from headprune.model.running import batch_size
from headprune.model.sites import BoundSite, Sites, bind, find_sites, unwrap
from headprune.model.wrappers import check_unwrapped, retire_wrappers
from headprune.surgery.parameters import (
    CutParameter,
    Left,
    Optimizers,
    carry_,
    checked,
    successions,
    watch_optimizers,
)
from headprune.surgery.verify import compare, sample_outputs


@dataclass(frozen=True)
class PruneReport:
    """What ``prune_`` did.

    Args:
        removed: Original indices of the heads that left, by site.
        sites: The sites as they are now.
        params_before, params_after: Parameters of the whole model.
        proof: The comparison with the gated model; None where no example was given.
        warnings: What a user should know.
        parameters: What became of each parameter that is not as it was; a shared one stands under each of its names.
    """

    removed: tuple[tuple[str, tuple[int, ...]], ...]
    sites: Sites
    params_before: int
    params_after: int
    proof: Proof | None
    warnings: tuple[str, ...] = ()
    parameters: tuple[CutParameter, ...] = ()

    @property
    def n_removed(self) -> int:
        return sum(len(heads) for _, heads in self.removed)

    def __str__(self) -> str:
        share = 100 * (1 - self.params_after / self.params_before)
        sizes = f"{self.params_before:,} -> {self.params_after:,} parameters (-{share:.1f} %)"
        text = f"removed {self.n_removed} heads, {sizes}"
        if self.proof is None:
            return f"{text}, not compared with the gated model (no example given)"
        return f"{text}, |gated - pruned| <= {self.proof.max_difference:.1e} (allowed {self.proof.tolerance:.1e})"


def prune_(
    model: nn.Module,
    plan: PruningPlan | HeadMask,
    example: Any = None,
    sites: Iterable[AttentionSite] | None = None,
    *,
    optimizer: Optimizers | None = None,
) -> PruneReport:
    """Removes from ``model``, in place, every head that ``plan`` does not keep.

    dtype, device, ``requires_grad``, tied weights, module hooks and training mode stay. Parameters are replaced: make
    optimizers afterwards, or pass them; one that goes on without warns. Hooks that were registered on a parameter
    itself stay with the old one. A second plan composes with the first; a layer may lose all its heads.

    Args:
        model: A model with the plan's sites.
        plan: Kept heads in original indices.
        example: A batch the model takes. With it the pruned model is compared with the gated one.
        sites: Default ``find_sites(model, policy=...)`` with the plan's policy.
        optimizer: One or several of the model's, which go on with the new parameters and their part of the state.

    Raises:
        PlanMismatch: the plan is for a model of another structure.
        VerificationFailed: pruned and gated differ by more than rounding; the model is as it was.
        UnsupportedModel: a projection that cannot be cut, or a wrapper that would go on with the old parameters
            (``DistributedDataParallel``); the model is as it was, here and after any other error.
    """
    if not isinstance(plan, (PruningPlan, HeadMask)):
        raise InvalidValue("plan", "a PruningPlan or a HeadMask", type(plan).__name__)
    policy = plan.policy if isinstance(plan, PruningPlan) else "group"
    if sites is None:
        sites = find_sites(model, policy=policy)
    located = sites if isinstance(sites, Sites) else Sites(sites, ())
    bound = bind(model, located)
    notes = check_plan(model, [b.site for b in bound], plan)
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    mask = plan.mask if isinstance(plan, PruningPlan) else plan
    report, replaced = _cut_and_proven(model, bound, mask, example, located, optimizer, notes)
    retire_wrappers(b.module for b in bound if b.site.name in dict(report.removed))
    watch_optimizers(replaced)
    return report


def _cut_and_proven(
    model: nn.Module,
    bound: list[BoundSite],
    mask: HeadMask,
    example: Any,
    located: Sites,
    optimizer: Optimizers | None,
    notes: list[str],
) -> tuple[PruneReport, list[Left]]:
    """The work of ``prune_``; also the parameters that are in the model no more, held by nothing here."""
    expected = None
    n_examples = 0 if example is None else batch_size(example, "example")
    before = count_parameters(model)
    everything = tuple((b.site.name, tuple(h for h in b.site.heads if h not in mask.kept(b.site.name))) for b in bound)
    gone = tuple((name, heads) for name, heads in everything if heads)
    check_unwrapped(model, [name for name, _ in gone], "cut before it is wrapped")
    optimizers = checked(optimizer, unwrap(model))
    old = dict(unwrap(model).named_parameters(remove_duplicate=False))
    undo, done = Undo(), Undo()
    try:
        undo.remember(unwrap(model))
        if example is not None:
            with gated(model, mask, located):
                expected = sample_outputs(model, example)
        done = cut_(model, bound, mask)
        proof = None if expected is None else _prove(model, example, expected, n_examples)
        after = count_parameters(model)
        now = Sites((b.site for b in bind(model, located)), located.layouts.values())
        changes = successions(old, unwrap(model), done.shortened)
        told = (*notes, *carry_(optimizers, changes))
    except BaseException:
        done.restore()
        undo.restore()
        raise
    report = PruneReport(gone, now, before, after, proof, told, tuple(c.cut for c in changes))
    return report, [weakref.ref(c.old) for c in changes if c.new is not c.old]


def _prove(model: nn.Module, example: Any, expected: list[Tensor], n_examples: int) -> Proof:
    """The comparison of the cut model with the gated one's outputs."""
    difference = compare(expected, sample_outputs(model, example))
    if not difference.holds:
        must = f"equal to the gated one up to {difference.tolerance:.1e}"
        hint = "The model is unchanged. Its layout does not fit it: please report it."
        raise VerificationFailed("the pruned model", must, f"a difference of {difference.maximum:.3e}", hint)
    dtype = str(expected[0].dtype).removeprefix("torch.")
    return Proof("outputs", difference.maximum, difference.scale, difference.tolerance, dtype, n_examples)


def prune_heads_(
    model: nn.Module,
    heads: Mapping[int, Iterable[int]],
    example: Any = None,
    sites: Iterable[AttentionSite] | None = None,
    *,
    optimizer: Optimizers | None = None,
) -> PruneReport:
    """The Transformers 4 call: removes heads ``{layer: [heads]}``, layers counted over the sites in model order.

    Heads are original indices; one that is gone already may be named again, as in Transformers 4.

    Raises:
        UnknownName: a layer or a head that does not exist.
    """
    located = sites if isinstance(sites, Sites) else find_sites(model) if sites is None else Sites(sites, ())
    keep = {s.name: set(s.heads) for s in located}
    for layer, gone in heads.items():
        if not isinstance(layer, int) or not 0 <= layer < len(located):
            raise UnknownName("layer", f"an index below {len(located)}", repr(layer))
        site = located[layer]
        for head in gone:
            if not 0 <= head < site.n_query_heads:
                raise UnknownName(f"head of layer {layer}", f"an index below {site.n_query_heads}", head)
            keep[site.name].discard(head)
    mask = HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in located})
    return prune_(model, mask, example, located, optimizer=optimizer)
