"""The reports in a real browser: a quiet console, nothing wider than the window, keys that work,
text to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headprune.core.record import RunRecord, SpeedRow
from headprune.maps.pictures import AttentionPictures
from headprune.report import Compared, ReportInputs, render_html
from headprune.report.html import render_comparison_html, render_sweep_html
from headprune.scoring._agreement import agreement
from tests.browser import CHROMIUM, REQUIRED, Browser
from tests.report_records import (
    NASTY,
    costed,
    image_pictures_of,
    maps_of,
    pictures_of,
    plan_of,
    record_of,
    sweep_table,
)

#: What ``.ci/run`` fetches from npm.
AXE = Path(
    os.environ.get("AXE_CORE", Path(__file__).parents[2] / "build" / "package" / "axe.min.js")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and "BROWSER" not in REQUIRED, reason="needs the Debian package chromium"
)
WIDTHS = (390, 1280, 1920)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None, "Chromium is required here"
    with Browser() as found:
        yield found


def full() -> tuple[RunRecord, ReportInputs]:
    """A record with everything that a page can show."""
    record = costed(record_of())
    rows = tuple(SpeedRow(b, n, 0.1, 0.1, 0.1, 0.1, r, r - 0.02, r + 0.02, 9) for b, n, r in GRID)
    record = replace(record, speed=rows)
    assert record.scores is not None
    values = tuple(tuple(-v for v in row) for row in record.scores.values)
    other = replace(record.scores, values=values, scorer="entropy")
    maps = maps_of(record, 2, 5)
    maps = replace(maps, tokens=(("[CLS]", NASTY, " a", "b", "."), ("[CLS]", "c", "d", "e", "f")))
    return record, ReportInputs(
        AttentionPictures.of(maps), (other,), agreement(record.scores, other)
    )


GRID = ((1, 16, 0.9), (1, 128, 1.0), (8, 16, 1.1), (8, 128, 1.3))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(*full()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record, inputs = full()
    assert record.scores is not None
    plan = plan_of(record.scores, 0.25)
    rows = tuple(
        replace(row, kept_heads=plan.mask.n_kept if row.name != "base" else 32)
        for row in record.quality
    )
    other = Compared(
        "quarter", replace(record, plan=plan, quality=rows, recipe={"keep_heads": 0.25})
    )
    path = tmp_path_factory.mktemp("comparison") / "comparison.html"
    path.write_text(
        render_comparison_html([Compared("half", record), other], inputs.agreement),
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "report.html"
    path.write_text(render_sweep_html(sweep_table()), encoding="utf-8")
    return path


@pytest.fixture(params=["page", "comparison", "sweep"])
def any_page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_opens_without_a_console_message_and_fits(
    browser: Browser, any_page: Path, width: int, dark: bool
) -> None:
    browser.open(any_page, width, dark=dark)
    assert browser.messages == []
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run(OUTSIDE) == []
    assert browser.run(SIDEWAYS) == []
    wanted = "rgb(15, 21, 23)" if dark else "rgb(245, 248, 247)"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == wanted


#: Parts of cards that reach beyond their card; of what scrolls by itself only tables that stand on
#: end on a phone.
SIDEWAYS = """[...document.querySelectorAll(".card *")].filter(e => {
  const scrolls = e.parentElement.closest(".scroll, pre"), right = e.closest(".card").getBoundingClientRect().right;
  return !e.closest(".vh, thead, dialog") && (!scrolls || (innerWidth < 640 && scrolls.querySelector(".stack")))
    && (e.getBoundingClientRect().right > right || (e.matches("td, th, p, dd") && e.scrollWidth > e.clientWidth + 1));
}).map(e => e.outerHTML.slice(0, 200))"""

#: Elements that reach beyond the window and do not lie in something that scrolls by itself.
OUTSIDE = """[...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, .vh, thead, dialog")
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize(
    ("layers", "heads", "groups", "least"),
    [(4, 8, None, 18), (5, 8, 4, 36), (12, 12, None, 16), (2, 32, None, 16)],
)
def test_a_phone_shows_every_head(
    browser: Browser, tmp_path: Path, layers: int, heads: int, groups: int | None, least: int
) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_html(record_of(layers, heads, groups)), encoding="utf-8")
    browser.open(path, 390)
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run(OUTSIDE) == []
    widths = browser.run(
        "[...document.querySelectorAll('td.cell')].map(c => c.getBoundingClientRect().width)"
    )
    assert len(widths) == layers * (groups or heads)
    assert round(min(widths)) >= least
    sizes = (
        "[...document.querySelectorAll('.heat th')].map(t =>"
        " parseFloat(getComputedStyle(t).fontSize))"
    )
    small = browser.run(sizes)
    browser.size(1280)
    assert all(phone < desk for phone, desk in zip(small, browser.run(sizes), strict=True))


def test_the_policy_blocks_loads_and_every_other_script(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    more = (
        '<img src="http://127.0.0.1:9/x.png" alt=""><script>document.title ='
        ' "taken"</script></main>'
    )
    path = tmp_path / "report.html"
    path.write_text(page.read_text(encoding="utf-8").replace("</main>", more), encoding="utf-8")
    browser.open(path)
    assert len([m for m in browser.messages if "Content Security Policy" in m]) == 2
    assert browser.run("document.title") == "sst2-bert-taylor · headprune report"
    assert browser.run("document.querySelectorAll('.thumb').length") == 32  # our own script ran


# ----------------------------------------------------------------------------------------------
# head map


def head(browser: Browser) -> str:
    """Layer and head that have the focus, and whether what they say is shown."""
    found: str = browser.run(
        "(c =>"
        " `${c.parentElement.querySelector('th').textContent}.${c.querySelector('.members').textContent}"
        " ${getComputedStyle(c, '::after').display}`)(document.activeElement.closest('td'))"
    )
    return found


def test_arrows_move_over_the_heads_and_say_what_they_are(browser: Browser, page: Path) -> None:
    browser.open(page)
    first = "document.querySelector('td.cell')"
    assert browser.run(f"getComputedStyle({first}, '::after').display") == "none"
    browser.run(f"{first}.querySelector('input').focus()")
    assert head(browser) == "0.0 block"
    browser.press("ArrowDown", "ArrowRight", "ArrowRight")
    assert head(browser) == "1.2 block"
    browser.press("ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert head(browser) == "0.0 block"
    said = browser.run(f"getComputedStyle({first}, '::after').content")
    assert said == f'"{browser.run(f"{first}.title")}"'
    assert "(standard error), rank" in said


def scores(browser: Browser) -> list[list[float]]:
    """The scores of the shown map, row by row, as they stand."""
    found: list[list[float]] = browser.run(
        "[...document.querySelector('[data-scorer]:not([hidden])').querySelectorAll('tbody tr')]"
        ".map(r => [...r.querySelectorAll('td.cell')].map(c => Number(c.dataset.score)))"
    )
    return found


def test_heads_and_layers_are_sorted_and_put_back_by_key(browser: Browser, page: Path) -> None:
    browser.open(page)
    model = scores(browser)
    browser.run("document.getElementById('order').focus()")
    browser.press("ArrowDown")
    assert scores(browser) == [sorted(row, reverse=True) for row in model]
    browser.press("ArrowDown")
    assert scores(browser) == sorted(model, key=lambda row: -sum(row))
    browser.press("ArrowDown")
    assert scores(browser) == sorted(
        (sorted(row, reverse=True) for row in model), key=lambda row: -sum(row)
    )
    assert sorted(model) != model
    browser.press("Home")
    assert scores(browser) == model


def test_the_scorer_is_switched(browser: Browser, page: Path) -> None:
    browser.open(page)
    mine = scores(browser)
    shown = (
        "[...document.querySelectorAll('[data-scorer]')].map(m => m.getBoundingClientRect().height"
        " > 0)"
    )
    assert browser.run(shown) == [True, False]
    browser.run("document.getElementById('scorer').focus()")
    browser.press("ArrowDown")
    assert browser.run(shown) == [False, True]
    assert scores(browser) == [[-v for v in row] for row in mine]


@pytest.mark.parametrize("width", WIDTHS)
def test_cells_of_the_comparison_stand_in_rows(
    browser: Browser, comparison: Path, width: int
) -> None:
    browser.open(comparison, width)
    tops = browser.run(
        "[...document.querySelectorAll('table.heat tbody tr')].map(r =>"
        " [...r.querySelectorAll('td.cell')].map(c => Math.round(c.getBoundingClientRect().top)))"
    )
    assert len(tops) == 4
    assert all(len(row) == 8 and len(set(row)) == 1 for row in tops)
    assert browser.run("document.querySelectorAll('td.differs').length") == 8


# ----------------------------------------------------------------------------------------------
# attention


def colour(browser: Browser, canvas: str, x: int, y: int) -> list[int]:
    found: list[int] = browser.run(
        f"[...document.querySelector({canvas!r}).getContext('2d').getImageData({x}, {y}, 1,"
        " 1).data].slice(0, 3)"
    )
    return found


@pytest.mark.parametrize(("width", "rows"), [(390, 2), (1280, 1), (1920, 1)])
def test_the_heads_of_a_layer_stand_in_one_row_where_there_is_room(
    browser: Browser, tmp_path: Path, width: int, rows: int
) -> None:
    record = record_of(2, 12)
    path = tmp_path / "report.html"
    path.write_text(render_html(record, ReportInputs(pictures_of(record))), encoding="utf-8")
    browser.open(path, width)
    tops = browser.run(
        "[...document.querySelectorAll('.thumb')].map(t =>"
        " Math.round(t.getBoundingClientRect().top))"
    )
    assert len(tops) == 24
    assert len(set(tops)) == 2 * rows


def test_pictures_have_the_ramps_colours(browser: Browser, page: Path) -> None:
    browser.open(page)
    sharp, high, low = ".thumb canvas", [0x2E, 0x1E, 0x3B], [0xE6, 0xF5, 0xEC]
    size = browser.run("(c => [c.width, c.height])(document.querySelector('.thumb canvas'))")
    assert size == [5, 5]
    for query in range(1, 5):  # head 0 looks at the token before
        found = colour(browser, sharp, query - 1, query)
        assert all(abs(a - b) <= 4 for a, b in zip(found, high, strict=True)), found
        assert all(
            abs(a - b) <= 8 for a, b in zip(colour(browser, sharp, query, query), low, strict=True)
        )
    cut = browser.run("[...document.querySelectorAll('.thumb.removed')].map(t => t.title)")
    assert len(cut) == 16
    assert all("removed" in title for title in cut)
    browser.open(page, dark=True)
    assert all(a > 200 for a in colour(browser, sharp, 0, 1))


def test_a_head_is_enlarged_looked_through_and_closed_by_key(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.thumb').focus()")
    browser.press("ArrowDown", "Enter")
    assert browser.run("document.getElementById('zoom').open") is True
    assert browser.run("document.getElementById('zoom-title').textContent") == "Layer 1, head 0"
    assert "mostly previous token" in browser.run(
        "document.getElementById('zoom-words').textContent"
    )
    browser.run("document.getElementById('zoom-query').focus()")
    browser.press("ArrowRight", "ArrowRight")
    said = browser.run("document.getElementById('zoom-says').textContent")
    assert said.startswith(f"“␣a” looks at: “{NASTY}” ")
    assert (
        browser.run("document.getElementById('zoom-query').getAttribute('aria-valuetext')") == "␣a"
    )
    tokens = browser.run(
        "[...document.querySelectorAll('#zoom-keys .token')].map(t => t.textContent)"
    )
    assert tokens == ["[CLS]", NASTY, "␣a", "b", "."]
    browser.click("#zoom-after")
    assert browser.run("document.getElementById('zoom-title').textContent") == "Layer 1, head 1"
    browser.press("Escape")
    assert browser.run("document.getElementById('zoom').open") is False
    assert "head 1" in browser.run("document.activeElement.title")
    assert (
        browser.run("[...document.querySelectorAll('.thumb')].filter(t => t.tabIndex === 0).length")
        == 1
    )
    assert (
        browser.run("document.activeElement.tabIndex") == 0
    )  # tabbing away and back comes to the same head
    assert browser.messages == []


def test_another_example_and_one_scale(browser: Browser, page: Path) -> None:
    browser.open(page)
    even = ".thumb:nth-child(3) canvas"
    before = [colour(browser, even, x, y) for x in range(5) for y in range(5)]
    browser.click("#attention-same")
    assert "%" in browser.run("document.getElementById('attention-top').textContent")
    assert [colour(browser, even, x, y) for x in range(5) for y in range(5)] != before
    browser.click("#attention-same")
    assert [colour(browser, even, x, y) for x in range(5) for y in range(5)] == before
    browser.run("document.getElementById('attention-example').focus()")
    browser.press("ArrowDown")
    assert browser.run("document.getElementById('attention-text').textContent") == "[CLS] c d e f"
    assert [colour(browser, even, x, y) for x in range(5) for y in range(5)] != before


def test_an_image_is_seen_from_any_patch(browser: Browser, tmp_path: Path) -> None:
    record = record_of(1, 2)
    pictures = image_pictures_of(record)
    path = tmp_path / "report.html"
    path.write_text(render_html(record, ReportInputs(pictures)), encoding="utf-8")
    browser.open(path)
    assert browser.run("(c => [c.width, c.height])(document.querySelector('.thumb canvas'))") == [
        3,
        3,
    ]
    assert colour(browser, "#attention-input", 0, 0) == [0, 0, 0]
    assert colour(browser, "#attention-input", 1, 0) == [255, 255, 255]
    browser.run("document.getElementById('attention-query').focus()")
    browser.press("End")  # the last patch looks at the one before it
    assert max(range(9), key=lambda i: -sum(colour(browser, ".thumb canvas", i % 3, i // 3))) == 7
    browser.click(".thumb")
    said = browser.run("document.getElementById('zoom-says').textContent")
    assert said.startswith("Patch in row 3, column 3 looks at: patch in row 3, column 2 ")
    assert browser.run("document.getElementById('zoom-patch').style.left").startswith("66.6")
    assert [
        m for m in browser.messages if "getImageData" not in m
    ] == []  # that is the test, reading pixels


# ---------------------------------------------------------------------------------------------- for
# everybody

#: Text on a background of one colour whose contrast is below 4.5 (3 for large text), and what it
#: is.
PALE = """(() => {
  const part = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const found = parse(getComputedStyle(e).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const pale = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest(".vh, svg, script")) continue;
    const style = getComputedStyle(e), [a, b] = [light(parse(style.color)), light(behind(e))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) pale.push(`${e.className} ${e.textContent.slice(0, 40)}`);
  }
  return pale;
})()"""

#: Controls and pictures without a name, and references to nothing.
NAMELESS = """(() => {
  const named = e => e.getAttribute("aria-label") || e.title || (e.labels && e.labels.length) || e.textContent.trim()
    || e.getAttribute("aria-hidden") || e.closest("[aria-hidden=true]");
  const without = [...document.querySelectorAll("button, select, input, canvas, svg, dialog, [tabindex='0']")]
    .filter(e => !named(e));
  const lost = ["aria-labelledby", "aria-describedby"].flatMap(name => [...document.querySelectorAll(`[${name}]`)]
    .filter(e => !e.getAttribute(name).split(/\\s+/).every(id => document.getElementById(id))));
  return [...without, ...lost].map(e => e.outerHTML.slice(0, 200));
})()"""

OPEN = (
    "document.querySelectorAll('details').forEach(d => { d.open = true; });"
    " document.querySelector('.thumb')?.click()"
)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_and_everything_has_a_name(
    browser: Browser, any_page: Path, dark: bool
) -> None:
    browser.open(any_page, dark=dark)
    assert browser.run("document.querySelectorAll('td, p, dd').length") >= 30
    browser.run(OPEN)
    assert browser.run(PALE) == []
    assert browser.run(NAMELESS) == []
    browser.run(
        "document.querySelector('h2').style.color = getComputedStyle(document.body).backgroundColor"
    )
    assert len(browser.run(PALE)) == 1  # the check sees what it is for
    browser.run(
        "document.querySelector('section').setAttribute('aria-describedby', 'nothing')"
    )  # it has a label, too
    assert len(browser.run(NAMELESS)) == 1


@pytest.mark.skipif(
    not AXE.is_file() and "AXE" not in REQUIRED, reason="needs axe-core from npm, see .ci/run"
)
@pytest.mark.parametrize("opened", [False, True], ids=["page", "dialog"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(
    browser: Browser, any_page: Path, width: int, dark: bool, opened: bool
) -> None:
    browser.open(any_page, width, dark=dark)
    if opened:
        browser.run(OPEN)
    browser.run(AXE.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = browser.run("axe.run().then(r => r.violations)")
    assert [(v["id"], [n["html"][:160] for n in v["nodes"]]) for v in found] == []
