"""``prune_``: heads leave for good; W_q, W_k, W_v and W_o shrink, and the result is proven equal to
the gated model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from numpy.typing import ArrayLike
from torch import Tensor, nn

from headprune.core.coverage import coverage_note
from headprune.core.errors import InvalidValue, UnknownName, VerificationFailed
from headprune.core.heads import AttentionSite, HeadMask, without
from headprune.core.indices import indices
from headprune.core.plan import PruningPlan
from headprune.core.record import Proof
from headprune.gating.context import gated
from headprune.model.cut import Undo, cut_
from headprune.model.fingerprint import check_plan
from headprune.model.offloaded import count_parameters
from headprune.model.own_code import own_code
from headprune.model.running import batch_size
from headprune.model.sites import BoundSite, Sites, bind, find_sites, not_taken, unwrap
from headprune.model.wrappers import check_unwrapped, retire_wrappers
from headprune.surgery.masked import MaskedCalls
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
        parameters: What became of each parameter that is not as it was; a shared one stands under
            each of its names.
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
        return (
            f"{text}, |gated - pruned| <= {self.proof.max_difference:.1e} (allowed"
            f" {self.proof.tolerance:.1e})"
        )


def prune_(
    model: nn.Module,
    plan: PruningPlan | HeadMask | ArrayLike,
    example: Any = None,
    sites: Iterable[AttentionSite] | None = None,
    *,
    optimizer: Optimizers | None = None,
) -> PruneReport:
    """Removes from ``model``, in place, every head that ``plan`` does not keep.

    dtype, device, ``requires_grad``, tied weights, module hooks and training mode stay. Parameters
    are replaced: make optimizers afterwards, or pass them; one that goes on without warns. Hooks
    that were registered on a parameter itself stay with the old one. A second plan composes with
    the first; a layer may lose all its heads.

    Args:
        model: A model with the plan's sites.
        plan: Kept heads in original indices; or an array ``[layers, heads]`` of 1 (kept) and 0
            (removed).
        example: A batch the model takes. With it the pruned model is compared with the gated one.
            Needed where an attention runs code of your own (a subclass's ``forward``, a hook),
            which is tried under other masks too.
        sites: Default ``find_sites(model, policy=...)`` with the plan's policy.
        optimizer: One or several of the model's, which go on with the new parameters and their part
            of the state.

    Raises:
        InvalidValue: no example where one is needed.
        PlanMismatch: the plan is for a model of another structure.
        VerificationFailed: pruned and gated differ by more than rounding; the model is as it was.
        UnsupportedModel: a projection that cannot be cut, or a wrapper that would go on with the
            old parameters (``DistributedDataParallel``); the model is as it was, here and after any
            other error.
    """
    policy = plan.policy if isinstance(plan, PruningPlan) else "group"
    if sites is None:
        sites = find_sites(model, policy=policy)
    located = sites if isinstance(sites, Sites) else Sites(sites, ())
    plan = _decided(plan, located)
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
    """The work of ``prune_``; also the parameters that are in the model no more, held by nothing
    here."""
    beyond = not_taken(model, located)
    expected = None
    n_examples = 0 if example is None else batch_size(example, "example")
    own = {b: what for b in bound if (what := _own_code_of_change(b, mask)) is not None}
    masked = MaskedCalls(list(own))
    before = count_parameters(model)
    removed = tuple((b.site.name, heads) for b in bound if (heads := _removed(b.site, mask)))
    check_unwrapped(model, [name for name, _ in removed], "cut before it is wrapped")
    optimizers = checked(optimizer, unwrap(model))
    old = dict(unwrap(model).named_parameters(remove_duplicate=False))
    undo, done = Undo(), Undo()
    try:
        undo.remember(unwrap(model))
        if example is not None:
            with gated(model, mask, located):
                with masked.watched():
                    expected = sample_outputs(model, example)
                masked.expect(model)
        done = cut_(model, bound, mask)
        if expected is None:
            _check_no_own_code(own)
        proof = None if expected is None else _prove(model, example, expected, n_examples)
        masked.check(model)
        after = count_parameters(model)
        now = Sites((b.site for b in bind(model, located)), located.layouts.values(), beyond)
        changes = successions(old, unwrap(model), done.shortened)
        told = (*notes, *carry_(optimizers, changes))
    except BaseException:
        done.restore()
        undo.restore()
        raise
    said = (*told, *coverage_note(beyond))
    report = PruneReport(removed, now, before, after, proof, said, tuple(c.cut for c in changes))
    return report, [weakref.ref(c.old) for c in changes if c.new is not c.old]


def _decided(plan: Any, sites: Sites) -> PruningPlan | HeadMask:
    """A plan or a mask as it is, an array ``[layers, heads]`` as a mask."""
    if isinstance(plan, (PruningPlan, HeadMask)):
        return plan
    if not hasattr(plan, "tolist") and not isinstance(plan, (list, tuple)):
        must = "a PruningPlan, a HeadMask or an array [layers, heads] of 0 and 1"
        raise InvalidValue("plan", must, type(plan).__name__)
    return HeadMask.from_array(plan, sites)


def _removed(site: AttentionSite, mask: HeadMask) -> tuple[int, ...]:
    """The present heads of a site that a mask removes."""
    kept = mask.kept(site.name)
    return tuple(head for head in site.heads if head not in kept)


def _own_code_of_change(b: BoundSite, mask: HeadMask) -> str | None:
    """Code that the layout of a site that loses heads was not proven on, in words."""
    return own_code(b) if _removed(b.site, mask) else None


def _check_no_own_code(own: Mapping[BoundSite, str]) -> None:
    """Refuses a cut that nothing compares, after whatever else refuses it.

    Raises:
        InvalidValue: sites with code of somebody's own.
    """
    for b, what in own.items():
        must = (
            f"a batch that the model takes, for layout {b.layout.name!r} was not proven on code of"
            " your own"
        )
        hint = (
            "Pass example=batch: the cut model is compared with the gated one on it, and under"
            " other masks."
        )
        raise InvalidValue("prune_(example=)", must, f"None, and {what}", hint)


def _prove(model: nn.Module, example: Any, expected: list[Tensor], n_examples: int) -> Proof:
    """The comparison of the cut model with the gated one's outputs."""
    difference = compare(expected, sample_outputs(model, example))
    if not difference.holds:
        must = f"equal to the gated one up to {difference.tolerance:.1e}"
        hint = "The model is unchanged. Its layout does not fit it: please report it."
        raise VerificationFailed(
            "the pruned model", must, f"a difference of {difference.maximum:.3e}", hint
        )
    dtype = str(expected[0].dtype).removeprefix("torch.")
    return Proof(
        "outputs", difference.maximum, difference.scale, difference.tolerance, dtype, n_examples
    )


def prune_heads_(
    model: nn.Module,
    heads: Mapping[int, Iterable[int]],
    example: Any = None,
    sites: Iterable[AttentionSite] | None = None,
    *,
    optimizer: Optimizers | None = None,
) -> PruneReport:
    """The Transformers 4 call: removes heads ``{layer: [heads]}``, layers counted over the sites in
    model order.

    Heads are original indices; one that is gone already may be named again, as in Transformers 4. A
    negative layer counts from the last. Heads may be a list, a set, a NumPy array or a tensor.

    Raises:
        UnknownName: a layer or a head that does not exist.
        InvalidValue: no collection of indices.
    """
    located = (
        sites
        if isinstance(sites, Sites)
        else find_sites(model)
        if sites is None
        else Sites(sites, ())
    )
    removed: dict[str, set[int]] = {}
    for layer, gone in heads.items():
        if (
            isinstance(layer, bool)
            or not isinstance(layer, Integral)
            or not -len(located) <= layer < len(located)
        ):
            raise UnknownName("layer", f"an index below {len(located)}", repr(layer))
        site = located[int(layer)]
        for head in indices(gone, f"heads of layer {layer}", site.n_query_heads):
            if not 0 <= head < site.n_query_heads:
                raise UnknownName(
                    f"head of layer {layer}", f"an index below {site.n_query_heads}", head
                )
            removed.setdefault(site.name, set()).add(head)
    return prune_(model, without(located, removed), example, located, optimizer=optimizer)
