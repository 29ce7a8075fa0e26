"""What scoring and pruning large models costs: worked out on paper, and the same arithmetic held
against measurements.

    OMP_NUM_THREADS=2 python benchmarks/scale.py       # checks the arithmetic on random Llamas that
    fit here python benchmarks/scale.py --paper --rate 2e14 --link 2.5e10 --disk 3e9 --memory 4e10
    # tables for your machine

A decoder with rotary positions, grouped queries and gated feed-forwards (Llama's) is described by
eight numbers, from which multiply-adds, bytes kept for the backward pass, bytes moved and bytes on
disk follow. Each is measured where it can be: time against the rate at which this machine
multiplies matrices of that size, taken in turn with it in every round; kept bytes by asking
autograd for every tensor that it saves. What is a machine's own, the rate and the speed of links
and disks, is an assumption on paper, and stands in the tables' captions.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import headprune as hp
from headprune.model.running import DataDigest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pages import table
from studies import RECORDS, header, keep

#: A gate's row in fp64, and where rows become sums; ``surgeon``'s blocks.
ROW, ROOM, BLOCKS = 8, 128 * 2**20, 8
#: An example is three tensors of int64: tokens, mask, labels.
TOKEN = 24


@dataclass(frozen=True)
class Shape:
    """A decoder of Llama's kind.

    Args:
        name: In tables.
        layers: Of attention and feed-forward each.
        width: Of the stream.
        heads: Query heads a layer.
        groups: KV heads a layer; a group is what leaves together.
        head_dim: Of queries, keys and values.
        inner: Of the feed-forward.
        vocabulary: Tokens; input and output embeddings are two tensors.
    """

    name: str
    layers: int
    width: int
    heads: int
    groups: int
    head_dim: int
    inner: int
    vocabulary: int

    @property
    def context(self) -> int:
        """Channels that an output projection reads."""
        return self.heads * self.head_dim

    @property
    def attention(self) -> int:
        """Weights of one attention."""
        return 2 * self.width * (self.context + self.groups * self.head_dim)

    @property
    def units(self) -> int:
        return self.layers * self.groups

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.width
        return (
            self.layers * (self.attention + 3 * self.width * self.inner)
            + 2 * self.vocabulary * self.width
            + norms
        )

    def layer(self, tokens: int, passes: tuple[float, float] = (1, 1)) -> float:
        """Multiply-adds of a layer, a token of an example of ``tokens``: so many times its weights,
        and its products of queries, keys and values, which a causal mask does not halve here."""
        weights, products = self.attention + 3 * self.width * self.inner, 2 * tokens * self.context
        return passes[0] * weights + passes[1] * products

    def forward(self, tokens: int) -> float:
        """FLOP an example."""
        return 2 * tokens * (self.layers * self.layer(tokens) + self.vocabulary * self.width)

    def taylor(self, tokens: int, recomputed: bool = False) -> float:
        """FLOP an example: forward, and backward to the gates. Weights get no gradient, so that a
        linear layer costs as much again; attention kernels that keep no weights make five products
        in place of two (Dao et al. 2022)."""
        again = 1 if recomputed else 0
        layers = self.layers * self.layer(tokens, (2 + again, 3.5 + again))
        return 2 * tokens * (layers + 2 * self.vocabulary * self.width)

    def leave_one_out(self, tokens: int) -> float:
        """FLOP an example: a pass, and for each unit again what comes after its attention."""
        before = self.attention + 2 * tokens * self.context
        after = sum((self.layers - i) * self.layer(tokens) - before for i in range(self.layers))
        again = self.groups * (after + self.layers * self.vocabulary * self.width)
        return self.forward(tokens) + 2 * tokens * again

    def kept(self, bytes_a_number: int) -> float:
        """Bytes a token that ``taylor`` keeps between forward and backward, but for the loss: of
        each layer the stream before either norm (fp32), what attention gives, and three of the
        feed-forward; of all but the first, queries, keys and values with the logarithms of their
        sums."""
        always = 2 * self.width * 4 + (self.context + 3 * self.inner) * bytes_a_number
        later = (self.context + 2 * self.groups * self.head_dim) * bytes_a_number + self.heads * 4
        return self.layers * always + (self.layers - 1) * later

    def checkpointed(self, bytes_a_number: int) -> float:
        """The same where each layer keeps its input alone, and one layer at a time the rest."""
        return self.layers * self.width * bytes_a_number + self.kept(bytes_a_number) / self.layers

    def surgeon(self, blocks: int = BLOCKS) -> int:
        """Bytes of its matrices, all sites."""
        return 2 * blocks * self.context**2 * 8 * self.layers

    @property
    def largest(self) -> int:
        """Numbers of the largest tensor."""
        return self.width * max(self.vocabulary, self.inner)


#: Grattafiori et al. 2024 (The Llama 3 herd of models), table 3.
LARGE = (
    Shape("8B", 32, 4096, 32, 8, 128, 14336, 128_256),
    Shape("70B", 80, 8192, 64, 8, 128, 28672, 128_256),
    Shape("405B", 126, 16384, 128, 8, 128, 53248, 128_256),
)
#: What is measured.
SMALL = (
    Shape("4 x 256", 4, 256, 8, 4, 32, 1024, 2000),
    Shape("8 x 512", 8, 512, 8, 4, 64, 2048, 4000),
    Shape("12 x 1024", 12, 1024, 16, 8, 64, 4096, 8000),
)


@dataclass(frozen=True)
class Machine:
    """What paper has to assume: round numbers of one accelerator, none of which was measured here.

    Args:
        rate: FLOP/s that bf16 matrix products reach in a model.
        memory: Bytes of the accelerator.
        link: Bytes/s from main memory to it.
        disk: Bytes/s.
        cut: Bytes of a checkpoint that a cut on disk gets through in a second: reading, copying,
            hashing, writing.
    """

    rate: float = 4e14
    memory: float = 8e10
    link: float = 5e10
    disk: float = 5e9
    cut: float = 3e8

    def __str__(self) -> str:
        return (
            f"{self.rate / 1e12:g} TFLOP/s, {self.memory / 1e9:g} GB, {self.link / 1e9:g} GB/s from"
            f" main memory, {self.disk / 1e9:g} GB/s from disk"
        )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=8, help="examples a batch")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--shapes", nargs="+", default=[s.name for s in SMALL], choices=[s.name for s in SMALL]
    )
    parser.add_argument("--out", type=Path, default=RECORDS / "scale-cpu.json")
    parser.add_argument(
        "--paper", action="store_true", help="only print the tables, for the machine given"
    )
    for name, value in vars(Machine()).items():
        parser.add_argument(
            f"--{name}", type=float, default=value, help=f"with --paper, default {value:g}"
        )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measures and returns the record's path."""
    args = arguments(argv)
    if args.paper:
        machine = Machine(**{name: getattr(args, name) for name in vars(Machine())})
        print("\n".join([*passes(machine), "", *memory(machine), "", *limits(machine)]))
        return Path(args.out)
    rows = []
    for shape in SMALL:
        if shape.name in args.shapes:
            rows += measured(shape, args)
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "seconds"}), flush=True)
    record = {
        **header("scale"),
        "examples": args.examples,
        "tokens": args.tokens,
        "digest_bytes_per_second": digested(),
        "rows": rows,
    }
    keep(record, args.out)
    print(args.out)
    return Path(args.out)


# ------------------------------------------------------------------------------------------------
# what is measured


def measured(shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a batch beside the FLOP on paper, in rounds with plain matrix products; bytes that
    autograd keeps."""
    model, batch = llama(shape, args.tokens), tokens(shape, args)
    rows = args.examples * args.tokens
    one, two = torch.randn(rows, shape.width), torch.randn(shape.width, shape.inner)
    times = max(1, round(2e10 / (2 * rows * shape.width * shape.inner)))

    def products() -> None:
        for _ in range(times):
            one @ two

    def forward() -> None:
        with torch.no_grad():
            model(**batch)

    ways: dict[str, tuple[Callable[[], Any], float]] = {
        "products": (products, times * 2 * rows * shape.width * shape.inner),
        "forward": (forward, args.examples * shape.forward(args.tokens)),
        "taylor": (scored(model, batch, "taylor"), args.examples * shape.taylor(args.tokens)),
        "nothing": (scored(model, batch, "random"), 0.0),  # what every call does besides
    }
    if shape is SMALL[0]:
        ways["leave_one_out"] = (
            scored(model, batch, "leave_one_out"),
            args.examples * shape.leave_one_out(args.tokens),
        )
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, (way, _) in ways.items():
            start = perf_counter()
            way()
            if number:  # the first warms up
                taken[name].append(perf_counter() - start)
    found = []
    for name, (_, flop) in ways.items():
        if name in ("products", "nothing"):
            continue
        net = [
            (t - (n if name != "forward" else 0)) * (ways["products"][1] / p) / flop
            for t, n, p in zip(taken[name], taken["nothing"], taken["products"], strict=True)
        ]
        row: dict[str, Any] = {
            "shape": shape.name,
            "way": name,
            "flop": flop,
            "seconds": taken[name],
        }
        row["rate"] = statistics.median(ways["products"][1] / p for p in taken["products"])
        row["measured_over_paper"] = statistics.median(net)
        if name == "taylor":
            row["kept"], row["kept_on_paper"] = kept(model, batch, shape), rows * shape.kept(4)
        found.append(row)
    return found


def llama(shape: Shape, tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
    }
    sizes = {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
    }
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        max_position_embeddings=tokens,
        use_cache=False,
        **sizes,
        **heads,
    )
    model = LlamaForCausalLM(config).eval()
    assert sum(p.numel() for p in model.parameters()) == shape.parameters, (
        "the paper counts another model"
    )
    return model


def tokens(shape: Shape, args: argparse.Namespace) -> dict[str, Tensor]:
    drawn = torch.randint(
        shape.vocabulary, (args.examples, args.tokens), generator=torch.Generator().manual_seed(0)
    )
    return {"input_ids": drawn, "labels": drawn}


def scored(model: nn.Module, batch: dict[str, Tensor], scorer: str) -> Callable[[], Any]:
    return lambda: hp.score(model, [batch], scorer, progress=False)


def kept(model: nn.Module, batch: dict[str, Tensor], shape: Shape) -> int:
    """Bytes that autograd saves during ``taylor``: each memory once, weights and the loss's own
    not."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    held: list[Tensor] = []  # as long as one lives, no other gets its place

    def keep_(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and shape.vocabulary not in tensor.shape:
            found[place] = tensor.untyped_storage().nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep_, lambda tensor: tensor):
        scored(model, batch, "taylor")()
    return sum(found.values())


def digested(size: int = 64 * 2**20) -> float:
    """Bytes/s at which the data's fingerprint is made."""
    batch, seconds = torch.zeros(size // 8, dtype=torch.long), []
    for _ in range(3):
        start = perf_counter()
        DataDigest().add(batch)
        seconds.append(perf_counter() - start)
    return size / statistics.median(seconds)


# ------------------------------------------------------------------------------------------------
# paper


def passes(machine: Machine, tokens: int = 512) -> list[str]:
    """Multiply-adds and time."""
    rows = []
    for shape in LARGE:
        flop = [shape.forward(tokens), shape.taylor(tokens), shape.leave_one_out(tokens)]
        hours = [flop[1] * n / machine.rate / 3600 for n in (1e3, 1e4, 1e9)]
        cells = [number(f / 1e12) for f in flop] + [number(h) for h in hours]
        rows.append([shape.name, number(shape.parameters / 1e9), *cells])
    head = [
        "model",
        "parameters, 10^9",
        "forward, TFLOP",
        "`taylor`, TFLOP",
        "`leave_one_out`, TFLOP",
    ]
    head += [f"hours, {n} examples" for n in ("10^3", "10^4", "10^9")]
    return table(head, rows)


def memory(machine: Machine, examples: int = 8, tokens: int = 512) -> list[str]:
    """Bytes of the model in bf16, of a batch, of what scorers add up, and of a cut on disk."""
    rows = []
    for shape in LARGE:
        batch = examples * tokens
        sizes = [
            2 * shape.parameters,
            batch * shape.kept(2),
            batch * shape.checkpointed(2),
            batch * shape.vocabulary * (2 + 4 + 4),
            shape.surgeon(),
            shape.surgeon(1),
            2 * shape.largest,
        ]
        share = math.ceil(2 * shape.parameters / machine.memory)
        rows.append([shape.name, *[number(s / 1e9) for s in sizes], str(share)])
    head = [
        "model",
        "weights",
        "kept, a batch",
        "checkpointed",
        "logits of it",
        "`surgeon`, 8 blocks",
        "1 block",
    ]
    return table([*head, "largest tensor", "devices for the weights"], rows)


def limits(machine: Machine, tokens: int = 512) -> list[str]:
    """From where on what is the bottleneck."""
    rows = []
    for shape in LARGE:
        flop, once = shape.taylor(tokens, recomputed=True), shape.taylor(tokens)
        moved = 2 * 2 * shape.parameters  # read for the forward and again for the backward pass
        sizes = [
            moved / speed * machine.rate / (flop / tokens) for speed in (machine.link, machine.disk)
        ]
        processes = once / machine.rate / (tokens * TOKEN / 1e9)
        rows.append(
            [
                shape.name,
                *[number(s) for s in sizes],
                number(ROOM / (ROW * shape.units)),
                number(processes),
                number(2 * shape.parameters / machine.cut / 60),
            ]
        )
    head = [
        "model",
        "tokens a batch, main memory",
        "tokens a batch, disk",
        "examples whose rows are kept",
    ]
    return table([*head, "processes", "minutes to cut on disk"], rows)


def number(value: float) -> str:
    """Two or three digits that count.

    >>> number(0.01234), number(12.34), number(123456.0)
    ('0.012', '12', '120,000')
    """
    digits = 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):,.{max(digits, 0)}f}"


# ------------------------------------------------------------------------------------------------
# the page's blocks


def paper(records: Path) -> str:
    """The three tables, for the assumed machine; cuts on disk at the rate that was measured."""
    measured = json.loads((records / "streaming.json").read_text())
    seconds = statistics.median(
        row["seconds"] for row in measured["rows"] if row["way"] == "streamed"
    )
    machine = Machine(cut=measured["bytes"] / seconds)
    return "\n".join(
        [
            (
                f"*Computed for one accelerator of {machine} (assumed, not measured). FLOP an"
                " example of 512 tokens, and hours of one such accelerator for `taylor`:*"
            ),
            "",
            *passes(machine),
            "",
            "*GB, in bf16; a batch is 8 examples of 512 tokens:*",
            "",
            *memory(machine),
            "",
            (
                "*Beyond which size the accelerator waits for something else, and how long a cut on"
                f" disk takes at the {machine.cut / 1e9:.2f} GB/s of the measurement above, where"
                " copying and hashing were the limit:*"
            ),
            "",
            *limits(machine),
        ]
    )


def checked(records: Path) -> str:
    """Measured over paper."""
    record = json.loads((records / "scale-cpu.json").read_text())
    rows = []
    for row in record["rows"]:
        bytes_ = f"{row['kept'] / row['kept_on_paper']:.2f}" if "kept" in row else ""
        cells = [
            number(row["flop"] / 1e9),
            number(row["rate"] / 1e9),
            f"{row['measured_over_paper']:.2f}",
            bytes_,
        ]
        rows.append(
            [row["shape"], f"`{row['way']}`" if row["way"] != "forward" else "forward", *cells]
        )
    about = (
        f"{record['hardware']['processor']}, {record['hardware']['threads']} threads, fp32; random"
        f" Llamas, batches of {record['examples']} examples of {record['tokens']} tokens. SHA-256"
        f" of data: {record['digest_bytes_per_second'] / 1e9:.2f} GB/s."
    )
    head = [
        "layers x width",
        "pass",
        "GFLOP on paper",
        "GFLOP/s of products",
        "time / paper",
        "kept bytes / paper",
    ]
    return "\n".join([about, "", *table(head, rows, left=2)])


def streamed(records: Path) -> str:
    """A cut on disk beside one in memory, by ``streaming.py``."""
    record = json.loads((records / "streaming.json").read_text())
    rows = []
    for way in ("streamed", "loaded"):
        runs = [row for row in record["rows"] if row["way"] == way]
        beyond = max(row["peak"] - row["libraries"] for row in runs)
        seconds = statistics.median(row["seconds"] for row in runs)
        cells = [
            f"{beyond / 1e6:,.0f}",
            f"{beyond / record['largest_shard']:.2f}",
            f"{seconds:.1f}",
        ]
        rows.append([way, *cells, f"{max(row['peak'] for row in runs) / 1e6:,.0f}"])
    equal = all(row["equal"] for row in record["rows"] if "equal" in row)
    about = (
        f"A random Llama of {record['parameters'] / 1e9:.2f} billion parameters in bf16,"
        f" {record['bytes'] / 1e9:.2f} GB in {record['shards']} shards, the largest"
        f" {record['largest_shard'] / 1e6:,.0f} MB; a random half of the KV groups goes."
        f" {record['hardware']['processor']}, {record['hardware']['threads']} threads. Both folders"
        f" {'are equal byte for byte' if equal else 'DIFFER'}, in every round."
    )
    head = [
        "way",
        "MB at most, beyond the libraries",
        "of the largest shard",
        "seconds",
        "MB at most, in all",
    ]
    return "\n".join([about, "", *table(head, rows)])


def shared(records: Path) -> str:
    """Processes that share the scoring, by ``processes.py``."""
    record = json.loads((records / "processes.json").read_text())
    rows = [
        [
            f"`{row['scorer']}`",
            str(row["processes"]),
            f"{row['examples_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['efficiency']:.2f}",
            f"{row['difference']:.1e}",
        ]
        for row in record["rows"]
    ]
    wanted = record["settings"]
    about = (
        f"{record['hardware']['processor']}; a random Llama of {wanted['layers']} layers,"
        f" {wanted['width']} wide; {wanted['batches']} batches of {wanted['batch']} examples of"
        f" {wanted['tokens']} tokens; a thread a process."
    )
    head = ["scorer", "processes", "examples/s", "faster", "efficiency", "largest difference"]
    return "\n".join([about, "", *table(head, rows)])


if __name__ == "__main__":
    main()
