"""Tests of numbers whose answers are read together, later: to read one waits for an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headprune.model.transfers import in_main_memory


class Later:
    """Tests that were made where their numbers are, and the errors that they may lead to."""

    def __init__(self) -> None:
        # By key: where it first failed, [] on the device and -1 where it did not; and what makes
        # the error of it.
        self._tests: dict[Any, tuple[Tensor, Callable[[int], Exception]]] = {}

    def refuse(self, key: Any, failed: Tensor, error: Callable[[int], Exception]) -> None:
        """Adds a test.

        Args:
            key: What is tested, and where; of several tests of one key the first that failed
                counts.
            failed: Booleans of any shape.
            error: Makes the error of the first place that is True, counted flat.
        """
        flat = failed.reshape(-1)
        place = torch.where(flat.any(), flat.int().argmax(), -1)
        if key in self._tests:
            before, first_error = self._tests[key]
            place, error = torch.where(before >= 0, before, place.to(before.device)), first_error
        self._tests[key] = place, error

    def check(self) -> None:
        """Reads all answers, of a device in one copy.

        Raises:
            Exception: that of the first key of which a test failed.
        """
        tests, self._tests = self._tests, {}
        places = in_main_memory(place for place, _ in tests.values())
        for place, (_, error) in zip(map(int, places), tests.values(), strict=True):
            if place >= 0:
                raise error(place)
