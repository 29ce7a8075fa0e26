"""Fingerprints: is this the model a plan was made for (structure), and does it have the same
weights?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.attention.sharded import own_class, whole
from headprune.core.errors import PlanMismatch
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.scores import ModelFingerprint
from headprune.model.offloaded import offloaded
from headprune.model.sites import unwrap
from headprune.model.transfers import in_main_memory, sent

_SAMPLES = 1024
#: Gives sampled values of a tensor that is not in memory, by its name.
Sampler = Callable[[str, Tensor], bytes]


def fingerprint(
    model: nn.Module, sites: Iterable[AttentionSite], sampled: Sampler | None = None
) -> ModelFingerprint:
    """Tells models apart.

    ``structure`` covers the model's class and its sites with their ORIGINAL head counts, so that a
    cut leaves it as it is. ``weights`` covers the name, type and shape of every tensor and up to
    1024 evenly spaced values of each: any training changes it, a change of single values that fall
    between the samples does not.

    Args:
        model: The model.
        sites: Its sites.
        sampled: ``sampled_bytes`` of tensors that lie elsewhere, where the model has no memory for
            them.
    """
    model = unwrap(model)
    parts = [own_class(model).__name__]
    parts += [
        f"{s.name} {s.layout} {s.n_query_heads} {s.n_kv_heads} {s.head_dim} {s.value_dim}"
        for s in sites
    ]
    structure = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    weights, away = hashlib.sha256(), offloaded(model)
    tensors = {
        name: tensor for name, tensor in weights_of(model).items() if isinstance(tensor, Tensor)
    }
    if sampled is not None:
        values = [sampled(name, tensor) for name, tensor in tensors.items()]
    else:
        values = sampled_bytes(
            away[name].read() if name in away else tensor for name, tensor in tensors.items()
        )
    for (name, tensor), some in zip(tensors.items(), values, strict=True):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        weights.update(some)
    return ModelFingerprint(structure, weights.hexdigest())


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over every byte of every tensor, with its name: one read of all weights."""
    model = unwrap(model)
    digest, away = hashlib.sha256(), offloaded(model)
    for name, tensor in weights_of(model).items():
        if isinstance(tensor, Tensor):
            here = away[name].read() if name in away else tensor
            digest.update(f"{name} {here.dtype} {tuple(here.shape)}".encode())
            digest.update(_bytes(whole(here.detach()).reshape(-1)))
    return digest.hexdigest()


def sampled_bytes(tensors: Iterable[Tensor]) -> list[bytes]:
    """Up to 1024 evenly spaced values of each tensor.

    What lies on an accelerator is picked there, and all of it comes in one copy: Python waits for
    every copy. Each tensor is read when its turn comes, so that offloaded and sharded ones are in
    memory one at a time.
    """
    picked: list[Tensor] = []  # bytes
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
        # A class of its own, as of quantised weights, may not be seen as bytes where it lies.
        plain = values if type(values) is Tensor else values.cpu()
        picked.append(plain.contiguous().view(torch.uint8))
    return [some.numpy().tobytes() for some in in_main_memory(picked)]


def _bytes(flat: Tensor) -> memoryview:
    """Those of a flat tensor, in place where it lies in main memory."""
    return flat.cpu().contiguous().view(torch.uint8).numpy().data


def sample_positions(count: int) -> list[int]:
    """Evenly spaced positions among so many values, both ends with them."""
    places = torch.linspace(0, count - 1, min(_SAMPLES, count), dtype=torch.float64, device="cpu")
    positions: list[int] = places.long().tolist()
    return positions


def check_plan(
    model: nn.Module,
    sites: Iterable[AttentionSite],
    plan: PruningPlan | HeadMask,
    sampled: Sampler | None = None,
) -> list[str]:
    """Checks that a plan is for a model of this structure; returns what a user should know besides.

    Raises:
        PlanMismatch: the model has other sites or other head counts than the plan speaks of.
    """
    sites = list(sites)
    mask = plan.mask if isinstance(plan, PruningPlan) else plan
    have = {s.name: s.n_query_heads for s in sites}
    want = {r.site: r.n_heads for r in mask.rows}
    hint = (
        "Score and select on this model, or load the model that the plan was made for; if it was"
        " made for some sites"
    )
    hint += " only, pass the same sites=."
    if have != want:
        differing = [k for k in have.keys() | want.keys() if have.get(k) != want.get(k)]
        first = min(differing, key=lambda k: (k in have, k))  # what is missing says most
        must = f"for a model with {want.get(first, 'no')} heads at {first!r}, like the plan's"
        there = f"{have[first]} heads there" if first in have else "one without such a site"
        got = f"{there} ({len(differing)} of {len(have | want)} sites differ)"
        raise PlanMismatch("plan", must, got, hint)
    if not isinstance(plan, PruningPlan) or plan.model is None:
        return []
    here = fingerprint(model, sites, sampled)
    if here.structure != plan.model.structure:
        raise PlanMismatch(
            "plan", "for a model of this structure", "one for another class or head width", hint
        )
    if here.weights != plan.model.weights:
        return ["the plan was made for a model of the same structure with other weights"]
    return []
