"""README and docs, read as what they are tested by: their code, their commands, and what a page
takes for granted."""

import random
import re
import shlex
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
#: Everything a reader may copy code from.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SIDES = {"attention_heads": 8, "ffn_dim": 8}
_WORDS = ["good", "bad", "a", "film", "the", "plot", "was", "and", "fine", "dull"]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line where the text begins, and what it is said
    to print."""

    language: str
    text: str
    line: int
    prints: str | None = None


def blocks(page):
    """The fenced blocks of a page. A ``text`` block right after code, with nothing between, is what
    it prints."""
    text = page.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(text))
    read = []
    for fence, after in zip_longest(found, found[1:]):
        follows = (
            after is not None
            and after[1] == "text"
            and not text[fence.end() : after.start()].strip()
        )
        line = text.count("\n", 0, fence.start(2)) + 1
        read.append(
            Block(fence[1], fence[2], line, after[2] if follows and after is not None else None)
        )
    return read


def commands(page):
    """The ``headprune`` commands of a page's code, indented or fenced: as written, and their
    arguments."""
    text = page.read_text(encoding="utf-8")
    lines = iter(
        [*(line for block in blocks(page) for line in block.text.split("\n")), *_indented(text)]
    )
    for line in lines:
        if not line.startswith("headprune "):
            continue
        while line.endswith("\\"):
            line = line[:-1] + next(lines).strip()
        yield line, shlex.split(line, comments=True)[1:]


def mentions(page):
    """Commands in the running text, ``headprune VERB --option``, which may be parts of one."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in re.finditer(r"`headprune ([a-z][^`]*)`", text):
        yield shlex.split(" ".join(found[1].split()))


def words(text):
    """Words of Markdown, of tables too; code blocks, comments and addresses of links do not
    count."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)
    lines = [line for line in text.split("\n") if not line.startswith("    ")]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def _indented(text):
    return [line[4:] for line in _FENCE.sub("", text).split("\n") if line.startswith("    ")]


def classifier(folder, kind, **config):
    """A tiny sequence classifier of Transformers with its tokenizer, where a page names one of the
    hub."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_input_names": names}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )
    model = getattr(transformers, f"{kind}ForSequenceClassification")
    torch.manual_seed(0)
    model(model.config_class(vocab_size=len(vocabulary), **config)).save_pretrained(folder)


def reviews(path, rows=80):
    """A CSV with columns text and label, whose label says whether the text calls the film good."""
    draw = random.Random(0)
    lines = ["text,label"]
    for i in range(rows):
        good = draw.random() < 0.5
        words = [*draw.choices(_WORDS[2:], k=draw.randint(2, 8)), "good" if good else "bad", str(i)]
        lines.append(f"{' '.join(words)},{int(good)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def seq2seq():
    """A tiny BART with 2 + 1 layers of 8 heads, whose time is that of its attention, and batches
    for it."""
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "vocab_size": 40,
        "max_position_embeddings": 128,
    }
    heads = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _SIDES.items()}
    torch.manual_seed(0)
    model = BartForConditionalGeneration(
        BartConfig(**sizes, **heads, pad_token_id=0, forced_eos_token_id=None)
    ).eval()
    tokens = [torch.randint(1, 40, (8, 6)) for _ in range(3)]
    return model, [{"input_ids": t, "labels": t.roll(1, 1)} for t in tokens]
