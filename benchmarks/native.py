"""Speed of a pruned model over one that was built small: the same shape, the same weights, in turn
in one run.

    python benchmarks/native.py                       # 2 CPU threads, a quarter of an hour
    python benchmarks/native.py --device cuda
    python benchmarks/native.py --small --out native.json

Uniform plans, so that the small model can be built at all. Each subject is cut to ``--keep`` heads
a layer and compared with

- ``bert``: an encoder that is written out here with nn.Linear, LayerNorm and SDPA and knows neither
  Transformers nor headprune (there is no configuration for a head narrower than width / heads);
- ``vit``, ``llama``: the class itself, configured with so many heads (``head_dim``);
- each of them, ``with neurons``: the same share of the feed-forwards' neurons is kept, too;
- ``llama, free``: policy ``free`` leaves groups of unlike size, whose keys are repeated in every
  call. Compared with the configured model of as many query heads, it says what that costs; nothing
  is promised for it.

The small model gets the pruned model's weights and must give its outputs. Where a process puts
weights in memory makes one of two models of the same code faster for as long as the process lives,
by up to a tenth: each comparison is made in ``--processes`` of them. ``speed`` is the mean over
processes of native / pruned time, each the median over rounds: 1 is as fast, 0.97 is aimed at; with
a 95 % interval over processes (Student's t). ``uncut``, of ``bert`` alone, is the same comparison
with all heads, before any cut: what it misses from 1 is the code of Transformers, not the cut's.
``share`` is the one over the other, in the same process; code that takes as long in every call
weighs more in a smaller model, so that ``extra_seconds``, what a call takes beyond the native
one's, tells more.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import headprune as hp
from headprune.bench.latency import compare_latency
from headprune.core.heads import HeadMask
from headprune.data.models import resolve_device
from headprune.model.running import call, outputs
from headprune.run.surroundings import git_commit, hardware, versions

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from compiled import compiling
from studies import RECORDS, by_student, keep, now
from tradeoff_times import DTYPES

AIM = 0.97
#: Largest difference of outputs, relative to the largest output, by dtype.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    studies.add_device(parser)
    parser.add_argument("--threads", type=int, default=2, help="of torch, on a CPU")
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of --heads")
    parser.add_argument("--heads", type=int, default=12, help="a multiple of 4")
    parser.add_argument(
        "--keep", type=int, default=4, help="heads a layer that stay, a multiple of 4"
    )
    parser.add_argument(
        "--shapes", nargs="+", default=["1x32", "8x128", "32x128"], help="batch x tokens"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(ROUNDING), help="default: fp32, on a GPU bf16 too"
    )
    parser.add_argument("--compile", action="store_true", help="with torch.compile, too")
    parser.add_argument(
        "--processes", type=int, default=8, help="one after the other, at least two"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="about how long each makes each comparison"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no process after so much time, but two"
    )
    parser.add_argument(
        "--aside",
        action="store_true",
        help="leave another machine's record alone, begin one beside it",
    )
    parser.add_argument(
        "--small", action="store_true", help="seconds: two narrow layers, one shape"
    )
    parser.add_argument("--out", type=Path, help="default benchmarks/records/native-DEVICE.json")
    args = parser.parse_args(argv)
    if args.processes < 2:
        parser.error(f"--processes must be at least 2, there is no interval over {args.processes}")
    args.dtypes = args.dtypes or DTYPES[args.device]
    if args.small:
        args.layers, args.width, args.shapes, args.seconds = 2, 48, ["2x8"], min(args.seconds, 0.05)
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs the comparisons and returns the record's path."""
    args = arguments(argv)
    over, start = studies.clock(args), perf_counter()
    out: Path = args.out or RECORDS / f"native-{args.device}.json"
    record, out = begun(args, out)
    found: list[list[dict[str, Any]]] = record["measured"]
    while len(found) < 2 or (len(found) < args.processes and not over()):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            found.append(fresh.submit(one_process, args).result())
        print(f"{len(found)} of {args.processes} processes", flush=True)
        # A machine that is lent may be taken back: every process is kept, though one alone has no
        # interval.
        rows = [over_processes(rows) for rows in zip(*found, strict=True)] if len(found) > 1 else []
        record |= {"processes": len(found), "seconds": perf_counter() - start, "rows": rows}
        keep(record, out)
    print(out)
    return out


def begun(args: argparse.Namespace, out: Path) -> tuple[dict[str, Any], Path]:
    """A new record, or the one at ``out``, whose processes count, if it has the same settings on
    the same machine.

    Returns:
        The record, and its path: one beside ``out`` with ``--aside``, where another record lies
        there.
    """
    how = ("out", "processes", "minutes", "aside")  # these decide how much is measured, not what
    here = hardware(resolve_device(args.device)) | {"threads": args.threads}
    same = {
        "benchmark": "native",
        "settings": {name: value for name, value in vars(args).items() if name not in how},
        "versions": versions(),
        "where": here.get("gpu", here["processor"]),
    }
    record, out = studies.there(out, same, args.aside)
    if record is not None and "measured" in record:
        return record, out
    about = {"created": now(), "hardware": here, "git_commit": git_commit(), "aim": AIM}
    return {**same, **about, "rows": [], "measured": []}, out


def one_process(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows as this process sees them."""
    torch.set_num_threads(args.threads)
    device = resolve_device(args.device)
    pairs = itertools.product(args.subjects, args.dtypes)
    return [row for name, dtype in pairs for row in compared(name, args, device, dtype)]


def over_processes(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of several processes' rows of the same comparison."""
    found = dict(rows[0], largest_difference=max(row["largest_difference"] for row in rows))
    kept = ("ratio", "low", "high", "rounds", "original_p50", "pruned_p50")
    for key in {"speed", "uncut"} & set(found):
        timed = [{name: row[key][name] for name in kept} for row in rows]
        extra = [row["pruned_p50"] - row["original_p50"] for row in timed]
        found[key] = mean_of([row["ratio"] for row in timed])
        found[key] |= {"extra_seconds": mean_of(extra, "mean"), "processes": timed}
    if "uncut" in found:
        found["share"] = mean_of([row["speed"]["ratio"] / row["uncut"]["ratio"] for row in rows])
    return found


def mean_of(values: Sequence[float], name: str = "ratio") -> dict[str, float]:
    """With its 95 % interval."""
    return dict(zip((name, "low", "high"), by_student(values), strict=True))


def compared(
    name: str, args: argparse.Namespace, device: torch.device, dtype: str
) -> list[dict[str, Any]]:
    """The rows of a subject: every shape, eager and, if asked for, compiled."""
    kind = getattr(torch, dtype)
    pairs = SUBJECTS[name](args)
    for model in itertools.chain(*pairs.values()):
        model.to(device, kind).eval()

    def make(batch: int, tokens: int) -> Any:
        return INPUTS[name.partition(",")[0]](args, batch, tokens, device, kind)

    gap = max(difference(*pair, make(2, 8)) for pair in pairs.values())
    if gap > ROUNDING[dtype]:
        raise RuntimeError(f"{name}: the two models are not the same, outputs differ by {gap}")
    rows = []
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    for compiled, (batch, tokens) in itertools.product(
        (False, True) if args.compile else (False,), shapes
    ):
        timed = {}
        with compiling(compiled) as graphs:
            for key, pair in pairs.items():
                native, model = (torch.compile(m, dynamic=False) if compiled else m for m in pair)
                (row,) = compare_latency(
                    native, model, make, [batch], [tokens], seconds=args.seconds
                )
                timed[key] = vars(row)
            counted = graphs(2 * len(pairs))
        read = patches(args) if name.startswith("vit") else tokens
        about = {
            "subject": name,
            "dtype": dtype,
            "compiled": compiled,
            "batch": batch,
            "tokens": read,
        }
        rows.append({**about, **timed, "largest_difference": gap, **counted})
        told = (
            "{} {ratio:.3f} [{low:.3f}, {high:.3f}]".format(key, **row)
            for key, row in timed.items()
        )
        print(*about.values(), *told, flush=True)
    return rows


@torch.no_grad()
def difference(one: nn.Module, other: nn.Module, batch: Any) -> float:
    """The largest difference of the first outputs, relative to the largest."""
    a, b = (outputs(call(model, batch))[0].double() for model in (one, other))
    return float((a - b).abs().max() / b.abs().max())


# ------------------------------------------------------------------------------------------------
# subjects


#: A native model and the one that is compared with it: "speed" cut, "uncut" before that.
Pairs = dict[str, tuple[nn.Module, nn.Module]]


def bert(args: argparse.Namespace, neurons: bool = False) -> Pairs:
    """BERT and the plain encoder, of both sizes."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {
        "hidden_size": args.width,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
    }
    config = BertConfig(vocab_size=1000, intermediate_size=4 * args.width, **sizes)
    uncut = BertModel(config, add_pooling_layer=False)
    small = cut(uncut, args.keep, _neurons_kept(args) if neurons else None)
    return {
        "speed": (plain_like(small, args.keep), small),
        "uncut": (plain_like(uncut, args.heads), uncut),
    }


def vit(args: argparse.Namespace, neurons: bool = False) -> Pairs:
    """ViT, whose small one is configured."""
    from transformers import ViTConfig, ViTModel

    def build(n_heads: int, n_neurons: int) -> nn.Module:
        config = ViTConfig(
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=n_heads,
            intermediate_size=n_neurons,
            image_size=16 if args.small else 224,
            patch_size=8 if args.small else 16,
            head_dim=args.width // args.heads,
        )
        return ViTModel(config, add_pooling_layer=False)

    return configured(build, args, neurons)


def llama(args: argparse.Namespace, neurons: bool = False) -> Pairs:
    """Llama with two query heads a group, whose small one is configured."""

    def build(n_heads: int, n_neurons: int) -> nn.Module:
        return _llama(args, n_heads, n_heads // 2, n_neurons)

    return configured(build, args, neurons)


def llama_free(args: argparse.Namespace) -> Pairs:
    """Llama with all of one group and one query head of the others, against as many heads in
    pairs."""
    torch.manual_seed(0)
    small = _llama(args, args.heads, args.heads // 2, 4 * args.width)
    sites = hp.find_sites(small, policy="free")
    heads = [0, 1, *range(2, 2 * (args.keep - 1), 2)][: args.keep]
    mask = HeadMask.from_keep(
        {s.name: heads for s in sites}, {s.name: s.n_query_heads for s in sites}
    )
    hp.prune_(small, mask, sites=sites)
    # One key/value head a query head holds every pair of the two, so that it can be given the same
    # weights.
    native = _llama(args, args.keep, args.keep, 4 * args.width)
    state = {name: parameter.detach() for name, parameter in small.named_parameters()}
    rows = torch.tensor([0, *range(args.keep - 1)])
    for name, tensor in state.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            state[name] = tensor.unflatten(0, (args.keep - 1, -1))[rows].flatten(0, 1)
    native.load_state_dict(state)
    return {"speed": (native, small)}


def _llama(args: argparse.Namespace, n_heads: int, n_kv_heads: int, n_neurons: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        intermediate_size=n_neurons,
        head_dim=args.width // args.heads,
        use_cache=False,
    )
    return LlamaModel(config)


def configured(
    build: Callable[[int, int], nn.Module], args: argparse.Namespace, neurons: bool
) -> Pairs:
    """A class that can be configured with fewer heads and neurons, and so configured."""
    torch.manual_seed(0)
    whole = 4 * args.width
    kept = _neurons_kept(args) if neurons else None
    small, native = cut(build(args.heads, whole), args.keep, kept), build(args.keep, kept or whole)
    native.load_state_dict(small.state_dict())
    return {"speed": (native, small)}


def _neurons_kept(args: argparse.Namespace) -> int:
    """Neurons a layer that stay: the share of the heads that do."""
    kept: int = 4 * args.width * args.keep // args.heads
    return kept


def cut(model: nn.Module, kept: int, neurons: int | None = None) -> nn.Module:
    """A copy whose layers keep their last heads and, where a number is given, their last
    neurons."""
    sites = hp.find_sites(model, feed_forward=neurons is not None)
    n_heads = {site.name: site.n_query_heads for site in sites}
    keep = {}
    for site in sites:
        number = neurons if site.is_feed_forward and neurons is not None else kept
        keep[site.name] = range(site.n_query_heads - number, site.n_query_heads)
    small = copy.deepcopy(model)
    hp.prune_(small, HeadMask.from_keep(keep, n_heads), sites=sites)
    return small


class PlainLayer(nn.Module):
    """Attention and feed-forward with norms after them, as in BERT."""

    def __init__(self, width: int, n_heads: int, head_dim: int, neurons: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value = (nn.Linear(width, n_heads * head_dim) for _ in range(3))
        self.output = nn.Linear(n_heads * head_dim, width)
        self.up, self.down = nn.Linear(width, neurons), nn.Linear(neurons, width)
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        ways = (self.query, self.key, self.value)
        q, k, v = (way(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for way in ways)
        heads = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm_1(x + self.output(heads))
        out: Tensor = self.norm_2(x + self.down(gelu(self.up(x))))
        return out


class PlainEncoder(nn.Module):
    """BERT without options: tokens, positions, one sentence, no padding."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        n_layers: int,
        n_heads: int,
        head_dim: int,
        neurons: int,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.sentence = nn.Parameter(torch.zeros(width))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.Sequential(
            *(PlainLayer(width, n_heads, head_dim, neurons) for _ in range(n_layers))
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = self.positions.weight[: input_ids.shape[1]]
        out: Tensor = self.layers(self.norm(self.tokens(input_ids) + self.sentence + positions))
        return out


@torch.no_grad()
def plain_like(model: Any, n_heads: int) -> PlainEncoder:
    """The plain encoder with a BERT's sizes and weights."""
    config, embeddings = model.config, model.embeddings
    first = model.encoder.layer[0]
    head_dim = first.attention.self.attention_head_size
    plain = PlainEncoder(
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        n_heads,
        head_dim,
        first.intermediate.dense.out_features,
    )
    plain.sentence.copy_(embeddings.token_type_embeddings.weight[0])
    parts = [
        (plain.tokens, embeddings.word_embeddings),
        (plain.positions, embeddings.position_embeddings),
    ]
    parts.append((plain.norm, embeddings.LayerNorm))
    for ours, theirs in zip(plain.layers, model.encoder.layer, strict=True):
        own, attention = theirs.attention.self, theirs.attention.output
        parts += [
            (ours.query, own.query),
            (ours.key, own.key),
            (ours.value, own.value),
            (ours.output, attention.dense),
        ]
        parts += [(ours.norm_1, attention.LayerNorm), (ours.norm_2, theirs.output.LayerNorm)]
        parts += [(ours.up, theirs.intermediate.dense), (ours.down, theirs.output.dense)]
    for mine, given in parts:
        mine.load_state_dict(given.state_dict())
    return plain


def tokens(
    args: argparse.Namespace, batch: int, length: int, device: torch.device, kind: torch.dtype
) -> Any:
    return {"input_ids": torch.arange(batch * length, device=device).view(batch, length) % 1000}


def patches(args: argparse.Namespace) -> int:
    """Tokens of an image: its patches and the class token."""
    return (2 if args.small else 14) ** 2 + 1


def images(
    args: argparse.Namespace, batch: int, length: int, device: torch.device, kind: torch.dtype
) -> Any:
    """Of the size that the model is for, whatever ``length`` says."""
    side = 16 if args.small else 224
    return {
        "pixel_values": torch.linspace(
            -1, 1, batch * 3 * side * side, device=device, dtype=kind
        ).view(batch, 3, side, side)
    }


SUBJECTS: dict[str, Callable[[argparse.Namespace], Pairs]] = {
    "bert": bert,
    "vit": vit,
    "llama": llama,
    "llama, free": llama_free,
    "bert, with neurons": partial(bert, neurons=True),
    "vit, with neurons": partial(vit, neurons=True),
    "llama, with neurons": partial(llama, neurons=True),
}
INPUTS: dict[str, Callable[..., Any]] = {"bert": tokens, "vit": images, "llama": tokens}

if __name__ == "__main__":
    studies.leave(main())
