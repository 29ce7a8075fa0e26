"""What a run runs on: versions, hardware and commit. Importing this module imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: The libraries that affect results.
_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "safetensors",
    "scikit-learn",
    "numpy",
    "scipy",
)
#: Names the driver of NVIDIA's GPUs, where there is one.
_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that affect results.

    A suffix such as ``+cpu`` or ``+cu128`` is the build.
    """
    import headprune

    known = {"python": platform.python_version(), "headprune": headprune.__version__}
    for name in _LIBRARIES:
        version = _installed(name)
        if version:
            known[name] = version
    return known


def in_short() -> str:
    """Return versions, platform and device in a few lines, for a bug report.

    Does not import torch, which would take seconds.
    """
    from headprune.core.version import __version__

    gpu = "no NVIDIA GPU"
    if _DRIVER.is_file():
        gpu = f"NVIDIA GPU ({_DRIVER.read_text().splitlines()[0]})"
    lines = {
        "headprune": __version__,
        "python": platform.python_version(),
        "torch": _installed("torch") or "not installed",
        "transformers": _installed("transformers") or "not installed",
        "platform": platform.platform(),
        "device": f"{_processor()}, {usable_cores()} cores, {gpu}",
    }
    return "\n".join(f"{name} {value}" for name, value in lines.items())


def _installed(name: str) -> str | None:
    """The installed version of a library."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(device: torch.device) -> dict[str, Any]:
    """Return facts about the processor, its memory, and the GPU if one is used.

    Runs on machines that differ in any of these, or in ``versions``, may differ by rounding.
    """
    import torch

    # 1. The processor.
    facts: dict[str, Any] = {
        "device": str(device),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    # 2. The memory, where the system says it.
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        facts["memory_gib"] = round(n_bytes / 2**30, 1)
    # 3. The GPU, with PyTorch's settings for fp32 on it.
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts["gpu"] = gpu.name
        facts["gpu_memory_gib"] = round(gpu.total_memory / 2**30, 1)
        facts["cuda"] = torch.version.cuda
        facts["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        # PyTorch has two ways to set TF32; after both were used, reading it raises an error.
        with suppress(RuntimeError):
            facts["allow_tf32"] = torch.backends.cuda.matmul.allow_tf32
    return facts


def usable_cores() -> int | None:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _processor() -> str:
    """Model name of the processor; its architecture if the system has no name for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    # The first of many processors, which are alike.
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def git_commit() -> str | None:
    """Return the commit of the working directory, with ``+changes`` if tracked files differ.

    The variable ``HEADPRUNE_COMMIT`` sets it on a machine without git.

    Returns:
        None outside of a checkout.
    """
    named = os.environ.get("HEADPRUNE_COMMIT")
    if named:
        return named
    commit = _git("rev-parse", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        return f"{commit}+changes"
    return commit


def _git(*arguments: str) -> str | None:
    """Output of a git command; None if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
