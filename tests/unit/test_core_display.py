"""What scores, masks and plans look like: text as it is read, HTML that cannot be injected into,
rich markup."""

from html.parser import HTMLParser

import pytest

from headprune.core.codec import EMPTY
from headprune.core.display import RAMP, SHADES, Cell, Row, html_grid, levels, rich_grid, text_grid
from headprune.core.heads import HeadId, HeadMask
from headprune.core.plan import Budget, PruningPlan
from headprune.core.scores import HeadScores, ModelFingerprint
from tests.selection_problems import site

EVIL = "x\"><script>alert('1')</script>&[red]"


def scores(*names):
    sites = (site(names[0], 4), site(names[1], 3, heads=(0, 2)))
    model = ModelFingerprint("s", "w")
    return HeadScores(sites, ((0, 1, 2, 4), (3, 0)), None, "taylor", EMPTY, 32, model)


class Grid(HTMLParser):
    """Reads a table back: tags that were seen, rows of (text, attributes)."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.caption, self._open = set(), [], "", []
        self.feed(text)
        self.close()
        assert not self._open, f"unclosed {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(["", dict(attrs)])

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] in ("td", "th"):
            self.rows[-1][-1][0] += data
        elif self._open[-1] == "caption":
            self.caption += data


def test_scores_print_as_a_person_reads_them():
    assert str(scores("layer.0", "layer.10")).splitlines() == [
        "HeadScores: taylor over 32 examples: 6 heads, darker or taller is more important",
        "  layer.0   ▁ ▂ ▄ █",
        "  layer.10  ▆ · ▁",
    ]


def test_a_plan_prints_as_a_person_reads_it():
    mask = HeadMask.from_keep({"a": [1], "layer.1": [0, 2]}, {"a": 2, "layer.1": 3})
    plan = PruningPlan(mask, Budget(keep_heads=0.5), "uniform", scorer="taylor")
    assert str(plan).splitlines() == [
        "PruningPlan: 3 of 5 heads kept (uniform, by taylor, keep 50 % of the heads)",
        "  a        · ■",
        "  layer.1  ■ · ■",
    ]
    assert str(PruningPlan(mask)).startswith("PruningPlan: 3 of 5 heads kept (by hand)\n")


def test_the_grid_shows_what_is_kept_and_what_was_removed_before():
    kept = frozenset({HeadId("a", 0), HeadId("a", 3), HeadId("b", 0)})
    rows = scores("a", "b").rows(kept)
    assert [[c.kept for c in r.cells] for r in rows] == [
        [True, False, False, True],
        [True, False, False],
    ]
    assert [c.level for c in rows[0].cells] == [0.0, 0.25, 0.5, 1.0]
    assert [c.level for c in rows[1].cells] == [0.75, None, 0.0]
    assert [c.title for c in rows[1].cells] == ["b[0]: 3", "b[1]: already removed", "b[2]: 0"]


def test_levels_span_zero_to_one():
    assert levels([]) == []
    assert levels([2.0, 2.0]) == [0.5, 0.5]
    assert levels([-1.0, 3.0, 1.0]) == [0.0, 1.0, 0.5]
    assert len(SHADES) == len(RAMP) == 9


def test_steps_reach_both_ends_and_no_head_that_is_kept_is_blank():
    cells = tuple(Cell(i, i / 20, True, "") for i in range(21))
    line = text_grid("t", [Row("r", cells)]).splitlines()[1]
    marks = line.removeprefix("  r  ").split(" ")
    assert len(marks) == 21
    assert marks == sorted(marks)
    assert (marks[0], marks[-1]) == (SHADES[1], SHADES[8])


@pytest.mark.parametrize(
    "made", [scores(EVIL, "b"), PruningPlan(HeadMask.full(scores(EVIL, "b").sites))]
)
def test_html_escapes_a_malicious_site_name(made):
    text = made._repr_html_()
    assert "<script" not in text
    grid = Grid(text)
    assert grid.tags == {"table", "caption", "tr", "th", "td"}
    assert grid.rows[0][0][0] == EVIL, "the name is shown as it is"
    assert grid.rows[0][1][1]["title"].startswith(f"{EVIL}[0]: ")
    attributes = {name for row in grid.rows for _, attrs in row for name in attrs}
    assert attributes == {"scope", "style", "title"}


def test_html_has_a_cell_a_head_and_marks_what_is_removed():
    cells = (Cell(0, 0.0, True, "t0"), Cell(7, 1.0, True, "t7"), Cell(9, 1.0, False, ""))
    grid = Grid(html_grid("1 <b> 2", [Row("a", cells)]))
    assert grid.caption == "1 <b> 2"
    (row,) = grid.rows
    assert [text for text, _ in row] == ["a", "0", "7", "9"]
    styles = [attrs["style"] for _, attrs in row[1:]]
    assert f"background:{RAMP[0]};color:#000" in styles[0]
    assert f"background:{RAMP[8]};color:#fff" in styles[1]
    assert "repeating-linear-gradient" in styles[2]
    assert RAMP[8] not in styles[2]


def test_rich_shows_the_plain_text_of_the_grid():
    markup = pytest.importorskip("rich.text", reason="rich renders the markup").Text.from_markup
    cells = (Cell(0, 0.0, True, ""), Cell(11, None, True, ""), Cell(2, 1.0, False, ""))
    shown = markup(rich_grid("t [bold]", [Row("a[red]", cells)]))
    assert shown.plain == "t [bold]\n  a[red]   0▁11 ·· "
    assert markup(scores(EVIL, "b").__rich__()).plain.splitlines()[1] == f"  {EVIL}   0▁ 1▂ 2▄ 3█"
    assert "·· " in markup(scores("a", "b").__rich__()).plain
    plan = PruningPlan(HeadMask.from_keep({"a": [1]}, {"a": 2}))
    assert markup(plan.__rich__()).plain == "PruningPlan: 1 of 2 heads kept (by hand)\n  a  ··  1 "


def test_an_empty_grid_is_its_title():
    assert text_grid("nothing", []) == rich_grid("nothing", []) == "nothing"
    assert Grid(html_grid("nothing", [])).rows == []


def test_a_cell_of_a_plan_says_which_head_it_is_and_what_becomes_of_it():
    (row,) = PruningPlan(HeadMask.from_keep({"a": [1]}, {"a": 2})).rows()
    assert [cell.title for cell in row.cells] == ["a[0]: removed", "a[1]: kept"]
    assert [cell.kept for cell in row.cells] == [False, True]
