"""The model as it is: what everything else is compared with."""

from __future__ import annotations

from pathlib import Path

from protocol import Cut, Job, Run, main, pretrained, running, saving


def cut(job: Job) -> Cut:
    model = pretrained(job.base, job.device)
    return Cut(running(model), running(model), saving(model), {})


def load(job: Job, folder: Path) -> Run:
    return running(pretrained(folder, job.device))


if __name__ == "__main__":
    main(cut, load)
