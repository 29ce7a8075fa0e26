"""Reports: every number of the record appears, in both files, and nothing in it can break out of the text."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headprune.bench.decoding import DecodingRow
from headprune.core.codec import FrozenDict
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import Budget, PruningPlan
from headprune.core.record import Proof, QualityRow, RunRecord, SizeRow, SpeedRow
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.report import render_html, render_markdown, write_report
from headprune.report.formats import clean, count, duration, fixed, signed, times

NASTY = '<script>alert("x")</script>|`*&'


def scores_of(sites: list[AttentionSite], scale: float = 1.0, errors: bool = True) -> HeadScores:
    draw = random.Random(0)
    values = tuple(tuple(scale * draw.random() ** 2 for _ in s.units) for s in sites)
    spread = tuple(tuple(0.07 * v + 0.002 * scale for v in row) for row in values) if errors else None
    print_of = ModelFingerprint("5f1c" * 16, "a94e" * 16)
    return HeadScores(
        tuple(sites), values, spread, "taylor", FrozenDict({"reduce": "example"}), 512, print_of, "d0d0" * 16, 7
    )


def plan_of(scores: HeadScores, share: float = 0.5) -> PruningPlan:
    ranked = scores.ranked()
    gone = {(u.name, h) for u in ranked[: round(len(ranked) * (1 - share))] for h in u.heads}
    keep = {s.name: [h for h in s.heads if (s.name, h) not in gone] for s in scores.sites}
    mask = HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in scores.sites})
    return PruningPlan(mask, Budget(keep_heads=share), "global_topk", FrozenDict(), "taylor", scores.digest)


def record_of(n_layers: int = 4, n_heads: int = 8, n_kv: int | None = None, **changes: object) -> RunRecord:
    """A realistic record of a run that went well."""
    kind = "causal" if n_kv else "self"
    name = "model.layers.{}.self_attn" if n_kv else "bert.encoder.layer.{}.attention.self"
    sites = [
        AttentionSite(
            name.format(i), "llama" if n_kv else "bert", kind, n_heads, n_kv or n_heads, 64, 64, (*range(n_heads),)
        )
        for i in range(n_layers)
    ]
    scores = scores_of(sites)
    plan = plan_of(scores)
    total, kept = n_layers * n_heads, plan.mask.n_kept
    record = RunRecord(
        name="sst2-bert-taylor",
        status="done",
        stage="report",
        created="2026-03-02T09:14:31Z",
        recipe=FrozenDict(
            {"model": "bert-mini", "data": {"path": "sst2", "split": "train"}, "scorer": "taylor", "keep_heads": 0.5}
        ),
        versions=FrozenDict({"python": "3.12.4", "torch": "2.9.0", "transformers": "5.14.0", "headprune": "0.1.0"}),
        hardware=FrozenDict({"processor": "AMD EPYC 7B13", "threads": 2, "memory_gib": 7.8, "accelerator": None}),
        git_commit="a996f20c",
        seeds=FrozenDict({"score": 7, "random": list(range(10)), "finetune": 11}),
        rows=FrozenDict({"score": {"split": "train", "rows": list(range(512))}, "test": {"split": "test", "n": 872}}),
        scores=scores,
        plan=plan,
        quality=(
            QualityRow("base", total, "accuracy", 0.9763, "test", 872, 0.0811),
            QualityRow("taylor", kept, "accuracy", 0.9694, "test", 872, 0.1022),
            QualityRow("random", kept, "accuracy", 0.9128, "test", 872, 0.2671, draws=10, spread=0.0214),
            QualityRow("magnitude", kept, "accuracy", 0.9415, "test", 872, 0.1743),
            QualityRow("recovered (finetune)", kept, "accuracy", 0.974, "test", 872, 0.0874, trained=True),
        ),
        speed=(
            SpeedRow(1, 128, 0.00812, 0.00871, 0.00798, 0.00866, 1.012, 0.991, 1.034, 200),
            SpeedRow(8, 128, 0.0412, 0.0437, 0.0378, 0.0395, 1.09, 1.071, 1.108, 200),
            SpeedRow(32, 128, 0.1583, 0.1641, 0.1413, 0.1478, 1.12, 1.104, 1.139, 100),
        ),
        size=(
            SizeRow("heads", float(total), float(kept)),
            SizeRow("parameters", 11_171_074.0, 10_120_450.0),
            SizeRow("MACs (128 tokens)", 412_876_800.0, 345_505_792.0),
            SizeRow("KV cache, bytes a token", 4096.0, 2048.0),
        ),
        proofs=(Proof("logits", 3.1e-07, 4.82, 1.0e-05, "float32", 16),),
        timings=FrozenDict({"load": 3.21, "score": 41.8, "finetune": 312.0, "bench": 78.4}),
        warnings=("The speed was measured on two shared cores; expect other ratios elsewhere.",),
    )
    return replace(record, **changes)  # type: ignore[arg-type]


class Page(HTMLParser):
    """What a browser would see: elements with attributes, and text without tags."""

    VOID = frozenset({"meta", "link", "br", "wbr", "input", "col", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def cells(self) -> list[dict[str, str | None]]:
        return [a for tag, a in self.elements if tag == "td" and "cell" in (a.get("class") or "").split()]

    def table_row(self, name: str, html: str) -> str:
        found = re.search(rf'<tr[^>]*><th scope="row"[^>]*>{re.escape(name)}.*?</tr>', html, re.DOTALL)
        assert found, f"no row {name}"
        return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", found[0]))


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
def test_every_accuracy_row_has_its_difference(html: str, markdown: str, name: str, value: str, delta: str) -> None:
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
    assert "taylor is 5.66 points of accuracy better than removing as many heads at random" in better
    within = replace(record, quality=(*record.quality[:2], replace(record.quality[2], value=0.965)))
    assert "no better and no worse than removing as many heads at random" in render_markdown(within)
    worse = replace(record, quality=(*record.quality[:2], replace(record.quality[2], value=0.999)))
    assert "2.96 points of accuracy worse" in render_markdown(worse)
    other_budget = replace(record, quality=(*record.quality[:2], replace(record.quality[2], kept_heads=20)))
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
        assert title.startswith(f"{unit.name}, head {head}, score {unit.value:.4g} ± {unit.standard_error:.2g}")
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


def test_heads_of_one_key_value_group_are_cells_of_their_own_where_they_are_no_unit_or_no_neighbours() -> None:
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
    assert "4 of 5 heads stay, chosen by hand." in page.text
    states = [(c["class"] or "").split()[1] for c in page.cells()]
    assert states == ["kept", "gone", "removed", "kept", "kept", "kept"]
    assert "removed before this run" in (page.cells()[1]["title"] or "")


def test_a_skewed_map_is_logarithmic_and_says_so() -> None:
    sites = [AttentionSite("a", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3))]
    skewed = replace(scores_of(sites), values=((1e-9, 1e-6, 2e-6, 5e-5),))
    text = Page(render_html(RunRecord("x", "done", "score", "2026", scores=skewed))).text
    assert "logarithmic scale" in text
    assert "in units of 10⁻⁶" in text
    even = replace(scores_of(sites), values=((-1.0, 0.0, 1.0, 2.0),))
    assert "linear scale" in Page(render_html(RunRecord("x", "done", "score", "2026", scores=even))).text


def test_an_interval_that_spans_one_is_no_difference(html: str, markdown: str) -> None:
    assert "no measurable difference" in Page(html).table_row("1 × 128", html)
    assert "1.09× faster" in Page(html).table_row("8 × 128", html)
    line = next(line for line in markdown.splitlines() if line.startswith("| 1 × 128"))
    assert "8.12 / 8.71 | 7.98 / 8.66 | 1.01× | 0.991 to 1.034 | no measurable difference in speed | 200 |" in line


def test_a_slower_model_is_called_slower(record: RunRecord) -> None:
    slow = replace(record, speed=(SpeedRow(4, 16, 0.1, 0.1, 0.125, 0.13, 0.8, 0.78, 0.82, 50),))
    assert "1.25× slower at batch 4 × 16 tokens" in render_markdown(slow)


def test_headline_speed_is_the_largest_batch_not_the_best_ratio(record: RunRecord) -> None:
    rows = (replace(record.speed[0], ratio=3.0, low=2.9, high=3.1), record.speed[2])
    assert "1.12× faster at batch 32" in render_markdown(replace(record, speed=rows)).splitlines()[2]


def test_sizes_and_their_change(html: str) -> None:
    row = Page(html).table_row("parameters", html)
    assert "11.17 M" in row
    assert "10.12 M" in row
    assert "−9.4 %" in row
    assert "4,096 2,048 −50.0 %" in Page(html).table_row("KV cache, bytes a token", html)


@pytest.mark.parametrize(("difference", "passes"), [(1.0e-05, True), (1.1e-05, False), (float("nan"), False)])
def test_the_proof_is_read_against_its_tolerance(record: RunRecord, difference: float, passes: bool) -> None:
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
        metrics=FrozenDict(
            {"attention": {"title": NASTY, "maps": [{"site": NASTY, "head": 0, "grid": [[1.0]]}]}, NASTY: 1}
        ),
        error=NASTY,
    )
    page = Page(render_html(record))
    assert not page.open
    assert "script" not in {tag for tag, _ in page.elements}
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert page.text.count("<script>") > 20
    markdown = re.sub(r"^(`{3,})\n.*?^\1$", "", render_markdown(record), flags=re.DOTALL | re.MULTILINE)
    assert "<script>" not in markdown.replace("\\<script\\>", "")
    assert "\n|" in markdown
    widths = {re.sub(r"\\.", "", line).count("|") for line in markdown.splitlines() if line.startswith(f"| {NASTY[0]}")}
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
    for tag, attrs in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "img")
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
        if tag == "th":
            assert attrs.get("scope") in ("row", "col")
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
        *(("good", "good-bg"), ("bad", "bad-bg"), ("ink", "plain-bg"), ("ink", "bad-bg"), ("ink", "code")),
        *(("soft", "chosen"), ("good", "chosen"), ("bad", "chosen")),
    ]:
        assert contrast(colours[front], colours[back]) >= 4.5, (front, back)


def test_provenance_is_complete(record: RunRecord, html: str, markdown: str) -> None:
    assert record.scores is not None
    assert record.plan is not None
    for text in (Page(html).text, markdown.replace("\\", "")):
        for part in ("2.9.0", "AMD EPYC 7B13", "a996f20c", "bert-mini", "5 min 12 s", "510, 511, (512 in all)"):
            assert part in text, part
        for digest in (record.digest, record.scores.digest, record.plan.digest, "5f1c" * 16, "a94e" * 16, "d0d0" * 16):
            assert digest in text


def test_the_recipe_is_shown_whole(record: RunRecord, markdown: str) -> None:
    assert "data:\n  path: sst2\n  split: train\n" in markdown


def test_do_it_yourself_lines_are_safe_and_run_the_same_method(record: RunRecord) -> None:
    text = render_markdown(replace(record, name="my run; rm"))
    assert "headprune run 'my run; rm'" in text
    assert "plan = hp.select(scores, hp.Budget(keep_heads=0.5), 'global_topk')" in text
    lines = re.findall(r"```\n(import headprune.*?)\n```", text, re.DOTALL)[0]
    compile(lines, "lines", "exec")


def test_every_number_of_the_page_tables_is_in_the_markdown_twin(html: str, markdown: str) -> None:
    rows = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html[html.index("quality-1") :], re.DOTALL)
    numbers = {n for row in rows for n in re.findall(r"[−+]?\d[\d,]*\.?\d+", re.sub(r"<[^>]*>", " ", row))}
    assert len(numbers) > 30
    assert not {n for n in numbers if n not in markdown}
    scores = re.findall(r'<span class="score">(.*?)</span>', html)
    assert len(scores) == 32
    assert all(f" {s} |" in markdown or f"~~{s}~~" in markdown for s in scores)


def test_attention_pictures_are_drawn_only_when_saved(record: RunRecord, html: str) -> None:
    assert 'id="attention"' not in html
    grid = [[1.0, 0.0], [0.25, float("nan")]]
    metrics = FrozenDict(
        {"attention": {"title": "What heads look at", "maps": [{"site": "a.0", "head": 3, "grid": grid}]}}
    )
    drawn = render_html(replace(record, metrics=metrics))
    assert "What heads look at" in drawn
    assert '<path class="s8" d="M0 0h1v1h-1z"/>' in drawn
    assert '<path class="s2" d="M0 1h1v1h-1z"/>' in drawn
    assert "M1 1h1" not in drawn


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
        "import sys; from headprune.report import write_report; "
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_formats() -> None:
    assert [signed(v, 1) for v in (1.0, -1.0, 0.01, -0.01)] == ["+1.0", "−1.0", "0.0", "0.0"]
    assert fixed(float("-inf"), 2) == "−∞"
    assert [count(v) for v in (512, 9_999_999, 10_000_000, 2.5e12)] == ["512", "9,999,999", "10 M", "2.5 T"]
    assert [times(v) for v in (1.0, 1.004, 1.126)] == ["1.00×", "1.004×", "1.13×"]
    assert [duration(v) for v in (0.0421, 59.96, 3599.7)] == ["0.042 s", "60.0 s", "1 h 0 min"]
    assert clean("a\x00b\r\n\x1b[1mc") == "a\ufffdb\nc"
