"""HeadId, AttentionSite and the algebra of HeadMask, against Python's own sets."""

import itertools
import operator

import numpy as np
import pytest

from headprune.core.errors import InvalidValue, PlanMismatch, UnknownName
from headprune.core.heads import AttentionSite, HeadCounts, HeadId, HeadMask, SiteKeep, without
from headprune.core.slabs import HeadGeometry

COUNTS = {"b": 3, "a": 2}


def site(n_query_heads=4, n_kv_heads=4, heads=None, **changes):
    heads = tuple(range(n_query_heads)) if heads is None else heads
    name = changes.pop("name", "x")
    counts = (n_query_heads, n_kv_heads, 8, 6)
    return AttentionSite(name, "bert", "self", *counts, heads, **changes)


def masks():
    heads = [HeadId(s, h) for s, n in COUNTS.items() for h in range(n)]
    for n in range(len(heads) + 1):
        yield from map(frozenset, itertools.combinations(heads, n))


def mask_of(heads):
    return HeadMask.from_keep({s: [h.head for h in heads if h.site == s] for s in COUNTS}, COUNTS)


# --- HeadId and AttentionSite


def test_head_ids_sort_by_site_then_number():
    ids = [HeadId("b", 0), HeadId("a", 10), HeadId("a", 9)]
    assert sorted(ids) == [HeadId("a", 9), HeadId("a", 10), HeadId("b", 0)]


def test_units_are_heads_or_whole_groups_in_original_indices():
    assert site().units == ((0,), (1,), (2,), (3,))
    assert site(6, 2).units == ((0, 1, 2), (3, 4, 5))
    assert site(6, 3, heads=(0, 1, 4, 5)).units == ((0, 1), (4, 5))
    assert site(heads=()).units == ()


def test_the_geometry_is_that_of_the_present_heads():
    assert site(6, 3, heads=(0, 1, 4, 5)).geometry == HeadGeometry(4, 2, 8, 6)
    assert site(6, 3, heads=()).geometry == HeadGeometry(0, 0, 8, 6)
    assert site(6, 3).group_size == 2


def test_check_speaks_of_original_indices():
    here = site(8, 4, heads=(2, 3, 6, 7))
    assert here.check([7, 6, 6]) == (6, 7)
    assert here.check([]) == ()
    assert here.check(here.heads) == here.heads
    with pytest.raises(UnknownName, match=r"present heads \[2, 3, 6, 7\], got 0"):
        here.check([0, 1])
    with pytest.raises(InvalidValue, match=r"got 1 of heads \[6, 7\]"):
        here.check([2, 3, 6])


def test_what_a_policy_allows():
    group, balanced, free = (site(6, 2, policy=p) for p in ("group", "balanced", "free"))
    assert group.units == ((0, 1, 2), (3, 4, 5))
    assert balanced.units == free.units == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert balanced.check([0, 2, 4, 5]) == (0, 2, 4, 5)
    assert balanced.check([3, 5]) == (3, 5), "a whole group may be removed"
    assert free.check([0, 1, 5]) == (0, 1, 5)
    with pytest.raises(InvalidValue, match="whole groups of 3"):
        group.check([0, 2, 3, 4, 5])
    with pytest.raises(InvalidValue, match=r"got \[1, 2\] of"):
        balanced.check([0, 4, 5])
    for policy, keep in (("group", [0, 1, 2]), ("balanced", [0, 1, 4, 5]), ("free", [0, 3, 4])):
        assert group.permitting(keep).policy == policy


def test_sites_with_torn_groups():
    torn = site(6, 2, heads=(0, 2, 5))
    assert torn.groups == torn.units == ((0, 2), (5,))
    assert torn.geometry == HeadGeometry(3, 2, 8, 6, kv_of=(0, 0, 1))
    assert torn.check([5]) == (5,)
    with pytest.raises(InvalidValue, match="whole groups of 2"):
        torn.check([0])


def test_interleaved_groups():
    here = site(6, 2, grouping="interleaved")
    assert here.units == ((0, 2, 4), (1, 3, 5))
    assert here.geometry.kv_of == (0, 1, 0, 1, 0, 1)
    assert site(6, 2, grouping="interleaved", heads=(1, 3, 5)).geometry == HeadGeometry(3, 1, 8, 6)


def test_a_site_is_printed_in_words():
    some = site(6, 3, heads=(0, 1))
    assert str(site()) == "x: 4 heads of width 8 (bert, self)"
    assert str(some) == "x: 6 heads in 3 KV groups of width 8, 2 present (bert, self)"
    assert (
        str(site(6, 3, policy="free")) == "x: 6 heads in 3 KV groups of width 8 (bert, self, free)"
    )
    assert site(least=4).least == 4


# --- HeadMask


def test_mask_algebra_is_set_algebra():
    every = list(masks())
    assert len(every) == 32
    for one, two in itertools.product(every, every):
        a, b = mask_of(one), mask_of(two)
        assert set(a | b) == one | two
        assert set(a & b) == one & two
        assert set(a - b) == one - two
        assert (a == b) == (one == two)
        assert a & b == mask_of(one & two)
        assert hash(a & b) == hash(mask_of(one & two))


def test_a_mask_answers_like_a_set():
    for one in masks():
        mask = mask_of(one)
        assert len(mask) == mask.n_kept == len(one)
        assert mask.n_heads == 5
        in_order_of_the_model = sorted(one, key=lambda h: (h.site != "b", h.head))
        assert list(mask) == in_order_of_the_model
        for name, n in COUNTS.items():
            assert set(mask.kept(name)) | set(mask.removed(name)) == set(range(n))
            assert all((HeadId(name, h) in mask) == (HeadId(name, h) in one) for h in range(n))
    assert HeadId("c", 0) not in mask
    assert ("a", 0) not in mask


def test_masks_over_other_sites_or_counts_do_not_mix():
    a = HeadMask.from_keep({}, {"x": 2})
    for counts in ({"x": 3}, {"y": 2}, {}):
        for operation in (operator.or_, operator.and_, operator.sub):
            with pytest.raises(PlanMismatch, match="over the same sites and head counts"):
                operation(a, HeadMask.from_keep({}, counts))
    with pytest.raises(TypeError):
        a | {"x": [1]}


def test_full_holds_the_present_heads_in_original_counts():
    mask = HeadMask.full([site(8, 4, heads=(2, 3)), site(name="y")])
    assert mask.rows == (SiteKeep("x", 8, (2, 3)), SiteKeep("y", 4, (0, 1, 2, 3)))


def test_from_keep_sorts_and_keeps_whole_sites_that_are_not_named():
    mask = HeadMask.from_keep({"b": [2, 0, 2]}, COUNTS)
    assert mask.kept("b") == (0, 2)
    assert mask.kept("a") == (0, 1)
    assert HeadMask.from_keep({"a": []}, COUNTS).kept("a") == ()


def test_a_mask_prints_as_a_person_reads_it():
    mask = HeadMask.from_keep(
        {"layer.0": [1], "layer.10": [0, 1, 3]}, {"layer.0": 2, "layer.10": 4}
    )
    assert str(mask) == (
        "HeadMask: 4 of 6 heads kept\n"  #
        "  layer.0   ·■  1/2\n"
        "  layer.10  ■■·■  3/4"
    )
    assert str(HeadMask(())) == "HeadMask: 0 of 0 heads kept"


def test_a_mask_refuses_what_is_not_there():
    for keep in ([1, 3], [-1]):
        with pytest.raises(UnknownName, match="must be an index below 3"):
            HeadMask.from_keep({"b": keep}, COUNTS)
    with pytest.raises(LookupError):
        mask_of(set()).removed("c")
    with pytest.raises(InvalidValue, match="without repeats"):
        HeadMask((SiteKeep("x", 2, (0, 0)),))


# --- indices and rows


@pytest.mark.parametrize("kept", [[2, 0], {0, 2}, np.array([0, 2]), [np.int64(0), 2], [0, 0, 2]])
def test_from_keep_takes_every_kind_of_index(kept):
    assert HeadMask.from_keep({"b": kept}, COUNTS).kept("b") == (0, 2)
    assert HeadMask.from_keep({"b": (i for i in kept)}, COUNTS).kept("b") == (0, 2)


@pytest.mark.parametrize(
    "row", [[1, 0, 1], [True, False, True], np.array([1, 0, 1], bool), np.array([0, 1, 1])]
)
def test_from_keep_refuses_a_row_of_0_and_1(row):
    with pytest.raises(InvalidValue, match=r"keep\['b'\].* head indices.*HeadMask.from_array"):
        HeadMask.from_keep({"b": row}, COUNTS)


def test_of_two_heads_an_array_of_0_and_1_may_be_a_row():
    for array in (np.array([1, 0]), np.array([0, 1])):
        with pytest.raises(InvalidValue, match="may be a row of 0 and 1"):
            HeadMask.from_keep({"a": array}, {"a": 2})
    assert HeadMask.from_keep({"a": [1, 0]}, {"a": 2}).kept("a") == (0, 1)
    assert HeadMask.from_keep({"a": np.array([1])}, {"a": 2}).kept("a") == (1,)
    with pytest.raises(InvalidValue, match="may be a row of 0 and 1"):
        HeadMask.from_keep({"a": [1, 0, 0, 1, 1, 0]}, {"a": 4})
    assert HeadMask.from_keep({"a": [1, 1]}, {"a": 4}).kept("a") == (1,)


def test_from_array_is_from_keep_of_the_ones():
    sites = [site(n, n, name=name) for name, n in COUNTS.items()]
    for mask in map(mask_of, masks()):
        table = [[int(h in mask.kept(name)) for h in range(n)] for name, n in COUNTS.items()]
        assert HeadMask.from_array(table, sites) == mask
        assert HeadMask.from_array([np.array(row, bool) for row in table], sites) == mask


def test_from_array_names_the_row_that_is_wrong():
    sites = [site(3, 3, name="b"), site(2, 2, heads=(1,), name="a")]
    rows = r"array: must be \[layers, heads\] with one row per site, 2, got "
    for array, words in (
        (7, f"{rows}int"),
        ([[1, 0, 1]], f"{rows}1 rows"),
        ([[1, 0], [0, 1]], r"array\[0\], for b: must be one value per head, 3, got 2"),
        ([[1, 0, 2], [0, 1]], r"array\[0\], for b: must be 1 \(kept\) or 0 .*, got 2"),
    ):
        with pytest.raises(InvalidValue, match=words):
            HeadMask.from_array(array, sites)
    words = r"array\[1\], for a: must be 1 only for the present heads \[1\], got 1 for head 0"
    with pytest.raises(UnknownName, match=words):
        HeadMask.from_array([[1, 0, 1], [1, 1]], sites)
    even = [site(2, 2, name="b"), site(2, 2, name="a")]
    mask = HeadMask.from_array(np.array([[1, 0], [0, 1]]), even)
    assert (mask.kept("b"), mask.kept("a")) == ((0,), (1,))


# --- words


def neurons(n, heads=None):
    heads = tuple(range(n)) if heads is None else heads
    return AttentionSite("f", "bert", "feed_forward", n, n, 1, 1, heads)


def test_a_feed_forward_says_how_many_neurons_are_present():
    assert str(neurons(6)) == "f: 6 neurons (bert)"
    assert str(neurons(6, (0, 2))) == "f: 6 neurons, 2 present (bert)"


def test_counts_in_words():
    heads, both = HeadCounts(3), HeadCounts(1, 2000)
    assert (str(heads), str(both), str(HeadCounts(2, 1))) == (
        "3 heads",
        "1 head and 2,000 neurons",
        "2 heads and 1 neuron",
    )
    assert both.of(HeadCounts(4, 3000)) == "1 of 4 heads and 2,000 of 3,000 neurons"
    assert heads.of(HeadCounts(4, 3000)) == "3 of 4 heads and 0 of 3,000 neurons"
    assert HeadCounts(4, 3000) - both == HeadCounts(3, 1000)
    assert HeadCounts(4, 3000) - heads == HeadCounts(1, 3000)
    assert heads - HeadCounts(1) == HeadCounts(2)


@pytest.mark.parametrize(("n_heads", "marks"), [(128, "■" * 128), (129, "")])
def test_a_mask_marks_heads_where_a_line_holds_them(n_heads, marks):
    mask = HeadMask.full([site(n_heads, n_heads)])
    assert str(mask).split("\n")[1] == f"  x  {marks}  {n_heads}/{n_heads}"


def test_without_removes_what_is_named():
    sites = [site(3, 3, name="b"), site(4, 4, heads=(0, 2, 3), name="a")]
    mask = without(sites, {"a": [2]})
    assert (mask.kept("b"), mask.kept("a")) == ((0, 1, 2), (0, 3))
