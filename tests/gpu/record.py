"""What the checks on a GPU found: measured errors, and what became of every test, as JSON."""

import json
import math
import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from headprune.core.version import __version__
from headprune.model.running import tensors
from tests.gpu import tolerances

#: Names the file that the record goes into.
VARIABLE = "HEADPRUNE_GPU_RECORD"


def relative_error(found, wanted):
    """The largest difference over the largest number wanted, pair by pair; infinite where shapes or
    NaN differ.

    Args:
        found: A number, a tensor, or mappings and lists of tensors.
        wanted: The same, with as many tensors of the same shapes.
    """
    pairs = list(zip(_flat(found), _flat(wanted), strict=False))
    if len(_flat(found)) != len(_flat(wanted)) or not pairs:
        return math.inf
    return max(_error(a, b) for a, b in pairs)


def _flat(value):
    if isinstance(value, (int, float)):
        return [torch.tensor(float(value), dtype=torch.float64)]
    return list(tensors(value))


def _error(found, wanted):
    if found.shape != wanted.shape:
        return math.inf
    if not found.numel():
        return 0.0
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    gap, scale = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not math.isfinite(gap):
        return math.inf
    return gap / scale if scale else gap


@dataclass
class Record:
    """All that is written to the file.

    Args:
        device: What stands for the GPU.
        checks: Comparisons: what, in which mode, the error found, the tolerance, whether it passed.
        notes: What was counted or read, without a comparison.
        tests: What became of every test that did not simply pass.
        n_passed: Tests that did.
        warnings: How often each was given, on a GPU.
    """

    device: torch.device | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)
    n_passed: int = 0
    warnings: dict[str, int] = field(default_factory=dict)

    def warned(self, message):
        """Counts a warning."""
        self.warnings[message] = self.warnings.get(message, 0) + 1

    def write(self):
        """Writes the file whole, if one is named: after every test, so that a run that is killed
        leaves what it had."""
        if not os.environ.get(VARIABLE):
            return
        path = Path(os.environ[VARIABLE])
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_text(
            json.dumps(self._content(), indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
        part.replace(path)

    def _content(self):
        failed = [c for c in self.checks if not c["passed"]] + [
            t for t in self.tests if t["outcome"] == "failed"
        ]
        return {
            "what": "checks of headprune on a GPU against the CPU",
            "device": _machine(self.device),
            "versions": _versions(),
            "tf32_by_default": {
                "matmul": torch.get_float32_matmul_precision() != "highest",
                "convolution": torch.backends.cudnn.allow_tf32,
            },
            "tolerances": {
                name: value for name, value in vars(tolerances).items() if name.isupper()
            },
            "checks": self.checks,
            "notes": self.notes,
            "tests": self.tests,
            "warnings": self.warnings,
            "n_tests_passed": self.n_passed,
            "passed": bool(self.checks) and not failed,
        }


def _machine(device):
    if device is None or device.type != "cuda":
        return {
            "name": "cpu, standing in for a GPU" if device is not None else "none",
            "type": "cpu",
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "type": "cuda",
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
    }


def _versions():
    found = {"python": platform.python_version(), "headprune": __version__}
    for name in ("torch", "transformers", "numpy", "accelerate"):
        found[name] = version(name) if find_spec(name) is not None else None
    return {**found, "cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}


RECORD = Record()


class Compare:
    """Compares, writes the error that was found into the record, and then asserts.

    Args:
        test: Its name in the record.
    """

    def __init__(self, test):
        self.test = test

    def __call__(self, name, found, wanted, tolerance, mode=""):
        """Asserts that two values are equal up to a relative tolerance, a number or a table by
        modes; returns the error."""
        error, tolerance = relative_error(found, wanted), _in(tolerance, mode)
        self._add(name, mode, error, tolerance, passed=error <= tolerance)
        assert error <= tolerance, f"{name} {mode}: {error:.3e} off, and {tolerance:.3e} is allowed"
        return error

    def differs(self, name, found, wanted, tolerance, mode=""):
        """The negative control of a check: asserts that the error is above its tolerance."""
        error, tolerance = relative_error(found, wanted), _in(tolerance, mode)
        self._add(f"control: {name}", mode, error, tolerance, passed=error > tolerance)
        assert error > tolerance, (
            f"{name} {mode}: only {error:.3e} off, so the check would not have seen it"
        )
        return error

    def holds(self, name, condition, mode=""):
        """A check that is a yes or no: its error is 0 or 1."""
        self(name, float(condition), 1.0, tolerances.EXACT, mode)

    def same(self, name, found, wanted, mode=""):
        """Asserts that all tensors of two values are the same, bit for bit."""
        self.holds(name, same_bits(found, wanted), mode)

    def note(self, name, **facts):
        """Writes down what was read or counted."""
        RECORD.notes.append({"test": self.test, "name": name, **facts})

    def _add(self, name, mode, error, tolerance, passed):
        shown = error if math.isfinite(error) else str(error)
        row = {"test": self.test, "check": name, "mode": mode, "error": shown}
        RECORD.checks.append({**row, "tolerance": tolerance, "passed": passed})


def _in(tolerance, mode):
    return tolerance[mode] if isinstance(tolerance, dict) else tolerance


def ranks(values):
    """Places in the order of size, from 0."""
    return values.argsort().argsort().double()


def disagreement(found, wanted):
    """One minus Spearman's rank correlation."""
    together = torch.stack([ranks(found.cpu()), ranks(wanted.cpu())])
    return 1.0 - float(torch.corrcoef(together)[0, 1])


def same_bits(found, wanted):
    """Whether all tensors are equal, bit for bit, and of one dtype."""
    pairs = list(zip(tensors(found), tensors(wanted), strict=True))
    return bool(pairs) and all(
        a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu()) for a, b in pairs
    )
