"""Several records side by side: every number under its record, differences named, curves and
agreement drawn."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from headprune.core.codec import FrozenDict
from headprune.core.display import escape
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.report import Compared
from headprune.report.comparison import comparison_view
from headprune.report.html import render_comparison_html
from headprune.report.markdown import render_comparison_markdown
from headprune.report.series import TradeoffPoint, comparable, series_of
from headprune.run.reporting import agreement_of, compare_runs, inputs_in
from tests.report_records import NASTY, Page, pictures_of, plan_of, record_of


def smaller(record):
    """The same run that keeps a quarter of the heads, a little worse."""
    plan = plan_of(record.scores, 0.25)
    base, *others = record.quality
    rows = [replace(row, kept_heads=plan.mask.n_kept, value=row.value - 0.05) for row in others]
    recipe = FrozenDict({**record.recipe, "keep_heads": 0.25, "out": "elsewhere"})
    found = replace(record, plan=plan, quality=(base, *rows), recipe=recipe)
    return replace(found, speed=record.speed[1:])


@pytest.fixture(scope="module")
def pair():
    record = record_of()
    return [Compared("half", record), Compared("quarter", smaller(record))]


def with_recipe(record, **settings):
    return replace(record, recipe=FrozenDict({**record.recipe, **settings}))


def cells(html, label):
    """A row's cells as text."""
    found = re.search(rf'<th scope="row" role="rowheader">{re.escape(label)}</th>(.*?)</tr>', html)
    assert found, label
    columns = re.findall(r"<td.*?</td>", found[1])
    return [" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in columns]


CHANCE = ["0.9128 ± 0.0214 −6.35 points", "0.8628 ± 0.0214 −11.35 points"]


def test_every_number_stands_under_its_record_in_both_files(pair):
    html, markdown = render_comparison_html(pair), render_comparison_markdown(pair)
    lines = markdown.replace("\\", "").splitlines()
    for label, wanted in {
        "accuracy, test: original": ["0.9763 872 examples", "0.9763 872 examples"],
        "accuracy, test: after the cut": ["0.9694 −0.69 points", "0.9194 −5.69 points"],
        "accuracy, test: random heads, same budget": CHANCE,
        "accuracy, test: smallest weights, same budget": [
            "0.9415 −3.48 points",
            "0.8915 −8.48 points",
        ],
        "accuracy, test: after recovery": ["0.9740 −0.23 points", "0.9240 −5.23 points"],
        "parameters": ["10.12 M −9.4 % of 11.17 M"] * 2,
        "batch 1 × 128 tokens": ["1.01× 0.991 to 1.034", "–"],
        "batch 32 × 128 tokens": ["1.12× 1.104 to 1.139"] * 2,
        "logits": ["passed largest difference 3.1e-07"] * 2,
        "heads kept": ["16 of 32", "8 of 32"],
        "keep_heads": ["0.5", "0.25"],
    }.items():
        assert cells(html, label) == wanted
        line = next(line for line in lines if line.startswith(f"| {label} |"))
        assert re.sub(r"[()]", "", line) == f"| {label} | {' | '.join(wanted)} |"
    assert ">out<" not in html
    assert "data.path" not in html, "what is the same in both is not shown"


def test_odd_records_are_compared_honestly(pair):
    """A failed proof is shown beside one that passed; times that are no numbers are passed over."""
    record = pair[0].record
    proofs = (record.proofs[0], replace(record.proofs[0], max_difference=1.0))
    timings = FrozenDict({"load": "soon", "score": 41.0, "bench": None, "save": {"a": 1}})
    odd = replace(record, proofs=proofs, timings=timings)
    html = render_comparison_html([Compared("odd", odd), pair[1]])
    passed = "passed largest difference 3.1e-07"
    assert cells(html, "logits") == ["FAILED largest difference 1", passed]
    assert cells(html, "seconds in all")[0] == "41"


def test_plans_are_compared_head_by_head(pair):
    view = comparison_view(pair)
    first, second = (column.record.plan for column in pair)
    fates = {HeadId(row.site, cell.head): cell for row in view.fates for cell in row.cells}
    assert len(fates) == 32
    tones = {(True, True): "all-kept", (False, False): "all-removed"}
    for head, cell in fates.items():
        kept = (head in first.mask, head in second.mask)
        assert cell.kept == kept
        assert cell.marks == "".join("■" if k else "·" for k in kept)
        assert cell.tone == tones.get(kept, "differs")
    assert view.plans == (
        "half and quarter both keep 8 heads (50 % of the heads that either keeps); "
        "8 kept by half alone, 0 by quarter alone.",
    )
    other = Compared("other model", record_of(2, 4))
    assert comparison_view([pair[0], other]).fates == ()
    assert "Which heads each run keeps" not in render_comparison_html([pair[0], other])


def test_the_curve_has_a_point_a_record_and_the_band_of_chance(pair):
    (each,) = comparison_view(pair).curves
    lines = {line.name: line for line in each.drawn.lines}
    assert set(lines) == {"random", "all heads", "taylor", "magnitude", "recovered (finetune)"}
    first, second = lines["taylor"].points
    assert [first.title, second.title] == ["taylor: 8 heads 0.9194", "taylor: 16 heads 0.9694"]
    assert first.x < second.x
    assert first.y > second.y, "better is higher up"
    chance = lines["random"].points[0]
    assert chance.title == "random: 8 heads 0.8628 ± 0.0214"
    corners = [tuple(map(float, c.split(","))) for c in lines["random"].band.split()]
    assert len(corners) == 4
    assert {y for x, y in corners if x == chance.x} == set(chance.whisker)
    assert min(chance.whisker) < chance.y < max(chance.whisker)
    methods = {(line.mark, line.dash) for line in each.drawn.lines if line.role == "method"}
    assert len(methods) == 3
    one_size = [pair[0], Compared("again", pair[0].record)]
    assert comparison_view(one_size).curves == ()
    assert "taylor: 8 heads 0.9194; 16 heads 0.9694" in render_comparison_markdown(pair)


def titles(compared):
    """The lines of the one curve, and what their points say."""
    (each,) = comparison_view(compared).curves
    lines = each.drawn.lines
    return {line.name: [p.title.rpartition(": ")[2] for p in line.points] for line in lines}


def of_fisher(record):
    """The same run by another scorer, whose cut is better."""
    base, taylor, chance, _, recovered = record.quality
    better = replace(taylor, name="fisher", value=taylor.value + 0.01)
    rows = (base, better, chance, replace(recovered, value=recovered.value + 0.01))
    scores = replace(record.scores, scorer="fisher")
    return with_recipe(replace(record, scores=scores, quality=rows), scorer="fisher")


def test_records_of_one_budget_keep_their_spread_and_their_methods(pair):
    lines = titles([*pair, Compared("fisher", of_fisher(pair[0].record))])
    assert {name: points for name, points in lines.items() if name != "all heads"} == {
        # Two records tell of the same draws, which are drawn once: their spread is kept.
        "random": ["8 heads 0.8628 ± 0.0214", "16 heads 0.9128 ± 0.0214"],
        "magnitude": ["8 heads 0.8915", "16 heads 0.9415"],
        "recovered (finetune) [taylor]": ["8 heads 0.924", "16 heads 0.974"],
        "recovered (finetune) [fisher]": ["16 heads 0.984"],
        "taylor": ["8 heads 0.9194", "16 heads 0.9694"],
        "fisher": ["16 heads 0.9794"],
    }


def test_records_that_differ_in_the_seed_are_one_method_and_in_a_setting_two(pair):
    record, shift = pair[0].record, 0.02
    base, *others = record.quality
    rows = (base, *(replace(row, value=row.value + shift) for row in others))
    other = with_recipe(replace(record, quality=rows), seed=1)
    lines = titles([*pair, Compared("seed 1", other)])
    assert lines["taylor"][1] == f"16 heads 0.9794 ± {shift / 2**0.5:.4f}"
    # Of twenty draws, those of either record spread around its mean, and the means around theirs.
    whole = ((2 * 9 * 0.0214**2 + 20 * (shift / 2) ** 2) / 19) ** 0.5
    assert lines["random"][1] == f"16 heads 0.9228 ± {whole:.4f}"
    finer = with_recipe(replace(record, quality=rows), score={"settings": {"reduce": "token"}})
    lines = titles([*pair, Compared("finer", finer)])
    assert lines["taylor [half]"] == ["8 heads 0.9194", "16 heads 0.9694"]
    assert lines["taylor [finer]"] == ["16 heads 0.9894"]
    unnamed = comparable([("run", record), ("run", finer)], "test")[0].points
    methods = {p.method for p in unnamed if p.method.startswith("taylor")}
    assert methods == {"taylor [run]", "taylor [run #2]"}


@pytest.mark.parametrize("value", [0.1, 0.9763, 1 / 3])
def test_equal_values_have_no_spread(value):
    for n in range(2, 12):
        points = [TradeoffPoint("accuracy", "base", 8, value, 0.0)] * n
        ((_, mean, spread),) = series_of(points)[0].points
        assert (mean, spread) == (value, 0.0)


@pytest.mark.parametrize("what", ["data", "model", "structure", "rows"])
def test_records_of_several_tasks_have_a_curve_each(pair, what):
    def moved(record):
        if what == "structure":
            mark = replace(record.scores.model, structure="another")
            return replace(record, scores=replace(record.scores, model=mark))
        if what == "rows":
            rows = tuple(replace(row, n_examples=500) for row in record.quality)
            return replace(record, quality=rows)
        return with_recipe(record, **{what: {"path": "trec"}})

    others = [Compared(f"other {column.name}", moved(column.record)) for column in pair]
    curves = comparison_view([*pair, *others]).curves
    assert [each.title for each in curves] == ["half, quarter", "other half, other quarter"]
    lines = [line for each in curves for line in each.drawn.lines if line.role != "base"]
    assert {len(line.points) for line in lines} == {2}
    assert "Trade-off: other half" in render_comparison_html([*pair, *others])
    assert comparison_view([pair[0], others[1]]).curves == (), "there is nothing to join"


def test_data_stays_text_and_the_page_loads_nothing(pair):
    bag = FrozenDict({NASTY: NASTY})
    nasty = Compared(NASTY, replace(pair[1].record, recipe=bag, versions=bag))
    page = Page(render_comparison_html([pair[0], nasty]))
    assert not page.open
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert page.text.count("<script>") > 5
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    markdown = render_comparison_markdown([pair[0], nasty])
    assert "<script>" not in markdown.replace("\\<script\\>", "")


def test_agreement_is_of_records_that_scored_the_same_heads(pair):
    first, second = (column.record for column in pair)
    found = agreement_of([first, second], ["a", "b"])
    assert found.between("a", "b").spearman.value == pytest.approx(1.0)
    html = render_comparison_html(pair, found)
    assert "How far scorers agree" in html
    assert "a - b" in html
    assert agreement_of([first, record_of(2, 4)], ["a", "b"]) is None
    assert agreement_of([replace(first, scores=None), second], ["a", "b"]) is None


def test_one_record_or_one_name_is_no_comparison(pair):
    for compared in (pair[:1], [pair[0], replace(pair[1], name="half")]):
        with pytest.raises(InvalidValue, match="two records or more, each with a name of its own"):
            comparison_view(compared)


def test_records_of_folders_are_compared_under_names_that_tell_them_apart(pair, tmp_path):
    def saved(folder, record):
        return Path(record.save(folder / "record.json"))

    half, quarter = (saved(tmp_path / column.name, column.record) for column in pair)
    html, markdown = compare_runs([half.parent, quarter], tmp_path / "out")
    assert (html.name, markdown.name) == ("comparison.html", "comparison.md")
    assert markdown.read_text().startswith("# half · quarter\n")
    assert "How far scorers agree" in html.read_text()
    alike = [saved(tmp_path / name / "half", pair[0].record) for name in ("a", "b")]
    _, markdown = compare_runs(alike, tmp_path / "out")
    assert markdown.read_text().startswith(f"# {' · '.join(map(escape, alike))}\n")
    with pytest.raises(InvalidValue, match="different from one another"):
        compare_runs([half.parent, half], tmp_path / "out")


def test_files_beside_a_record_are_found_where_they_are_its_own(pair, tmp_path):
    record, other = pair[0].record, record_of(2, 4).scores
    assert inputs_in(record, tmp_path) == inputs_in(replace(record, scores=None), tmp_path)
    pictures_of(record).save(tmp_path / "attention.json")
    replace(record.scores, scorer="entropy").save(tmp_path / "scores-entropy.json")
    other.save(tmp_path / "scores-other.json")
    found = inputs_in(record, tmp_path)
    assert found.pictures == pictures_of(record)
    assert [scores.scorer for scores in found.scores] == ["entropy"]
    assert found.agreement is not None
    (tmp_path / "attention.json").write_text("{}")
    with pytest.raises(InvalidValue):
        inputs_in(record, tmp_path)
