"""Scripts of the repository that are no part of the package, loaded as modules, and a tiny encoder
for them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def script(path: Path) -> ModuleType:
    """A fresh module of the file's code."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses look their module up while they are made
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = before
    return module


def benchmark(name: str) -> ModuleType:
    """A script of ``benchmarks``."""
    return script(BENCHMARKS / f"{name}.py")


#: What the tiny encoder's tokenizer knows.
WORDS = [f"w{i}" for i in range(30)]


def tiny_encoder(folder: Path) -> Path:
    """A BERT of 2 layers with 4 heads and its tokenizer, in ``folder/model``; returns that
    folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 16,
    }
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=32, max_position_embeddings=32, **sizes)).save_pretrained(
        folder / "model"
    )
    return folder / "model"
