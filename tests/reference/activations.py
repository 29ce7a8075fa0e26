"""Scores from contexts and attention maps written out literally: one example, one token, one
channel at a time.

Slow on purpose, and independent of the package's statistics: contexts are kept whole, means and
variances take two passes, errors leave out one example and start again, maps come from
Transformers' ``output_attentions`` (or from the attention's own ``need_weights``), the scaled maps
of attribution from finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headprune.core.heads import AttentionSite
from tests.reference.scores import Loss, columns, example, n_examples, projection

#: ``[tokens, width]`` of every example.
Contexts = list[Tensor]


def run(model: nn.Module, one: Any) -> Any:
    with torch.no_grad():
        return model(**{k: v for k, v in one.items() if k != "labels"})


def real_tokens(site: AttentionSite, one: dict[str, Any], length: int, decoder: bool) -> list[bool]:
    """Which queries of a batch of one are no padding."""
    if "valid_lens" in one:
        return [t < int(one["valid_lens"][0]) for t in range(length)]
    mask = one.get("decoder_attention_mask") if decoder else one.get("attention_mask")
    return [True] * length if mask is None else [bool(m) for m in mask[0]]


def in_decoder(model: Any, site: AttentionSite) -> bool:
    return site.kind != "self" and getattr(
        getattr(model, "config", None), "is_encoder_decoder", False
    )


def contexts(model: nn.Module, batch: dict[str, Any], site: AttentionSite) -> Contexts:
    """What the output projection reads, example by example, padding left out."""
    found: Contexts = []
    for i in range(n_examples(batch)):
        one = example(batch, i)
        seen: list[Tensor] = []
        handle = projection(model, site).register_forward_pre_hook(
            lambda m, args, kept=seen: kept.append(args[0][0])
        )
        try:
            run(model, one)
        finally:
            handle.remove()
        rows = []
        for x in seen:  # one for every run of the module
            rows += [
                x[t]
                for t, real in enumerate(real_tokens(site, one, len(x), in_decoder(model, site)))
                if real
            ]
        found.append(torch.stack(rows).double())
    return found


def weight_of(model: nn.Module, site: AttentionSite) -> Tensor:
    """``[out, in]``."""
    module = projection(model, site)
    weight = module.weight.detach().double()
    return weight.T if hasattr(module, "nf") else weight


def channels(site: AttentionSite, unit: Sequence[int]) -> list[int]:
    return [j for head in unit for j in range(columns(site, head).start, columns(site, head).stop)]


def jackknifed(
    values: Callable[[Contexts], list[float]], found: Contexts
) -> tuple[list[float], list[float]]:
    """The statistic, and the standard error by leaving out one example at a time."""
    n = len(found)
    left_out = [values(found[:i] + found[i + 1 :]) for i in range(n)]
    errors = []
    for column in zip(*left_out, strict=True):
        mean = sum(column) / n
        errors.append(math.sqrt((n - 1) / n * sum((v - mean) ** 2 for v in column)))
    return values(found), errors


# ---------------------------------------------------------------- contexts


def activation_norm(weight: Tensor, site: AttentionSite, found: Contexts) -> list[float]:
    scores = []
    for unit in site.units:
        total = 0.0
        for j in channels(site, unit):
            total += sum((sum(abs(float(t[j])) for t in x) / len(x)) ** 2 for x in found) / len(
                found
            )
        scores.append(math.sqrt(total))
    return scores


def output_norm(weight: Tensor, site: AttentionSite, found: Contexts) -> list[float]:
    scores = []
    for unit in site.units:
        mine = channels(site, unit)
        means = [sum(float((weight[:, mine] @ t[mine]).norm()) for t in x) / len(x) for x in found]
        scores.append(math.sqrt(sum(m**2 for m in means) / len(means)))
    return scores


def fluctuation(
    weight: Tensor, site: AttentionSite, found: Contexts, normalize: bool = True
) -> list[float]:
    measured = []
    for j in range(weight.shape[1]):
        values = [float(t[j]) for x in found for t in x]
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
        measured.append(variance * sum(float(w) ** 2 for w in weight[:, j]))
    if normalize:
        mean = sum(measured) / len(measured)
        spread = math.sqrt(sum((m - mean) ** 2 for m in measured) / (len(measured) - 1))
        measured = [(m - mean) / spread for m in measured]
    return [
        sum(measured[j] for j in channels(site, unit)) / len(channels(site, unit))
        for unit in site.units
    ]


def wanda(weight: Tensor, site: AttentionSite, found: Contexts) -> list[float]:
    scores = []
    for unit in site.units:
        total = 0.0
        for j in channels(site, unit):
            values = [float(t[j]) for x in found for t in x]
            size = math.sqrt(sum(v**2 for v in values) / len(values))
            total += size * sum(abs(float(w)) for w in weight[:, j]) / len(weight)
        scores.append(total)
    return scores


def obs(weight: Tensor, site: AttentionSite, found: Contexts, ridge: float = 1e-2) -> list[float]:
    """By refitting: the ridge problem is solved without the unit's columns, and its error is
    measured, all by QR.

    The objective ``mean_t |W x_t - V x_t|^2 + lambda |W - V|^2`` is 0 at V = W; ``lambda |.|^2`` is
    a row more for every channel.
    """
    rows = torch.cat(found)
    penalty = ridge * float(rows.square().mean())
    stacked = torch.cat(
        [rows / len(rows) ** 0.5, penalty**0.5 * torch.eye(rows.shape[1], dtype=torch.float64)]
    )
    target = stacked @ weight.T
    scores = []
    for unit in site.units:
        mine = set(channels(site, unit))
        kept = [j for j in range(rows.shape[1]) if j not in mine]
        refitted = (
            torch.linalg.lstsq(stacked[:, kept], target, driver="gelsd").solution if kept else None
        )
        left = target if refitted is None else target - stacked[:, kept] @ refitted
        scores.append(float(left.square().sum()))
    return scores


# ---------------------------------------------------------------- maps


def maps(model: Any, one: dict[str, Any], site: AttentionSite, sites: Any) -> Tensor:
    """``[heads, queries, keys]`` of a batch of one; the model computes eagerly."""
    module = model.get_submodule(site.name)
    if hasattr(module, "W_o"):  # our own attention
        seen: list[Any] = []
        handle = module.register_forward_pre_hook(
            lambda m, a, k: seen.append((a, k)), with_kwargs=True
        )
        try:
            run(model, one)
        finally:
            handle.remove()
        args, kwargs = seen[0]
        with torch.no_grad():
            return module(*args, **{**kwargs, "need_weights": True})[1][0]
    out = run(model, {**one, "output_attentions": True})
    kinds = [s.name for s in sites if s.kind == site.kind]
    key = "attentions"
    if in_decoder(model, site):
        key = "cross_attentions" if site.kind == "cross" else "decoder_attentions"
    elif getattr(model.config, "is_encoder_decoder", False):
        key = "encoder_attentions"
    return out[key][kinds.index(site.name)][0]


def of_queries(
    model: Any,
    batch: dict[str, Any],
    site: AttentionSite,
    sites: Any,
    measure: Callable[[list[float]], float],
) -> list[list[float]]:
    """For every example and unit the mean over queries of a number read off a row of the map."""
    rows = []
    for i in range(n_examples(batch)):
        one = example(batch, i)
        found = maps(model, one, site, sites)
        real = real_tokens(site, one, found.shape[1], in_decoder(model, site))
        queries = [q for q, here in enumerate(real) if here]
        heads = [
            sum(measure(found[h][q].tolist()) for q in queries) / len(queries)
            for h in range(len(found))
        ]
        rows.append(
            [sum(heads[site.heads.index(h)] for h in unit) / len(unit) for unit in site.units]
        )
    return rows


def minus_entropy(row: list[float]) -> float:
    return sum(p * math.log(p) for p in row if p > 0)


class Replaced(TorchFunctionMode):
    """What ``change`` makes of the number ``which`` of the softmaxes with four dimensions takes its
    place."""

    def __init__(self, which: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.which, self.change, self.seen = which, change, -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.softmax, functional.softmax, Tensor.softmax) and out.ndim == 4:
            self.seen += 1
            return self.change(out) if self.seen == self.which else out
        return out


def attention_attribution(
    model: nn.Module, one: dict[str, Any], loss: Loss, which: int, steps: int
) -> Tensor:
    """``[heads, queries, keys]`` by central differences in every entry of a map of a model that
    computes eagerly.

    Args:
        model: The model.
        one: A batch of one.
        loss: The answer is ``exp(-loss)``.
        which: The site, by its number in the order in which they run.
        steps: m.
    """
    kept: list[Tensor] = []

    def answer(change: Callable[[Tensor], Tensor]) -> float:
        with Replaced(which, change), torch.no_grad():
            return float(torch.exp(-loss(model, one)))

    def keep(a: Tensor) -> Tensor:
        kept.append(a.clone())
        return a

    answer(keep)
    whole = kept[0]
    found, step = torch.zeros_like(whole), 1e-5
    for index in torch.cartesian_prod(*(torch.arange(n) for n in whole.shape)).tolist():
        for k in range(1, steps + 1):
            ends = []
            for sign in (1, -1):
                changed = whole * k / steps
                changed[tuple(index)] += sign * step
                ends.append(answer(lambda a, c=changed: c))
            found[tuple(index)] += (ends[0] - ends[1]) / (2 * step)
    return (whole * found / steps)[0]
