"""Copy the other files of a model's folder: tokenizer, processor, licence and model card."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headprune.checkpoints import card
from headprune.core.display import clean
from headprune.core.errors import InvalidValue
from headprune.core.files import staged, write_atomic
from headprune.core.opening import read_bytes

_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
#: Files of tokenizers, image processors, feature extractors and processors, as Transformers names
#: them, and licences.
PATTERNS = (
    "tokenizer*.json",
    "tokenizer*.model",
    "*.spm",
    "*.bpe.model",
    "spiece.model",
    "*.tiktoken",
    "tekken.json",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "bpe.codes",
    "added_tokens.json",
    "special_tokens_map.json",
    "normalizer.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*",
    *_LICENCES,
)
#: Keys that name classes in a folder or a repository, whose code Transformers runs if trusted.
_CODE = ("auto_map", "custom_pipelines")


def save(processor: Any, folder: Path) -> None:
    """Write a tokenizer or processor, or several, into a folder that ``staged`` yields.

    Raises:
        InvalidValue: something without ``save_pretrained``.
    """
    check(processor)
    for one in _each(processor):
        one.save_pretrained(folder)


def check(processor: Any) -> None:
    """Check that these are tokenizers or processors.

    Raises:
        InvalidValue: something without ``save_pretrained``.
    """
    for one in _each(processor):
        if not callable(getattr(one, "save_pretrained", None)):
            must = "a tokenizer or processor with save_pretrained"
            raise InvalidValue("processor", must, type(one).__name__)


def _each(processor: Any) -> Iterable[Any]:
    return processor if isinstance(processor, (tuple, list)) else [processor]


def home_of(source: str) -> Path:
    """A model's folder; of a repository of the hub, only the files that ``copy`` takes."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=[*PATTERNS, card.CARD]))


def copy(source: str, folder: Path, code: bool = True, tokenizer: bool = True) -> list[str]:
    """Copy the files that belong to a model from its folder or the hub.

    The text of its card goes around the section of the card in ``folder``.

    Args:
        source: The model's folder or name.
        folder: Where to.
        code: Whether names of classes with code of their own are kept. If not, they are removed
            with a warning: a user who trusts our modelling file must not run other code with it.
        tokenizer: Whether tokenizers and processors are copied, or only licences.

    Returns:
        The names of the files.
    """
    home = home_of(source)
    # A set, because a file may match two patterns.
    found = _matching(home, PATTERNS if tokenizer else _LICENCES)
    names = sorted({path.relative_to(home) for path in found if path.is_file()})
    with staged(folder) as place:
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(home / name, place / name)
            # Only JSON files name classes.
            if not code and name.suffix == ".json":
                _without_code(place / name)
    # The card.
    if (home / card.CARD).is_file() and (folder / card.CARD).is_file():
        card.carry(folder, home / card.CARD)
    return [name.as_posix() for name in names]


@dataclass
class CompanionFiles:
    """The other files of a model's folder, as ``processor`` of ``save_pretrained``.

    Args:
        source: The model's folder or name.
        code: Whether names of classes with code of their own are kept.
        tokenizer: Whether tokenizers and processors are copied, or only licences.
        copied: The names of the files, once they are copied.
    """

    source: str
    code: bool = True
    tokenizer: bool = True
    copied: list[str] = field(default_factory=list)

    def save_pretrained(self, folder: Path) -> None:
        self.copied = copy(self.source, folder, self.code, self.tokenizer)


def _without_code(path: Path) -> None:
    """Remove what names code from a JSON file, with a warning."""
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError):  # Transformers will not read it either
        return
    removed = list(_remove_code(content))
    if removed:
        write_atomic(path, json.dumps(content, indent=2).encode())
        named = ", ".join(clean(json.dumps(value)) for value in removed)
        warnings.warn(f"{path.name} names other code, which is left out: {named}", stacklevel=2)


def _remove_code(content: Any) -> Iterator[Any]:
    """Remove what names code, at any depth; yields what was removed."""
    if isinstance(content, dict):
        for key in _CODE:
            if key in content:
                yield content.pop(key)
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from _remove_code(value)


def _matching(home: Path, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from home.glob(pattern)
