"""Folders of PEFT adapters: opened as their base model with the adapters added to its weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.model.classes import class_named
from headprune.surgery.formats.foreign import read_object

#: The class that an adapter's task is for, by PEFT's name of it.
_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


def is_adapter(folder: Path) -> bool:
    """Whether a folder has PEFT adapters, and no model of its own."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def merged(folder: Path, where: str, load: Callable[..., Any]) -> nn.Module:
    """The base model of an adapter folder, in its own dtype, with the adapters added to its weights.

    Args:
        folder: The adapters.
        where: What an error is about.
        load: ``(class, path, where, **settings)``: loads the base.

    Raises:
        InvalidValue: PEFT is not installed, the base cannot be had, or the adapters do not fit it or name code.
        CheckpointError: their configuration is none.
    """
    if importlib.util.find_spec("peft") is None:
        hint = "Install it: pip install peft."
        raise InvalidValue(where, "a model that the installed packages open", f"{str(folder)!r}, PEFT adapters", hint)
    import peft
    import transformers

    if read_object(folder / "adapter_config.json", "a configuration of PEFT").get("megatron_config") is not None:
        must = "adapters that need no Megatron"  # older versions of PEFT import the module that it names
        raise InvalidValue(where, must, f"{str(folder)!r} with a megatron_config")
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        named = class_named(str((config.auto_mapping or {}).get("base_model_class")))
        kind = named or getattr(transformers, _TASKS.get(str(config.task_type), "AutoModel"))
        if not isinstance(config.base_model_name_or_path, str) or not config.base_model_name_or_path:
            raise InvalidValue(where, "adapters that name their base model", "none in adapter_config.json")
        base = load(kind, config.base_model_name_or_path, f"{where}: its base model", dtype="auto")
        model: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    except HeadPruneError:
        raise
    except Exception as error:  # what lies there breaks PEFT in any way it likes
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InvalidValue(where, "adapters that fit their base model", f"{str(folder)!r} ({reason})") from error
    return model.eval()
