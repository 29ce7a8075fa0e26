"""A pretended GPU: tensors lie in main memory, but some of them say that they lie on ``cuda:0``.

Every storage that was moved or made on ``cuda:0`` is noted; what is computed from it lies there as
well. Two modes of torch's own look at all that runs:

- calls from Python (``TorchFunctionMode``): what ``tensor.device`` says, where ``to``, ``cpu`` and
  ``device=`` send a tensor, and reads that never reach an operator, such as ``tolist`` and
  ``numpy``;
- operators, forward and backward (``TorchDispatchMode``): which devices meet in one, and which of
  them a GPU must have finished before Python goes on.

What was seen is a list of ``Event``, each with the line of this project that asked for it. Numbers
are those of a CPU::

    with PretendedCuda() as gpu:
        model.to("cuda")
        gpu.forget()
        hp.score(model, batches, "taylor")
    assert not gpu.mismatches, gpu.report()

What it cannot see: kernels that CUDA does not have, memory, time, and whether a copy with
``non_blocking=True`` to main memory is read too early (every copy to main memory counts as a wait).
"""

import sys
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

#: ``mismatch``: CUDA would refuse it. ``wait``: Python waits until the GPU is done. ``upload``: a
#: copy to the GPU that waits until it has arrived. ``sent``: a copy to the GPU that does not.
Kind = Literal["mismatch", "wait", "upload", "sent"]

_REPOSITORY = Path(__file__).resolve().parents[1]
_FOLDERS = tuple(str(_REPOSITORY / name) for name in ("headprune", "benchmarks", "tests"))
_PACKAGES = "site-packages/"


def _aten(names):
    return {f"aten::{name}" for name in names.split()}


#: Operators whose result, or the check of it, the CPU reads. The first is item, int, float, bool,
#: and whatever asks for one of them. Linear algebra looks at its own error codes; cholesky_ex,
#: inv_ex and solve_ex do not.
_WAITS = _aten(
    "_local_scalar_dense equal nonzero masked_select _unique _unique2 unique_dim"
    " unique_consecutive bincount histc _linalg_check_errors cholesky_inverse _linalg_eigh"
    " _linalg_svd _linalg_eigvals"
)
#: Operators that take tensors of two devices.
_CROSSING = _aten("copy_ _to_copy set_ set_data lift_fresh detach")
#: Operators that are not called pointwise and yet take a CPU's tensor of no dimension as if it were
#: a number.
_TAKES_NUMBERS = _aten("fill_ masked_fill masked_fill_ where")
_READS_BY_INDEX = _aten("index _unsafe_index")
_WRITES_BY_INDEX = _aten("index_put index_put_ _index_put_impl_ _unsafe_index_put")
_INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)
_MASKS = (torch.bool, torch.uint8)
#: Functions that make a tensor of Python's numbers, which are sent from main memory.
_FROM_NUMBERS = {"tensor", "as_tensor", "asarray", "new_tensor"}

#: Functions of modes, which pass on what others have asked for.
_PASSED_ON = ("__torch_dispatch__", "__torch_function__")

_real_device = Tensor.device.__get__


@dataclass(frozen=True)
class Event:
    """What was seen at one operation.

    Args:
        kind: See ``Kind``.
        what: The operation; of a mismatch, with shapes and devices.
        line: The innermost line of this project beneath which it happened, ``file:number``.
        package: The package whose code asked for it, ``headprune`` or ``transformers``, say;
            torch's own is passed over.
    """

    kind: Kind
    what: str
    line: str
    package: str

    def __str__(self):
        return f"{self.kind}: {self.what} at {self.line}, asked for by {self.package}"


class PretendedCuda(AbstractContextManager["PretendedCuda"]):
    """For as long as the block lasts, there is a GPU ``cuda:0``, and what happens on it is
    noted."""

    def __init__(self):
        self.events = []
        self.storages = _Storages()
        self.looking_away = False
        #: Whether operators without a tensor are making one on the GPU; the innermost call of
        #: Python's is last.
        self.making = [False]
        self._stack = ExitStack()

    def __enter__(self):
        for owner, name, value in _environment(self):
            self._stack.enter_context(mock.patch.object(owner, name, value))
        self._stack.enter_context(_Calls(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(self, *error):
        self._stack.close()

    @contextmanager
    def unseen(self):
        """What happens in the block is the modes' own."""
        before, self.looking_away = self.looking_away, True
        try:
            yield
        finally:
            self.looking_away = before

    @contextmanager
    def made_there(self, there):
        """Tensors that are made of nothing in the block lie on the GPU, or do not."""
        self.making.append(there)
        try:
            yield
        finally:
            self.making.pop()

    def note(self, kind, what):
        line, package = _caller(sys._getframe(1))
        self.events.append(Event(kind, what, line, package))

    def forget(self):
        """Begins anew; tensors stay where they are."""
        self.events.clear()

    def of(self, kind):
        return [event for event in self.events if event.kind == kind]

    @property
    def mismatches(self):
        return self.of("mismatch")

    @property
    def waits(self):
        return self.of("wait")

    @property
    def uploads(self):
        return self.of("upload")

    def report(self):
        """Every kind of event with how often it was seen, most often first."""
        counts = Counter(self.events).most_common()
        return "\n".join(f"{count:6} x {event}" for event, count in counts)


class _Storages:
    """The storages that are said to lie on the GPU.

    A weak reference keeps the address of a storage from being given to another, so an address is
    enough to know one.
    """

    def __init__(self):
        self._references = {}
        self._look_again = 10_000

    def __contains__(self, tensor):
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self._references

    def add(self, tensor):
        storage = _storage(tensor)
        if storage is None:
            return
        self._references.setdefault(storage._cdata, StorageWeakRef(storage))
        if len(self._references) > self._look_again:
            self._references = {
                place: ref for place, ref in self._references.items() if not ref.expired()
            }
            self._look_again = 2 * len(self._references) + 10_000

    def discard(self, tensor):
        storage = _storage(tensor)
        if storage is not None:
            self._references.pop(storage._cdata, None)


def _storage(tensor):
    """A tensor's storage; None where it has none, as on the meta device."""
    if not isinstance(tensor, Tensor):
        return None
    try:
        if _real_device(tensor).type != "cpu":
            return None
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one of a function transform
        return None


def _same_storage(a, b):
    mine, other = _storage(a), _storage(b)
    return mine is not None and other is not None and mine._cdata == other._cdata


class _Operators(TorchDispatchMode):
    """Looks at every operator, the backward pass's with it."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.gpu.looking_away:
            return func(*args, **kwargs)
        with self.gpu.unseen():
            given = [x for x in tree_leaves((args, kwargs)) if _storage(x) is not None]
            there = [x in self.gpu.storages for x in given]
            out = func(*args, **kwargs)
            name = func.name().split(".")[0]
            if any(there):
                self._check_devices(func, name, given, there)
                self._check_waits(name, args, kwargs)
            on_gpu = any(there)
            if name == "aten::copy_":
                on_gpu = self._copied(args, kwargs)
            if not _has_tensor(args, kwargs):
                on_gpu = self.gpu.making[-1]
            if on_gpu:
                self._lie_there(out, given)
        return out

    def _check_devices(self, func, name, given, there):
        if all(there) or name in _CROSSING:
            return
        others = [x for x, is_there in zip(given, there, strict=True) if not is_there]
        if name in _READS_BY_INDEX | _WRITES_BY_INDEX:
            # The indices may lie in main memory, and are sent; a value of no dimension is taken for
            # a number.
            fine = there[0] and all(x.dtype in _INDICES or not x.dim() for x in others)
            if fine and any(x.dtype in _INDICES and x.dim() for x in others):
                self.gpu.note("upload", f"{name} by indices in main memory")
        else:
            numbers = (
                torch.Tag.pointwise in func.tags
                or name.startswith("aten::_foreach_")
                or name in _TAKES_NUMBERS
            )
            fine = numbers and not any(x.dim() for x in others)
        if not fine:
            places = [
                f"{list(x.shape)} on {'cuda' if t else 'cpu'}"
                for x, t in zip(given, there, strict=True)
            ]
            self.gpu.note("mismatch", f"{name} of {', '.join(places)}")

    def _check_waits(self, name, args, kwargs):
        if name in _WAITS:
            self.gpu.note("wait", name)
        elif name in _READS_BY_INDEX or name in _WRITES_BY_INDEX:
            masks = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor) and x.dtype in _MASKS]
            # Becomes masked_fill.
            filled = name in _WRITES_BY_INDEX and len(masks) == 1 and args[2].numel() == 1
            if masks and not filled:
                self.gpu.note("wait", f"{name} by booleans")
        elif (
            name == "aten::repeat_interleave"
            and len(args) == 1
            and kwargs.get("output_size") is None
        ):
            self.gpu.note("wait", name)  # of counts alone: how long the answer is, only they know

    def _copied(self, args, kwargs):
        """``copy_``: the target stays where it is."""
        target, source = (x in self.gpu.storages for x in args[:2])
        if target and not source and args[1].dim():
            sent = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            self.gpu.note("sent" if sent else "upload", "copy_ to the GPU")
        if source and not target:
            self.gpu.note("wait", "copy_ to main memory")
        return target

    def _lie_there(self, out, given):
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not any(_same_storage(x, y) for y in given):
                self.gpu.storages.add(x)


def _has_tensor(args, kwargs):
    return any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs)))


class _Calls(TorchFunctionMode):
    """Looks at calls from Python: what a tensor says of its device, and where it is sent."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.gpu.looking_away:
            return func(*args, **kwargs)
        first = args[0] if args else None
        asked = (
            getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else None
        )
        if asked is Tensor.device:
            return CUDA if first in self.gpu.storages else func(*args, **kwargs)
        if asked is Tensor.is_cuda:
            return first in self.gpu.storages
        if asked is Tensor.is_cpu:
            return func(*args, **kwargs) and first not in self.gpu.storages
        if func is Tensor.get_device and first in self.gpu.storages:
            return 0
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._moved(func, args, kwargs)
        if func in (Tensor.numpy, Tensor.__array__) and first in self.gpu.storages:
            self.gpu.note("mismatch", "a tensor of the GPU's as a NumPy array")
        if func is Tensor.tolist and first in self.gpu.storages:
            self.gpu.note("wait", "tolist")
        if func is Tensor.pin_memory:
            return first
        if func is Tensor.__deepcopy__:
            return self._copied(func, args, kwargs)
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            return self._backward(func, args, kwargs)
        return self._called(func, args, kwargs)

    def _backward(self, func, args, kwargs):
        """A backward pass, whose hooks and functions of Python are looked at as well.

        A mode is off while it handles a call, and what calls Python back has to be called with the
        mode on again.
        """
        there = any(x in self.gpu.storages for x in tree_leaves((args, kwargs)))
        run = _backward_of if func is Tensor.backward else func
        straight_on = mock.patch.object(torch.autograd, "has_torch_function", return_value=False)
        with self.gpu.made_there(there), straight_on, self:
            return run(*args, **kwargs)

    def _copied(self, func, args, kwargs):
        with self.gpu.unseen():  # it goes by way of storages
            out = func(*args, **kwargs)
        if args[0] in self.gpu.storages:
            self.gpu.storages.add(out)
        return out

    def _called(self, func, args, kwargs):
        """Any other function: what it makes lies where ``device=`` says, or where its tensors
        do."""
        name = getattr(func, "__name__", "")
        wanted = _device(kwargs.get("device"))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if wanted is not None and wanted.type == "cuda":
            kwargs["device"] = CPU
        there = (
            any(x in self.gpu.storages for x in given) if wanted is None else wanted.type == "cuda"
        )
        with self.gpu.made_there(there):
            out = func(*args, **kwargs)
        if name in _FROM_NUMBERS and (wanted is not None or name == "new_tensor"):
            if there:
                self.gpu.note("upload", f"{name} of Python's numbers")
            self._put(out, there)
        elif wanted is not None:
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and not any(_same_storage(x, y) for y in given):
                    self._put(x, there)
        return out

    def _put(self, x, there):
        if there:
            self.gpu.storages.add(x)
        else:
            self.gpu.storages.discard(x)

    def _moved(self, func, args, kwargs):
        """``to``, ``cpu`` and ``cuda``."""
        source, *rest = args
        target, sent = self._target(func, rest, kwargs)
        if func is Tensor.cuda:
            func, rest, kwargs = Tensor.to, [], {}
        was = source in self.gpu.storages
        with self.gpu.made_there(was if target is None else target.type == "cuda"):
            rest = [CPU if _is_cuda(x) else x for x in rest]
            kwargs = {name: CPU if _is_cuda(x) else x for name, x in kwargs.items()}
            out = func(source, *rest, **kwargs)
        if target is None or target.type == "meta" or _real_device(out).type == "meta":
            return out
        now = target.type == "cuda"
        if _real_device(source).type == "meta":
            self._put(out, now)
            return out
        if was == now:
            return out
        if now:
            self.gpu.note("sent" if sent else "upload", "a copy to the GPU")
        else:
            self.gpu.note("wait", "a copy to main memory")
        if _same_storage(out, source):
            out = out.clone()
        self._put(out, now)
        return out

    def _target(self, func, rest, kwargs):
        """Where a tensor is sent, None where it stays; and whether Python goes on at once."""
        flags = [x for x in rest if isinstance(x, bool)]
        sent = bool(kwargs.get("non_blocking", flags[0] if flags else False))
        if func is Tensor.cpu:
            return CPU, sent
        if func is Tensor.cuda:
            return CUDA, sent
        for value in (*rest, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, Tensor):
                return (CUDA if value in self.gpu.storages else _real_device(value)), sent
            found = _device(value)
            if found is not None:
                return found, sent
        return None, sent


def _backward_of(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    """``Tensor.backward``."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _device(value):
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        return torch.device(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    return None


def _is_cuda(value):
    found = _device(value)
    return found is not None and found.type == "cuda"


def _caller(frame):
    """The innermost line of this project above a frame, and the package of the innermost one that
    is not torch's."""
    package = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and frame.f_code.co_name not in _PASSED_ON:
            ours = file.startswith(_FOLDERS)
            if not package:
                package = _package(file, ours)
            if ours:
                return f"{Path(file).relative_to(_REPOSITORY)}:{frame.f_lineno}", package
        frame = frame.f_back
    return "no line of this project", package or "python"


def _package(file, ours):
    """``headprune``, ``tests``, ``transformers``, ...; nothing for torch and for Python itself."""
    if ours:
        return Path(file).relative_to(_REPOSITORY).parts[0]
    found = file.split(_PACKAGES)[-1].split("/")[0] if _PACKAGES in file else ""
    return "" if found == "torch" else found


def _environment(gpu):
    """What ``torch.cuda`` is asked for, with the answers of a machine with one GPU."""
    properties = SimpleNamespace(
        name="a pretended GPU",
        total_memory=2**37,
        multi_processor_count=132,
        major=9,
        minor=0,
        uuid="0",
    )

    def synchronize(device=None):
        gpu.note("wait", "torch.cuda.synchronize")

    def state(device=None):
        return torch.zeros(16, dtype=torch.uint8)

    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "set_rng_state": lambda state, device=None: None,
        "set_rng_state_all": lambda states: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "_lazy_init": lambda: None,
    }
    for name, answer in answers.items():
        yield torch.cuda, name, answer
    yield torch.cuda.graphs, "is_current_stream_capturing", lambda: False
