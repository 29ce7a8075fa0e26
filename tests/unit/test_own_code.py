"""Code that a layout was not proven on is cut with an example alone, and refused where it counts
heads by itself."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel, VerificationFailed
from headprune.layouts import registry
from headprune.layouts._tiny_textbook import Annotated, D2l, Prepared, Processed
from headprune.layouts._tiny_timm import OlderAttention
from headprune.model.double import Doubled
from headprune.model.own_code import _of_class
from headprune.model.sites import bind, find_sites
from tests.laws.support import Subject, family_subject, picture

#: Layouts whose cut modules go on with code of ours, in place of what was there.
REPLACED = {"blip"}
ASKED = r"prune_\(example=\): must be a batch .*Pass example=batch"

Forward = Callable[..., Any]


def first_family(layout: str) -> Subject:
    return family_subject(layout, registry.get(layout).families[0][0])


@pytest.fixture
def llama() -> Subject:
    return first_family("llama")


def size(module: nn.Module) -> float:
    """A number that changes when heads are removed."""
    return 1 + sum(p.numel() for p in module.parameters()) / 1000


def changed(out: Any, factor: float) -> Any:
    """Another first output, also for a norm that follows."""
    first = out if isinstance(out, Tensor) else out[0]
    first = first + factor * torch.linspace(-1, 1, first.shape[-1], dtype=first.dtype)
    return first if isinstance(out, Tensor) else (first, *out[1:])


def adding(forward: Forward, amount: Callable[[Any, bool], float]) -> Forward:
    """Adds to what a module returns; the amount is told the module and whether a mask is given."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        masked = any("mask" in name and isinstance(value, Tensor) for name, value in given.items())
        return changed(forward(self, *args, **kwargs), amount(self, masked))

    return other


harmless = functools.partial(adding, amount=lambda module, masked: 2.0)
#: The more, the more heads there are.
harmful = functools.partial(adding, amount=lambda module, masked: size(module))
masked_harm = functools.partial(adding, amount=lambda module, masked: masked * size(module))


def with_forward(module: Any, forward: Forward, name: str = "forward") -> None:
    """Gives a module a subclass with another method."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: forward})


def subclassed(module: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_forward(module, change(type(module).forward))


def on_instance(module: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.forward = functools.partial(change(type(module).forward), module)


def on_class(module: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(module), "forward", change(type(module).forward))


def hooked(module: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = change(lambda self, out: out)
    module.register_forward_hook(lambda m, args, out: made(m, out))


WAYS = [
    *((layout, subclassed) for layout in ("bert", "llama", "t5", "blip", "timm")),
    *(("llama", way) for way in (on_instance, on_class, hooked)),
]


@pytest.mark.parametrize(("layout", "way"), WAYS)
def test_other_code_needs_an_example_and_must_pass_on_it(
    layout: str, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = first_family(layout)
    site = subject.sites[0]
    mask = subject.without({site.name: site.units[-1]})
    for change in (harmless, harmful):
        model = subject.copy()
        with monkeypatch.context() as patches:
            way(model.get_submodule(site.name), change, patches)
            before = picture(model)
            with pytest.raises(InvalidValue, match=ASKED):
                hp.prune_(model, mask)
            if change is harmless and layout not in REPLACED:
                with Doubled():
                    assert hp.prune_(model, mask, example=subject.batch).proof is not None
                continue
            with pytest.raises(VerificationFailed), Doubled():
                hp.prune_(model, mask, example=subject.batch)
            assert picture(model) == before


@pytest.mark.parametrize("way", [subclassed, on_instance])
def test_other_code_is_refused_where_ours_would_run_in_its_place(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = first_family("wavlm")
    way(subject.model.get_submodule(subject.sites[0].name), harmless, monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"code of ours would run|forward is replaced"):
        bind(subject.model, subject.sites)


def test_code_that_goes_wrong_under_a_mask_is_refused_on_an_example_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = first_family("bert")
    site = subject.sites[0]
    batch = {k: v for k, v in subject.batch.items() if "mask" not in k}
    subclassed(subject.model.get_submodule(site.name), masked_harm, monkeypatch)
    before = picture(subject.model)
    with pytest.raises(VerificationFailed), Doubled():
        hp.prune_(subject.model, subject.without({site.name: site.units[-1]}), example=batch)
    assert picture(subject.model) == before


class Flagged(hp.MultiHeadAttention):
    """Wrong with valid lengths, where an instance says so."""

    flag = False

    def forward(self, *args: Any, valid_lens: Tensor | None = None, **kwargs: Any) -> Any:
        out = super().forward(*args, valid_lens=valid_lens, **kwargs)
        return out * self.n_heads if self.flag and valid_lens is not None else out


@pytest.mark.parametrize("flagged", [0, 2])
def test_each_module_of_a_class_is_tried_under_masks_and_lengths(flagged: int) -> None:
    model, x = nn.Sequential(*[Flagged(12, 4) for _ in range(3)]), torch.randn(3, 5, 12)
    model[flagged].flag = True
    mask = hp.HeadMask.from_keep({str(i): [0, 1] for i in range(3)}, {str(i): 4 for i in range(3)})
    with pytest.raises(VerificationFailed, match=rf"the pruned {flagged}: .*with valid_lens"):
        hp.prune_(model, mask, example=x)
    model[flagged].flag = False
    hp.prune_(model, mask, example=x)


class TooShort(hp.MultiHeadAttention):
    """Wrong with lengths below four."""

    def forward(self, x: Tensor, valid_lens: Any = None, **more: Any) -> Any:
        out = super().forward(x, valid_lens=valid_lens, **more)
        return out if valid_lens is None or valid_lens.min() > 3 else out * self.n_heads


class WithLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = TooShort(12, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.attention(x, valid_lens=lengths)


def test_shorter_lengths_than_those_of_the_example_are_tried() -> None:
    mask = hp.HeadMask.from_keep({"attention": [0, 1]}, {"attention": 4})
    batch = {"x": torch.randn(3, 5, 12), "lengths": torch.tensor([5, 4, 4])}
    with pytest.raises(VerificationFailed, match=r"the pruned attention: .*valid_lens"):
        hp.prune_(WithLengths(), mask, example=batch)


class Box:
    """A cache of somebody's own."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}


class Filling(hp.MultiHeadAttention):
    """Fills what it is given, and goes on after what is in it."""

    def forward(self, x: Tensor, notes: Any = None, valid_lens: Tensor | None = None) -> Any:
        if notes is not None:
            inner = notes.seen if isinstance(notes, Box) else notes
            size = len(inner)
            inner.append(x) if isinstance(inner, list) else inner.__setitem__(str(size), x)
            x = torch.cat([x] * (1 + size), dim=1)
        return super().forward(x, valid_lens=valid_lens)


class Writing(hp.MultiHeadAttention):
    """Writes into its input."""

    def forward(self, x: Tensor, notes: Any = None, valid_lens: Tensor | None = None) -> Any:
        out = super().forward(x.clone(), valid_lens=valid_lens)
        x += 1
        return out


class Calling(nn.Module):
    """Gives its attention notes to fill, new ones in every call."""

    def __init__(self, kind: Any, notes: Callable[[], Any]) -> None:
        super().__init__()
        self.attention, self.notes = kind(12, 4), notes

    def forward(self, x: Tensor) -> Any:
        return self.attention(x.clone(), notes=self.notes())


@pytest.mark.parametrize(
    ("kind", "notes"), [(Filling, dict), (Filling, list), (Filling, Box), (Writing, dict)]
)
def test_what_a_call_fills_is_new_in_each_call(kind: Any, notes: Callable[[], Any]) -> None:
    model = Calling(kind, notes)
    mask = hp.HeadMask.from_keep({"attention": [0, 1]}, {"attention": 4})
    assert hp.prune_(model, mask, example=torch.randn(3, 5, 12)).proof is not None


# ---------------------------------------------------------------- layouts that prove code


def masked_d2l(self: Any, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None) -> Tensor:
    return D2l.forward(self, q if valid_lens is None else q / self.num_heads, k, v, valid_lens)


def tiled(self: Any, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None) -> Tensor:
    """Repeats lengths for its heads in the other order: of several examples, heads read those of
    another."""
    split = [self._split(w(x)) for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v))]
    lengths = None if valid_lens is None else valid_lens.repeat(self.num_heads)
    heads = self.attention(*split, lengths)
    heads = heads.reshape(-1, self.num_heads, *heads.shape[1:]).permute(0, 2, 1, 3)
    return self.W_o(heads.reshape(*heads.shape[:2], -1))


def masked_annotated(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    return Annotated.forward(self, query if mask is None else query * self.h, key, value, mask)


def masked_prepared(self: Any, *, query: Tensor, key: Any, value: Any, mask: Any = None) -> Any:
    query = query if mask is None else query * self.heads
    return Prepared.forward(self, query=query, key=key, value=value, mask=mask)


def masked_processed(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    out = Processed.forward(self, hidden_states, encoder_hidden_states)
    return out if attention_mask is None else out + self.heads


def masked_older(self: Any, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Takes True for what is hidden; the code that goes on after a cut takes it for what is
    seen."""
    q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q * self.scale @ k.transpose(-2, -1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask, -1e4)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


def hidden_by_one(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    """Another convention: True, or one, hides."""
    return Annotated.forward(self, query, key, value, None if mask is None else mask == 0)


def whole_masks(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    """Takes masks with an axis for heads."""
    assert mask is None or mask.dim() == 4
    return Annotated.forward(self, query, key, value, None if mask is None else mask[:, 0])


def unmasked(self: Any, q: Tensor, k: Tensor, v: Tensor, valid_lens: Any = None) -> Any:
    """Takes no mask at all."""
    assert valid_lens is None
    return D2l.forward(self, q, k, v, None)


def model_of(kind: type[nn.Module], forward: Forward) -> nn.Module:
    module = type("OtherAttention", (kind,), {"forward": forward})(12, 4)
    if isinstance(module, D2l):
        module(*[torch.randn(2, 5, 12)] * 3, None)
    return nn.ModuleList([module])


@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        (D2l, masked_d2l),
        (D2l, tiled),
        (Annotated, masked_annotated),
        (Prepared, masked_prepared),
        (Processed, masked_processed),
        (OlderAttention, masked_older),
    ],
)
def test_proven_layouts_refuse_what_goes_wrong_under_a_mask(kind: Any, forward: Forward) -> None:
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        find_sites(model_of(kind, forward))


@pytest.mark.parametrize(
    ("kind", "forward"), [(Annotated, hidden_by_one), (Annotated, whole_masks), (D2l, unmasked)]
)
def test_masks_of_any_form_are_taken(kind: Any, forward: Forward) -> None:
    assert len(find_sites(model_of(kind, forward))) == 1


@pytest.mark.parametrize("kind", [D2l, Annotated, Prepared, Processed, OlderAttention])
def test_a_proven_subclass_needs_no_example(kind: Any) -> None:
    """It runs the code that was proven, by another way."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    hp.prune_(model_of(kind, forward), hp.HeadMask.from_keep({"0": [1, 2]}, {"0": 4}))


# ---------------------------------------------------------------- what needs no example, as before


@pytest.mark.slow
def test_no_class_of_transformers_needs_an_example() -> None:
    found, seen = [], 0
    files = sorted(Path(transformers.models.__file__ or "").parent.glob("*/modeling_*.py"))
    for path in files:
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            file = importlib.import_module(name)
        except ImportError:  # it asks for a package that is not here
            continue
        kinds = [v for v in vars(file).values() if isinstance(v, type) and v.__module__ == name]
        attentions = [k for k in kinds if issubclass(k, nn.Module) and "Attention" in k.__name__]
        seen += len(attentions)
        found += [(k.__name__, what) for k in attentions if (what := _of_class(k)) is not None]
    assert seen > 500
    assert found == []


class Named(transformers.models.llama.modeling_llama.LlamaAttention):
    """Adds nothing that a forward pass calls."""

    def extra_repr(self) -> str:
        return self.described()

    def described(self) -> str:
        return "mine"


def named_(module: Any) -> None:
    module.__class__ = Named


def compiled_(module: Any) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


def offloaded_(module: Any) -> None:
    for part in module.modules():
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))


def no_grad_(module: Any) -> None:
    with_forward(module, torch.no_grad()(type(module).forward))


def noted_(module: Any) -> None:
    seen: list[Any] = []
    module.register_forward_hook(lambda m, args, out: seen.append(out))
    module.q_proj.register_forward_hook(lambda m, args, out: seen.append(out))
    module.o_proj.register_forward_pre_hook(lambda m, args: seen.extend(args[0].shape))


@pytest.mark.parametrize("change", [named_, noted_, compiled_, offloaded_, no_grad_])
def test_what_changes_no_computation_needs_no_example(
    llama: Subject, change: Callable[[Any], None]
) -> None:
    site = llama.sites[0]
    change(llama.model.get_submodule(site.name))
    hp.prune_(llama.model, llama.without({site.name: site.units[0]}))


def test_sites_that_keep_all_heads_need_no_example(
    llama: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = llama.sites
    subclassed(llama.model.get_submodule(first.name), harmless, monkeypatch)
    hp.prune_(llama.model, llama.without({second.name: second.units[0]}))


# ---------------------------------------------------------------- code that lies elsewhere than in
# forward


class Other(nn.Linear):
    """Normalises over all features."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(super().forward(x), (self.weight.shape[0],))


def projection_(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.v_proj.__class__ = Other


def rotation_(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = transformers.models.llama.modeling_llama
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * q.shape[1], k))


def registered_(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = transformers.models.llama.modeling_llama.eager_attention_forward
    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS

    def counting(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return eager(module, query * query.shape[1], *args, **kwargs)

    monkeypatch.setitem(interface._local_mapping, "counting", counting)
    module.config._attn_implementation = "counting"


def call_(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_forward(module, harmful(nn.Module.__call__), "__call__")


def compiled_forward_(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_forward(module, torch.compile(harmful(type(module).forward), backend="eager"))


def hidden_hook_(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.q_proj.register_forward_hook(lambda m, args, out: out * out.shape[-1])


@pytest.mark.parametrize(
    "change", [projection_, rotation_, registered_, call_, compiled_forward_, hidden_hook_]
)
def test_code_beside_the_forward_is_seen(
    llama: Subject, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = llama.sites[0]
    mask = llama.without({site.name: site.units[0]})
    change(llama.model.get_submodule(site.name), monkeypatch)
    with pytest.raises(InvalidValue, match=r"prune_\(example=\)"):
        hp.prune_(llama.model, mask)
    with pytest.raises(VerificationFailed), Doubled():
        hp.prune_(llama.model, mask, example=llama.batch)


def test_a_layout_of_ones_own_is_ones_own_word(
    llama: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who describes code of their own, or lets it be proven on an example, has said what it
    does."""
    mine = replace(llama.layout, name="mine")
    site = llama.sites[0]
    subclassed(llama.model.get_submodule(site.name), harmless, monkeypatch)
    sites = find_sites(llama.model, layouts=[mine])
    hp.prune_(llama.model, llama.without({site.name: site.units[0]}), sites=sites)


def test_the_old_call_asks_too(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    subclassed(llama.model.get_submodule(llama.sites[0].name), harmless, monkeypatch)
    with pytest.raises(InvalidValue, match=r"example="):
        hp.prune_heads_(llama.model, {0: [0, 1]})
    with Doubled():
        hp.prune_heads_(llama.model, {0: [0, 1]}, example=llama.batch)
