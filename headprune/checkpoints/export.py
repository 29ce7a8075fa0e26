"""ONNX files of (cut) models, proven in ONNX Runtime; ``torch.export`` and ``torch.compile`` need
no help of ours."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnsupportedModel, VerificationFailed
from headprune.core.files import staged
from headprune.model.running import outputs, undisturbed
from headprune.model.sites import unwrap
from headprune.surgery.verify import Difference, compare

#: ONNX Runtime has other kernels than PyTorch: rounding may be some times that of one model run
#: twice.
_OTHER_KERNELS = 10

#: Bytes; the weights of a larger model lie in a second file, ``.data``, for ONNX's own format ends
#: at 2 GiB.
_ONE_FILE = 1 << 30


def export_onnx(
    model: nn.Module, example: Mapping[str, Tensor], path: str | Path, *, cache: bool = False
) -> Difference:
    """Writes a model as ONNX for any number of rows and tokens, and compares it with the model in
    ONNX Runtime.

    Compared are the example and a smaller one, so that a size that was taken for a constant is
    found. Needs the packages of the extra ``onnx``.

    Args:
        model: The model, on the CPU.
        example: Inputs by name, without labels; tensors have the examples first, tokens second.
        path: The file.
        cache: Write a decoder's step: besides the tokens it takes keys and values of those before
            (``past_key_values.0.key``, ...; a layer without heads has one key of width 1) and
            returns them with the new ones (``present.0.key``, ...). The attention mask covers both.

    Returns:
        The largest difference.

    Raises:
        VerificationFailed: the exported model differs; no file is written.
        NotWritten: there is no room, or no right to write there.
        UnsupportedModel: ``cache`` for a model whose cache is not a key and a value a layer.

    Example::

        export_onnx(model, {"input_ids": ids, "attention_mask": mask}, "small.onnx")
    """
    import onnxruntime

    model, path = unwrap(model), Path(path)
    if not isinstance(example, Mapping) or not all(
        isinstance(t, Tensor) and t.ndim for t in example.values()
    ):
        must = "a mapping of input names to tensors with the examples first"
        raise InvalidValue("example", must, type(example).__name__)
    with undisturbed(model, packed=True), torch.no_grad():
        whole = {
            name: torch.cat([t, t]) if len(t) == 1 else t for name, t in example.items()
        }  # 1 would be a constant
        step = _Step(model, cache)
        inputs, past = step.split(whole, 2) if cache else (whole, [])
        names = [*inputs, *_names("past_key_values", past)]
        called = [*_output_names(step.run(inputs, past)), *_names("present", past)]
        free = {n: _free(t) for n, t in inputs.items()}, [{0: _AUTO, 2: _AUTO} for _ in past]
        options: dict[str, Any] = {
            "input_names": names,
            "output_names": called,
            "dynamic_shapes": free,
        }
        options["external_data"] = sum(t.nbytes for t in model.state_dict().values()) > _ONE_FILE
        with staged(path.parent) as place:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # PyTorch's exporter uses what PyTorch gives up
                torch.onnx.export(
                    step, (inputs, past), place / path.name, dynamo=True, verbose=False, **options
                )
            session = onnxruntime.InferenceSession(
                place / path.name, providers=["CPUExecutionProvider"]
            )
            found = [
                _difference(session, step, *sizes)
                for sizes in ((inputs, past), _smaller(step, whole))
            ]
    return max(found, key=lambda d: d.maximum / d.tolerance)


_AUTO = torch.export.Dim.AUTO


class _Step(nn.Module):
    """The model from tensors to tensors, which is what an ONNX graph is."""

    def __init__(self, model: nn.Module, cache: bool) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        self.training = False
        takes = inspect.signature(model.forward).parameters
        known = (
            "use_cache" in takes
            or getattr(getattr(model, "config", None), "use_cache", None) is not None
        )
        self.fixed = {"use_cache": cache} if known else {}

    def run(self, inputs: dict[str, Tensor], past: list[Tensor]) -> Any:
        more: dict[str, Any] = dict(self.fixed)
        if self.cache:
            from transformers import DynamicCache

            more["past_key_values"] = DynamicCache(list(zip(past[0::2], past[1::2], strict=True)))
        return self.model(**inputs, **more)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        result = self.run(inputs, past)
        return (*outputs(result), *(_pairs(result.past_key_values) if self.cache else ()))

    def split(
        self, inputs: dict[str, Tensor], n_new: int
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The last tokens, and the cache of those before."""
        tokens = inputs.get("input_ids")
        if tokens is None or tokens.ndim != 2 or tokens.shape[1] < n_new + 2:
            raise InvalidValue(
                "example",
                f"input_ids with at least {n_new + 2} tokens, for cache=True",
                list(inputs),
            )
        like = {n for n, t in inputs.items() if t.shape[:2] == tokens.shape}
        early = {n: t[:, :-n_new] if n in like else t for n, t in inputs.items()}
        late = {
            n: t[:, -n_new:] if n in like and n != "attention_mask" else t
            for n, t in inputs.items()
        }
        return late, _pairs(getattr(self.model(**early, **self.fixed), "past_key_values", None))


def _pairs(cache: Any) -> list[Tensor]:
    """Keys and values of every layer in turn."""
    layers: Any = getattr(cache, "layers", ())
    pairs: list[Any] = [
        getattr(layer, name, None) for layer in layers for name in ("keys", "values")
    ]
    if not pairs or not all(isinstance(t, Tensor) for t in pairs):
        raise UnsupportedModel(
            "cache=True", "for a model that caches a key and a value a layer", type(cache).__name__
        )
    return pairs


def _names(prefix: str, past: list[Tensor]) -> list[str]:
    return [f"{prefix}.{i // 2}.{'value' if i % 2 else 'key'}" for i in range(len(past))]


def _free(tensor: Tensor) -> dict[int, Any]:
    """Rows may be any number; tokens too."""
    return (
        {0: _AUTO, 1: _AUTO} if tensor.ndim == 2 and not tensor.is_floating_point() else {0: _AUTO}
    )


def _output_names(result: Any) -> list[str]:
    """The model's own names of its outputs where it has them."""
    own = (
        [k for k, v in result.items() if isinstance(v, Tensor)]
        if isinstance(result, Mapping)
        else []
    )
    n = len(outputs(result))
    return own if len(own) == n else [f"output_{i}" for i in range(n)]


def _smaller(step: _Step, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Inputs of other sizes: fewer rows, and fewer tokens where they are tokens; one new token of a
    decoder."""
    fewer = {name: t[:-1] for name, t in inputs.items()}
    if step.cache:
        return step.split(fewer, 1)
    return {name: t[:, :-1] if 1 in _free(t) else t for name, t in fewer.items()}, []


def _difference(
    session: Any, step: _Step, inputs: dict[str, Tensor], past: list[Tensor]
) -> Difference:
    """The model and its ONNX file on the same inputs.

    Raises:
        VerificationFailed: they differ by more than rounding, or the file does not take inputs of
            this size.
    """
    where, must = "the ONNX file", "the model"
    names = [
        i.name for i in session.get_inputs()
    ]  # an input that changes nothing is not in the graph
    given = dict(
        zip([*inputs, *_names("past_key_values", past)], [*inputs.values(), *past], strict=True)
    )
    shapes = {n: list(t.shape) for n, t in inputs.items()}
    try:
        got = [torch.from_numpy(a) for a in session.run(None, {n: given[n].numpy() for n in names})]
    except Exception as error:  # ONNX Runtime has a class of its own for each kind
        raise VerificationFailed(
            where, f"{must} for {shapes}", " ".join(str(error).split())[:300]
        ) from error
    found = compare(list(step(inputs, past)), got)
    allowed = _OTHER_KERNELS * found.tolerance
    if not found.maximum <= allowed:
        raise VerificationFailed(
            where, f"{must} up to {allowed:.1e}", f"{found.maximum:.3e} off for {shapes}"
        )
    return found
