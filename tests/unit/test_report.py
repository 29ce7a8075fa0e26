"""Reports: every number of the record appears, in both files, and nothing in it can break out of
the text."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path

import pytest

from headprune.bench.decoding import DecodingRow
from headprune.core.choice import Candidate, Choice
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.display import clean
from headprune.core.heads import AttentionSite, HeadId, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.record import Proof, QualityRow, RunRecord, SizeRow, SpeedRow
from headprune.maps.patterns import Pattern
from headprune.maps.pictures import AttentionPictures
from headprune.report import ReportInputs, render_html, render_markdown, write_report
from headprune.report.attention import attention_view
from headprune.report.formats import count, counts, duration, fixed, signed, times
from headprune.report.repeat import python_lines
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
def record() -> RunRecord:
    return record_of()


@pytest.fixture(scope="module")
def html(record: RunRecord) -> str:
    return render_html(record)


@pytest.fixture(scope="module")
def markdown(record: RunRecord) -> str:
    return render_markdown(record)


def test_headline_follows_from_the_record(html: str, markdown: str) -> None:
    sentence = (
        "16 of 32 heads removed; accuracy 0.976 → 0.969 before recovery, 0.974 after; "
        "1.12× faster at batch 32 × 128 tokens."
    )
    assert sentence in Page(html).text
    assert sentence in markdown


@pytest.mark.parametrize(
    ("name", "value", "delta"),
    [
        ("base", "0.9763", "–"),
        ("taylor", "0.9694", "−0.69"),
        ("random", "0.9128", "−6.35"),
        ("magnitude", "0.9415", "−3.48"),
        ("recovered (finetune)", "0.9740", "−0.23"),
    ],
)
def test_every_accuracy_row_has_its_difference(
    html: str, markdown: str, name: str, value: str, delta: str
) -> None:
    row = Page(html).table_row(name, html)
    assert f" {value} " in row
    assert f" {delta} " in row
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {name} |"))
    assert f" {value} " in line
    assert f" {delta} " in line


def test_random_row_says_its_spread_and_draws(html: str, markdown: str) -> None:
    for text in (Page(html).table_row("random", html), markdown):
        assert "± 0.0214" in text
        assert "mean of 10 draws" in text


def test_differences_are_taken_from_the_base_of_the_same_split_and_metric() -> None:
    rows = (
        QualityRow("base", 32, "accuracy", 0.9, "test", 100, 0.1),
        QualityRow("base", 32, "accuracy", 0.5, "validation", 100, 0.1),
        QualityRow("taylor", 16, "accuracy", 0.6, "validation", 100, 0.1),
        QualityRow("base", 32, "perplexity", 20.0, "test", 100, 3.0),
        QualityRow("taylor", 16, "perplexity", 25.0, "test", 100, 3.2),
    )
    text = render_markdown(record_of(quality=rows))
    assert "| taylor | 16 | 0.6000 | +10.00 |" in text
    assert "| taylor | 16 | 25.00 | 1.25× |" in text


def test_worse_is_marked_by_the_direction_of_the_metric() -> None:
    rows = (
        QualityRow("base", 32, "perplexity", 20.0, "test", 100, 3.0),
        QualityRow("taylor", 16, "perplexity", 25.0, "test", 100, 3.2),
    )
    html = render_html(record_of(quality=rows))
    assert 'class="bar bad"' in html
    assert 'class="bar good"' not in html


def test_comparison_with_random_is_not_claimed_within_the_spread(record: RunRecord) -> None:
    better = render_markdown(record)
    assert (
        "taylor is 5.66 points of accuracy better than removing as many heads at random" in better
    )
    within = replace(record, quality=(*record.quality[:2], replace(record.quality[2], value=0.965)))
    assert "no better and no worse than removing as many heads at random" in render_markdown(within)
    worse = replace(record, quality=(*record.quality[:2], replace(record.quality[2], value=0.999)))
    assert "2.96 points of accuracy worse" in render_markdown(worse)
    other_budget = replace(
        record, quality=(*record.quality[:2], replace(record.quality[2], kept_heads=20))
    )
    text = render_markdown(other_budget)
    assert "they are not compared" in text
    assert "do not all keep the same number of heads (16, 20)" in text


def test_heat_map_marks_exactly_the_removed_heads(record: RunRecord, html: str) -> None:
    assert record.scores is not None
    assert record.plan is not None
    cells = Page(html).cells()
    assert len(cells) == 32
    for cell, unit in zip(cells, record.scores.units(), strict=True):
        head, title = unit.heads[0], cell["title"] or ""
        removed = head in record.plan.mask.removed(unit.name)
        assert ("removed" in (cell["class"] or "").split()) == removed
        assert title.startswith(
            f"{unit.name}, head {head}, score {unit.value:.4g} ± {unit.standard_error:.2g}"
        )
        assert title.endswith("removed" if removed else "kept")


def test_heat_map_cells_can_be_reached_by_keyboard_and_read_aloud(html: str) -> None:
    inputs = [a for tag, a in Page(html).elements if tag == "input"]
    assert [a["aria-label"] for a in inputs] == [c["title"] for c in Page(html).cells()]
    assert {a["type"] for a in inputs} == {"radio"}


def test_colour_follows_the_score(record: RunRecord, html: str) -> None:
    assert record.scores is not None
    steps = [int(re.findall(r"\bs(\d)\b", c["class"] or "")[0]) for c in Page(html).cells()]
    order = sorted(range(32), key=lambda i: list(record.scores.units())[i].value)  # type: ignore[union-attr]
    assert [steps[i] for i in order] == sorted(steps)
    assert (steps[order[0]], steps[order[-1]]) == (0, 8)


def test_kv_groups_are_drawn_as_one_cell() -> None:
    record = record_of(5, 8, 4)
    cells = Page(render_html(record)).cells()
    assert len(cells) == 5 * 4
    assert {c["colspan"] for c in cells} == {"2"}
    assert "heads 2–3 (one key/value group)" in (cells[1]["title"] or "")


def test_a_group_says_what_each_of_its_heads_does() -> None:
    record = record_of(1, 4, 2)
    pictures = pictures_of(record)
    (site,) = pictures.sites
    first, second = pictures.pattern(HeadId(site.site, 0)), Pattern("own position", 0.5, 0.125)
    assert first is not None
    told = replace(pictures, sites=(replace(site, patterns=(first, second, None, second)),))
    titles = [cell["title"] or "" for cell in Page(render_html(record, ReportInputs(told))).cells()]
    assert f", head 0 mostly {first}, head 1 mostly {second}, " in titles[0]
    assert titles[1].count("mostly") == 1
    assert f", head 3 mostly {second}, " in titles[1]


def test_heads_of_one_key_value_group_are_cells_of_their_own_where_they_are_no_unit_or_no_neighbours() -> (
    None
):
    record = record_of(2, 4, 2)
    assert record.scores is not None
    for change in ({"policy": "free"}, {"grouping": "interleaved"}):
        scores = scores_of([replace(s, **change) for s in record.scores.sites])  # type: ignore[arg-type]
        cells = Page(render_html(replace(record, scores=scores, plan=None))).cells()
        assert len(cells) == 8
        assert all("heads" not in (c["title"] or "") for c in cells)


def test_heads_removed_before_the_run_are_not_counted_as_removed_by_it() -> None:
    sites = [
        AttentionSite("a.0", "bert", "self", 4, 4, 8, 8, (0, 2, 3)),
        AttentionSite("a.1", "bert", "self", 2, 2, 8, 8, (0, 1)),
    ]
    scores = scores_of(sites)
    mask = HeadMask.from_keep({"a.0": [0, 3], "a.1": [0, 1]}, {"a.0": 4, "a.1": 2})
    record = RunRecord("x", "done", "report", "2026", scores=scores, plan=PruningPlan(mask))
    page = Page(render_html(record))
    assert "1 of 5 heads removed" in page.text
    assert "4 of 5 heads are kept, chosen by hand." in page.text
    states = [(c["class"] or "").split()[1] for c in page.cells()]
    assert states == ["kept", "absent", "removed", "kept", "kept", "kept"]
    assert "removed before this run" in (page.cells()[1]["title"] or "")


def test_a_skewed_map_is_logarithmic_and_says_so() -> None:
    sites = [AttentionSite("a", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3))]
    skewed = replace(scores_of(sites), values=((1e-9, 1e-6, 2e-6, 5e-5),))
    text = Page(render_html(RunRecord("x", "done", "score", "2026", scores=skewed))).text
    assert "logarithmic scale" in text
    assert "in units of 10⁻⁶" in text
    even = replace(scores_of(sites), values=((-1.0, 0.0, 1.0, 2.0),))
    assert (
        "linear scale"
        in Page(render_html(RunRecord("x", "done", "score", "2026", scores=even))).text
    )


def test_an_interval_that_spans_one_is_no_difference(html: str, markdown: str) -> None:
    assert "no measurable difference" in Page(html).table_row("1 × 128", html)
    assert "1.09× faster" in Page(html).table_row("8 × 128", html)
    line = next(line for line in markdown.splitlines() if line.startswith("| 1 × 128"))
    assert (
        "8.12 / 8.71 | 7.98 / 8.66 | 1.01× | 0.991 to 1.034 | no measurable difference in speed |"
        " 200 |" in line
    )


def test_a_slower_model_is_called_slower(record: RunRecord) -> None:
    slow = replace(record, speed=(SpeedRow(4, 16, 0.1, 0.1, 0.125, 0.13, 0.8, 0.78, 0.82, 50),))
    assert "1.25× slower at batch 4 × 16 tokens" in render_markdown(slow)


def test_headline_speed_is_the_largest_batch_not_the_best_ratio(record: RunRecord) -> None:
    rows = (replace(record.speed[0], ratio=3.0, low=2.9, high=3.1), record.speed[2])
    assert (
        "1.12× faster at batch 32" in render_markdown(replace(record, speed=rows)).splitlines()[2]
    )


def test_sizes_and_their_change(html: str) -> None:
    row = Page(html).table_row("parameters", html)
    assert "11.17 M" in row
    assert "10.12 M" in row
    assert "−9.4 %" in row
    assert "4,096 2,048 −50.0 %" in Page(html).table_row("KV cache, bytes a token", html)


@pytest.mark.parametrize(
    ("difference", "passes"), [(1.0e-05, True), (1.1e-05, False), (float("nan"), False)]
)
def test_the_proof_is_read_against_its_tolerance(
    record: RunRecord, difference: float, passes: bool
) -> None:
    proof = replace(record.proofs[0], max_difference=difference)
    for text in (
        Page(render_html(replace(record, proofs=(proof,)))).text,
        render_markdown(replace(record, proofs=(proof,))),
    ):
        assert ("The pruned model equals the gated one" in text) == passes
        assert ("FAILED" in text) == (not passes)


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_broken_run_shows_stage_error_and_what_exists(record: RunRecord, status: str) -> None:
    broken = replace(
        record,
        status=status,
        stage="recover",
        error="CUDA out of memory\n\x1b[31mat line 3\x1b[0m",
        speed=(),
        proofs=(),
    )  # type: ignore[arg-type]
    page, text = Page(render_html(broken)), render_markdown(broken)
    for shown in (page.text, text):
        assert "in stage recover" in shown
        assert "CUDA out of memory" in shown
        assert "at line 3" in shown
        assert "\x1b" not in shown
        assert "0.9694" in shown
        assert "Not in this record: speed, proof." in shown
    assert len(page.cells()) == 32


def test_how_auto_chose_is_a_table(record: RunRecord) -> None:
    """The chosen heads have no difference from themselves, whoever keeps them; signs are true
    ones."""
    candidates = (
        Candidate("surgeon", FrozenDict({"curvature": "logits"}), False, 0.5, 0.0, 0.0, 0.0),
        Candidate("fisher", EMPTY, False, 0.5, 0.0, 0.0, 0.0, same_as="surgeon (curvature=logits)"),
        Candidate("taylor", EMPTY, False, 0.75, 0.25, -0.125, 0.625),
        Candidate("random", EMPTY, False, 0.75, 0.25, -0.25, 0.75),
    )
    choice = Choice(
        candidates,
        candidates[0].name,
        "keep 50 % of the heads",
        "lstsq",
        1200,
        0.25,
        notes=("a note",),
    )
    assert record.scores is not None
    chosen = replace(record, scores=replace(record.scores, choice=choice))
    page, text = render_html(chosen), render_markdown(chosen)
    assert "How the scorer was chosen" not in render_html(record)
    for row in (
        "| surgeon (curvature=logits) | 0.5000 | – | taken |",
        "| fisher | 0.5000 | – | the heads of surgeon (curvature=logits) |",
        "| taylor | 0.7500 | +0.2500 [−0.1250, +0.6250] | ties |",
        "| random | 0.7500 | +0.2500 [−0.2500, +0.7500] |  |",
    ):
        assert row in text
    for words in (
        (
            "(keep 50 % of the heads) was cut and refitted by lstsq, and judged by the loss of"
            " 1,200 rows"
        ),
        "at most 0.1250 below the chosen one's (95 % confidence)",
        "are better than random ones, refitted alike.",
        "a note",
    ):
        assert words in text
        assert words in unescape(page)


def test_an_empty_record_renders() -> None:
    empty = RunRecord("x", "running", "load", "2026-01-01T00:00:00Z")
    page = Page(render_html(empty))
    assert "The run is in stage load, before anything was measured." in page.text
    assert "Not in this record: scores, plan, accuracy, speed, size, proof." in page.text
    assert "before anything was measured" in render_markdown(empty)


def test_generation_has_a_table_of_its_own(record: RunRecord) -> None:
    phases = {
        "prefill": SpeedRow(8, 128, 0.5, 0.5, 0.4, 0.4, 1.25, 1.2, 1.3, 9),
        "decode": SpeedRow(8, 128, 0.4, 0.4, 0.32, 0.32, 1.25, 1.21, 1.29, 9),
    }
    row = DecodingRow(32, **phases, original_bytes=2_097_152, pruned_bytes=1_048_576)
    noted = {"decoding": ({**asdict(row), "tokens_per_second": row.tokens_per_second()},)}
    found = replace(record, metrics={**record.metrics, **noted})
    found = RunRecord.from_json(found.to_json())  # as it is stored
    line = "| 8 × 128 | 2048 → 2560 | 640 → 800 | 1.25× | 1.210 to 1.290 | 2,097,152 → 1,048,576 |"
    assert line in render_markdown(found)
    page = render_html(found)
    assert 'id="decoding"' in page
    assert "640 → 800" in page
    assert "decoding.0" not in page
    assert 'id="decoding"' not in render_html(record)
    other = replace(record, metrics={"decoding": "greedy"})  # of somebody else's making
    assert "| decoding | greedy |" in render_markdown(other)


@pytest.mark.parametrize("missing", ["scores", "plan", "quality", "speed", "size", "proofs"])
def test_each_part_may_be_missing(record: RunRecord, missing: str) -> None:
    without = replace(record, **{missing: None if missing in ("scores", "plan") else ()})
    page = Page(render_html(without))
    assert not page.open
    assert "Not in this record" in page.text
    assert "Not in this record" in render_markdown(without)
    assert bool(page.cells())


def test_no_base_row_means_no_differences(record: RunRecord) -> None:
    without = replace(record, quality=record.quality[1:])
    assert "against base" not in render_markdown(without)
    assert "accuracy 0.969 before recovery, 0.974 after" in render_markdown(without)
    assert "; accuracy 0.969 after the cut" in render_markdown(
        replace(record, quality=record.quality[1:2])
    )
    chance = replace(record, quality=record.quality[2:3])
    assert "accuracy" not in render_markdown(chance).partition("## ")[0]


def test_a_run_that_measured_only_the_base_says_so(record: RunRecord) -> None:
    assert "accuracy 0.976 before the cut" in render_markdown(
        replace(record, quality=record.quality[:1])
    )


def test_heads_of_one_score_have_the_colour_in_the_middle(record: RunRecord) -> None:
    assert record.scores is not None
    alike = tuple(tuple(0.25 for _ in row) for row in record.scores.values)
    page = Page(render_html(replace(record, scores=replace(record.scores, values=alike))))
    assert {re.findall(r"\bs(\d)\b", cell["class"] or "")[0] for cell in page.cells()} == {"4"}


def nasty_inputs(record: RunRecord) -> ReportInputs:
    """Pictures, other scores and an agreement, all of whose words are dangerous."""
    assert record.scores is not None
    maps = replace(maps_of(record, 1, 2), tokens=((NASTY, NASTY),))
    pictures = AttentionPictures.of(maps)
    told = replace(pictures, examples=tuple(replace(e, title=NASTY) for e in pictures.examples))
    other = replace(record.scores, scorer=NASTY + "2")
    return ReportInputs(told, (other,), agreement(record.scores, other))


def test_data_stays_text() -> None:
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
    page = Page(render_html(record, nasty_inputs(record)))
    assert not page.open
    assert [a.get("type") for tag, a in page.elements if tag == "script"] == [
        "application/json",
        None,
    ]
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert page.text.count("<script>") > 30
    markdown = re.sub(
        r"^(`{3,})\n.*?^\1$", "", render_markdown(record), flags=re.DOTALL | re.MULTILINE
    )
    assert "<script>" not in markdown.replace("\\<script\\>", "")
    assert "\n|" in markdown
    widths = {
        re.sub(r"\\.", "", line).count("|")
        for line in markdown.splitlines()
        if line.startswith(f"| {NASTY[0]}")
    }
    assert len(widths) <= 1


def test_a_block_of_backticks_cannot_close_its_fence(record: RunRecord) -> None:
    broken = replace(record, status="failed", error="before\n```\n# injected\n````\nafter")
    assert "`````\nbefore\n```\n# injected\n````\nafter\n`````" in render_markdown(broken)


def test_the_page_loads_nothing(html: str) -> None:
    page = Page(html)
    policy = [a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv")]
    assert policy
    assert policy[0] is not None
    assert policy[0].startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    own = html[html.rindex("<script>") + len("<script>") : html.rindex("</script>")]
    allowed = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert re.findall(r"script-src ([^;]*);", policy[0]) == [f"'sha256-{allowed}'"]
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|import|eval|innerHTML|outerHTML)\b", own
    )
    assert [tag for tag, _ in page.elements].count("script") == 1
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "img")
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:")), f"<{tag} {name}={value}>"
    assert "url(" not in html
    assert "@import" not in html


def test_the_page_is_well_formed_and_labelled(html: str) -> None:
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not page.open
    assert ("html", {"lang": "en"}) in page.elements
    identifiers = [a["id"] for _, a in page.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    for tag, attrs in page.elements:
        if tag == "svg":
            assert attrs.get("aria-label")
        if tag in ("select", "canvas", "input") and attrs.get("type") not in ("radio",):
            assert "id" in attrs
        if tag == "th":
            assert attrs.get("scope") in ("row", "col", "rowgroup")
        if "aria-labelledby" in attrs:
            assert attrs["aria-labelledby"] in identifiers


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_enough_contrast_and_the_ramp_is_monotone(html: str, dark: bool) -> None:
    style = html[html.index("<style>") : html.index("</style>")]
    roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", roots[1 if dark else 0]))
    light_ink = dict(re.findall(r"^\.s(\d) \{.*--on: (#\w{6})", style, re.MULTILINE))
    dark_ink = dict(re.findall(r"^  \.s(\d) \{ --on: (#\w{6})", style, re.MULTILINE))
    ink = dark_ink if dark else light_ink
    ramp = [colours[f"s{i}"] for i in range(9)]
    steps = [luminance(c) for c in ramp]
    assert steps == sorted(steps, reverse=not dark)
    assert all(contrast(ramp[i], ink[str(i)]) >= 4.5 for i in range(9))
    for front, back in [
        *((front, back) for front in ("ink", "soft", "good", "bad") for back in ("page", "card")),
        *(
            ("good", "good-bg"),
            ("bad", "bad-bg"),
            ("ink", "plain-bg"),
            ("ink", "bad-bg"),
            ("ink", "code"),
        ),
        *(("soft", "chosen"), ("good", "chosen"), ("bad", "chosen")),
    ]:
        assert contrast(colours[front], colours[back]) >= 4.5, (front, back)


def test_provenance_is_complete(record: RunRecord, html: str, markdown: str) -> None:
    assert record.scores is not None
    assert record.plan is not None
    for text in (Page(html).text, markdown.replace("\\", "")):
        for part in (
            "2.9.0",
            "AMD EPYC 7B13",
            "a996f20c",
            "bert-mini",
            "5 min 12 s",
            "510, 511, (512 in all)",
        ):
            assert part in text, part
        for digest in (
            record.digest,
            record.scores.digest,
            record.plan.digest,
            "5f1c" * 16,
            "a94e" * 16,
            "d0d0" * 16,
        ):
            assert digest in text


def test_the_recipe_is_shown_whole(record: RunRecord, markdown: str) -> None:
    assert "data:\n  path: sst2\n  split: train\n" in markdown


def test_do_it_yourself_lines_are_safe_and_run_the_same_method(record: RunRecord) -> None:
    text = render_markdown(replace(record, name="my run; rm"))
    assert "headprune run 'my run; rm'" in text
    resolved = replace(record, recipe=FrozenDict({"task": "causal_lm", "out": "my runs/a"}))
    assert "headprune run 'my runs/a/recipe.yaml' --out 'my runs/a-again'" in render_markdown(
        resolved
    )
    assert "plan = hp.select(scores, hp.Budget(keep_heads=0.5), hp.selection.GlobalTopk())" in text
    lines = re.findall(r"```\n(import headprune.*?)\n```", text, re.DOTALL)[0]
    compile(lines, "lines", "exec")


def test_every_number_of_the_page_tables_is_in_the_markdown_twin(html: str, markdown: str) -> None:
    rows = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html[html.index("quality-1") :], re.DOTALL)
    numbers = {
        n for row in rows for n in re.findall(r"[−+]?\d[\d,]*\.?\d+", re.sub(r"<[^>]*>", " ", row))
    }
    assert len(numbers) > 30
    assert not {n for n in numbers if n not in markdown}
    scores = re.findall(r'<span class="score">(.*?)</span>', html)
    assert len(scores) == 32
    assert all(f" {s} |" in markdown or f"~~{s}~~" in markdown for s in scores)


def test_other_measurements_are_not_dropped(record: RunRecord) -> None:
    extra = replace(record, metrics=FrozenDict({"agreement": {"top1": 0.981}}))
    assert "agreement.top1 0.981" in Page(render_html(extra)).text
    assert "| agreement.top1 | 0.981 |" in render_markdown(extra)


def test_infinite_and_missing_numbers_render(record: RunRecord) -> None:
    nan = float("nan")
    rows = (
        replace(record.quality[0], value=0.0, metric="perplexity"),
        replace(record.quality[1], value=nan, metric="perplexity"),
    )
    odd = replace(
        record,
        quality=rows,
        speed=(replace(record.speed[0], ratio=nan, low=nan, high=nan),),
        size=(SizeRow("heads", 0, 0),),
    )
    assert "no usable timing" in render_markdown(odd)
    assert not Page(render_html(odd)).open


def test_write_report_writes_both_files_whole(record: RunRecord, tmp_path: Path) -> None:
    odd = replace(record, warnings=("a lone surrogate \udc80",))
    page, twin = write_report(odd, tmp_path / "new" / "folder")
    assert (page.name, twin.name) == ("report.html", "report.md")
    assert page.read_text(encoding="utf-8") == render_html(odd)
    assert twin.read_text(encoding="utf-8") == render_markdown(odd)
    assert sorted(p.name for p in page.parent.iterdir()) == ["report.html", "report.md"]


def test_rendering_depends_on_the_record_alone(record: RunRecord, html: str) -> None:
    assert render_html(RunRecord.from_json(record.to_json())) == html


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from headprune.report import write_report, write_comparison; "
        "import headprune.run.reporting, headprune.scoring._agreement; "
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_formats() -> None:
    assert [signed(v, 1) for v in (1.0, -1.0, 0.01, -0.01)] == ["+1.0", "−1.0", "0.0", "0.0"]
    assert fixed(float("-inf"), 2) == "−∞"
    assert [count(v) for v in (float("inf"), float("-inf"), float("nan"))] == [
        "∞",
        "−∞",
        fixed(float("nan"), 0),
    ]
    assert [count(v) for v in (512, 9_999_999, 10_000_000, 2.5e12)] == [
        "512",
        "9,999,999",
        "10 M",
        "2.5 T",
    ]
    assert [times(v) for v in (1.0, 1.004, 1.126)] == ["1.00×", "1.004×", "1.13×"]
    assert [duration(v) for v in (0.0421, 59.96, 3599.7)] == ["0.042 s", "60.0 s", "1 h 0 min"]
    assert clean("a\x00b\r\n\x1b[1mc") == "a\ufffdb\nc"


# ----------------------------------------------------------------------------------------------
# more in a page


def test_kinds_of_attention_stand_apart() -> None:
    sites = [
        AttentionSite(f"{tower}.{i}.{name}", "t5", kind, 4, 4, 8, 8, (0, 1, 2, 3))  # type: ignore[arg-type]
        for tower, name, kind in (
            ("enc", "own", "self"),
            ("dec", "own", "causal"),
            ("dec", "other", "cross"),
        )
        for i in range(2)
    ]
    record = RunRecord("x", "done", "score", "2026", scores=scores_of(sites))
    html = render_html(record)
    page = Page(html)
    titles = ["Encoder: self-attention enc.*.own", "Decoder: causal self-attention dec.*.own"]
    titles.append("Cross-attention dec.*.other")
    places = [page.text.index(title) for title in titles]
    assert places == sorted(places)
    assert html.count("<tbody>") - html[html.index('id="provenance"') :].count("<tbody>") == 3
    labels = re.findall(r'<tr><th scope="row" title="([\w.]*)">(\w*)</th>', html)
    assert labels == [(site.name, site.name.split(".")[1]) for site in sites]
    assert "- Cross-attention: dec.\\*.other" in render_markdown(record)


def test_other_scores_have_maps_of_their_own_and_the_agreement_is_shown(record: RunRecord) -> None:
    assert record.scores is not None
    values = tuple(tuple(reversed(row)) for row in record.scores.values)
    other = replace(record.scores, values=values, scorer="entropy", standard_errors=None)
    inputs = ReportInputs(scores=(other,), agreement=agreement(record.scores, other))
    html, markdown = render_html(record, inputs), render_markdown(record, inputs)
    page = Page(html)
    assert page.text.count("taylor (of the plan)") == 1
    cells = page.cells()
    assert len(cells) == 64
    for mine, theirs in zip(cells[:8], reversed(cells[32:40]), strict=True):
        assert mine["data-score"] == theirs["data-score"]
    assert len({a["name"] for tag, a in page.elements if tag == "input"}) == 2
    assert inputs.agreement is not None
    for cell in inputs.agreement.rows()[0]:
        assert cell in page.text
        assert cell.replace("[", "\\[").replace("]", "\\]") in markdown
    assert "### Scores of entropy" in markdown
    assert 'id="scorer"' not in render_html(record)


def test_what_heads_do_is_said_with_its_share(record: RunRecord) -> None:
    pictures = pictures_of(record)
    assert record.scores is not None
    first = HeadId(record.scores.sites[1].name, 0)
    pattern = pictures.pattern(first)
    assert pattern is not None
    assert pattern.name == "previous token"
    html = render_html(record, ReportInputs(pictures))
    text, markdown = Page(html).text, render_markdown(record, ReportInputs(pictures))
    share, chance = (f"{100 * v:.0f} %" for v in (pattern.share, pattern.chance))
    assert f"{first.site}, head 0 previous token {share} {chance}" in text
    assert f"| {first.site}, head 0 | previous token | {share} | {chance} |" in markdown
    title = next(
        c["title"]
        for c in Page(html).cells()
        if (c["title"] or "").startswith(f"{first.site}, head 0,")
    )
    assert f"mostly previous token ({share} of its weight; even attention: {chance})" in (
        title or ""
    )
    counted = Page(html).table_row("previous token", html)
    assert record.plan is not None
    kept = sum(HeadId(site.name, 0) in record.plan.mask for site in record.scores.sites)
    assert f" 4 {kept} {4 - kept} " in counted
    assert 'id="attention"' not in render_html(record)
    assert "What heads attend to" not in render_markdown(record)
    assert "over 3 test rows, as the uncut model attends to them." in markdown
    assert "over 1 test row, as the uncut model attends to it." in render_markdown(
        record, ReportInputs(pictures_of(record, 1))
    )


def test_an_image_is_seen_from_its_mean_its_class_token_and_its_patches(record: RunRecord) -> None:
    html = render_html(record, ReportInputs(image_pictures_of(record)))
    options = re.findall(r"<option[^>]*>([^<]*)</option>", html[html.index("attention-query") :])
    assert options[:3] == ["mean over all queries", "class token", "patch in row 1, column 1"]
    assert options[10] == "patch in row 3, column 3"
    assert "test row 0, label 7" in html


def test_an_image_that_is_shown_in_part_says_so(record: RunRecord) -> None:
    pictures = replace(image_pictures_of(record), whole=False)
    shown = "of every map the mean over all queries and the view from the tokens before the patches"
    assert f"To keep this file small it shows {shown}" in render_html(
        record, ReportInputs(pictures)
    )


def test_heads_that_no_plan_is_for_are_neither_kept_nor_removed(record: RunRecord) -> None:
    other = PruningPlan(HeadMask.from_keep({}, {"another site": 8}))
    for plan in (None, other):
        view = attention_view(replace(record, plan=plan), pictures_of(record))
        assert view is not None
        assert view.planned == (plan is not None)
        assert {line.state for line in view.heads} == {""}


def test_144_heads_and_8_examples_stay_under_a_megabyte_and_a_half() -> None:
    record = costed(record_of(12, 12))
    for length in (26, 48):
        pictures = pictures_of(record, 8, length)
        assert len(pictures.examples) == 8
        assert record.scores is not None
        others = tuple(replace(record.scores, scorer=f"other {i}") for i in range(3))
        page = render_html(
            record, ReportInputs(pictures, others, agreement(record.scores, *others))
        )
        assert len(page.encode()) < 1_500_000
        assert pictures.whole == (length == 26)
    assert "the first 26 tokens of every example" in page


def test_layers_are_told_before_and_after(record: RunRecord) -> None:
    record = costed(record)
    assert record.plan is not None
    html, markdown = render_html(record), render_markdown(record)
    kept = [len(row.kept) for row in record.plan.mask.rows]
    per_head = 1000 * 128 + 64 * 128**2
    for layer, n in enumerate(kept):
        assert f"| {layer} | 8 → {n} | 8,000 → {1000 * n:,} | " in markdown
        assert (
            f"{' → '.join(counts(8 * per_head, n * per_head))} | 4,096 → {512 * n:,} |" in markdown
        )
    assert f"| all layers | 32 → {sum(kept)} | 32,000 → {1000 * sum(kept):,} |" in markdown
    assert f"32 → {sum(kept)}" in Page(html).table_row("all layers", html)
    assert 'id="layers"' not in render_html(record_of())


def test_the_speed_grid_draws_break_even_between_faster_and_not_faster(record: RunRecord) -> None:
    def at(batch: int, length: int, ratio: float) -> SpeedRow:
        return SpeedRow(
            batch, length, 1.0, 1.0, 1 / ratio, 1.0, ratio, ratio - 0.05, ratio + 0.05, 9
        )

    rows = (at(1, 16, 0.8), at(1, 128, 1.01), at(8, 16, 1.2), at(8, 128, 1.5))
    html = render_html(replace(record, speed=rows))
    grid = html[
        html.index('class="speed-grid"') : html.index("</table>", html.index('class="speed-grid"'))
    ]
    cells = re.findall(r'<td class="([^"]*)" title="([^"]*)">([^<]*)<', grid)
    assert [(c, text) for c, _, text in cells] == [
        ("bad edge-bottom", "0.80×"),
        ("plain edge-bottom", "1.01×"),
        ("good", "1.20×"),
        ("good", "1.50×"),
    ]
    assert "no measurable difference in speed, 95 % interval 0.960 to 1.060" in cells[1][1]
    words = "The pruned model is measurably faster in 2 of 4 places; the thick line is break-even"
    assert words in html
    assert words in render_markdown(replace(record, speed=rows))
    beside = render_html(replace(record, speed=(rows[1], rows[3])))
    assert "plain edge-bottom" in beside
    every = render_markdown(replace(record, speed=rows[2:]))
    assert "faster everywhere that was measured" in every
    assert "faster nowhere" in render_markdown(replace(record, speed=rows[:2]))
    hole = render_html(replace(record, speed=rows[:3]))
    assert "batch 8 × 128 tokens: not measured" in hole
    assert 'class="speed-grid"' not in render_html(replace(record, speed=rows[:1]))


def test_do_it_yourself_knows_a_layout_of_ones_own(record: RunRecord) -> None:
    own = replace(record, recipe=FrozenDict({"model": {"layouts": "my.models:LAYOUT"}}))
    plain = python_lines(record)
    assert "find_sites" not in plain
    lines = python_lines(own).split("\n")
    assert lines[0] == "from my.models import LAYOUT"
    assert "sites = hp.find_sites(model, layouts=[LAYOUT])" in lines
    assert "hp.prune_(model, plan, sites=sites)" in lines
    assert all(
        "sites=sites" in line for line in lines if line.startswith(("scores =", "hp.prune_"))
    )
    compile(python_lines(own), "report", "exec")
    hostile = replace(record, recipe=FrozenDict({"model": {"layouts": "os:x\nimport shutil"}}))
    assert python_lines(hostile) == plain
