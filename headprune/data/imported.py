"""Import a user's own models and layouts by path: ``package.module:name``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.core.errors import HeadPruneError, InvalidValue, did_you_mean
from headprune.core.files import sha256_file
from headprune.core.layout import AttentionLayout
from headprune.model.losses import logits_of, predict
from headprune.model.running import device_of, to_device, undisturbed
from headprune.recipes.schema import ModelSection, Recipe


def imported(path: str, where: str) -> Any:
    """Import the object that ``package.module:name`` names.

    Raises:
        InvalidValue: the module cannot be imported, or has nothing of that name.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        hint = ""
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # Is it the module itself or a package above it, and not one that it imports?
        if missing and f"{module_name}.".startswith(f"{missing}."):
            hint = "Install its package, or say where it is: PYTHONPATH=FOLDER headprune run ..."
        must = "package.module:name, of a module that can be imported"
        got = f"{path!r} ({type(error).__name__}: {error})"
        raise InvalidValue(where, must, got, hint) from error
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        must = f"a name in module {module_name}"
        raise InvalidValue(where, must, repr(name), did_you_mean(name, known))
    return getattr(module, name)


def build_own(section: ModelSection) -> nn.Module:
    """Build a model with the function at ``import_path``, which gets ``config`` as arguments.

    Raises:
        InvalidValue: there is no such function, it refuses the configuration, or it returns no
            ``nn.Module``.
    """
    where = "model.import_path"
    build = imported(str(section.import_path), where)
    if not callable(build):
        raise InvalidValue(where, "a function that builds a model", type(build).__name__)
    try:
        model = build(**section.config)
    except Exception as error:  # a user's function may fail in any way
        must = f"keyword arguments of {section.import_path}"
        got = f"{section.config} ({type(error).__name__}: {error})"
        raise InvalidValue("model.config", must, got) from error
    if not isinstance(model, nn.Module):
        got = f"one that gives a {type(model).__name__}"
        raise InvalidValue(where, "a function that gives a torch.nn.Module", got)
    return model


def own_layouts(section: ModelSection) -> tuple[AttentionLayout, ...]:
    """Import the layouts at ``layouts``: one, several, or none where it is left out.

    Raises:
        InvalidValue: it names something else.
    """
    if section.layouts is None:
        return ()
    value = imported(section.layouts, "model.layouts")
    layouts = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for layout in layouts:
        if not isinstance(layout, AttentionLayout):
            must = "the name of a headprune.AttentionLayout, or of a list of them"
            got = f"{section.layouts!r}, a {type(layout).__name__}"
            raise InvalidValue("model.layouts", must, got)
    return layouts


def source_files(section: ModelSection) -> dict[str, str]:
    """Return the SHA-256 of the imported modules' files, to tell two versions of them apart.

    Modules that these import are not included.
    """
    digests = {}
    # A built-in module or a namespace has no file of its own.
    for path in (section.import_path, section.layouts):
        if path is None:
            continue
        name = path.partition(":")[0]
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is not None and Path(origin).is_file():
            digests[name] = sha256_file(Path(origin))
    return digests


def check_takes(
    model: nn.Module,
    batch: Mapping[str, Any],
    recipe: Recipe,
    n_labels: int,
) -> None:
    """Run a user's model on one batch, before any long work.

    Args:
        model: The model.
        batch: A batch of the recipe's task.
        recipe: The recipe.
        n_labels: Number of labels.

    Raises:
        InvalidValue: it does not take the batch, or does not return a logit for every label.
    """
    where = "model.import_path"
    inputs = ", ".join(name for name in batch if name != "labels")
    # The same words for every failure: what the model must take and return.
    must = f"a model that takes {inputs} and gives logits [batch, {n_labels}], for {recipe.task}"
    try:
        with undisturbed(model), torch.no_grad():
            logits = logits_of(predict(model, to_device(batch, device_of(model))))
    except HeadPruneError as error:
        raise InvalidValue(where, must, error.got) from error
    except Exception as error:  # a user's forward may fail in any way
        raise InvalidValue(where, must, f"{type(error).__name__}: {error}") from error
    if logits.ndim != 2 or logits.shape[1] < n_labels:
        raise InvalidValue(where, must, f"logits {list(logits.shape)}")
