"""What docs/peers.md says of peers: outcomes, the noise of speeds, notes, ties and what is missing."""

import pytest

from tests.scripts import benchmark


@pytest.fixture(scope="module")
def run():
    return benchmark("peers/run")


@pytest.fixture(scope="module")
def verdict(run):
    return run.page.verdict


def timed(name, kept, *ratios, test=0.8, **more):
    """A row whose intervals end 0.01 from its ratios."""
    speed = [
        {"ratio": r, "low": r - 0.01, "high": r + 0.01, "base_ms": 9.0, "ms": 9 / r} for r in ratios
    ]
    environment = "headprune" if name.startswith("headprune") else name
    about = {"peer": name, "kept": kept, "seed": 0, "test": test, "environment": environment}
    return {**about, "speed": speed, **more}


def paired(peer, kept, low, high, its="headprune"):
    points = {"difference": (low + high) / 2, "low": low, "high": high}
    held = {"reference": its, "reference_kept": 24}
    return {"peer": peer, "kept": kept, **held, "draws": 2, "test": points}


def recorded(rows, *lines):
    about = {"shapes": [[1, 128], [32, 128]], "rows_used": {"test": 100}}
    return {"rows": rows, "compared": list(lines), **about}


def test_an_end_that_rounds_to_zero_keeps_its_side(verdict):
    rows = [timed("headprune", 24, 1.2, 1.2), timed("onnxsim", 24, 1.2, 1.2)]
    (below,) = verdict.comparisons(recorded(rows, paired("onnxsim", 24, -0.01, -0.0)))
    (at,) = verdict.comparisons(recorded(rows, paired("onnxsim", 24, -0.01, 0.0)))
    assert (below.outcome, at.outcome) == ("won", "tied")


MORE, SAME, LESS = (0.01, 0.03), (-0.01, 0.02), (-0.03, -0.01)


@pytest.mark.parametrize(
    ("peer", "ratios", "outcomes"),
    [
        ("TextPruner", (1.3, 1.4), ["**lost**", "tied", "won"]),
        # Slower at one shape, and at the other as fast.
        ("onnxsim", (1.3, 1.2), ["a trade", "won", "won"]),
        # Faster at one shape, slower at the other: a trade, whatever the accuracy.
        ("onnxsim, fused", (1.6, 1.2), ["a trade"] * 3),
        ("PyTorch INT8", (2.0, 1.4), ["**lost**", "**lost**", "a trade"]),
    ],
)
def test_what_a_comparison_comes_to(verdict, peer, ratios, outcomes):
    kept = None if "INT8" in peer else 24
    rows = [timed("headprune", 24, 1.3, 1.4), timed(peer, kept, *ratios)]
    for points, outcome in zip((MORE, SAME, LESS), outcomes, strict=True):
        (found,) = verdict.comparisons(recorded(rows, paired(peer, kept, *points)))
        assert found.outcome == outcome


def test_the_noise_is_what_models_of_as_many_heads_differ_by(verdict):
    rows = [timed("headprune", 24, 1.2, 1.2, heads=[12, 12]), timed("unpruned", None, 0.99, 1.0)]
    assert verdict.noise(recorded(rows)) == pytest.approx([1 / 0.99 - 1, 0])
    rows.append(timed("headprune, taylor", 24, 1.3, 1.2, heads=[4, 20]))
    assert verdict.noise(recorded(rows)) == pytest.approx([1.3 / 1.2 - 1, 0])
    others = [
        timed("TextPruner", 24, 2.0, 2.0, heads=[12, 12]),  # of another environment
        timed("headprune, trained", 24, 2.0, 2.0, heads=[12, 11]),  # of another number of heads
        timed("headprune, not refitted", 24, 2.0, 2.0, heads=[24, 0]),  # with an empty layer
        timed("headprune + PyTorch INT8", 24, 2.0, 2.0),  # whose heads were not counted
    ]
    assert verdict.noise(recorded(rows + others)) == pytest.approx([1.3 / 1.2 - 1, 0])
    # Of a share of the multiply-adds, as many heads are no sign of an equal speed.
    share = timed("flap2024", 0.4, 2.0, 2.0, heads=[12, 12])
    assert verdict.noise(recorded([*rows, share])) == verdict.noise(recorded(rows))
    # Those with the same heads and neurons in each layer are, and smaller models of one share.
    same = {"heads": [12, 0], "neurons": [64, 8]}
    alike = [
        timed(f"headprune{end}", 0.4, r, 1.2, **same) for end, r in (("", 1.2), (", trained", 1.5))
    ]
    assert verdict.noise(recorded(alike)) == pytest.approx([0.25, 0])
    small = [
        {**timed(f"smaller architecture{end}", 0.4, r, 1.2), "environment": "headprune"}
        for end, r in (("", 1.2), (", distilled", 1.5))
    ]
    assert verdict.noise(recorded(small)) == pytest.approx([0.25, 0])
    other = timed("ziplm2023", 0.4, 2.0, 2.0, heads=[12, 0], neurons=[64, 16])
    assert verdict.noise(recorded([*alike, {**other, "environment": "headprune"}])) == (
        verdict.noise(recorded(alike))
    )
    # Another record of these shapes, in which no models should be equally fast.
    shares, other = verdict.with_noise_of_all([recorded([share]), recorded(rows)])
    assert verdict.noise(shares) == verdict.noise(other) == verdict.noise(recorded(rows))
    # It is beyond the intervals, and within that noise; the other shape has less of it.
    rows.append(timed("TextPruner", 24, 1.25, 1.25))
    (found,) = verdict.comparisons(recorded(rows, paired("TextPruner", 24, -0.01, 0.01)))
    assert found.faster == ("", "theirs")


def test_a_tie_says_how_many_rows_would_tell(verdict):
    rows = [timed(name, 24, 1.2, 1.2) for name in ("headprune", "TextPruner", "onnxsim")]
    rows.append(timed("PyTorch INT8", None, 1.2, 1.2))
    lines = [paired("TextPruner", 24, -0.01, 0.03), paired("onnxsim", 24, -0.02, 0.02)]
    lines.append(paired("PyTorch INT8", None, -0.001, 0.021))
    found = verdict.comparisons(recorded(rows, *lines))
    # 0.01 apart, and 0.02 from there to the end beyond 0: four times the rows halve it.
    assert [verdict.tie(one) for one in found] == [
        "TextPruner, 24 heads: 4.0 times (4.0 points wide)",
        "onnxsim, 24 heads: no number, as none was found (4.0 points wide)",
        "PyTorch INT8, all heads beside 24 heads: 1.2 times (2.2 points wide)",
    ]


def test_what_ours_adds_is_of_all_draws(verdict):
    both = "headprune + PyTorch INT8"
    rows = [timed("PyTorch INT8", None, 2.0, 2.0, test=0.8), timed(both, 24, 2.5, 3.0, test=0.79)]
    rows.append({"peer": both, "kept": 24, "seed": 1, "test": 0.76})
    line = "| PyTorch INT8 | 24 | 2 | -2.5 | 1.25 [1.24, 1.26] | 1.50 [1.49, 1.51] |"
    assert verdict.added(recorded(rows))[-1] == line
    found = verdict.added(recorded(rows, paired(both, 24, -0.03, -0.01, "PyTorch INT8")))[-1]
    assert found == line.replace("-2.5", "-2.0 [-3.0, -1.0]")
    assert verdict.added(recorded(rows[:1])) == []
    rows.append(timed(both, 0.42, 2.5, 3.0, test=0.79))
    assert "| PyTorch INT8 | 42 % | 1 | -1.0 |" in verdict.added(recorded(rows))[-1]
