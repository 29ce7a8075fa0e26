"""Strategies of Hypothesis for what headprune takes, and how often a property is tried in each tier
of the tests."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from headprune.core.heads import HeadMask
from headprune.core.slabs import HeadGeometry

_ALWAYS = {
    "deadline": None,  # the first example builds models
    "database": None,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
}


def quick(n, **more):
    """The normal tier: the same few examples every time."""
    return settings(max_examples=n, derandomize=True, **_ALWAYS, **more)


def often(n, **more):
    """The long tier: so many examples, other ones every time; a failure prints the one that
    failed."""
    return settings(max_examples=n, print_blob=True, **_ALWAYS, **more)


def tiers(test, n, many):
    """A property, which ``given`` made, as a test of each tier.

    Args:
        test: Makes it anew at every call, because settings are the test's own.
        n, many: Examples.
    """
    return quick(n)(test()), pytest.mark.long(often(many)(test()))


#: JSON data as a stored mapping may hold it: NaN, infinities, any text, and what numbers are spelt
#: with in files.
_WORDS = st.sampled_from(["float", "nan", "inf", "-inf", "headprune", "version", ""])
TEXT = _WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | TEXT
JSON = st.recursive(
    _SCALARS,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXT, x, max_size=3),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(TEXT, JSON, max_size=4)


@st.composite
def geometries(draw):
    """Head counts and widths: one key/value head a query head, groups of any size, or any head
    shared by any."""
    n_kv, share = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    head_dim, value_dim, key_dim = (draw(st.integers(1, 3)) for _ in range(3))
    if draw(st.booleans()):
        return HeadGeometry(n_kv * share, n_kv, head_dim, value_dim, key_dim)
    kv_of = draw(
        st.permutations([*range(n_kv), *draw(st.lists(st.integers(0, n_kv - 1), max_size=4))])
    )
    return HeadGeometry(len(kv_of), n_kv, head_dim, value_dim, key_dim, tuple(kv_of))


def kept_units(sites, least=0):
    """Masks that keep whole units of some sites, at least so many of each."""
    sites = list(sites)
    rows = [
        st.sets(st.integers(0, len(s.units) - 1), min_size=min(least, len(s.units)))
        if s.units
        else st.just(set())
        for s in sites
    ]

    def mask(chosen):
        keep = {
            s.name: [h for u in units for h in s.units[u]]
            for s, units in zip(sites, chosen, strict=True)
        }
        return HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})

    return st.tuples(*rows).map(mask)
