"""Hooks that only note what passes need no example for a cut; those that edit it do."""

import functools
from textwrap import indent

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.noting import only_notes
from tests.laws.support import family_subject


class Recorder:
    """Keeps what it sees."""

    def __init__(self):
        self.seen = {}
        self.calls = 0
        self.outputs = []

    def __call__(self, module, args, out):
        self.outputs.append(out)

    def keep(self, module, args, out):
        self.calls += 1
        self.note(out)

    def note(self, out):
        self.outputs.append(out)

    def store(self, module, args, out):
        self.seen["out"] = out[0] if isinstance(out, tuple) else out


class Editor:
    def __call__(self, x):
        x[0] = 0

    def pre(self, m, a):
        self(a[0])


class Operators:
    """Edits what its operators and stores are given."""

    def __matmul__(self, x):
        x[0] = 0

    __getitem__ = __contains__ = __eq__ = __matmul__
    __hash__ = None

    def __setitem__(self, key, x):
        x[0] = 0

    def __setattr__(self, name, x):
        x[0] = 0


class Box:
    @property
    def kept(self):
        return None

    @kept.setter
    def kept(self, x):
        x[0] = 0


def helper(x):
    x[..., 4:8] = 0


def through(function):
    def called(x):
        function(x)

    return called


def around():
    """What the functions below find in the function around them."""
    found = {"seen": [], "store": {}, "many": {"x": []}, "counts": {}}
    found |= {"calls": 0, "buffer": torch.ones(1), "recorder": Recorder(), "editor": Editor()}
    found |= {"note": through(len), "edit": through(helper), "editors": {"x": helper}}
    found |= {"operators": Operators(), "box": Box()}
    return {**found, "helper": helper, "through": through}


def written(parameters, body):
    """A hook with this code, as a user writes it inside a function."""
    code = f"def outer({', '.join(around())}):\n"
    code += f"    def hook({parameters}):\n{indent(body, ' ' * 8)}\n    return hook"
    names = {"torch": torch, "nn": nn, "__name__": "user", "SEEN": {}, "COUNT": 0}
    exec(code, names)
    return names["outer"](**around())


NOTES = {
    "a closure": "seen.append(out)",
    "unchanged": "seen.append(out)\nreturn out",
    "the first": "return seen.append(out[0] if isinstance(out, tuple) else out)",
    "chosen": "if isinstance(out, tuple):\n    out = out[0]\nseen.append(out.detach())",
    "a key": "store['x'] = out[0].detach().cpu() if isinstance(out, tuple) else out.detach()",
    "a global": "SEEN['x'] = out",
    "a global count": "global COUNT\nCOUNT += 1",
    "a count": "nonlocal calls\ncalls += 1",
    "a list by key": "return many['x'].append(out)",
    "a new list": "many.setdefault('y', []).append([t.shape for t in args])",
    "printed": "print(type(module).__name__, len(args))",
    "an attribute": "module.noted_output = out",
    "an attribute of its own": "recorder.seen['x'] = out",
    "a mean": "hidden = out[0]\nseen.append(hidden.detach().clone().float().mean())",
    "a helper": "recorder.note(out)",
}
EDITS = {
    "tuple key": "a[0][..., 4:8] = 0",
    "slice": "a[0][4:8] = 0",
    "called": "helper(a[0])",
    "returned": "return helper(a[0])",
    "operator": "x = a[0]\nx *= 0",
    "out": "torch.mul(a[0], 0, out=a[0])",
    "in place": "nn.functional.relu(a[0], inplace=True)",
    "method": "a[0].mul_(0)",
    "listed": "seen.append([x.mul_(0) for x in a])",
    "data": "a[0].data = a[0] * 0",
    "filled": "a[0].numpy().fill(0)",
    "set item": "a[0].__setitem__(0, 0)",
    "aliased": "store['x'] = a[0]\nstore['x'] *= 0",
    "outer": "nonlocal buffer\nbuffer = a[0]\nbuffer *= 0",
    "weight": "m.weight = nn.Parameter(m.weight * 0)",
    "weight data": "m.weight[0] = 0",
    "setattr": "setattr(a[0], 'data', a[0] * 0)",
    "starred": "torch.mul(*a, 0, **store)",
    "view": "a[0].view(-1)[0] = 0",
    "inner": "def change(x):\n    x[0] = 0\nchange(a[0])",
    "another name": "change = a[0].numpy().fill\nchange(0)",
    "loop": "for a[0][0] in (0,):\n    pass",
    "either": "(a[0] if m.training else store)[0] = 0",
    "another output": "return seen.append(a) or (a[0] * 0,)",
    "two of a kind": "through(print)(a[0])\nthrough(helper)(a[0])",
    "second": "note(a[0])\nedit(a[0])",
    "stored": "editors['x'](a[0])",
    "taken": "change = editors['x']\nchange(a[0])",
    "object": "editor(a[0])",
    "key of max": "seen.append(max(a, key=editors['x']))",
    "key of sorted": "sorted(a, key=editors['x'])",
    "its own keys": "operators['x'] = a[0]",
    "its own attributes": "operators.x = a[0]",
    "a property": "box.kept = a[0]",
    "its own product": "operators @ a[0]",
    "its own index": "operators[a[0]]",
    "its own test": "a[0] in operators",
    "its own equality": "operators == a[0]",
}


def last(where, module, args, out):
    where.append(out)


def by_keyword(module, args, out, seen):
    seen.append(out)


def bound(change, m, a):
    change(a[0])


def module_for_all(m, *a):
    return m


@pytest.mark.parametrize("body", NOTES.values(), ids=NOTES)
def test_hooks_that_only_note_are_told(body):
    assert only_notes(written("module, args, out", body), nn.Linear(3, 3))


@pytest.mark.parametrize("body", EDITS.values(), ids=EDITS)
def test_hooks_that_edit_are_told(body):
    assert not only_notes(written("m, a", body), nn.Linear(3, 3))


def test_partials_methods_and_objects_are_told():
    recorder, part = Recorder(), nn.Linear(3, 3)
    noting = [recorder, recorder.keep, recorder.store]
    noting += [functools.partial(last, []), functools.partial(by_keyword, seen=[])]
    assert all(only_notes(hook, part) for hook in noting)
    editing = [Editor().pre, functools.partial(bound, helper), module_for_all]
    assert not any(only_notes(hook, part) for hook in editing)


def test_a_cut_asks_for_an_example_where_a_hook_edits():
    subject = family_subject("llama", "llama")
    site = subject.sites[0]
    mask = subject.without({site.name: site.units[0]})
    model = subject.copy()
    model.get_submodule(site.name).register_forward_hook(Recorder())
    hp.prune_(model, mask)
    for edit in ("kwargs['attention_mask'] = None", "kwargs.update(attention_mask=None)"):
        model = subject.copy()
        hook = written("m, a, kwargs", edit)
        model.get_submodule(site.name).register_forward_pre_hook(hook, with_kwargs=True)
        with pytest.raises(InvalidValue, match=r"prune_\(example=\)"):
            hp.prune_(model, mask)
    model = subject.copy()
    model.get_submodule(f"{site.name}.o_proj").register_forward_pre_hook(Editor().pre)
    with pytest.raises(InvalidValue, match=r"prune_\(example=\)"):
        hp.prune_(model, mask)
