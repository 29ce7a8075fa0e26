"""Fixed-sequence tests: settings shown to lose no more than allowed, at a stated confidence.

Among many candidates, one may seem good enough by chance. Here the order of the tests is fixed
before any result is seen: from the largest model to the smallest. The first failure ends the
sequence, and so each test may use the whole error probability (Maurer, Hothorn and Lehmacher 1995;
Dmitrienko et al. 2009, section 2.6). Each method is a sequence of its own, a chain; chains share
the error probability equally (Bonferroni). Hence the probability that any accepted model truly
loses more than allowed is at most ``1 - confidence``, if the bootstrap's bound is correct (see
``headprune.core.paired.upper_bounds``). So the smallest accepted model may be taken.

A setting has one model per draw of calibration rows. It passes if the models of all draws pass: an
intersection-union test, which needs no share of the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headprune.core.errors import InvalidValue
from headprune.core.metrics import drop
from headprune.core.paired import Answers, upper_bounds

#: Fewest resamples that must lie beyond a bound; with fewer it would be a guess.
_TAIL = 10


@dataclass(frozen=True)
class CandidateSetting:
    """A setting to be tested.

    Args:
        chain: Its method; the candidates of one chain are tested one after the other.
        size: Size of its largest model, over all draws.
        draws: For every draw, the model's results on the examples.
    """

    chain: str
    size: float
    draws: tuple[Answers, ...]


@dataclass(frozen=True)
class Verdict:
    """The result of a candidate's test.

    Args:
        tested: False if its chain had ended before.
        bound: Upper bound of the worst draw's drop, at the chain's confidence; None if not tested.
        passed: The bound is at most the allowed drop.
        drop: The drop of the draw with that bound; None if not tested.
    """

    tested: bool
    bound: float | None
    passed: bool
    drop: float | None = None


def fixed_sequence(
    base: Answers,
    candidates: Sequence[CandidateSetting],
    max_drop: float,
    confidence: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> tuple[Verdict, ...]:
    """Test every chain from its largest candidate downwards, until one fails.

    Args:
        base: The uncut model's results on the examples.
        candidates: In any order; equally large ones of a chain are tested in the order given.
        max_drop: The largest allowed drop; see ``headprune.core.metrics.drop``.
        confidence: Confidence that no accepted model loses more.
        draws: Resamples of the bootstrap. Ten or more must lie beyond each chain's bound.
        seed: Seed of the resamples.

    Returns:
        A verdict per candidate, in the order given.

    Raises:
        InvalidValue: no confidence level, too few resamples for it, or models of other examples.
    """
    if not 0 < confidence < 1:
        raise InvalidValue("confidence", "between 0 and 1", confidence, "For example 0.95.")

    # 1. Order every chain from its largest candidate to its smallest.
    chains: dict[str, list[int]] = {}
    for i in sorted(range(len(candidates)), key=lambda i: -candidates[i].size):
        chains.setdefault(candidates[i].chain, []).append(i)
    if not chains:
        return ()

    # 2. Share the error probability among the chains.
    error = (1 - confidence) / len(chains)
    if draws * error < _TAIL:
        methods = f"{len(chains)} methods at confidence {confidence:g}"
        must = f"at least {_TAIL / error:.0f} resamples, for {methods}"
        raise InvalidValue("fixed_sequence(draws=)", must, draws)

    # 3. Test each chain until a candidate fails. The worst draw decides.
    verdicts = [Verdict(False, None, False)] * len(candidates)
    for chain in chains.values():
        for i in chain:
            bounds = upper_bounds(base, candidates[i].draws, 1 - error, draws, seed)
            bound = max(bounds)
            worst = candidates[i].draws[bounds.index(bound)]
            lost = drop(base.metric, base.value, worst.value)
            verdicts[i] = Verdict(True, bound, bound <= max_drop, lost)
            if not verdicts[i].passed:
                break
    return tuple(verdicts)
