"""Models: of the recipe's task from a path, or freshly built; or whatever lies in a folder, for the
other commands."""

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
from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.data.adapters import is_adapter, merged
from headprune.data.imported import build_own
from headprune.data.vocabulary import train_tokenizer
from headprune.model.classes import OWN, class_name_of, class_named
from headprune.recipes.schema import CLASSIFICATIONS, UNLABELLED, Recipe, Task

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

_PROCESSORS = {
    "image_classification": "AutoImageProcessor",
    "audio_classification": "AutoFeatureExtractor",
}


@dataclass(frozen=True)
class Preparation:
    """What turns rows into a model's inputs: its tokenizer, or its processor of images or sound,
    its padding token, the token that a decoder starts with, and what a freshly built model's
    configuration says of a tokenizer that was trained for it."""

    tokenizer: Any = None
    processor: Any = None
    pad: int = 0
    start: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tools(self) -> tuple[Any, ...]:
        """What there is of both, to be saved beside a model."""
        return tuple(tool for tool in (self.tokenizer, self.processor) if tool is not None)


@dataclass(frozen=True)
class Loaded:
    """A model of the recipe's task, and what a reader of its results should know."""

    model: nn.Module
    warnings: tuple[str, ...] = ()


def resolve_device(device: str) -> torch.device:
    """The device of a recipe.

    Raises:
        InvalidValue: ``cuda`` without a GPU that torch can use.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidValue(
            "device", "cpu or auto on this machine", "cuda", "torch sees no GPU here."
        )
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_path(path: str, where: str = "model.path") -> str:
    """A folder or hub name; ``package:NAME/FOLDER`` becomes the folder inside that installed
    package.

    Raises:
        InvalidValue: no such package, or no such folder.
    """
    if path.startswith("package:"):
        name, _, inside = path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            install = (
                f"Install it: pip install --no-deps {name.replace('_', '-')}. Or give"
                if name.isidentifier()
                else "Give"
            )
            hint = f"{install} a folder: --set {where}=FOLDER."
            raise InvalidValue(
                where,
                "a folder inside an installed package",
                f"{path!r}: no package {name!r}",
                hint,
            )
        folder = Path(next(iter(spec.submodule_search_locations))) / inside
        if not folder.is_dir():
            raise InvalidValue(
                where, "a folder inside an installed package", f"{path!r}: no folder {folder}"
            )
        return str(folder)
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local)
    if local.exists() or local.is_absolute() or path.startswith((".", "~")) or len(local.parts) > 2:
        raise InvalidValue(where, "an existing folder or a hub name", repr(path))
    return path


def prepare(
    recipe: Recipe, texts: Callable[[], Sequence[str]] | None = None, base: Path | None = None
) -> Preparation:
    """The tokenizer or processor of the recipe's model, where its task and data need one.

    Args:
        recipe: The recipe.
        texts: Gives the texts of the train rows, for a tokenizer that is trained on them.
        base: A folder in which that tokenizer lies already.

    Raises:
        InvalidValue: it is needed and cannot be had.
    """
    section = recipe.model
    if recipe.data.tokenizer is not None:
        return _trained(recipe, texts, base)
    text = recipe.data.text is not None
    if recipe.task not in _PROCESSORS and not text:
        return Preparation()
    if section.path is None:
        if text:
            hint = "Or train one: data.tokenizer." if recipe.task in UNLABELLED else ""
            raise InvalidValue(
                "model.path",
                f"given, because {recipe.task} on text needs a tokenizer",
                "none",
                hint,
            )
        return Preparation()
    import transformers

    kind = "AutoTokenizer" if text else _PROCESSORS[recipe.task]
    tool = _loaded(getattr(transformers, kind), section.path, "model.path")
    if not text:
        return Preparation(processor=tool)
    try:
        with _panics_are_errors():
            tool("a word", truncation=True)
    except Exception as error:  # a tokenizer loads with settings that it cannot work with
        must = "a folder with a tokenizer that reads text"
        raise InvalidValue(
            "model.path", must, f"{section.path!r} ({type(error).__name__}: {error})"
        ) from error
    translates = recipe.task == "translation"
    start = (
        getattr(model_config(section.path), "decoder_start_token_id", None) if translates else None
    )
    if translates and start is None:
        must = "a model whose configuration has a decoder_start_token_id"
        raise InvalidValue("model.path", must, f"{section.path!r} without")
    return Preparation(
        tool, pad=tool.pad_token_id if tool.pad_token_id is not None else 0, start=start or 0
    )


def _trained(
    recipe: Recipe, texts: Callable[[], Sequence[str]] | None, base: Path | None
) -> Preparation:
    """A tokenizer trained on the train rows, and what the model has to know of it."""
    from transformers import PreTrainedTokenizerFast

    wanted = recipe.data
    if base is not None:
        check_files(base)
        tool: Any = PreTrainedTokenizerFast.from_pretrained(str(base))
    elif texts is None:
        raise InvalidValue(
            "prepare(texts=)", "given for data.tokenizer, which is trained on train rows", "none"
        )
    else:
        tool = train_tokenizer(str(wanted.tokenizer), texts(), wanted.vocabulary)
    special = {
        f"{name}_token_id": getattr(tool, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    begin = {"decoder_start_token_id": tool.bos_token_id} if recipe.task == "translation" else {}
    config = {"vocab_size": len(tool), **special, **begin}
    return Preparation(
        tool, pad=tool.pad_token_id or 0, start=tool.bos_token_id or 0, config=config
    )


def build_model(
    recipe: Recipe, labels: Sequence[Any], preparation: Preparation | None = None
) -> nn.Module:
    """The recipe's model, in evaluation mode on the CPU; see ``load_model``."""
    return load_model(recipe, labels, preparation).model


def load_model(
    recipe: Recipe, labels: Sequence[Any], preparation: Preparation | None = None
) -> Loaded:
    """The recipe's model, in evaluation mode on the CPU; what it draws is drawn from the recipe's
    seed.

    Args:
        recipe: The recipe.
        labels: Labels of the data, in the order of their numbers.
        preparation: What prepares its inputs; needed where the recipe trains a tokenizer.

    Raises:
        InvalidValue: the model cannot be had, its configuration is wrong, or it lacks more than a
            head for the task.
        UnknownName: no such class.
        CheckpointError: a damaged folder of ours.
    """
    outside = torch.random.get_rng_state()
    torch.manual_seed(recipe.seed)
    try:
        told = preparation.config if preparation is not None else {}
        if recipe.model.import_path is not None:
            loaded = Loaded(build_own(recipe.model))
        else:
            loaded = (
                Loaded(_fresh(recipe, labels, told))
                if recipe.model.path is None
                else _from_path(recipe, labels)
            )
    finally:
        torch.random.set_rng_state(outside)
    model = (
        loaded.model
        if recipe.model.dtype is None
        else loaded.model.to(getattr(torch, recipe.model.dtype))
    )
    return Loaded(model.eval(), (*loaded.warnings, *_precision_notes(recipe, model)))


def _precision_notes(recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    trained = recipe.train is not None or any(step.method == "finetune" for step in recipe.recover)
    trained = trained or recipe.gradual is not None
    if dtype.itemsize > 2 or not trained:
        return ()
    name = str(dtype).removeprefix("torch.")
    return (
        (
            f"the weights are trained in {name}, where small steps are lost; model.dtype: float32"
            " keeps them"
        ),
    )


def model_config(path: str) -> Any:
    """The configuration of the model at a recipe's ``model.path``, as it lies there."""
    import transformers

    return _loaded(transformers.AutoConfig, path, "model.path")


def _head(task: Task, labels: Sequence[Any]) -> dict[str, Any]:
    """Configuration that a task's labels ask for."""
    if task == "regression":
        return {"num_labels": 1, "problem_type": "regression"}
    if task not in CLASSIFICATIONS:
        return {}
    numbers: dict[str, Any] = {"id2label": {i: str(v) for i, v in enumerate(labels)}}
    numbers |= {"label2id": {str(v): i for i, v in enumerate(labels)}}
    return (
        {**numbers, "problem_type": "single_label_classification"}
        if "token" not in task
        else numbers
    )


def _from_path(recipe: Recipe, labels: Sequence[Any]) -> Loaded:
    import transformers

    from headprune.checkpoints.checkpoint import MANIFEST

    kind = getattr(transformers, _AUTO[recipe.task])
    path = str(recipe.model.path)
    folder = Path(resolve_path(path))
    if (folder / MANIFEST).is_file() or pruned_heads(folder):
        return Loaded(_cut_before(recipe, labels, kind))
    headed = recipe.task in (*CLASSIFICATIONS, "regression")
    more = {"ignore_mismatched_sizes": True} if headed else {}
    _refuse_remote_code(_loaded(transformers.AutoConfig, path, "model.path"), path, "model.path")
    dtype = getattr(torch, recipe.model.dtype) if recipe.model.dtype else "auto"
    settings = {**_head(recipe.task, labels), **more, "dtype": dtype}
    loaded: tuple[nn.Module, Any] = _loaded(
        kind, path, "model.path", output_loading_info=True, **settings
    )
    model, info = loaded
    missing, mismatched = set(info["missing_keys"]), {key[0] for key in info["mismatched_keys"]}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    # A pooler belongs to the body by name only: models that were trained on masked tokens come
    # without one.
    body = {
        key for key in missing if key.startswith(prefix) and not key.startswith(f"{prefix}pooler.")
    }
    body |= {key for key in mismatched if key.startswith(prefix)}
    if body:
        got = (
            f"{path!r}, where {len(body)} are missing or of another shape:"
            f" {', '.join(sorted(body)[:3])}"
        )
        hint = "A model that was cut is loaded where headprune saved it, with its headprune.json."
        raise InvalidValue(
            "model.path", f"a folder with all weights of {type(model).__name__}", got, hint
        )
    untrained = sorted(missing | mismatched)
    if untrained and recipe.train is None:
        must = (
            f"a model trained for {recipe.task} with {len(labels)} labels"
            if labels
            else f"trained for {recipe.task}"
        )
        got = f"{path!r}, which lacks {', '.join(untrained[:3])}"
        raise InvalidValue("model.path", must, got, "Add a train section, or give another model.")
    note = (
        f"{path} has no weights for this task's {', '.join(untrained)}; they were newly"
        " initialised, then trained"
    )
    return Loaded(model, (note,) if untrained else ())


def _cut_before(recipe: Recipe, labels: Sequence[Any], kind: Any) -> nn.Module:
    """A model that headprune cut; it is taken as it is, so its head must fit the task and the
    labels."""
    from headprune.checkpoints.checkpoint import from_pretrained

    path = str(recipe.model.path)
    model = from_pretrained(resolve_path(path))
    config: Any = getattr(model, "config", None)
    fitting: Any = kind._model_mapping.get(type(config), ())
    if not isinstance(model, fitting):
        raise InvalidValue(
            "model.path", f"a model for {recipe.task}", f"{path!r}, a cut {type(model).__name__}"
        )
    wanted = 1 if recipe.task == "regression" else len(labels)
    if recipe.task in (*CLASSIFICATIONS, "regression") and config.num_labels != wanted:
        must = f"a cut model with as many outputs as the data has labels, {wanted}"
        raise InvalidValue("model.path", must, f"{path!r} with {config.num_labels}")
    for name, value in _head(recipe.task, labels).items():
        if name == "problem_type":
            config.problem_type = value
    cut: nn.Module = model
    return cut


def _loaded(kind: Any, path: str, where: str, **settings: Any) -> Any:
    folder = resolve_path(path, where)
    if is_adapter(Path(folder)):
        hint = "Merge them first: headprune prune --merge-adapters does, and so does, in Python, "
        hint += (
            "PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(merged)."
        )
        raise InvalidValue(
            where, "a folder with a whole model", f"{path!r}, PEFT adapters only", hint
        )
    importlib.import_module(
        "headprune.attention.transformer"
    )  # makes itself known to the Auto classes
    check_folder(Path(folder))
    check_weights(kind, Path(folder))
    try:
        with _panics_are_errors():
            # False, and not left out: then Transformers would ask who sits at the terminal.
            return kind.from_pretrained(folder, trust_remote_code=False, **settings)
    except (
        Exception
    ) as error:  # what lies there breaks readers and constructors in any way it likes
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        local = Path(folder).is_dir()
        must = "a local folder, or a hub model that can be reached"
        hint = "Give a local folder" + (
            ": --set model.path=FOLDER." if where == "model.path" else "."
        )
        must = f"a folder from which {kind.__name__} loads" if local else must
        raise InvalidValue(where, must, f"{path!r} ({reason})", "" if local else hint) from error


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """A library in Rust that meets a file it did not expect raises what no ``except Exception``
    sees."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(str(error)) from error
        raise


def _fresh(recipe: Recipe, labels: Sequence[Any], told: Mapping[str, Any]) -> nn.Module:
    import transformers

    section = recipe.model
    kind: Any = class_named(str(section.class_name))
    family: Any = getattr(kind, "config_class", None)
    if family is None:
        hint = did_you_mean(
            str(section.class_name), [*OWN, *(n for n in dir(transformers) if "For" in n)]
        )
        raise UnknownName(
            "model.class_name", "a Transformers model class", repr(section.class_name), hint
        )
    known = {name for cls in family.__mro__ for name in getattr(cls, "__annotations__", ())}
    for key in section.config:
        if key not in known:
            must = f"a key of {family.__name__}"
            raise InvalidValue(f"model.config.{key}", must, repr(key), did_you_mean(key, known))
        if key in told:
            must = f"left out, for the trained tokenizer says that it is {told[key]}"
            raise InvalidValue(f"model.config.{key}", must, section.config[key])
    try:
        model: nn.Module = kind(family(**{**_head(recipe.task, labels), **told, **section.config}))
    except (
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        ZeroDivisionError,
        AttributeError,
    ) as error:
        reason = " ".join(str(error).split())
        raise InvalidValue("model.config", f"a valid {family.__name__}", reason) from error
    return model


def open_model(path: str, where: str = "MODEL") -> nn.Module:
    """Any model in a folder or on the hub, in its own dtype: one that headprune cut, one that
    Transformers loads by its own class, or PEFT adapters, merged into their base.

    Raises:
        InvalidValue: no model there, or one that runs code of its own.
        CheckpointError: a damaged folder of ours, or one with an index or a configuration that is
            not believed.
    """
    import transformers

    from headprune.checkpoints.checkpoint import MANIFEST, from_pretrained

    folder = Path(resolve_path(path, where))
    check_files(folder)
    if (folder / MANIFEST).is_file() or pruned_heads(folder):
        return from_pretrained(folder)
    if is_adapter(folder):
        return merged(folder, where, _loaded)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidValue(where, "a model folder", f"{path!r} without config.json")
    config = _loaded(transformers.AutoConfig, path, where)
    _refuse_remote_code(config, path, where)
    kind = class_named(class_name_of(config)) or transformers.AutoModel
    model: nn.Module = _loaded(kind, path, where, dtype="auto")
    return model.eval()


def _refuse_remote_code(config: Any, path: str, where: str) -> None:
    """Words for a folder that ``format="remote-code"`` wrote: the plain class would fail on its
    shapes."""
    if getattr(config, "headprune_heads", None) is None:
        return
    named = vars(config).get("auto_map")
    known = (
        [n for n in named if n.startswith("AutoModelFor") and n.isidentifier()]
        if isinstance(named, dict)
        else []
    )
    auto = next((n for n in known if n != "AutoModelForPreTraining"), "AutoModel")
    hint = "headprune's commands run no code out of a folder. "
    hint += f"In Python: transformers.{auto}.from_pretrained({path!r}, trust_remote_code=True). "
    hint += "To go on cutting, keep a folder in the format 'headprune' too."
    got = (
        f"{path!r}, a checkpoint in the format 'remote-code', which runs the modelling file beside"
        " its weights"
    )
    raise InvalidValue(where, "a model that Transformers or headprune opens by itself", got, hint)


def longest_input(model: nn.Module) -> int | None:
    """How many tokens the model can read, where its configuration says so."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    for name, module in model.named_modules():  # RoBERTa's first positions stand for padding
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return limit - int(module.padding_idx) - 1
    return limit
