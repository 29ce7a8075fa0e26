"""Checks whose answers are read together and later, because each read waits for an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headprune.model.losses import check_finite
from headprune.model.transfers import in_main_memory

#: Batches whose losses wait for one check at most.
_BATCHES = 4096


class DeferredChecks:
    """Checks of losses and of other tensors, made on the device; ``run`` reads the answers.

    The losses of the first batch of a pass are checked at once, because most mistakes show there.
    """

    def __init__(self) -> None:
        # (number of the batch, its losses [examples])
        self._losses: list[tuple[int, Tensor]] = []
        # By key: the index of the first failure ([] on the device, -1 for none), and its error.
        self._tests: dict[Any, tuple[Tensor, Callable[[int], Exception]]] = {}
        self._ran_in_pass = False

    def begin_pass(self) -> None:
        """Have the next losses checked at once."""
        self._ran_in_pass = False

    def add_losses(self, number: int, losses: Tensor) -> None:
        """Have the losses ``[examples]`` of a batch checked for NaN and infinity."""
        self._losses.append((number, losses.detach()))
        if not self._ran_in_pass or len(self._losses) == _BATCHES:
            self.run()

    def refuse(self, key: Any, failed: Tensor, error: Callable[[int], Exception]) -> None:
        """Have an error raised where any of the booleans is True.

        Args:
            key: What is tested, and at which site; of one key the first failure counts.
            failed: Booleans of any shape.
            error: Makes the error of the first place that is True, counted flat.
        """
        flat = failed.reshape(-1)
        place = torch.where(flat.any(), flat.int().argmax(), -1)
        if key in self._tests:
            # An earlier failure of the same key comes first.
            before, first_error = self._tests[key]
            place = torch.where(before >= 0, before, place.to(before.device))
            error = first_error
        self._tests[key] = place, error

    def run(self) -> None:
        """Read all answers, with one copy per device.

        Raises:
            InvalidValue: a loss that is not finite, by batch and example.
            Exception: the error of the first key whose test failed.
        """
        # Forget them first: an error must not show again in the next pass.
        losses, self._losses = self._losses, []
        self._ran_in_pass = True
        check_finite(losses)

        tests, self._tests = self._tests, {}
        places = in_main_memory(place for place, _ in tests.values())
        for place, (_, error) in zip(places, tests.values(), strict=True):
            if int(place) >= 0:
                raise error(int(place))
