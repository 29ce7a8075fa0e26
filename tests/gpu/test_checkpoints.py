"""Checkpoints: saved on the GPU, loaded on the CPU and moved to the GPU, bit for bit."""

import pytest
import torch

import headprune as hp
from tests.gpu.models import NAMES, output, subject
from tests.gpu.modes import BF16, FP16, FP32, computing

CPU = torch.device("cpu")
#: Models that Transformers cannot build: loading takes a fresh one.
BUILT_HERE = ("own", "torch")


@pytest.mark.parametrize("mode", [FP32, BF16, FP16], ids=lambda mode: mode.name)
@pytest.mark.parametrize("of", NAMES)
def test_saved_on_the_gpu(compare, device, tmp_path, of, mode):
    found = subject(of)
    model = found.copy(device, mode.dtype)
    hp.prune_(model, found.ragged(1))
    hp.save_pretrained(model, tmp_path / "small")
    fresh = found.copy(CPU, mode.dtype) if of in BUILT_HERE else None
    loaded = hp.from_pretrained(tmp_path / "small", fresh)
    assert {p.device for p in loaded.parameters()} == {CPU}
    weights = loaded.state_dict(), model.state_dict()
    compare.same(f"weights of the {of}, loaded on the CPU", *weights, mode.name)
    batch = found.data(device, mode.dtype)[0]
    with computing(mode, device):
        wanted, got = output(model, batch), output(loaded.to(device), batch)
    compare.same(f"outputs of the {of}, loaded and moved to the GPU", got, wanted, mode.name)
    assert [s.heads for s in hp.find_sites(loaded)] == [s.heads for s in hp.find_sites(model)]


@pytest.mark.parametrize("form", ["transformers", "remote-code"])
def test_other_formats(compare, device, tmp_path, form):
    """Written from the GPU, where what loads is compared with the model before anything is put into
    the folder."""
    import transformers

    found = subject("decoder")
    model = found.copy(device)
    keep = {s.name: [head for unit in s.units[:2] for head in unit] for s in found.sites}
    hp.prune_(model, found.mask(keep))
    hp.save_pretrained(model, tmp_path / "small", format=form)
    if form == "transformers":
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
        weights = loaded.state_dict(), model.state_dict()
        compare.same(f"weights in format {form}", *weights, "fp32")


def test_a_refit_survives(compare, device, tmp_path):
    found = subject("decoder")
    teacher, batches = found.copy(device), found.data(device)
    model = found.copy(device)
    hp.prune_(model, found.ragged(1))
    hp.recover_(model, batches, "lstsq", teacher)
    hp.save_pretrained(model, tmp_path / "small")
    loaded = hp.from_pretrained(tmp_path / "small").to(device)
    compare.same("weights of a refitted model", loaded.state_dict(), model.state_dict(), "fp32")
