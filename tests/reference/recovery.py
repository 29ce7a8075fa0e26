"""Layer-wise recovery written out literally: activations are kept whole, token by token, and NumPy
solves.

Where a sub-layer's stream can be read is written down by hand for each family here (the input of
the norm behind it, or the output of the module around it); nothing of how the package finds it is
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headprune.model.double import Doubled

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """A projection, and the module whose input ("in") or output ("out") is the stream after its
    sub-layer.

    ``writer`` is the module whose output is the projection's, where code passes by the projection
    itself; ``padding`` the batch's tensor that is True at padding, where it is no attention mask.
    """

    projection: str
    stream: str
    side: str
    decoder: bool = False
    writer: str = ""
    padding: str = ""


def bert(layer: int, feed_forward: bool) -> list[Place]:
    at = f"bert.encoder.layer.{layer}"
    first = Place(f"{at}.attention.output.dense", f"{at}.attention.output.LayerNorm", "in")
    return [first, *[Place(f"{at}.output.dense", f"{at}.output.LayerNorm", "in")] * feed_forward]


def gpt2(layer: int, feed_forward: bool) -> list[Place]:
    at = f"transformer.h.{layer}"
    return [
        Place(f"{at}.attn.c_proj", f"{at}.ln_2", "in"),
        *[Place(f"{at}.mlp.c_proj", at, "out")] * feed_forward,
    ]


def llama(layer: int, feed_forward: bool) -> list[Place]:
    at = f"model.layers.{layer}"
    first = Place(f"{at}.self_attn.o_proj", f"{at}.post_attention_layernorm", "in")
    return [first, *[Place(f"{at}.mlp.down_proj", at, "out")] * feed_forward]


def vit(layer: int, feed_forward: bool) -> list[Place]:
    at = f"vit.layers.{layer}"
    first = Place(f"{at}.attention.o_proj", f"{at}.layernorm_after", "in")
    return [first, *[Place(f"{at}.mlp.fc2", at, "out")] * feed_forward]


def multi_head_attention(layer: int, feed_forward: bool) -> list[Place]:
    return [Place(f"layers.{layer}.attention.W_o", f"layers.{layer}.norm", "in")]


def torch_encoder(layer: int, feed_forward: bool) -> list[Place]:
    at = f"encoder.layers.{layer}"
    first = Place(
        f"{at}.self_attn.out_proj", f"{at}.norm1", "in", writer=f"{at}.self_attn", padding="padding"
    )
    return [first, *[Place(f"{at}.linear2", f"{at}.norm2", "in", padding="padding")] * feed_forward]


def t5(layer: int, feed_forward: bool) -> list[Place]:
    """Layers count from the encoder's first to the decoder's last; both have two."""
    stack, number = ("encoder", layer) if layer < 2 else ("decoder", layer - 2)
    at, decoder = f"{stack}.block.{number}.layer", stack == "decoder"
    places = [Place(f"{at}.0.SelfAttention.o", f"{at}.0", "out", decoder)]
    places += [Place(f"{at}.1.EncDecAttention.o", f"{at}.1", "out", decoder)] * decoder
    last = 1 + decoder
    return [
        *places,
        *[Place(f"{at}.{last}.DenseReluDense.wo", f"{at}.{last}", "out", decoder)] * feed_forward,
    ]


def real(place: Place, batch: dict[str, Any], example: int, length: int) -> list[int]:
    """Positions of an example that are no padding."""
    if "valid_lens" in batch:
        return list(range(int(batch["valid_lens"][example])))
    mask = batch.get("decoder_attention_mask" if place.decoder else "attention_mask")
    if place.padding:
        mask = ~batch[place.padding]
    return [t for t in range(length) if mask is None or bool(mask[example, t])]


def rows(
    model: nn.Module, place: Place, batches: Sequence[dict[str, Any]]
) -> tuple[Array, Array, Array]:
    """What the projection reads and writes, and the stream after it, ``[tokens, width]`` each."""
    seen: dict[str, list[Tensor]] = {"x": [], "y": [], "s": []}

    def projected(module: nn.Module, args: Any, out: Tensor) -> None:
        seen["x"].append(args[0])

    def written(module: nn.Module, args: Any, out: Any) -> None:
        seen["y"].append(out if isinstance(out, Tensor) else out[0])

    def streamed(module: nn.Module, args: Any, out: Any) -> None:
        found = args[0] if place.side == "in" else out if isinstance(out, Tensor) else out[0]
        seen["s"].append(found)

    handles = [model.get_submodule(place.projection).register_forward_hook(projected)]
    handles.append(
        model.get_submodule(place.writer or place.projection).register_forward_hook(written)
    )
    handles.append(model.get_submodule(place.stream).register_forward_hook(streamed))
    tokens: dict[str, list[Tensor]] = {"x": [], "y": [], "s": []}
    for batch in batches:
        with torch.no_grad(), Doubled():
            model(**batch)
        for name, kept in tokens.items():
            for found in seen[name]:
                kept += [found[i, real(place, batch, i, found.shape[1])] for i in range(len(found))]
            seen[name].clear()
    for handle in handles:
        handle.remove()
    s = torch.cat(tokens["s"]).numpy()
    # It may not be called.
    x = torch.cat(tokens["x"]).numpy() if tokens["x"] else np.zeros((len(s), 0))
    y = torch.cat(tokens["y"]).numpy() if tokens["y"] else np.zeros_like(s)
    return x, y, s


def install(model: nn.Module, place: Place, weight: Array, bias: Array) -> None:
    """Puts ``x @ weight + bias`` in the projection's place."""
    module: Any = model.get_submodule(place.projection)
    with torch.no_grad():
        given = torch.from_numpy(weight)
        module.weight.copy_(given if hasattr(module, "nf") else given.T)
        if module.bias is None:
            module.bias = nn.Parameter(torch.zeros(weight.shape[1], dtype=torch.float64))
        module.bias.copy_(torch.from_numpy(bias))


def lstsq(
    model: nn.Module, teacher: nn.Module, places: Sequence[Place], batches: Sequence[dict[str, Any]]
) -> None:
    """Every place in turn: ``[x, 1] solution = T - R`` for all tokens at once; changes the
    model."""
    for place in places:
        if getattr(model.get_submodule(place.projection), "bias", None) is None:
            width = teacher.get_submodule(place.projection).weight.shape[0]
            kept = model.get_submodule(place.projection).weight.shape[1]
            weight = model.get_submodule(place.projection).weight.detach().numpy().T
            install(model, place, weight if kept else np.zeros((0, width)), np.zeros(width))
        x, y, s = rows(model, place, batches)
        y = y if x.shape[1] else model.get_submodule(place.projection).bias.detach().numpy()
        target = rows(teacher, place, batches)[2] - (s - y)
        solution = np.linalg.lstsq(
            np.concatenate([x, np.ones((len(x), 1))], 1), target, rcond=None
        )[0]
        install(model, place, solution[:-1], solution[-1])


def rescale(
    model: nn.Module,
    teacher: nn.Module,
    place: Place,
    columns: Sequence[slice],
    batches: Any,
    intercept: bool,
) -> tuple[Array, Array]:
    """Factors of the kept heads and the intercept, from one long system with a row a token and
    channel."""
    x, y, s = rows(model, place, batches)
    module: Any = model.get_submodule(place.projection)
    weight = module.weight.detach().numpy()
    weight = weight if hasattr(module, "nf") else weight.T
    bias = 0.0 if module.bias is None else module.bias.detach().numpy()
    target = rows(teacher, place, batches)[2] - (s - y) - bias
    written = np.stack([(x[:, c] @ weight[c]).ravel() for c in columns], 1)
    extra = (
        np.tile(np.eye(target.shape[1]), (len(target), 1))
        if intercept
        else np.zeros((target.size, 0))
    )
    solution = np.linalg.lstsq(np.concatenate([written, extra], 1), target.ravel(), rcond=None)[0]
    return solution[: len(columns)], solution[len(columns) :]


def error(
    model: nn.Module, teacher: nn.Module, place: Place, batches: Sequence[dict[str, Any]]
) -> float:
    """``sum |T - S|² / sum |A - mean A|²``."""
    _, _, ours = rows(model, place, batches)
    _, written, theirs = rows(teacher, place, batches)
    return float(np.square(theirs - ours).sum() / np.square(written - written.mean(0)).sum())
