"""Parts that the layouts of decoders with grouped queries share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.heads import POLICIES
from headprune.core.layout import STATE_ATTRIBUTE, Count
from headprune.core.mixin import WITHOUT_HEADS, original_class
from headprune.layouts import _empty

if TYPE_CHECKING:
    from headprune.core.heads import Kind

#: Flags of modules whose keys other layers read (Gemma 3n and 4); such modules are not cut.
SHARED_KEYS = ("store_full_length_kv", "is_kv_shared_layer")

#: Attributes that hold counts; most modules have only some of them.
COUNTS: tuple[tuple[str, Count], ...] = (
    ("num_heads", "n_query_heads"),
    ("num_attention_heads", "n_query_heads"),
    ("num_key_value_heads", "n_kv_heads"),
    ("num_key_value_groups", "group_size"),
)

#: Settings of tiny models: three groups of two query heads, which a cut can make uneven.
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}

#: Arguments through which an attention gets the sequence of an encoder.
_ENCODER_ARGUMENTS = {"encoder_hidden_states", "cross_attention_states", "key_value_states"}


def _arguments(module: Any) -> set[str]:
    """Names of the arguments of the module's ``forward``."""
    return set(inspect.signature(original_class(module).forward).parameters)  # type: ignore[attr-defined]


def takes_keys(module: Any) -> bool:
    """Return whether it can attend to another sequence (T5Gemma, Mllama)."""
    return not _ENCODER_ARGUMENTS.isdisjoint(_arguments(module))


def kind(module: Any, name: str) -> Kind:
    """Return ``causal``, ``cross`` or ``self``, by the module's inputs and its flag."""
    if takes_keys(module):
        if getattr(module, "is_causal", False):
            return "causal"
        # One class for all of them (Moonshine): an encoder's own attention goes by its name.
        return "self" if name.endswith("self_attn") else "cross"
    # Without a flag it is causal, because these modules are decoders'.
    return "causal" if getattr(module, "is_causal", True) else "self"


#: Fields of ``AttentionLayout`` that such layouts have in common.
GROUPED: dict[str, Any] = {
    "kind": kind,
    # Moonshine pads heads; its code reads their numbers from the configuration, not the module.
    "absent": (*SHARED_KEYS, "head_dim_padding"),
    "counts": COUNTS,
    "policies": POLICIES,
}


def repeat_keys(module: Any, model: Any) -> None:
    """Repeat keys and values per query head, after the cache, where groups differ in size."""
    from headprune.layouts._repeated import repeat_

    sizes = getattr(module, STATE_ATTRIBUTE).uneven
    if sizes:
        _check_repeatable(module, sizes)
    repeat_(module, sizes)


def _check_repeatable(module: Any, sizes: tuple[int, ...]) -> None:
    """Refuse uneven groups where keys do not pass through a cache argument."""
    if takes_keys(module):
        why = "it attends to an encoder"
    elif "past_key_values" not in _arguments(module):
        why = "it takes no cache"
    else:
        return
    must = f"cut to groups of one size, because {why}"
    name = original_class(module).__name__
    hint = "Cut under the policy group or balanced."
    raise UnsupportedModel(name, must, f"groups of {list(sizes)} query heads", hint)


def without_heads(gate: str) -> Callable[[Any], None]:
    """Return ``AttentionLayout.empty`` for modules that do not attend to an encoder.

    Args:
        gate: Path of the output projection.
    """
    return _EmptyDecoderAttention(gate)


# A class and not a closure: sites carry their layouts, and are copied, compared and pickled.
@dataclass(frozen=True)
class _EmptyDecoderAttention:
    gate: str

    def __call__(self, module: Any) -> None:
        refused = self.refusal(module)
        if refused is not None:
            raise refused
        _empty.without_heads(self.gate)(module)

    def refusal(self, module: Any) -> UnsupportedModel | None:
        """Return why the module cannot lose all its heads; None where it can."""
        # Each of these families shares one cache between both attentions in its own way.
        if takes_keys(module):
            name = original_class(module).__name__
            must = f"{WITHOUT_HEADS}, because it attends to an encoder"
            return UnsupportedModel(name, must, "none kept")
        return _empty.without_heads(self.gate).refusal(module)
