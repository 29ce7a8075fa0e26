"""Fingerprints: is this the model that a plan was made for, and does it have the same weights?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.attention.sharded import own_class, whole
from headprune.core.errors import PlanMismatch
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.scores import ModelFingerprint
from headprune.model.offloaded import OffloadedTensor, offloaded
from headprune.model.sites import unwrap
from headprune.model.transfers import in_main_memory, sent

_SAMPLES = 1024
#: Returns sampled values of a tensor that is not in memory, by its name.
Sampler = Callable[[str, Tensor], bytes]


def fingerprint(
    model: nn.Module, sites: Iterable[AttentionSite], sampled: Sampler | None = None
) -> ModelFingerprint:
    """Compute digests that distinguish models.

    ``structure`` covers the model's class and its sites with their ORIGINAL head counts, so that a
    cut does not change it. ``weights`` covers the name, type and shape of every tensor and up to
    1024 evenly spaced values of each: any training changes it, a change of single values that fall
    between the samples does not.

    Args:
        model: The model.
        sites: Its sites.
        sampled: Returns what ``sampled_bytes`` would, for tensors that are not in memory.
    """
    model = unwrap(model)
    parts = [own_class(model).__name__]
    for s in sites:
        sizes = f"{s.n_query_heads} {s.n_kv_heads} {s.head_dim} {s.value_dim}"
        parts.append(f"{s.name} {s.layout} {sizes}")
    # Names and sizes, and no weights.
    structure = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    # A state dict may hold other things than tensors.
    tensors = {name: x for name, x in weights_of(model).items() if isinstance(x, Tensor)}
    if sampled is not None:
        values = [sampled(name, tensor) for name, tensor in tensors.items()]
    else:
        values = sampled_bytes(_in_memory(tensors, offloaded(model)))
    weights = hashlib.sha256()
    for (name, tensor), sample in zip(tensors.items(), values, strict=True):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        weights.update(sample)
    return ModelFingerprint(structure, weights.hexdigest())


def _in_memory(
    tensors: Mapping[str, Tensor], away: Mapping[str, OffloadedTensor]
) -> Iterator[Tensor]:
    """Tensors with their numbers; offloaded ones are read one at a time."""
    for name, tensor in tensors.items():
        yield away[name].read() if name in away else tensor


def weights_digest(model: nn.Module) -> str:
    """Compute SHA-256 over the name and every byte of every tensor; reads all weights once."""
    model = unwrap(model)
    digest, away = hashlib.sha256(), offloaded(model)
    for name, tensor in weights_of(model).items():
        if isinstance(tensor, Tensor):
            here = away[name].read() if name in away else tensor
            digest.update(f"{name} {here.dtype} {tuple(here.shape)}".encode())
            digest.update(_bytes(whole(here.detach()).reshape(-1)))
    return digest.hexdigest()


def sampled_bytes(tensors: Iterable[Tensor]) -> list[bytes]:
    """Sample up to 1024 evenly spaced values of each tensor.

    Values of an accelerator are picked there and come in one copy, because Python waits for every
    copy. Each tensor is read when its turn comes, so that offloaded and sharded ones are in memory
    one at a time.
    """
    picked: list[Tensor] = []  # as bytes
    # Tensors of one size share their positions.
    positions: dict[tuple[int, torch.device], Tensor] = {}
    for tensor in tensors:
        if tensor.device.type == "meta" or not tensor.numel():
            picked.append(torch.empty(0, dtype=torch.uint8))
            continue
        flat = whole(tensor.detach()).reshape(-1)
        count = flat.numel()
        if (count, flat.device) not in positions:
            positions[count, flat.device] = sent(sample_positions(count), flat.device)
        values = flat[positions[count, flat.device]]
        # A tensor of another class, as of quantised weights, may have no bytes on its device.
        plain = values if type(values) is Tensor else values.cpu()
        picked.append(plain.contiguous().view(torch.uint8))
    return [sample.numpy().tobytes() for sample in in_main_memory(picked)]


def _bytes(flat: Tensor) -> memoryview:
    """The bytes of a flat tensor, without a copy if it is in main memory."""
    return flat.cpu().contiguous().view(torch.uint8).numpy().data


def sample_positions(count: int) -> list[int]:
    """Choose evenly spaced positions among so many values, both ends included."""
    places = torch.linspace(0, count - 1, min(_SAMPLES, count), dtype=torch.float64, device="cpu")
    positions: list[int] = places.long().tolist()
    return positions


def check_plan(
    model: nn.Module,
    sites: Iterable[AttentionSite],
    plan: PruningPlan | HeadMask,
    sampled: Sampler | None = None,
) -> list[str]:
    """Check that a plan is for a model of this structure.

    Returns:
        Warnings for the user.

    Raises:
        PlanMismatch: the model has other sites or other head counts than the plan.
    """
    sites = list(sites)
    mask = plan.mask if isinstance(plan, PruningPlan) else plan
    have = {s.name: s.n_query_heads for s in sites}
    want = {r.site: r.n_heads for r in mask.rows}
    hint = (
        "Score and select on this model, or load the model that the plan was made for; if it was"
        " made for some sites only, pass the same sites=."
    )
    if have != want:
        names = have.keys() | want.keys()
        differing = [name for name in names if have.get(name) != want.get(name)]
        # A site that the model lacks explains most, so it comes first.
        first = min(differing, key=lambda name: (name in have, name))
        must = f"for a model with {want.get(first, 'no')} heads at {first!r}, like the plan's"
        there = f"{have[first]} heads there" if first in have else "one without such a site"
        got = f"{there} ({len(differing)} of {len(names)} sites differ)"
        raise PlanMismatch("plan", must, got, hint)
    # A mask, or a plan made by hand, knows no model.
    if not isinstance(plan, PruningPlan) or plan.model is None:
        return []
    here = fingerprint(model, sites, sampled)
    if here.structure != plan.model.structure:
        must, got = "for a model of this structure", "one for another class or head width"
        raise PlanMismatch("plan", must, got, hint)
    if here.weights != plan.model.weights:
        return ["the plan was made for a model of the same structure with other weights"]
    return []
