"""Slab arithmetic against an axis that is laid out by reshaping, and head counts that come back
from lengths."""

import itertools

import numpy as np
import pytest

from headprune.core.errors import InvalidValue
from headprune.core.layout import HeadSlab
from headprune.core.slabs import (
    HeadGeometry,
    axis_size,
    blocks,
    check_slab,
    freed_groups,
    infer_geometry,
    kept_rows,
    rows_of,
    used_groups,
)

GEOMETRIES = [
    HeadGeometry(n_kv * group, n_kv, head_dim, value_dim)
    for n_kv, group, head_dim, value_dim in itertools.product(
        (1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 3)
    )
]
COMBINATIONS = [
    *(("query",), ("key",), ("value",), ("context",), ("head",)),
    *(("query", "key"), ("key", "value"), ("query", "value")),
    *(("query", "key", "value"), ("key", "value", "query"), ("value", "query", "key")),
]


def chunks(geometry, units):
    """For every unit: heads in a KV group, and the width of one."""
    width = {"query": geometry.head_dim, "key": geometry.head_dim, "head": 1}
    for unit in units:
        of_queries = unit not in ("key", "value")
        per_group = geometry.n_query_heads // geometry.n_kv_heads if of_queries else 1
        yield per_group, width.get(unit, geometry.value_dim)


def reshaped(geometry, units, packing, groups):
    """The rows of the kept groups, by viewing the axis as an array: [groups, rows of a group], or
    one such a unit."""
    n_kv, parts = geometry.n_kv_heads, list(chunks(geometry, units))
    axis = np.arange(sum(n_kv * per_group * width for per_group, width in parts))
    if packing == "grouped":
        return axis.reshape(n_kv, -1)[groups].ravel().tolist()
    rows, start = [], 0
    for per_group, width in parts:
        stop = start + n_kv * per_group * width
        rows += axis[start:stop].reshape(n_kv, -1)[groups].ravel().tolist()
        start = stop
    return rows


@pytest.mark.parametrize("packing", ["sequential", "grouped"])
@pytest.mark.parametrize("units", COMBINATIONS, ids="+".join)
def test_kept_rows_are_those_of_the_reshaped_axis(units, packing):
    checked = 0
    for geometry in GEOMETRIES:
        group = geometry.group_size
        for n in range(geometry.n_kv_heads + 1):
            for groups in itertools.combinations(range(geometry.n_kv_heads), n):
                keep = [g * group + m for g in groups for m in range(group)]
                assert used_groups(geometry, keep) == list(groups)
                assert freed_groups(geometry, keep) == list(groups)
                expected = reshaped(geometry, units, packing, list(groups))
                assert kept_rows(geometry, units, packing, keep, groups) == expected
                checked += 1
        heads, kv_heads = range(geometry.n_query_heads), range(geometry.n_kv_heads)
        everything = kept_rows(geometry, units, packing, heads, kv_heads)
        assert everything == list(range(axis_size(geometry, units)))
    assert checked == 6 * 3 * (2 + 4 + 8)


def test_a_grouped_projection_by_hand():
    """Two groups of two queries, head_dim 2, value_dim 1: q0 q1 k0 v0 | q2 q3 k1 v1, widths 2 2 2
    1."""
    geometry = HeadGeometry(4, 2, 2, 1)
    units = ("query", "key", "value")
    assert list(blocks(geometry, units, "grouped")) == [
        *(("query", 0, 2), ("query", 1, 2), ("key", 0, 2), ("value", 0, 1)),
        *(("query", 2, 2), ("query", 3, 2), ("key", 1, 2), ("value", 1, 1)),
    ]
    assert kept_rows(geometry, units, "grouped", [2, 3], [1]) == [7, 8, 9, 10, 11, 12, 13]
    # sequential: q 0-7, k 8-11, v 12-13
    assert kept_rows(geometry, units, "sequential", [2, 3], [1]) == [4, 5, 6, 7, 10, 11, 13]
    assert kept_rows(geometry, ("context",), "sequential", [2, 3], [1]) == [2, 3]
    assert kept_rows(geometry, ("head",), "sequential", [2, 3], [1]) == [2, 3]


def test_a_single_query_head_in_a_group_is_cut_alone_from_query_slabs():
    geometry = HeadGeometry(4, 2, 2, 3)
    assert kept_rows(geometry, ("query",), "sequential", [1, 2], [0, 1]) == [2, 3, 4, 5]
    assert kept_rows(geometry, ("context",), "sequential", [3], []) == [9, 10, 11]
    assert kept_rows(geometry, ("value",), "sequential", [3], [0]) == [0, 1, 2]


def test_rows_of_one_unit_are_its_own_and_nothing_else():
    """Grouped queries, unlike widths: [q0 q1 q2 q3 | k0 k1 | v0 v1] of widths 2, 2 and 3, and group
    by group."""
    geometry, units = HeadGeometry(4, 2, 2, 3), ("query", "key", "value")
    assert rows_of(geometry, units, "sequential", "query", [1, 3]) == [2, 3, 6, 7]
    assert rows_of(geometry, units, "sequential", "key", [1]) == [10, 11]
    assert rows_of(geometry, units, "sequential", "value", [0, 1]) == [12, 13, 14, 15, 16, 17]
    assert rows_of(geometry, units, "grouped", "query", [2]) == [9, 10]  # behind q0 q1 k0 v0
    assert rows_of(geometry, units, "grouped", "value", [1]) == [15, 16, 17]
    assert rows_of(geometry, units, "grouped", "value", []) == []


def test_a_key_head_is_removed_with_the_last_query_head_that_reads_it():
    pairs, triples = HeadGeometry(6, 3, 8, 8), HeadGeometry(6, 2, 2, 2)
    assert (used_groups(pairs, [0, 4, 5]), freed_groups(pairs, [0, 4, 5])) == ([0, 2], [2])
    assert used_groups(triples, [0, 1, 2, 3, 5]) == [0, 1]
    assert freed_groups(triples, [0, 1, 2, 3, 5]) == [0]
    for groups in (used_groups, freed_groups):
        assert groups(pairs, []) == []
        with pytest.raises(InvalidValue) as caught:
            groups(pairs, [6, 5])
        assert str(caught.value) == "heads: must be positions of the 6 present heads, got [5, 6]"


def test_groups_of_unlike_size():
    torn = HeadGeometry(6, 2, 2, 1).keep([0, 1, 2, 4])
    assert (torn.n_query_heads, torn.n_kv_heads, torn.group_size) == (4, 2, 1)
    assert torn.kv_of == (0, 0, 0, 1)
    assert torn.members(0) == [0, 1, 2]
    assert list(blocks(torn, ("query", "key"), "grouped")) == [
        *(("query", 0, 2), ("query", 1, 2), ("query", 2, 2), ("key", 0, 2)),
        *(("query", 3, 2), ("key", 1, 2)),
    ]
    rows = kept_rows(torn, ("query", "key"), "grouped", [1, 3], [0, 1])
    assert rows == [2, 3, *range(6, 12)]
    assert torn.keep([3]) == HeadGeometry(1, 1, 2, 1)
    assert torn.keep([0, 3]) == HeadGeometry(2, 2, 2, 1), "even groups have one spelling"
    with pytest.raises(InvalidValue, match="every one in use"):
        HeadGeometry(2, 2, 1, 1, kv_of=(0, 0))


def test_interleaved_groups():
    geometry = HeadGeometry(4, 2, 1, 1, kv_of=(0, 1, 0, 1))
    assert geometry.members(1) == [1, 3]
    assert geometry.keep([0, 2]) == HeadGeometry(2, 1, 1, 1)
    assert used_groups(geometry, [3]) == [1]
    assert freed_groups(geometry, [1, 2, 3]) == [1]


def test_keys_and_gated_queries_have_widths_of_their_own():
    geometry = HeadGeometry(2, 2, 3, 4, key_dim=5)
    units = ("gated_query", "key", "value")
    assert [geometry.width(u) for u in (*units, "query", "context", "head")] == [6, 5, 4, 3, 4, 1]
    assert axis_size(geometry, units) == 2 * (6 + 5 + 4)
    sizes = [(("query",), 6), (("key", "value"), 18), (("context",), 8)]
    assert infer_geometry(sizes, 3, 4, 5) == geometry
    assert HeadGeometry(2, 2, 3, 4, key_dim=3) == HeadGeometry(2, 2, 3, 4)
    assert HeadGeometry(4, 2, 8, 8, key_dim=4).keep([0]).key_dim == 4


@pytest.mark.parametrize(
    "slabs",
    [
        [("query",), ("key",), ("value",), ("context",)],
        [("context",), ("query",), ("key",), ("value",), ("head",)],
        [("query", "key", "value"), ("context",)],
        [("context",), ("query",), ("key", "value")],
        [("value", "query", "key"), ("head",), ("query",)],
    ],
    ids=lambda s: " ".join("+".join(u) for u in s),
)
def test_head_counts_come_back_from_lengths(slabs):
    for geometry in [*GEOMETRIES, HeadGeometry(0, 0, 4, 3)]:
        sizes = [(units, axis_size(geometry, units)) for units in slabs]
        assert infer_geometry(sizes, geometry.head_dim, geometry.value_dim) == geometry


@pytest.mark.parametrize(("position", "by"), [(0, 1), (1, 1), (2, 3), (3, 1), (3, 4)])
def test_a_length_that_heads_do_not_explain_is_refused(position, by):
    geometry = HeadGeometry(4, 2, 4, 4)
    units = [("context",), ("query",), ("key",), ("value",)]
    sizes = [(unit, axis_size(geometry, unit)) for unit in units]
    sizes[position] = (units[position], sizes[position][1] + by)
    with pytest.raises(InvalidValue, match=f"the {units[position][0]} axis"):
        infer_geometry(sizes, 4, 4)


def test_without_an_axis_of_keys_every_head_has_its_own():
    assert infer_geometry([(("context",), 24)], 8, 8) == HeadGeometry(3, 3, 8, 8)


def test_sharing_that_is_not_in_order_is_asked_for_both_counts():
    asked = []

    def share(n_query, n_kv):
        asked.append((n_query, n_kv))
        return tuple(h % n_kv for h in range(n_query))

    found = infer_geometry([(("context",), 32), (("key",), 16)], 8, 8, share=share)
    assert asked == [(4, 2)]
    assert found.kv_of == (0, 1, 0, 1)
    assert kept_rows(found, ("key",), "sequential", [1, 3], [1]) == list(range(8, 16))


def test_units_of_a_slab_are_a_tuple():
    check_slab(("query",), "grouped")
    assert HeadSlab("qkv", 0, ("query", "key")).units == ("query", "key")
    assert HeadSlab("q", "out", "query").units == ("query",)
