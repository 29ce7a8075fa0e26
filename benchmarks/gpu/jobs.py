"""The jobs of the GPU study, most telling first. Standard library only: the queue reads this on a
bare machine."""

from __future__ import annotations

from dataclasses import dataclass, field

TRADEOFF = (
    "benchmarks/tradeoff.py --device {device} --model {model} --work {work} --aside --minutes"
    " {minutes}"
)
#: A rehearsal trains on a few rows for a moment and judges by a few.
TINY_TRADEOFF = (
    "--small --seeds 1 --calibration 16 --epochs 0.05 --judged 16 --seconds 0.02 --budgets 54 24"
)
WAYS = '--ways surgeon "surgeon + lstsq" "surgeon + finetune" taylor random'
BUDGETS = "--budgets 54 36 24 14 --seeds 3"
SST2 = (
    f"{TRADEOFF} --task sst2 --data {{data}}/sst2 --out {{records}}/tradeoff-sst2-{{device}}.json"
)
TREC = (
    f"{TRADEOFF} --task trec --data {{data}}/trec --out {{records}}/tradeoff-trec-{{device}}.json"
)
ONE_BUDGET = (
    "benchmarks/one_budget.py --task sst2 --data {data} --work {work} --device {device} --minutes"
    " {minutes} --out {records}/one-budget-sst2-{device}.json"
)
#: Folder of the data where latency tables of another machine lie.
TABLES = "tables"
#: The encoder travels in fp16, and is trained in fp32.
ENCODER = "model.path={model} model.dtype=float32"


@dataclass(frozen=True)
class Job:
    """One command of the study.

    Args:
        name: Of the job, its log and its entry in the queue's record.
        command: Python's arguments. ``{device}``, ``{data}``, ``{model}``, ``{work}``,
            ``{records}`` and ``{minutes}`` are filled in.
        record: The record that it writes, in ``{records}``.
        most: Seconds after which it is ended.
        task: The task whose rows it reads; it needs them in the pack.
        last_row: Seconds before its end in which a study begins no row: as long as its longest row
            may take.
        least: It does not begin with fewer seconds before the deadline: it could not end, or would
            give nothing.
        tiny: What a rehearsal adds to the command.
        environment: Variables, with the same fields filled in.
        tiny_environment: Variables of a rehearsal.
    """

    name: str
    command: str
    record: str
    most: int
    least: int
    task: str = ""
    last_row: int = 20
    tiny: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    tiny_environment: dict[str, str] = field(default_factory=dict)


JOBS = (
    Job(
        "judged",
        "benchmarks/gpu/at_once.py --device {device} --data {data} --model {model} --work {work}"
        " --records {records} --minutes {minutes}",
        "regret-sst2-{device}.json",
        most=560,
        least=120,
        task="sst2",
        last_row=90,
        tiny="--tiny",
    ),
    Job(
        "correct",
        "-m pytest -q -p no:cacheprovider -W default tests/gpu",
        "gpu-correct.json",
        most=420,
        least=60,
        environment={"HEADPRUNE_GPU_RECORD": "{records}/gpu-correct.json"},
        tiny_environment={"HEADPRUNE_GPU_TESTS": "cpu"},
    ),
    Job(
        "quality",
        f"{SST2} --parts quality {WAYS} {BUDGETS}",
        "tradeoff-sst2-{device}.json",
        most=240,
        least=90,
        task="sst2",
        tiny=TINY_TRADEOFF,
    ),
    Job(
        "speed",
        f"{SST2} --parts sizes gpu --seconds 0.6 {BUDGETS}",
        "tradeoff-sst2-{device}.json",
        most=180,
        least=90,
        task="sst2",
        last_row=40,
        tiny=TINY_TRADEOFF,
    ),
    Job(
        "budget",
        f"{ONE_BUDGET} --batch 1024 --length 128 --dtype bfloat16 --seconds 2 --draws 0 1 2 --speedups"
        f" 1.1 1.3 1.6 2 --refit-rows 512 --set {ENCODER}",
        "one-budget-sst2-{device}.json",
        most=300,
        least=90,
        task="sst2",
        last_row=30,
        tiny=(
            "--calibration 16 --refit-rows 16 --batch 2 --length 8 --seconds 0.01 --draws 0"
            " --speedups 1.01 --set"
            f" {ENCODER} train.epochs=0.05"
        ),
    ),
    Job(
        "shapes",
        "benchmarks/gpu/shapes.py --device {device} --minutes {minutes} --out"
        " {records}/gpu-shapes.json",
        "gpu-shapes.json",
        most=300,
        least=60,
        last_row=40,
        tiny="--small --seconds 0.02 --codes eager reduce-overhead",
    ),
    Job(
        "scoring",
        "benchmarks/scoring_cost.py --device {device} --only throughput leave_one_out --aside"
        " --out {records}/scoring-throughput-{device}.json",
        "scoring-throughput-{device}.json",
        most=180,
        least=100,
        tiny=(
            "--width 48 --middle 48 --vocabulary 200 --tokens 8 --examples 8 --rounds 1"
            " --ablation-rounds 1 --small 1 --largest 2 --threads 1"
        ),
    ),
    Job(
        "native",
        "benchmarks/native.py --device {device} --processes 3 --seconds 0.3 --width 768 --layers 12"
        " --shapes 32x128 32x512 --aside --minutes {minutes} --out {records}/native-{device}.json",
        "native-{device}.json",
        most=180,
        least=120,
        tiny="--small --processes 2 --threads 1",
    ),
    Job(
        "trec",
        f"{TREC} --parts quality sizes gpu --seconds 0.4 {WAYS} {BUDGETS}",
        "tradeoff-trec-{device}.json",
        most=420,
        least=90,
        task="trec",
        last_row=60,
        tiny=TINY_TRADEOFF,
    ),
    Job(
        "translation",
        "benchmarks/translation.py --device {device} --data {data}/multi30k --work {work} --aside"
        " --minutes {minutes} --out {records}/translation-full-{device}.json",
        "translation-full-{device}.json",
        most=900,
        least=420,
        task="multi30k",
        tiny=(
            "--small --ways cut --parts cross --set train.epochs=1 data.calibration=8"
            " data.vocabulary=300 model.config.d_model=32 model.config.ffn_dim=32"
            " train.batch_size=8"
        ),
    ),
)
