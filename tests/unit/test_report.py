"""Reports say every number of the record, in both files, and claim no more than was measured."""

import re
from dataclasses import asdict, replace
from html import unescape

import pytest

from headprune.bench.decoding import DecodingRow
from headprune.core.changed import ChangedAnswer, ChangedAnswers
from headprune.core.choice import Candidate, Choice
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.display import clean
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.record import ClassRow, Comparison, QualityRow, RunRecord, SizeRow, SpeedRow
from headprune.report import ReportInputs, render_html, render_markdown, write_report
from headprune.report.formats import count, counts, duration, fixed, signed, times
from headprune.report.quality import quality_groups
from headprune.report.verdict import verdict
from headprune.scoring._agreement import agreement
from tests.report_records import Page, costed, pictures_of, record_of, scores_of


@pytest.fixture(scope="module")
def record():
    return record_of()


@pytest.fixture(scope="module")
def html(record):
    return render_html(record)


@pytest.fixture(scope="module")
def markdown(record):
    return render_markdown(record)


def test_the_verdict_is_the_headline_and_the_parts_follow_in_order(record):
    sentence = verdict(record).sentence
    inputs = ReportInputs(pictures_of(record))
    html, markdown = render_html(record, inputs), render_markdown(record, inputs)
    assert f'<p class="lead">{sentence}</p>' in html.replace("\u00a0", " ")
    assert markdown.splitlines()[2] == sentence
    titles = ["Accuracy", "Speed", "Size", "Heads", "What heads attend to", "Proof"]
    found = [line[3:] for line in markdown.splitlines() if line.startswith("## ")]
    assert [title for title in found if title in titles] == titles
    links = re.findall(r'<li><a href="#([^"]*)">.*?</a>', html)
    assert len(links) == 5
    places = [html.index(f'id="{anchor}"') for anchor in links]
    assert places == sorted(places)


def test_classes_and_changed_answers_have_their_rows(record):
    text = "a | <b>film</b>"
    changed = ChangedAnswers.of(
        [
            ChangedAnswer(3, "other", "neutral", "good", "bad"),
            ChangedAnswer(4, "gained", "bad", "good", "bad"),
            ChangedAnswer(9, text, "good", "good", "bad"),
        ],
        n_examples=872,
        most=2,
    )
    assert [row.row for row in changed.rows] == [9, 4], "lost answers come first"
    found = replace(record, classes=(ClassRow("good", 400, 390, 385),))
    html, markdown = (
        each(found, ReportInputs(changed=changed)) for each in (render_html, render_markdown)
    )
    words = "3 of 872 test rows changed their answer: right before and wrong now 1"
    for page in (Page(html).text, markdown):
        assert words in page
    assert "| 9 | a \\| \\<b\\>film\\</b\\> | good | good | bad |" in markdown
    assert "<b>film" not in html
    assert "400 97.5 96.2 93.9 to 97.7 −5" in Page(html).table_row("good", html)
    many = ChangedAnswers.of([ChangedAnswer(i, "x", "a", "a", "b") for i in range(12)], 872, 12)
    page = render_html(found, ReportInputs(changed=many))
    assert "<summary>2 more rows</summary>" in page, "a phone shows ten"
    none = ChangedAnswers.of([], 872, 2)
    assert none.title == "None of 872 test rows changed its answer."


def test_nothing_is_coloured_within_the_noise(record):
    """By the interval where there is one, else by that of two separate samples."""

    def tones(low, high):
        name = record.quality[-1].name
        drop = Comparison(name, "base", "accuracy", "test", 872, 0.0023, low, high)
        (group,) = quality_groups(replace(record, comparisons=(drop,)))
        return [row.tone for row in group.rows]

    assert tones(-0.01, 0.01) == ["base", "plain", "bad", "bad", "plain"]
    assert tones(0.001, 0.01)[-1] == "bad"
    assert tones(-0.01, -0.001)[-1] == "good"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base", [" 0.9763 ", " – "]),
        ("taylor", [" 0.9694 ", " −0.69 "]),
        ("random", [" 0.9128 ± 0.0214 ", " −6.35 ", "mean of 10 draws"]),
        ("recovered (finetune)", [" 0.9740 ", " −0.23 "]),
    ],
)
def test_every_accuracy_has_its_difference(html, markdown, name, words):
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {name} |"))
    for text in (Page(html).table_row(name, html), line):
        assert all(word in text for word in words)


def test_differences_are_taken_from_the_base_of_the_same_split_and_metric():
    rows = (
        QualityRow("base", 32, "accuracy", 0.9, "test", 100, 0.1),
        QualityRow("base", 32, "accuracy", 0.5, "validation", 100, 0.1),
        QualityRow("taylor", 16, "accuracy", 0.6, "validation", 100, 0.1),
        QualityRow("base", 32, "perplexity", 20.0, "test", 100, 3.0),
        QualityRow("taylor", 16, "perplexity", 25.0, "test", 100, 3.2),
    )
    text = render_markdown(record_of(quality=rows))
    assert "| taylor | 16 | 0.6000 (0.5020 to 0.6906) | +10.00 |" in text
    assert "| taylor | 16 | 25.00 | 1.25× |" in text
    drop = Comparison("taylor", "base", "perplexity", "test", 100, 0.25, 0.2, 0.3)
    random = QualityRow("random", 16, "perplexity", 27.0, "test", 100, 3.2)
    html = render_html(record_of(quality=(*rows[3:], random), comparisons=(drop,)))
    assert 'class="bar bad"' in html, "a higher perplexity is worse"
    alone = render_html(record_of(quality=rows[3:], comparisons=(drop,)))
    assert 'class="bar ' not in alone, "one change has nothing to be compared with"
    assert "1.20× to 1.30×" in html


def test_a_comparison_with_random_heads_is_not_claimed_within_the_spread(record, markdown):
    def told(**changes):
        chance = replace(record.quality[2], **changes)
        return render_markdown(replace(record, quality=(*record.quality[:2], chance)))

    assert "taylor is 5.66 points of accuracy better than removing as many heads" in markdown
    assert "draws: neither is shown to be better." in told(value=0.965)
    assert "2.96 points of accuracy worse" in told(value=0.999, spread=0.01)
    assert "do not all keep as many heads (16, 20)" in told(kept_heads=20)


def test_without_a_base_row_there_are_no_differences(record):
    def told(*rows):
        return render_markdown(replace(record, quality=rows))

    base, taylor, chance, *_ = record.quality
    without = told(*record.quality[1:])
    assert "against base" not in without
    assert "has accuracy 0.974, without a comparison" in without
    assert "has accuracy 0.969" in told(taylor)
    assert "has no measured cost" in told(base)
    assert "accuracy" not in told(chance).partition("## ")[0]


def test_how_auto_chose_is_a_table(record, html):
    """The chosen heads have no difference from themselves, whoever keeps them."""
    candidates = (
        Candidate("surgeon", FrozenDict({"curvature": "logits"}), False, 0.5, 0.0, 0.0, 0.0),
        Candidate("fisher", EMPTY, False, 0.5, 0.0, 0.0, 0.0, same_as="surgeon (curvature=logits)"),
        Candidate("taylor", EMPTY, False, 0.75, 0.25, -0.125, 0.625),
        Candidate("random", EMPTY, False, 0.75, 0.25, -0.25, 0.75),
    )
    about = ("keep 50 % of the heads", "lstsq", 1200, 0.25)
    choice = Choice(candidates, candidates[0].name, *about, notes=("a note",))
    chosen = replace(record, scores=replace(record.scores, choice=choice))
    page, text = unescape(render_html(chosen)), render_markdown(chosen)
    for row in (
        "| surgeon (curvature=logits) | 0.5000 | – | chosen |",
        "| fisher | 0.5000 | – | the heads of surgeon (curvature=logits) |",
        "| taylor | 0.7500 | +0.2500 [−0.1250, +0.6250] | ties |",
        "| random | 0.7500 | +0.2500 [−0.2500, +0.7500] |  |",
    ):
        assert row in text
    for words in ("refitted by lstsq, and judged by the loss of 1,200 rows", "a note"):
        assert words in text
        assert words in page
    assert "How the scorer was chosen" not in html
    assert "perplexity" not in text.lower()

    of_text = replace(record, scores=replace(record.scores, choice=replace(choice, is_text=True)))
    page, text = unescape(render_html(of_text)), render_markdown(of_text)
    assert "| taylor | 0.7500 | 2.117 | +0.2500 [−0.1250, +0.6250] | ties |" in text
    assert "loss there is 0.2500, its perplexity 1.284." in text
    assert '<td role="cell" data-label="Perplexity">1.649</td>' in page


def test_an_interval_that_spans_one_is_no_difference(html, markdown):
    assert "no measurable difference" in Page(html).table_row("1 × 128", html)
    assert "1.09× as fast" in Page(html).table_row("8 × 128", html)
    line = next(line for line in markdown.splitlines() if line.startswith("| 1 × 128"))
    said = "1.01× | 0.991 to 1.034 | no measurable difference in speed | 200 |"
    assert f"8.12 / 8.71 | 7.98 / 8.66 | {said}" in line


def test_the_headline_speed_is_that_of_the_largest_batch(record):
    best = replace(record.speed[0], ratio=3.0, low=2.9, high=3.1)
    text = render_markdown(replace(record, speed=(best, record.speed[2])))
    assert "made the model 1.12× as fast;" in text.splitlines()[2]
    slow = SpeedRow(4, 16, 0.1, 0.1, 0.125, 0.13, 0.8, 0.78, 0.82, 50)
    text = render_markdown(replace(record, speed=(slow,)))
    assert "made the model slower (0.80× as fast)" in text


def test_the_speed_grid_draws_break_even_between_faster_and_not_faster(record):
    def at(batch, length, ratio):
        took = (1.0, 1.0, 1 / ratio, 1.0)
        return SpeedRow(batch, length, *took, ratio, ratio - 0.05, ratio + 0.05, 9)

    def told(*rows):
        found = replace(record, speed=rows)
        return render_html(found), render_markdown(found)

    rows = (at(1, 16, 0.8), at(1, 128, 1.01), at(8, 16, 1.2), at(8, 128, 1.5))
    html, markdown = told(*rows)
    grid = html[html.index('class="speed-grid"') :].partition("</table>")[0]
    cells = re.findall(r'<td class="([^"]*)" title="([^"]*)">([^<]*)<', grid)
    assert [(kind, text) for kind, _, text in cells] == [
        ("bad edge-bottom", "0.80×"),
        ("plain edge-bottom", "1.01×"),
        ("good", "1.20×"),
        ("good", "1.50×"),
    ]
    assert "no measurable difference in speed, 95 % interval 0.960 to 1.060" in cells[1][1]
    words = "The pruned model is measurably faster in 2 of 4 places; the thick line is break-even"
    assert words in html
    assert words in markdown
    assert "plain edge-bottom" in told(rows[1], rows[3])[0]
    assert "faster everywhere that was measured" in told(*rows[2:])[1]
    assert "faster nowhere" in told(*rows[:2])[1]
    assert "batch 8 × 128 tokens: not measured" in told(*rows[:3])[0]
    assert 'class="speed-grid"' not in told(rows[0])[0]


def test_generation_has_a_table_of_its_own(record, html):
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
    assert "decoding.0" not in page, "other measurements hold it once more"
    assert 'id="decoding"' not in html
    other = replace(record, metrics={"decoding": "greedy"})  # of somebody else's making
    assert "| decoding | greedy |" in render_markdown(other)


def test_sizes_and_layers_are_told_before_and_after(record, html):
    assert "11.17 M 10.12 M −9.4 %" in Page(html).table_row("parameters", html)
    assert "4,096 2,048 −50.0 %" in Page(html).table_row("KV cache, bytes a token", html)
    assert 'id="layers"' not in html
    counted = costed(record)
    layers, markdown = render_html(counted), render_markdown(counted)
    kept = [len(row.kept) for row in counted.plan.mask.rows]
    per_head = 1000 * 128 + 64 * 128**2
    for layer, n in enumerate(kept):
        assert f"| {layer} | 8 → {n} | 8,000 → {1000 * n:,} | " in markdown
        macs = " → ".join(counts(8 * per_head, n * per_head))
        assert f"{macs} | 4,096 → {512 * n:,} |" in markdown
    assert f"| all layers | 32 → {sum(kept)} | 32,000 → {1000 * sum(kept):,} |" in markdown
    assert f"32 → {sum(kept)}" in Page(layers).table_row("all layers", layers)


@pytest.mark.parametrize(
    ("difference", "passes"), [(1.0e-05, True), (1.1e-05, False), (float("nan"), False)]
)
def test_the_proof_is_read_against_its_tolerance(record, difference, passes):
    proved = replace(record, proofs=(replace(record.proofs[0], max_difference=difference),))
    for text in (Page(render_html(proved)).text, render_markdown(proved)):
        assert ("The pruned model equals the gated one" in text) == passes
        assert ("FAILED" in text) == (not passes)


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_broken_run_shows_stage_error_and_what_exists(record, status):
    error = "CUDA out of memory\n\x1b[31mat line 3\x1b[0m"
    lacking = replace(record, speed=(), proofs=())
    broken = replace(lacking, status=status, stage="recover", error=error)
    page, text = Page(render_html(broken)), render_markdown(broken)
    said = ("in stage recover", "CUDA out of memory", "at line 3", "0.9694")
    for shown in (page.text, text):
        assert all(words in shown for words in said)
        assert "\x1b" not in shown
        assert "Not in this record: speed, proof." in shown
    assert len(page.cells()) == 32


@pytest.mark.parametrize("missing", ["scores", "plan", "quality", "speed", "size", "proofs"])
def test_each_part_may_be_missing(record, missing):
    without = replace(record, **{missing: None if missing in ("scores", "plan") else ()})
    page = Page(render_html(without))
    assert not page.open
    assert "Not in this record" in page.text
    assert "Not in this record" in render_markdown(without)
    assert bool(page.cells())


def test_an_empty_record_says_how_far_the_run_came():
    empty = RunRecord("x", "running", "load", "2026-01-01T00:00:00Z")
    for text in (Page(render_html(empty)).text, render_markdown(empty)):
        assert "The run is in stage load, before anything was measured." in text
        assert "Not in this record: scores, plan, accuracy, speed, size, proof." in text


def test_infinite_and_missing_numbers_render(record):
    nan = float("nan")
    values = zip(record.quality, (0.0, nan), strict=False)
    rows = tuple(replace(row, value=value, metric="perplexity") for row, value in values)
    speed = (replace(record.speed[0], ratio=nan, low=nan, high=nan),)
    odd = replace(record, quality=rows, speed=speed, size=(SizeRow("heads", 0, 0),))
    assert "no usable timing" in render_markdown(odd)
    assert not Page(render_html(odd)).open


def test_heads_removed_before_the_run_are_not_counted_as_removed_by_it():
    sites = [
        AttentionSite("a.0", "bert", "self", 4, 4, 8, 8, (0, 2, 3)),
        AttentionSite("a.1", "bert", "self", 2, 2, 8, 8, (0, 1)),
    ]
    mask = HeadMask.from_keep({"a.0": [0, 3], "a.1": [0, 1]}, {"a.0": 4, "a.1": 2})
    scores, plan = scores_of(sites), PruningPlan(mask)
    page = Page(render_html(RunRecord("x", "done", "report", "2026", scores=scores, plan=plan)))
    assert "Removing 1 of 5 heads" in page.text
    assert "4 of 5 heads are kept, chosen by hand." in page.text
    states = [(cell["class"] or "").split()[1] for cell in page.cells()]
    assert states == ["kept", "absent", "removed", "kept", "kept", "kept"]
    assert "removed before this run" in (page.cells()[1]["title"] or "")


def test_provenance_recipe_and_other_measurements_are_complete(record, html, markdown):
    digests = [record.digest, record.scores.digest, record.plan.digest]
    digests += [part * 16 for part in ("5f1c", "a94e", "d0d0")]
    parts = ["2.9.0", "AMD EPYC 7B13", "a996f20c", "bert-mini", "5 min 12 s", "511, (512 in all)"]
    for text in (Page(html).text, markdown.replace("\\", "")):
        for part in (*parts, *digests):
            assert part in text, part
    assert "data:\n  path: sst2\n  split: train\n" in markdown
    extra = replace(record, metrics=FrozenDict({"agreement": {"top1": 0.981}}))
    assert "agreement.top1 0.981" in Page(render_html(extra)).text
    assert "| agreement.top1 | 0.981 |" in render_markdown(extra)


def test_every_number_of_the_page_is_in_its_twin(html, markdown):
    rows = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html[html.index("quality-1") :], re.DOTALL)
    plain = " ".join(re.sub(r"<[^>]*>", " ", row) for row in rows)
    numbers = set(re.findall(r"[−+]?\d[\d,]*\.?\d+", plain))
    assert len(numbers) > 30
    assert not {number for number in numbers if number not in markdown}
    scores = re.findall(r'<span class="score">(.*?)</span>', html)
    assert len(scores) == 32
    assert all(f" {score} |" in markdown or f"~~{score}~~" in markdown for score in scores)


def test_do_it_yourself_lines_are_safe_and_run_the_same_method(record):
    text = render_markdown(record)
    assert "headprune run" not in text, "this record is of no recipe"
    resolved = replace(record, recipe=FrozenDict({"task": "causal_lm", "out": "my runs/a"}))
    again = "headprune run 'my runs/a/recipe.yaml' --out 'my runs/a-again'"
    assert again in render_markdown(resolved)
    assert "plan = hp.select(scores, hp.Budget(keep_heads=0.5), hp.selection.GlobalTopk())" in text
    lines = re.findall(r"```\n(import headprune.*?)\n```", text, re.DOTALL)[0]
    compile(lines, "lines", "exec")


def test_other_scores_have_maps_of_their_own_and_the_agreement_is_shown(record, html):
    values = tuple(tuple(reversed(row)) for row in record.scores.values)
    other = replace(record.scores, values=values, scorer="entropy", standard_errors=None)
    agreed = agreement(record.scores, other)
    inputs = ReportInputs(scores=(other,), agreement=agreed)
    page, markdown = Page(render_html(record, inputs)), render_markdown(record, inputs)
    assert page.text.count("taylor (of the plan)") == 1
    cells = page.cells()
    assert len(cells) == 64
    for mine, theirs in zip(cells[:8], reversed(cells[32:40]), strict=True):
        assert mine["data-score"] == theirs["data-score"]
    assert len({a["name"] for tag, a in page.elements if tag == "input"}) == 2
    for cell in agreed.rows()[0]:
        assert cell in page.text
        assert cell.replace("[", "\\[").replace("]", "\\]") in markdown
    assert "### Scores of entropy" in markdown
    assert 'id="scorer"' not in html


def test_both_files_are_written_whole(record, tmp_path):
    odd = replace(record, warnings=("a lone surrogate \udc80",))
    page, twin = write_report(odd, tmp_path / "new" / "folder")
    assert page.read_text(encoding="utf-8") == render_html(odd)
    assert twin.read_text(encoding="utf-8") == render_markdown(odd)
    assert sorted(p.name for p in page.parent.iterdir()) == ["report.html", "report.md"]


def test_rendering_depends_on_the_record_alone(record, html):
    assert render_html(RunRecord.from_json(record.to_json())) == html


def test_numbers_are_written_to_be_read():
    infinite = float("inf")
    assert [signed(v, 1) for v in (1.0, -1.0, 0.01, -0.01)] == ["+1.0", "−1.0", "0.0", "0.0"]
    assert [fixed(-infinite, 2), count(infinite), count(-infinite)] == ["−∞", "∞", "−∞"]
    assert count(float("nan")) == fixed(float("nan"), 0)
    found = [count(v) for v in (512, 9_999_999, 10_000_000, 2.5e12)]
    assert found == ["512", "9,999,999", "10 M", "2.5 T"]
    assert [times(v) for v in (1.0, 1.004, 1.126)] == ["1.00×", "1.004×", "1.13×"]
    assert [duration(v) for v in (0.0421, 59.96, 3599.7)] == ["0.042 s", "60.0 s", "1 h 0 min"]
    assert clean("a\x00b\r\n\x1b[1mc") == "a\ufffdb\nc"
