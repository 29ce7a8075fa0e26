"""hp.plot: axes in and out, and what is drawn is what the values say."""

from dataclasses import replace
from io import BytesIO
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

import headprune as hp
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadId, HeadMask
from headprune.core.plan import PruningPlan
from headprune.core.record import QualityRow, RunRecord
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.core.sweeps import SweepTable
from headprune.maps.attention_maps import AttentionMaps, SiteMaps

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def nothing_is_open_afterwards():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


SITES = (
    AttentionSite("a.b", "bert", "self", 3, 3, 4, 4, (0, 1, 2)),
    AttentionSite("a.c", "bert", "self", 3, 3, 4, 4, (0, 2)),
)
HEAD = HeadId("a.c", 2)


def scores(name="taylor", values=((1.0, 2.0, 3.0), (4.0, 5.0))):
    errors = ((0.1, 0.2, 0.3), (0.4, 0.5))
    return HeadScores(SITES, values, errors, name, EMPTY, 9, ModelFingerprint("s", "w"))


def plan(**keep):
    kept = {f"a.{name}": heads for name, heads in keep.items()}
    return PruningPlan(HeadMask.from_keep(kept, dict.fromkeys(kept, 3)))


PLAN = plan(b=[0, 2], c=[2])


def labels(axis):
    return [label.get_text() for label in axis]


def crossed(panel):
    """Where removed heads are marked."""
    return {patch.get_xy() for patch in panel.patches if patch.get_hatch()}


def test_a_head_map_shows_scores_cuts_and_gaps():
    panel = Figure().subplots()
    assert hp.plot.head_map(scores(), PLAN, ax=panel, values=True) is panel
    (image,) = panel.images
    shown = np.ma.filled(image.get_array(), np.nan)
    np.testing.assert_array_equal(shown, [[1, 2, 3], [4, np.nan, 5]])
    assert crossed(panel) == {(0.5, -0.5), (-0.5, 0.5)}
    assert labels(panel.get_yticklabels()) == ["a.b", "a.c"]
    assert {*labels(panel.texts)} >= {"1\n±0.1", "5\n±0.5"}
    alone = hp.plot.head_map(plan=PLAN)
    assert len(crossed(alone)) == 3
    assert len(alone.figure.axes) == 1, "there are no colours to explain"
    assert not crossed(hp.plot.head_map(scores()))
    with pytest.raises(InvalidValue, match="neither"):
        hp.plot.head_map()
    with pytest.raises(InvalidValue, match=r"none for a\.c"):
        hp.plot.head_map(scores(), plan(b=[0]))


def maps(image=None):
    draw = np.random.default_rng(0)
    masks = np.array([[True] * 5, [True] * 3 + [False] * 2])
    sites = []
    for site in SITES:
        weights = draw.random((2, len(site.heads), 5, 5), dtype=np.float32)
        sites.append(SiteMaps(site.name, "self", site.heads, weights, masks, masks))
    words = (("[CLS]", "<b>", "$x$", "\x07é", "."), ("a", "b", "c"))
    return AttentionMaps(tuple(sites), words, (), image)


def test_one_head_has_its_tokens_beside_it():
    found = maps()
    panel = hp.plot.attention(found, HEAD)
    np.testing.assert_array_equal(panel.images[0].get_array(), found.shown(HEAD, 0))
    assert labels(panel.get_yticklabels()) == ["[CLS]", "<b>", r"\$x\$", "é", "."]
    panel.figure.canvas.draw()
    small = hp.plot.attention(found, HEAD, example=1, ax=Figure().subplots())
    assert small.images[0].get_array().shape == (3, 3)
    with pytest.raises(InvalidValue, match="0 to 1"):
        hp.plot.attention(found, HEAD, example=2)


def test_all_heads_are_small_multiples():
    panels = hp.plot.attention(maps())
    shown = [[panel.get_title() for panel in row if panel.get_visible()] for row in panels]
    assert shown == [["0", "1", "2"], ["0", "2"]]
    assert hp.plot.attention(maps(), "a.b").shape == (1, 3)
    own = Figure().subplots(2, 3)
    assert hp.plot.attention(maps(), axes=own) is own
    marked = hp.plot.attention(maps(), plan=plan(b=[0, 2], c=[0, 1, 2]))[0]
    assert [panel.get_title() for panel in marked] == ["0", "1 ×", "2"]
    dashed = [panel.spines["left"].get_linestyle() == "--" for panel in marked]
    assert dashed == [False, True, False]


def test_of_an_image_a_query_is_laid_out_as_the_image():
    found, head = maps((2, 2)), HeadId("a.b", 1)
    panel = hp.plot.attention(found, head, query=3)
    wanted = found.shown(head, 0)[3, 1:].reshape(2, 2)
    np.testing.assert_array_equal(panel.images[0].get_array(), wanted)
    with pytest.raises(InvalidValue, match="at most 5 patches"):
        hp.plot.attention(replace(found, image=(3, 3)), head)


def record(kept, value):
    rows = [("base", 8, 0.9, 0.0), ("taylor", kept, value, 0.0), ("random", kept, 0.5, 0.1)]
    quality = tuple(
        QualityRow(name, heads, "accuracy", v, "test", 10, 0.1, draws=3, spread=s)
        for name, heads, v, s in rows
    )
    return RunRecord("x", "done", "report", "2026-01-01T00:00:00+00:00", quality=quality)


def test_a_tradeoff_of_runs():
    panel = hp.plot.tradeoff([record(6, 0.85), record(4, 0.8)])
    lines = {line.get_label(): line for line in panel.get_lines()}
    assert list(lines["random"].get_xdata()) == [4, 6]
    assert set(lines["all heads"].get_ydata()) == {0.9}
    (bars,) = panel.containers
    assert bars.get_label() == "taylor"
    assert list(bars[0].get_ydata()) == [0.8, 0.85]
    assert panel.get_ylabel() == "accuracy on test rows"
    other = replace(record(2, 0.7), name="other", recipe=FrozenDict({"data": {"path": "trec"}}))
    with pytest.raises(InvalidValue, match="of one task, model and data, got several: x; other"):
        hp.plot.tradeoff([record(6, 0.85), other])
    with pytest.raises(InvalidValue, match="one metric, measured on validation rows, got nothing"):
        hp.plot.tradeoff(record(6, 0.85), split="validation")


def test_a_tradeoff_of_a_sweep():
    base = {"validation": 9.0, "test": 9.5, "heads": 8, "params": 9, "macs": 9, "kv": None}
    row = {"scorer": "fisher", "heads": 4, "validation": 10.0}
    row |= {"validation_drop": 0.1, "test_drop": 0.1}
    rows = [{**row, "seed": seed, "test": 10.0 + seed} for seed in (0, 2)]

    def table(*keys, **more):
        found = tuple(FrozenDict({**each, **more}) for each in rows)
        return SweepTable("s", "perplexity", keys, (), FrozenDict(base), found)

    panel = hp.plot.tradeoff(table("scorer"), ax=Figure().subplots())
    assert list(panel.containers[0][0].get_ydata()) == [11.0]
    assert panel.get_ylabel() == "perplexity on test rows, lower is better"
    with pytest.raises(InvalidValue, match="test or validation"):
        hp.plot.tradeoff(table("scorer"), split="train")
    chance = table("scorer", "recover", scorer="random", recover="none")
    panel = hp.plot.tradeoff(chance, ax=Figure().subplots())
    # It is a band, whatever else its method says.
    assert (len(panel.containers), len(panel.collections)) == (0, 1)


def test_pictures_are_saved_as_vectors():
    """Only the cells of a map and its scale of colours are images."""
    found = hp.agreement(scores(), scores("fisher", ((3.0, 1.0, 2.0), (4.0, 5.0))))
    pictures = [
        (hp.plot.head_map(scores(), PLAN, values=True), True),
        (hp.plot.attention(maps(), HEAD), True),
        (hp.plot.tradeoff([record(6, 0.85), record(4, 0.8)]), False),
        (hp.plot.agreement(found)[0], False),
    ]
    for panel, is_map in pictures:
        written = BytesIO()
        panel.figure.savefig(written, format="svg")
        root = ElementTree.fromstring(written.getvalue())
        assert len(root.findall(".//{*}path")) > 5
        images = len(root.findall(".//{*}image"))
        assert (0 < images <= 2) == is_map
        assert images == 0 or is_map
