"""What ``AttentionLayout.empty`` is for most layouts: a module that is left without heads adds only
a bias.

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
) -> _WithoutHeads:
    """For the modules of Transformers: the residual stays, the output projection's bias, and calls
    of the cache.

    Args:
        gate: The output projection; None where a sibling of ``part`` adds the bias itself.
        part: The module inside of the attention that computes the heads.
        kind: ``file.Class`` of a ``WithoutHeads`` for a module that is called or answers in another
            way.
        attends: The layout's ``kind``, where some of its modules attend to another sequence, which
            a cache keeps apart.
    """
    return _WithoutHeads(gate, part, kind, attends)


def textbook_without_heads(
    gate: str, weights: str = "", shape: tuple[str, ...] = (), batch_axis: int = 0
) -> _OnlyBias:
    """For modules that return the output projection's result and nothing else.

    Args:
        gate: The output projection.
        weights: The attribute in which the module's code keeps the attention weights of its last
            call.
        shape: Its axes without heads, each ``batch``, ``queries``, ``keys`` or ``heads``.
        batch_axis: Where the module's inputs have the examples.
    """
    return _OnlyBias(gate, weights, shape, batch_axis)


# Values, not closures: sites carry their layouts, and are copied, compared and pickled.


@dataclass(frozen=True)
class _WithoutHeads:
    gate: str | None
    part: str
    kind: str
    attends: Callable[[Any, str], Kind] | None

    def __call__(self, module: Any) -> None:
        from headprune.layouts._transformers import without_heads

        cross = self.attends is not None and self.attends(module, "") == "cross"
        without_heads(module.get_submodule(self.part), self.gate, cross, self._front())
        forget_(module)

    def refusal(self, module: Any) -> UnsupportedModel | None:
        """Why the module cannot lose all its heads; None where it can."""
        from headprune.layouts._transformers import refusal

        return refusal(module.get_submodule(self.part), self._front())

    def _front(self) -> Any:
        file, _, name = self.kind.rpartition(".")
        return getattr(import_module(f"headprune.layouts.{file}"), name)


@dataclass(frozen=True)
class _OnlyBias:
    gate: str
    weights: str = ""
    shape: tuple[str, ...] = ()
    batch_axis: int = 0

    def __call__(self, module: Any) -> None:
        from headprune.layouts._textbook import OnlyBias

        mix_in(module, OnlyBias)
        module.headprune_gate = self.gate
        kept = bool(self.weights) and stores(module, self.weights)
        module.headprune_weights = (self.weights, self.shape, self.batch_axis) if kept else None
        forget_(module)

    def refusal(self, module: Any) -> UnsupportedModel | None:
        """Why the module cannot lose all its heads; None where it can."""
        return refusal(module)
