"""What a record says of the machine, where a machine does not say all of it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import torch

from headprune.run import surroundings
from headprune.run.surroundings import hardware, in_short, versions

CPU = torch.device("cpu")


def test_a_library_that_is_missing_is_said(monkeypatch):
    def version(name: str) -> str:
        if name == "transformers":
            raise surroundings.importlib.metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(surroundings.importlib.metadata, "version", version)
    lines = [line.split() for line in in_short().splitlines()]
    assert ["transformers", "not", "installed"] in lines
    assert ["torch", "1.2"] in lines
    found = versions()
    assert found["torch"] == "1.2"
    assert "transformers" not in found


def test_memory_and_processor_where_linux_does_not_tell_them(monkeypatch):
    assert hardware(CPU)["memory_gib"] > 0

    fail = Mock(side_effect=FileNotFoundError("/proc/cpuinfo"))
    monkeypatch.setattr(surroundings.Path, "read_text", fail)
    monkeypatch.setattr(surroundings.os, "sysconf_names", {})
    monkeypatch.setattr(surroundings.platform, "processor", lambda: "")
    monkeypatch.setattr(surroundings.platform, "machine", lambda: "some machine")
    found = hardware(CPU)
    assert found["processor"] == "some machine"
    assert "memory_gib" not in found


def test_a_gpu_is_named_with_its_memory(monkeypatch):
    gpu = SimpleNamespace(name="a GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    found = hardware(torch.device("cuda"))
    assert (found["gpu"], found["gpu_memory_gib"]) == ("a GPU", 80.0)
    assert found["cuda"] == torch.version.cuda
    assert found["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert found["allow_tf32"] is torch.backends.cuda.matmul.allow_tf32
    assert not {"gpu", "allow_tf32"} & hardware(CPU).keys()

    class Mixed:
        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Mixed())
    found = hardware(torch.device("cuda"))
    assert "float32_matmul_precision" in found
    assert "allow_tf32" not in found
