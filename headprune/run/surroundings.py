"""What a run runs on: versions, hardware, and the commit of the working directory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

_LIBRARIES = ("torch", "transformers", "datasets", "accelerate", "safetensors", "scikit-learn", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Of Python and of every library that matters."""
    import headprune

    found = {"python": platform.python_version(), "headprune": headprune.__version__}
    return found | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads, memory, and the GPU if one is used."""
    found: dict[str, Any] = {
        "device": str(device),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def git_commit() -> str | None:
    """The commit of the working directory, with ``+changes`` where files differ from it; None outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
