"""PyTorch's dynamic quantisation: linear layers in INT8, activations quantised on the fly. Of any
model."""

from __future__ import annotations

import copy
from pathlib import Path
from time import perf_counter

import torch
from protocol import Cut, Job, Run, main, pretrained, running
from torch import nn

import headprune as hp


def cut(job: Job) -> Cut:
    job.only_cpu("dynamic quantisation")
    base, whole = pretrained(job.base, job.device), start_of(job)
    start = perf_counter()
    small = quantised(whole)
    seconds = {"cut": perf_counter() - start}

    def save(folder: Path) -> str:
        """As its tutorial says: the state, to be loaded into a model that was quantised again."""
        torch.save(small.state_dict(), folder / "state.pt")
        return "torch.save of the state; quantise again, load_state_dict"

    return Cut(running(base), running(small), save, seconds)


def start_of(job: Job) -> nn.Module:
    return (
        pretrained(job.base, job.device)
        if job.given is None
        else hp.from_pretrained(job.given).eval()
    )


def quantised(model: nn.Module) -> nn.Module:
    found: nn.Module = torch.ao.quantization.quantize_dynamic(
        copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8
    )
    return found


def load(job: Job, folder: Path) -> Run:
    model = quantised(start_of(job))
    model.load_state_dict(torch.load(folder / "state.pt", weights_only=False))
    return running(model)


if __name__ == "__main__":
    main(cut, load)
