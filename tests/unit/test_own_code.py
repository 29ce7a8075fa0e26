"""Code that a layout was not proven on is cut with an example alone, and refused where it counts
heads by itself."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn

import headprune as hp
from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel, VerificationFailed
from headprune.layouts import registry
from headprune.layouts._tiny_textbook import Annotated, D2l, Prepared, Processed
from headprune.layouts._tiny_timm import OlderAttention
from headprune.model.double import Doubled
from headprune.model.own_code import _of_class, own_code
from headprune.model.sites import bind, find_sites
from tests.laws.families import FAMILIES, over
from tests.laws.support import Subject, family_subject, picture

#: Layouts that run a class's code, so that a subclass is proven or refused before any cut;
#: PyTorch's takes no other.
PROVING = {"annotated", "d2l", "diffusers", "head_list", "head_list_bare", "labml"}
#: Layouts whose cut modules go on with code of ours, in place of what was there.
REPLACED = {"blip", "timm"}
#: The first family of each other layout; older code of timm is proven.
FIRST = {name: registry.get(name).families[0][0] for name in registry.names()}
ONE_OF_EACH = [pair for pair in FIRST.items() if pair[0] not in PROVING | {"torch_multi_head"}]

Forward = Callable[..., Any]


def size(module: nn.Module) -> float:
    """A number that changes when heads leave."""
    return 1 + sum(p.numel() for p in module.parameters()) / 1000


def changed(out: Any, factor: float) -> Any:
    """Another first output, also for a norm that follows."""
    first = out if isinstance(out, Tensor) else out[0]
    first = first + factor * torch.linspace(-1, 1, first.shape[-1], dtype=first.dtype)
    return first if isinstance(out, Tensor) else (first, *out[1:])


def harmless(forward: Forward) -> Forward:
    """Adds something to what a module returns."""

    @functools.wraps(forward)
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(forward(self, *args, **kwargs), 2.0)

    return other


def harmful(forward: Forward) -> Forward:
    """Adds more, the more heads there are."""

    @functools.wraps(forward)
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(forward(self, *args, **kwargs), size(self))

    return other


def subclassed(module: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": change(kind.forward)})


def on_instance(module: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.forward = functools.partial(change(type(module).forward), module)


def on_class(module: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(module), "forward", change(type(module).forward))


def hooked(module: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = change(lambda self, out: out)
    module.register_forward_hook(lambda m, args, out: made(m, out))


@pytest.mark.parametrize("way", [subclassed, on_instance, on_class, hooked])
@over(ONE_OF_EACH)
def test_other_code_needs_an_example_and_must_pass_on_it(
    subject: Subject, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = subject.sites[0]
    mask = subject.without({site.name: site.units[-1]})
    for change in (harmless, harmful):
        model = subject.copy()
        with monkeypatch.context() as patches:
            way(model.get_submodule(site.name), change, patches)
            if subject.layout.exposed is not None and way is not hooked:
                with pytest.raises(
                    UnsupportedModel,
                    match=r"code of ours would run in its place|forward is replaced",
                ):
                    bind(model, subject.sites)
                continue
            before = picture(model)
            asked = r"prune_\(example=\): must be a batch .*Pass example=batch"
            refused = rf"{asked}|its forward is replaced" if way is on_instance else asked
            with pytest.raises(HeadPruneError, match=refused):
                hp.prune_(model, mask)
            assert picture(model) == before
            if change is harmful:
                with pytest.raises(refusals(way)), Doubled():
                    hp.prune_(model, mask, example=subject.batch)
                assert picture(model) == before
                continue
            error = refusal_of(lambda model=model: hp.prune_(model, mask, example=subject.batch))
            if way is on_instance and error is not None:  # a class is put in front of it
                assert "its forward is replaced" in str(error)
            elif error is not None:
                assert subject.layout.name in REPLACED
                assert isinstance(error, VerificationFailed)


def refusal_of(cut: Callable[[], Any]) -> HeadPruneError | None:
    try:
        with Doubled():
            assert cut().proof is not None
    except HeadPruneError as error:
        return error
    return None


def refusals(way: Any) -> tuple[type[Exception], ...]:
    return (VerificationFailed, UnsupportedModel) if way is on_instance else (VerificationFailed,)


def masked_harm(forward: Forward) -> Forward:
    """The same, where a mask is given."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        masked = any("mask" in name and isinstance(value, Tensor) for name, value in given.items())
        return changed(forward(self, *args, **kwargs), size(self) if masked else 0.0)

    return other


def takes_mask(layout: str, family: str) -> bool:
    model = registry.get(layout).tiny(0, family)[0]
    if (
        registry.get(layout).windows or registry.get(layout).exposed
    ):  # its model makes the masks; it takes no other code
        return False
    return any("mask" in n for n in inspect.signature(bind(model)[0].module.forward).parameters)


@over([pair for pair in ONE_OF_EACH if takes_mask(*pair)])
def test_code_that_goes_wrong_under_a_mask_is_refused_on_an_example_without(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = subject.sites[0]
    mask = subject.without({site.name: site.units[-1]})
    batch = {k: v for k, v in subject.batch.items() if "mask" not in k}
    model = subject.copy()
    subclassed(model.get_submodule(site.name), masked_harm, monkeypatch)
    before = picture(model)
    with pytest.raises(VerificationFailed), Doubled():
        hp.prune_(model, mask, example=batch)
    assert picture(model) == before


class Ours(hp.MultiHeadAttention):
    """Wrong with valid lengths."""

    def forward(self, *args: Any, valid_lens: Tensor | None = None, **kwargs: Any) -> Any:
        out = super().forward(*args, valid_lens=valid_lens, **kwargs)
        return out if valid_lens is None else out * self.n_heads


def test_lengths_are_masks_too() -> None:
    model, x = nn.Sequential(Ours(12, 4)), torch.randn(3, 5, 12)
    mask = hp.HeadMask.from_keep({"0": [0, 1]}, {"0": 4})
    with pytest.raises(VerificationFailed, match="with valid_lens"):
        hp.prune_(model, mask, example=x)


class Flagged(hp.MultiHeadAttention):
    """Wrong with valid lengths, where an instance says so."""

    flag = False

    def forward(self, *args: Any, valid_lens: Tensor | None = None, **kwargs: Any) -> Any:
        out = super().forward(*args, valid_lens=valid_lens, **kwargs)
        return out * self.n_heads if self.flag and valid_lens is not None else out


@pytest.mark.parametrize("flagged", range(3))
def test_each_module_of_a_class_is_tried_under_masks(flagged: int) -> None:
    model, x = nn.Sequential(*[Flagged(12, 4) for _ in range(3)]), torch.randn(3, 5, 12)
    model[flagged].flag = True
    mask = hp.HeadMask.from_keep({str(i): [0, 1] for i in range(3)}, {str(i): 4 for i in range(3)})
    with pytest.raises(VerificationFailed, match=rf"the pruned {flagged}: .*with valid_lens"):
        hp.prune_(model, mask, example=x)
    model[flagged].flag = False
    hp.prune_(model, mask, example=x)


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


@pytest.mark.parametrize("notes", [dict, list, Box])
@pytest.mark.parametrize("kind", [Filling, Writing])
def test_what_a_call_fills_is_new_in_each_call(kind: Any, notes: Callable[[], Any]) -> None:
    model = Calling(kind, notes)
    mask = hp.HeadMask.from_keep({"attention": [0, 1]}, {"attention": 4})
    report = hp.prune_(model, mask, example=torch.randn(3, 5, 12))
    assert report.proof is not None


# ------------------------------------------------------------------- layouts that prove code


class MaskedD2l(D2l):
    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        return super().forward(
            queries if valid_lens is None else queries / self.num_heads, keys, values, valid_lens
        )


class Tiled(D2l):
    """Repeats lengths for its heads in the other order: of several examples, heads read those of
    another."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        split = [
            self._split(w(x))
            for w, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        ]
        heads = self.attention(
            *split, None if valid_lens is None else valid_lens.repeat(self.num_heads)
        )
        heads = heads.reshape(-1, self.num_heads, *heads.shape[1:]).permute(0, 2, 1, 3)
        return self.W_o(heads.reshape(*heads.shape[:2], -1))


class MaskedAnnotated(Annotated):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(query if mask is None else query * self.h, key, value, mask)


class FirstOfMask(Annotated):
    """Hides more for the fourth head than for the others."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        if mask is not None:
            return super().forward(query, key, value, mask) * (1 + (self.h > 3))
        return super().forward(query, key, value, mask)


class MaskedPrepared(Prepared):
    def forward(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(
            query=query if mask is None else query * self.heads, key=key, value=value, mask=mask
        )


class MaskedProcessed(Processed):
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        out = super().forward(hidden_states, encoder_hidden_states)
        return out if attention_mask is None else out + self.heads


class MaskedOlder(OlderAttention):
    """Takes True for what is hidden; the code that goes on after a cut takes it for what is
    seen."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q * self.scale @ k.transpose(-2, -1)
        if attn_mask is not None:
            scores = (
                scores.masked_fill(attn_mask, -1e4)
                if attn_mask.dtype == torch.bool
                else scores + attn_mask
            )
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


def module_of(kind: type[nn.Module]) -> nn.Module:
    named = type(f"{kind.__name__}Attention", (kind,), {})
    module = named(12, 4)
    if isinstance(module, D2l):
        module(*[torch.randn(2, 5, 12)] * 3, None)
    return nn.ModuleList([module])


@pytest.mark.parametrize(
    "kind",
    [MaskedD2l, Tiled, MaskedAnnotated, FirstOfMask, MaskedPrepared, MaskedProcessed, MaskedOlder],
)
def test_proven_layouts_refuse_what_goes_wrong_under_a_mask(kind: type[nn.Module]) -> None:
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        find_sites(module_of(kind))


class Hidden(Annotated):
    """Another convention: True, or one, hides."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(query, key, value, None if mask is None else mask == 0)


class Whole(Annotated):
    """Takes masks with an axis for heads."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        assert mask is None or mask.dim() == 4
        return super().forward(query, key, value, None if mask is None else mask[:, 0])


class Unmasked(D2l):
    """Takes no mask at all."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None
    ) -> Tensor:
        assert valid_lens is None
        return super().forward(queries, keys, values, None)


@pytest.mark.parametrize("kind", [Hidden, Whole, Unmasked])
def test_masks_of_any_form_are_taken(kind: type[nn.Module]) -> None:
    assert len(find_sites(module_of(kind))) == 1


@pytest.mark.parametrize("kind", [D2l, Annotated, Prepared, Processed, OlderAttention])
def test_a_proven_subclass_needs_no_example(kind: Any) -> None:
    """It runs the code that was proven, by another way."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    through = type("Through", (kind,), {"forward": forward})
    model = module_of(through)
    hp.prune_(model, hp.HeadMask.from_keep({"0": [1, 2]}, {"0": 4}))


# ------------------------------------------------------------------- what needs no example, as
# before


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f[1])
def test_no_family_needs_an_example(family: tuple[str, str]) -> None:
    model = registry.get(family[0]).tiny(0, family[1])[0]
    assert [own_code(b) for b in bind(model)] == [None] * len(bind(model))


def test_no_class_of_transformers_needs_an_example() -> None:
    found, seen = [], 0
    for path in sorted(Path(transformers.models.__file__ or "").parent.glob("*/modeling_*.py")):
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


@pytest.fixture
def llama() -> Subject:
    return family_subject("llama", "llama")


class Named(transformers.models.llama.modeling_llama.LlamaAttention):
    """Adds nothing that a forward pass calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.note = "mine"

    def extra_repr(self) -> str:
        return self.note

    def described(self) -> str:
        return self.note


def named_(module: Any) -> None:
    module.__class__ = Named
    module.note = "mine"


def noted_(module: Any) -> None:
    seen: list[Any] = []

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        seen.append(out)

    module.register_forward_hook(keep)
    module.q_proj.register_forward_hook(lambda m, args, out: seen.append(out))
    module.o_proj.register_forward_pre_hook(lambda m, args: seen.extend(args[0].shape))


SEEN: dict[str, Any] = {}
COUNT = 0


class Recorder:
    """Keeps what it sees."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.calls = 0
        self.outputs: list[Any] = []

    def keep(self, module: Any, args: Any, out: Any) -> None:
        self.calls += 1
        self.note(out)

    def note(self, out: Any) -> None:
        self.outputs.append(out)

    def __call__(self, module: Any, args: Any, out: Any) -> None:
        self.outputs.append(out)

    def store(self, module: Any, args: Any, out: Any) -> None:
        self.seen["out"] = out[0] if isinstance(out, tuple) else out


def noting_hooks() -> list[Callable[..., Any]]:
    """Usual forward hooks that change nothing."""
    store: dict[str, Any] = {}
    many: dict[str, list[Any]] = {"x": []}
    counts, seen, calls, recorder = {"n": 0}, [], 0, Recorder()

    def named(name: str) -> Callable[..., None]:
        def keep(module: Any, args: Any, out: Any) -> None:
            store[name] = out[0].detach().cpu() if isinstance(out, tuple) else out.detach()

        return keep

    def constant(module: Any, args: Any, out: Any) -> None:
        store["x"] = torch.norm(out[0]).item()

    def global_(module: Any, args: Any, out: Any) -> None:
        SEEN["x"] = out

    def global_count(module: Any, args: Any, out: Any) -> None:
        global COUNT
        COUNT += 1

    def count(module: Any, args: Any, out: Any) -> None:
        nonlocal calls
        calls += 1

    def key_count(module: Any, args: Any, out: Any) -> None:
        counts["n"] += 1

    def of_one(module: Any, args: Any, out: Any) -> None:
        many["x"].append(out)

    def grouped(module: Any, args: Any, out: Any) -> None:
        many.setdefault("y", []).append([t.shape for t in args])

    def printed(module: Any, args: Any, out: Any) -> None:
        print(type(module).__name__, len(args))

    def attribute(module: Any, args: Any, out: Any) -> None:
        module.noted_output = out

    def own_attribute(module: Any, args: Any, out: Any) -> None:
        recorder.seen["x"] = out

    def last(where: Any, module: Any, args: Any, out: Any) -> None:
        where.append(out)

    def appended(module: Any, args: Any, out: Any) -> None:
        hidden = out[0]
        seen.append(hidden.detach().clone().float().mean())

    def helped(module: Any, args: Any, out: Any) -> None:
        recorder.note(out)

    def unchanged(module: Any, args: Any, out: Any) -> Any:
        seen.append(out)
        return out

    def by_keyword(module: Any, args: Any, out: Any, name: str) -> None:
        store[name] = out

    def chosen(module: Any, args: Any, out: Any) -> None:
        if isinstance(out, tuple):
            out = out[0]
        seen.append(out.detach())

    hooks = [recorder, unchanged, functools.partial(by_keyword, name="x"), chosen]
    hooks += [lambda m, a, o: seen.append(o[0] if isinstance(o, tuple) else o)]
    hooks += [named("a"), constant, global_, global_count, count, key_count, of_one]
    hooks += [grouped, printed, attribute]
    hooks += [
        own_attribute,
        functools.partial(last, seen),
        appended,
        helped,
        recorder.keep,
        recorder.store,
    ]
    return [
        *hooks,
        lambda m, a, o: seen.append(o),
        lambda m, a, o: many["x"].append(o),
        lambda m, a, o: print(len(a)),
    ]


@pytest.mark.parametrize("hook", noting_hooks(), ids=lambda f: getattr(f, "__name__", "partial"))
def test_hooks_that_only_note_need_no_example(hook: Any) -> None:
    subject = family_subject("llama", "llama")
    site = subject.sites[0]
    subject.model.get_submodule(site.name).register_forward_hook(hook)
    hp.prune_(subject.model, subject.without({site.name: site.units[0]}))


def through(function: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def called(x: Tensor) -> None:
        function(x)

    return called


class Editor:
    def __call__(self, x: Tensor) -> None:
        x[0] = 0

    def pre(self, m: Any, a: Any) -> None:
        self(a[0])


def editing_hooks() -> list[Callable[..., Any]]:
    """Hooks before a projection that edit what it is given, by one way of Python or PyTorch
    each."""
    kept: dict[str, Any] = {}
    seen: list[Any] = []
    buffer = torch.ones(1)
    named: dict[str, Any] = {}

    def helper(x: Tensor) -> None:
        x[..., 4:8] = 0

    def tuple_key(m: Any, a: Any) -> None:
        a[0][..., 4:8] = 0

    def slice_key(m: Any, a: Any) -> None:
        a[0][4:8] = 0

    def called(m: Any, a: Any) -> None:
        helper(a[0])

    def operator(m: Any, a: Any) -> None:
        x = a[0]
        x *= 0

    def subscript(m: Any, a: Any) -> None:
        x = a[0]
        x[0] += 1

    def out(m: Any, a: Any) -> None:
        torch.mul(a[0], 0, out=a[0])

    def inplace(m: Any, a: Any) -> None:
        nn.functional.relu(a[0], inplace=True)

    def positional(m: Any, a: Any) -> None:
        nn.functional.relu(a[0], True)

    def method(m: Any, a: Any) -> None:
        a[0].mul_(0)

    def listed(m: Any, a: Any) -> None:
        seen.append([x.mul_(0) for x in a])

    def data(m: Any, a: Any) -> None:
        a[0].data = a[0] * 0

    def filled(m: Any, a: Any) -> None:
        a[0].numpy().fill(0)

    def set_item(m: Any, a: Any) -> None:
        a[0].__setitem__(0, 0)

    def aliased(m: Any, a: Any) -> None:
        kept["x"] = a[0]
        kept["x"] *= 0

    def outer(m: Any, a: Any) -> None:
        nonlocal buffer
        buffer = a[0]
        buffer *= 0

    def weight(m: Any, a: Any) -> None:
        m.weight = nn.Parameter(m.weight * 0)

    def weight_data(m: Any, a: Any) -> None:
        m.weight[0] = 0

    def by_operator(m: Any, a: Any) -> None:
        setattr(a[0], "data", a[0] * 0)  # noqa: B010

    def starred(m: Any, a: Any) -> None:
        torch.mul(*a, 0, **named)

    def view(m: Any, a: Any) -> None:
        a[0].view(-1)[0] = 0

    def inner(m: Any, a: Any) -> None:
        def edit(x: Tensor) -> None:
            x[0] = 0

        edit(a[0])

    def other_name(m: Any, a: Any) -> None:
        edit = a[0].numpy().fill
        edit(0)

    def loop(m: Any, a: Any) -> None:
        for a[0][0] in (0,):
            pass

    def either(m: Any, a: Any) -> None:
        (a[0] if m.training else kept)[0] = 0

    def first(m: Any, *a: Any) -> Any:
        return m

    def two_of_a_kind(m: Any, a: Any) -> None:
        through(print)(a[0])
        through(helper)(a[0])

    note, edit = through(len), through(helper)

    def second(m: Any, a: Any) -> None:
        note(a[0])
        edit(a[0])

    editor = Editor()
    editors = {"x": helper}

    def stored(m: Any, a: Any) -> None:
        editors["x"](a[0])

    def taken(m: Any, a: Any) -> None:
        edit = editors["x"]
        edit(a[0])

    def bound(edit: Any, m: Any, a: Any) -> None:
        edit(a[0])

    def object_(m: Any, a: Any) -> None:
        editor(a[0])

    hooks = [
        stored,
        taken,
        functools.partial(bound, helper),
        two_of_a_kind,
        second,
        object_,
        Editor().pre,
        view,
        inner,
        other_name,
        loop,
        either,
        first,
    ]
    hooks += [
        tuple_key,
        slice_key,
        called,
        operator,
        subscript,
        out,
        inplace,
        positional,
        method,
        listed,
        data,
        filled,
    ]
    hooks += [set_item, aliased, outer, weight, weight_data, by_operator, starred]
    return [*hooks, lambda m, a: helper(a[0]), lambda m, a: seen.append(a) or (a[0] * 0,)]


@pytest.mark.parametrize("hook", editing_hooks(), ids=lambda f: getattr(f, "__name__", "partial"))
def test_hooks_that_edit_in_place_need_an_example(hook: Any) -> None:
    subject = family_subject("bert", "bert")
    site = subject.sites[0]
    model = subject.copy()
    model.get_submodule(site.name).output.dense.register_forward_pre_hook(hook)
    with pytest.raises(InvalidValue, match=r"prune_\(example=\)"):
        hp.prune_(model, subject.without({site.name: site.units[0]}))


def test_an_edit_of_kwargs_needs_an_example(llama: Subject) -> None:
    def pre(m: Any, a: Any, kwargs: dict[str, Any]) -> None:
        kwargs["attention_mask"] = None

    def update(m: Any, a: Any, kwargs: dict[str, Any]) -> None:
        kwargs.update(attention_mask=None)

    site = llama.sites[0]
    for hook in (pre, update):
        model = llama.copy()
        model.get_submodule(site.name).register_forward_pre_hook(hook, with_kwargs=True)
        with pytest.raises(InvalidValue, match=r"prune_\(example=\)"):
            hp.prune_(model, llama.without({site.name: site.units[0]}))


def compiled_(module: Any) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


def offloaded_(module: Any) -> None:
    for part in module.modules():
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))


def no_grad_(module: Any) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": torch.no_grad()(kind.forward)})


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


# ------------------------------------------------------------------- code that lies elsewhere than
# in forward


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
    kind = type(module)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(nn.Module.__call__(self, *args, **kwargs), size(self))

    module.__class__ = type(kind.__name__, (kind,), {"__call__": called})


def compiled_forward_(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(module)
    module.__class__ = type(
        kind.__name__, (kind,), {"forward": torch.compile(harmful(kind.forward), backend="eager")}
    )


def hidden_hook_(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.q_proj.register_forward_hook(lambda m, args, out: out * out.shape[-1])


@pytest.mark.parametrize(
    "change",
    [projection_, rotation_, registered_, call_, compiled_forward_, hidden_hook_],
    ids=lambda f: f.__name__,
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
    mine = hp.AttentionLayout(**{**vars_of(llama.layout), "name": "mine"})
    site = llama.sites[0]
    subclassed(llama.model.get_submodule(site.name), harmless, monkeypatch)
    sites = find_sites(llama.model, layouts=[mine])
    hp.prune_(llama.model, llama.without({site.name: site.units[0]}), sites=sites)


def vars_of(layout: Any) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in type(layout).__dataclass_fields__}


def test_the_old_call_asks_too(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    subclassed(llama.model.get_submodule(llama.sites[0].name), harmless, monkeypatch)
    small = copy.deepcopy(llama.model)
    with pytest.raises(InvalidValue, match=r"example="):
        hp.prune_heads_(small, {0: [0, 1]})
    with Doubled():
        hp.prune_heads_(small, {0: [0, 1]}, example=llama.batch)
