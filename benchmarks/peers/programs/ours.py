"""headprune itself, and the presets of two papers: score, select, cut, and recover without or with
training."""

from __future__ import annotations

import copy
from pathlib import Path
from time import perf_counter
from typing import Any

import training
from protocol import (
    Cut,
    Job,
    Run,
    head_width,
    heads_kept,
    main,
    neurons_kept,
    pretrained,
    running,
)

import headprune as hp
from headprune.recipes.presets import PRESETS
from headprune.recipes.validate import configured
from headprune.run.identity import digest
from headprune.run.surroundings import git_commit


def cut(job: Job) -> Cut:
    base = pretrained(job.base, job.device)
    settings = job.settings
    budget = hp.Budget(keep_heads=job.kept)
    if job.of_share:
        settings = settings | settings.get("of_share", {})
        budget = hp.Budget(keep_macs=job.kept, length=job.tokens)
    steps = method(settings)
    sites = hp.find_sites(base, feed_forward=job.of_share)
    batches = job.batches("calibration", labels=True)
    scores, scoring = scored(job, base, batches, steps["score"], sites)
    seconds = {"score": scoring}
    start = perf_counter()
    loss = None
    if steps["select"] == "repriced":
        loss = hp.scoring.refitted_loss_of(base, batches, sites=sites, progress=False)
    plan = hp.select(scores, budget, steps["select"], loss=loss)
    small = copy.deepcopy(base)
    hp.prune_(small, plan, sites=sites)
    for step in steps["recover"]:
        hp.recover_(small, batches, step, base)
    seconds["cut"] = perf_counter() - start
    notes = []
    if distill := job.settings.get("distill"):
        start = perf_counter()
        notes = training.train_(small, job, teacher=base, distill=distill)
        seconds["train"] = perf_counter() - start
    small.eval()

    def save(folder: Path) -> str:
        hp.save_pretrained(small, folder)
        return "headprune.save_pretrained, headprune.from_pretrained"

    neurons = neurons_kept(small) if job.of_share else None
    heads = heads_kept(small, head_width(base))
    return Cut(running(base), running(small), save, seconds, heads, notes, neurons)


def scored(
    job: Job, base: Any, batches: list[Any], scorer: Any, sites: list[hp.AttentionSite]
) -> tuple[hp.HeadScores, float]:
    """Scores, and the seconds that they took.

    They do not depend on the budget. The jobs of a draw that is not timed share them.
    """
    about = digest([git_commit(), repr(scorer), [site.name for site in sites]])
    calibration = job.rows["calibration"]
    stored = calibration.with_name(f"{calibration.stem}-{about[:16]}")
    path, took = stored.with_suffix(".json"), stored.with_suffix(".seconds")
    if not job.shapes and took.is_file():
        return hp.HeadScores.load(path), float(took.read_text())
    start = perf_counter()
    scores = hp.score(base, batches, scorer, sites=sites, progress=False)
    seconds = perf_counter() - start
    scores.save(path)
    took.write_text(str(seconds))
    return scores, seconds


def method(settings: dict[str, Any]) -> dict[str, Any]:
    """Scorer, selector and recoveries: of a preset, or our own."""
    if name := settings.get("preset"):
        preset = PRESETS[name]
        parts = ((hp.scoring.registry, preset.score), (hp.selection.registry, preset.select))
        score, select = (_configured(registry, part) for registry, part in parts)
        return {
            "score": score,
            "select": settings.get("selector", select),
            "recover": [_configured(hp.recovery.registry, step) for step in preset.recover],
        }
    refit = []
    if settings.get("refit", True):
        # The records of heads have this ridge.
        refit = [hp.recovery.Lstsq(feed_forward=True, ridge=settings.get("ridge", 0.3))]
    score = settings["scorer"]
    if order := settings.get("order"):
        score = configured(hp.scoring.registry, score, {"order": order})
    return {"score": score, "select": settings["selector"], "recover": refit}


def _configured(registry: Any, part: Any) -> Any:
    named = {**part}
    settings = dict(named.pop("settings"))
    (name,) = named.values()
    return configured(registry, name, settings)


def load(job: Job, folder: Path) -> Run:
    return running(hp.from_pretrained(folder).to(job.device).eval())


if __name__ == "__main__":
    main(cut, load)
