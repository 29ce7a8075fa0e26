"""``benchmarks.determinism``: settings come and go; a start of CUDA that came too early is said."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.determinism import VARIABLE, WORKSPACE, deterministic


def settings() -> tuple[bool, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns, cudnn.deterministic, cudnn.benchmark


def failing() -> None:
    with deterministic():
        assert settings() == (True, False, True, False)
        raise KeyError


@pytest.mark.parametrize("only_warns", [False, True])
def test_settings_come_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch, only_warns: bool
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(only_warns, warn_only=only_warns)
    try:
        before = settings()
        with pytest.raises(KeyError):
            failing()
        assert settings() == before
        assert before[3]
        assert os.environ[VARIABLE] == WORKSPACE
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("value", [None, ":8:1"])
def test_cuda_that_started_without_the_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = settings()
    with pytest.raises(RuntimeError, match="before CUDA starts"), deterministic():
        pass
    assert settings() == before
    assert os.environ.get(VARIABLE) == value


@pytest.mark.parametrize("value", [":4096:8", ":16:8"])
def test_a_variable_that_is_right_stays(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with deterministic():
        assert os.environ[VARIABLE] == value
