"""What lies beside the weights of a model and must travel with it: tokenizer, processor and licence, and its card."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headprune.core.errors import InvalidValue
from headprune.core.files import staged
from headprune.surgery.formats import card

#: Files of tokenizers, image processors, feature extractors and processors, as Transformers names them, and licences.
PATTERNS = (
    *("tokenizer*.json", "tokenizer*.model", "*.spm", "*.bpe.model", "spiece.model", "*.tiktoken", "tekken.json"),
    *("vocab*.json", "vocab*.txt", "merges.txt", "bpe.codes", "added_tokens.json", "special_tokens_map.json"),
    *("normalizer.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("feature_extractor_config.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),
)


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
            raise InvalidValue("processor", "a tokenizer or processor with save_pretrained", type(tool).__name__)


def copy(source: str, folder: Path) -> list[str]:
    """Copies the files that go with a model, from its folder or from the hub, as they are; the text of its card
    goes around the section of the card that is in ``folder``.

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
    if (home / card.CARD).is_file() and (folder / card.CARD).is_file():
        card.carry(folder, home / card.CARD)
    return [name.as_posix() for name in names]


@dataclass
class Beside:
    """What lies beside a model, as ``processor`` of ``save_pretrained``: copied as it is, when the folder is made."""

    source: str
    copied: list[str] = field(default_factory=list)

    def save_pretrained(self, folder: Path) -> None:
        self.copied = copy(self.source, folder)


def _matching(home: Path) -> Iterable[Path]:
    return (path for pattern in PATTERNS for path in home.glob(pattern))
