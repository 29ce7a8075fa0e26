"""Record which projections every tensor of one forward pass was computed from.

Each tensor has a *provenance*. A projection's output starts a new one; any other operation combines
those of its inputs. So softmax attention is recognised by what it computes, not by names: a matrix
product reaches a softmax (*scores*), and its probabilities reach a second product, with the values.
The result of that product is the heads' outputs, here called the *context*.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from headprune.detect.causality import is_causal, kernel_pairs, shown_pairs
from headprune.model.running import tensors

_KERNELS = {"scaled_dot_product_attention", "flex_attention"}
#: Native functions that compute the projections too.
_FUSED = {
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
}
_SOFTMAXES = {"softmax", "_softmax"}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "einsum"}
#: These take only the type or the shape of the arguments after the first.
_FIRST_ARGUMENT_ONLY = {"type_as", "expand_as", "view_as", "reshape_as", "to"}
_NORMS = {"layer_norm", "rms_norm", "group_norm"}


@dataclass(frozen=True)
class Provenance:
    """Projections, matrix products and softmax calls that a tensor was computed from.

    Args:
        sources: Projections, with no other projection between.
        products: Numbers of the matrix products that it is an element-wise function of.
        probabilities: Numbers of the softmax calls whose probabilities it holds.
        context: Numbers of the softmax calls whose heads' outputs it holds.
        fixed: Whether it was computed from parameters alone.
    """

    sources: frozenset[str] = frozenset()
    products: frozenset[int] = frozenset()
    probabilities: frozenset[int] = frozenset()
    context: frozenset[int] = frozenset()
    fixed: bool = False

    def joined(self, other: Provenance) -> Provenance:
        """The provenance of a tensor that was computed from this one and another."""
        return Provenance(
            self.sources | other.sources,
            self.products | other.products,
            self.probabilities | other.probabilities,
            self.context | other.context,
            self.fixed and other.fixed,
        )


def combined(provenances: Iterable[Provenance]) -> Provenance:
    """The provenance of a tensor that was computed from several; an empty one for none."""
    total: Provenance | None = None
    for provenance in provenances:
        total = provenance if total is None else total.joined(provenance)
    return total or Provenance()


@dataclass
class MatrixProduct:
    """A matrix product of two activations, or of an activation and parameters.

    Args:
        factors: Provenance of its two factors.
        summed: Length of the axis that it sums over; None where it is not known.
        shape: Of its result.
        mixers: Projections and bare tensors that its heads' results pass together.
    """

    factors: tuple[Provenance, Provenance]
    summed: int | None
    shape: tuple[int, ...]
    mixers: set[str] = field(default_factory=set)


@dataclass
class SoftmaxCall:
    """A softmax of matrix products, or a kernel that computes one.

    Args:
        shape: Of the scores; of the queries, for a kernel.
        query_key_sources: Projections of the queries and keys.
        fused_sources: Those of them that both factors of a product were computed from.
        head_dim: Length of the axis that scores are sums over; None where it is not known or not
            the same in all products.
        last: Whether it normalises over the last axis.
        constant_factor: Whether every product has a factor that is no activation.
        kernel: Whether a kernel computes it.
        fused: Whether one native function computes everything, projections included.
        value_sources: Projections of the values.
        value_dim: Width of a value; None where it is not known.
        mixers: Projections and bare tensors that the scores or the probabilities of several heads
            pass together.
        used: Whether its probabilities were multiplied with values.
        causal: Whether no token saw a later one.
    """

    shape: tuple[int, ...]
    query_key_sources: frozenset[str] = frozenset()
    fused_sources: frozenset[str] = frozenset()
    head_dim: int | None = None
    last: bool = True
    constant_factor: bool = False
    kernel: bool = False
    fused: bool = False
    value_sources: frozenset[str] = frozenset()
    value_dim: int | None = None
    mixers: set[str] = field(default_factory=set)
    used: bool = False
    causal: bool = False


@dataclass(frozen=True)
class NormCall:
    """A norm's call: its name, the features that it spans, its input's provenance."""

    name: str
    width: int
    inputs: Provenance


@dataclass(frozen=True)
class Event:
    """One entry of the record of a forward pass.

    Args:
        what: "enter" and "leave" are the begin and the end of a module's call.
        name: Qualified name of the module; empty for a softmax.
        shape: Of the first tensor that the module takes ("enter") or returns ("leave").
        provenance: Of all tensors that the module takes or returns.
        number: Of the softmax call; -1 for modules.
    """

    what: Literal["enter", "leave", "softmax"]
    name: str
    shape: tuple[int, ...] = ()
    provenance: Provenance = Provenance()
    number: int = -1


class ProvenanceMode(TorchFunctionMode):
    """Tracks the provenance of all tensors while it is active, and records events in order.

    Args:
        example: The batch that runs; its mask says what is padding.
    """

    def __init__(self, example: Any) -> None:
        self._example = example
        self.events: list[Event] = []
        self.softmaxes: list[SoftmaxCall] = []
        self.possible_norms: list[NormCall] = []
        self._products: list[MatrixProduct] = []
        # Weak, so that activations are freed as without it.
        self._known: Any = WeakTensorKeyDictionary()

    def provenance(self, value: Any) -> Provenance:
        """The combined provenance of all tensors in a value."""
        each = []
        for tensor in tensors(value):
            # The example's tensors, parameters and constants are not known.
            known = self._known.get(tensor)
            each.append(known or Provenance(fixed=isinstance(tensor, nn.Parameter)))
        return combined(each)

    def enter(self, name: str, module: nn.Module, inputs: Any, is_projection: bool) -> None:
        """Record that a module is called."""
        provenance = self.provenance(inputs)
        self.events.append(Event("enter", name, _first_shape(inputs), provenance))
        if not is_projection:
            # A parameter with one axis may be a norm's weight, whatever the module's class.
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 1:
                    self.possible_norms.append(NormCall(name, parameter.shape[0], provenance))

    def leave(self, name: str, inputs: Any, output: Any, is_projection: bool) -> None:
        """Record that a module returned; a projection's output starts a new provenance."""
        shape = _first_shape(output)
        if is_projection:
            # A projection that mixes the heads' scores passes their provenance on.
            provenance = self._of_mixed(self.provenance(inputs), name, shape)
            provenance = provenance or Provenance(frozenset({name}))
            for tensor in tensors(output):
                self._known[tensor] = provenance
        self.events.append(Event("leave", name, shape, self.provenance(output)))

    def _of_mixed(self, inputs: Provenance, by: str, shape: tuple[int, ...]) -> Provenance | None:
        """The provenance of mixed scores or probabilities; None if ``by`` does not mix them.

        Mixed ones have the shape of those before, up to the order of the axes.
        """
        mixed: list[MatrixProduct | SoftmaxCall] = [self._products[i] for i in inputs.products]
        mixed += [self.softmaxes[i] for i in inputs.probabilities]
        # Scores have at least the axes [heads, queries, keys].
        if not mixed or len(shape) < 3:
            return None
        for one in mixed:
            if sorted(one.shape) != sorted(shape):
                return None
        for one in mixed:
            one.mixers.add(by)
        # The mixer's own weight is no source of the scores.
        return replace(inputs, sources=frozenset(), fixed=False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before the call, which may change a tensor in place.
        inputs = self.provenance((args, kwargs))
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        provenance = self._of_result(name, args, kwargs, output, inputs)
        # An output may be an input that was changed in place: it gets the new provenance.
        for tensor in tensors(output):
            self._known[tensor] = provenance
        return output

    def _of_result(
        self, name: str, args: Any, kwargs: Any, output: Any, inputs: Provenance
    ) -> Provenance:
        """The provenance of a function's output; records a softmax, a product or a norm."""
        # 1. The steps of attention.
        if name in _FUSED:
            shape = _first_shape((args, kwargs))
            return self._add_softmax(SoftmaxCall(shape, fused=True, kernel=True, used=True), inputs)
        if name in _KERNELS:
            return self._of_kernel(name, args, kwargs, inputs)
        if name in _SOFTMAXES and inputs.products:
            # softmax(input, dim): the function and the method alike.
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            return self._of_softmax(next(tensors((args, kwargs))), dim, inputs)
        if name in _PRODUCTS and isinstance(output, Tensor):
            return self._of_product(name, args, kwargs, output, inputs)

        # 2. Functions that take only types and shapes of some arguments.
        if name.startswith("new_") or name.endswith("_like"):
            return Provenance()
        if name in _FIRST_ARGUMENT_ONLY:
            return self.provenance(args[:1])

        # 3. All others combine their inputs.
        if name in _NORMS:
            self._add_norm(name, args, kwargs, inputs)
        else:
            self._add_writes(name, args, output, inputs)
        return inputs

    def _add_writes(self, name: str, args: Any, output: Any, inputs: Provenance) -> None:
        """Record what a function writes in place into another tensor than its output."""
        if name == "__setitem__":
            self._known[args[0]] = inputs
        elif name.endswith("_") and isinstance(output, Tensor) and output._base is not None:
            # The output is a view: the tensor that owns its memory changes too.
            self._known[output._base] = combined([inputs, self.provenance(output._base)])

    def _add_softmax(self, softmax: SoftmaxCall, inputs: Provenance) -> Provenance:
        """Record it; the provenance of its probabilities or, of a kernel, of the context."""
        number = len(self.softmaxes)
        self.events.append(Event("softmax", "", softmax.shape, inputs, number))
        self.softmaxes.append(softmax)
        # Neither is an element-wise function of a product.
        if softmax.kernel:
            return Provenance(inputs.sources, context=inputs.context | {number})
        return Provenance(inputs.sources, probabilities=frozenset({number}), context=inputs.context)

    def _of_kernel(self, name: str, args: Any, kwargs: Any, inputs: Provenance) -> Provenance:
        # Given by position or by name.
        by_name = [kwargs[k] for k in ("query", "key", "value") if k in kwargs]
        query, key, value, *_ = tensors((args, by_name))
        query_sources = self.provenance(query).sources
        key_sources = self.provenance(key).sources
        softmax = SoftmaxCall(
            tuple(query.shape),
            query_key_sources=query_sources | key_sources,
            fused_sources=query_sources & key_sources,
            head_dim=query.shape[-1],
            kernel=True,
            value_sources=self.provenance(value).sources,
            value_dim=value.shape[-1],
            used=True,
        )
        # A block mask of flex_attention does not show which pairs it hides.
        if name == "scaled_dot_product_attention":
            pairs = kernel_pairs(query, key, args, kwargs)
            softmax.causal = pairs is not None and is_causal(pairs, self._example)
        return self._add_softmax(softmax, inputs)

    def _of_softmax(self, scores: Tensor, dim: int, inputs: Provenance) -> Provenance:
        """The provenance of probabilities, for scores that are products."""
        query_key_sources: set[str] = set()
        fused_sources: set[str] = set()
        mixers: set[str] = set()
        lengths: set[int | None] = set()
        constant_factor = True
        # Scores may be a sum of products, for example with relative positions.
        for number in inputs.products:
            product = self._products[number]
            first, second = product.factors
            query_key_sources |= first.sources | second.sources
            fused_sources |= first.sources & second.sources
            mixers |= product.mixers
            lengths.add(product.summed)
            constant_factor = constant_factor and (first.fixed or second.fixed)
        softmax = SoftmaxCall(
            tuple(scores.shape),
            query_key_sources=frozenset(query_key_sources),
            fused_sources=frozenset(fused_sources),
            head_dim=lengths.pop() if len(lengths) == 1 else None,
            last=dim % scores.ndim == scores.ndim - 1,
            constant_factor=constant_factor,
            mixers=mixers,
        )
        softmax.causal = softmax.last and is_causal(shown_pairs(scores), self._example)
        return self._add_softmax(softmax, inputs)

    def _of_product(
        self, name: str, args: Any, kwargs: Any, output: Tensor, inputs: Provenance
    ) -> Provenance:
        """The provenance of a matrix product: mixed scores, context, or new scores."""
        factors = list(tensors((args, kwargs)))
        if name == "baddbmm":  # its first tensor is added
            factors = factors[1:]
        factors = factors[:2]
        if len(factors) < 2:
            return inputs
        if name == "__rmatmul__":  # called as (right factor, left factor)
            factors.reverse()
        pair = (self.provenance(factors[0]), self.provenance(factors[1]))

        # 1. A product with parameters may mix the heads' scores or probabilities.
        if pair[0].fixed or pair[1].fixed:
            activations = combined(p for p in pair if not p.fixed)
            mixed = self._of_mixed(activations, "a bare tensor", tuple(output.shape))
            if mixed is not None:
                return mixed

        # 2. A product of probabilities and values makes the context.
        for at in (0, 1):
            probabilities, values = pair[at], pair[1 - at]
            if probabilities.probabilities and not values.probabilities:
                self._add_values(probabilities, values, _value_width(name, args, factors, at))
                context = inputs.context | probabilities.probabilities
                return Provenance(inputs.sources, context=context)

        # 3. Any other product may be scores of queries and keys.
        summed = _summed_length(name, args, factors)
        self._products.append(MatrixProduct(pair, summed, tuple(output.shape)))
        number = len(self._products) - 1
        return replace(inputs, products=frozenset({number}), probabilities=frozenset())

    def _add_values(self, probabilities: Provenance, values: Provenance, width: int | None) -> None:
        """Record which values the probabilities of a softmax were multiplied with."""
        for number in probabilities.probabilities:
            softmax = self.softmaxes[number]
            softmax.used = True
            softmax.value_sources |= values.sources
            # Several products may share the probabilities: the first width counts.
            if softmax.value_dim is None:
                softmax.value_dim = width

    def _add_norm(self, name: str, args: Any, kwargs: Any, inputs: Provenance) -> None:
        width = 0  # unknown
        if name != "group_norm":
            normalized_shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
            width = normalized_shape[-1]
        elif args:
            n_groups = args[1] if len(args) > 1 else kwargs.get("num_groups", 1)
            width = args[0].shape[1] // n_groups
        self.possible_norms.append(NormCall(f"F.{name}", width, inputs))


def _first_shape(value: Any) -> tuple[int, ...]:
    """Shape of the first tensor in a value; empty where there is none."""
    first = next(tensors(value), None)
    return () if first is None else tuple(first.shape)


def _summed_length(name: str, args: Any, factors: list[Tensor]) -> int | None:
    """Length of the axis that a product sums over; None where it is not known."""
    if name != "einsum":
        return int(factors[0].shape[-1])
    (first, second), output = _einsum_axes(args[0], factors)
    # With several summed axes the width of a head is not known.
    lengths = [n for axis, n in first.items() if axis in second and axis not in output]
    return lengths[0] if len(lengths) == 1 else None


def _value_width(name: str, args: Any, factors: list[Tensor], probabilities: int) -> int | None:
    """Width of the values; ``probabilities`` is the index of the factor that holds those."""
    if name != "einsum":
        # [..., keys, width] as the second factor; [..., width, keys] as the first.
        axis = -2 if probabilities == 1 else -1
        return int(factors[1 - probabilities].shape[axis])
    axes, output = _einsum_axes(args[0], factors)
    shared = axes[probabilities]
    values = axes[1 - probabilities]
    lengths = [n for axis, n in values.items() if axis not in shared and axis in output]
    return lengths[0] if len(lengths) == 1 else None


def _einsum_axes(equation: str, factors: list[Tensor]) -> tuple[list[dict[str, int]], str]:
    """Lengths of the letters of each term of an einsum, and its output's term."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    axes = []
    for term, factor in zip(inputs.split(","), factors, strict=False):
        # "..." stands for any number of axes: letters after it count from the end.
        leading, _, trailing = term.partition("...")
        lengths = dict(zip(leading, factor.shape, strict=False))
        lengths.update(zip(trailing[::-1], reversed(factor.shape), strict=False))
        axes.append(lengths)
    return axes, output
