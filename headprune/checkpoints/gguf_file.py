"""GGUF files, which llama.cpp and what is built on it serve.

``ARCHITECTURES`` says what each architecture of llama.cpp can express. A cut takes the first that
can hold it: the family's own, else one with head counts per layer. The rotary order of ``llama``
and ``deci`` has the two halves of a rotation side by side, so rows of queries and keys change
places. A layer without heads gets one head of zeros where the architecture needs a head.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from headprune.checkpoints import gguf_tokenizer
from headprune.core.errors import InvalidValue, UnsupportedModel, check_one_of
from headprune.core.files import write_errors
from headprune.model.building import is_known
from headprune.model.offloaded import state_of
from headprune.model.sites import BoundSite

FILE = "model.gguf"
#: Of an earlier save in the same folder, whose weights this file takes the place of.
STALE = ("config.json", "generation_config.json")
_LARGEST_F16 = 65504.0
#: How matrices are stored; norms and biases are always 32-bit floats.
Dtype = Literal["f32", "f16", "bf16", "q8_0"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
_DTYPE_OF: dict[torch.dtype, Dtype] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}
_WHERE = "format 'gguf'"
#: Rope types whose angles a table of factors can express.
_ROPE_TYPES = ("default", "linear", "llama3")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class _Architecture:
    """What an architecture of llama.cpp can express.

    Args:
        name: Its name in the file.
        uneven: Whether layers may have other numbers of heads and neurons.
        biases: Projections that may have a bias.
        norms: Whether each query and key head passes a norm.
        neighbours: Whether the two halves of a rotation are side by side.
        factors: Whether it reads factors of the rotary frequencies.
        full_width: Whether the heads together must be as wide as the model.
        tied: Whether the output must be the embedding.
        fused: Whether queries, keys and values are one matrix.
    """

    name: str
    uneven: bool = False
    biases: tuple[str, ...] = ()
    norms: bool = False
    neighbours: bool = False
    factors: bool = False
    full_width: bool = False
    tied: bool = False
    fused: bool = False


_LLAMA = _Architecture("llama", biases=(*_ATTENTION, *_FEED_FORWARD), neighbours=True, factors=True)
_DECI = replace(_LLAMA, name="deci", uneven=True)
_QWEN2 = _Architecture("qwen2", biases=_ATTENTION[:3], full_width=True)
_QWEN3 = _Architecture("qwen3", norms=True)
_OPENELM = _Architecture("openelm", uneven=True, norms=True, tied=True, fused=True)

#: By class: the family's own architecture, then one with head counts per layer.
ARCHITECTURES = {
    "LlamaForCausalLM": (_LLAMA, _DECI),
    "MistralForCausalLM": (_LLAMA, _DECI),
    "Qwen2ForCausalLM": (_QWEN2, _DECI),
    "Qwen3ForCausalLM": (_QWEN3, _OPENELM),
}


@dataclass(frozen=True)
class _Layer:
    """What one layer has: query heads, key/value heads, neurons, and projections with a bias."""

    n_heads: int
    n_kv_heads: int
    n_neurons: int
    biases: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """A cut as a GGUF file states it; ``factors`` divide the rotary frequencies, if any do."""

    architecture: _Architecture
    layers: tuple[_Layer, ...]
    head_dim: int
    tied: bool
    factors: Tensor | None


def check_installed() -> None:
    """Refuse to go on without the package ``gguf``.

    Raises:
        InvalidValue: it is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        hint = "Install it: pip install gguf."
        raise InvalidValue(_WHERE, "used with the package gguf", "none installed", hint)


def check_dtype(dtype: str | None, format: str, where: str = "dtype") -> None:
    """Check a dtype of the weights in a file; None is the model's own.

    Raises:
        InvalidValue: an unknown dtype, or one with another format than gguf.
    """
    if dtype is None:
        return
    if format != "gguf":
        raise InvalidValue(where, "given with format 'gguf' only", f"{dtype!r} with {format!r}")
    check_one_of(where, dtype, DTYPES)


def description_of_cut(model: Any, bound: list[BoundSite]) -> Description:
    """Find the architecture that can hold a cut.

    Raises:
        UnsupportedModel: there is none; the message says why.
    """
    name = type(model).__name__
    if not is_known(model):
        raise UnsupportedModel(_WHERE, "for a class of Transformers", name)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(_WHERE, f"for one of {', '.join(ARCHITECTURES)}", name)
    _check_code(model, bound)
    facts = Description(
        architecture=_LLAMA,
        layers=tuple(map(_layer, model.model.layers)),
        head_dim=model.model.layers[0].self_attn.head_dim,
        tied=model.lm_head.weight is model.model.embed_tokens.weight,
        factors=_rotary_factors(model),
    )
    reason = None
    for architecture in ARCHITECTURES[name]:
        facts = replace(facts, architecture=architecture)
        reason = _reason_against(facts, model.config.hidden_size)
        if reason is None:
            return facts
    assert reason is not None
    raise reason


def _check_code(model: Any, bound: list[BoundSite]) -> None:
    """Refuse settings and tensors that llama.cpp's code of these families does not know."""
    config = model.config
    if config.hidden_act != "silu":
        must = "for feed-forwards with the activation 'silu'"
        raise UnsupportedModel(_WHERE, must, repr(config.hidden_act))
    for b in bound:
        if b.site.geometry.kv_of is not None:
            must = "for query heads that share key/value heads evenly"
            hint = "Cut under the policy group or balanced."
            got = f"{b.site.name} with key/value heads {b.site.geometry.kv_of}"
            raise UnsupportedModel(_WHERE, must, got, hint)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            must = "for a model with floating-point weights"
            raise UnsupportedModel(_WHERE, must, f"{name} of {parameter.dtype}")
        # Adapters and modules of others have names of their own.
        if _known_name(name) is None:
            raise UnsupportedModel(_WHERE, "for tensors that the class has", name)


def _layer(layer: Any) -> _Layer:
    attention, feed_forward = layer.self_attn, layer.mlp
    parts = {name: getattr(attention, name) for name in _ATTENTION}
    parts |= {name: getattr(feed_forward, name) for name in _FEED_FORWARD}
    return _Layer(
        n_heads=len(parts["q_proj"].weight) // attention.head_dim,
        n_kv_heads=len(parts["k_proj"].weight) // attention.head_dim,
        n_neurons=len(parts["gate_proj"].weight),
        biases=tuple(name for name, part in parts.items() if part.bias is not None),
    )


def _rotary_factors(model: Any) -> Tensor | None:
    """Return the divisors of the default rotary frequencies; None if those are used unchanged.

    Raises:
        UnsupportedModel: a table of factors cannot express the angles.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model.config
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        must = f"for rotary positions of type {', '.join(_ROPE_TYPES)} on all of a head"
        raise UnsupportedModel(_WHERE, must, rope)
    if kind == "default":
        return None
    width = model.model.layers[0].self_attn.head_dim
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    factors: Tensor = (1.0 / rope["rope_theta"] ** powers) / frequencies
    return factors


def _unknown_bias(facts: Description) -> str | None:
    """The first bias that an architecture has no tensor for."""
    for number, layer in enumerate(facts.layers):
        unknown = sorted(set(layer.biases) - set(facts.architecture.biases))
        if unknown:
            return f"{unknown[0]}.bias in layer {number}"
    return None


def _reason_against(facts: Description, width: int) -> UnsupportedModel | None:
    """Why an architecture cannot hold a cut; None where it can."""
    architecture, layers = facts.architecture, facts.layers

    def refused(must: str, got: str, hint: str = "") -> UnsupportedModel:
        where = f"{_WHERE}, architecture {architecture.name!r}"
        return UnsupportedModel(where, must, got, hint)

    # llama.cpp reads counts as one number or as a list per layer, by architecture.
    counts = {(layer.n_heads, layer.n_kv_heads, layer.n_neurons) for layer in layers}
    smallest = min(min(count) for count in counts)
    if not architecture.uneven and (len(counts) > 1 or smallest == 0):
        return refused("for layers of one size", f"heads and neurons {sorted(counts)}")
    unknown = _unknown_bias(facts)
    if unknown is not None:
        hint = "A recovery without biases needs none: head_rescale with intercept='drop'."
        return refused("for a model without this bias", unknown, hint)
    # Some architectures take the width of a head from the model's width.
    if architecture.full_width and layers[0].n_heads * facts.head_dim != width:
        return refused("for heads that together are as wide as the model", "fewer heads")
    if architecture.tied and not facts.tied:
        hint = "An even cut (selector uniform) has the family's own architecture."
        return refused("for a model whose output is its embedding", "two tensors", hint)
    if facts.factors is not None and not architecture.factors:
        return refused("for default rotary positions", "scaled ones")
    return None


# ---------------------------------------------------------------------------------------- writing


def write(model: Any, description: Description, folder: Path, dtype: Dtype | None) -> None:
    """Write the file, with the tokenizer whose files lie in ``folder``.

    Args:
        model: The cut model.
        description: Of its cut.
        folder: Where to.
        dtype: Of the matrices; default the model's own.

    Raises:
        NotWritten: no disk space, or no permission to write there.
        UnsupportedModel: llama.cpp has no tokenizer like this one, or 16-bit floats cannot hold
            the weights.
    """
    import gguf

    writer = gguf.GGUFWriter(None, description.architecture.name)
    dtype = dtype or _DTYPE_OF.get(model.dtype, "f32")
    # 1. Settings.
    _add_settings(writer, model.config, description)
    writer.add_file_type(
        {
            "f32": gguf.LlamaFileType.ALL_F32,
            "f16": gguf.LlamaFileType.MOSTLY_F16,
            "bf16": gguf.LlamaFileType.MOSTLY_BF16,
            "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
        }[dtype]
    )
    gguf_tokenizer.add(writer, folder, model.config.vocab_size)

    # 2. Names and sizes of all tensors, then their numbers, one tensor at a time.
    kinds = {}
    # Only 16-bit floats can overflow, so other types need the shapes alone here.
    has_16_bits = dtype in ("f16", "q8_0")
    for name, array in _tensors(model, description, with_numbers=has_16_bits):
        kinds[name] = _kind(array.shape, dtype)
        _check_range(name, array, kinds[name])
        size = gguf.quant_shape_to_byte_shape(array.shape, kinds[name])
        n_bytes = int(np.prod(size))
        writer.add_tensor_info(name, size, np.dtype(np.uint8), n_bytes, kinds[name])
    with write_errors(folder):
        writer.write_header_to_file(folder / FILE)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, array in _tensors(model, description, with_numbers=True):
            writer.write_tensor_data(gguf.quantize(array, kinds[name]).view(np.uint8))
        writer.close()


def _check_range(name: str, array: Any, kind: Any) -> None:
    """Refuse numbers that 16-bit floats would turn into infinities."""
    if kind.name != "F16":
        return
    largest = float(np.abs(array).max(initial=0.0))
    if largest > _LARGEST_F16:
        must = f"for numbers up to {_LARGEST_F16:.0f} as 16-bit floats"
        hint = "Give dtype='bf16' or 'f32'."
        raise UnsupportedModel(_WHERE, must, f"{largest:g} in {name}", hint)


def _add_settings(writer: Any, config: Any, description: Description) -> None:
    layers = description.layers
    shown = [_written_layer(description, number) for number in range(len(layers))]
    writer.add_context_length(_context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(layers))
    # One number where all layers have it, else one per layer.
    for add, counts in (
        (writer.add_head_count, [layer.n_heads for layer in shown]),
        (writer.add_head_count_kv, [layer.n_kv_heads for layer in shown]),
        (writer.add_feed_forward_length, [layer.n_neurons for layer in shown]),
    ):
        add(counts if description.architecture.uneven else counts[0])
    writer.add_key_length(description.head_dim)
    writer.add_value_length(description.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(description.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _context_length(config: Any) -> int:
    """The longest text that llama.cpp computes alike: its code has no sliding window here."""
    length: int = config.max_position_embeddings
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    window: int | None = getattr(config, "sliding_window", None)
    if window is not None and "sliding_attention" in kinds:
        return min(length, window)
    return length


def _written_layer(description: Description, number: int) -> _Layer:
    """The layer as it is written, perhaps with one head or one neuron of zeros."""
    layer = description.layers[number]
    layer = replace(layer, n_neurons=max(1, layer.n_neurons))
    # `deci` can go without attention, though not in the first layer, and not to add a bias.
    can_skip = description.architecture is _DECI and number > 0 and "o_proj" not in layer.biases
    if layer.n_heads or can_skip:
        return layer
    return replace(layer, n_heads=1, n_kv_heads=1)


def _kind(shape: tuple[int, ...], dtype: Dtype) -> Any:
    """How a tensor is stored: rows of ``q8_0`` come in blocks of 32."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return kinds.F32
    if dtype == "q8_0" and shape[-1] % 32:
        return kinds.F16
    return kinds[dtype.upper()]


def _known_name(name: str) -> str | None:
    """The name of a tensor in the file; None for a tensor that no family here has."""
    path, _, leaf = name.rpartition(".")
    top = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    inside = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    if path in top:
        return f"{top[path]}.{leaf}"
    number, _, part = path.removeprefix("model.layers.").partition(".")
    if part in inside and number.isdigit():
        return f"blk.{number}.{inside[part]}.{leaf}"
    return None


def _tensors(
    model: nn.Module, description: Description, with_numbers: bool
) -> Iterator[tuple[str, Any]]:
    """Every tensor of the file, by name, as 32-bit floats.

    Args:
        model: The model.
        description: Of its cut.
        with_numbers: Or only the shapes, as arrays without memory.
    """
    if description.factors is not None:
        yield "rope_freqs.weight", description.factors.numpy()
    state = state_of(model)
    for name, tensor in state.items():
        known = _known_name(name)
        if known is None or (known.startswith("output.") and description.tied):
            continue
        if not with_numbers:
            tensor = torch.empty(tensor.shape, device="meta")
        part = name.split(".")[-2]
        number = name.removeprefix("model.layers.").partition(".")[0]
        if number.isdigit():
            layer = _written_layer(description, int(number))
            if layer.n_heads == 0 and (".self_attn." in name or part == "input_layernorm"):
                continue
            tensor = _arranged(tensor, part, layer, description)
            if description.architecture.fused and part in ("k_proj", "v_proj"):
                continue
            if description.architecture.fused and part == "q_proj":
                known = known.replace("attn_q", "attn_qkv")
                tensor = _fused(state, name, tensor, layer, description)
        yield known, _array(tensor)


def _array(tensor: Tensor) -> Any:
    """A tensor as numbers; without memory one number stands for all."""
    if tensor.is_meta:
        return np.broadcast_to(np.float32(0), tuple(tensor.shape))
    return np.ascontiguousarray(tensor.detach().cpu().float().numpy())


def _fused(
    state: Any, name: str, queries: Tensor, layer: _Layer, description: Description
) -> Tensor:
    """Queries, keys and values of a layer as one matrix."""
    parts = [queries]
    for part in ("k_proj", "v_proj"):
        tensor = state[name.replace("q_proj", part)]
        parts.append(_arranged(tensor.to(queries.device), part, layer, description))
    return torch.cat([part.to(queries.dtype) for part in parts])


def _arranged(tensor: Tensor, part: str, layer: _Layer, description: Description) -> Tensor:
    """A layer's tensor with the file's order of rows, and zeros where a head or neuron must be."""
    width = description.head_dim
    least = {"q_proj": width, "k_proj": width, "v_proj": width, "gate_proj": 1, "up_proj": 1}
    if part in least and len(tensor) == 0:
        tensor = tensor.new_zeros(least[part], *tensor.shape[1:])
    if part in ("o_proj", "down_proj") and tensor.shape[-1] == 0:
        tensor = tensor.new_zeros(len(tensor), width if part == "o_proj" else 1)
    if part in ("q_proj", "k_proj") and description.architecture.neighbours:
        # [heads, half, place, ...] to [heads, place, half, ...]
        halves = tensor.reshape(-1, 2, width // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor
