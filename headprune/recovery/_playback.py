"""Keeps what finished layers return, by batch, so that the passes of a layer-wise refit begin where
weights changed.

A layer that returns before the first call of a projection does not depend on that projection. Once
all projections that it depends on are refitted, its output for a batch is final, and the layer
need not run again.
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
    """Layers that need not run again while projections are refitted one after the other.

    Only layers that are called once per pass and return plain tensors are kept. A layer that a
    batch calls again runs from then on, and so do layers whose outputs do not fit.

    Args:
        layers: Layers in evaluation mode.
        projections: In the order in which they are refitted, which is that of their first calls.
        room: Bytes that outputs may take.
    """

    def __init__(
        self, layers: Iterable[nn.Module], projections: Sequence[nn.Module], room: int
    ) -> None:
        self.room = room
        self._layers = list(layers)
        self._projections = list(projections)
        # By layer that may be kept: the last projection that it depends on; -1 for none.
        self._last: dict[int, int] = {}
        # By layer and key of the batch.
        self._outputs: dict[tuple[int, str], Any] = {}
        self._called_again: set[tuple[int, str]] = set()

    def learn(self, run: Callable[[], Any]) -> None:
        """Find out in one pass which layers depend on which projections."""
        last_inside = list(map(self._last_projection_in, self._layers))
        n_calls: Counter[int] = Counter()
        last: dict[int, int] = {}
        latest = -1  # of the projections called so far

        def called(number: int) -> Any:
            def hook(module: nn.Module, args: Any) -> None:
                nonlocal latest
                latest = max(latest, number)

            return hook

        def returned(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                n_calls[layer] += 1
                if _is_plain(output):
                    last[layer] = max(latest, last_inside[layer])

            return hook

        with ExitStack() as stack:
            for number, projection in enumerate(self._projections):
                stack.callback(projection.register_forward_pre_hook(called(number)).remove)
            for layer, module in enumerate(self._layers):
                stack.callback(module.register_forward_hook(returned(layer)).remove)
            run()
        # A second call may get another input, and would need another output.
        self._last = {layer: number for layer, number in last.items() if n_calls[layer] == 1}

    def _last_projection_in(self, layer: nn.Module) -> int:
        """Return the number of the last projection inside a layer; -1 if there is none."""
        inside = set(map(id, layer.modules()))
        last = -1
        for number, projection in enumerate(self._projections):
            if id(projection) in inside:
                last = number
        return last

    def forget(self) -> None:
        """Drop everything: from now on all layers run."""
        self._last = {}
        self._outputs = {}

    def restart(self) -> None:
        """Drop the outputs: what the layers get has changed."""
        for output in self._outputs.values():
            self.room += sum(tensor.nbytes for tensor in tensors(output))
        self._outputs = {}

    def _final_layers(self, number: int) -> list[int]:
        """Return the layers that depend on no projection from this number on."""
        return [layer for layer, last in self._last.items() if last < number]

    def helps(self, key: str | None, number: int) -> bool:
        """Whether an output is kept that a pass of a batch to this projection can use."""
        return any((layer, key) in self._outputs for layer in self._final_layers(number))

    @contextmanager
    def before(self, key: str | None, number: int) -> Iterator[None]:
        """Replace layers that are final by what they returned for this batch.

        Args:
            key: The batch's; None lets everything run.
            number: Number of the projection that is refitted next.
        """
        replaced = []
        if key is not None:
            for layer in self._final_layers(number):
                forward = functools.partial(self._kept_or_run, (layer, key))
                replaced.append((self._layers[layer], forward))
        with other_forwards(replaced):
            yield

    def _kept_or_run(
        self, place: tuple[int, str], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a forward that gives the kept output, or runs the layer and keeps its output."""
        called = False  # in this pass

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            if called:
                self._called_again.add(place)
                self._outputs.pop(place, None)
            called = True
            if place in self._called_again:
                return original(*args, **kwargs)
            # Clones on both ways, because the model may change an output in place.
            if place in self._outputs:
                return mapped(self._outputs[place], Tensor.clone)
            output = original(*args, **kwargs)
            size = sum(tensor.nbytes for tensor in tensors(output))
            # Layers without room run again in every pass.
            if size <= self.room and _is_plain(output):
                self.room -= size
                self._outputs[place] = mapped(output, Tensor.clone)
            return output

        return forward


def _is_plain(value: Any) -> bool:
    """Whether a value is tensors and constants alone; other objects, such as caches, may change."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (Tensor, str, int, float))
