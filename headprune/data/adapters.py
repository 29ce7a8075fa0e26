"""Folders of PEFT adapters: opened as their base model with the adapters added to its weights."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from headprune.checkpoints.foreign import check_files, read_object
from headprune.core.errors import CheckpointError, HeadPruneError, InvalidValue
from headprune.data.patterns import LONGEST, work
from headprune.model.classes import class_named

#: The class that an adapter's task is for, by PEFT's name of it.
_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
#: Keys of a configuration whose text PEFT searches for in names of modules, and text that is a name
#: and no more.
_SEARCHED, _NAME = re.compile("module|pattern|layer|target"), re.compile(r"[\w.-]*")
#: Steps in one name: four `.*` with words between them, as in patterns of Unsloth; and what a list
#: may take in all.
_MOST, _MOST_LISTED = 4.0 * LONGEST**4, 4.0 * LONGEST**3


def is_adapter(folder: Path) -> bool:
    """Whether a folder has PEFT adapters, and no model of its own."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def merged(folder: Path, where: str, load: Callable[..., Any]) -> nn.Module:
    """The base model of an adapter folder, in its own dtype, with the adapters added to its
    weights.

    Args:
        folder: The adapters.
        where: What an error is about.
        load: ``(class, path, where, **settings)``: loads the base.

    Raises:
        InvalidValue: PEFT is not installed, the base cannot be had, or the adapters do not fit it
            or name code.
        CheckpointError: their configuration is none, or has a pattern that takes too long to search
            for.
    """
    if importlib.util.find_spec("peft") is None:
        hint = "Install it: pip install peft."
        raise InvalidValue(
            where,
            "a model that the installed packages open",
            f"{str(folder)!r}, PEFT adapters",
            hint,
        )
    import peft
    import transformers

    check_files(folder)
    found = read_object(folder / "adapter_config.json", "a configuration of PEFT")
    _check_patterns(found, folder / "adapter_config.json")
    if found.get("megatron_config") is not None:
        must = (  # older versions of PEFT import the module that it names
            "adapters that need no Megatron"
        )
        raise InvalidValue(where, must, f"{str(folder)!r} with a megatron_config")
    if (
        str(found.get("peft_type")).upper() == "XLORA"
    ):  # it loads the folders that it names, wherever they are
        raise InvalidValue(
            where, "adapters that can be merged", f"{str(folder)!r}, X-LoRA, a mixture of others"
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        named = class_named(str((config.auto_mapping or {}).get("base_model_class")))
        kind = named or getattr(transformers, _TASKS.get(str(config.task_type), "AutoModel"))
        if (
            not isinstance(config.base_model_name_or_path, str)
            or not config.base_model_name_or_path
        ):
            raise InvalidValue(
                where, "adapters that name their base model", "none in adapter_config.json"
            )
        if config.base_model_name_or_path.startswith(
            "package:"
        ):  # which packages to install is not theirs to say
            must = "adapters whose base model is a folder or on the hub"
            raise InvalidValue(where, must, repr(config.base_model_name_or_path))
        base = load(kind, config.base_model_name_or_path, f"{where}: its base model", dtype="auto")
        model: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    except HeadPruneError:
        raise
    except Exception as error:  # what lies there breaks PEFT in any way it likes
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InvalidValue(
            where, "adapters that fit their base model", f"{str(folder)!r} ({reason})"
        ) from error
    return model.eval()


def _check_patterns(config: dict[str, Any], path: Path) -> None:
    """Refuses regular expressions that would keep PEFT searching for ever, or for a long time."""
    for key, value in config.items():
        if not _SEARCHED.search(key):
            continue
        left = _MOST if isinstance(value, str) and key.endswith("_modules") else _MOST_LISTED
        for text in _texts(value):
            left -= 0 if _NAME.fullmatch(text) else work(text)
            if left < 0:
                must = "names of modules, or patterns that are soon searched for"
                hint = (
                    "Name the modules one by one, and repeat no group that repeats something"
                    " itself, as (a+)+ does."
                )
                raise CheckpointError(f"{path}: {key}", must, repr(text[:200]), hint)


def _texts(value: Any) -> Iterator[str]:
    """All text in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inside in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(inside)
