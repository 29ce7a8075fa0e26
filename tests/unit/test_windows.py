"""Windowed attention (Swin): an image's windows are rows of the gate's input, yet gates and scores
are an image's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.layouts import registry
from headprune.model.losses import default_loss
from headprune.model.sites import bind, sites_of
from headprune.scoring._base import ScoringProblem
from headprune.scoring._gradients import gate_gradients, token_gradients
from tests.laws.support import CLOSE, Subject, as_double, shaken

#: Window size and tokens at each site: 8 x 8 patches in two layers and 4 x 4 in one, padded to
#: whole windows.
SIZES = {2: [64, 64, 16], 3: [81, 81, 36]}


@pytest.fixture(params=SIZES)
def swin(request: pytest.FixtureRequest) -> Subject:
    layout = registry.get("swin")
    tiny = dict(layout.families)["swin"]
    model, batch = dataclasses.replace(
        tiny, settings={**tiny.settings, "window_size": request.param}
    )(0)
    model = shaken(model).double().eval()
    return Subject(layout, model, as_double(batch), hp.find_sites(model))


def tokens_of(subject: Subject) -> list[int]:
    return SIZES[subject.model.config.window_size]


def gates(subject: Subject, *rows: int, tokens: bool = False) -> dict[str, Tensor]:
    shapes = [
        (*rows, *([n] if tokens else []), len(s.heads))
        for s, n in zip(subject.sites, tokens_of(subject), strict=True)
    ]
    return {
        s.name: torch.rand(shape, dtype=torch.float64)
        for s, shape in zip(subject.sites, shapes, strict=True)
    }


def logits(subject: Subject, given: dict[str, Tensor], rows: slice = slice(None)) -> Tensor:
    with hp.gated(subject.model, given, subject.sites), torch.no_grad():
        out: Tensor = subject.model(pixel_values=subject.batch["pixel_values"][rows]).logits
    return out


@pytest.mark.parametrize("tokens", [False, True])
def test_gates_act_on_all_windows_of_their_example_alone(swin, tokens):
    given = gates(swin, 3, tokens=tokens)
    together = logits(swin, given)
    for i in range(3):
        alone = logits(swin, {n: g[i : i + 1] for n, g in given.items()}, slice(i, i + 1))
        assert_close(together[i : i + 1], alone, **CLOSE)
    assert (together - logits(swin, {n: g.roll(1, 0) for n, g in given.items()})).abs().min() > 1e-4
    shared = {n: g[0] for n, g in given.items()}
    repeated = {n: g.expand(3, *g.shape) for n, g in shared.items()}
    if not tokens:
        assert_close(logits(swin, repeated), logits(swin, shared), **CLOSE)


def test_tokens_are_counted_window_by_window(swin):
    """What the projection receives is its input times the gates, example by example and window
    after window."""
    site, given = swin.sites[1], gates(swin, 3, tokens=True)
    projection, seen = swin.model.get_submodule(f"{site.name}.o_proj"), []
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits(swin, {})
    logits(swin, {site.name: given[site.name]})
    handle.remove()
    plain, gated = (x.unflatten(-1, (len(site.heads), -1)) for x in seen)
    area = swin.model.config.window_size**2
    assert plain.shape[:2] == (3 * tokens_of(swin)[1] // area, area)
    assert_close(gated, plain * given[site.name].reshape(*plain.shape[:3], 1), **CLOSE)


@pytest.mark.parametrize("shape", [(5, 3), (3, 65, 3), (1, 64, 3)], ids=str)
def test_gates_that_fit_no_window_are_refused(swin, shape):
    with pytest.raises(InvalidValue, match=r"windows of \d tokens that the model runs on"):
        logits(swin, {swin.sites[0].name: torch.ones(shape, dtype=torch.float64)})


def losses(subject: Subject, given: dict[str, Tensor]) -> Tensor:
    with hp.gated(subject.model, given, subject.sites), torch.no_grad():
        return default_loss(subject.model, subject.batch)


def test_gate_gradients_are_those_of_finite_differences(swin):
    found = gate_gradients(swin.model, [swin.batch], sites=swin.sites)
    assert found.shape == (3, sum(len(s.heads) for s in swin.sites))
    column, step = 0, 1e-5
    for site in swin.sites:
        for head in range(len(site.heads)):
            nudge = torch.zeros(len(site.heads), dtype=torch.float64)
            nudge[head] = step
            up, down = (losses(swin, {site.name: 1 + sign * nudge}) for sign in (1, -1))
            assert_close(found[:, column], (up - down) / (2 * step), rtol=1e-5, atol=1e-7)
            column += 1
    assert found.abs().min() > 0


def test_gradients_of_tokens_add_up_to_those_of_the_example(swin):
    bound = bind(swin.model, swin.sites)
    ones = {n: torch.ones_like(g).requires_grad_() for n, g in gates(swin, 3, tokens=True).items()}
    with hp.gated(swin.model, ones, sites_of(bound)):
        found = torch.autograd.grad(default_loss(swin.model, swin.batch).sum(), list(ones.values()))
    expected = gate_gradients(swin.model, [swin.batch], sites=swin.sites)
    assert_close(torch.cat([g.sum(1) for g in found], 1), expected, **CLOSE)
    problem = ScoringProblem(swin.model, bound, [swin.batch], default_loss, progress=False)
    absolute = token_gradients(problem)
    assert_close(absolute, torch.cat([g.abs().sum(1) for g in found], 1), **CLOSE)


@pytest.mark.parametrize("method", ["taylor", "leave_one_out"])
def test_scores_do_not_depend_on_the_batch_size(swin, method):
    one_by_one = [{k: v[i : i + 1] for k, v in swin.batch.items()} for i in range(3)]
    together = hp.score(swin.model, [swin.batch], method, sites=swin.sites)
    apart = hp.score(swin.model, one_by_one, method, sites=swin.sites)
    assert [len(s.heads) for s in swin.sites] == [3, 3, 4]
    for a, b in zip(together.values, apart.values, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12)
