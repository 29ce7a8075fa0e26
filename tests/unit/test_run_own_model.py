"""A model of one's own by import path: runs, sweeps and picks like others, and what is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.recipes.reading import override
from headprune.recipes.validate import check_recipe
from headprune.run import pick, sweep
from headprune.run.example_model import LAYOUT, row_transformer
from tests.small_recipes import quiet_run, quietly_prepared
from tests.tiny_recipe import TINY

OWN = {
    "import_path": "headprune.run.example_model:row_transformer",
    "layouts": "headprune.run.example_model:LAYOUT",
    "config": {"width": 16, "n_heads": 4, "n_layers": 2},
}
BUILD = "from headprune.run.example_model import row_transformer as build\n"


def own(*settings: str) -> Any:
    return check_recipe(override({**TINY, "model": OWN, "report": False}, settings))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    yield folder
    for name in [n for n in sys.modules if n.startswith("my_")]:
        del sys.modules[name]


def test_a_run_writes_a_model_that_is_filled_again(tmp_path):
    recover = "recover=[{method: lstsq}, {method: finetune, settings: {steps: 1}}]"
    record = quiet_run(own(recover, "score.random_draws=1"), out=tmp_path / "out")
    assert record.status == "done"
    assert {proof.what for proof in record.proofs} == {"outputs", "reload"}
    assert record.plan.mask.n_kept == 4
    for name, heads in (("model", 4), ("base", 8)):
        full = row_transformer(**OWN["config"])
        sites = hp.find_sites(full, layouts=[LAYOUT])
        model = hp.from_pretrained(tmp_path / "out" / name, model=full, sites=sites)
        assert sum(attention.heads for attention in model.attentions) == heads
        assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_sweeps_and_picks(tmp_path, module):
    (module / "my_model.py").write_text(BUILD)
    recipe = own("model.import_path=my_model:build", "score.magnitude=false")
    grid = {"scorer": ["taylor"], "keep": [0.5]}
    assert len(sweep(recipe, grid, out=tmp_path / "sweep", say=lambda line: None).table.rows) == 1
    found = pick(tmp_path / "sweep", max_drop=1.0, out=tmp_path / "small")
    assert found.plan.mask.n_kept == 4
    full = row_transformer(**OWN["config"])
    sites = hp.find_sites(full, layouts=[LAYOUT])
    small = hp.from_pretrained(tmp_path / "small" / "model", full, sites)
    assert sum(attention.heads for attention in small.attentions) == 4
    bases = tmp_path / "sweep" / "bases"
    before = len(list(bases.iterdir()))
    with (module / "my_model.py").open("a") as file:
        file.write("# another version\n")
    sweep(recipe, {"keep": [0.5]}, out=tmp_path / "sweep", say=lambda line: None)
    assert len(list(bases.iterdir())) == before + 1, "another code is another base model"


LINEAR = "from torch import nn\ndef build(**k): return nn.Linear(8, 10)"
FEWER = f"{BUILD}plain = build\ndef build(**k): return plain(**{{**k, 'n_labels': 4}})"
HIDDEN = """
import torch
class Own(torch.nn.Linear):
    def forward(self, pixel_values): return {'hidden': pixel_values}
def build(**k): return Own(8, 10)
"""
ABSENT, NAMED = ["model.import_path=my_none:build"], ["model.layouts=my_model:LAYOUT"]
LOGITS = r"gives logits \[batch, 10\], for image_classification, got"


@pytest.mark.parametrize(
    ("code", "settings", "where", "words"),
    [
        (None, ABSENT, "import_path", "No module named 'my_none'.*PYTHONPATH=FOLDER"),
        ("import nothing_there", [], "import_path", r"imported, got .*named 'nothing_there'\)$"),
        ("1 / 0", [], "import_path", "ZeroDivisionError"),
        ("def built(): pass", [], "import_path", "got 'build'. Did you mean 'built'"),
        ("build = 3", [], "import_path", "a function that builds a model, got int"),
        ("def build(**k): return 3", [], "import_path", "gives a torch.nn.Module, got one .* int"),
        ("def build(): pass", [], "config", "keyword arguments of my_model:build, .*unexpected"),
        (LINEAR, [], "import_path", r"takes pixel_values and gives logits .*unexpected keyword"),
        (FEWER, [], "import_path", rf"{LOGITS} logits \[8, 4\]"),
        (HIDDEN, [], "import_path", rf"{LOGITS} NoneType"),
        (BUILD, ["model.layouts=my_model:x"], "layouts", "got 'x'"),
        (f"{BUILD}\nLAYOUT = 'odd'", NAMED, "layouts", "got 'my_model:LAYOUT', a str"),
    ],
)
def test_what_cannot_be_built_is_refused_in_words(module, code, settings, where, words):
    if code is not None:
        (module / "my_model.py").write_text(code)
    with pytest.raises(InvalidValue, match=rf"model\.{where}: must be .*{words}"):
        quietly_prepared(own("model.import_path=my_model:build", *settings))


def test_a_model_without_a_layout_says_what_was_seen():
    with pytest.raises(UnsupportedModel, match="RowAttention"):
        quietly_prepared(own("model.layouts=null"))
