"""Write ONNX files of models, and prove them in ONNX Runtime.

``torch.export`` and ``torch.compile`` work without help.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import (
    InvalidValue,
    UnsupportedModel,
    VerificationFailed,
    check_count,
    reason_of,
)
from headprune.core.files import staged
from headprune.model.running import other_forwards, outputs, undisturbed
from headprune.model.sites import unwrap
from headprune.surgery.verify import Difference, compare

#: Allowed difference, as a multiple of that between two runs: ONNX Runtime has other kernels.
_OTHER_KERNELS = 10

#: Most bytes of weights in one file; those of a larger model go to a second file, ``.data``,
#: because ONNX's own format ends at 2 GiB.
_ONE_FILE = 1 << 30

#: The first version of operators that PyTorch's exporter writes without converting.
_FIRST_OPSET = 18

_AUTO = torch.export.Dim.AUTO


def export_onnx(
    model: nn.Module,
    example: Mapping[str, Tensor],
    path: str | Path,
    *,
    cache: bool = False,
    opset: int | None = None,
) -> Difference:
    """Write a model as ONNX for any number of rows and tokens, and verify it.

    The example and a smaller one are compared, so that a size that became a constant is noticed.
    Needs the packages of the extra ``onnx``.

    Args:
        model: The model, on the CPU.
        example: Inputs by name, without labels; tensors have the examples first, tokens second.
        path: The file.
        cache: Write a decoder's step: besides the tokens it takes keys and values of those before
            (``past_key_values.0.key``, ...; a layer without heads has one key of width 1) and
            returns them with the new ones (``present.0.key``, ...). The attention mask covers both.
        opset: The version of ONNX's operators, at least 18; by default PyTorch's. From 23 on,
            attention is one operator, which other and older engines may not know. Models with
            rotary embeddings need 24.

    Returns:
        The largest difference.

    Raises:
        VerificationFailed: the exported model differs, or ONNX Runtime does not load it; no file
            is written.
        InvalidValue: an ``example`` or ``opset`` that cannot be exported.
        NotWritten: no disk space, or no permission to write there.
        UnsupportedModel: ``cache`` for a model that does not cache one key and value per layer.

    Example::

        export_onnx(model, {"input_ids": ids, "attention_mask": mask}, "small.onnx")
    """
    import onnxruntime

    model = unwrap(model)
    path = Path(path)
    _check_example(example)
    if opset is not None:
        check_count("opset", opset, _FIRST_OPSET)
    with undisturbed(model, packed=True), torch.no_grad():
        # 1. Inputs, and the names of inputs and outputs.
        rows = {}
        for name, t in example.items():
            # The exporter takes a size of 1 for a constant.
            rows[name] = torch.cat([t, t]) if len(t) == 1 else t
        step = GraphStep(model, cache)
        inputs, past = step.split(rows, 2) if cache else (rows, [])
        output_names = [*_output_names(step.run(inputs, past)), *_names("present", past)]

        # 2. The file, with a free number of rows and tokens. past: [rows, heads, tokens, width].
        any_size = (
            {name: free_axes(t) for name, t in inputs.items()},
            [{0: _AUTO, 2: _AUTO} for _ in past],
        )
        n_bytes = sum(t.nbytes for t in model.state_dict().values())
        with staged(path.parent) as place:
            with warnings.catch_warnings(), other_forwards(_without_inputs(model)):
                # PyTorch's exporter uses deprecated functions of PyTorch.
                warnings.simplefilter("ignore", FutureWarning)
                torch.onnx.export(
                    step,
                    (inputs, past),
                    place / path.name,
                    input_names=[*inputs, *_names("past_key_values", past)],
                    output_names=output_names,
                    dynamic_shapes=any_size,
                    external_data=n_bytes > _ONE_FILE,
                    opset_version=opset,
                    dynamo=True,
                    verbose=False,
                )

            # 3. The comparison, at two sizes.
            session = _session(onnxruntime, place / path.name)
            differences = [
                _difference(session, step, inputs, past),
                _difference(session, step, *_smaller(step, rows)),
            ]
    return max(differences, key=lambda d: d.maximum / d.tolerance)


def _check_example(example: Any) -> None:
    # A model's inputs get names in the graph, and axes of any length.
    must = "a mapping of input names to tensors with the examples first"
    if not isinstance(example, Mapping):
        raise InvalidValue("example", must, type(example).__name__)
    for name, tensor in example.items():
        if not isinstance(tensor, Tensor):
            raise InvalidValue(f"example[{name!r}]", must, type(tensor).__name__)
        if not tensor.ndim:
            raise InvalidValue(f"example[{name!r}]", must, "a tensor without axes")


def _without_inputs(model: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Projections of layers without heads, each with a forward that only adds the bias.

    The product with an empty weight would be a constant without elements in the file, which
    OpenVINO reads as a number.
    """

    def make(forward: Any) -> Callable[[Tensor], Tensor]:
        projection = forward.__self__

        def bias_alone(x: Tensor) -> Tensor:
            output = x.new_zeros(*x.shape[:-1], projection.out_features)
            return output if projection.bias is None else output + projection.bias

        return bias_alone

    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [(linear, make) for linear in linears if not linear.in_features]


class GraphStep(nn.Module):
    """The model as a function from tensors to tensors, as an exported graph is.

    Args:
        model: The model.
        cache: Whether it takes and returns a cache.
    """

    def __init__(self, model: nn.Module, cache: bool) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self.training = False  # the model's own mode does not change
        config = getattr(model, "config", None)
        takes_it = "use_cache" in inspect.signature(model.forward).parameters
        has_it = takes_it or getattr(config, "use_cache", None) is not None
        self.forward_options = {"use_cache": cache} if has_it else {}

    def run(self, inputs: dict[str, Tensor], past: list[Tensor]) -> Any:
        """The model's own result; ``past`` is key, value, key, value, ..., as of ``_pairs``."""
        options: dict[str, Any] = dict(self.forward_options)
        if self.cache:
            from transformers import DynamicCache

            pairs = list(zip(past[0::2], past[1::2], strict=True))
            options["past_key_values"] = DynamicCache(pairs)
        return self.model(**inputs, **options)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """All outputs, then the cache."""
        result = self.run(inputs, past)
        tensors = list(outputs(result))
        if self.cache:
            tensors += _pairs(result.past_key_values)
        return tuple(tensors)

    def split(
        self, inputs: dict[str, Tensor], n_new: int
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The inputs of the last ``n_new`` tokens, and the cache of those before."""
        tokens = inputs.get("input_ids")
        if tokens is None or tokens.ndim != 2 or tokens.shape[1] < n_new + 2:
            must = f"input_ids with at least {n_new + 2} tokens, for cache=True"
            raise InvalidValue("example", must, list(inputs))
        earlier = dict(inputs)
        later = dict(inputs)
        for name, tensor in inputs.items():
            if tensor.shape[:2] == tokens.shape:
                earlier[name] = tensor[:, :-n_new]
                if name != "attention_mask":  # it covers the cached tokens too
                    later[name] = tensor[:, -n_new:]
        result = self.model(**earlier, **self.forward_options)
        return later, _pairs(getattr(result, "past_key_values", None))


def _pairs(cache: Any) -> list[Tensor]:
    """Keys and values of every layer in turn, each ``[rows, heads, tokens, width]``.

    Raises:
        UnsupportedModel: a cache of another kind.
    """
    pairs: list[Any] = []
    for layer in getattr(cache, "layers", ()):
        pairs += [getattr(layer, "keys", None), getattr(layer, "values", None)]
    if not pairs or not all(isinstance(t, Tensor) for t in pairs):
        must = "for a model that caches a key and a value per layer"
        raise UnsupportedModel("cache=True", must, type(cache).__name__)
    return pairs


def _names(prefix: str, past: list[Tensor]) -> list[str]:
    """Names of the tensors of a cache."""
    names = []
    for layer in range(len(past) // 2):
        names += [f"{prefix}.{layer}.key", f"{prefix}.{layer}.value"]
    return names


def free_axes(tensor: Tensor) -> dict[int, Any]:
    """The axes of any length: rows and, of ``[rows, tokens]``, tokens."""
    has_tokens = tensor.ndim == 2 and not tensor.is_floating_point()
    return {0: _AUTO, 1: _AUTO} if has_tokens else {0: _AUTO}


def _output_names(result: Any) -> list[str]:
    """The model's own names of its outputs where it has them, else numbers."""
    # A nested output has more tensors than names.
    n_outputs = len(outputs(result))
    if isinstance(result, Mapping):
        names = [name for name, value in result.items() if isinstance(value, Tensor)]
        if len(names) == n_outputs:
            return names
    return [f"output_{i}" for i in range(n_outputs)]


def _smaller(step: GraphStep, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Inputs with one row and one token less; one new token for a decoder."""
    # The example has at least two rows.
    smaller = {name: t[:-1] for name, t in inputs.items()}
    if step.cache:
        return step.split(smaller, 1)
    for name, t in smaller.items():
        if 1 in free_axes(t):
            smaller[name] = t[:, :-1]
    return smaller, []


def _session(runtime: Any, path: Path) -> Any:
    """Load an ONNX file into ONNX Runtime on the CPU.

    Raises:
        VerificationFailed: ONNX Runtime does not load it, as of operators that are too new.
    """
    try:
        return runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has a class of its own for each kind
        must = f"one that ONNX Runtime {runtime.__version__} loads"
        raise VerificationFailed("the ONNX file", must, reason_of(error)) from error


def _difference(
    session: Any, step: GraphStep, inputs: dict[str, Tensor], past: list[Tensor]
) -> Difference:
    """Compare the model and its ONNX file on the same inputs.

    Raises:
        VerificationFailed: they differ by more than rounding, or the file does not take inputs of
            this size.
    """
    where, must = "the ONNX file", "the model"
    shapes = {name: list(t.shape) for name, t in inputs.items()}
    tensors = {**inputs, **dict(zip(_names("past_key_values", past), past, strict=True))}
    # An input that changes nothing is not in the graph.
    given = {i.name: tensors[i.name].numpy() for i in session.get_inputs()}
    try:
        arrays = session.run(None, given)
    except Exception as error:  # ONNX Runtime has a class of its own for each kind
        got = reason_of(error)
        raise VerificationFailed(where, f"{must} for {shapes}", got) from error
    difference = compare(list(step(inputs, past)), list(map(torch.from_numpy, arrays)))
    allowed = _OTHER_KERNELS * difference.tolerance
    if not difference.maximum <= allowed:
        got = f"{difference.maximum:.3e} off for {shapes}"
        raise VerificationFailed(where, f"{must} up to {allowed:.1e}", got)
    return difference
