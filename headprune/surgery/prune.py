"""``prune_``: remove heads from the weights, and compare the result with the gated model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from headprune.core.coverage import coverage_note
from headprune.core.errors import (
    HeadPruneError,
    InvalidValue,
    UnknownName,
    VerificationFailed,
    error_text,
)
from headprune.core.heads import AttentionSite, HeadCounts, HeadMask, without
from headprune.core.indices import indices
from headprune.core.plan import PruningPlan
from headprune.core.record import Proof
from headprune.gating.context import gated, site_names
from headprune.layouts import is_registered
from headprune.model.cut import Undo, cut_
from headprune.model.fingerprint import check_plan
from headprune.model.offloaded import count_parameters
from headprune.model.own_code import own_code
from headprune.model.running import batch_size
from headprune.model.sites import BoundSite, Sites, bind, find_sites, not_taken, sites_for, unwrap
from headprune.model.wrappers import check_unwrapped, retire_wrappers
from headprune.surgery.masked import MaskedCalls
from headprune.surgery.parameters import (
    CutParameter,
    Optimizers,
    Replaced,
    carry_,
    checked,
    successions,
    watch_optimizers,
)
from headprune.surgery.verify import SIZE_NOT_CUT, compare, sample_outputs


@dataclass(frozen=True)
class PruneReport:
    """What ``prune_`` did.

    Args:
        removed: Original indices of the removed heads, by site.
        sites: The sites after the cut.
        params_before, params_after: Numbers of parameters of the whole model.
        proof: The comparison with the gated model; None where no example was given.
        warnings: Notes for the user.
        parameters: What became of each parameter that changed; a shared one under each of its
            names.
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
        """Removed heads and neurons together."""
        return sum(len(heads) for _, heads in self.removed)

    def _counts(self) -> str:
        """Heads, and neurons where feed-forwards are among the sites, as text."""
        now = HeadCounts.present(self.sites)
        if now.neurons is None:
            return f"removed {self.n_removed} heads"
        removed = dict(self.removed)
        before = HeadCounts.sum(
            (len(site.heads) + len(removed.get(site.name, ())), site.is_feed_forward)
            for site in self.sites
        )
        return f"{now.of(before)} kept"

    def __str__(self) -> str:
        percent = 100 * (self.params_after / self.params_before - 1)
        sizes = f"{self.params_before:,} -> {self.params_after:,} parameters ({percent:+.1f} %)"
        text = f"{self._counts()}, {sizes}"
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
    """Remove from ``model``, in place, every head that ``plan`` does not keep.

    dtype, device, ``requires_grad``, tied weights, module hooks and training mode do not change.
    Parameters are replaced: make optimizers afterwards, or pass them. Hooks on a parameter itself
    stay with the old one. A second plan composes with the first; a layer may lose all its heads.
    After any error the model is as before.

    Args:
        model: A model with the plan's sites.
        plan: Kept heads in original indices; or an array ``[layers, heads]`` of 1 (kept) and 0
            (removed).
        example: A batch of the model. With it the pruned model is compared with the gated one.
            Needed where an attention runs code of your own (a subclass's ``forward``, a hook),
            which is tried under other masks too.
        sites: Default ``find_sites`` with the plan's policy and sites.
        optimizer: One or several of the model's, which go on with new parameters and their part
            of the state.

    Raises:
        InvalidValue: no example where one is needed.
        PlanMismatch: the plan is for another structure.
        VerificationFailed: the two differ by more than rounding, or one fails.
        UnsupportedModel: a projection that cannot be cut, or a wrapper that would keep the old
            parameters (``DistributedDataParallel``).
    """
    if sites is None:
        policy = plan.policy if isinstance(plan, PruningPlan) else "group"
        sites = sites_for(model, site_names(plan), policy)
    # Sites from elsewhere come without layouts of their own.
    located = sites if isinstance(sites, Sites) else Sites(sites, ())
    plan = _as_plan(plan, located)
    bound = bind(model, located)
    notes = check_plan(model, [b.site for b in bound], plan)
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    mask = plan.mask if isinstance(plan, PruningPlan) else plan
    report, replaced = _cut_and_compared(model, bound, mask, example, located, optimizer, notes)
    # What still holds old parameters would train them in vain: it warns, or refuses to run.
    changed = dict(report.removed)
    retire_wrappers(b.module for b in bound if b.site.name in changed)
    watch_optimizers(replaced)
    return report


def _cut_and_compared(
    model: nn.Module,
    bound: list[BoundSite],
    mask: HeadMask,
    example: Any,
    located: Sites,
    optimizer: Optimizers | None,
    notes: list[str],
) -> tuple[PruneReport, list[Replaced]]:
    """The work of ``prune_``, with weak references to the replaced parameters."""
    # 1. Whatever refuses the cut before anything is changed.
    beyond = not_taken(model, located)
    n_examples = 0 if example is None else batch_size(example, "example")
    removed, own = _changes(bound, mask)
    masked = MaskedCalls(list(own))
    before = count_parameters(model)
    check_unwrapped(model, [name for name, _ in removed], "cut before it is wrapped")
    optimizers = checked(optimizer, unwrap(model))
    old = dict(unwrap(model).named_parameters(remove_duplicate=False))
    # Two, because `cut_` returns its own only when it succeeds.
    undo, done = Undo(), Undo()
    try:
        undo.remember(unwrap(model))
        # 2. Outputs of the gated model.
        expected = None
        if example is not None:
            with gated(model, mask, located):
                with masked.watched():
                    expected = sample_outputs(model, example)
                masked.expect(model)
        # 3. The cut, compared with them.
        done = cut_(model, bound, mask)
        proof = None
        if expected is None:
            _check_no_own_code(own)
        else:
            proof = _prove(model, example, expected, n_examples, own)
        masked.check(model)
        # 4. The model as it is now, and its optimizers.
        after = count_parameters(model)
        now = Sites((b.site for b in bind(model, located)), located.layouts.values(), beyond)
        changes = successions(old, unwrap(model), done.shortened)
        unproven = () if proof else _unproven(bound, removed)
        warned = (*notes, *unproven, *carry_(optimizers, changes), *coverage_note(beyond))
    except BaseException:
        done.restore()
        undo.restore()
        raise
    cuts = tuple(change.cut for change in changes)
    report = PruneReport(removed, now, before, after, proof, warned, cuts)
    # Weak, so that nothing here keeps the old parameters alive.
    return report, [weakref.ref(change.old) for change in changes if change.new is not change.old]


def _as_plan(plan: Any, sites: Sites) -> PruningPlan | HeadMask:
    """A plan or a mask unchanged, an array ``[layers, heads]`` as a mask."""
    if isinstance(plan, (PruningPlan, HeadMask)):
        return plan
    if not hasattr(plan, "tolist") and not isinstance(plan, (list, tuple)):
        must = "a PruningPlan, a HeadMask or an array [layers, heads] of 0 and 1"
        raise InvalidValue("plan", must, type(plan).__name__)
    return HeadMask.from_array(plan, sites)


def _changes(
    bound: list[BoundSite], mask: HeadMask
) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], dict[BoundSite, str]]:
    """The heads that each site loses, and the user's own code at sites that lose some.

    No layout was proven on such code, so the cut of these sites is compared under masks.
    """
    removed: list[tuple[str, tuple[int, ...]]] = []
    own: dict[BoundSite, str] = {}
    for b in bound:
        kept = frozenset(mask.kept(b.site.name))
        heads = tuple(head for head in b.site.heads if head not in kept)
        if not heads:
            continue
        removed.append((b.site.name, heads))
        # Sites that lose nothing are not cut, so their code does not matter.
        code = own_code(b)
        if code is not None:
            own[b] = code
    return tuple(removed), own


def _check_no_own_code(own: Mapping[BoundSite, str]) -> None:
    """Refuse a cut of the user's own code that nothing is compared with.

    Raises:
        InvalidValue: names the first such code.
    """
    for b, code in own.items():
        must = (
            "a batch, because this cut runs code of your own, on which layout"
            f" {b.layout.name!r} was not proven"
        )
        hint = (
            "Pass example=batch: the cut model is compared with the gated one on it, and under"
            " other masks. A layout that your own package registers needs none (CONTRIBUTING.md)."
        )
        raise InvalidValue("prune_(example=)", must, f"None, with {code}", hint)


def _unproven(
    bound: Iterable[BoundSite], removed: Iterable[tuple[str, tuple[int, ...]]]
) -> tuple[str, ...]:
    """The warning where a user's own layout was cut and nothing was compared."""
    cut = {name for name, _ in removed}
    own = {b.layout.name for b in bound if b.site.name in cut and not is_registered(b.layout)}
    if not own:
        return ()
    names = ", ".join(map(repr, sorted(own)))
    return (
        f"Nothing was compared, and layout {names} is not a registered one: if it is wrong, so is"
        " the cut model. Pass example=batch.",
    )


def _prove(
    model: nn.Module,
    example: Any,
    expected: list[Tensor],
    n_examples: int,
    own: Mapping[BoundSite, str],
) -> Proof:
    """The comparison of the cut model with the gated one's outputs."""
    try:
        found = sample_outputs(model, example)
    except (HeadPruneError, MemoryError, torch.OutOfMemoryError):
        raise
    # The same example ran before the cut. Code that counts heads itself may raise anything.
    except Exception as error:
        must = "able to run, as the gated one is"
        got = error_text(error)
        raise VerificationFailed("the pruned model", must, got, SIZE_NOT_CUT) from error
    difference = compare(expected, found)
    if not difference.holds:
        must = f"equal to the gated one up to {difference.tolerance:.1e}"
        hint = "The model is unchanged. Its layout does not fit it: please report it."
        if own:
            code = "; ".join(own.values())
            together = "This code may treat several heads or neurons together"
            hint = f"The model is unchanged. {together}: {code}."
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
    """Remove heads ``{layer: [heads]}``, as the call of Transformers 4 does.

    Layers are counted over the sites in model order; a negative layer counts from the last. Heads
    are original indices: a list, a set, a NumPy array or a tensor. A head that is already removed
    may be named again, as in Transformers 4.

    Raises:
        UnknownName: a layer or a head that does not exist.
        InvalidValue: no collection of indices.
    """
    if sites is None:
        sites = find_sites(model)
    located = sites if isinstance(sites, Sites) else Sites(sites, ())
    if not isinstance(heads, Mapping):
        hint = "For example {0: [1, 2]}."
        raise InvalidValue("heads", "{layer: [heads]}", type(heads).__name__, hint)
    removed: dict[str, set[int]] = {}
    for layer, listed in heads.items():
        # A bool is an integer in Python, but no index.
        number = isinstance(layer, Integral) and not isinstance(layer, bool)
        if not number or not -len(located) <= layer < len(located):
            must = f"an index from {-len(located)} to {len(located) - 1}"
            raise UnknownName("layer", must, repr(layer))
        site = located[int(layer)]
        for head in indices(listed, f"heads of layer {layer}", site.n_query_heads):
            if not 0 <= head < site.n_query_heads:
                must = f"an index from 0 to {site.n_query_heads - 1}"
                raise UnknownName(f"head of layer {layer}", must, head)
            removed.setdefault(site.name, set()).add(head)
    return prune_(model, without(located, removed), example, located, optimizer=optimizer)
