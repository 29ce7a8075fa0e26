"""Words out of files where something reads them: a terminal, a page, a card, a picture, a
spreadsheet, a shell, Python."""

import io
import json
import re
import shlex
from dataclasses import replace

import matplotlib
import pytest
import yaml
from matplotlib import texmanager
from matplotlib.figure import Figure
from pyarrow import parquet
from rich.console import Console

import headprune as hp
from headprune.checkpoints import card
from headprune.core.agreement import Agreement, Measure, Pair
from headprune.core.codec import FrozenDict
from headprune.core.display import clean
from headprune.core.errors import InvalidValue
from headprune.core.sweeps import SweepTable
from headprune.data.models import open_model
from headprune.layouts import registry
from headprune.maps.patterns import Pattern
from headprune.recipes.validate import load_recipe
from headprune.report import ReportInputs, render_html, render_markdown, repeat
from headprune.report.agreement import draw_agreement
from headprune.report.explanation import explain
from headprune.report.tradeoff import draw_tradeoff, sweep_view
from headprune.sweep.tables import _write_columns
from tests.command_line import call, done
from tests.fuzzing import changed
from tests.report_records import maps_of, pictures_of, plan_of, record_of, sweep_table
from tests.tiny_models import bert
from tests.tiny_recipe import TINY

STEERING = "\x1b[2J\x1b]0;title\x07 \x9b31m \u202e \x08"
SHELL = "a; touch HACKED #"


def nasty_record(text):
    """A record with a text in every place that a file can fill, its scores, and its plan."""
    record = record_of()
    sites = tuple(replace(s, name=f"{s.name}{text}") for s in record.scores.sites)
    scores = replace(record.scores, sites=sites, scorer=f"taylor{text}", notes=(text,), data=text)
    plan = replace(plan_of(scores), selector=f"by {text}", notes=(text,), scorer=scores.scorer)
    quality = tuple(replace(row, name=f"{row.name} {text}") for row in record.quality)
    texts = dict.fromkeys(("error", "stage", "git_commit", "name"), text)
    settings = dict.fromkeys(("recipe", "versions", "metrics", "rows"), FrozenDict({text: text}))
    more = {"status": "failed", "warnings": (text,), **texts, **settings}
    return replace(record, scores=scores, plan=plan, quality=quality, **more), scores, plan


def agreement_of(text):
    measure = Measure(0.5, 0.25, 0.75)
    pair = Pair(0, 1, measure, measure, measure)
    return Agreement((text, "[bold]b"), 2, 5, 0.95, (pair,), (text,))


# ---------------------------------------------------------------- terminals, pages, cards


def test_nothing_that_steers_a_terminal_reaches_one(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    record, scores, plan = nasty_record(STEERING)
    a, b = tmp_path / "a", tmp_path / "b"
    for place in (a, b):
        record.save(place / "record.json")
        plan.save(place / "plan.json")
    scores.save(a / "scores.json")
    replace(scores, settings=record.recipe, seed=5).save(b / "scores.json")
    odd = {"headprune": "PruningPlan", "version": 1, STEERING: 1}
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    fine = {**TINY, "description": STEERING}
    (tmp_path / "fine.yaml").write_text(json.dumps(fine))
    (tmp_path / "odd.yaml").write_text(json.dumps({**fine, "no such key": STEERING}))
    sweep = sweep_table()
    failed = tuple(FrozenDict({**row, "error": STEERING}) for row in sweep.failed)
    replace(sweep, failed=failed).save(tmp_path / "sweep" / "table.json")
    for line in (
        f"explain {a}",
        f"diff {a} {b}",
        f"diff {a / 'plan.json'} {b / 'plan.json'}",
        f"agree {a / 'scores.json'} {b / 'scores.json'}",
        f"report {a}",
        f"report {a} {b} --out {tmp_path / 'out'}",
        f"report {tmp_path / 'sweep'}",
        f"show {tmp_path / 'fine.yaml'}",
        f"validate {tmp_path / 'odd.yaml'}",
        f"explain {tmp_path / 'odd.json'}",
    ):
        for more in ("", "--json"):
            result = call(f"{line} {more}")
            assert result.exit_code == (2 if "odd" in line else 0), (line, result.output)
            assert clean(result.output) == result.output, line
            if more and result.exit_code == 0:
                json.loads(result.stdout)
    for page in tmp_path.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert clean(text) == text


def test_what_is_printed_in_colour_holds_no_colours_of_a_file():
    text = "\x1b[5m[bold red]\\[/]\x9b"
    record, scores, plan = nasty_record(text)
    values = (record, scores, plan, agreement_of(text), explain(plan, scores))
    for value in values:
        console = Console(force_terminal=True, width=250, color_system=None, file=io.StringIO())
        console.print(value.__rich__())
        shown = console.file.getvalue()
        assert "\x1b[5m" not in shown
        assert "\x9b" not in shown
        assert "[bold" in shown, "markup in a file is text"


def test_pages_and_notebooks_escape_what_files_say():
    tags = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    text = f"{tags}\"'](javascript:alert(1)){STEERING}"
    record, scores, plan = nasty_record(text)
    parts = [value._repr_html_() for value in (scores, plan, agreement_of(text))]
    pictures, odd = pictures_of(record_of()), Pattern(text, 0.5, 0.1)
    sites = tuple(replace(s, kind=text, patterns=(odd,) * len(s.heads)) for s in pictures.sites)
    inputs = ReportInputs(replace(pictures, sites=sites))
    for page in (*parts, render_html(record), render_html(record_of(), inputs)):
        assert clean(page) == page
        assert "<script>alert" not in page
        assert "<img" not in page
    outside = "\n".join(render_markdown(record).split("```")[::2])
    assert "<script" not in outside.replace("\\<script", "")
    assert not re.search(r"(?<!\\)\]\(javascript", outside)


def test_the_card_of_a_model_escapes_what_a_plan_says(tmp_path):
    model = hp.MultiHeadAttention(8, 2)
    notes = ("<!-- headprune: end -->\n# Free!\n<script>", "![x](http://somewhere/x.png)")
    plan = hp.PruningPlan(hp.HeadMask.full(hp.find_sites(model)), notes=notes, selector="`x`\n# y")
    hp.save_pretrained(model, tmp_path, plan=plan)
    text = (tmp_path / "README.md").read_text()
    assert text.count(card.END) == 1
    assert "\n# " not in text
    assert "<script" not in text.replace("\\<script", "")
    assert "![x]" not in text
    assert card._code("model.layers[0].self_attn") == "`model.layers[0].self_attn`"
    assert card._code("x`|<img>\n# T") == r"x\`\|\<img\> \# T"


def card_of(name, folder):
    """The card of a model that was loaded from a name, and its facts for the hub."""
    model = registry.get("llama").tiny(0)[0]
    model.config._name_or_path = name
    hp.save_pretrained(model, folder)
    text = (folder / card.CARD).read_text("utf-8")
    return text, yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize(
    "name",
    [
        "org/x\nlicense: mit",
        f"x\n---\n# money\n<img onerror=a>{card.END}[here](http://evil)",
        "a`b|c",
        "m\udcff",
        "org/\u202ex",
    ],
)
def test_a_card_says_what_a_model_was_loaded_from_and_nothing_else(name, tmp_path):
    plain, _ = card_of("a", tmp_path / "plain")
    named, facts = card_of(name, tmp_path / "named")
    assert facts == {"tags": ["headprune"]}, "what is no name of the hub is not told to it"
    assert len(named.splitlines()) == len(plain.splitlines()) - 1, "no line for the hub's name"
    line = next(line for line in named.splitlines() if line.startswith("- Base model: "))
    assert "<" not in line.replace(r"\<", "")
    assert "`" not in line.replace(r"\`", "")


def test_a_name_of_the_hub_is_text_whatever_it_looks_like(tmp_path):
    for name in ("1.10", "null"):
        assert card_of(name, tmp_path / name)[1]["base_model"] == name


# ---------------------------------------------------------------- pictures and spreadsheets


def drawn(text, folder):
    """Every picture of values that hold a text; those that are no files are on one figure."""
    _, scores, plan = nasty_record(text)
    maps, found = maps_of(record_of(), 1, 4), agreement_of(text)
    sites = tuple(replace(site, site=f"{site.site}{text}") for site in maps.sites)
    maps, data = replace(maps, sites=sites), sweep_table().to_dict()
    first = data["keys"][0]
    rows = [{**row, first: f"{row[first]}{text}"} for row in data["rows"]]
    table = SweepTable.from_dict({**data, "name": text, "metric": text, "rows": rows})
    assert sweep_view(table).title.startswith(f"{text}: "), "a page has it as it is"
    figure = Figure()
    axes = figure.subplots(3, 3)
    hp.plot.head_map(scores, plan, ax=axes[0, 0])
    hp.plot.tradeoff(table, ax=axes[0, 1])
    hp.plot.attention(maps, next(iter(maps)), ax=axes[0, 2])
    hp.plot.attention(maps, sites[0].site, axes=axes[1:2])
    hp.plot.agreement(found, axes=axes[2])
    draw_agreement(found, folder / "agreement.png")
    draw_tradeoff(table, folder / "tradeoff.svg")
    return figure


@pytest.mark.parametrize("text", [r"$\frac$", "$", r"\$"])
def test_pictures_draw_what_files_say_letter_by_letter(text, tmp_path):
    """To matplotlib ``$`` begins a formula, and one that it cannot read ends the picture."""
    figure = drawn(text, tmp_path)
    figure.savefig(tmp_path / "maps.png")
    for label in figure.axes[0].get_yticklabels():
        assert label.get_text().replace(r"\$", "$").endswith(text.replace(r"\$", "$"))


def test_pictures_hand_no_name_to_tex(tmp_path, monkeypatch):
    """Under ``text.usetex`` a name would be LaTeX, which reads files; here it would fail, or not be
    installed."""

    def made(_, tex, *__, **___):
        raise AssertionError(f"LaTeX was asked for {tex}")

    for name in ("make_tex", "make_dvi", "make_png", "get_text_width_height_descent"):
        monkeypatch.setattr(texmanager.TexManager, name, made)
    with matplotlib.rc_context({"text.usetex": True}):
        figure = drawn(r"\input{secret}", tmp_path)
    texts = [t for t in figure.findobj(matplotlib.text.Text) if "secret" in t.get_text()]
    assert len(texts) >= 5
    assert not any(t.get_usetex() for t in texts)


def test_a_table_for_a_spreadsheet_holds_no_formula(tmp_path):
    formulas = ["=cmd|' /C calc'!A0", "@SUM(A1)", "+x", "-2+3+cmd|' /C calc'!A0", "\t=1"]
    formulas += ["\uff1d1", "\uff0b1", "\uff0d1", "\uff201"]
    cells = [*formulas, "-0.5", "taylor", None]
    rows = [{"scorer": cell, "drop": -0.5, "=1": 3} for cell in cells]
    _write_columns(rows, tmp_path / "table")
    head, *lines = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    assert head == '"scorer","drop","\'=1"'
    starts = [line.split(",")[0].strip('"')[:1] for line in lines]
    assert starts[:11] == ["'"] * 9 + ["-", "t"]
    assert all(line.endswith(",-0.5,3") for line in lines)
    for_programs = parquet.read_table(tmp_path / "table.parquet").to_pylist()
    assert for_programs == rows, "as it was"
    _write_columns([{"scorer": "\n=1"}, {"scorer": "\r=1"}], tmp_path / "broken", (".csv",))
    assert (tmp_path / "broken.csv").read_bytes() == b'"scorer"\n"\'\n=1"\n"\'\r=1"\n'


# ---------------------------------------------------------------- code, shells, packages


@pytest.mark.filterwarnings("always:.*names other code")
def test_who_trusts_a_folder_with_a_modelling_file_runs_no_other_code(tmp_path):
    """The base model's tokenizer and pipelines may name code of a repository: it was never looked
    at."""
    base, out, plain = bert(tmp_path / "base"), tmp_path / "out", tmp_path / "plain"
    evil = {"AutoTokenizer": ["evil/repo--code.Tok", None]}
    pipelines = {"text-classification": {"impl": "evil/repo--code.Pipe"}}
    changed(base / "config.json", custom_pipelines=pipelines)
    changed(base / "tokenizer_config.json", auto_map=evil)
    processor = {"image_processor": [{"auto_map": evil, "size": 3}]}
    (base / "processor_config.json").write_text(json.dumps(processor))
    (base / "vocab_lists.json").write_text("no JSON")
    sites = hp.find_sites(open_model(str(base)))
    keep = {site.name: [0] if i else [0, 1] for i, site in enumerate(sites)}
    mask = hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})
    plan = hp.PruningPlan(mask).save(tmp_path / "plan.json")
    said = done(f"prune --model {base} --plan {plan} --out {out} --format remote-code").output
    for name in ("processor_config.json", "tokenizer_config.json"):
        assert f"warning: {name} names other code, which is left out: " in said
    assert "evil" not in "".join(path.read_text(errors="replace") for path in out.glob("*.json"))
    kept = json.loads((out / "processor_config.json").read_text())
    assert kept == {"image_processor": [{"size": 3}]}
    assert (out / "vocab_lists.json").read_text() == "no JSON"
    done(f"prune --model {base} --plan {plan} --out {plain} --format headprune")
    told = json.loads((plain / "tokenizer_config.json").read_text())
    assert told["auto_map"] == evil, "in a folder that runs no code it is as it was"


@pytest.mark.parametrize("name", [f"package:{SHELL}/m", "package:a\nerror: b/m"])
def test_no_package_is_to_be_installed_whose_name_is_none(name):
    with pytest.raises(InvalidValue, match="no package") as refusal:
        open_model(name)
    assert refusal.value.hint == "Give a folder: --set MODEL=FOLDER."


@pytest.mark.parametrize(
    ("auto_map", "named"),
    [
        ({f"AutoModelFor{SHELL}": "m.M", "AutoModelForMaskedLM": "m.N"}, "AutoModelForMaskedLM"),
        ({"AutoModel\n\nerror: x": "m.M"}, "AutoModel"),
        ([1], "AutoModel"),
    ],
)
def test_the_line_that_loads_code_names_a_class_of_transformers(auto_map, named, tmp_path):
    folder = bert(tmp_path / "model")
    changed(folder / "config.json", headprune_heads={}, auto_map=auto_map)
    with pytest.raises(InvalidValue, match="which runs the modelling file") as refusal:
        open_model(str(folder))
    line = f"transformers.{named}.from_pretrained('{folder}', trust_remote_code=True). "
    assert line in (refusal.value.hint or "")


def test_a_setting_to_give_is_one_word_for_a_shell(tmp_path):
    config = {SHELL: None, "b": f"${{model.config.{SHELL}}}"}
    recipe = {**TINY, "model": {**TINY["model"], "config": config}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(hp.core.errors.HeadPruneError) as refusal:
        load_recipe(tmp_path / "recipe.yaml")
    said = re.search("Give it: (.*)", str(refusal.value))
    assert shlex.split(said[1]) == ["--set", f"model.config.{SHELL}=..."]


def test_a_folder_that_begins_like_an_option_is_a_folder():
    record = record_of()
    recipe = FrozenDict({**record.recipe, "task": "x", "out": "--out=/tmp/x"})
    words = shlex.split(repeat.command(replace(record, recipe=recipe)))
    assert words[:3] == ["headprune", "run", "./--out=/tmp/x/recipe.yaml"]
    assert words[3:] == ["--out", "./--out=/tmp/x-again"]
