"""What the decoders with grouped queries have in common: kind, counts, policies, the empty layer,
tiny sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import STATE_ATTRIBUTE, Count
from headprune.core.mixin import original_class
from headprune.layouts import _empty

if TYPE_CHECKING:
    from headprune.core.heads import Kind, Policy

POLICIES: tuple[Policy, ...] = ("group", "balanced", "free")

#: Flags of modules whose keys other layers read (Gemma 3n and 4): not to be cut.
SHARED_KEYS = ("store_full_length_kv", "is_kv_shared_layer")

#: Attributes that such modules keep their counts in, most of them only some.
COUNTS: tuple[tuple[str, Count], ...] = (
    ("num_heads", "n_query_heads"),
    ("num_attention_heads", "n_query_heads"),
    ("num_key_value_heads", "n_kv_heads"),
    ("num_key_value_groups", "group_size"),
)

#: Of the tiny models: three groups of two query heads, so that groups, too, can be cut raggedly.
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def _arguments(module: Any) -> set[str]:
    return set(inspect.signature(original_class(module).forward).parameters)  # type: ignore[attr-defined]


def takes_keys(module: Any) -> bool:
    """Whether it can attend to another sequence (T5Gemma, Mllama, Moonshine)."""
    others = {"encoder_hidden_states", "cross_attention_states", "key_value_states"}
    return not others.isdisjoint(_arguments(module))


def kind(module: Any, name: str) -> Kind:
    """Causal unless the module says otherwise; one that may attend to an encoder and is not causal
    is ``cross``."""
    if takes_keys(module):
        return "causal" if getattr(module, "is_causal", False) else "cross"
    return "causal" if getattr(module, "is_causal", True) else "self"


def repeat_keys(module: Any, model: Any) -> None:
    """Groups of unlike size: keys and values are repeated for every query head, after the cache and
    in every step."""
    from headprune.layouts._repeated import repeat_

    sizes = getattr(module, STATE_ATTRIBUTE).uneven
    if sizes and (takes_keys(module) or "past_key_values" not in _arguments(module)):
        why = "it attends to an encoder" if takes_keys(module) else "it takes no cache"
        must = f"cut to groups of one size, for {why}"
        raise UnsupportedModel(
            original_class(module).__name__, must, f"groups of {list(sizes)} query heads"
        )
    repeat_(module, sizes)


def without_heads(gate: str) -> Callable[[Any], None]:
    """``AttentionLayout.empty`` for modules with this output projection, but those that may attend
    to an encoder."""
    return _WithoutHeads(gate)


@dataclass(frozen=True)
class _WithoutHeads:
    gate: str

    def __call__(self, module: Any) -> None:
        refused = self.refusal(module)
        if refused is not None:
            raise refused
        _empty.without_heads(self.gate)(module)

    def refusal(self, module: Any) -> UnsupportedModel | None:
        """Why the module cannot lose all its heads; None where it can."""
        if takes_keys(
            module
        ):  # each of them shares its cache with self-attention in a way of its own
            name = original_class(module).__name__
            return UnsupportedModel(
                name, "left with a head, for it attends to an encoder", "none kept"
            )
        return _empty.without_heads(self.gate).refusal(module)
