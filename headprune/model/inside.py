"""The model inside wrappers: torch.compile, several GPUs or processes, adapters of PEFT."""

from __future__ import annotations

from torch import nn

#: Classes that have the model in ``module``, by name: some of their packages are optional, others
#: take long to import.
_AROUND = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def bare(model: nn.Module) -> nn.Module:
    """Unwrap a model until its class and configuration are the model's own."""
    inner = _inside(model)
    return model if inner is None else bare(inner)


def _inside(model: nn.Module) -> nn.Module | None:
    names = {kind.__name__ for kind in type(model).__mro__}
    inner: object = None
    if "_orig_mod" in model._modules:  # torch.compile
        inner = model._orig_mod
    elif names & {"PeftModel", "PeftMixedModel"}:
        inner = model.get_base_model()  # type: ignore[operator]
    elif not names.isdisjoint(_AROUND):
        inner = model.module
    return inner if isinstance(inner, nn.Module) else None
