"""What a sweep of every released version left is read by later commands: ``tests/golden/sweep``."""

import importlib
import pkgutil
from pathlib import Path

import pytest

import headprune.run
import headprune.sweep
from headprune.core.codec import Value
from headprune.sweep.outcome import ModelOutcome
from headprune.sweep.runs import recipe_of
from tests.golden.check import check_file
from tests.golden.make import KEY

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "sweep"
#: Stored by no command, or read by none of another version.
PASSING = {"DryRun", "Finished", "GradualReport", "GradualStage"}

FACTS = {
    "Pick-1": lambda p: (
        [
            p.max_drop,
            p.by,
            p.run,
            p.plan.mask.n_kept,
            p.validation.high,
            p.looks[1].bound,
            p.confirmed,
        ]
        == [0.01, "heads", KEY, 4, 0.02, None, False]
    ),
    "SweepRun-1": lambda r: (
        [r.seed, r.status, r.outcome, recipe_of(r).name] == [1, "done", KEY, "sst2-minilm"]
    ),
    "Base-1": lambda b: (
        [b.files["config.json"], b.model.weights, b.rows["validation"]["rows"]]
        == [KEY, KEY[::-1], 5]
    ),
}


def kinds():
    """Every stored value of ``run`` and ``sweep`` that a later command reads, by name."""
    rooms = ("headprune.run.", "headprune.sweep.")
    for room in (headprune.run, headprune.sweep):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    found = {k.__name__: k for k in Value.__subclasses__() if k.__module__.startswith(rooms)}
    assert found.keys() >= PASSING
    return {name: kind for name, kind in found.items() if name not in PASSING}


def test_every_version_of_every_kind_has_a_file_and_facts():
    wanted = {
        f"{name}-{v}" for name, kind in kinds().items() for v in range(1, kind.SCHEMA_VERSION + 1)
    }
    assert {path.stem for path in GOLDEN.glob("*.json")} == wanted == set(FACTS), (
        "see tests/golden/README.md"
    )


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_loads_and_says_what_it_said(path):
    check_file(path, kinds(), FACTS)


def test_an_outcome_is_found():
    found = ModelOutcome.find(GOLDEN / "Outcome-1.safetensors", KEY)
    assert found is not None
    assert (found.metric, found.sizes["macs"]) == ("accuracy", 20)
    assert found.notes == ("made for the tests",)
    assert [found.answers("test").value, found.loss("validation")] == [0.6, 0.25]
