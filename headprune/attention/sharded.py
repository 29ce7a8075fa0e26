"""Weights that lie in pieces on several processes: PyTorch's DTensor, as FSDP2 and tensor
parallelism make it.

FSDP2 brings a module's weights together for as long as it runs, so that models run with gates as
they are; only who reads a weight itself has to ask for all of it. Tensor parallelism lets each
process run some of the heads. A DTensor is known by its attributes: nothing is imported for models
that have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from headprune.core.errors import UnsupportedModel


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor lies in pieces on several processes."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """All of a tensor; of a sharded one every process gets it, and every process has to ask."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found


def own_class(model: nn.Module) -> type:
    """A model's class before FSDP2 put its own in front of it."""
    kind = type(model)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def check_whole(model: nn.Module, must: str) -> None:
    """Refuses sharded models where weights are written, or where processes share batches: all would
    run each.

    Raises:
        UnsupportedModel: a weight that lies in pieces on several processes.
    """
    name = next(
        (name for name, parameter in model.named_parameters() if is_sharded(parameter)), None
    )
    if name is not None:
        hint = (
            "Do it before fully_shard; or gather the weights with"
            " torch.distributed.checkpoint.state_dict."
        )
        hint += (
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) in every"
            " process, and load"
        )
        hint += " them into a model that is not sharded, in one."
        raise UnsupportedModel("the model", must, f"{name} sharded over several processes", hint)


def check_no_tensor_parallel(model: nn.Module, name: str, module: nn.Module) -> None:
    """Refuses an attention whose heads are dealt out to several processes.

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
    degree = getattr(model, "_tp_size", None)
    if isinstance(degree, int) and degree > 1:
        raise UnsupportedModel(
            name, must, f"an attention split by tensor parallelism over {degree} processes", hint
        )
    named: Iterator[tuple[str, Any]] = module.named_parameters()
    for path, parameter in named:
        if not is_sharded(parameter):
            continue
        owner = module.get_submodule(path.rpartition(".")[0])
        by_fsdp = bool(
            getattr(owner, "_is_fsdp_managed_module", False)
        )  # FSDP2 splits along one axis of its mesh
        if sum(not placement.is_replicate() for placement in parameter.placements) > by_fsdp:
            raise UnsupportedModel(
                f"{name}.{path}", must, "a weight split by tensor parallelism", hint
            )
