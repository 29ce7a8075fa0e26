"""AttentionPictures: what is stored is the maps to a 255th, small enough, and says what is left
out; and patterns."""

from dataclasses import replace

import numpy as np
import pytest

from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.maps.patterns import (
    ONE_KEY,
    SAME_POSITIONS,
    find_patterns,
    main_pattern,
)
from headprune.maps.pictures import MEAN, AttentionPictures, ShownExample
from tests.report_records import maps_of, pictures_of, record_of


def bytes_of(pictures):
    return sum(
        len(site.heads) * queries * keys for site in pictures.sites for queries, keys in site.sizes
    )


def test_every_weight_is_kept_to_a_255th_of_the_largest_and_survives_a_file(tmp_path):
    record = record_of(2, 4)
    maps = maps_of(record, 3, 7)
    pictures = AttentionPictures.of(maps, [ShownExample(f"row {i}") for i in range(3)])
    assert pictures.whole
    again = AttentionPictures.load(pictures.save(tmp_path / "attention.json"))
    assert again == pictures
    assert list(again) == list(maps)
    for head in maps:
        for example in range(3):
            true = maps.shown(head, example)
            np.testing.assert_allclose(
                again.shown(head, example), true, atol=true.max() * (0.5 / 255 + 1e-3)
            )
        assert again.pattern(head) == maps.mostly(head)
    assert again.examples[1].tokens == maps.tokens[1]
    assert again.pattern(HeadId("nowhere", 0)) is None


def test_a_long_text_is_cut_to_what_fits_and_then_examples_go():
    maps = maps_of(record_of(2, 4), 4, 20)
    pictures = AttentionPictures.of(maps, limit=8 * 4 * 12**2)
    assert {size for site in pictures.sites for size in site.sizes} == {(12, 12)}
    assert bytes_of(pictures) <= 8 * 4 * 12**2
    assert not pictures.whole
    assert pictures.examples[0].tokens == maps.tokens[0][:12]
    head = next(iter(pictures))
    assert pictures.pattern(head) == maps.mostly(head)  # by the whole map
    few = AttentionPictures.of(maps, limit=8 * 2 * 8**2)
    assert len(few.examples) == 2
    assert {size for site in few.sites for size in site.sizes} == {(8, 8)}
    assert len(AttentionPictures.of(maps, limit=1).examples) == 1


def test_an_image_has_its_mean_and_loses_its_patches_views_first():
    maps = maps_of(record_of(1, 2), 2, 10, (3, 3), words=False)
    pictures = AttentionPictures.of(maps)
    assert pictures.rows == (MEAN, *range(10))
    assert pictures.whole
    head = next(iter(maps))
    true = maps.shown(head, 1)
    shown = pictures.shown(head, 1)
    np.testing.assert_allclose(shown[0], true.mean(0), atol=0.01)
    np.testing.assert_allclose(shown[1:], true, atol=0.01)
    few = AttentionPictures.of(maps, limit=2 * 2 * 2 * 10)
    assert few.rows == (MEAN, 0)
    assert few.sites[0].sizes == ((2, 10), (2, 10))
    assert not few.whole
    assert len(AttentionPictures.of(maps, limit=2 * 2 * 10).examples) == 1
    assert AttentionPictures.of(replace(maps, image=(4, 4))).image is None  # more patches than keys


def test_damage_is_seen(tmp_path):
    pictures = pictures_of(record_of(1, 2), 1, 3)
    (site,) = pictures.sites
    path = pictures.save(tmp_path / "attention.json")
    whole = path.read_text()
    for broken in (site.weights[0][4:], "!" + site.weights[0][1:]):
        path.write_text(whole.replace(site.weights[0], broken))
        with pytest.raises(InvalidValue, match=r"must be 18 bytes in base64"):
            AttentionPictures.load(path)


def test_values_must_fit():
    (site,) = pictures_of(record_of(1, 2), 1, 3).sites
    for make, words in (
        (lambda: ShownExample("x", pixels="AA==", height=1, width=1), "3 bytes in base64"),
        (lambda: AttentionPictures((), (site,)), "of 0 examples"),
        (lambda: replace(site, sizes=((-3, -3),)), r"counts >= 0, got \(-3, -3\)"),
    ):
        with pytest.raises(InvalidValue, match=words):
            make()


def found(maps, kind="self", keys=(), image=None):
    return {pattern.name: pattern for pattern in find_patterns(maps, kind, keys, image)}


def main(*maps, kind="self", keys=()):
    return main_pattern(find_patterns(maps, kind, keys, None))


def shifted(n, shift, share=0.8):
    """Rows that put a share of their weight on one place by position, and the rest evenly."""
    weights = np.full((n, n), (1 - share) / n)
    weights[np.arange(n), (np.arange(n) + shift) % n] += share
    return weights


def test_shares_are_what_they_say():
    weights = np.array(
        [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.0, 0.0, 0.5, 0.5]]
    )
    words = [("a", ",", "##.", "[SEP]")]
    patterns = found([weights], keys=words)
    for name, share in (
        ("previous token", (0.7 + 0.6 + 0.5) / 3),
        ("own position", (0.1 + 0.1 + 0.2 + 0.5) / 4),
        ("next token", (0.2 + 0.1 + 0.1) / 3),
        ("first token", (0.7 + 0.1 + 0.0) / 3),
        ("punctuation", (0.5 + 0.2 + 0.8 + 0.5) / 4),
        ("one key", (0.4 + 0.7 + 0.6 + 0.5) / 4),
    ):
        assert patterns[name].share == pytest.approx(share), name
    assert patterns["previous token"].chance == pytest.approx(0.25)
    assert patterns["punctuation"].chance == pytest.approx(0.5)
    assert main(weights, keys=words) == patterns["previous token"]


def test_what_even_attention_would_do_is_nothing_to_say():
    assert main(np.full((4, 4), 0.25), keys=[(",", ",", ",", "a")]) is None
    causal = np.tril(np.ones((3, 3))) / np.arange(1, 4)[:, None]
    patterns = found([causal], "causal")
    assert "next token" not in patterns
    assert all(p.share == pytest.approx(p.chance) for p in patterns.values())
    assert main(causal, kind="causal") is None


def test_positions_are_told_only_where_queries_are_keys():
    """Causal maps with more keys than queries, and cross attention to patches: which is whose
    neighbour is unknown."""
    assert not found([np.full((2, 3), 1 / 3)], "causal")
    assert set(found([np.full((2, 4), 0.25)], "cross")) == {ONE_KEY}
    assert set(found([np.full((2, 4), 0.25)], "cross", image=(2, 2))) == {ONE_KEY}
    with_class = found([np.full((2, 5), 0.2)], "cross", image=(2, 2))
    assert set(with_class) == {ONE_KEY, "class token"}
    text = found([np.eye(3)], image=(2, 2))
    assert "own position" in text
    assert "own patch" not in text


def test_where_only_positions_are_alike_that_is_what_is_said():
    alike = main(shifted(9, 3), shifted(9, 3))
    assert alike is not None
    assert alike.name == SAME_POSITIONS
    assert alike.share == pytest.approx(1.0)
    assert alike.chance == pytest.approx(0.2 + 1 / 9 * 0.8)
    even, nearly = np.full((9, 9), 1 / 9), shifted(9, 3, 0.05)
    for maps in (
        [shifted(9, 3)],  # one example says nothing
        [shifted(9, 3), shifted(9, 4)],
        [even, even],
        [nearly, nearly[::-1]],
    ):
        assert main(*maps) is None
    before = main(shifted(9, -1), shifted(9, -1))
    assert before is not None
    assert before.name == "previous token"  # the word that says more


NEIGHBOURS = {
    "own patch": (0, 0),
    "patch to the left": (0, -1),
    "patch to the right": (0, 1),
    "patch above": (-1, 0),
    "patch below": (1, 0),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_patches_have_neighbours_on_the_grid_and_no_others(name):
    """Of a class token and three rows of four patches; at the edge the class token is looked at."""
    down, right = NEIGHBOURS[name]
    weights = np.zeros((13, 13))
    weights[0, 0] = 1.0
    for y in range(3):
        for x in range(4):
            inside = 0 <= y + down < 3 and 0 <= x + right < 4
            key = 1 + (y + down) * 4 + x + right if inside else 0
            weights[1 + y * 4 + x, key] = 1.0
    patterns = found([weights], image=(3, 4))
    assert patterns[name].share == pytest.approx(1.0)
    assert patterns[name].chance == pytest.approx(1 / 13)
    assert not any(patterns[other].share for other in NEIGHBOURS if other != name)
    assert "previous token" not in patterns
    edge = 0 if name == "own patch" else 3 if right else 4
    assert patterns["class token"].share == pytest.approx(edge / 12)
