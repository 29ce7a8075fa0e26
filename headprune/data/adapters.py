"""Open folders of PEFT adapters: the base model with the adapters added to its weights."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from headprune.checkpoints.foreign import check_files, read_object
from headprune.core.errors import CheckpointError, HeadPruneError, InvalidValue, reason_of
from headprune.data.patterns import LONGEST, work
from headprune.model.classes import class_named

#: The class that an adapter's task needs, by PEFT's name of the task.
_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_CONFIG = "adapter_config.json"
#: Keys of a configuration whose text PEFT uses as a regular expression on module names.
_SEARCHED = re.compile("module|pattern|layer|target")
#: Text that is a plain module name and no expression.
_NAME = re.compile(r"[\w.-]*")
#: Steps per module name: four ``.*`` with words between them, as in patterns of Unsloth.
_MOST = 4.0 * LONGEST**4
#: Steps per module name of all expressions in one list or table.
_MOST_LISTED = 4.0 * LONGEST**3


def is_adapter(folder: Path) -> bool:
    """Whether a folder has PEFT adapters and no model of its own."""
    return (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()


def open_merged(folder: Path, where: str, load: Callable[..., Any]) -> nn.Module:
    """Open the base model of an adapter folder and add the adapters to its weights.

    Args:
        folder: The adapters.
        where: The place that an error names.
        load: ``(class, path, where, **settings)``: loads the base model.

    Returns:
        The merged model, in its own dtype and in evaluation mode.

    Raises:
        InvalidValue: PEFT is not installed, the base model cannot be loaded, or the adapters do
            not fit it or name code.
        CheckpointError: the configuration is damaged, or has an expression that takes too long.
    """
    if importlib.util.find_spec("peft") is None:
        must = "a model that the installed packages open"
        hint = "Install it: pip install peft."
        raise InvalidValue(where, must, f"{str(folder)!r}, PEFT adapters", hint)
    check_files(folder)
    _check_config(folder, where)
    try:
        return _merge(folder, where, load)
    except HeadPruneError:
        raise
    except Exception as error:  # a damaged folder may break PEFT in any way
        reason = reason_of(error)
        must = "adapters that fit their base model"
        raise InvalidValue(where, must, f"{str(folder)!r} ({reason})") from error


def _check_config(folder: Path, where: str) -> None:
    """Refuse a configuration that makes PEFT run code, read other folders, or search for ever."""
    config = read_object(folder / _CONFIG, "a configuration of PEFT")
    _check_patterns(config, folder / _CONFIG)
    # Older versions of PEFT import the module that it names.
    if config.get("megatron_config") is not None:
        must = "adapters that need no Megatron"
        raise InvalidValue(where, must, f"{str(folder)!r} with a megatron_config")
    # X-LoRA loads any folder that it names.
    if str(config.get("peft_type")).upper() == "XLORA":
        got = f"{str(folder)!r}, X-LoRA, a mixture of others"
        raise InvalidValue(where, "adapters that can be merged", got)


def _merge(folder: Path, where: str, load: Callable[..., Any]) -> nn.Module:
    import peft
    import transformers

    config = peft.PeftConfig.from_pretrained(str(folder))
    base_path = config.base_model_name_or_path
    if not isinstance(base_path, str) or not base_path:
        must = "adapters that name their base model"
        raise InvalidValue(where, must, f"none in {_CONFIG}")
    # A file must not choose which package is imported.
    if base_path.startswith("package:"):
        must = "adapters whose base model is a folder or on the hub"
        raise InvalidValue(where, must, repr(base_path))
    kind = class_named(str((config.auto_mapping or {}).get("base_model_class")))
    if kind is None:
        kind = getattr(transformers, _TASKS.get(str(config.task_type), "AutoModel"))
    base = load(kind, base_path, f"{where}: its base model", dtype="auto")
    model: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    return model.eval()


def _check_patterns(config: dict[str, Any], path: Path) -> None:
    """Refuse regular expressions that would keep PEFT searching for a long time, or for ever."""
    for key, value in config.items():
        if not _SEARCHED.search(key):
            continue
        # PEFT tries each pattern of a list on each module, so a list shares one allowance.
        single = isinstance(value, str) and key.endswith("_modules")
        steps_left = _MOST if single else _MOST_LISTED
        for text in _texts(value):
            if not _NAME.fullmatch(text):
                steps_left -= work(text)
            if steps_left < 0:
                must = "names of modules, or patterns that match quickly"
                hint = (
                    "Name the modules one by one, and repeat no group that repeats something"
                    " itself, as (a+)+ does."
                )
                raise CheckpointError(f"{path}: {key}", must, repr(text[:200]), hint)


def _texts(value: Any) -> Iterator[str]:
    """Yield all text in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield from _texts(key)
            yield from _texts(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _texts(inside)
