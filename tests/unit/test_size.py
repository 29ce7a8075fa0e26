"""The rows of sizes before and after a cut."""

from __future__ import annotations

import pytest

import headprune as hp
from headprune.bench.size import sizes
from tests.laws.support import subject_of


@pytest.mark.parametrize(
    ("name", "tokens", "cache"),
    # Llama: three layers of three groups, keys and values of width 4 in fp64; one group is removed.
    [("vit", 5, None), ("bert", 7, None), ("llama", 7, (9 * 64, 8 * 64))],
)
def test_sizes_are_those_of_both_models(name: str, tokens: int, cache: tuple[int, int]) -> None:
    subject = subject_of(name)
    pruned, first = subject.copy(), subject.sites[0]
    mask = subject.without({first.name: first.units[0]})
    hp.prune_(pruned, mask)
    found = sizes(subject.model, pruned, subject.batch)
    rows = {row.name: (row.original, row.pruned) for row in found}
    assert rows["heads"] == (sum(s.n_query_heads for s in subject.sites), mask.n_kept)
    counts = [sum(p.numel() for p in m.parameters()) for m in (subject.model, pruned)]
    assert rows["parameters"] == tuple(counts)
    before, after = rows[f"MACs an example of {tokens} tokens"]
    assert before > after > 0
    assert rows.get("KV-cache bytes a token") == cache
    given = type(subject.sites)(subject.sites[:1], [])  # sites that are given alone count
    heads = sizes(subject.model, subject.model, subject.batch, sites=given)[0]
    assert heads.original == heads.pruned == first.n_query_heads
