"""Which kind of attention a translator can spare: BLEU without heads of all kinds, and of one kind
alone.

    python benchmarks/translation.py --data path/to/multi30k --work runs/translation --small
    python benchmarks/translation.py --data path/to/multi30k --work runs/translation --device cuda
    python benchmarks/translation.py --figure      # docs/translation.md, from the records

The recipe ``translation`` makes and trains the model once (``--work`` keeps it). Then heads go by
the scores of ``--scorer``, of all kinds together or of one kind alone, the others whole, down to a
head a layer; the cut model is measured as it is, refitted (``lstsq``), trained on for a short while,
and refitted, then trained on for longer, by the true translations alone or with what the whole
model says beside them (``distilled``, as the recipe has it). The whole model is trained on as long
each time, so that training is not taken for recovery.

A seed is another draw of calibration rows and another order of batches. Scorers are to be chosen by
validation rows; test rows only report. A row of the record is written as soon as it is there, and a
run that is started again goes on after the last one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headprune as hp
from headprune.core.paired import Answers, paired_drops
from headprune.recipes.reading import locate
from headprune.recipes.schema import Recipe, RecoverStep
from headprune.recipes.validate import load_recipe
from headprune.run.recovering import recover_once
from headprune.run.subject import EVALUATION_BATCH, Subject
from headprune.run.surroundings import git_commit
from headprune.sweep.base import open_base, ready_base

sys.path.insert(0, str(Path(__file__).resolve().parent))
import studies
from determinism import reproducible
from pages import publish
from studies import RECORDS, ROOT

PAGE = "translation.md"
SPLITS = ("validation", "test")
#: Parts of the model that lose heads, by kind of attention, and how the page calls them.
PARTS = {"all": "all", "self": "encoder", "causal": "decoder", "cross": "between them"}
#: Shares of the heads that stay; of a kind alone, a head a layer is the last. 10 of 48 is what
#: Voita et al. leave.
SHARES = {
    "all": (0.75, 0.5, 0.33),
    "self": (0.75, 0.5, 0.25, 10 / 48),
    "causal": (0.75, 0.5, 0.25),
    "cross": (0.75, 0.5, 0.25),
}
LSTSQ = RecoverStep(
    method="lstsq", settings={"feed_forward": True, "precision": "float32", "ridge": 0.3}
)
_SHORT: dict[str, Any] = {
    "epochs": 1,
    "learning_rate": 3e-4,
    "warmup_ratio": 0.1,
    "schedule": "cosine",
}
_LONGER: dict[str, Any] = {**_SHORT, "epochs": 4, "learning_rate": 1e-3}
#: What is done after the cut; ``None`` stands for the recipe's own steps.
WAYS: dict[str, Sequence[RecoverStep] | None] = {
    "cut": [],
    "refitted": [LSTSQ],
    "trained on": [RecoverStep(method="finetune", batch_size=128, settings=_SHORT)],
    "trained longer": [LSTSQ, RecoverStep(method="finetune", settings=_LONGER)],
    "distilled": None,
}
#: Those that train: the whole model is trained as long for comparison.
TRAINED = ("trained on", "trained longer", "distilled")
#: BLEU of the whole model of the full size on test rows.
AIM = 0.35
#: The small size of the recipe's own comment, trained three times as long.
SMALL = [
    "model.config.encoder_layers=2", "model.config.decoder_layers=2", "model.config.d_model=128",
    "model.config.ffn_dim=256", "model.config.dropout=0.0", "data.vocabulary=3000", "train.epochs=6",
    "train.batch_size=32", "train.learning_rate=2e-3",
]  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with train, validation and test files")
    parser.add_argument("--work", type=Path, help="folder for the trained model")
    studies.add_device(parser)
    parser.add_argument("--small", action="store_true", help="2 + 2 layers, minutes on a CPU")
    parser.add_argument("--set", nargs="+", default=[], help="more settings of the recipe")
    parser.add_argument("--scorer", default="taylor")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=1)
    studies.add_minutes(parser)
    parser.add_argument(
        "--out", type=Path, help="default benchmarks/records/translation-SIZE-DEVICE.json"
    )
    parser.add_argument(
        "--figure", action="store_true", help="only write the page from the records"
    )
    parser.add_argument(
        "--records", type=Path, default=RECORDS, help="with --figure: where records are"
    )
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="with --figure: where to write"
    )
    args = parser.parse_args(argv)
    if not args.figure and None in (args.data, args.work):
        parser.error("--data and --work must be given, or --figure")
    return args


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs what is missing from the record, or writes the page; returns the path that was
    written."""
    args = arguments(argv)
    if args.figure:
        return draw(args.records, args.docs)
    over = studies.clock(args)
    settings = [
        *(SMALL if args.small else []),
        f"data.path={args.data}",
        f"device={args.device}",
        *args.set,
    ]
    recipe = load_recipe(locate("translation"), settings)
    with reproducible(
        torch.device(args.device)
    ):  # so that the next machine trains the same weights
        base = ready_base(recipe, args.work, lambda line: print(line, file=sys.stderr))
    subject = open_base(base, args.work, recipe)
    size = "small" if args.small else "full"
    out: Path = args.out or RECORDS / f"translation-{size}-{args.device}.json"
    whole = judged(subject, subject.model)
    same = about(size, subject, whole)
    out = studies.aside(out, same) if args.aside else out
    data = subject.recipe.model_dump(mode="json")
    data["data"]["path"] = args.data.name  # where it lay is nobody's business
    device = next(subject.model.parameters()).device
    record = studies.begun(out, same, device, git_commit=git_commit(), recipe=data)
    for row in studies.in_time(missing(args, recipe, subject, whole, record["rows"]), over):
        record["rows"].append(row)
        studies.keep(record, out)
        print(
            *list(row.values())[:5],
            *(f"{100 * row[split]['bleu']:.2f}" for split in SPLITS),
            flush=True,
        )
    print(out)
    return out


def about(size: str, subject: Subject, whole: dict[str, Answers]) -> dict[str, Any]:
    """What a record must agree on before rows are added to it: model, rows and ways."""
    sites = hp.find_sites(subject.model)
    return {
        "benchmark": "translation",
        "size": size,
        "weights": studies.weights_of(subject.model),
        "heads": {
            kind: sum(len(s.heads) for s in sites if s.kind == kind) for kind in list(PARTS)[1:]
        },
        "layers": {kind: sum(s.kind == kind for s in sites) for kind in list(PARTS)[1:]},
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "judged": {split: len(whole[split].counts) for split in SPLITS},
        "base": {split: whole[split].value for split in SPLITS},
        "calibration": subject.recipe.data.calibration,
        "ways": {
            way: described(subject.recipe.recover if steps is None else steps)
            for way, steps in WAYS.items()
        },
    }


def described(steps: Sequence[RecoverStep]) -> list[dict[str, Any]]:
    """What a way does, for the record."""
    return [
        {"method": step.method, "batch_size": step.batch_size, **step.settings} for step in steps
    ]


def missing(
    args: argparse.Namespace,
    recipe: Recipe,
    subject: Subject,
    whole: dict[str, Answers],
    rows: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """What the record lacks, one draw after the other."""
    done = {(row["scorer"], row["part"], row["kept"], row["way"], row["seed"]) for row in rows}
    sites = hp.find_sites(subject.model)
    for seed in range(args.seeds):
        mine = replace(
            subject,
            data=subject.data.redrawn(recipe.data.calibration, seed),
            recipe=recipe.model_copy(update={"seed": seed}),
        )
        scores: hp.HeadScores | None = None
        for part, kept, way in wanted(args, sites):
            if (args.scorer, part, kept, way, seed) in done:
                continue
            small = copy.deepcopy(subject.model)
            whole_one = (part, kept) == ("all", sum(len(s.heads) for s in sites))
            if not whole_one:
                if scores is None:
                    batches = mine.data.batches("calibration", 32)
                    scores = hp.score(subject.model, batches, args.scorer, progress=False)
                budget = hp.Budget(keep_heads=kept)
                hp.prune_(
                    small,
                    hp.select(scores, budget if part == "all" else {part: budget}, "global_topk"),
                )
            steps = WAYS[way]
            for step in recipe.recover if steps is None else steps:
                if not (whole_one and step.method == "lstsq"):  # nothing was cut
                    recover_once(mine, small, step)
            found = judged(subject, small)
            row: dict[str, Any] = {
                "scorer": args.scorer,
                "part": part,
                "kept": kept,
                "way": way,
                "seed": seed,
            }
            for split in SPLITS:
                (drop,) = paired_drops(whole[split], [found[split]])
                row[split] = {
                    "bleu": found[split].value,
                    "drop": drop.value,
                    "low": drop.low,
                    "high": drop.high,
                }
            yield {**row, **studies.stamp()}


def wanted(
    args: argparse.Namespace, sites: Sequence[hp.AttentionSite]
) -> Iterator[tuple[str, int, str]]:
    """Part, heads kept of it, and way; first the whole model, trained on."""
    heads = sum(len(s.heads) for s in sites)
    yield from (("all", heads, way) for way in TRAINED if way in args.ways)
    for part in args.parts:
        mine = [s for s in sites if part in ("all", s.kind)]
        heads = sum(len(s.heads) for s in mine)
        counts = [round(share * heads) for share in SHARES[part]] + (
            [] if part == "all" else [len(mine)]
        )
        for kept in sorted({n for n in counts if n >= len(mine)}, reverse=True):
            yield from ((part, kept, way) for way in args.ways)


def judged(subject: Subject, model: torch.nn.Module) -> dict[str, Answers]:
    """What the model's translations of both splits are worth, sentence by sentence."""
    found = {}
    for split in SPLITS:
        quality = subject.evaluate(model, split, subject.data.evaluation(split, EVALUATION_BATCH))
        found[split] = Answers(quality.metric, np.array(quality.amounts), np.array(quality.counts))
    return found


# ----------------------------------------------------------------------------------------------
# page


def draw(records: Path, docs: Path) -> Path:
    """Writes the page from every record there is."""
    found = studies.records_in(records, "translation")
    return publish(docs / PAGE, lead(found), page(found))


def lead(records: list[dict[str, Any]]) -> str:
    """What was found, and for whom: half of the heads, of each kind alone."""
    words = []
    for record in records[:1]:
        for part, name in PARTS.items():
            of = sum(record["heads"].values()) if part == "all" else record["heads"][part]
            for way in ("cut", "distilled"):
                rows = [
                    row
                    for row in record["rows"]
                    if (row["part"], row["kept"], row["way"]) == (part, of // 2, way)
                ]
                if rows:
                    lost = 0 - statistics.fmean(100 * row["test"]["drop"] for row in rows)
                    words.append(f"{name}, {way}: {lost:+.1f}")
    return (
        "For those who cut an encoder-decoder: which kind of attention can spare heads? Points of"
        " BLEU gained or lost when half of the heads of one kind are removed, right after the cut"
        f" and after distillation. {'; '.join(words)}."
    )


def page(records: list[dict[str, Any]]) -> str:
    """Markdown; every number is computed from the records."""
    lines = [
        "# Which kind of attention a translator can spare",
        "",
        (
            "Written by `python benchmarks/translation.py --figure` from records in"
            " `benchmarks/records`; do not edit."
        ),
        "",
        (
            "English to German on Multi30k, a Transformer of our own attention, BLEU by sacrebleu"
            " on test rows. Heads go"
        ),
        (
            "by their scores, of all kinds or of one kind alone, down to a head a layer. In"
            " brackets: points of BLEU above"
        ),
        (
            "(+) or below (-) the whole model before any training after the cut, with the 95 %"
            " interval of a paired"
        ),
        (
            "bootstrap over sentences. One draw of calibration rows and order of batches, or, where"
            " ± is given, mean and"
        ),
        (
            "standard deviation over several, with the widest ends of their intervals. Of"
            " others' models: Voita et"
        ),
        (
            "al. 2019 lose 0.15 BLEU without 38 of 48 encoder heads, by learned gates; Michel et"
            " al. 2019 take 20 % of all"
        ),
        (
            "heads with no noticeable loss, and of self-attention more than between encoder and"
            " decoder."
        ),
    ]
    for record in records:
        heads, base = record["heads"], record["base"]
        lines += [
            "",
            (
                f"## {record['layers']['self']} + {record['layers']['causal']} layers,"
                f" {record['parameters'] / 1e6:.1f} M parameters,"
                f" {record['hardware'].get('gpu', record['hardware']['device'])}"
            ),
            "",
            (
                f"{sum(heads.values())} heads; whole: {100 * base['test']:.2f} BLEU on"
                f" {record['judged']['test']} test rows, {100 * base['validation']:.2f} on"
                f" {record['judged']['validation']} validation rows."
            ),
        ]
        lines += ["", "What is done after the cut:", ""]
        measured = {row["way"] for row in record["rows"]}
        lines += [
            f"- *{way}*: {in_words(steps)}"
            for way, steps in record["ways"].items()
            if way in measured
        ]
        every = [
            row
            for row in record["rows"]
            if (row["part"], row["kept"]) == ("all", sum(heads.values()))
        ]
        for way in TRAINED:
            if dense := [row for row in every if row["way"] == way]:
                lines += ["", f"All heads, {way} as long, nothing refitted: {cell(dense)}."]
        for scorer in dict.fromkeys(row["scorer"] for row in record["rows"]):
            rows = [row for row in record["rows"] if row["scorer"] == scorer and row not in every]
            ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
            lines += [
                "",
                f"| heads by `{scorer}` | kept | {' | '.join(ways)} |",
                "| --- | ---: |" + " ---: |" * len(ways),
            ]
            for part, name in PARTS.items():
                for kept in sorted(
                    {row["kept"] for row in rows if row["part"] == part}, reverse=True
                ):
                    found = [
                        cell(
                            [
                                r
                                for r in rows
                                if (r["part"], r["kept"], r["way"]) == (part, kept, way)
                            ]
                        )
                        for way in ways
                    ]
                    of = sum(heads.values()) if part == "all" else heads[part]
                    lines.append(f"| {name} | {kept} of {of} | {' | '.join(found)} |")
    return (
        "\n".join([*lines, *full_size(records), *studies.no_gpu(r["hardware"] for r in records)])
        + "\n"
    )


def full_size(records: list[dict[str, Any]]) -> list[str]:
    """What the recipe's own size is aimed at, and whether it was run."""
    found = [100 * record["base"]["test"] for record in records if record["size"] == "full"]
    said = f"reached {max(found):.2f}." if found else "has not been run yet."
    return [
        "",
        (
            f"The recipe's full size (6 + 6 layers, target {100 * AIM:.0f} BLEU before the cut)"
            f" {said}"
        ),
    ]


def in_words(steps: list[dict[str, Any]]) -> str:
    """A way, as the record has it."""
    told = []
    for step in steps:
        settings = ", ".join(f"{name} {value}" for name, value in step.items() if name != "method")
        told.append(f"`{step['method']}` ({settings})")
    return ", then ".join(told) or "nothing"


def cell(rows: list[dict[str, Any]]) -> str:
    """BLEU and the points against the whole: of several draws the mean, and their intervals' ends
    farthest out."""
    if not rows:
        return "-"
    bleu, lost, low, high = (
        [100 * row["test"][key] for row in rows] for key in ("bleu", "drop", "low", "high")
    )
    gained, least, most = (0 - points for points in (statistics.fmean(lost), max(high), min(low)))
    return f"{studies.spread(bleu, 2)} ({gained:+.2f} [{least:+.2f}, {most:+.2f}])"


if __name__ == "__main__":
    studies.leave(main())
