"""The device of the checks on a GPU and the record of what they found.

``HEADPRUNE_GPU_TESTS=cpu`` has the CPU stand in for the GPU, as a rehearsal. Without a GPU and
without this variable every test here is skipped. ``HEADPRUNE_GPU_RECORD=path.json`` names the
record's file, see ``record.py``.
"""

import os
import warnings

import pytest
import torch

from benchmarks import determinism
from tests.gpu.record import RECORD, Compare

#: Names what stands in for a GPU.
VARIABLE = "HEADPRUNE_GPU_TESTS"
#: A file whose tests may leave the GPU's context unusable runs last.
LAST = "test_cuda_graphs"


@pytest.fixture(scope="session")
def device():
    """The GPU, or what stands in for it."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "cpu"):
        raise pytest.UsageError(f"{VARIABLE}: must be cpu or not set, got {asked!r}")
    if not asked and not torch.cuda.is_available():
        pytest.skip("no GPU")
    os.environ.setdefault(determinism.VARIABLE, determinism.WORKSPACE)  # read when CUDA starts
    RECORD.device = torch.device(asked or "cuda:0")
    return RECORD.device


@pytest.fixture(autouse=True)
def _with_a_device(device):
    """Every test here needs the device. On a GPU warnings are written down and are no errors:
    libraries warn of what is fast or slow on each machine, and the numbers count here."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
        torch.cuda.synchronize()  # an error of a kernel belongs to the test that started it
    for warning in said:
        RECORD.warned(f"{warning.category.__name__}: {warning.message}"[:300])


@pytest.fixture
def compare(request, device):
    """``compare(name, found, wanted, tolerance)``: writes the relative error into the record, then
    asserts."""
    return Compare(_name(request.node))


@pytest.fixture
def gpu(device):
    """The device, for what a CPU cannot stand in for."""
    if device.type != "cuda":
        pytest.skip("a CPU stands in for the GPU, and has nothing of the kind")
    return device


def _name(item):
    return f"{item.path.stem}::{item.name}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Writes down what became of a test, also where no comparison was reached."""
    report = yield
    if report.passed:
        RECORD.n_passed += report.when == "call"
    else:
        message = str(call.excinfo.value) if call.excinfo is not None else ""
        RECORD.tests.append(
            {
                "test": _name(item),
                "outcome": report.outcome,
                "when": report.when,
                "why": message[:600],
            }
        )
    if report.when == "teardown":
        RECORD.write()
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Puts the tests of ``LAST`` at the end."""
    items.sort(key=lambda item: item.path.stem == LAST)
