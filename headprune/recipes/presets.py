"""Pipelines of published papers, put together from our own scorers, selectors and recoveries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.errors import UnknownName, did_you_mean


@dataclass(frozen=True)
class Preset:
    """A scorer, a selector and recoveries that belong together.

    Args:
        name: What ``preset:`` in a recipe calls it.
        source: The paper, and where we differ from it.
        score: Keys of the recipe's section ``score``.
        select: Keys of ``select``; the budget is the user's.
        recover: The recipe's ``recover``.
    """

    name: str
    source: str
    score: FrozenDict
    select: FrozenDict
    recover: tuple[FrozenDict, ...]

    def laid_over(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe with this scorer, selector and recovery in place of its own; everything else
        stays."""
        data = {**recipe, "recover": [_plain(step) for step in self.recover]}
        for key, own in (("score", self.score), ("select", self.select)):
            section = recipe.get(key) or {}
            if isinstance(section, Mapping):  # anything else is refused with types
                kept = {
                    k: v for k, v in section.items() if k != "recover"
                }  # the recipe's own, while it selects
                section = {**kept, **_plain(own)}
            data[key] = section
        return data


def _plain(section: FrozenDict) -> dict[str, Any]:
    return {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in section.items()
    }


def _preset(name: str, source: str, score: Any, select: Any, recover: Any) -> Preset:
    def step(key: str, method: tuple[str, dict[str, Any]]) -> FrozenDict:
        return FrozenDict({key: method[0], "settings": method[1]})

    steps = tuple(step("method", method) for method in recover)
    return Preset(name, source, step("scorer", score), step("selector", select), steps)


#: By name. Papers set no minimum of heads a layer.
PRESETS = {
    preset.name: preset
    for preset in (
        _preset(
            "kwon2022",
            "Kwon et al. 2022, A Fast Post-Training Pruning Framework for Transformers: squared"
            " gradients of mini-batches of 32, the diagonal first, then rearranged inside each"
            " layer, then factors for heads whose intercept is fitted and dropped. Heads only; they"
            " prune feed-forward filters as well.",
            ("fisher", {"block": 32}),
            ("quadratic", {"search": "kwon", "min_heads": 0}),
            [("head_rescale", {"intercept": "drop"})],
        ),
        _preset(
            "flap2024",
            "An et al. 2024, Fluctuation-based Adaptive Structured Pruning: fluctuation,"
            " standardised within layers, ranked over the whole model, the mean of what goes folded"
            " into biases. Heads only.",
            ("fluctuation", {}),
            ("global_topk", {"min_heads": 0}),
            [("mean_fold", {})],
        ),
    )
}


def preset_named(name: Any, where: str = "preset") -> Preset:
    """The preset of this name.

    Raises:
        UnknownName: there is none.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise UnknownName(
            where, f"one of {', '.join(PRESETS)}", repr(name), did_you_mean(str(name), PRESETS)
        )
    return PRESETS[name]
