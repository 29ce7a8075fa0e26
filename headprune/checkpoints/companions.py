"""What lies beside the weights of a model and must travel with it: tokenizer, processor and
licence, and its card."""

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

#: Files of tokenizers, image processors, feature extractors and processors, as Transformers names
#: them, and licences.
PATTERNS = (
    *(
        "tokenizer*.json",
        "tokenizer*.model",
        "*.spm",
        "*.bpe.model",
        "spiece.model",
        "*.tiktoken",
        "tekken.json",
    ),
    *(
        "vocab*.json",
        "vocab*.txt",
        "merges.txt",
        "bpe.codes",
        "added_tokens.json",
        "special_tokens_map.json",
    ),
    *(
        "normalizer.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    ),
    *(
        "feature_extractor_config.json",
        "chat_template.json",
        "chat_template.jinja",
        "additional_chat_templates/*",
    ),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),
)
#: Where these files name classes whose code Transformers runs out of a folder or a repository, when
#: it is trusted.
_CODE = ("auto_map", "custom_pipelines")


def save(processor: Any, folder: Path) -> None:
    """Writes a tokenizer or processor, or several, into ``folder``, one that ``staged`` gave.

    Raises:
        InvalidValue: something without ``save_pretrained``.
    """
    for tool in processor if isinstance(processor, (tuple, list)) else [processor]:
        check(tool)
        tool.save_pretrained(folder)


def check(processor: Any) -> None:
    """Refuses what is no tokenizer or processor, and no list of them."""
    for tool in processor if isinstance(processor, (tuple, list)) else [processor]:
        if not callable(getattr(tool, "save_pretrained", None)):
            raise InvalidValue(
                "processor", "a tokenizer or processor with save_pretrained", type(tool).__name__
            )


def copy(source: str, folder: Path, code: bool = True) -> list[str]:
    """Copies the files that go with a model, from its folder or from the hub, as they are; the text
    of its card goes around the section of the card that is in ``folder``.

    Args:
        source: The model's folder or name.
        folder: Where to.
        code: Whether what they say of classes with code of their own stays. Who trusts a folder of
            ours with a modelling file must not be made to run another's code: there it is left out,
            with a warning.

    Returns:
        The names of the files.
    """
    home = Path(source)
    if not home.is_dir():
        from huggingface_hub import snapshot_download

        home = Path(snapshot_download(source, allow_patterns=[*PATTERNS, card.CARD]))
    names = sorted({path.relative_to(home) for path in _matching(home) if path.is_file()})
    with staged(folder) as place:
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(home / name, place / name)
            if not code and name.suffix == ".json":
                _without_code(place / name)
    if (home / card.CARD).is_file() and (folder / card.CARD).is_file():
        card.carry(folder, home / card.CARD)
    return [name.as_posix() for name in names]


@dataclass
class CompanionFiles:
    """What lies beside a model, as ``processor`` of ``save_pretrained``: copied as it is, when the
    folder is made."""

    source: str
    code: bool = True
    copied: list[str] = field(default_factory=list)

    def save_pretrained(self, folder: Path) -> None:
        self.copied = copy(self.source, folder, self.code)


def _without_code(path: Path) -> None:
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError):  # Transformers will not read it either
        return
    if found := list(_cleared(content)):
        write_atomic(path, json.dumps(content, indent=2).encode())
        named = ", ".join(clean(json.dumps(value)) for value in found)
        warnings.warn(f"{path.name} names code of others, which is left out: {named}", stacklevel=2)


def _cleared(content: Any) -> Iterator[Any]:
    """Takes away what names code, at any depth, and gives it."""
    if isinstance(content, dict):
        yield from (content.pop(key) for key in _CODE if key in content)
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from _cleared(value)


def _matching(home: Path) -> Iterable[Path]:
    return (path for pattern in PATTERNS for path in home.glob(pattern))
