"""Long loops print a line now and then in a log, and nothing where nobody asked for it."""

import pytest

from headprune.core import bars
from headprune.core.bars import bar, lines_to


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(bars, "INTERVAL", 0.0)
    return []


def test_a_log_gets_lines_of_every_loop(lines):
    with lines_to(lines.append):
        for _ in bar(range(2), "outer"):
            assert list(bar(iter([7]), "inner", show=False)) == [7]
        with bar(None, "moved", total=4) as moved:
            moved.set_postfix_str("loss 1", refresh=False)
            moved.update()
    percent = [line.partition(",")[0] for line in lines]
    for line in ("outer: 50 % (1 of 2)", "inner: 100 % (1 of 1)", "moved: 25 % (1 of 4)"):
        assert line in percent
    assert any(line.endswith("to go, loss 1") for line in lines)


def test_a_short_loop_prints_no_line(capsys):
    lines = []
    with lines_to(lines.append):
        list(bar(range(100), "short", show=True))
    assert lines == []
    assert list(bar(range(3), "no log")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
