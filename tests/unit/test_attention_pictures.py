"""AttentionPictures: what is stored is the maps to a 255th, small enough, and says what is left
out; and patterns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.maps.attention_maps import AttentionMaps, SiteMaps
from headprune.maps.patterns import ONE_KEY, SAME_POSITIONS, find_patterns, main_pattern
from headprune.maps.pictures import MEAN, AttentionPictures, ShownExample
from tests.report_records import maps_of, pictures_of, record_of


def bytes_of(pictures: AttentionPictures) -> int:
    return sum(
        len(site.heads) * queries * keys for site in pictures.sites for queries, keys in site.sizes
    )


def test_every_weight_is_kept_to_a_255th_of_the_largest_and_survives_a_file(tmp_path: Path) -> None:
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
    assert str(again) == "AttentionPictures of 8 heads in 3 examples; words for 2 of them"
    assert again.pattern(HeadId("nowhere", 0)) is None


def test_padding_is_left_out() -> None:
    maps = maps_of(record_of(1, 2), 2, 5)
    site = maps.sites[0]
    keys = site.keys.copy()
    keys[1, 3:] = False
    short = replace(
        maps,
        sites=(replace(site, keys=keys, queries=keys),),
        tokens=(maps.tokens[0], maps.tokens[1][:3]),
    )
    assert AttentionPictures.of(short).sites[0].sizes == ((5, 5), (3, 3))


def test_a_long_text_is_cut_to_what_fits_and_then_examples_go() -> None:
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


def test_an_image_has_its_mean_and_loses_its_patches_views_first() -> None:
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


def test_damage_is_seen(tmp_path: Path) -> None:
    path = pictures_of(record_of(1, 2), 1, 3).save(tmp_path / "attention.json")
    whole = path.read_text()
    site = pictures_of(record_of(1, 2), 1, 3).sites[0]
    for broken in (site.weights[0][4:], "!" + site.weights[0][1:]):
        path.write_text(whole.replace(site.weights[0], broken))
        with pytest.raises(InvalidValue, match=r"must be 18 bytes in base64"):
            AttentionPictures.load(path)
    with pytest.raises(InvalidValue, match="must be 3 bytes in base64"):
        ShownExample("x", pixels="AA==", height=1, width=1)
    with pytest.raises(InvalidValue, match="must be of 0 examples"):
        AttentionPictures((), (site,))
    with pytest.raises(InvalidValue, match=r"the sizes of .*: must be counts >= 0, got \(-3, -3\)"):
        replace(site, sizes=((-3, -3),))
    with pytest.raises(
        InvalidValue, match=r"AttentionPictures.sites: must be at least one, got none"
    ):
        AttentionPictures((ShownExample("x"),), ())
    with pytest.raises(
        InvalidValue,
        match=r"AttentionPictures.image: must be rows and columns of patches, both >= 1",
    ):
        AttentionPictures((), (), image=(0, 3))


# ----------------------------------------------------------------------------------------------
# patterns


def shifted(n: int, shift: int, share: float = 0.8) -> np.ndarray:
    """Rows that put a share of their weight on one place by position, and the rest evenly."""
    weights = np.full((n, n), (1 - share) / n)
    weights[np.arange(n), (np.arange(n) + shift) % n] += share
    return weights


def test_positions_of_a_cut_off_text_and_of_an_image_that_a_text_looks_at_are_not_told() -> None:
    """Causal maps with more keys than queries, and cross attention to patches: which is whose
    neighbour is unknown."""
    assert find_patterns([np.full((2, 3), 1 / 3)], "causal", (), None) == ()
    across = find_patterns([np.full((2, 4), 0.25)], "cross", (), (2, 2))
    assert {pattern.name for pattern in across} == {ONE_KEY}
    with_class = find_patterns([np.full((2, 5), 0.2)], "cross", (), (2, 2))
    assert {pattern.name for pattern in with_class} == {ONE_KEY, "class token"}


def test_where_only_positions_are_alike_that_is_what_is_said() -> None:
    found = main_pattern(find_patterns([shifted(9, 3), shifted(9, 3)], "self", (), None))
    assert found is not None
    assert found.name == SAME_POSITIONS
    assert found.share == pytest.approx(1.0)
    assert found.chance == pytest.approx(0.2 + 1 / 9 * 0.8)
    assert (
        main_pattern(find_patterns([shifted(9, 3)], "self", (), None)) is None
    )  # one example says nothing
    assert main_pattern(find_patterns([shifted(9, 3), shifted(9, 4)], "self", (), None)) is None
    even = np.full((9, 9), 1 / 9)
    assert main_pattern(find_patterns([even, even], "self", (), None)) is None
    nearly = shifted(9, 3, 0.05)
    assert main_pattern(find_patterns([nearly, nearly[::-1]], "self", (), None)) is None
    before = main_pattern(find_patterns([shifted(9, -1), shifted(9, -1)], "self", (), None))
    assert before is not None
    assert before.name == "previous token"  # the word that says more


def test_examples_of_unlike_length_are_compared_where_both_have_a_token() -> None:
    found = {p.name: p for p in find_patterns([np.eye(3), np.eye(5)], "self", (), None)}
    assert found[SAME_POSITIONS].share == pytest.approx(1.0)
    assert found[SAME_POSITIONS].chance == pytest.approx((3 / 3 + 3 / 5) / 6)


@pytest.mark.parametrize(
    ("name", "down", "right"),
    [
        ("own patch", 0, 0),
        ("patch to the left", 0, -1),
        ("patch to the right", 0, 1),
        ("patch above", -1, 0),
    ],
)
def test_patches_have_neighbours_on_the_grid_and_no_others(
    name: str, down: int, right: int
) -> None:
    rows, columns = 3, 4
    weights = np.zeros((13, 13))
    weights[0, 0] = 1.0
    for y in range(rows):
        for x in range(columns):
            inside = 0 <= y + down < rows and 0 <= x + right < columns
            weights[1 + y * columns + x, 1 + (y + down) * columns + x + right if inside else 0] = (
                1.0
            )
    found = {p.name: p for p in find_patterns([weights], "self", (), (rows, columns))}
    assert found[name].share == pytest.approx(1.0)
    assert found[name].chance == pytest.approx(1 / 13)
    for other in {
        "own patch",
        "patch to the left",
        "patch to the right",
        "patch above",
        "patch below",
    } - {name}:
        assert found[other].share == 0
    assert "previous token" not in found
    edge = 0 if name == "own patch" else rows if right else columns
    assert found["class token"].share == pytest.approx(edge / 12)


def test_a_text_of_an_odd_length_is_no_image() -> None:
    maps = AttentionMaps(
        (
            SiteMaps(
                "x",
                "self",
                (0,),
                np.eye(3, dtype=np.float32)[None, None],
                *(np.ones((1, 3), bool),) * 2,
            ),
        ),
        image=(2, 2),
    )
    names = {p.name for p in maps.patterns(HeadId("x", 0))}
    assert "own position" in names
    assert "own patch" not in names
