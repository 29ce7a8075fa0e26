"""Writes a file of every kind of stored value under its present schema version; files that are
there stay.

python -m tests.golden.make
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headprune.core.agreement import Agreement, Measure, Pair
from headprune.core.changed import ChangedAnswer, ChangedAnswers
from headprune.core.choice import Candidate, Choice
from headprune.core.codec import EMPTY, FrozenDict, Value
from headprune.core.heads import HeadId
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.core.plan import Budget, SiteBudget
from headprune.core.samples import Curvature, Samples
from headprune.report.difference import plan_difference, record_difference
from headprune.report.explanation import explain
from tests.report_records import costed, maps_of, pictures_of, plan_of, record_of, sweep_table

GOLDEN = Path(__file__).resolve().parent


def made() -> list[Value]:
    """One of every kind, small, with something in every field that a stored form can have."""
    record = costed(record_of(2, 4, 2))
    assert record.scores is not None
    n_units = sum(map(len, record.scores.values))
    samples = Samples.of([[row + unit / 8 for unit in range(n_units)] for row in range(3)])
    curvature = Curvature.of(
        [[float(row == unit) + 0.25 for unit in range(n_units)] for row in range(n_units)]
    )
    scores = replace(
        record.scores, samples=samples, curvature=curvature, notes=("made for the tests",)
    )
    record = replace(record, scores=replace(scores, samples=None, curvature=None))
    plan = replace(plan_of(scores), model=scores.model, notes=("made for the tests",))
    other = replace(
        plan_of(scores, 0.75), budget=None, budgets=(SiteBudget("causal", Budget(keep_heads=0.75)),)
    )
    measure = Measure(0.5, -0.25, 0.75)
    name = scores.sites[0].name
    table = LatencyTable(
        1.0, (SiteLatency(name, (0.1, 0.3, 0.4)),), 8, 128, "a processor", "float32", ("rounded",)
    )
    return [
        scores,
        plan,
        plan.mask,
        Budget(keep_macs=0.5, length=128),
        SiteBudget("*layers.0*", Budget(keep_heads=3)),
        HeadId(name, 3),
        scores.sites[0],
        record,
        sweep_table(),
        pictures_of(record, 1, 4),
        Agreement(
            ("taylor", "fisher"),
            2,
            n_units,
            0.95,
            (Pair(0, 1, measure, measure, measure),),
            ("few",),
        ),
        table,
        ChangedAnswers.of([ChangedAnswer(3, "a film", "good", "good", "bad")], 20, 5),
        explain(plan, replace(scores, samples=None)),
        plan_difference(plan, other, ("run", "other")),
        record_difference(record, replace(record, name="other", plan=other), ("run", "other")),
    ]


def made_by_auto() -> list[Value]:
    """Scores that say how `auto` chose their scorer, and a record with them: others have no such
    key."""
    settings = FrozenDict({"curvature": "logits"})
    candidates = (
        Candidate("surgeon", settings, True, 0.5, 0.0, 0.0, 0.0),
        Candidate("taylor", EMPTY, False, 0.75, 0.25, -0.125, 0.625),
        Candidate("obs", EMPTY, False, 0.75, 0.25, -0.125, 0.625, same_as="taylor"),
        Candidate("random", EMPTY, False, 1.5, 1.0, 0.5, 1.5),
    )
    choice = Choice(
        candidates,
        candidates[0].name,
        "keep 50 % of the heads",
        "lstsq",
        64,
        0.25,
        0.95,
        ("a note",),
    )
    record = record_of(2, 4, 2)
    assert record.scores is not None
    scores = replace(record.scores, scorer="surgeon", settings=settings, choice=choice)
    return [scores, replace(record, scores=scores)]


#: Under which the outcome of a sweep's run lies: digests look like this.
KEY = "0123456789abcdef" * 4


def made_by_sweeps() -> list[Value]:
    """One of every kind that the commands of a sweep leave for later ones."""
    from headprune.core.paired import Drop
    from headprune.core.scores import ModelFingerprint
    from headprune.recipes.validate import load_recipe
    from headprune.sweep.base import Base
    from headprune.sweep.pick import Pick, SettingVerdict
    from headprune.sweep.runs import SweepRun

    scores, table = record_of(2, 4, 2).scores, sweep_table()
    assert scores is not None
    values, drop = FrozenDict({"scorer": "taylor"}), Drop(0.01, 0.0, 0.02)
    looks = (
        SettingVerdict("taylor", 16.0, 0.01, True),
        SettingVerdict("fisher", 12.0, None, False),
    )
    recipe = FrozenDict(load_recipe("sst2-minilm").model_dump())
    rows = FrozenDict({"validation": {"rows": 5, "sha256": KEY}})
    return [
        Pick(
            0.01,
            0.95,
            "heads",
            table.metric,
            KEY,
            "taylor",
            plan_of(scores),
            16.0,
            drop,
            drop,
            0.02,
            looks,
        ),
        SweepRun(values, values, 1, recipe, KEY, "done", KEY, KEY),
        Base(
            KEY,
            FrozenDict({"config.json": KEY}),
            ModelFingerprint(KEY, KEY[::-1]),
            rows,
            FrozenDict({"loss": 0.5}),
        ),
    ]


def outcome(path: Path) -> Path:
    """What a model made of five rows of each split."""
    import numpy as np

    from headprune.sweep.outcome import SPLITS, ModelOutcome

    arrays = {f"{split}.amounts": np.array([1.0, 0.0, 1.0, 1.0, 0.0]) for split in SPLITS}
    arrays |= {f"{split}.losses": np.arange(5) / 8 for split in SPLITS}
    arrays |= {f"{split}.counts": np.ones(5) for split in SPLITS}
    sizes = FrozenDict({"heads": 4, "params": 10, "macs": 20, "kv": None})
    return ModelOutcome("accuracy", sizes, arrays, ("made for the tests",)).save(path, KEY)


def checkpoint(folder: Path) -> None:
    """A tiny Llama that lost a key/value group, with an input and what it gives for it."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    import headprune as hp

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32
    )
    model = LlamaForCausalLM(config).eval()
    hp.prune_heads_(model, {0: [0, 1]})
    hp.save_pretrained(model, folder)
    input_ids = torch.arange(8)[None]
    with torch.no_grad():
        logits = model(input_ids).logits
    save_file(
        {"input_ids": input_ids, "logits": logits},
        folder.with_name(f"{folder.name}.expected.safetensors"),
    )


def main(folder: Path = GOLDEN) -> None:
    for place, values in (
        (folder, made()),
        (folder / "sweep", made_by_sweeps()),
        (folder / "auto", made_by_auto()),
    ):
        for value in values:
            path = place / f"{type(value).__name__}-{value.SCHEMA_VERSION}.json"
            if not path.exists():
                print(value.save(path))
    if not (folder / "sweep" / "Outcome-1.safetensors").exists():
        print(outcome(folder / "sweep" / "Outcome-1.safetensors"))
    maps = folder / "AttentionMaps-1.safetensors"
    if not maps.exists():
        print(maps_of(record_of(1, 2), 1, 3).save(maps))

    from headprune.checkpoints.manifest import Manifest

    saved = folder / f"checkpoint-{Manifest.SCHEMA_VERSION}"
    if not saved.exists():
        checkpoint(saved)
        print(saved)


if __name__ == "__main__":
    main()
