"""The reports in a real browser: a quiet console, nothing wider than the window, keys that work,
text to read."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from headprune.core.changed import ChangedAnswer, ChangedAnswers
from headprune.core.paired import Drop
from headprune.core.record import ClassRow, Comparison, SpeedRow
from headprune.maps.pictures import AttentionPictures
from headprune.report import Compared, ReportInputs, render_html
from headprune.report.html import render_comparison_html, render_sweep_html
from headprune.report.inputs import SweepInputs
from headprune.scoring._agreement import agreement
from tests.browser import CHROMIUM, REQUIRED, Browser
from tests.report_records import (
    NASTY,
    costed,
    maps_of,
    plan_of,
    record_of,
    sweep_table,
    with_neurons,
)

#: What ``.ci/run`` fetches from npm.
AXE = Path(
    os.environ.get("AXE_CORE", Path(__file__).parents[2] / "build" / "package" / "axe.min.js")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and "BROWSER" not in REQUIRED, reason="needs the Debian package chromium"
)
GRID = ((1, 16, 0.9), (1, 128, 1.0), (8, 16, 1.1), (8, 128, 1.3))


@pytest.fixture(scope="module")
def browser():
    assert CHROMIUM is not None, "Chromium is required here"
    with Browser() as found:
        yield found


def full():
    """A record with everything that a page can show."""
    record = costed(record_of())
    rows = tuple(SpeedRow(b, n, 0.1, 0.1, 0.1, 0.1, r, r - 0.02, r + 0.02, 9) for b, n, r in GRID)
    record = replace(record, speed=rows)
    values = tuple(tuple(-v for v in row) for row in record.scores.values)
    other = replace(record.scores, values=values, scorer="entropy")
    words = (("[CLS]", NASTY, " a", "b", "."), ("[CLS]", "c", "d", "e", "f"))
    pictures = AttentionPictures.of(replace(maps_of(record, 2, 5), tokens=words))
    classes = tuple(ClassRow(f"{NASTY} {i}", 40, 39, 38) for i in range(30))
    last = record.quality[-1].name
    drop = Comparison(last, "base", "accuracy", "test", 872, 0.0023, -0.004, 0.009)
    record = replace(record, classes=classes, comparisons=(drop,))
    answers = [ChangedAnswer(i, f"{NASTY} {'long ' * 30}", "a", "a", "b") for i in range(9)]
    changed = ChangedAnswers.of(answers, 872, 9)
    agreed = agreement(record.scores, other)
    return record, ReportInputs(pictures, (other,), agreed, changed)


def swept():
    """The page of a sweep with speeds and random heads."""
    row = SpeedRow(32, 128, 0.1, 0.1, 0.1, 0.1, 1.01, 0.99, 1.03, 50)
    against = (Drop(-0.13, -0.2, -0.05), Drop(0.03, -0.01, 0.05), None, None)
    inputs = SweepInputs({"plans/abcdefgh.json": row}, against, "none fits", 0.05)
    return render_sweep_html(sweep_table(), inputs)


def compared():
    """The page of two records, of which one keeps fewer heads."""
    record, inputs = full()
    plan = plan_of(record.scores, 0.25)
    kept = {"base": 32}
    rows = tuple(
        replace(row, kept_heads=kept.get(row.name, plan.mask.n_kept)) for row in record.quality
    )
    quarter = replace(record, plan=plan, quality=rows, recipe={"keep_heads": 0.25})
    both = [Compared("half", record), Compared("quarter", quarter)]
    return render_comparison_html(both, inputs.agreement)


def of_neurons():
    """The page of a run with heads and neurons under one budget."""
    record, table = with_neurons()
    return render_html(record, ReportInputs(latency=table))


PAGES = {
    "page": lambda: render_html(*full()),
    "comparison": compared,
    "sweep": swept,
    "neurons": of_neurons,
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, render in PAGES.items():
        (folder / f"{name}.html").write_text(render(), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.fixture
def page(pages):
    return pages["page"]


def drawn(folder, record, pictures=None):
    """The page of another record."""
    path = folder / "report.html"
    path.write_text(render_html(record, ReportInputs(pictures)), encoding="utf-8")
    return path


def text_of(browser, name):
    """What an element says."""
    return browser.run(f"document.getElementById({name!r}).textContent")


def focus(browser, name):
    browser.run(f"document.getElementById({name!r}).focus()")


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


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True), (1920, False)])
def test_a_page_opens_without_a_console_message_and_fits(browser, pages, name, width, dark):
    browser.open(pages[name], width, dark=dark)
    assert browser.messages == []
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run(OUTSIDE) == []
    assert browser.run(SIDEWAYS) == []
    wanted = "rgb(15, 21, 23)" if dark else "rgb(245, 248, 247)"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == wanted


#: Captions that reach beyond the part of the page in which their table scrolls.
CUT_OFF = """[...document.querySelectorAll(".scroll caption")].filter(e =>
    e.getBoundingClientRect().right > e.closest(".scroll").getBoundingClientRect().right + 1
).map(e => e.textContent)"""

#: Tables that are wider than what they scroll in.
SCROLLED = """[...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth)
    .map(e => e.getAttribute("aria-label"))"""


@pytest.mark.parametrize("name", PAGES)
def test_captions_wrap_at_the_card(browser, pages, name):
    for width in (700, 1000, 1200):
        browser.open(pages[name], width)
        assert browser.run(CUT_OFF) == []


def test_layers_with_prices_and_times_fit_a_laptop(browser, pages):
    browser.open(pages["neurons"], 1200)
    assert browser.run("document.querySelector('#layers + .scroll thead').textContent").endswith(
        "MillisecondsSaved (ms)Price"
    )
    assert browser.run(SCROLLED) == []


@pytest.mark.parametrize(
    ("layers", "heads", "groups", "least"), [(5, 8, 4, 36), (12, 12, None, 16), (2, 32, None, 16)]
)
def test_a_phone_shows_every_head(browser, tmp_path, layers, heads, groups, least):
    browser.open(drawn(tmp_path, record_of(layers, heads, groups)), 390)
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run(OUTSIDE) == []
    cells = "[...document.querySelectorAll('td.cell')]"
    widths = browser.run(f"{cells}.map(c => c.getBoundingClientRect().width)")
    assert len(widths) == layers * (groups or heads)
    assert round(min(widths)) >= least


def test_the_policy_blocks_loads_and_every_other_script(browser, page, tmp_path):
    more = '<img src="http://127.0.0.1:9/x.png" alt="">'
    more += '<script>document.title = "taken"</script></main>'
    path = tmp_path / "report.html"
    path.write_text(page.read_text(encoding="utf-8").replace("</main>", more), encoding="utf-8")
    browser.open(path)
    assert len([m for m in browser.messages if "Content Security Policy" in m]) == 2
    assert browser.run("document.title") == "sst2-bert-taylor · headprune report"
    assert browser.run("document.querySelectorAll('.thumb').length") == 32, "our own script runs"


def head(browser):
    """Layer and head that have the focus, and whether what they say is shown."""
    return browser.run(
        "(c =>"
        " `${c.parentElement.querySelector('th').textContent}.${c.querySelector('.members').textContent}"
        " ${getComputedStyle(c, '::after').display}`)(document.activeElement.closest('td'))"
    )


def test_arrows_move_over_the_heads_and_say_what_they_are(browser, page):
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


def scores(browser):
    """The scores of the shown map, row by row, as they stand."""
    return browser.run(
        "[...document.querySelector('[data-scorer]:not([hidden])').querySelectorAll('tbody tr')]"
        ".map(r => [...r.querySelectorAll('td.cell')].map(c => Number(c.dataset.score)))"
    )


def test_heads_and_layers_are_sorted_and_the_scorer_switched_by_key(browser, page):
    browser.open(page)
    model = scores(browser)
    by_head = [sorted(row, reverse=True) for row in model]
    focus(browser, "order")
    for wanted in (
        by_head,
        sorted(model, key=lambda row: -sum(row)),
        sorted(by_head, key=lambda row: -sum(row)),
    ):
        browser.press("ArrowDown")
        assert scores(browser) == wanted != model
    browser.press("Home")
    assert scores(browser) == model
    focus(browser, "scorer")
    browser.press("ArrowDown")
    assert scores(browser) == [[-v for v in row] for row in model]


def test_settings_are_sorted_by_a_column(browser, pages):
    browser.open(pages["sweep"])
    drops = (
        "[...document.querySelectorAll('td[data-label^=\"test drop\"]')].map(e => e.dataset.key)"
    )
    model = [float(key) for key in browser.run(drops)]
    assert sorted(model) != model
    click = "[...document.querySelectorAll('.sort')].find(b => b.textContent.startsWith('test')).click()"
    for wanted in (sorted(model), sorted(model, reverse=True)):
        browser.run(click)
        assert [float(key) for key in browser.run(drops)] == wanted
    assert browser.run("document.querySelectorAll('[aria-sort=descending]').length") == 1


def colour(browser, canvas, x, y):
    return browser.run(
        f"[...document.querySelector({canvas!r}).getContext('2d').getImageData({x}, {y}, 1,"
        " 1).data].slice(0, 3)"
    )


def near(one, other, most):
    return all(abs(a - b) <= most for a, b in zip(one, other, strict=True))


def test_pictures_have_the_ramps_colours(browser, page):
    browser.open(page)
    sharp, high, low = ".thumb canvas", [0x2E, 0x1E, 0x3B], [0xE6, 0xF5, 0xEC]
    for query in range(1, 5):  # head 0 looks at the token before
        assert near(colour(browser, sharp, query - 1, query), high, 4)
        assert near(colour(browser, sharp, query, query), low, 8)
    cut = browser.run("[...document.querySelectorAll('.thumb.removed')].map(t => t.title)")
    assert len(cut) == 16
    assert all("removed" in title for title in cut)
    browser.open(page, dark=True)
    assert all(a > 200 for a in colour(browser, sharp, 0, 1))


def test_a_head_is_enlarged_looked_through_and_closed_by_key(browser, page):
    browser.open(page)
    browser.run("document.querySelector('.thumb').focus()")
    browser.press("ArrowDown", "Enter")
    assert browser.run("document.getElementById('zoom').open") is True
    assert text_of(browser, "zoom-title") == "Layer 1, head 0"
    assert "mostly previous token" in text_of(browser, "zoom-words")
    focus(browser, "zoom-query")
    browser.press("ArrowRight", "ArrowRight")
    assert text_of(browser, "zoom-says").startswith(f"“␣a” looks at: “{NASTY}” ")
    query = "document.getElementById('zoom-query')"
    assert browser.run(f"{query}.getAttribute('aria-valuetext')") == "␣a"
    keys = "[...document.querySelectorAll('#zoom-keys .token')].map(t => t.textContent)"
    assert browser.run(keys) == ["[CLS]", NASTY, "␣a", "b", "."]
    browser.click("#zoom-after")
    assert text_of(browser, "zoom-title") == "Layer 1, head 1"
    browser.press("Escape")
    assert browser.run("document.getElementById('zoom').open") is False
    # The same head has the focus, and is the one that the tabulator comes back to.
    assert "head 1" in browser.run("document.activeElement.title")
    reached = "[...document.querySelectorAll('.thumb')].filter(t => t.tabIndex === 0)"
    assert browser.run(f"{reached}.map(t => t === document.activeElement)") == [True]
    assert browser.messages == []


OPEN = (
    "document.querySelectorAll('details').forEach(d => { d.open = true; });"
    " document.querySelector('.thumb')?.click()"
)


@pytest.mark.skipif(
    not AXE.is_file() and "AXE" not in REQUIRED, reason="needs axe-core from npm, see .ci/run"
)
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(
    ("width", "dark", "opened"), [(390, True, False), (390, False, True), (1280, True, True)]
)
def test_axe_finds_nothing(browser, pages, name, width, dark, opened):
    browser.open(pages[name], width, dark=dark)
    if opened:
        browser.run(OPEN)
    browser.run(AXE.read_text(encoding="utf-8"))
    found = browser.run("axe.run().then(r => r.violations)")
    assert [(v["id"], [n["html"][:160] for n in v["nodes"]]) for v in found] == []
