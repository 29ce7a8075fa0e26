"""Which settings are surely good enough, when several were tried: fixed-sequence tests, one chain a
method.

A look at many candidates finds one that seems good enough by luck. Here the order of looks is fixed
before any answer is seen, from the largest model to the smallest, and the first failure ends it;
then every test may spend the whole error (Maurer, Hothorn and Lehmacher 1995; Dmitrienko et al.
2009, section 2.6). Several methods are several such chains and share the error equally
(Bonferroni). So the chance that any accepted model truly loses more than allowed is at most
``1 - confidence``, and the smallest of them may be taken; so far as the bootstrap's bound keeps its
own promise, see ``headprune.sweep.paired.upper_bounds``.

A setting has one model for every draw of its calibration rows. It passes when the models of all its
draws do (an intersection-union test, which costs no error): whichever of them is taken, the
statement is about that very model, and a setting that depends on a lucky draw is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headprune.core.errors import InvalidValue
from headprune.sweep.paired import Answers, upper_bounds


@dataclass(frozen=True)
class Candidate:
    """A setting to be looked at.

    Args:
        chain: Its method: candidates of one chain are looked at one after the other.
        size: How large its models are, the largest of its draws.
        draws: What the model of every draw made of the examples.
    """

    chain: str
    size: float
    draws: tuple[Answers, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of a candidate.

    Args:
        looked_at: False where its chain had ended before.
        bound: Upper bound of the worst draw's drop, at the confidence that the chain has; None if
            not looked at.
        passed: The bound is at most the allowed drop.
    """

    looked_at: bool
    bound: float | None
    passed: bool


def fixed_sequence(
    base: Answers,
    candidates: Sequence[Candidate],
    max_drop: float,
    confidence: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> tuple[Verdict, ...]:
    """Looks at every chain from its largest candidate downwards, until one fails.

    Args:
        base: What the uncut model made of the examples.
        candidates: In any order; those of one chain and one size are looked at in the order given.
        max_drop: What may be lost; see ``headprune.core.metrics.drop``.
        confidence: That no accepted model loses more.
        draws: Resamples; what lies beyond ``1 - confidence``, shared by all chains, must be some of
            them.
        seed: Of the resamples.

    Raises:
        InvalidValue: no confidence level, too few resamples for it, or models of other examples.
    """
    if not 0 < confidence < 1:
        raise InvalidValue("confidence", "between 0 and 1", confidence, "For example 0.95.")
    chains: dict[str, list[int]] = {}
    for i in sorted(range(len(candidates)), key=lambda i: -candidates[i].size):
        chains.setdefault(candidates[i].chain, []).append(i)
    if not chains:
        return ()
    error = (1 - confidence) / len(chains)
    if draws * error < 10:
        must = f"at least {10 / error:.0f}, for {len(chains)} chains at {confidence:g}"
        raise InvalidValue("draws", must, draws)
    verdicts = [Verdict(False, None, False)] * len(candidates)
    for order in chains.values():
        for i in order:
            bound = max(upper_bounds(base, candidates[i].draws, 1 - error, draws, seed))
            verdicts[i] = Verdict(True, bound, bound <= max_drop)
            if not verdicts[i].passed:
                break
    return tuple(verdicts)
