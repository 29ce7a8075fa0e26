"""What every test shares: no network, one seed, one thread, and the registered layouts' tiny models
in fp64."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest
import torch

from tests.laws import chosen
from tests.laws.support import DEEP, Subject, family_subject, subject_of

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    chosen.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    chosen.read_options(config)


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen.mark_further_families(items)
    chosen.select(config, items)


def pytest_collection_finish() -> None:
    # What is imported by now stays: without this, each of the many collections that timed code asks
    # for would look at all of it again, for most of a second.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=DEEP)
def subject(request: pytest.FixtureRequest) -> Subject:
    """A tiny model of a layout, or of a layout's family, fp64 and in evaluation mode, with a
    batch."""
    return (
        subject_of(request.param)
        if isinstance(request.param, str)
        else family_subject(*request.param)
    )


@pytest.fixture(params=["gpt2", "llama"])
def decoder(request: pytest.FixtureRequest) -> Subject:
    """A tiny model that generates."""
    return subject_of(request.param)
