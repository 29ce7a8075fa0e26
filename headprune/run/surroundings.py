"""What a run runs on: versions, hardware, and the commit of the working directory. Importing this
imports no torch."""

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

_LIBRARIES = (
    *("torch", "transformers", "tokenizers", "datasets", "accelerate", "safetensors"),
    *("scikit-learn", "numpy", "scipy"),
)
_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Of Python and of every library that matters and is installed; what follows a ``+`` is the
    build, ``+cpu`` or that for a CUDA."""
    import headprune

    found = {"python": platform.python_version(), "headprune": headprune.__version__}
    return found | {name: version for name in _LIBRARIES if (version := _installed(name))}


def in_short() -> str:
    """Versions, platform and device in a few lines, for a question or a bug report; at once,
    without asking torch."""
    gpu = (
        f"NVIDIA GPU ({_DRIVER.read_text().splitlines()[0]})"
        if _DRIVER.is_file()
        else "no NVIDIA GPU"
    )
    from headprune.core.version import __version__

    lines = {
        "headprune": __version__,
        "python": platform.python_version(),
        **{name: _installed(name) or "not installed" for name in ("torch", "transformers")},
        "platform": platform.platform(),
        "device": f"{_processor()}, {_cores()} cores, {gpu}",
    }
    return "\n".join(f"{name} {value}" for name, value in lines.items())


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, its instructions that torch uses, cores, threads, memory, and the GPU if one is
    used, with PyTorch's settings of fp32 on it.

    Equal runs on machines that differ in any of this, or in `versions`, may differ in last digits.
    """
    import torch

    found: dict[str, Any] = {
        "device": str(device),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        found["memory_gib"] = round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        )
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": gpu.name,
            "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
        found["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        with suppress(
            RuntimeError
        ):  # PyTorch says nothing after both of its ways to set TF32 were used
            found["allow_tf32"] = torch.backends.cuda.matmul.allow_tf32
    return found


def _cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def git_commit() -> str | None:
    """The commit of the working directory, with ``+changes`` where files differ from it; None
    outside a checkout.

    ``HEADPRUNE_COMMIT`` names it where code was copied to a machine without git.
    """
    if named := os.environ.get("HEADPRUNE_COMMIT"):
        return named
    commit = _git("rev-parse", "HEAD")
    return (
        f"{commit}+changes"
        if commit and _git("status", "--porcelain", "--untracked-files=no")
        else commit
    )


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
