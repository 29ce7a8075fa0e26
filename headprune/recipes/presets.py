"""Pipelines of published papers, built from headprune's own methods."""

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
        name: Its name in a recipe's ``preset``.
        source: The paper, and the differences from it.
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
        """Return the recipe with this scorer, selector and recovery in place of its own."""
        data = {**recipe, "recover": list(map(_plain, self.recover))}
        for key, preset in (("score", self.score), ("select", self.select)):
            section = recipe.get(key) or {}
            if isinstance(section, Mapping):
                # The recipe's recoveries during selection belong to its own selector.
                section = {k: v for k, v in section.items() if k != "recover"} | _plain(preset)
            # Anything but a section is refused with the types.
            data[key] = section
        return data


def _plain(section: FrozenDict) -> dict[str, Any]:
    plain = dict(section)
    for key, value in section.items():
        if isinstance(value, Mapping):
            plain[key] = dict(value)
    return plain


def _method(key: str, name: str, settings: dict[str, Any]) -> FrozenDict:
    return FrozenDict({key: name, "settings": settings})


_KWON = Preset(
    name="kwon2022",
    source=(
        "Kwon et al. 2022, A Fast Post-Training Pruning Framework for Transformers: squared"
        " gradients of mini-batches of 32, the diagonal first, then rearranged inside each"
        " layer, then factors for heads whose intercept is fitted and dropped. For heads; with"
        " feed-forwards, which they prune as well, name `knapsack` as the selector."
    ),
    score=_method("scorer", "fisher", {"block": 32}),
    select=_method("selector", "quadratic", {"search": "kwon", "min_heads": 0}),
    recover=(_method("method", "head_rescale", {"intercept": "drop"}),),
)
_FLAP = Preset(
    name="flap2024",
    source=(
        "An et al. 2024, Fluctuation-based Adaptive Structured Pruning: fluctuation,"
        " standardised within layers, ranked over the whole model, the mean of removed heads (and"
        " neurons) folded into biases."
    ),
    score=_method("scorer", "fluctuation", {}),
    select=_method("selector", "global_topk", {"min_heads": 0}),
    recover=(_method("method", "mean_fold", {}),),
)
#: By name. ``min_heads`` is 0, because the papers set no minimum of heads per layer.
PRESETS = {preset.name: preset for preset in (_KWON, _FLAP)}


def preset_named(name: Any, where: str = "preset") -> Preset:
    """Return the preset of this name.

    Raises:
        UnknownName: there is none.
    """
    if not isinstance(name, str) or name not in PRESETS:
        must, hint = f"one of {', '.join(PRESETS)}", did_you_mean(str(name), PRESETS)
        raise UnknownName(where, must, repr(name), hint)
    return PRESETS[name]
