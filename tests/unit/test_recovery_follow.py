"""What a projection puts out is followed to what it is added to, and no further than that is
certain."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from headprune.recovery._follow import follow

EXACT = {"rtol": 0.0, "atol": 0.0}


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def followed(use, *shape):
    """The trail of a projection's output, which has this shape and is used like this."""
    projection, given = nn.Linear(4, shape[-1], dtype=torch.float64), drawn(*shape[:-1], 4)
    with torch.no_grad():
        (call,) = follow(lambda: use(projection(given.clone())), {0: projection})
        assert_close((call.input, call.output), (given, projection(given)), **EXACT)
    return call


THERE = {
    "transpose": ((2, 3, 6), lambda y: y.transpose(0, 1)),
    "permute": ((2, 3, 6), lambda y: y.permute(2, 0, 1)),
    "from behind": ((2, 3, 6), lambda y: y.permute(-1, 0, -2)),
    "t": ((5, 6), lambda y: y.t()),
    "roll": ((2, 3, 6), lambda y: y.roll((1, 2), (0, 1))),
    "rows": ((2, 3, 6), lambda y: y.flatten(0, 1).unsqueeze(1)),
    "squeeze": ((1, 3, 6), lambda y: y.squeeze(0)),
    "the same": ((2, 3, 6), lambda y: y.clone().detach()[:].expand(2, 3, 6).reshape(9, 4)),
    "many": ((2, 3, 6), lambda y: y.transpose(0, 2).roll(1, 0).permute(1, 0, 2).flatten(1)),
}


@pytest.mark.parametrize("way", THERE)
def test_what_is_added_comes_back_to_its_place(way):
    shape, there = THERE[way]
    places = there(torch.arange(torch.Size(shape).numel()).view(shape))
    added = drawn(*places.shape)
    call = followed(lambda y: there(y) + added, *shape)
    assert call.summed
    assert call.added
    expected = call.output.flatten().index_add(0, places.flatten(), added.flatten()).view(shape)
    assert_close(call.stream(True), expected, **EXACT)
    assert_close(call.stream(False), call.output, **EXACT)


ENDS = {
    "itself": lambda y: y + y,
    "another kind": lambda y: y.relu() + 1,
    "a part": lambda y: y[:1] + drawn(1, 3, 6),
    "expanded": lambda y: y[:, :1].expand(2, 5, 6) + drawn(2, 5, 6),
    "broadcast": lambda y: y + drawn(4, 2, 3, 6),  # the sum has more axes
    "twice it": lambda y: torch.add(drawn(2, 3, 6), y, alpha=2),
    "a number": lambda y: y + 1.0,
    "changed in place": lambda y: y.mul_(2) + drawn(2, 3, 6),
}


@pytest.mark.parametrize("use", ENDS)
def test_what_is_no_sum_of_it_alone_ends_the_trail(use):
    call = followed(ENDS[use], 2, 3, 6)
    assert not call.summed
    assert_close(call.stream(False), call.output, **EXACT)


def test_a_bias_is_added_but_is_no_activation():
    bias = nn.Parameter(drawn(6))
    call = followed(lambda y: y + bias, 2, 3, 6)
    assert (call.summed, call.added) == (True, False)


@pytest.mark.parametrize("kind", ["given", "output", "view", "sum"])
def test_what_is_overwritten_afterwards_is_kept_as_it_was(kind):
    projection, x, other = nn.Linear(4, 6, dtype=torch.float64), drawn(2, 3, 4), drawn(2, 3, 6)
    given = x.clone()
    expected = projection(x).detach()

    def run():
        y = projection(given)
        total = y + other
        total.relu()  # the call ends
        {"given": given, "output": y, "view": y.view(-1)[3:], "sum": total}[kind].zero_()

    with torch.no_grad():
        (call,) = follow(run, {0: projection})
    found = (call.input, call.output, call.stream(True))
    assert_close(found, (x, expected, expected + other), **EXACT)
