"""Several records side by side: every number under its record, differences named, curves and
agreement drawn."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from headprune.core.codec import FrozenDict
from headprune.core.display import escape
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.core.record import RunRecord
from headprune.report import Compared, write_comparison
from headprune.report.comparison import comparison_view
from headprune.report.html import render_comparison_html
from headprune.report.markdown import render_comparison_markdown
from headprune.report.series import TradeoffPoint, comparable, series_of
from headprune.run.reporting import agreement_of, compare_runs, inputs_in
from tests.report_records import NASTY, Page, pictures_of, plan_of, record_of


def smaller(record: RunRecord, share: float, **changes: object) -> RunRecord:
    """The same run with another budget, a little worse."""
    assert record.scores is not None
    plan = plan_of(record.scores, share)
    rows = tuple(
        row
        if row.name == "base"
        else replace(row, kept_heads=plan.mask.n_kept, value=row.value - 0.05)
        for row in record.quality
    )
    recipe = FrozenDict({**record.recipe, "keep_heads": share, "out": "elsewhere"})
    return replace(record, plan=plan, quality=rows, recipe=recipe, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair() -> list[Compared]:
    record = record_of()
    return [
        Compared("half", record),
        Compared("quarter", smaller(record, 0.25, speed=record.speed[1:])),
    ]


def cells(html: str, label: str) -> list[str]:
    """A row's cells as text."""
    found = re.search(rf'<th scope="row" role="rowheader">{re.escape(label)}</th>(.*?)</tr>', html)
    assert found, label
    columns = re.findall(r"<td.*?</td>", found[1])
    return [" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in columns]


def test_every_number_stands_under_its_record_in_both_files(pair: list[Compared]) -> None:
    html, markdown = render_comparison_html(pair), render_comparison_markdown(pair)
    for label, wanted in {
        "accuracy, test: original": ["0.9763 872 examples", "0.9763 872 examples"],
        "accuracy, test: after the cut": ["0.9694 −0.69 points", "0.9194 −5.69 points"],
        "accuracy, test: random heads, as many": [
            "0.9128 ± 0.0214 −6.35 points",
            "0.8628 ± 0.0214 −11.35 points",
        ],
        "accuracy, test: smallest weights, as many": ["0.9415 −3.48 points", "0.8915 −8.48 points"],
        "accuracy, test: after recovery": ["0.9740 −0.23 points", "0.9240 −5.23 points"],
        "parameters": ["10.12 M −9.4 % of 11.17 M"] * 2,
        "batch 1 × 128 tokens": ["1.01× 0.991 to 1.034", "–"],
        "batch 32 × 128 tokens": ["1.12× 1.104 to 1.139"] * 2,
        "logits": ["passed largest difference 3.1e-07"] * 2,
        "heads kept": ["16 of 32", "8 of 32"],
        "keep_heads": ["0.5", "0.25"],
    }.items():
        assert cells(html, label) == wanted
        line = next(
            line
            for line in markdown.replace("\\", "").splitlines()
            if line.startswith(f"| {label} |")
        )
        assert re.sub(r"[()]", "", line).split(" | ")[1:] == [*wanted[:-1], f"{wanted[-1]} |"]
    assert ">out<" not in html
    assert "data.path" not in html  # the same in both


def test_a_failed_proof_is_not_hidden_beside_one_that_passed(pair: list[Compared]) -> None:
    record = pair[0].record
    broken = replace(
        record, proofs=(record.proofs[0], replace(record.proofs[0], max_difference=1.0))
    )
    html = render_comparison_html([pair[0], Compared("broken", broken)])
    assert cells(html, "logits") == [
        "passed largest difference 3.1e-07",
        "FAILED largest difference 1",
    ]


def test_plans_are_compared_head_by_head(pair: list[Compared]) -> None:
    view = comparison_view(pair)
    plans = [column.record.plan for column in pair]
    assert plans[0] is not None
    assert plans[1] is not None
    fates = {HeadId(row.site, cell.head): cell for row in view.fates for cell in row.cells}
    assert len(fates) == 32
    for head, cell in fates.items():
        kept = tuple(head in plan.mask for plan in plans if plan is not None)
        assert cell.kept == kept
        assert cell.marks == "".join("■" if k else "·" for k in kept)
        assert cell.tone == (
            "differs" if kept[0] != kept[1] else "all-kept" if kept[0] else "all-removed"
        )
    (line,) = view.plans
    assert line == (
        "half and quarter both keep 8 heads (50 % of the heads that either keeps); "
        "8 kept by half alone, 0 by quarter alone."
    )
    other = Compared("other model", record_of(2, 4))
    assert comparison_view([pair[0], other]).fates == ()
    assert "Which heads each run keeps" not in render_comparison_html([pair[0], other])


def test_the_curve_has_a_point_a_record_and_the_band_of_chance(pair: list[Compared]) -> None:
    (each,) = comparison_view(pair).curves
    found = each.drawn
    assert each.title == ""
    lines = {line.name: line for line in found.lines}
    assert set(lines) == {"random", "all heads", "taylor", "magnitude", "recovered (finetune)"}
    assert [p.title for p in lines["taylor"].points] == [
        "taylor: 8 heads 0.9194",
        "taylor: 16 heads 0.9694",
    ]
    first, second = lines["taylor"].points
    assert first.x < second.x
    assert first.y > second.y  # better is higher up
    assert lines["random"].points[0].title == "random: 8 heads 0.8628 ± 0.0214"
    corners = [tuple(map(float, c.split(","))) for c in lines["random"].band.split()]
    assert len(corners) == 4
    (px, py), whisker = (
        (lines["random"].points[0].x, lines["random"].points[0].y),
        lines["random"].points[0].whisker,
    )
    assert whisker is not None
    assert {c[1] for c in corners if c[0] == px} == set(whisker)
    assert min(whisker) < py < max(whisker)
    assert len({(line.mark, line.dash) for line in found.lines if line.role == "method"}) == 3
    assert (
        comparison_view([pair[0], Compared("again", pair[0].record)]).curves == ()
    )  # one size is no curve
    assert "taylor: 8 heads 0.9194; 16 heads 0.9694" in render_comparison_markdown(pair)


def titles(compared: list[Compared]) -> dict[str, list[str]]:
    """The lines of the one curve, and what their points say."""
    (each,) = comparison_view(compared).curves
    return {
        line.name: [p.title.rpartition(": ")[2] for p in line.points] for line in each.drawn.lines
    }


def of_fisher(record: RunRecord) -> RunRecord:
    """The same run by another scorer, whose cut is better."""
    assert record.scores is not None
    names = {"taylor": "fisher"}
    rows = tuple(
        replace(
            row,
            name=names.get(row.name, row.name),
            value=row.value + (0.01 if row.draws == 1 else 0),
        )
        if row.name not in ("base", "magnitude")
        else row
        for row in record.quality
    )
    recipe = FrozenDict({**record.recipe, "scorer": "fisher"})
    return replace(
        record, scores=replace(record.scores, scorer="fisher"), quality=rows, recipe=recipe
    )


def test_records_of_one_budget_keep_their_spread_and_their_methods(pair: list[Compared]) -> None:
    lines = titles([*pair, Compared("fisher", of_fisher(pair[0].record))])
    # the same draws, told by two records, are not drawn twice: their spread stays
    assert lines["random"] == ["8 heads 0.8628 ± 0.0214", "16 heads 0.9128 ± 0.0214"]
    assert lines["magnitude"] == ["8 heads 0.8915", "16 heads 0.9415"]
    assert lines["recovered (finetune) [taylor]"] == ["8 heads 0.924", "16 heads 0.974"]
    assert lines["recovered (finetune) [fisher]"] == ["16 heads 0.984"]
    assert lines["taylor"] == ["8 heads 0.9194", "16 heads 0.9694"]
    assert lines["fisher"] == ["16 heads 0.9794"]
    assert set(lines) == {"random", "all heads", "magnitude", "taylor", "fisher"} | {
        k for k in lines if "[" in k
    }


def test_what_only_the_seed_tells_apart_is_one_method_and_what_a_setting_does_is_not(
    pair: list[Compared],
) -> None:
    record, shift = pair[0].record, 0.02
    rows = tuple(
        r if r.name == "base" else replace(r, value=r.value + shift) for r in record.quality
    )
    other = replace(record, quality=rows, recipe=FrozenDict({**record.recipe, "seed": 1}))
    lines = titles([*pair, Compared("seed 1", other)])
    assert lines["taylor"][1] == f"16 heads 0.9794 ± {shift / 2**0.5:.4f}"
    # twenty draws: those of either mean around it, and the means around theirs
    whole = ((2 * 9 * 0.0214**2 + 20 * (shift / 2) ** 2) / 19) ** 0.5
    assert lines["random"][1] == f"16 heads 0.9228 ± {whole:.4f}"
    finer = replace(
        other, recipe=FrozenDict({**record.recipe, "score": {"settings": {"reduce": "token"}}})
    )
    lines = titles([*pair, Compared("finer", finer)])
    assert lines["taylor [half]"] == ["8 heads 0.9194", "16 heads 0.9694"]
    assert lines["taylor [finer]"] == ["16 heads 0.9894"]
    unnamed = comparable([("run", record), ("run", finer)], "test")[0].points
    assert {p.method for p in unnamed if p.method.startswith("taylor")} == {
        "taylor [run]",
        "taylor [run #2]",
    }


@pytest.mark.parametrize("value", [0.1, 0.9763, 1 / 3])
def test_equal_values_have_no_spread(value: float) -> None:
    for n in range(2, 12):
        ((_, mean, spread),) = series_of([TradeoffPoint("accuracy", "base", 8, value, 0.0)] * n)[
            0
        ].points
        assert (mean, spread) == (value, 0.0)


@pytest.mark.parametrize("what", ["data", "model", "structure", "rows"])
def test_records_of_several_tasks_have_a_curve_each(pair: list[Compared], what: str) -> None:
    def moved(record: RunRecord) -> RunRecord:
        assert record.scores is not None
        if what == "structure":
            mark = replace(record.scores.model, structure="another")
            return replace(record, scores=replace(record.scores, model=mark))
        if what == "rows":
            return replace(
                record, quality=tuple(replace(row, n_examples=500) for row in record.quality)
            )
        return replace(record, recipe=FrozenDict({**record.recipe, what: {"path": "trec"}}))

    others = [Compared(f"other {column.name}", moved(column.record)) for column in pair]
    view = comparison_view([*pair, *others])
    assert [each.title for each in view.curves] == ["half, quarter", "other half, other quarter"]
    assert all(
        len(line.points) == 2
        for each in view.curves
        for line in each.drawn.lines
        if line.role != "base"
    )
    html, markdown = (
        render_comparison_html([*pair, *others]),
        render_comparison_markdown([*pair, *others]),
    )
    assert "Trade-off: other half, other quarter" in html
    assert "other half, other quarter: accuracy on test rows against heads kept:" in markdown
    assert comparison_view([pair[0], others[1]]).curves == ()  # nothing to join


def test_data_stays_text_and_the_page_loads_nothing(pair: list[Compared]) -> None:
    nasty = replace(
        pair[1].record, recipe=FrozenDict({NASTY: NASTY}), versions=FrozenDict({NASTY: NASTY})
    )
    html = render_comparison_html([pair[0], Compared(NASTY, nasty)])
    page = Page(html)
    assert not page.open
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert page.text.count("<script>") > 5
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    markdown = render_comparison_markdown([pair[0], Compared(NASTY, nasty)])
    assert "<script>" not in markdown.replace("\\<script\\>", "")


def test_times_that_are_no_numbers_are_passed_over(pair: list[Compared]) -> None:
    first, second = pair
    odd = FrozenDict({"load": "soon", "score": 41.0, "bench": None, "save": {"a": 1}, "cut": [2]})
    told = (
        replace(first.record, timings=odd),
        replace(second.record, timings=FrozenDict({"load": "soon"})),
    )
    compared = [Compared("a", told[0]), Compared("b", told[1])]
    assert cells(render_comparison_html(compared), "seconds in all") == ["41", "–"]


def test_agreement_is_of_records_that_scored_the_same_heads(pair: list[Compared]) -> None:
    records = [column.record for column in pair]
    found = agreement_of(records, ["a", "b"])
    assert found is not None
    assert found.between("a", "b").spearman.value == pytest.approx(1.0)
    html = render_comparison_html(pair, found)
    assert "How far scorers agree" in html
    assert "a - b" in html
    assert agreement_of([records[0], record_of(2, 4)], ["a", "b"]) is None
    assert agreement_of([replace(records[0], scores=None), records[1]], ["a", "b"]) is None


def test_one_record_or_one_name_is_no_comparison(pair: list[Compared]) -> None:
    with pytest.raises(InvalidValue, match="two records or more, each with a name of its own"):
        comparison_view(pair[:1])
    with pytest.raises(InvalidValue, match="two records or more"):
        comparison_view([pair[0], replace(pair[1], name="half")])


def test_records_of_folders_are_compared_under_names_that_tell_them_apart(
    pair: list[Compared], tmp_path: Path
) -> None:
    for column in pair:
        column.record.save(tmp_path / column.name / "record.json")
    html, markdown = compare_runs(
        [tmp_path / "half", tmp_path / "quarter" / "record.json"], tmp_path / "out"
    )
    assert (html.name, markdown.name) == ("comparison.html", "comparison.md")
    assert markdown.read_text().startswith("# half · quarter\n")
    assert "How far scorers agree" in html.read_text()
    named = [tmp_path / name / "half" / "record.json" for name in ("a", "b")]
    for path, column in zip(named, pair, strict=True):
        column.record.save(path)
    _, markdown = compare_runs(named, tmp_path / "out")
    assert markdown.read_text().startswith(f"# {' · '.join(map(escape, named))}\n")
    with pytest.raises(InvalidValue, match="different from one another"):
        compare_runs([tmp_path / "half", tmp_path / "half" / "record.json"], tmp_path / "out")
    paths = write_comparison(pair, tmp_path / "again")
    assert [p.name for p in paths] == ["comparison.html", "comparison.md"]


def test_what_lies_beside_a_record_is_found_and_what_is_not_its_own_left_out(
    pair: list[Compared], tmp_path: Path
) -> None:
    record = pair[0].record
    assert record.scores is not None
    assert inputs_in(record, tmp_path) == inputs_in(replace(record, scores=None), tmp_path)
    pictures_of(record).save(tmp_path / "attention.json")
    replace(record.scores, scorer="entropy").save(tmp_path / "scores-entropy.json")
    other = record_of(2, 4).scores
    assert other is not None
    other.save(tmp_path / "scores-other.json")
    found = inputs_in(record, tmp_path)
    assert found.pictures == pictures_of(record)
    assert [scores.scorer for scores in found.scores] == ["entropy"]
    assert found.agreement is not None
    (tmp_path / "attention.json").write_text("{}")
    with pytest.raises(InvalidValue):
        inputs_in(record, tmp_path)
