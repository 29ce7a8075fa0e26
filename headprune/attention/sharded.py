"""Weights that are sharded over several processes: DTensors of FSDP2 and of tensor parallelism.

FSDP2 gathers a module's weights while it runs, so gates work without changes; only code that reads
a weight itself has to gather it. Tensor parallelism lets each process run some of the heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from headprune.core.errors import UnsupportedModel


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is sharded over several processes."""
    # By its attribute, so that nothing is imported for models without DTensors.
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """Return the whole tensor; for a sharded one every process has to call this."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered


def own_class(model: nn.Module) -> type:
    """Return a model's class without the subclass that FSDP2 makes."""
    kind = type(model)
    # The subclass has the bases (FSDPModule, own class).
    if kind.__bases__[0].__name__ == "FSDPModule":
        return kind.__bases__[1]
    return kind


def check_whole(model: nn.Module, must: str) -> None:
    """Refuse sharded models, for verbs that write weights or that split batches over processes.

    Raises:
        UnsupportedModel: a weight that is sharded over several processes.
    """
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            continue
        hint = (
            "Do it before fully_shard; or gather the weights with"
            " torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) in every"
            " process, and load them into a model that is not sharded, in one."
        )
        raise UnsupportedModel("the model", must, f"{name} sharded over several processes", hint)


def check_no_tensor_parallel(model: nn.Module, name: str, module: nn.Module) -> None:
    """Refuse an attention whose heads are split over several processes.

    Args:
        model: The whole model.
        name: The attention's name in it.
        module: The attention.

    Raises:
        UnsupportedModel: weights split by ``parallelize_module``, or a model that Transformers has
            split.
    """
    hint = (
        "Score and cut it before it is split: parallelize_module, or tp_plan=, comes last. FSDP2"
        " works with gates."
    )
    must = "run whole by every process"
    # Split by Transformers.
    degree = getattr(model, "_tp_size", None)
    if isinstance(degree, int) and degree > 1:
        got = f"an attention split by tensor parallelism over {degree} processes"
        raise UnsupportedModel(name, must, got, hint)
    # Split by parallelize_module.
    named: Iterator[tuple[str, Any]] = module.named_parameters()
    for path, parameter in named:
        if not is_sharded(parameter):
            continue
        owner = module.get_submodule(path.rpartition(".")[0])
        # FSDP2 splits along one axis of the mesh.
        by_fsdp = 1 if getattr(owner, "_is_fsdp_managed_module", False) else 0
        n_split = sum(not placement.is_replicate() for placement in parameter.placements)
        if n_split > by_fsdp:
            got = "a weight split by tensor parallelism"
            raise UnsupportedModel(f"{name}.{path}", must, got, hint)
