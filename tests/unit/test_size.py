"""The rows of sizes before and after a cut."""

from __future__ import annotations

import headprune as hp
from headprune.bench.size import sizes
from tests.laws.support import Subject, subject_of


def test_sizes_are_those_of_both_models(subject: Subject) -> None:
    pruned, mask = subject.copy(), subject.ragged()
    hp.prune_(pruned, mask)
    rows = {
        row.name: (row.original, row.pruned) for row in sizes(subject.model, pruned, subject.batch)
    }
    assert rows["heads"] == (sum(s.n_query_heads for s in subject.sites), mask.n_kept)
    assert rows["parameters"] == tuple(
        sum(p.numel() for p in m.parameters()) for m in (subject.model, pruned)
    )
    (name,) = (n for n in rows if n.startswith("MACs"))
    assert name == f"MACs an example of {5 if subject.layout.name == 'vit' else 7} tokens"
    assert rows[name][0] > rows[name][1] > 0


def test_only_a_decoder_has_a_cache() -> None:
    for name in ("bert", "llama"):
        subject = subject_of(name)
        pruned = subject.copy()
        hp.prune_(pruned, subject.without({subject.sites[0].name: subject.sites[0].units[0]}))
        rows = {
            row.name: (row.original, row.pruned)
            for row in sizes(subject.model, pruned, subject.batch)
        }
        # Three layers of three groups, keys and values of width 4 in fp64; one group goes.
        assert rows.get("KV-cache bytes per token") == ((9 * 64, 8 * 64) if name == "llama" else None)


def test_sites_that_are_given_are_the_ones_that_count() -> None:
    subject = subject_of("bert")
    rows = sizes(
        subject.model,
        subject.copy(),
        subject.batch,
        sites=type(subject.sites)(subject.sites[:1], []),
    )
    assert rows[0].original == rows[0].pruned == 4
