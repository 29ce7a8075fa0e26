"""What a cut brings where a GPU is busy: models of real sizes with random weights, whole and cut,
in turn.

    python3 benchmarks/gpu/shapes.py --device cuda --out gpu-shapes.json --minutes 5
    python3 benchmarks/gpu/shapes.py --device cpu --small --out shapes.json       # every path but
    graphs and NVML

Speed does not depend on what the weights are, so none are trained. Encoders and ViT run forward
passes, decoders prefill a prompt and make one step behind a full KV cache. Inputs carry no
attention mask: a mask of ones would keep the flash kernel away. A cut keeps a share of every
layer's heads (a decoder's unit is a key/value head with its query heads), or of its heads and its
feed-forward neurons.

Rows are of two kinds: ``ceiling`` (what the machine can do at most) and ``gpu`` (a cell and a
share; see ``gpu_time.py``). A row is written as soon as it is there, and the same command goes on
after the last one. A cell that fails leaves a row with ``error``, which is tried again.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headprune as hp
from headprune.bench.latency import Effort
from headprune.model.costs import measure_costs
from headprune.model.sites import bind

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import studies
from gpu_time import (
    CODES,
    PRECISIONS,
    Cell,
    Measuring,
    Run,
    arithmetic,
    ceilings,
    compared,
    prepared_,
)

Models = list[nn.Module]


# ------------------------------------------------------------------------------------------------
# subjects


@dataclass(frozen=True)
class Subject:
    """A model of a known size.

    Args:
        build: Makes it on the current default device and in the current default dtype.
        kind: ``encoder``, ``vision`` or ``decoder``.
        sizes: Of the model, in the words of its family's configuration.
        tiny: Sizes for trying the script.
    """

    build: Callable[[dict[str, int]], nn.Module]
    kind: str
    sizes: dict[str, int]
    tiny: dict[str, int]


def bert(sizes: dict[str, int]) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(max_position_embeddings=512, **sizes)
    return BertModel(config, add_pooling_layer=False)


def vit(sizes: dict[str, int]) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**sizes), add_pooling_layer=False)


def llama(sizes: dict[str, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(max_position_embeddings=131072, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config)


def _encoder(width: int, layers: int, heads: int) -> dict[str, int]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width}


def _decoder(
    width: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int
) -> dict[str, int]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {
        **sizes,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


TINY_ENCODER = _encoder(48, 2, 4) | {"vocab_size": 200}
TINY_IMAGES = _encoder(48, 2, 4) | {"image_size": 16, "patch_size": 8}
TINY_DECODER = _decoder(64, 2, 8, 4, 96, 200)
#: By name. Sizes are those of the published models.
SUBJECTS: dict[str, Subject] = {
    "minilm": Subject(bert, "encoder", _encoder(384, 6, 12), TINY_ENCODER),
    "bert-base": Subject(bert, "encoder", _encoder(768, 12, 12), TINY_ENCODER),
    "bert-large": Subject(bert, "encoder", _encoder(1024, 24, 16), TINY_ENCODER),
    "vit-b": Subject(vit, "vision", _encoder(768, 12, 12), TINY_IMAGES),
    "llama-1b": Subject(llama, "decoder", _decoder(2048, 16, 32, 8, 8192, 128256), TINY_DECODER),
    "llama-8b": Subject(llama, "decoder", _decoder(4096, 32, 32, 8, 14336, 128256), TINY_DECODER),
}


def built(subject: Subject, precision: str, device: torch.device, small: bool) -> nn.Module:
    """The whole model, made on the device in the precision's dtype, because a large one passes
    through no CPU."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(PRECISIONS[precision][0])
    try:
        with device:
            return subject.build(subject.tiny if small else subject.sizes).eval()
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Cut:
    """The shares of every layer's heads and feed-forward neurons that a cut keeps."""

    share: float
    neurons: float = 1.0


def cut(model: nn.Module, shares: Cut) -> nn.Module:
    """A copy that keeps the first units of every site, for speed does not depend on which."""
    sites = hp.find_sites(model, feed_forward=shares.neurons < 1)
    keep: dict[str, list[int]] = {}
    for site in sites:
        share = shares.neurons if site.kind == "feed_forward" else shares.share
        units = site.units[: max(1, round(share * len(site.units)))]
        keep[site.name] = list(itertools.chain.from_iterable(units))
    small = copy.deepcopy(model)
    hp.prune_(small, hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites}))
    return small


# ------------------------------------------------------------------------------------------------
# the grid


@dataclass(frozen=True)
class Place:
    """A cell of one subject and one phase: ``forward``, ``prefill`` or ``decode``."""

    subject: str
    phase: str
    cell: Cell

    @property
    def key(self) -> dict[str, Any]:
        return {"subject": self.subject, "phase": self.phase, **asdict(self.cell)}


def places() -> list[Place]:
    """The grid, most telling cells first."""
    grid = [
        # The headline, its precisions, and where a GPU begins to be busy.
        *_cells("bert-base", "forward", ["bfloat16"], "32x128 128x512 256x128 8x128 1x128 256x512"),
        *_cells("bert-base", "forward", ["float32", "tf32", "float16"], "32x128 128x512"),
        *_cells("llama-1b", "decode", ["bfloat16"], "128x4096 32x4096 1x4096 256x1024"),
        *_cells("llama-1b", "prefill", ["bfloat16"], "8x1024 1x1024 1x128"),
        *_cells("minilm", "forward", ["bfloat16"], "32x128 128x512 256x128 8x128 1x128"),
        *_cells("minilm", "forward", ["bfloat16"], "32x128 1x128", cold=True),
        *_cells("bert-base", "forward", ["bfloat16"], "32x128 1x128", code="reduce-overhead"),
        *_cells("bert-large", "forward", ["bfloat16"], "32x128 128x512 8x128 1x128"),
        *_cells("vit-b", "forward", ["bfloat16"], "32x197 256x197 1x197"),
        *_cells("llama-8b", "decode", ["bfloat16"], "32x4096 64x2048 1x4096"),
        *_cells("llama-8b", "prefill", ["bfloat16"], "1x2048"),
        *_cells("bert-base", "forward", ["bfloat16"], "32x128", attention="eager"),
        *_cells("minilm", "forward", ["float32", "tf32", "float16"], "32x128 128x512"),
        *_cells("minilm", "forward", ["bfloat16"], "32x128 1x128", code="reduce-overhead"),
        *_cells("bert-base", "forward", ["bfloat16"], "32x128", code="max-autotune"),
    ]
    return list(dict.fromkeys(grid))


def _cells(
    subject: str,
    phase: str,
    precisions: Sequence[str],
    shapes: str,
    *,
    code: str = "eager",
    attention: str = "sdpa",
    cold: bool = False,
) -> Iterator[Place]:
    """Every precision at every shape, ``batch x tokens``."""
    for precision, shape in itertools.product(precisions, shapes.split()):
        batch, tokens = map(int, shape.split("x"))
        yield Place(subject, phase, Cell(precision, code, attention, cold, batch, tokens))


def tiny_places() -> list[Place]:
    """One cell of every kind, for trying the script."""
    found: dict[Any, Place] = {}
    for place in places():
        precise = place.cell.precision != "bfloat16"
        kind = (
            SUBJECTS[place.subject].kind,
            place.phase,
            precise,
            place.cell.cold,
            place.cell.code != "eager",
        )
        tokens = 5 if place.phase == "forward" and SUBJECTS[place.subject].kind == "vision" else 8
        if place.cell.code != "max-autotune":
            found.setdefault(
                kind, Place(place.subject, place.phase, replace(place.cell, batch=2, tokens=tokens))
            )
    return list(found.values())


# ------------------------------------------------------------------------------------------------
# one cell


def call_of(place: Place, device: torch.device, dtype: torch.dtype) -> Callable[[nn.Module], Run]:
    """Makes the call of a model at a place."""
    cell = place.cell

    def forward(model: nn.Module) -> Run:
        inputs = example(model, place, cell.batch, device, dtype)
        return lambda: model(**inputs)

    def cached(model: nn.Module) -> Run:
        ids = example(model, place, cell.batch, device, dtype)["input_ids"]
        return with_cache(model, ids[:, -1:] if place.phase == "decode" else ids, cell.tokens)

    return forward if place.phase == "forward" else cached


def example(
    model: Any, place: Place, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What a pass without a cache takes: random images, or random tokens without a mask."""
    draw = torch.Generator().manual_seed(0)
    if SUBJECTS[place.subject].kind == "vision":
        side = model.config.image_size
        images = torch.randn(batch, 3, side, side, generator=draw)
        return {"pixel_values": images.to(device, dtype)}
    ids = torch.randint(200, (batch, place.cell.tokens), generator=draw).to(device)
    if place.phase == "forward":
        return {"input_ids": ids}
    return {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}


def with_cache(model: Any, ids: torch.Tensor, length: int) -> Run:
    """A call that ends at ``length`` tokens: ``ids`` is ``[batch, new]``, one token of a decode
    step, all of a prefill.

    Every call writes the same last places of a cache that is full. So nothing grows, as it does in
    a cache that appends, no mask keeps the flash kernel away, as in a static one, and there is
    nothing that a CUDA graph could not capture.
    """
    cache = model(
        input_ids=ids[:, :1], use_cache=True
    ).past_key_values  # made by the model, whose layers may differ
    new = ids.shape[1]
    for layer in cache.layers:
        fill_(layer, length, new)
    inputs = {
        "input_ids": ids,
        "past_key_values": cache,
        "use_cache": True,
        "position_ids": torch.arange(length - new, length, device=ids.device).expand(ids.shape),
        "logits_to_keep": 1,
    }
    return lambda: model(**inputs)


def fill_(layer: Any, length: int, new: int) -> None:
    """Give one layer of a cache ``length`` places of noise, the last ``new`` of which every call
    overwrites."""
    for name in ("keys", "values"):
        one = getattr(layer, name)  # [batch, groups, 1, head_dim]
        noise = torch.randn(
            *one.shape[:2], length, one.shape[3], device=one.device, dtype=one.dtype
        )
        setattr(layer, name, noise)

    def update(
        keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer.keys[:, :, -new:].copy_(keys)
        layer.values[:, :, -new:].copy_(values)
        return layer.keys, layer.values

    layer.update = update
    layer.get_seq_length = lambda *_, **__: length - new


def work(
    model: nn.Module, place: Place, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """The least a call must do: ``macs`` (multiply-adds), and ``bytes`` of weights and KV cache
    that it reads.

    A decode step multiplies little and reads much, so only its bytes are given.
    """
    cell = place.cell
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    once = replace(place, phase="prefill" if place.phase == "decode" else place.phase)
    once = replace(once, cell=replace(cell, tokens=1)) if place.phase == "decode" else once
    table = measure_costs(model, bind(model), example(model, once, 1, device, dtype))
    if place.phase == "decode":
        return {"bytes": float(weights + table.total.kv_bytes * cell.batch * cell.tokens)}
    return {"bytes": float(weights), "macs": float(table.total.macs(table.length) * cell.batch)}


# ------------------------------------------------------------------------------------------------
# the study


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.75, 0.5, 0.25],
        help="of each layer's heads, kept",
    )
    parser.add_argument(
        "--both",
        type=float,
        nargs="*",
        default=[0.5],
        help="of each layer's heads and feed-forward neurons, kept",
    )
    parser.add_argument(
        "--codes", nargs="+", choices=CODES, help="default: all, with --small eager alone"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.6, help="about how long each cell is timed, twice"
    )
    parser.add_argument(
        "--joules", type=float, default=2.0, help="seconds of each energy window, in headline cells"
    )
    studies.add_minutes(parser)
    parser.add_argument(
        "--small", action="store_true", help="seconds on a CPU: tiny models, one cell of every kind"
    )
    parser.add_argument("--out", type=Path, help="default benchmarks/records/gpu-shapes.json")
    args = parser.parse_args(argv)
    args.codes = args.codes or (["eager"] if args.small else list(CODES))
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing from the record; return its path."""
    args = arguments(argv)
    over = studies.clock(args)
    device = torch.device(args.device)
    out: Path = args.out or studies.RECORDS / "gpu-shapes.json"
    record = begin(args, device, out)
    record["rows"] = [row for row in record["rows"] if studies.settled(row)]
    for row in studies.in_time(missing(args, device, record["rows"]), over):
        record["rows"].append({**row, **studies.stamp()})
        studies.keep(record, out)
        print(in_short(row), flush=True)
    print(out)
    return out


def begin(args: argparse.Namespace, device: torch.device, out: Path) -> dict[str, Any]:
    """The record without rows, or the one at ``out`` if the same kind of GPU made it."""
    same: dict[str, Any] = {"benchmark": "gpu-shapes", "device": args.device, "small": args.small}
    return studies.begun(out, same | studies.gpu(device), device)


def missing(
    args: argparse.Namespace, device: torch.device, done: list[dict[str, Any]]
) -> Iterator[dict[str, Any] | list[dict[str, Any]]]:
    """Rows that the record lacks: ceilings first, then cell by cell; compiled ones with one cut,
    for each takes long.

    The rows of a cell come in a list: they were measured together.
    """
    if not any(row["what"] == "ceiling" for row in done):
        yield {"what": "ceiling", **ceilings(device, args.small)}
    have = {
        (Place(r["subject"], r["phase"], Cell.of(r)), Cut(r["share"], r["neurons"]))
        for r in done
        if r["what"] == "gpu"
    }
    made: dict[Any, Models] = {}
    for place in tiny_places() if args.small else places():
        wanted = [way for way in cuts(args, place) if (place, way) not in have]
        if place.subject in args.subjects and place.cell.code in args.codes and wanted:
            yield rows(args, device, place, wanted, made)


def cuts(args: argparse.Namespace, place: Place) -> list[Cut]:
    """The cuts that are measured at a place: one where code is compiled, or the model is so large
    that a GPU's memory holds few copies of it."""
    heads = [Cut(share) for share in args.shares]
    both = [Cut(share, share) for share in args.both]
    if place.cell.code != "eager":
        return heads[len(heads) // 2 :][:1]
    if place.subject == "llama-8b":
        return heads[len(heads) // 2 :][:1] + both[:1]
    return heads + both


def rows(
    args: argparse.Namespace, device: torch.device, place: Place, wanted: list[Cut], made: dict[Any, Models]
) -> list[dict[str, Any]]:  # fmt: skip
    """One cell: a row for each cut, or one with the error.

    Args:
        args: Of the script.
        device: Where it runs.
        place: Which cell.
        wanted: The cuts.
        made: The models that are in memory, by what they were prepared for; only the last ones are
            kept.
    """
    try:
        with arithmetic(place.cell.precision) as dtype:
            models = ready(args, device, place, wanted, made)
            how = Measuring(Effort(args.seconds, 3, 10, 400), place.cell.cold, joules(args, place))
            found = compared(models, call_of(place, device, dtype), place.cell, how)
            least = [work(model, place, device, dtype) for model in models]
    except (
        Exception
    ) as error:  # of the memory, a kernel, a compiler, a model: the next cell may run
        made.clear()
        release(device)
        first = (str(error).splitlines() or [""])[0]
        return [
            {
                **place.key,
                "what": "gpu",
                **asdict(wanted[0]),
                "error": f"{type(error).__name__}: {first[:300]}",
            }
        ]
    whole = least[0]
    about = {"what": "gpu", "subject": place.subject, "phase": place.phase}
    return [
        {
            **about,
            **asdict(way),
            **row,
            "work": {name: [whole[name], own[name]] for name in whole},
        }
        for way, row, own in zip(wanted, found, least[1:], strict=True)
    ]


def ready(
    args: argparse.Namespace,
    device: torch.device,
    place: Place,
    wanted: list[Cut],
    made: dict[Any, Models],
) -> Models:
    """The whole model and its cuts, prepared for the place; those of the place before are let
    go."""
    key = (place.subject, *place.cell.way, tuple(wanted))
    if key not in made:
        made.clear()
        release(device)
        whole = built(SUBJECTS[place.subject], place.cell.precision, device, args.small)
        made[key] = [
            prepared_(model, place.cell) for model in (whole, *(cut(whole, way) for way in wanted))
        ]
    return made[key]


def release(device: torch.device) -> None:
    """Give memory back, so that the next models fit."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def joules(args: argparse.Namespace, place: Place) -> float:
    """Energy takes seconds a model: it is read where a GPU is busy with the headline's model."""
    busy = place.cell.batch * place.cell.tokens >= 128 * 512
    seconds: float = (
        args.joules if busy and place.cell.code == "eager" and place.subject == "bert-base" else 0.0
    )
    return seconds


def in_short(row: dict[str, Any]) -> str:
    """A row for the log."""
    if row["what"] == "ceiling":
        return "ceilings: " + ", ".join(
            f"{name} {value:.3g}" for name, value in row.items() if name != "what"
        )
    words = " ".join(
        str(row[name])
        for name in ("subject", "phase", "precision", "code", "batch", "tokens", "share", "neurons")
    )
    if "error" in row:
        return f"{words}: {row['error']}"
    gpu = f", GPU alone {row['gpu']['ratio']:.3f} ({row['bound']}-bound)" if "gpu" in row else ""
    return f"{words}: latency {row['call']['ratio']:.3f}{gpu}"


if __name__ == "__main__":
    studies.leave(main())
