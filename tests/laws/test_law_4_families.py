"""Law 4 over every family: dtypes, classes and frozen parameters survive a cut; save and load gives
the same bits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import headprune as hp
from headprune.attention.kept_heads import weights_of
from headprune.core.layout import STATE_ATTRIBUTE
from headprune.model.running import call, outputs
from tests.laws.families import FAMILIES, KEEP_A_HEAD, assert_equal, over
from tests.laws.support import EXACT, Subject, shaken


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@over()
def test_law_4_what_survives(subject: Subject, dtype: torch.dtype) -> None:
    model = subject.model.to(dtype)
    batch = {k: v.to(dtype) if torch.is_floating_point(v) else v for k, v in subject.batch.items()}
    with torch.no_grad():  # on a copy: Switch's router casts its own weights as it runs
        before = [t.dtype for t in outputs(call(copy.deepcopy(model), batch))]
    assert dtype in before
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    needed = {n: p.requires_grad for n, p in model.named_parameters()}
    classes = [type(m).__name__ for m in model.modules()]
    held = {n: t.dtype for n, t in model.state_dict().items()}
    hp.prune_(model, subject.ragged(), sites=subject.sites)
    layouts = subject.sites.layouts.values()
    listed = any(s.axis == "list" for layout in layouts for s in layout.slabs)
    if not listed:
        assert {n: p.requires_grad for n, p in model.named_parameters()} == needed
        assert [type(m).__name__ for m in model.modules()] == classes
        assert {n: t.dtype for n, t in weights_of(model).items()} == held
    assert {p.dtype for p in model.parameters()} == {dtype}
    with torch.no_grad():
        assert [t.dtype for t in outputs(call(model, batch))] == before


SAVED = [
    pytest.param(pair, empty, id=f"{pair[1]}-{'a layer without heads' if empty else 'ragged'}")
    for pair in FAMILIES
    for empty in (False, True)
    if not (empty and pair[1] in KEEP_A_HEAD)
]


@pytest.mark.parametrize(("subject", "empty"), SAVED, indirect=["subject"])
def test_law_4_save_and_load(subject: Subject, empty: bool, tmp_path: Path) -> None:
    model, batch = subject.layout.tiny(0, subject.family)  # in fp32, as its class makes it
    model = shaken(model, norms=False).eval()
    mask = subject.ragged()
    if empty:
        mask = mask & subject.mask({subject.sites[0].name: []})
    hp.prune_(model, mask)
    hp.save_pretrained(model, tmp_path)
    ours = hasattr(model, "config")
    loaded = hp.from_pretrained(
        tmp_path, None if ours else subject.layout.tiny(1, subject.family)[0]
    )
    with torch.no_grad():
        assert_equal(outputs(call(loaded, batch)), outputs(call(model, batch)), **EXACT)
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert list(theirs) == list(mine)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in mine.items())
    assert hp.find_sites(loaded) == hp.find_sites(model)
    for (name, a), (_, b) in zip(loaded.named_modules(), model.named_modules(), strict=True):
        assert getattr(a, STATE_ATTRIBUTE, None) == getattr(b, STATE_ATTRIBUTE, None), name
