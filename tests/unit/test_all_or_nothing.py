"""An error at any call inside `prune_`, `recover_` or `save_pretrained` leaves the model exactly as
it was.

Every function that our code calls, and every function of torch or Python that our code calls, is
made to raise once: at the first call of all, at the second, and so on.
"""

import copy
import inspect
import shutil
import sys
from pathlib import Path

import pytest
import torch

import headprune as hp
from headprune.recovery import Finetune
from tests.laws.support import DEEP, subject_of

HERE = str(Path(hp.__file__).parent)


class Injected(Exception):
    """What no code of ours expects."""


#: They compute nothing that could fail half-way.
_HARMLESS = {
    *(isinstance, issubclass, getattr, hasattr, callable, id, len, iter, next),
    *(sorted, sum, any, all, min, max),
}


class Raise:
    """Raises at the n-th call that our code makes or is, in the block; counts them where n is 0."""

    def __init__(self, n=0):
        self.n, self.count, self.where = n, 0, ""

    def __enter__(self):
        sys.setprofile(self._watch)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _watch(self, frame, event, function):
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(HERE):
            return
        # Where a generator goes on, its frame would end without its own `finally`, which no real
        # error does.
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        if event == "c_call" and function in _HARMLESS:
            return
        self.count += 1
        if self.count == self.n:
            sys.setprofile(None)
            called = getattr(function, "__name__", "")
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {event} {called}"
            raise Injected(self.where)


def held_by(value):
    """An attribute by identity, plain ones by value, with the items of a mapping or a set."""
    if isinstance(value, dict):
        return id(value), [(key, id(item)) for key, item in value.items()]
    if isinstance(value, set):
        return id(value), sorted(value)
    return value if isinstance(value, (bool, int, float, str)) else id(value)


def picture(model):
    """Everything that a model is: classes, attributes, hooks, and tensors by identity, flags and
    bits."""
    modules = {
        name: (type(module), {key: held_by(value) for key, value in vars(module).items()})
        for name, module in model.named_modules(remove_duplicate=False)
    }
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    tensors = {
        name: (id(t), t.requires_grad, t.grad is None, t.dtype, t.detach().clone())
        for name, t in named
    }
    config = getattr(model, "config", None)
    return modules, tensors, None if config is None else config.to_dict()


def same(before, after, where):
    assert before[0].keys() == after[0].keys(), where
    for name, module in before[0].items():
        assert module == after[0][name], f"{name!r} is not as it was after an error at {where}"
    assert before[1].keys() == after[1].keys(), where
    for name, (*flags, numbers) in before[1].items():
        *now, others = after[1][name]
        assert flags == now, f"{name}: {where}"
        assert torch.equal(numbers, others), f"{name}: {where}"
    assert before[2] == after[2], where


def raised_everywhere(model, work, step):
    """Lets every ``step``-th call of the work raise, in turn; the model must be as it was. Returns
    how many did."""
    for _ in range(2):  # the second has found what is remembered between calls
        with Raise() as counted:
            work(copy.deepcopy(model))
    assert counted.count > 50
    n_raised, subject = 0, copy.deepcopy(model)
    before = picture(subject)
    for n in range(1, counted.count + 1, step):
        with Raise(n) as raising:
            try:
                work(subject)
            except Exception:
                sys.setprofile(None)
                n_raised += 1
                same(before, picture(subject), raising.where)
                continue
        # An error that the work expects as an answer: it came to its end.
        subject = copy.deepcopy(model)
        before = picture(subject)
    return n_raised


def parts(some, many=1):
    """Every so many-th call in the usual tier, and more of them, or all, in the long one."""
    return pytest.mark.parametrize(
        "step", [some, pytest.param(many, marks=pytest.mark.long)], ids=["some", "many"]
    )


@parts(307)
@pytest.mark.parametrize("name", DEEP)
def test_a_cut(name, step):
    case = subject_of(name)
    case.model.train()
    case.model.register_forward_hook(lambda *_: None)
    mask = case.ragged(1)
    work = lambda m: hp.prune_(m, mask, sites=case.sites)  # noqa: E731
    assert raised_everywhere(case.model, work, step) >= 3


@parts(997, 11)
@pytest.mark.parametrize("name", ["gpt2", "multi_head_attention"])
def test_a_cut_with_its_proof(name, step):
    case = subject_of(name)
    for parameter in list(case.model.parameters())[::2]:
        parameter.requires_grad_(False)
    mask = case.ragged(2)
    work = lambda m: hp.prune_(m, mask, example=case.batch)  # noqa: E731
    assert raised_everywhere(case.model, work, step) >= 3


@parts(907, 5)
def test_a_layer_that_loses_all_its_heads(step):
    case = subject_of("bert")
    work = lambda model: hp.prune_heads_(model, {0: range(case.sites[0].n_query_heads)})  # noqa: E731
    assert raised_everywhere(case.model, work, step) >= 3


@parts(4001, 101)
@pytest.mark.parametrize("method", ["mean_fold", "lstsq"])
def test_a_recovery(method, step):
    case = subject_of("llama")  # its projections have no bias, and get one
    teacher, model = case.copy(), case.copy()
    hp.prune_(model, case.ragged(1))
    work = lambda m: hp.recover_(m, [case.batch], method, teacher)  # noqa: E731
    assert raised_everywhere(model, work, step) >= 3
    assert picture(teacher)[1].keys() == picture(case.model)[1].keys()


@pytest.mark.slow
def test_a_training():
    case = subject_of("bert")
    work = lambda m: hp.recover_(m, [case.batch], Finetune(steps=2, learning_rate=0.1))  # noqa: E731
    assert raised_everywhere(case.model, work, step=601) >= 2


@parts(2503, 101)
@pytest.mark.parametrize("format", ["headprune", "transformers"])
def test_a_save(format, step, tmp_path):
    """The folder is as it was, too, or it is the new one whole."""
    case = subject_of("llama")  # its configuration can say how many heads are left
    out, ours = tmp_path / "out", tmp_path / "new"

    def files(folder):
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    hp.save_pretrained(case.model, out)
    old = files(out)
    model = case.copy()
    hp.prune_(model, case.mask({s.name: s.units[0] for s in case.sites}))
    hp.save_pretrained(model, ours, format=format)
    new = files(ours)

    def work(small):
        shutil.rmtree(out)
        out.mkdir()
        for name, data in old.items():
            (out / name).write_bytes(data)
        try:
            hp.save_pretrained(small, out, format=format)
        except BaseException:
            left = files(out)
            whole = left.keys() >= new.keys()
            assert left == old or (whole and left["model.safetensors"] != old["model.safetensors"])
            raise

    assert raised_everywhere(model, work, step) >= 3
