"""What finished layers return, kept by batch, so that the passes of a layer-wise refit begin where
weights changed.

A layer that has returned before a projection is called for the first time does not depend on that
projection. Once all projections that it depends on are refitted, it returns the same on a batch for
good, and needs not run again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from headprune.gating.tape import mapped
from headprune.model.running import other_forwards, tensors


class Playback:
    """Layers of a model that need not run again while projections are refitted one after the other.

    It holds for layers that are called once a pass and return tensors; others run, and so does one
    that a batch calls again, from then on. Layers for whose output there is no room run too.

    Args:
        layers: In evaluation mode.
        projections: In the order in which they are refitted, which is that of their first calls.
        room: Bytes that outputs may take.
    """

    def __init__(
        self, layers: Iterable[nn.Module], projections: Sequence[nn.Module], room: int
    ) -> None:
        self.room = room
        self._layers = list(layers)
        self._projections = list(projections)
        self._last: dict[
            int, int
        ] = {}  # by layer that may be played back: the last projection it depends on
        self._kept: dict[tuple[int, str], Any] = {}
        self._again: set[tuple[int, str]] = set()  # layers that a batch calls more than once

    def learn(self, run: Callable[[], Any]) -> None:
        """Sees in one pass which layers depend on which projections."""
        parts = [{id(m) for m in layer.modules()} for layer in self._layers]
        inside = [
            [n for n, p in enumerate(self._projections) if id(p) in of_layer] for of_layer in parts
        ]
        calls: Counter[int] = Counter()
        last: dict[int, int] = {}
        latest = -1

        def called(number: int) -> Any:
            def hook(module: nn.Module, args: Any) -> None:
                nonlocal latest
                latest = max(latest, number)

            return hook

        def returned(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                calls[layer] += 1
                if _plain(output):
                    last[layer] = max([latest, *inside[layer]])

            return hook

        with ExitStack() as stack:
            for number, projection in enumerate(self._projections):
                stack.callback(projection.register_forward_pre_hook(called(number)).remove)
            for layer, module in enumerate(self._layers):
                stack.callback(module.register_forward_hook(returned(layer)).remove)
            run()
        self._last = {layer: number for layer, number in last.items() if calls[layer] == 1}

    def forget(self) -> None:
        """From now on everything runs."""
        self._last = {}
        self._kept = {}

    def helps(self, key: str | None, number: int) -> bool:
        """Whether something is kept for a batch that a pass to this projection can use."""
        return any(
            (layer, key) in self._kept for layer, last in self._last.items() if last < number
        )

    @contextmanager
    def before(self, key: str | None, number: int) -> Iterator[None]:
        """Inside, layers that no projection from this number on changes return what they did for
        this batch.

        Args:
            key: The batch's; None where it has none, so that everything runs.
            number: Of the projection that is next to be refitted.
        """
        fixed = (
            [] if key is None else [layer for layer, last in self._last.items() if last < number]
        )
        with other_forwards(
            (self._layers[n], functools.partial(self._kept_or_run, (n, key or ""))) for n in fixed
        ):
            yield

    def _kept_or_run(
        self, place: tuple[int, str], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        called = False  # in this pass

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            if called:
                self._again.add(place)
                self._kept.pop(place, None)
            called = True
            if place in self._again:
                return original(*args, **kwargs)
            if place in self._kept:
                return mapped(
                    self._kept[place], Tensor.clone
                )  # code may go on to change it in place
            output = original(*args, **kwargs)
            size = sum(t.nbytes for t in tensors(output))
            if size <= self.room and _plain(output):
                self.room -= size
                self._kept[place] = mapped(output, Tensor.clone)
            return output

        return forward


def _plain(value: Any) -> bool:
    """Whether it is tensors and constants alone: other objects, such as caches, may change."""
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (Tensor, str, int, float))
