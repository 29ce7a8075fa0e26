"""Load models and their tokenizers, for a recipe or from any path."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.checkpoints.foreign import check_files, check_folder, check_weights
from headprune.checkpoints.transformers_4 import pruned_heads
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean, reason_of
from headprune.data.adapters import is_adapter, open_merged
from headprune.data.imported import build_own
from headprune.data.vocabulary import train_tokenizer
from headprune.model.classes import OWN, class_name_of, class_named
from headprune.recipes.schema import CLASSIFICATIONS, UNLABELLED, Recipe, Task

#: The Auto class that loads a model for each task.
_AUTO = {
    "text_classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "causal_lm": "AutoModelForCausalLM",
    "translation": "AutoModelForSeq2SeqLM",
    "image_classification": "AutoModelForImageClassification",
    "audio_classification": "AutoModelForAudioClassification",
}

#: The Auto class of the processor, for tasks whose input is not text.
_PROCESSORS = {
    "image_classification": "AutoImageProcessor",
    "audio_classification": "AutoFeatureExtractor",
}

#: Transformers' tokenizers without a vocabulary have at most so many tokens that are not special.
_EMPTY_VOCABULARY = 2

#: Errors that a configuration with wrong values raises in a model's constructor.
_CONSTRUCTOR_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    ZeroDivisionError,
    AttributeError,
)


@dataclass(frozen=True)
class Preparation:
    """What turns rows into a model's inputs.

    Args:
        tokenizer: For text.
        processor: The model's own image processor or feature extractor.
        pad: Number of the padding token.
        start: Number of the token that a decoder starts with.
        config: Configuration values that follow from a tokenizer trained for a new model.
    """

    tokenizer: Any = None
    processor: Any = None
    pad: int = 0
    start: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tools(self) -> tuple[Any, ...]:
        """Tokenizer and processor, where there are any; they are saved next to a model."""
        return tuple(tool for tool in (self.tokenizer, self.processor) if tool is not None)


@dataclass(frozen=True)
class Loaded:
    """A model of the recipe's task, and warnings for readers of its results."""

    model: nn.Module
    warnings: tuple[str, ...] = ()


# ---------------------------------------------------------------- devices and paths


def resolve_device(device: str) -> torch.device:
    """Return the torch device of a recipe's ``device``.

    Raises:
        InvalidValue: ``cuda`` without a GPU that torch can use.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InvalidValue(
            "device", "cpu or auto on this machine", "cuda", "torch sees no GPU here."
        )
    return torch.device("cuda" if device != "cpu" and available else "cpu")


def resolve_path(path: str, where: str = "model.path") -> str:
    """Return a model's local folder, or its hub name unchanged.

    ``package:NAME/FOLDER`` becomes the folder inside that installed package.

    Raises:
        InvalidValue: no such package, or no such folder.
    """
    if path.startswith("package:"):
        return _folder_in_package(path, where)
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local)
    # A hub name is NAME or OWNER/NAME; anything else was meant as a local folder.
    looks_local = local.is_absolute() or path.startswith((".", "~")) or len(local.parts) > 2
    if local.exists() or looks_local:
        raise InvalidValue(where, "an existing folder or a hub name", repr(path))
    return path


def _folder_in_package(path: str, where: str) -> str:
    must = "a folder inside an installed package"
    name, _, inside = path.removeprefix("package:").partition("/")
    spec = None
    hint = f"Give a folder: --set {where}=FOLDER."
    if name.isidentifier():
        spec = importlib.util.find_spec(name)
        install = f"pip install --no-deps {name.replace('_', '-')}"
        hint = f"Install it: {install}. Or give a folder: --set {where}=FOLDER."
    if spec is None or not spec.submodule_search_locations:
        raise InvalidValue(where, must, f"{path!r}: no package {name!r}", hint)
    folder = Path(next(iter(spec.submodule_search_locations))) / inside
    if not folder.is_dir():
        raise InvalidValue(where, must, f"{path!r}: no folder {folder}")
    return str(folder)


# ---------------------------------------------------------------- tokenizers and processors


def prepare(
    recipe: Recipe,
    texts: Callable[[], Sequence[str]] | None = None,
    base: Path | None = None,
) -> Preparation:
    """Load or train the tokenizer or processor that the recipe's task needs.

    Args:
        recipe: The recipe.
        texts: Returns the texts of the train rows, for a tokenizer that is trained on them.
        base: A folder that already holds that trained tokenizer.

    Raises:
        InvalidValue: it is needed and cannot be loaded.
    """
    path, has_text = recipe.model.path, recipe.data.text is not None
    if recipe.data.tokenizer is not None:
        return _train_or_reload(recipe, texts, base)
    if path is not None:
        if has_text:
            return _text_preparation(recipe.task, path)
        if recipe.task in _PROCESSORS:
            import transformers

            kind = getattr(transformers, _PROCESSORS[recipe.task])
            return Preparation(processor=_load(kind, path, "model.path"))
    elif has_text:
        must = f"given, because {recipe.task} on text needs a tokenizer"
        hint = "Or train one: data.tokenizer." if recipe.task in UNLABELLED else ""
        raise InvalidValue("model.path", must, "none", hint)
    return Preparation()


def _text_preparation(task: Task, path: str) -> Preparation:
    """Load the tokenizer of the model at ``path``, and try it on a word."""
    import transformers

    tokenizer = _load(transformers.AutoTokenizer, path, "model.path")
    try:
        with _panics_as_errors():
            tokenizer("a word", truncation=True)
    except Exception as error:  # a tokenizer may load with settings that it cannot work with
        must = "a folder with a tokenizer that reads text"
        got = f"{path!r} ({type(error).__name__}: {error})"
        raise InvalidValue("model.path", must, got) from error
    # Without the tokenizer's files, Transformers makes an empty one, to which all words are alike.
    known = len(tokenizer) - len(set(tokenizer.all_special_ids))
    if known <= _EMPTY_VOCABULARY:
        must = "a folder with its tokenizer's files"
        got = f"{path!r}, whose tokenizer knows no word"
        hint = "Save the tokenizer that the model was trained with there: .save_pretrained(folder)."
        raise InvalidValue("model.path", must, got, hint)
    # A decoder needs to know its first token, which the tokenizer does not say.
    start: int | None = 0
    if task == "translation":
        start = getattr(model_config(path), "decoder_start_token_id", None)
        if start is None:
            must = "a model whose configuration has a decoder_start_token_id"
            raise InvalidValue("model.path", must, f"{path!r} without")
    return Preparation(tokenizer, pad=tokenizer.pad_token_id or 0, start=start or 0)


def _train_or_reload(
    recipe: Recipe,
    texts: Callable[[], Sequence[str]] | None,
    base: Path | None,
) -> Preparation:
    """Train a tokenizer on the train rows, or reload it from ``base``."""
    from transformers import PreTrainedTokenizerFast

    # A resumed run must use the tokenizer that it trained.
    if base is not None:
        check_files(base)
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(base))
    elif texts is None:
        must = "given for data.tokenizer, which is trained on train rows"
        raise InvalidValue("prepare(texts=)", must, "none")
    else:
        kind = str(recipe.data.tokenizer)
        tokenizer = train_tokenizer(kind, texts(), recipe.data.vocabulary)
    config = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if recipe.task == "translation":
        config["decoder_start_token_id"] = tokenizer.bos_token_id
    pad, start = tokenizer.pad_token_id or 0, tokenizer.bos_token_id or 0
    return Preparation(tokenizer, pad=pad, start=start, config=config)


# ---------------------------------------------------------------- the recipe's model


def build_model(
    recipe: Recipe,
    labels: Sequence[Any],
    preparation: Preparation | None = None,
) -> nn.Module:
    """Return the recipe's model, in evaluation mode on the CPU; see ``load_model``."""
    return load_model(recipe, labels, preparation).model


def load_model(
    recipe: Recipe,
    labels: Sequence[Any],
    preparation: Preparation | None = None,
) -> Loaded:
    """Load or build the recipe's model, in evaluation mode on the CPU.

    New weights are drawn from the recipe's seed; torch's own random state is unchanged.

    Args:
        recipe: The recipe.
        labels: Labels of the data, in the order of their numbers.
        preparation: What prepares the inputs; needed where the recipe trains a tokenizer.

    Raises:
        InvalidValue: the model cannot be loaded, its configuration is wrong, or it lacks more
            than a head for the task.
        UnknownName: no such class.
        CheckpointError: a damaged headprune checkpoint.
    """
    # New weights must not depend on what ran before, nor change what runs after.
    random_state = torch.random.get_rng_state()
    torch.manual_seed(recipe.seed)
    try:
        if recipe.model.import_path is not None:
            loaded = Loaded(build_own(recipe.model))
        elif recipe.model.path is not None:
            loaded = _from_path(recipe, labels)
        else:
            from_tokenizer = preparation.config if preparation is not None else {}
            loaded = Loaded(_new_model(recipe, labels, from_tokenizer))
    finally:
        torch.random.set_rng_state(random_state)
    model = loaded.model
    if recipe.model.dtype is not None:
        model = model.to(getattr(torch, recipe.model.dtype))
    return Loaded(model.eval(), (*loaded.warnings, *_precision_notes(recipe, model)))


def _precision_notes(recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    """Warn of training in 16 bits."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    finetuned = any(step.method == "finetune" for step in recipe.recover)
    trained = recipe.train is not None or finetuned or recipe.gradual is not None
    if dtype.itemsize > 2 or not trained:
        return ()
    name = str(dtype).removeprefix("torch.")
    note = f"the weights are trained in {name}, where small steps are lost;"
    return (f"{note} model.dtype: float32 keeps them",)


def model_config(path: str) -> Any:
    """Load the configuration of the model at a recipe's ``model.path``."""
    import transformers

    return _load(transformers.AutoConfig, path, "model.path")


def model_without_weights(path: str, task: Task) -> nn.Module | None:
    """The model that a recipe's task loads, on the meta device; None where heads were removed.

    Raises:
        InvalidValue: no model there, or one that runs its own code.
    """
    import transformers

    if _is_pruned(Path(resolve_path(path))):
        return None
    config = model_config(path)
    _refuse_remote_code(config, path, "model.path")
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, _AUTO[task]).from_config(config)
    return model


def _label_config(task: Task, labels: Sequence[Any]) -> dict[str, Any]:
    """Return the configuration values that a task's labels determine."""
    if task == "regression":
        return {"num_labels": 1, "problem_type": "regression"}
    if task not in CLASSIFICATIONS:
        return {}
    names = list(map(str, labels))
    numbers = range(len(names))
    values: dict[str, Any] = {
        "id2label": dict(zip(numbers, names, strict=True)),
        "label2id": dict(zip(names, numbers, strict=True)),
    }
    # Labels per token have no problem type in Transformers.
    if task != "token_classification":
        values["problem_type"] = "single_label_classification"
    return values


def _from_path(recipe: Recipe, labels: Sequence[Any]) -> Loaded:
    import transformers

    path = str(recipe.model.path)
    kind = getattr(transformers, _AUTO[recipe.task])
    if _is_pruned(Path(resolve_path(path))):
        return Loaded(_pruned_model(recipe, labels, kind))
    _refuse_remote_code(model_config(path), path, "model.path")
    # 1. Load. A head of another size gets new weights, which step 3 judges.
    settings = _label_config(recipe.task, labels)
    if recipe.task in (*CLASSIFICATIONS, "regression"):
        settings["ignore_mismatched_sizes"] = True
    settings["dtype"] = getattr(torch, recipe.model.dtype) if recipe.model.dtype else "auto"
    model, info = _load(kind, path, "model.path", output_loading_info=True, **settings)
    # 2. The body must be complete; only a head may be new.
    missing = set(info["missing_keys"])
    mismatched = {key[0] for key in info["mismatched_keys"]}
    _check_body(model, path, missing, mismatched)
    # 3. A new head must be trained.
    untrained = sorted(missing | mismatched)
    if not untrained:
        return Loaded(model)
    if recipe.train is None:
        must = f"trained for {recipe.task}"
        if labels:
            must = f"a model trained for {recipe.task} with {len(labels)} labels"
        got, hint = f"{path!r}, which lacks {', '.join(untrained[:3])}", ""
        if mismatched:
            got = f"{path!r}, whose {', '.join(sorted(mismatched)[:3])} have other sizes"
            hint = "Do the data have the labels that the model was trained on? "
        hint += "Add a train section, or give another model."
        raise InvalidValue("model.path", must, got, hint)
    note = f"{path} has no weights for this task's {', '.join(untrained)};"
    return Loaded(model, (f"{note} they were newly initialised, then trained",))


def _check_body(
    model: nn.Module,
    path: str,
    missing: set[str],
    mismatched: set[str],
) -> None:
    """Refuse a checkpoint that lacks weights of the model's body."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    # A pooler belongs to the body by name only: models pretrained on masked tokens have none.
    body = {key for key in missing if not key.startswith(f"{prefix}pooler.")} | mismatched
    absent = sorted(key for key in body if key.startswith(prefix))
    if absent:
        count = f"{len(absent)} are missing or of another shape"
        got = f"{path!r}, where {count}: {', '.join(absent[:3])}"
        hint = "For a cut model, give the folder that headprune saved, with its headprune.json."
        must = f"a folder with all weights of {type(model).__name__}"
        raise InvalidValue("model.path", must, got, hint)


def _is_pruned(folder: Path) -> bool:
    """Whether a folder holds a model that headprune, or Transformers 4, removed heads from."""
    from headprune.checkpoints.checkpoint import MANIFEST
    from headprune.checkpoints.described import is_described

    if (folder / MANIFEST).is_file() or is_described(folder):
        return True
    return bool(pruned_heads(folder))


def _pruned_model(recipe: Recipe, labels: Sequence[Any], kind: Any) -> nn.Module:
    """Load a pruned model, whose head must already fit the task and its labels."""
    from headprune.checkpoints.checkpoint import from_pretrained

    path, task = str(recipe.model.path), recipe.task
    model: nn.Module = from_pretrained(resolve_path(path))
    config: Any = getattr(model, "config", None)
    classes: Any = kind._model_mapping.get(type(config), ())
    fits_task = isinstance(model, classes)
    if not fits_task:
        got = f"{path!r}, a cut {type(model).__name__}"
        raise InvalidValue("model.path", f"a model for {task}", got)
    n_outputs = 1 if task == "regression" else len(labels)
    if task in (*CLASSIFICATIONS, "regression") and config.num_labels != n_outputs:
        must = f"a cut model with as many outputs as the data has labels, {n_outputs}"
        raise InvalidValue("model.path", must, f"{path!r} with {config.num_labels}")
    problem_type = _label_config(task, labels).get("problem_type")
    # Its labels' names are kept; only the loss follows the task.
    if problem_type is not None:
        config.problem_type = problem_type
    return model


def _new_model(
    recipe: Recipe,
    labels: Sequence[Any],
    from_tokenizer: Mapping[str, Any],
) -> nn.Module:
    """Build a model with new weights from ``model.class_name`` and ``model.config``."""
    import transformers

    section = recipe.model
    kind: Any = class_named(str(section.class_name))
    config_class: Any = getattr(kind, "config_class", None)
    if config_class is None:
        known = [*OWN, *(name for name in dir(transformers) if "For" in name)]
        hint = did_you_mean(str(section.class_name), known)
        must, got = "a Transformers model class", repr(section.class_name)
        raise UnknownName("model.class_name", must, got, hint)
    _check_config_keys(section.config, config_class, from_tokenizer)
    # The recipe's own values come last, so that they win.
    values = {**_label_config(recipe.task, labels), **from_tokenizer, **section.config}
    try:
        model: nn.Module = kind(config_class(**values))
    except _CONSTRUCTOR_ERRORS as error:
        reason = " ".join(str(error).split())
        must = f"a valid {config_class.__name__}"
        raise InvalidValue("model.config", must, reason) from error
    return model


def _check_config_keys(
    config: Mapping[str, Any],
    config_class: type,
    from_tokenizer: Mapping[str, Any],
) -> None:
    """Refuse keys that the class does not know, or that the trained tokenizer determines."""
    # A configuration class declares its keys as annotations.
    known: set[str] = set()
    for cls in config_class.__mro__:
        known.update(getattr(cls, "__annotations__", ()))
    for key in config:
        where = f"model.config.{key}"
        if key not in known:
            must = f"a key of {config_class.__name__}"
            raise InvalidValue(where, must, repr(key), did_you_mean(key, known))
        if key in from_tokenizer:
            must = f"left out, because the trained tokenizer sets it to {from_tokenizer[key]}"
            raise InvalidValue(where, must, config[key])


# ---------------------------------------------------------------- any model


def open_model(path: str, where: str = "MODEL") -> nn.Module:
    """Open any model in a folder or on the hub, in its own dtype.

    It may be a headprune checkpoint, a folder that Transformers loads by its own class, or PEFT
    adapters, which are merged into their base model.

    Raises:
        InvalidValue: no model there, or one that runs its own code.
        CheckpointError: a damaged headprune checkpoint, or an index or configuration that fails
            its checks.
    """
    import transformers

    from headprune.checkpoints.checkpoint import from_pretrained

    folder = Path(resolve_path(path, where))
    check_files(folder)
    # 1. Pruned by headprune, 2. adapters, 3. any other.
    if _is_pruned(folder):
        return from_pretrained(folder)
    if is_adapter(folder):
        return open_merged(folder, where, _load)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidValue(where, "a model folder", f"{path!r} without config.json")
    config = _load(transformers.AutoConfig, path, where)
    _refuse_remote_code(config, path, where)
    kind = class_named(class_name_of(config)) or transformers.AutoModel
    model: nn.Module = _load(kind, path, where, dtype="auto")
    return model.eval()


def _load(kind: Any, path: str, where: str, **settings: Any) -> Any:
    """Call ``kind.from_pretrained`` after checks of the folder, with errors in our template."""
    folder = resolve_path(path, where)
    if is_adapter(Path(folder)):
        hint = (
            "Merge them first: headprune prune --merge-adapters does, and so does, in Python,"
            " PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(merged)."
        )
        got = f"{path!r}, PEFT adapters only"
        raise InvalidValue(where, "a folder with a whole model", got, hint)
    # Registers our own transformer with the Auto classes.
    importlib.import_module("headprune.attention.transformer")
    check_folder(Path(folder))
    check_weights(kind, Path(folder))
    try:
        with _panics_as_errors():
            # Without an explicit False, Transformers would ask the user at the terminal.
            return kind.from_pretrained(folder, trust_remote_code=False, **settings)
    except Exception as error:  # a damaged file may break readers and constructors in any way
        reason = reason_of(error)
        must, hint = f"a folder from which {kind.__name__} loads", ""
        if not Path(folder).is_dir():
            must = "a local folder, or a hub model that can be reached"
            option = ": --set model.path=FOLDER" if where == "model.path" else ""
            hint = f"Give a local folder{option}."
        raise InvalidValue(where, must, f"{path!r} ({reason})", hint) from error


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turn a panic of a Rust library, which ``except Exception`` misses, into an error."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(str(error)) from error
        raise


def _refuse_remote_code(config: Any, path: str, where: str) -> None:
    """Refuse a folder in the format 'remote-code': the plain class would fail on its shapes."""
    if getattr(config, "headprune_heads", None) is None:
        return
    auto_map = vars(config).get("auto_map")
    auto = "AutoModel"
    for name in auto_map if isinstance(auto_map, dict) else ():
        # The name comes from a file and is shown as code, so it must be an identifier.
        usable = name.startswith("AutoModelFor") and name.isidentifier()
        if usable and name != "AutoModelForPreTraining":
            auto = name
            break
    call = f"transformers.{auto}.from_pretrained({path!r}, trust_remote_code=True)"
    hint = (
        f"headprune's commands run no code out of a folder. In Python: {call}."
        " To go on cutting, keep a folder in the format 'headprune' too."
    )
    got = (
        f"{path!r}, a checkpoint in the format 'remote-code', which runs the modelling file in its"
        " folder"
    )
    raise InvalidValue(where, "a model that Transformers or headprune opens by itself", got, hint)


def longest_input(model: nn.Module) -> int | None:
    """Return the number of tokens that a model can read, where its configuration gives it."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings"):
            padding = getattr(module, "padding_idx", None)
            # As RoBERTa, whose first positions are for padding.
            if padding is not None:
                return limit - int(padding) - 1
    return limit
