"""A report as a page: maps of heads, what heads attend to, and that nothing breaks out of the text."""

import base64
import hashlib
import re
from dataclasses import replace

import pytest

from headprune.core.codec import FrozenDict
from headprune.core.heads import AttentionSite, HeadId, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.record import Proof, QualityRow, RunRecord, SizeRow
from headprune.maps.patterns import Pattern
from headprune.maps.pictures import AttentionPictures
from headprune.report import ReportInputs, render_html, render_markdown
from headprune.report.attention import attention_view
from headprune.scoring._agreement import agreement
from tests.report_records import (
    NASTY,
    Page,
    costed,
    image_pictures_of,
    maps_of,
    pictures_of,
    record_of,
    scores_of,
)


@pytest.fixture(scope="module")
def record():
    return record_of()


@pytest.fixture(scope="module")
def html(record):
    return render_html(record)


def titles(html):
    """What the cells of the head map say."""
    return [cell["title"] or "" for cell in Page(html).cells()]


def steps(html):
    """The cells' places in the ramp of colours."""
    return [int(re.findall(r"\bs(\d)\b", cell["class"] or "")[0]) for cell in Page(html).cells()]


def test_the_map_marks_exactly_the_removed_heads_and_can_be_read_aloud(record, html):
    cells = Page(html).cells()
    for cell, title, unit in zip(cells, titles(html), record.scores.units(), strict=True):
        head = unit.heads[0]
        removed = head in record.plan.mask.removed(unit.name)
        assert ("removed" in (cell["class"] or "").split()) == removed
        assert title.endswith("removed" if removed else "kept")
        score = f"{unit.value:.4g} ± {unit.standard_error:.2g}"
        assert title.startswith(f"{unit.name}, head {head}, score {score}")
    inputs = [attributes for tag, attributes in Page(html).elements if tag == "input"]
    assert [a["aria-label"] for a in inputs] == titles(html)
    assert {a["type"] for a in inputs} == {"radio"}, "they can be reached by keyboard"


def test_colour_follows_the_score(record, html):
    values = [unit.value for unit in record.scores.units()]
    found = [step for _, step in sorted(zip(values, steps(html), strict=True))]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 8)
    alike = tuple(tuple(0.25 for _ in row) for row in record.scores.values)
    flat = replace(record, scores=replace(record.scores, values=alike))
    assert set(steps(render_html(flat))) == {4}, "equal scores have the colour in the middle"


def test_kv_groups_are_one_cell_that_says_what_each_head_does():
    record = record_of(2, 8, 4)
    pictures = pictures_of(record)
    site, other = pictures.sites
    first, second = pictures.pattern(HeadId(site.site, 0)), Pattern("own position", 0.5, 0.125)
    patterns = (first, second, *[None] * 6)
    told = replace(pictures, sites=(replace(site, patterns=patterns), other))
    html = render_html(record, ReportInputs(told))
    assert len(titles(html)) == 2 * 4
    assert {cell["colspan"] for cell in Page(html).cells()} == {"2"}
    assert "heads 2–3 (one key/value group)" in titles(html)[1]
    assert f", head 0 mostly {first}, head 1 mostly {second}, " in titles(html)[0]


@pytest.mark.parametrize("change", [{"policy": "free"}, {"grouping": "interleaved"}])
def test_heads_that_are_no_unit_or_no_neighbours_have_cells_of_their_own(change):
    record = record_of(2, 4, 2)
    scores = scores_of([replace(s, **change) for s in record.scores.sites])
    found = titles(render_html(replace(record, scores=scores, plan=None)))
    assert len(found) == 8
    assert all("heads" not in title for title in found)


def test_a_skewed_map_is_logarithmic_and_says_so():
    sites = [AttentionSite("a", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3))]

    def told(*values):
        scores = replace(scores_of(sites), values=(values,))
        return Page(render_html(RunRecord("x", "done", "score", "2026", scores=scores))).text

    skewed = told(1e-9, 1e-6, 2e-6, 5e-5)
    assert "logarithmic scale" in skewed
    assert "in units of 10⁻⁶" in skewed
    assert "linear scale" in told(-1.0, 0.0, 1.0, 2.0)


def test_kinds_of_attention_stand_apart():
    sites = [
        AttentionSite(f"{tower}.{i}.{name}", "t5", kind, 4, 4, 8, 8, (0, 1, 2, 3))
        for tower, name, kind in (
            ("enc", "own", "self"),
            ("dec", "own", "causal"),
            ("dec", "other", "cross"),
        )
        for i in range(2)
    ]
    record = RunRecord("x", "done", "score", "2026", scores=scores_of(sites))
    html = render_html(record)
    wanted = ["Encoder: self-attention enc.*.own", "Decoder: causal self-attention dec.*.own"]
    wanted.append("Cross-attention dec.*.other")
    places = [Page(html).text.index(title) for title in wanted]
    assert places == sorted(places)
    labels = re.findall(r'<tr><th scope="row" title="([\w.]*)">(\w*)</th>', html)
    assert labels == [(site.name, site.name.split(".")[1]) for site in sites]
    assert "- Cross-attention: dec.\\*.other" in render_markdown(record)


def test_what_heads_do_is_said_with_its_share(record, html):
    pictures = pictures_of(record)
    first = HeadId(record.scores.sites[1].name, 0)
    pattern = pictures.pattern(first)
    assert pattern.name == "previous token"
    inputs = ReportInputs(pictures)
    page, markdown = render_html(record, inputs), render_markdown(record, inputs)
    share, chance = (f"{100 * v:.0f} %" for v in (pattern.share, pattern.chance))
    assert f"{first.site}, head 0 previous token {share} {chance}" in Page(page).text
    assert f"| {first.site}, head 0 | previous token | {share} | {chance} |" in markdown
    title = next(title for title in titles(page) if title.startswith(f"{first.site}, head 0,"))
    assert f"mostly previous token ({share} of its weight; even attention: {chance})" in title
    kept = sum(HeadId(site.name, 0) in record.plan.mask for site in record.scores.sites)
    assert f" 4 {kept} {4 - kept} " in Page(page).table_row("previous token", page)
    assert "over 3 test rows, as the uncut model attends to them." in markdown
    alone = render_markdown(record, ReportInputs(pictures_of(record, 1)))
    assert "over 1 test row, as the uncut model attends to it." in alone
    assert 'id="attention"' not in html


def test_an_image_is_seen_from_its_mean_its_class_token_and_its_patches(record):
    pictures = image_pictures_of(record)
    html = render_html(record, ReportInputs(pictures))
    options = re.findall(r"<option[^>]*>([^<]*)</option>", html[html.index("attention-query") :])
    assert options[:3] == ["mean over all queries", "class token", "patch in row 1, column 1"]
    assert options[10] == "patch in row 3, column 3"
    assert "test row 0, label 7" in html
    partly = render_html(record, ReportInputs(replace(pictures, whole=False)))
    assert "To keep this file small it shows of every map the mean over queries" in partly


def test_heads_that_no_plan_is_for_are_neither_kept_nor_removed(record):
    other = PruningPlan(HeadMask.from_keep({}, {"another site": 8}))
    view = attention_view(replace(record, plan=other), pictures_of(record))
    assert {line.state for line in view.heads} == {""}


def test_144_heads_and_8_examples_stay_under_a_megabyte_and_a_half():
    record = costed(record_of(12, 12))
    pictures = pictures_of(record, 8, 48)
    others = tuple(replace(record.scores, scorer=f"other {i}") for i in range(3))
    inputs = ReportInputs(pictures, others, agreement(record.scores, *others))
    page = render_html(record, inputs)
    assert len(page.encode()) < 1_500_000
    assert "the first 26 tokens of every example" in page
    assert not pictures.whole
    assert pictures_of(record, 8, 26).whole


def nasty_inputs(scores, record):
    """Pictures, other scores and an agreement, all of whose words are dangerous."""
    maps = replace(maps_of(record, 1, 2), tokens=((NASTY, NASTY),))
    pictures = AttentionPictures.of(maps)
    told = replace(pictures, examples=tuple(replace(e, title=NASTY) for e in pictures.examples))
    other = replace(scores, scorer=NASTY + "2")
    return ReportInputs(told, (other,), agreement(scores, other))


def test_data_stays_text():
    site = AttentionSite(NASTY, "bert", "self", 2, 2, 8, 8, (0, 1))
    scores = replace(scores_of([site]), scorer=NASTY)
    plan = PruningPlan(HeadMask.from_keep({NASTY: [0]}, {NASTY: 2}), selector=NASTY, scorer=NASTY)
    bag = FrozenDict({NASTY: NASTY})
    record = RunRecord(
        *(NASTY, "failed", NASTY, NASTY, bag, bag, bag, NASTY, bag, bag, scores, plan),
        quality=(
            QualityRow("base", 2, NASTY, 1.0, NASTY, 3, 1.0),
            QualityRow(NASTY, 1, NASTY, 0.5, NASTY, 3, 1.0),
        ),
        size=(SizeRow(NASTY, 2, 1),),
        proofs=(Proof(NASTY, 0.0, 1.0, 1.0, NASTY, 1),),
        timings=bag,
        warnings=(NASTY,),
        metrics=FrozenDict({NASTY: 1}),
        error=NASTY,
    )
    page = Page(render_html(record, nasty_inputs(scores, record)))
    assert not page.open
    scripts = [attributes.get("type") for tag, attributes in page.elements if tag == "script"]
    assert scripts == ["application/json", None]
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert page.text.count("<script>") > 30
    blocks = re.compile(r"^(`{3,})\n.*?^\1$", re.DOTALL | re.MULTILINE)
    markdown = blocks.sub("", render_markdown(record))
    assert "<script>" not in markdown.replace("\\<script\\>", "")
    rows = [line for line in markdown.splitlines() if line.startswith(f"| {NASTY[0]}")]
    assert len({re.sub(r"\\.", "", row).count("|") for row in rows}) <= 1


def test_a_block_of_backticks_cannot_close_its_fence(record):
    broken = replace(record, status="failed", error="before\n```\n# injected\n````\nafter")
    assert "`````\nbefore\n```\n# injected\n````\nafter\n`````" in render_markdown(broken)


def test_the_page_loads_nothing(html):
    page = Page(html)
    policies = [a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv")]
    policy = str(policies[0])
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    own = html[html.rindex("<script>") + len("<script>") : html.rindex("</script>")]
    allowed = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert re.findall(r"script-src ([^;]*);", policy) == [f"'sha256-{allowed}'"]
    loaders = r"\b(fetch|XMLHttpRequest|WebSocket|import|eval|innerHTML|outerHTML)\b"
    assert not re.search(loaders, own)
    assert [tag for tag, _ in page.elements].count("script") == 1
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "img")
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:")), f"<{tag} {name}={value}>"
    assert "url(" not in html
    assert "@import" not in html


def test_the_page_is_well_formed_and_labelled(html):
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not page.open
    assert ("html", {"lang": "en"}) in page.elements
    identifiers = [a["id"] for _, a in page.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    for tag, attrs in page.elements:
        if tag == "svg":
            assert attrs.get("aria-label")
        if tag in ("select", "canvas", "input") and attrs.get("type") != "radio":
            assert "id" in attrs
        if tag == "th":
            assert attrs.get("scope") in ("row", "col", "rowgroup")
        if "aria-labelledby" in attrs:
            assert attrs["aria-labelledby"] in identifiers


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_enough_contrast_and_the_ramp_is_monotone(html, dark):
    style = html[html.index("<style>") : html.index("</style>")]
    roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", roots[int(dark)]))
    inks = r"^  \.s(\d) \{ --on: (#\w{6})" if dark else r"^\.s(\d) \{.*--on: (#\w{6})"
    ink = dict(re.findall(inks, style, re.MULTILINE))
    ramp = [colours[f"s{i}"] for i in range(9)]
    light = [luminance(colour) for colour in ramp]
    assert light == sorted(light, reverse=not dark)
    assert all(contrast(ramp[i], ink[str(i)]) >= 4.5 for i in range(9))
    fronts = {"page": "ink soft good bad", "card": "ink soft good bad", "chosen": "soft good bad"}
    fronts |= {"good-bg": "good", "bad-bg": "bad ink", "plain-bg": "ink", "code": "ink"}
    for back, names in fronts.items():
        for front in names.split():
            assert contrast(colours[front], colours[back]) >= 4.5, (front, back)
