"""A checkpoint folder of every released version opens and gives what its model gave:
``tests/golden``."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import headprune as hp
from headprune.checkpoints.manifest import Manifest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.parametrize("version", range(1, Manifest.SCHEMA_VERSION + 1))
def test_a_checkpoint_opens_and_gives_what_it_gave(version):
    folder = GOLDEN / f"checkpoint-{version}"
    model = hp.from_pretrained(folder).eval()
    expected = load_file(folder.with_name(f"{folder.name}.expected.safetensors"))
    assert [site.heads for site in hp.find_sites(model)] == [(2, 3), (0, 1, 2, 3)]
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits
    # Written by another build of torch, perhaps on another processor.
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-4, atol=1e-5)
    assert logits.abs().max() > 0.01, "a model that says nothing would equal another one"
