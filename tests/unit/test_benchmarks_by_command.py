"""The README's command, run at tiny size for its record."""

import json
import random

import torch

import headprune as hp
from headprune.run import subject
from tests.command_line import done
from tests.scripts import benchmark
from tests.steady_clock import steady_levels
from tests.tiny_models import WORDS, bert

#: Little work, and times that count for nothing here.
QUICK = ["select.latency.seconds=0.01", "bench.seconds=0.01", "data.calibration=12"]


def test_runs_are_made_once_and_their_rows_say_what_was_kept(tmp_path, monkeypatch):
    study = benchmark("by_command")
    torch.manual_seed(0)
    model = bert(tmp_path / "model", num_labels=3, max_position_embeddings=32)
    draw = random.Random(0)
    rows = [f"{' '.join(draw.choices(WORDS, k=6))} {i},{i % 3}" for i in range(90)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    monkeypatch.setattr(subject, "latency_table", steady_levels)
    calls = []

    monkeypatch.setattr(study, "run", lambda words: calls.append(words) or done("", *words))
    line = f"--model {model} --data {tmp_path / 'rows.csv'} --work {tmp_path / 'runs'} --length 6"
    line += f" --speedups 1.3 1.6 --seeds 1 --out {tmp_path / 'record.json'}"
    given = [*line.split(), *(f"--set={setting}" for setting in QUICK)]
    found = json.loads(study.main(given).read_text())
    assert [call[call.index("--speedup") + 1] for call in calls] == ["1.3", "1.6"]
    assert set(found["settings"]) == {*QUICK, *study.settings(6)}
    for row in found["rows"]:
        (folder,) = (tmp_path / "runs").glob(f"{row['asked']:g}-0-*")
        record = hp.RunRecord.load(folder / "run" / "record.json")
        sizes = {one.name: one.pruned for one in record.size}
        assert (sum(row["heads"]), sum(row["neurons"])) == (sizes["heads"], sizes["neurons"])
        assert row["predicted"] >= row["asked"]
        assert row["ratio"] == record.metrics["speedup"]["measured"]
        tested = {one.name: one.value for one in record.quality if one.split == "test"}
        assert row["test"] == tested["recovered (lstsq)"]
    assert (found["calibration"], found["batch"], found["length"]) == (12, 32, 6)
    study.main(given)
    assert len(calls) == 2, "a finished run is not made again"
    study.main([*given, "--set=score.batch_size=16"])
    assert len(calls) == 4, "one by other settings is"
