"""Models for the laws, what they put out, and a picture of everything a reversible change must put
back."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.heads import HeadMask
from headprune.core.layout import AttentionLayout
from headprune.gating.context import gated
from headprune.layouts import registry
from headprune.model.double import double_
from headprune.model.running import call, outputs
from headprune.model.sites import Sites, find_sites

#: Equal up to the rounding of fp64: sums over fewer heads are done in another order.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
#: Layouts whose laws are tried in every corner; families.py names all that are held to them.
DEEP = ["bert", "gpt2", "llama", "multi_head_attention", "vit"]
#: Those of them whose models are Transformers' own.
TRANSFORMERS = [name for name in DEEP if name != "multi_head_attention"]
#: The same bits.
EXACT = {"rtol": 0.0, "atol": 0.0}


@dataclass
class Subject:
    """A model, a batch it takes, and the sites in it."""

    layout: AttentionLayout
    model: nn.Module
    batch: dict[str, Any]
    sites: Sites
    family: str = ""

    @property
    def n_heads(self) -> dict[str, int]:
        return {s.name: s.n_query_heads for s in self.sites}

    def mask(self, keep: dict[str, Iterable[int]]) -> HeadMask:
        """Sites that are left out keep every head."""
        return mask_of(self.sites, keep)

    def without(self, gone: dict[str, Iterable[int]]) -> HeadMask:
        return self.mask({s: set(range(self.n_heads[s])) - set(heads) for s, heads in gone.items()})

    def ragged(self, seed: int = 0) -> HeadMask:
        return ragged(self.sites, seed)

    def copy(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def run(self, model: nn.Module | None = None, **changes: Any) -> Tensor:
        """The model's main output, with gradients."""
        return logits(self.model if model is None else model, {**self.batch, **changes})

    def run_gated(self, mask: HeadMask) -> Tensor:
        """The output of the model whose other heads are gated away."""
        with gated(self.model, mask):
            return self.run()


def ragged(sites: Iterable[Any], seed: int = 0) -> HeadMask:
    """Another number of units at every site, never all and never none of them."""
    rng, keep = random.Random(seed), {}
    sites = list(sites)
    for index, site in enumerate(sites):
        n_kept = 1 + (index + seed) % max(1, len(site.units) - 1)
        keep[site.name] = [head for unit in rng.sample(site.units, n_kept) for head in unit]
    return mask_of(sites, keep)


def mask_of(sites: Iterable[Any], keep: dict[str, Iterable[int]]) -> HeadMask:
    """Sites that are left out keep every head."""
    return HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})


def mask_of_units(sites: Iterable[Any], units: Iterable[Iterable[int]]) -> HeadMask:
    """Every site keeps the units of these numbers."""
    keep = {}
    for site, numbers in zip(sites, units, strict=True):
        keep[site.name] = [head for number in numbers for head in site.units[number]]
    return mask_of(sites, keep)


def emptied(subject: Subject, which: str) -> HeadMask:
    """The first, middle or last site keeps no head, or all of them keep none."""
    names = [s.name for s in subject.sites]
    chosen = {
        "first": names[:1],
        "middle": names[len(names) // 2 :][:1],
        "last": names[-1:],
        "all": names,
    }[which]
    return subject.mask({name: [] for name in chosen})


def subject_of(name: str, seed: int = 0) -> Subject:
    layout = registry.get(name)
    model, batch = layout.tiny(seed)
    model = shaken(model).double().eval()
    return Subject(layout, model, as_double(batch), find_sites(model))


def family_subject(layout: str, family: str, seed: int = 0) -> Subject:
    """A family's tiny model; run it in ``Doubled``, for the norms of most families compute in fp32
    of their own."""
    found = registry.get(layout)
    model, batch = found.tiny(seed, family)
    model = double_(shaken(model, norms=False)).eval()
    return Subject(found, model, as_double(batch), find_sites(model), family)


def labelled_subject(name: str) -> Subject:
    """``subject_of``, and T5 with labels in place of its decoder's inputs, for losses and
    generation alike."""
    if name != "t5":
        return subject_of(name)
    found = family_subject("t5", "t5")
    found.batch["labels"] = found.batch.pop("decoder_input_ids")
    return found


def examples_of(subject: Subject, n: int = 7) -> dict[str, Any]:
    """One batch of so many different examples, of a family that takes mappings."""
    named = [subject.family] if subject.family else []
    parts = [as_double(subject.layout.tiny(seed, *named)[1]) for seed in range(1 + n // 3)]
    return {k: torch.cat([p[k] for p in parts])[:n] for k in parts[0]}


def shaken(model: nn.Module, norms: bool = True) -> nn.Module:
    """Random values everywhere: fresh models have biases of zero and norms of one, which would hide
    mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
    return without_float32_norms(model) if norms else model


def without_float32_norms(model: nn.Module) -> nn.Module:
    """Llama's RMSNorm computes in float32, whatever the model's dtype; PyTorch's is the same
    formula in any dtype."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def as_double(batch: Any) -> Any:
    return {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in batch.items()
    }


def logits(model: nn.Module, batch: Any) -> Tensor:
    out = call(model, batch)
    return out.logits if hasattr(out, "logits") else outputs(out)[0]


def objective(output: Tensor) -> Tensor:
    """A number that depends on every entry of an output in its own way."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return (output * weights).sum() + (output**2).mean()


def picture(model: nn.Module) -> list[Any]:
    """Everything about a model that must be as before: classes, attributes, hooks, and the very
    same tensors."""
    seen: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        seen.append((name, type(module)))
        for key, value in sorted(module.__dict__.items(), key=lambda item: item[0]):
            if isinstance(value, dict):
                seen.append((name, key, [(k, id(v)) for k, v in value.items()]))
            else:
                plain = isinstance(value, (int, float, str, tuple, type(None)))
                seen.append((name, key, value if plain else id(value)))
    seen += [
        (n, id(p), p.requires_grad, p.data_ptr(), p._version) for n, p in model.named_parameters()
    ]
    return seen


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """After the block everything about the model is as before it."""
    before = picture(model)
    yield
    assert picture(model) == before


def set_implementation(model: nn.Module, implementation: str) -> None:
    """Switches the attention kernel and proves that the switch took."""
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation


def no_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
