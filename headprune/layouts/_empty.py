"""Values for ``AttentionLayout.empty``: turn a module without heads into one that adds a bias.

Classes are named, not imported, because a layout is read without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headprune.core.mixin import mix_in, refusal
from headprune.layouts._kept import forget_, stores

if TYPE_CHECKING:
    from headprune.core.errors import UnsupportedModel
    from headprune.core.heads import Kind


def without_heads(
    gate: str | None,
    part: str = "",
    *,
    kind: str = "_transformers.WithoutHeads",
    attends: Callable[[Any, str], Kind] | None = None,
) -> _EmptyAttention:
    """Return ``empty`` for modules of Transformers: the bias is added, the cache updated.

    Args:
        gate: Path of the output projection; None where a sibling of ``part`` adds the bias.
        part: Path of the inner module that computes the heads.
        kind: ``file.Class`` of a ``WithoutHeads`` for a module with other arguments or another
            result.
        attends: The layout's ``kind``, if some of its modules are cross-attention, whose keys a
            cache keeps apart.
    """
    return _EmptyAttention(gate, part, kind, attends)


def textbook_without_heads(
    gate: str, weights: str = "", shape: tuple[str, ...] = (), batch_axis: int = 0
) -> _EmptyTextbookAttention:
    """Return ``empty`` for modules that return only the output projection's result.

    Args:
        gate: Path of the output projection.
        weights: Path of the attribute in which the module keeps its last attention weights.
        shape: The axes of those weights: ``batch``, ``queries``, ``keys`` or ``heads``.
        batch_axis: Batch axis of the module's inputs.
    """
    return _EmptyTextbookAttention(gate, weights, shape, batch_axis)


# Classes and not closures: sites carry their layouts, and are copied, compared and pickled.


@dataclass(frozen=True)
class _EmptyAttention:
    gate: str | None
    part: str
    kind: str
    attends: Callable[[Any, str], Kind] | None

    def __call__(self, module: Any) -> None:
        from headprune.layouts._transformers import without_heads

        cross = self.attends is not None and self.attends(module, "") == "cross"
        without_heads(module.get_submodule(self.part), self.gate, cross, self._mixin())
        forget_(module)

    def refusal(self, module: Any) -> UnsupportedModel | None:
        """Return why the module cannot lose all its heads; None where it can."""
        from headprune.layouts._transformers import refusal

        return refusal(module.get_submodule(self.part), self._mixin())

    def _mixin(self) -> Any:
        file, _, name = self.kind.rpartition(".")
        return getattr(import_module(f"headprune.layouts.{file}"), name)


@dataclass(frozen=True)
class _EmptyTextbookAttention:
    gate: str
    weights: str = ""
    shape: tuple[str, ...] = ()
    batch_axis: int = 0

    def __call__(self, module: Any) -> None:
        from headprune.layouts._textbook import OnlyBias

        mix_in(module, OnlyBias)
        module.headprune_gate = self.gate
        # Only some versions of such code keep their weights.
        module.headprune_weights = None
        if self.weights and stores(module, self.weights):
            module.headprune_weights = (self.weights, self.shape, self.batch_axis)
        forget_(module)

    def refusal(self, module: Any) -> UnsupportedModel | None:
        """Return why the module cannot lose all its heads; None where it can."""
        return refusal(module)
