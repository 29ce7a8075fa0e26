"""The model inside what others wrap around it: torch.compile, several GPUs or processes, adapters
of PEFT."""

from __future__ import annotations

from torch import nn

#: Classes that have the model in ``module``, by name: some of their packages are optional, others
#: take long to import.
_AROUND = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def bare(model: nn.Module) -> nn.Module:
    """The model that says by its class and configuration what it computes."""
    inner = _inside(model)
    return model if inner is None else bare(inner)


def _inside(model: nn.Module) -> nn.Module | None:
    names = [kind.__name__ for kind in type(model).__mro__]
    found = None
    if "_orig_mod" in model._modules:
        found = model._orig_mod
    elif "PeftModel" in names or "PeftMixedModel" in names:
        found = model.get_base_model()  # type: ignore[operator]
    elif any(name in _AROUND for name in names):
        found = model.module
    return found if isinstance(found, nn.Module) else None
