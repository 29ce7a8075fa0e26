"""Who takes part: a program, an environment and settings each. A new peer is an entry here and a
program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The environment that the runner itself runs in.
OWN = "headprune"
REFERENCE = "headprune"
#: Trained after its cut: compared with peers that had as much training.
TRAINED = "headprune, trained"
TITLES = {
    "sst2": "MiniLM on SST-2",
    "trec": "MiniLM on TREC",
    "hwu64": "MiniLM on HWU64",
    "stsb": "MiniLM on STS-B",
    "digits": "a small ViT on digits",
    "stories": "a small Llama on stories",
}
#: What quality is, where it is not the accuracy of a class.
METRICS = {"stsb": "Spearman correlation", "stories": "next-token accuracy"}
TEXT, IMAGE, LANGUAGE = ("sst2", "trec", "hwu64", "stsb"), ("digits",), ("stories",)
EVERY = TEXT + IMAGE + LANGUAGE
#: Tasks of encoders: their models are fine-tuned here, and have as many keys and values as queries.
#: What trains, and what other tools cut, has a program for these alone.
ENCODERS = TEXT + IMAGE
#: What a reader must know of a task's rows.
REMARKS = {
    "stories": "The model was trained on these texts: they compare models, and say nothing of"
    " other texts. Its share of right next tokens is taken row by row, then averaged.",
    "stsb": "A model reads both sentences together and gives one number. The trained rows, those"
    " called distilled too, are trained on the grades alone: a single number is no distribution to"
    " distil.",
}
#: From this version of ONNX's operators on, attention is one, which ONNX Runtime runs faster than
#: its parts.
ATTENTION_AS_ONE = 23


def is_share(kept: float) -> bool:
    """Whether a budget is a share of the layers' multiply-adds, not a number of heads."""
    return kept < 1


def budget(kept: float | None, heads: int | None = None) -> str:
    """What is kept, in words: heads, or below 1 a share of the layers' multiply-adds.

    >>> budget(24), budget(24, 72), budget(0.42), budget(None)
    ('24 heads', '24 of 72 heads', '42 % of the multiply-adds', 'all heads')
    """
    if kept is None:
        return "all heads"
    if is_share(kept):
        return f"{100 * kept:g} % of the multiply-adds"
    return f"{kept} heads" if heads is None else f"{kept} of {heads} heads"


@dataclass(frozen=True)
class Peer:
    """One way to a smaller or faster model.

    Args:
        name: In the table.
        program: File of ``programs``, without its ending.
        about: A line for the page.
        environment: One of ``environments.py``; by default the runner's own.
        settings: For the program.
        tasks: That it can do.
        given: What it starts from in place of the base model: ``onnx``, or ``headprune`` for what
            that peer made of the same rows with as many heads, or ``headprune.onnx``.
        cuts: Has a row for every number of heads.
        shares: Has a row for every share of the multiply-adds, of heads and neurons together. What
            has neither has one row, for the whole model.
        draws: At most so many draws of calibration rows, where its result does not depend on them
            or training costs.
        trains: How many times the base model's training it has had in all, the base model's own
            counted; 0 is none of its own.
        even: Keeps as many heads in every layer, so that it has rows where that divides.
        accurate: Why it may be better than ours, other than by training more often, and what
            would change that; printed where it is.
        faster: The same of its speed.
    """

    name: str
    program: str
    about: str
    environment: str = OWN
    settings: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = EVERY
    given: str | None = None
    cuts: bool = True
    shares: bool = False
    draws: int | None = None
    trains: int = 0
    even: bool = False
    accurate: str = ""
    faster: str = ""

    def meets(self, kept: float | None) -> bool:
        """Whether it has rows of such a budget: heads, a share, or None for the whole model."""
        if kept is None:
            return not (self.cuts or self.shares)
        return self.shares if is_share(kept) else self.cuts


_REFIT = "`lstsq` with the feed-forward"
#: Of a share of the multiply-adds.
_BOTH = {"scorer": "ladder", "selector": "repriced", "ridge": None}
_SURGEON = {"scorer": "surgeon", "selector": "global_topk", "of_share": _BOTH}
_TAYLOR = {"scorer": "taylor", "selector": "global_topk", "of_share": _BOTH}
_WHOLE = "it removes nothing. What would change it: removing less, or training after the cut"
_INT8 = (
    "it multiplies in 8 bits in every linear layer{}. What would change it: both together, see"
    " below"
)
_ENGINE = "it runs in another engine. What would change it: ours in the same one, see below"
_SMALLER = (
    "it has fewer layers, and each costs time beside its multiply-adds. What would change it:"
    " layers taken out whole, which cutting heads does not do"
)
_FUSED = (
    "ONNX Runtime's optimizer has fused its file, attention and more. What would change it: ours"
    " exported and fused in the same way, which is not measured here"
)

PEERS = {
    peer.name: peer
    for peer in (
        Peer("unpruned", "unpruned", "the base model", cuts=False, draws=1),
        Peer(
            "headprune",
            "ours",
            f"`surgeon`, `global_topk`, {_REFIT}: what docs/pipelines.md advises for classifiers,"
            " by validation rows; of a share of the work, `ladder` and `repriced`",
            settings=_SURGEON,
            shares=True,
        ),
        Peer(
            "headprune, not refitted",
            "ours",
            "`surgeon` and `global_topk` alone: heads are chosen and cut, and nothing else is"
            " touched",
            settings={**_SURGEON, "refit": False},
        ),
        Peer("headprune, taylor", "ours", f"`taylor`, `global_topk`, {_REFIT}", settings=_TAYLOR),
        Peer(
            TRAINED,
            "ours",
            "the cut of *headprune*, then trained as the base model was, with its logits: twice in all",
            tasks=ENCODERS,
            settings={**_TAYLOR, "distill": 1.0},
            shares=True,
            draws=1,
            trains=2,
        ),
        Peer(
            "flap2024",
            "ours",
            "FLAP from our parts: heads only, or with neurons for a share of the multiply-adds",
            settings={"preset": "flap2024"},
            shares=True,
        ),
        Peer(
            "ziplm2023",
            "ours",
            "ZipLM from our parts: units in the order of `obs`, each level at its measured price,"
            f" `knapsack`, {_REFIT}",
            settings={"scorer": "ladder", "order": "obs", "selector": "knapsack", "ridge": None},
            cuts=False,
            shares=True,
        ),
        Peer(
            "kwon2022",
            "ours",
            "Kwon et al. from our parts: heads only, or with neurons for a share of the multiply-adds,"
            " then by `knapsack` and without the rearrangement, which needs the curvature between all"
            " neurons",
            settings={"preset": "kwon2022", "of_share": {"selector": "knapsack"}},
            shares=True,
            faster=(
                "it may take a layer's last head, where no attention runs then. What would change"
                " it: `min_heads=0`, with which ours may, too"
            ),
        ),
        Peer(
            "Transformers 4 prune_heads",
            "bertology",
            "`prune_heads` with the scores of the bertology example, a tenth at a time",
            environment="transformers4",
            tasks=ENCODERS,
            settings={"step": 0.1},
        ),
        Peer(
            "Transformers 5 prune_heads",
            "bertology",
            "the same program on today's Transformers",
            tasks=ENCODERS,
            settings={"step": 0.1},
            draws=1,
        ),
        Peer(
            "TextPruner",
            "text_pruner",
            "its own iterative scores, as many heads a layer on average, and all neurons; of a"
            " share of the work, neurons too",
            environment="textpruner",
            settings={"iterations": 8},
            tasks=TEXT,
            shares=True,
            even=True,
        ),
        Peer(
            "Torch-Pruning, uniform",
            "torch_pruning_heads",
            "Taylor importance, the same number of heads in every layer",
            environment="torch-pruning",
            tasks=ENCODERS,
            settings={"global": False},
            shares=True,
            even=True,
        ),
        Peer(
            "Torch-Pruning, global",
            "torch_pruning_heads",
            "Taylor importance over the whole model",
            environment="torch-pruning",
            tasks=ENCODERS,
            settings={"global": True},
            shares=True,
        ),
        Peer(
            "onnxsim",
            "onnxsim_heads",
            "heads of the ONNX file, by the size of their weights",
            environment="onnx",
            tasks=ENCODERS,
            settings={"importance": "weights", "fuse": False},
            given="onnx",
            draws=1,
            even=True,
        ),
        *(
            Peer(
                f"onnxsim, fused{', Wanda' if importance == 'wanda' else ''}",
                "onnxsim_heads",
                f"the same after ONNX Runtime has fused an older exporter's file, by {what}; run in"
                " ONNX Runtime",
                environment="onnx",
                tasks=ENCODERS,
                settings={"importance": importance, "fuse": True},
                draws=draws,
                even=True,
                faster=_FUSED,
            )
            for importance, what, draws in (
                ("weights", "weights", 1),
                ("wanda", "weights times activations", None),
            )
        ),
        Peer(
            "smaller architecture",
            "smaller",
            "fewer layers with as many multiply-adds, of the weights before any fine-tuning, then"
            " trained as the base model was: once in all",
            tasks=ENCODERS,
            settings={"distill": 0.0},
            shares=True,
            draws=1,
            trains=1,
            faster=_SMALLER,
        ),
        Peer(
            "smaller architecture, distilled",
            "smaller",
            "the same, twice as long, with the base model's logits",
            tasks=ENCODERS,
            settings={"distill": 1.0, "times": 2},
            shares=True,
            draws=1,
            trains=2,
            faster=_SMALLER,
        ),
        Peer(
            "PyTorch INT8",
            "torch_int8",
            "dynamic INT8 of linear layers",
            cuts=False,
            draws=1,
            accurate=_WHOLE,
            faster=_INT8.format(""),
        ),
        Peer(
            "headprune + PyTorch INT8",
            "torch_int8",
            "the same of our cut model",
            given="headprune",
            shares=True,
        ),
        *(
            Peer(
                f"{start}ONNX Runtime {title}",
                "onnx_runtime",
                f"{about}{', of our cut model' if start else ''}",
                environment="onnx",
                settings={"way": way, "batches": 8, "opset": ATTENTION_AS_ONE},
                given="headprune.onnx" if start else "onnx",
                cuts=bool(start),
                shares=bool(start),
                draws=None if start or way == "static" else 1,
                accurate="" if start else _WHOLE,
                faster=(
                    ""
                    if start
                    else _ENGINE
                    if way == "fp32"
                    else _INT8.format(", and runs in another engine")
                ),
            )
            for start in ("", "headprune + ")
            for title, way, about in (
                ("fp32", "fp32", "the ONNX file as it is; of encoders, attention is one operator"),
                ("dynamic INT8", "dynamic", "dynamic INT8"),
                (
                    "static INT8",
                    "static",
                    "static INT8 with ranges of at most 256 calibration rows of all lengths",
                ),
            )
        ),
    )
}
