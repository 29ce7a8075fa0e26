"""What flows where in one run of a model: of which projections a tensor is made, and what softmax
made of it.

Every tensor carries a *trail*. A projection's output starts a new one, any other operation unites
those of what it is given. So softmax attention is known by what it does, whatever its names: a
matrix product reaches a softmax (scores), what the softmax made reaches another product (the heads'
outputs, with the values beside it).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from headprune.detect.causality import is_causal, kernel_pairs, shown_pairs
from headprune.model.running import tensors

_KERNELS = {"scaled_dot_product_attention", "flex_attention"}
_FUSED = {
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "einsum"}
_LIKE = {
    "type_as",
    "expand_as",
    "view_as",
    "reshape_as",
    "to",
}  # take only type or shape of what follows the first
_NORMS = {"layer_norm", "rms_norm", "group_norm"}


@dataclass(frozen=True)
class Trail:
    """What a tensor is made of.

    Args:
        sources: Projections, with no other one between.
        products: Matrix products, by their number, that it is a sum or another element-wise
            function of.
        chances: Softmax calls whose probabilities it holds.
        context: Softmax calls whose heads' outputs it holds.
        fixed: Whether it is made of parameters alone.
    """

    sources: frozenset[str] = frozenset()
    products: frozenset[int] = frozenset()
    chances: frozenset[int] = frozenset()
    context: frozenset[int] = frozenset()
    fixed: bool = False


def united(trails: Iterable[Trail]) -> Trail:
    """The trail of what is made of several tensors."""
    trails = list(trails)
    return Trail(
        frozenset(s for t in trails for s in t.sources),
        frozenset(n for t in trails for n in t.products),
        frozenset(n for t in trails for n in t.chances),
        frozenset(n for t in trails for n in t.context),
        bool(trails) and all(t.fixed for t in trails),
    )


@dataclass
class Product:
    """A matrix product: the trails of its factors, the length it sums over if known, its shape,
    what mixes it."""

    factors: tuple[Trail, Trail]
    summed: int | None
    shape: tuple[int, ...]
    mixers: set[str] = field(default_factory=set)


@dataclass
class Softmax:
    """A softmax of matrix products, or a kernel that computes one.

    Args:
        shape: Of the scores; of the queries, for a kernel.
        scoring: Projections of the queries and keys.
        both: Those of them that both factors of a product are made of.
        head_dim: Length that the scores are sums over; None where it is not known or not one.
        last: Whether it normalises over the last axis.
        learned: Whether every product has a factor that is no activation.
        kernel: Whether a kernel computes it.
        fused: Whether one native function does everything, projections included.
        valued: Projections of the values.
        width: Width of a value; None where it is not known.
        mixers: Projections and bare tensors that the scores or the probabilities of several heads
            pass.
        used: Whether its probabilities were multiplied with values.
        causal: Whether no token saw a later one.
    """

    shape: tuple[int, ...]
    scoring: frozenset[str] = frozenset()
    both: frozenset[str] = frozenset()
    head_dim: int | None = None
    last: bool = True
    learned: bool = False
    kernel: bool = False
    fused: bool = False
    valued: frozenset[str] = frozenset()
    width: int | None = None
    mixers: set[str] = field(default_factory=set)
    used: bool = False
    causal: bool = False


@dataclass(frozen=True)
class Norm:
    """A norm that was called: over how many features, of what."""

    name: str
    width: int
    given: Trail


@dataclass(frozen=True)
class Event:
    """A module's call that begins ("enter") or ends ("leave"), or a softmax, by its number."""

    what: str
    name: str
    shape: tuple[int, ...] = ()
    trail: Trail = Trail()
    number: int = -1


class Flow(TorchFunctionMode):
    """Follows the trails of all tensors while it is active, and notes what happens in order.

    Args:
        example: The batch that runs; its mask says what is padding.
    """

    def __init__(self, example: Any) -> None:
        self._example = example
        self.events: list[Event] = []
        self.softmaxes: list[Softmax] = []
        self.norms: list[Norm] = []
        self._products: list[Product] = []
        self._trails: Any = WeakTensorKeyDictionary()

    def trail(self, value: Any) -> Trail:
        """The united trail of all tensors in a value."""
        return united(
            self._trails.get(t) or Trail(fixed=isinstance(t, nn.Parameter)) for t in tensors(value)
        )

    def called(self, name: str, module: nn.Module, given: Any, projection: bool) -> None:
        """Notes that a module is called."""
        trail, first = self.trail(given), next(tensors(given), None)
        self.events.append(
            Event("enter", name, tuple(first.shape) if first is not None else (), trail)
        )
        if not projection:
            widths = {p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 1}
            self.norms += [Norm(name, w, trail) for w in widths]

    def returned(self, name: str, given: Any, made: Any, projection: bool) -> None:
        """Notes that a module is done; what a projection made starts a new trail, unless it mixes
        heads' scores."""
        shape = next((tuple(t.shape) for t in tensors(made)), ())
        if projection:
            trail = self._mixed(self.trail(given), name, shape) or Trail(frozenset({name}))
            for tensor in tensors(made):
                self._trails[tensor] = trail
        self.events.append(Event("leave", name, shape, self.trail(made)))

    def _mixed(self, given: Trail, by: str, shape: tuple[int, ...]) -> Trail | None:
        """The trail of scores or probabilities that something passed on in the same size; None if
        it took others."""
        passed: list[Product | Softmax] = [self._products[i] for i in given.products]
        passed += [self.softmaxes[i] for i in given.chances]
        if not passed or len(shape) < 3 or any(sorted(p.shape) != sorted(shape) for p in passed):
            return None
        for one in passed:
            one.mixers.add(by)
        return replace(given, sources=frozenset(), fixed=False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = self.trail((args, kwargs))
        made = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _FUSED:
            first = next(tensors((args, kwargs)))
            trail = self._softmax(
                Softmax(tuple(first.shape), fused=True, kernel=True, used=True), given
            )
        elif name in _KERNELS:
            trail = self._kernel(name, given, args, kwargs)
        elif name in ("softmax", "_softmax") and given.products:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            trail = self._of_scores(given, next(tensors((args, kwargs))), dim)
        elif name.startswith("new_") or name.endswith("_like"):
            trail = Trail()
        elif name in _LIKE:
            trail = self.trail(args[:1])
        elif name in _PRODUCTS and isinstance(made, Tensor):
            trail = self._product(name, args, kwargs, made, given)
        else:
            trail = given
            if name == "__setitem__":
                self._trails[args[0]] = given
            elif name.endswith("_") and isinstance(made, Tensor) and made._base is not None:
                self._trails[made._base] = united(
                    [given, self.trail(made._base)]
                )  # written into a part of it
            elif name in _NORMS:
                self._norm(name, args, kwargs, given)
        for tensor in tensors(made):
            self._trails[tensor] = trail
        return made

    def _softmax(self, found: Softmax, given: Trail) -> Trail:
        """Notes it; the trail of probabilities or, of a kernel, of the heads' outputs."""
        number = frozenset({len(self.softmaxes)})
        self.events.append(Event("softmax", "", found.shape, given, len(self.softmaxes)))
        self.softmaxes.append(found)
        none: frozenset[int] = frozenset()
        if found.kernel:
            return Trail(given.sources, none, none, given.context | number)
        return Trail(given.sources, none, number, given.context)

    def _kernel(self, name: str, given: Trail, args: Any, kwargs: Any) -> Trail:
        query, key, value, *_ = tensors(
            (args, [kwargs[k] for k in ("query", "key", "value") if k in kwargs])
        )
        asked, keys = self.trail(query).sources, self.trail(key).sources
        found = Softmax(
            tuple(query.shape), asked | keys, asked & keys, query.shape[-1], kernel=True, used=True
        )
        found.valued, found.width = self.trail(value).sources, value.shape[-1]
        pairs = (
            kernel_pairs(query, key, args, kwargs)
            if name == "scaled_dot_product_attention"
            else None
        )
        found.causal = pairs is not None and is_causal(pairs, self._example)
        return self._softmax(found, given)

    def _of_scores(self, given: Trail, scores: Tensor, dim: int) -> Trail:
        products = [self._products[i] for i in sorted(given.products)]
        sums = {p.summed for p in products}
        found = Softmax(
            tuple(scores.shape),
            united(t for p in products for t in p.factors).sources,
            frozenset(s for p in products for s in p.factors[0].sources & p.factors[1].sources),
            sums.pop() if len(sums) == 1 else None,
            dim % scores.ndim == scores.ndim - 1,
            all(any(t.fixed for t in p.factors) for p in products),
            mixers={m for p in products for m in p.mixers},
        )
        found.causal = found.last and is_causal(shown_pairs(scores), self._example)
        return self._softmax(found, given)

    def _product(self, name: str, args: Any, kwargs: Any, made: Tensor, given: Trail) -> Trail:
        factors = list(tensors((args, kwargs)))[1 if name == "baddbmm" else 0 :][:2]
        if len(factors) < 2:
            return given
        if name == "__rmatmul__":
            factors = factors[::-1]
        trails = (self.trail(factors[0]), self.trail(factors[1]))
        if any(t.fixed for t in trails):
            mixed = self._mixed(
                united(t for t in trails if not t.fixed), "a bare tensor", tuple(made.shape)
            )
            if mixed is not None:
                return mixed
        for at, (own, other) in enumerate((trails, trails[::-1])):
            if own.chances and not other.chances:
                width = _summed(name, args, factors, probabilities=at)
                for number in own.chances:
                    softmax = self.softmaxes[number]
                    softmax.used, softmax.width = (
                        True,
                        width if softmax.width in (None, width) else softmax.width,
                    )
                    softmax.valued |= other.sources
                none: frozenset[int] = frozenset()
                return Trail(given.sources, none, none, given.context | own.chances)
        self._products.append(Product(trails, _summed(name, args, factors), tuple(made.shape)))
        return replace(given, products=frozenset({len(self._products) - 1}), chances=frozenset())

    def _norm(self, name: str, args: Any, kwargs: Any, given: Trail) -> None:
        over = (
            args[1]
            if len(args) > 1
            else kwargs.get("normalized_shape", kwargs.get("num_groups", 1))
        )
        width = (
            args[0].shape[1] // over
            if name == "group_norm" and args
            else over[-1]
            if name != "group_norm"
            else 0
        )
        self.norms.append(Norm(f"F.{name}", width, given))


def _summed(
    name: str, args: Any, factors: list[Tensor], probabilities: int | None = None
) -> int | None:
    """Length that a product sums over; or, if one factor holds probabilities, the width of the
    other's features."""
    if name != "einsum":
        other = factors[1 - probabilities] if probabilities is not None else factors[0]
        return int(other.shape[-2 if probabilities == 1 else -1])
    inputs, _, output = args[0].replace(" ", "").partition("->")
    names = [_lengths(t, f) for t, f in zip(inputs.split(","), factors, strict=False)]
    if probabilities is None:
        found = [n for letter, n in names[0].items() if letter in names[1] and letter not in output]
    else:
        mine, other_names = names[probabilities], names[1 - probabilities]
        found = [n for letter, n in other_names.items() if letter not in mine and letter in output]
    return found[0] if len(found) == 1 else None


def _lengths(term: str, factor: Tensor) -> dict[str, int]:
    """Length of each letter of one term of an einsum."""
    left, _, right = term.partition("...")
    tail = list(zip(right[::-1], reversed(factor.shape), strict=False))
    return dict([*zip(left, factor.shape, strict=False), *tail])
