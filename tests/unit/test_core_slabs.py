"""Slab arithmetic against an axis that is laid out by reshaping, and head counts that come back
from lengths."""

import itertools

import numpy as np
import pytest

from headprune.core.errors import InvalidValue
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.slabs import (
    HeadGeometry,
    axis_size,
    blocks,
    check_slab,
    freed_groups,
    infer_geometry,
    kept_rows,
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
    """For every unit: query heads?, heads a KV group, width."""
    width = {"query": geometry.head_dim, "key": geometry.head_dim, "head": 1}
    for unit in units:
        per_query = unit not in ("key", "value")
        yield (
            per_query,
            geometry.n_query_heads // geometry.n_kv_heads if per_query else 1,
            width.get(unit, geometry.value_dim),
        )


def reshaped(geometry, units, packing, groups):
    """The rows of the kept groups, by viewing the axis as an array: [groups, rows of a group], or
    one such a unit."""
    size = sum(geometry.n_kv_heads * per * width for _, per, width in chunks(geometry, units))
    axis = np.arange(size)
    if packing == "grouped":
        return axis.reshape(geometry.n_kv_heads, -1)[groups].ravel().tolist()
    rows, start = [], 0
    for _, per, width in chunks(geometry, units):
        stop = start + geometry.n_kv_heads * per * width
        rows += axis[start:stop].reshape(geometry.n_kv_heads, -1)[groups].ravel().tolist()
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
        everything = kept_rows(
            geometry, units, packing, range(geometry.n_query_heads), range(geometry.n_kv_heads)
        )
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


def test_a_torn_group_keeps_its_key_head_and_a_foreign_position_is_refused():
    geometry = HeadGeometry(6, 2, 2, 2)
    assert used_groups(geometry, [0, 1, 2, 3, 5]) == [0, 1]
    assert freed_groups(geometry, [0, 1, 2, 3, 5]) == [0]
    for groups in (used_groups, freed_groups):
        with pytest.raises(InvalidValue, match="positions of the 6 present heads"):
            groups(geometry, [6])
        assert groups(geometry, []) == []


def test_groups_of_unlike_size():
    torn = HeadGeometry(6, 2, 2, 1).keep([0, 1, 2, 4])
    assert (torn.n_query_heads, torn.n_kv_heads, torn.kv_of, torn.group_size) == (
        4,
        2,
        (0, 0, 0, 1),
        1,
    )
    assert torn.members(0) == [0, 1, 2]
    assert list(blocks(torn, ("query", "key"), "grouped")) == [
        *(("query", 0, 2), ("query", 1, 2), ("query", 2, 2), ("key", 0, 2)),
        *(("query", 3, 2), ("key", 1, 2)),
    ]
    assert kept_rows(torn, ("query", "key"), "grouped", [1, 3], [0, 1]) == [
        2,
        3,
        6,
        7,
        8,
        9,
        10,
        11,
    ]
    assert torn.keep([3]) == HeadGeometry(1, 1, 2, 1)
    assert torn.keep([0, 3]) == HeadGeometry(2, 2, 2, 1), (
        "what is even again is spelt like any other"
    )
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
    sizes = [
        (units, axis_size(geometry, units))
        for units in (("context",), ("query",), ("key",), ("value",))
    ]
    units, length = sizes[position]
    sizes[position] = (units, length + by)
    with pytest.raises(InvalidValue, match=f"the {units[0]} axis"):
        infer_geometry(sizes, 4, 4)


def test_head_counts_that_cannot_be_are_refused():
    with pytest.raises(
        InvalidValue, match=r"n_kv_heads: must be a divisor of the 4 query heads, got 3"
    ):
        infer_geometry([(("context",), 16), (("key",), 12)], 4, 4)
    with pytest.raises(
        InvalidValue, match=r"layout\.slabs: must be with one slab of unit 'context' or 'query'"
    ):
        infer_geometry([(("query", "key", "value"), 12)], 4, 4)
    with pytest.raises(InvalidValue, match=r"query\+key\+value axis"):
        infer_geometry([(("context",), 16), (("query", "key", "value"), 12)], 4, 4)


@pytest.mark.parametrize(
    "bad", [(-1, 1, 1, 1), (2, 1, 0, 1), (2, 1, 1, 0), (3, 2, 1, 1), (0, 1, 1, 1), (2, 0, 1, 1)]
)
def test_a_geometry_that_cannot_be_is_refused(bad):
    with pytest.raises(InvalidValue):
        HeadGeometry(*bad)


def test_slabs_and_layouts_are_checked_by_name():
    with pytest.raises(
        InvalidValue, match=r"HeadSlab\.unit: must be one of query, .*got 'queries'"
    ):
        HeadSlab("q_proj", "out", "queries")
    with pytest.raises(
        InvalidValue,
        match=r"HeadSlab\.packing: must be 'sequential' or 'grouped', got 'interleaved'",
    ):
        check_slab(("query",), "interleaved")
    for axis in ("rows", True, 1.0):
        must = r"HeadSlab\('q_proj'\)\.axis: must be 'in', 'out', 'list' or a dimension"
        with pytest.raises(InvalidValue, match=must):
            HeadSlab("q_proj", axis, "query")
    assert HeadSlab("qkv", 0, ("query", "key")).units == ("query", "key")
    assert HeadSlab("q", "out", "query").units == ("query",)
    query, out = HeadSlab("q", "out", "query"), HeadSlab("o", "in", "context")
    assert AttentionLayout("mine", "o", (query, out), 8).slabs == (query, out)
    for slabs in [
        (query,),
        (query, HeadSlab("o", "out", "context")),
        (query, HeadSlab("p", "in", "context")),
    ]:
        with pytest.raises(InvalidValue, match=r"layout 'mine'.*HeadSlab\('o', 'in', 'context'\)"):
            AttentionLayout("mine", "o", slabs, 8)
