"""What lies beside the weights of a model and must travel with it: tokenizer and processor files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headprune.core.errors import InvalidValue

#: Files of tokenizers, image processors, feature extractors and processors, as Transformers names them.
PATTERNS = (
    *("tokenizer*.json", "tokenizer*.model", "*.spm", "*.bpe.model", "spiece.model", "*.tiktoken", "tekken.json"),
    *("vocab*.json", "vocab*.txt", "merges.txt", "bpe.codes", "added_tokens.json", "special_tokens_map.json"),
    *("normalizer.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("feature_extractor_config.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*"),
)


def save(processor: Any, folder: Path) -> None:
    """Writes a tokenizer or processor, or several, into ``folder``.

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
    """Copies the tokenizer and processor files of a model's folder, or of a model of the hub, as they are.

    Returns:
        The names of the files.
    """
    home = Path(source)
    if not home.is_dir():
        from huggingface_hub import snapshot_download

        home = Path(snapshot_download(source, allow_patterns=list(PATTERNS)))
    names = sorted({path.relative_to(home) for path in _matching(home) if path.is_file()})
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(home / name, folder / name)
    return [name.as_posix() for name in names]


def _matching(home: Path) -> Iterable[Path]:
    return (path for pattern in PATTERNS for path in home.glob(pattern))
