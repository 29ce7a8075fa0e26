"""What the processes of the tests do, one function a name.

They find each other through a file in the folder.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

import headprune as hp
from headprune.core import samples
from headprune.core.errors import HeadPruneError, UnsupportedModel
from headprune.model.fingerprint import sample_positions
from headprune.model.running import call
from headprune.scoring import (
    AttributionPatching,
    Auto,
    Fisher,
    HardConcrete,
    IntegratedGradients,
    LeaveOneOut,
    Obs,
    Shapley,
    SubsetTopk,
    Surgeon,
    Taylor,
    _resume_cache,
    registry,
)
from tests.laws.support import Subject, examples_of, subject_of

_QUICK: dict[str, Any] = {
    "auto": Auto(candidates=("taylor", "obs"), random_draws=1),
    "hard_concrete": HardConcrete(steps=3, block=2),
    "shapley": Shapley(orders=1),
    "subset_topk": SubsetTopk(steps=3, block=2),
}
SCORERS: list[Any] = [_QUICK.get(name) or registry.get(name)() for name in registry.names()]
SCORERS += [Taylor(reduce="token"), Taylor(normalize="l2"), Taylor(reduce="batch", block=2)]
SCORERS += [Fisher(block=2), LeaveOneOut(replacement="mean"), LeaveOneOut(replay=False)]
SCORERS += [LeaveOneOut(replacement="resample", pool=3), AttributionPatching(base="mean")]
SCORERS += [Shapley(method="two_sided"), Obs(blocks=3), Surgeon(blocks=2)]
BOUNDED: list[Any] = [Taylor(), Taylor(reduce="token"), Taylor(reduce="batch", block=3), Fisher()]
BOUNDED += [IntegratedGradients(points=1), "ggn"]
SHARDED = ["taylor", "fisher", "leave_one_out", "obs", "magnitude", "entropy", "ggn"]


def subject() -> Subject:
    return subject_of("multi_head_attention")


def loss(model: nn.Module, batch: Any) -> Tensor:
    return call(model, batch).logsumexp(-1).square()


def batches(count: int, rows: int = 2) -> list[dict[str, Any]]:
    """So many batches of two examples, the last one of a single example."""
    data = examples_of(subject(), count * rows - 1)
    return [{k: v[i : i + rows] for k, v in data.items()} for i in range(0, count * rows - 1, rows)]


def scored(count: int, processes: hp.Processes | None = None) -> tuple[hp.HeadScores, ...]:
    """By every scorer; ``auto`` needs two examples a fold."""
    wanted = [scorer for scorer in SCORERS if count > 2 or not isinstance(scorer, Auto)]
    given: dict[str, Any] = {"loss": loss, "processes": processes, "progress": False}
    return hp.score(subject().model, batches(count), wanted, **given)


def score_all(folder: Path, *counts: str) -> None:
    """Every scorer, on several numbers of batches; and one that reads until it is settled."""
    shared, rank = hp.Processes(timeout=600), distributed.get_rank()
    found = {count: scored(int(count), shared) for count in counts}
    found |= {"until": (until(shared),), "bounded": bounded(shared)}
    found |= {"offloaded": (offloaded(shared),), "resumed": resumed(folder / "work", shared)}
    for name, many in found.items():
        for number, scores in enumerate(many):
            scores.save(folder / f"{name}-{number}-{rank}.json")


def bounded(processes: hp.Processes | None = None) -> tuple[hp.HeadScores, ...]:
    """Where there is room for few rows, so that they are exchanged in pieces and kept as means of
    neighbours."""
    own, data, limit = subject(), batches(20), samples.LIMIT
    # The curvature, to the last byte.
    samples.LIMIT = 8 * sum(len(site.units) for site in own.sites) ** 2
    try:
        return hp.score(own.model, data, BOUNDED, loss=loss, processes=processes, progress=False)
    finally:
        samples.LIMIT = limit


def resumed(
    folder: Path | None = None, processes: hp.Processes | None = None
) -> tuple[hp.HeadScores, ...]:
    """After a first call that failed in the middle of its passes, of which every process had kept
    something."""
    whole, scorers = batches(6), [Taylor(), Surgeon(blocks=2), LeaveOneOut(replacement="mean")]
    given: dict[str, Any] = {"loss": loss, "processes": processes, "progress": False}
    given["folder"] = folder
    if folder is not None:
        _resume_cache.EVERY, _resume_cache._TIMES = 0.0, 0
        with suppress(HeadPruneError, RuntimeError):
            hp.score(subject().model, Failing(whole), scorers, **given)
        assert len(list(folder.glob("*/*.safetensors"))) > 1
    return hp.score(subject().model, whole, scorers, **given)


class Failing(list[Any]):
    """Batches that fail in their fourth pass, before its end."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number, batch in enumerate(super().__iter__()):
            if (self.passes, number) == (4, 4):
                raise RuntimeError("cut off")
            yield batch


def offloaded(processes: hp.Processes | None = None) -> hp.HeadScores:
    """Of a model whose weights accelerate keeps elsewhere."""
    from accelerate import cpu_offload

    model = cpu_offload(subject().model, execution_device=torch.device("cpu"))
    return hp.score(model, batches(3), "taylor", loss=loss, processes=processes, progress=False)


def until(processes: hp.Processes | None = None) -> hp.HeadScores:
    """Of a model in which one unit hardly matters."""
    stable = hp.Stable(k=1, first=10, growth=1.5, rare=0.5, confidence=0.5)
    model, data = subject().model, batches(20, 4)
    with torch.no_grad():
        model.get_submodule("layers.0.attention.W_o").weight[:, :12] *= 1e-3
    return hp.score(
        model, data, "taylor", loss=loss, until=stable, processes=processes, progress=False
    )


def fail(folder: Path, how: str, timeout: str) -> None:
    """Process 1 ends or stops at its second batch; the other says in its file what it was told, and
    when."""
    seen = 0

    def fragile(model: nn.Module, batch: Any) -> Tensor:
        nonlocal seen
        seen += 1
        if distributed.get_rank() == 1 and seen == 3:  # the first is that of the costs
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return loss(model, batch)

    with telling(folder):
        given: dict[str, Any] = {"loss": fragile, "processes": hp.Processes(float(timeout))}
        hp.score(subject().model, batches(6), "taylor", **given)


def differ(folder: Path, *whats: str) -> None:
    """One thing after the other, for what is refused leaves the processes as they were."""
    for what in whats:
        if what == "auto":
            auto(folder)
        else:
            _differ(folder, what)


def _differ(folder: Path, what: str) -> None:
    """Process 1 has other data, weights or scorers, or its batch has a loss that is no number."""
    other, model, data = distributed.get_rank() == 1, subject().model, batches(3)
    model.register_buffer("wide", torch.zeros(5000))
    if what == "data" and other:
        data[2] = {name: tensor + 1 for name, tensor in data[2].items()}
    if what == "weights" and other:
        with torch.no_grad():
            wide = model.wide  # type: ignore[union-attr]
            wide[3] += 1e-3  # one number, and none of those that a fingerprint samples
    assert 3 not in sample_positions(5000)
    scorer = "fisher" if what == "scorer" and other else "taylor"

    def broken(model: nn.Module, batch: Any) -> Tensor:
        number = next(i for i, b in enumerate(data) if torch.equal(b["x"][:1], batch["x"][:1]))
        return loss(model, batch) * (float("nan") if number == 1 else 1.0)

    with telling(folder, what):
        judged = broken if what == "loss" else loss
        hp.score(model, data, scorer, loss=judged, processes=hp.Processes(600))


class OwnPlans(Auto):
    """``auto`` whose plans differ between processes, as by latency tables of their own."""

    def selected(self, scores: hp.HeadScores, groups: Any) -> hp.PruningPlan:
        keep = 0.75 if distributed.get_rank() else 0.5
        return hp.select(scores, hp.Budget(keep_heads=keep))


class NoRefit(Auto):
    """``auto`` whose refit refuses the model."""

    def refit_(self, problem: Any, small: nn.Module, batches: list[Any]) -> object:
        raise UnsupportedModel("the model", "one that can be refitted", "another")


def auto(folder: Path) -> None:
    """Plans that differ between processes; and a refit that is refused where one process has no
    plan."""
    given: dict[str, Any] = {"loss": loss, "processes": hp.Processes(600), "progress": False}
    with telling(folder, "plans"):
        own = OwnPlans(candidates=("taylor",), random_draws=0)
        hp.score(subject().model, batches(3), own, **given)
    alone = NoRefit(candidates=("taylor",), random_draws=0)
    scores = hp.score(subject().model, batches(3), alone, **given)
    scores.save(folder / f"alone-{distributed.get_rank()}.json")


def shard(folder: Path) -> None:
    """Scores of a model that FSDP2 has sharded; what is refused; and a cut of its weights once they
    are gathered."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    own, data = subject(), batches(3)
    model, mask, rank = own.model, own.ragged(), distributed.get_rank()
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    for number, scores in enumerate(hp.score(model, data, SHARDED, loss=loss, progress=False)):
        scores.save(folder / f"{number}-{rank}.json")
    refused: dict[str, Callable[[], object]] = {
        "prune": lambda: hp.prune_(model, mask),
        "save": lambda: hp.save_pretrained(model, folder / "model"),
        "recover": lambda: hp.recover_(model, data, "mean_fold", model),
        "copy": lambda: hp.scoring.rescorer(model, data, loss=loss)(mask),
        "share": lambda: hp.score(model, data, loss=loss, processes=hp.Processes(600)),
    }
    for name, verb in refused.items():
        with telling(folder, name):
            verb()
    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        small = subject().model
        small.load_state_dict(weights)
        hp.prune_(small, mask, own.batch)
        save_file({"logits": small(**own.batch)}, folder / "cut.safetensors")
    _split(folder)


def _split(folder: Path) -> None:
    """Tensor parallelism alone, and under FSDP2; in the processes of ``shard``, for its imports
    take longest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    part = "layers.1.attention"
    plan = {f"{part}.W_q": ColwiseParallel(), f"{part}.W_o": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    own, both = subject(), subject()
    for one in (own, both):
        parallelize_module(one.model, mesh["tensor"], plan)
    fully_shard(both.model, mesh=mesh["data"])
    for name, verb in {
        "find": lambda: hp.find_sites(own.model),
        "gate": lambda: hp.gated(own.model, own.ragged(), own.sites).__enter__(),
        "both": lambda: hp.score(both.model, batches(1), loss=loss),
    }.items():
        with telling(folder, name):
            verb()


def alone_meet(folder: Path) -> None:
    """The first process of a run meets the second, and is gone before it says what it wants."""
    from headprune.run.launched import Launch

    known = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
    if known["RANK"] == "0":
        distributed.broadcast = lambda *_, **__: os._exit(0)
    try:
        Launch(int(known["RANK"]), 2, known).call_off()
    except HeadPruneError as error:
        (folder / "told").write_text(str(error))


@contextmanager
def telling(folder: Path, what: str = "told") -> Iterator[None]:
    """Writes down what was raised, and after how long."""
    start = time.monotonic()
    try:
        yield
    except HeadPruneError as error:
        told = {"kind": type(error).__name__, "words": str(error)}
        told["seconds"] = time.monotonic() - start
        (folder / f"{what}-{distributed.get_rank()}.json").write_text(json.dumps(told))


def in_process(known: dict[str, str], name: str, folder: str, *more: str) -> None:
    """Does the work as the process of this rank."""
    os.environ.update(known)
    torch.set_num_threads(1)
    rank, size = int(known["RANK"]), int(known["WORLD_SIZE"])
    if not name.startswith("alone_"):
        meeting = f"file://{folder}/meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    globals()[name](Path(folder), *more)
    if distributed.is_initialized():
        distributed.destroy_process_group()
