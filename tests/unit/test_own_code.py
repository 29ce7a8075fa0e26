"""Code that a layout was not proven on is cut with an example alone, and refused where it counts
heads by itself."""

import functools
import importlib
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers.models
from torch import Tensor, nn

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel, VerificationFailed
from headprune.layouts import registry
from headprune.layouts._tiny_textbook import Annotated, D2l, Prepared, Processed
from headprune.layouts._tiny_timm import OlderAttention
from headprune.model.double import Doubled
from headprune.model.own_code import _of_class
from headprune.model.sites import bind, find_sites
from tests.laws.support import family_subject, unchanged

#: Layouts whose cut modules go on with code of ours, in place of what was there.
REPLACED = {"blip"}
ASKED = r"prune_\(example=\): must be a batch, .*Pass example=batch"


def first_family(layout):
    return family_subject(layout, registry.get(layout).families[0][0])


@pytest.fixture
def llama():
    return first_family("llama")


def size(module):
    return 1 + sum(p.numel() for p in module.parameters()) / 1000


def changed(out, factor):
    """Another first output, also for a norm that follows."""
    first = out if isinstance(out, Tensor) else out[0]
    first = first + factor * torch.linspace(-1, 1, first.shape[-1], dtype=first.dtype)
    return first if isinstance(out, Tensor) else (first, *out[1:])


def adding(forward, amount):
    """Adds to what a module returns; the amount is told the module and whether a mask is given."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def other(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        masks = [v for name, v in given.items() if "mask" in name or "lens" in name]
        masked = any(isinstance(value, Tensor) for value in masks)
        return changed(forward(self, *args, **kwargs), amount(self, masked))

    return other


harmless = functools.partial(adding, amount=lambda module, masked: 2.0)
#: The more, the more heads there are.
harmful = functools.partial(adding, amount=lambda module, masked: size(module))
masked_harm = functools.partial(adding, amount=lambda module, masked: masked * size(module))


def with_forward(module, forward, name="forward"):
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: forward})


def subclassed(module, change, monkeypatch):
    with_forward(module, change(type(module).forward))


def on_instance(module, change, monkeypatch):
    module.forward = functools.partial(change(type(module).forward), module)


def on_class(module, change, monkeypatch):
    monkeypatch.setattr(type(module), "forward", change(type(module).forward))


def hooked(module, change, monkeypatch):
    made = change(lambda self, out: out)
    module.register_forward_hook(lambda m, args, out: made(m, out))


WAYS = [
    *((layout, subclassed) for layout in ("llama", "blip", "timm")),
    *(("llama", way) for way in (on_instance, on_class, hooked)),
]


@pytest.mark.parametrize(("layout", "way"), WAYS)
def test_other_code_needs_an_example_and_must_pass_on_it(layout, way, monkeypatch):
    subject = first_family(layout)
    site = subject.sites[0]
    mask = subject.without({site.name: site.units[-1]})
    for change in (harmless, harmful):
        model = subject.copy()
        with monkeypatch.context() as patches:
            way(model.get_submodule(site.name), change, patches)
            with unchanged(model), pytest.raises(InvalidValue, match=ASKED):
                hp.prune_(model, mask)
            if change is harmless and layout not in REPLACED:
                with Doubled():
                    assert hp.prune_(model, mask, example=subject.batch).proof is not None
                continue
            with unchanged(model), pytest.raises(VerificationFailed), Doubled():
                hp.prune_(model, mask, example=subject.batch)


@pytest.mark.parametrize("way", [subclassed, on_instance])
def test_other_code_is_refused_where_ours_would_run_in_its_place(way, monkeypatch):
    subject = first_family("wavlm")
    way(subject.model.get_submodule(subject.sites[0].name), harmless, monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"headprune would replace it|forward is replaced"):
        bind(subject.model, subject.sites)


def test_code_that_goes_wrong_under_a_mask_is_refused_on_an_example_without(monkeypatch):
    subject = first_family("bert")
    site = subject.sites[0]
    batch = {k: v for k, v in subject.batch.items() if "mask" not in k}
    subclassed(subject.model.get_submodule(site.name), masked_harm, monkeypatch)
    with unchanged(subject.model), pytest.raises(VerificationFailed), Doubled():
        hp.prune_(subject.model, subject.without({site.name: site.units[-1]}), example=batch)


class Flagged(hp.MultiHeadAttention):
    """Wrong with valid lengths, where an instance says so."""

    flag = False

    def forward(self, *args, valid_lens=None, **kwargs):
        out = super().forward(*args, valid_lens=valid_lens, **kwargs)
        return out * self.n_heads if self.flag and valid_lens is not None else out


@pytest.mark.parametrize("flagged", [0, 2])
def test_each_module_of_a_class_is_tried_under_masks_and_lengths(flagged):
    model, x = nn.Sequential(*[Flagged(12, 4) for _ in range(3)]), torch.randn(3, 5, 12)
    model[flagged].flag = True
    mask = hp.HeadMask.from_keep({str(i): [0, 1] for i in range(3)}, {str(i): 4 for i in range(3)})
    with pytest.raises(VerificationFailed, match=rf"the pruned {flagged}: .*with valid_lens"):
        hp.prune_(model, mask, example=x)
    model[flagged].flag = False
    hp.prune_(model, mask, example=x)


class TooShort(hp.MultiHeadAttention):
    """Wrong with lengths below four."""

    def forward(self, x, valid_lens=None, **more):
        out = super().forward(x, valid_lens=valid_lens, **more)
        return out if valid_lens is None or valid_lens.min() > 3 else out * self.n_heads


class WithLengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = TooShort(12, 4)

    def forward(self, x, lengths):
        return self.attention(x, valid_lens=lengths)


def test_shorter_lengths_than_those_of_the_example_are_tried():
    mask = hp.HeadMask.from_keep({"attention": [0, 1]}, {"attention": 4})
    batch = {"x": torch.randn(3, 5, 12), "lengths": torch.tensor([5, 4, 4])}
    with pytest.raises(VerificationFailed, match=r"the pruned attention: .*valid_lens"):
        hp.prune_(WithLengths(), mask, example=batch)


class Box:
    def __init__(self):
        self.seen = []


class Filling(hp.MultiHeadAttention):
    """Fills what it is given, and goes on after what is in it."""

    def forward(self, x, notes=None, valid_lens=None):
        if notes is not None:
            seen = notes.seen if isinstance(notes, Box) else notes
            x = torch.cat([x] * (1 + len(seen)), dim=1)
            seen.append(1)
        return super().forward(x, valid_lens=valid_lens)


class Writing(hp.MultiHeadAttention):
    def forward(self, x, notes=None, valid_lens=None):
        out = super().forward(x.clone(), valid_lens=valid_lens)
        x += 1
        return out


class Calling(nn.Module):
    """Gives its attention notes to fill, new ones in every call."""

    def __init__(self, kind, notes):
        super().__init__()
        self.attention, self.notes = kind(12, 4), notes

    def forward(self, x):
        return self.attention(x.clone(), notes=self.notes())


@pytest.mark.parametrize(("kind", "notes"), [(Filling, list), (Filling, Box), (Writing, list)])
def test_what_a_call_fills_is_new_in_each_call(kind, notes):
    model = Calling(kind, notes)
    mask = hp.HeadMask.from_keep({"attention": [0, 1]}, {"attention": 4})
    assert hp.prune_(model, mask, example=torch.randn(3, 5, 12)).proof is not None


def tiled(self, q, k, v, valid_lens):
    """Repeats lengths for its heads in the other order: of several examples, heads read those of
    another."""
    split = [self._split(w(x)) for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v))]
    lengths = None if valid_lens is None else valid_lens.repeat(self.num_heads)
    heads = self.attention(*split, lengths)
    heads = heads.reshape(-1, self.num_heads, *heads.shape[1:]).permute(0, 2, 1, 3)
    return self.W_o(heads.reshape(*heads.shape[:2], -1))


def masked_processed(self, hidden_states, encoder_hidden_states=None, attention_mask=None):
    out = Processed.forward(self, hidden_states, encoder_hidden_states)
    return out if attention_mask is None else out + self.heads


def masked_older(self, x, attn_mask=None):
    """Takes True for what is hidden; the code that goes on after a cut takes it for what is
    seen."""
    q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q * self.scale @ k.transpose(-2, -1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask, -1e4)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


def hidden_by_one(self, query, key, value, mask=None):
    """Another convention: True, or one, hides."""
    return Annotated.forward(self, query, key, value, None if mask is None else mask == 0)


def whole_masks(self, query, key, value, mask=None):
    assert mask is None or mask.dim() == 4
    return Annotated.forward(self, query, key, value, None if mask is None else mask[:, 0])


def unmasked(self, q, k, v, valid_lens=None):
    assert valid_lens is None
    return D2l.forward(self, q, k, v, None)


def model_of(kind, forward):
    module = type("OtherAttention", (kind,), {"forward": forward})(12, 4)
    if isinstance(module, D2l):
        module(*[torch.randn(2, 5, 12)] * 3, None)
    return nn.ModuleList([module])


@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        (D2l, masked_harm(D2l.forward)),
        (D2l, tiled),
        (Annotated, masked_harm(Annotated.forward)),
        (Prepared, masked_harm(Prepared.forward)),
        (Processed, masked_processed),
        (OlderAttention, masked_older),
    ],
)
def test_proven_layouts_refuse_what_goes_wrong_under_a_mask(kind, forward):
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        find_sites(model_of(kind, forward))


@pytest.mark.parametrize(
    ("kind", "forward"), [(Annotated, hidden_by_one), (Annotated, whole_masks), (D2l, unmasked)]
)
def test_masks_of_any_form_are_taken(kind, forward):
    assert len(find_sites(model_of(kind, forward))) == 1


@pytest.mark.parametrize("kind", [D2l, Annotated, Prepared, Processed, OlderAttention])
def test_a_proven_subclass_needs_no_example(kind):
    @functools.wraps(kind.forward)
    def forward(self, *args, **kwargs):
        return kind.forward(self, *args, **kwargs)

    hp.prune_(model_of(kind, forward), hp.HeadMask.from_keep({"0": [1, 2]}, {"0": 4}))


@pytest.mark.slow
def test_no_class_of_transformers_needs_an_example():
    found, seen = [], 0
    files = sorted(Path(transformers.models.__file__ or "").parent.glob("[a-c]*/modeling_*.py"))
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
    assert seen > 100
    assert found == []


class Named(transformers.models.llama.modeling_llama.LlamaAttention):
    def extra_repr(self):
        return self.described()

    def described(self):
        return "mine"


def named_(module):
    module.__class__ = Named


def compiled_(module):
    module.forward = torch.compile(module.forward, backend="eager")


def no_grad_(module):
    with_forward(module, torch.no_grad()(type(module).forward))


def noted_(module):
    seen = []
    module.register_forward_hook(lambda m, args, out: seen.append(out))
    module.q_proj.register_forward_hook(lambda m, args, out: seen.append(out))
    module.o_proj.register_forward_pre_hook(lambda m, args: seen.extend(args[0].shape))


@pytest.mark.parametrize("change", [named_, noted_, compiled_, no_grad_])
def test_what_changes_no_computation_needs_no_example(llama, change):
    site = llama.sites[0]
    change(llama.model.get_submodule(site.name))
    hp.prune_(llama.model, llama.without({site.name: site.units[0]}))


def test_sites_that_keep_all_heads_need_no_example(llama, monkeypatch):
    first, second, *_ = llama.sites
    subclassed(llama.model.get_submodule(first.name), harmless, monkeypatch)
    hp.prune_(llama.model, llama.without({second.name: second.units[0]}))


class Other(nn.Linear):
    def forward(self, x):
        return nn.functional.layer_norm(super().forward(x), (self.weight.shape[0],))


def projection_(module, monkeypatch):
    module.v_proj.__class__ = Other


def rotation_(module, monkeypatch):
    file = transformers.models.llama.modeling_llama
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * q.shape[1], k))


def registered_(module, monkeypatch):
    eager = transformers.models.llama.modeling_llama.eager_attention_forward
    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS

    def counting(module, query, *args, **kwargs):
        return eager(module, query * query.shape[1], *args, **kwargs)

    monkeypatch.setitem(interface._local_mapping, "counting", counting)
    module.config._attn_implementation = "counting"


def call_(module, monkeypatch):
    with_forward(module, harmful(nn.Module.__call__), "__call__")


def compiled_forward_(module, monkeypatch):
    with_forward(module, torch.compile(harmful(type(module).forward), backend="eager"))


def hidden_hook_(module, monkeypatch):
    module.q_proj.register_forward_hook(lambda m, args, out: out * out.shape[-1])


@pytest.mark.parametrize(
    "change", [projection_, rotation_, registered_, call_, compiled_forward_, hidden_hook_]
)
def test_code_beside_the_forward_is_seen(llama, change, monkeypatch):
    site = llama.sites[0]
    mask = llama.without({site.name: site.units[0]})
    change(llama.model.get_submodule(site.name), monkeypatch)
    with pytest.raises(InvalidValue, match=r"prune_\(example=\)"):
        hp.prune_(llama.model, mask)
    with pytest.raises(VerificationFailed), Doubled():
        hp.prune_(llama.model, mask, example=llama.batch)


def test_a_layout_of_ones_own_is_ones_own_word(llama, monkeypatch):
    mine = replace(llama.layout, name="mine")
    site = llama.sites[0]
    subclassed(llama.model.get_submodule(site.name), harmless, monkeypatch)
    sites = find_sites(llama.model, layouts=[mine])
    hp.prune_(llama.model, llama.without({site.name: site.units[0]}), sites=sites)
