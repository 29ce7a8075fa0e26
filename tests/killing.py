"""Processes that are killed: at a moment in time, or in the middle of a call that opens, moves or
syncs a file.

They come from a fork server that has imported everything, so that what is killed is the work and
not the imports.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.tiny_recipe import TINY

_FILE_CALLS = ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree")
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.killing_imports"])


#: With fewer steps of training.
SHORT = {**TINY, "data": {**TINY["data"], "test_holdout": 1150}}


def the_run(out: str) -> None:
    """A run from training to report; what a batch gives in scoring is written at once."""
    from headprune.run import Recipe, run_recipe
    from headprune.scoring import _resume_cache

    _resume_cache.EVERY, _resume_cache._TIMES = 0.0, 0

    recover = [
        {"method": "mean_fold"},
        {"method": "finetune", "batch_size": 64, "settings": {"epochs": 2, "learning_rate": 1e-3}},
    ]
    parts = {
        "recover": recover,
        "bench": {"batch_sizes": [1], "seconds": 0.01},
        "out": out,
        "name": "killed",
    }
    run_recipe(Recipe.model_validate({**SHORT, **parts}), say=lambda line: None, progress=False)


def the_gradual_run(out: str) -> None:
    """A run that cuts in stages."""
    from headprune.run import Recipe, run_recipe

    gradual = {"stages": 3, "batch_size": 64, "settings": {"epochs": 1, "learning_rate": 1e-3}}
    parts = {"gradual": gradual, "score": {"random_draws": 1}, "report": False, "out": out}
    run_recipe(Recipe.model_validate({**SHORT, **parts}), say=lambda line: None, progress=False)


def the_sweep(out: str) -> None:
    """Eight combinations, two of them trained."""
    from headprune.run import Recipe, sweep

    grid = ["scorer=taylor,magnitude", "keep=0.5,0.25", "recover=none,mean_fold"]
    sweep(Recipe.model_validate(SHORT), grid, out=out, say=lambda line: None)


def the_frame(out: str, overwrite: bool = False) -> None:
    """A run without its stages: what it does to its folder before them and after them."""
    from headprune.run import Recipe, runner

    def stages(recipe: Recipe, journal: Any, folder: Path, launch: Any) -> None:
        for name in ("plan.json", ".work/score.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")

    runner._run_stages = stages
    recipe = Recipe.model_validate({**TINY, "report": False, "out": out})
    runner.run_recipe(recipe, overwrite=overwrite, say=lambda line: None, progress=False)


def the_frame_anew(out: str) -> None:
    """The same in the place of a run that is there."""
    the_frame(out, overwrite=True)


def cut_model(seed: int) -> Any:
    """A tiny BERT of its own weights, without so many heads of its first layer."""
    import headprune as hp
    from headprune.layouts import registry

    model, _ = registry.get("bert").tiny(seed)
    hp.prune_heads_(model.eval(), {0: list(range(seed))})
    return model


def the_save(out: str) -> None:
    """A model over an earlier one that is there."""
    import headprune as hp

    hp.save_pretrained(cut_model(1), out)


def sampled_scores(seed: int) -> Any:
    """Scores with their per-example numbers and a curvature."""
    from dataclasses import replace

    import numpy as np

    from headprune.core.samples import Curvature, Samples
    from tests.selection_problems import make, site

    numbers = np.random.default_rng(seed).normal(size=(9, 4))
    scores = make([site("a", 4)], [numbers.mean(0)])
    return replace(scores, samples=Samples.of(numbers), curvature=Curvature.of(numbers.T @ numbers))


def the_scores(out: str) -> None:
    """Scores over earlier ones that are there."""
    sampled_scores(1).save(Path(out) / "scores.json")


def begun(work: Callable[[str], None], out: Path, calls: int | None = None) -> Any:
    """A process that does the work; with ``calls`` it kills itself at that call which changes a
    file in ``out``."""
    process = context.Process(target=_do, args=(work, str(out), calls))
    process.start()
    return process


def undisturbed(work: Callable[[str], None], out: Path) -> tuple[float, int]:
    """Does the work in a process that nothing happens to: its seconds, and its calls that change
    files in ``out``."""
    start = time.perf_counter()
    process = begun(work, out, calls=sys.maxsize)
    process.join()
    assert process.exitcode == 0
    return time.perf_counter() - start, int((out.parent / f"{out.name}.calls").read_text())


def killed_and_finished(
    work: Callable[[str], None], out: Path, number: int, seed: int, whole: tuple[float, int]
) -> tuple[str, ...]:
    """Kills the work at a seeded random moment, every third also on its second way, and lets it
    come to its end.

    Args:
        work: What is done.
        out: A new folder.
        number: Of the moment: even ones are moments in time, odd ones calls that change files.
        seed: Of the moment.
        whole: Seconds and calls of the work that nothing happened to.

    Returns:
        What happened, in words.
    """
    draw, (seconds, calls) = random.Random(f"{seed} {number}"), whole
    said: list[str] = []
    for _ in range(2 if number % 3 == 2 else 1):
        if number % 2:
            at = draw.randint(1, calls)
            process = begun(work, out, at)
            process.join()
            said.append(f"file call {at}: {process.exitcode}")
        else:
            after = draw.uniform(0.02, 1.0) * seconds
            process = begun(work, out)
            process.join(after)
            process.kill()
            process.join()
            said.append(f"{after / seconds:.2f} of its time: {process.exitcode}")
        assert process.exitcode in (0, -signal.SIGKILL), said
        if process.exitcode == 0:  # it came to its end first
            return tuple(said)
    process = begun(work, out)
    process.join()
    assert process.exitcode == 0, said
    return tuple(said)


def limited(what: str, out: Path, limit: int) -> str:
    """Saves something in a process whose files may have so many bytes; the error's words."""
    process = context.Process(target=_save_within, args=(what, str(out), limit))
    process.start()
    process.join()
    assert process.exitcode == 0
    return (out.parent / f"{out.name}.said").read_text()


def _save_within(what: str, out: str, limit: int) -> None:
    import resource

    import headprune as hp
    from headprune.core.errors import NotWritten
    from headprune.recovery import Finetune
    from tests.laws.support import subject_of

    case = subject_of("llama")
    scores = hp.score(case.model, [case.batch], "taylor", progress=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    said = "nothing was said"
    try:
        if what == "scores":
            scores.save(f"{out}/scores.json")
        elif what == "training":
            hp.recover_(case.model, [case.batch] * 4, Finetune(epochs=2), folder=out)
        else:
            hp.save_pretrained(case.model, out, format=what)  # type: ignore[arg-type]
    except NotWritten as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    Path(f"{out}.said").write_text(said)


def _do(work: Callable[[str], None], out: str, calls: int | None) -> None:
    torch.set_num_threads(1)
    if calls is None:
        work(out)
        return
    count = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _FILE_CALLS or not str(args[0]).startswith(out):
            return
        # A kill at a call that changes nothing is one at the next call that does.
        reads = event == "open" and not args[2] & os.O_CREAT
        if reads or (event == "os.mkdir" and Path(args[0]).is_dir()):
            return
        count += 1
        if count == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    work(out)
    Path(f"{out}.calls").write_text(str(count))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of a saved model."""
    return safetensors.torch.load_file(folder / "model.safetensors")


def same_tensors(folder: Path, other: Path) -> None:
    """Checks that two saved models are one, bit for bit."""
    ours, theirs = tensors(folder), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def same_sweeps(folder: Path, other: Path) -> None:
    """Checks that two sweeps came to the same tables, plans, scores and answers."""
    for name in ("table.json", "table.csv", "table.parquet", "summary.md", "tradeoff.svg"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    for kind in ("scores", "plans", "outcomes", "runs"):
        ours, theirs = (
            {p.name: p.read_bytes() for p in (f / kind).iterdir()} for f in (folder, other)
        )
        assert ours == theirs, kind
    assert len(list((folder / "bases").iterdir())) == len(list((other / "bases").iterdir())) == 1


def same_runs(folder: Path, other: Path) -> None:
    """Checks that two runs came to the same: plan, scores, models and quality; times and dates are
    left out."""
    scores = ("scores.json", "scores.samples.safetensors", "scores-magnitude.json")
    for name in ("plan.json", "rows.json", *scores):  # not every scorer writes samples
        assert (folder / name).exists() == (other / name).exists(), name
        if (other / name).exists():
            assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    for name in ("model", "base"):
        same_tensors(folder / name, other / name)
    ours, theirs = (json.loads((f / "record.json").read_text()) for f in (folder, other))
    assert (ours["status"], ours["stage"]) == (theirs["status"], theirs["stage"])
    for part in ("quality", "plan", "scores", "rows", "seeds", "size", "proofs"):
        assert ours[part] == theirs[part], part
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    assert ours["timings"].keys() == theirs["timings"].keys()
    names = [{str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (folder, other)]
    assert names[0] == names[1], "nothing is missing, and nothing is left over"
