"""Models and layouts of one's own, by import path: ``package.module:name``."""

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
    """What ``package.module:name`` names.

    Raises:
        InvalidValue: the module cannot be imported, or has nothing of that name.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may fail in any way it likes while it is imported
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{error.name}."
        )
        hint = (
            "Install its package, or say where it is: PYTHONPATH=FOLDER headprune run ..."
            if missing
            else ""
        )
        got = f"{path!r} ({type(error).__name__}: {error})"
        raise InvalidValue(
            where, "package.module:name, of a module that can be imported", got, hint
        ) from error
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise InvalidValue(
            where, f"a name in module {module_name}", repr(name), did_you_mean(name, known)
        )
    return getattr(module, name)


def build_own(section: ModelSection) -> nn.Module:
    """The model that the function at ``import_path`` makes of ``config``.

    Raises:
        InvalidValue: there is no such function, it refuses the configuration, or gives no
            ``nn.Module``.
    """
    build = imported(str(section.import_path), "model.import_path")
    if not callable(build):
        raise InvalidValue(
            "model.import_path", "a function that builds a model", type(build).__name__
        )
    try:
        model = build(**section.config)
    except Exception as error:  # somebody else's function
        got = f"{section.config} ({type(error).__name__}: {error})"
        raise InvalidValue(
            "model.config", f"keyword arguments of {section.import_path}", got
        ) from error
    if not isinstance(model, nn.Module):
        got = f"one that gives a {type(model).__name__}"
        raise InvalidValue("model.import_path", "a function that gives a torch.nn.Module", got)
    return model


def own_layouts(section: ModelSection) -> tuple[AttentionLayout, ...]:
    """The layouts at ``layouts``: one, or a list of them; none where it is left out.

    Raises:
        InvalidValue: something else.
    """
    if section.layouts is None:
        return ()
    found = imported(section.layouts, "model.layouts")
    given = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    for layout in given:
        if not isinstance(layout, AttentionLayout):
            must = "the name of a headprune.AttentionLayout, or of a list of them"
            raise InvalidValue(
                "model.layouts", must, f"{section.layouts!r}, a {type(layout).__name__}"
            )
    return given


def source_files(section: ModelSection) -> dict[str, str]:
    """SHA-256 of the modules' files, which tell two versions of one's code apart; not of what these
    import."""
    found = {}
    for path in (section.import_path, section.layouts):
        name = (path or "").partition(":")[0]
        spec = importlib.util.find_spec(name) if name else None
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            found[name] = sha256_file(Path(spec.origin))
    return found


def check_takes(model: nn.Module, batch: Mapping[str, Any], recipe: Recipe, n_labels: int) -> None:
    """Runs a model of one's own on a batch, before any long work.

    Raises:
        InvalidValue: it does not take the task's batches, or does not give a logit for every label.
    """
    inputs = [name for name in batch if name != "labels"]
    must = (
        f"a model that takes {', '.join(inputs)} and gives logits [batch, {n_labels}], for"
        f" {recipe.task}"
    )
    try:
        with undisturbed(model), torch.no_grad():
            logits = logits_of(predict(model, to_device(batch, device_of(model))))
    except HeadPruneError as error:
        raise InvalidValue("model.import_path", must, error.got) from error
    except Exception as error:  # somebody else's forward
        raise InvalidValue("model.import_path", must, f"{type(error).__name__}: {error}") from error
    if logits.ndim != 2 or logits.shape[1] < n_labels:
        raise InvalidValue("model.import_path", must, f"logits {list(logits.shape)}")
