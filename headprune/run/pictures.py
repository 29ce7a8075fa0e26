"""Attention pictures of a run: the uncut model's attention maps on a few test rows."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headprune.core.errors import HeadPruneError
from headprune.data.features import Example
from headprune.data.labels import names_by_number
from headprune.maps.pictures import AttentionPictures, ShownExample
from headprune.model.sites import Sites
from headprune.run.subject import Subject
from headprune.scoring._attention_maps import attention_maps

#: Examples of a report.
_EXAMPLES = 8
#: Rows of at most this many tokens are preferred: larger maps are hard to read.
_TOKENS = 48
#: Most bytes of fp32 maps that a run makes for its pictures.
_MEMORY = 512 * 2**20
#: Largest side of an example's own picture.
_PIXELS = 32


def draw_attention(subject: Subject) -> AttentionPictures | None:
    """Draw pictures of some short test rows; None, with a warning, without attention maps."""
    attention = _attention(subject)
    if not any(site.heads for site in attention):  # no layout takes it, or it has lost all heads
        subject.journal.warn(["The report has no attention pictures: no head can be scored."])
        return None
    rows = _choose_rows(subject)
    examples = [subject.data.examples["test"][row] for row in rows]
    batch = subject.data.collate(examples)
    tokenizer = subject.preparation.tokenizer if "input_ids" in batch else None
    image = _grid(subject, batch)
    try:
        maps = attention_maps(
            subject.model, batch, sites=attention, tokenizer=tokenizer, image=image
        )
    except Exception as error:  # a run does not fail for its pictures
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, HeadPruneError):
            reason = str(error)
        subject.journal.warn([f"The report has no attention pictures: {reason}"])
        return None
    shown = [_shown(subject, row, example) for row, example in zip(rows, examples, strict=True)]
    return AttentionPictures.of(maps, shown)


def _attention(subject: Subject) -> Sites:
    """The sites that have attention maps."""
    attention = [site for site in subject.sites if not site.is_feed_forward]
    return Sites(attention, subject.sites.layouts.values(), subject.sites.not_taken)


def _choose_rows(subject: Subject) -> list[int]:
    """Choose the first short test rows, or the shortest, as memory allows."""
    lengths = [len(example.get("input_ids", ())) for example in subject.data.examples["test"]]
    # Images have no `input_ids`, so their length here is 0.
    rows = [row for row, length in enumerate(lengths) if length <= _TOKENS]
    if not rows:
        rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    rows = rows[:_EXAMPLES]

    # One row's maps are [heads, tokens, tokens] of four bytes each.
    heads = sum(len(site.heads) for site in _attention(subject))
    longest = max(lengths[row] for row in rows)
    tokens = max(longest, _image_tokens(subject), 1)
    n_fitting = _MEMORY // (4 * heads * tokens**2)
    return rows[: max(1, n_fitting)]


def _image_tokens(subject: Subject) -> int:
    """Patches of an image; 0 for other inputs."""
    example = subject.data.examples["test"][0]
    if "pixel_values" not in example:
        return 0
    grid = _grid(subject, {"pixel_values": example["pixel_values"][None]})
    return grid[0] * grid[1] if grid else 0


def _grid(subject: Subject, batch: dict[str, Tensor]) -> tuple[int, int] | None:
    """Rows and columns of an image's patches, if the model's configuration has their size."""
    size: Any = getattr(getattr(subject.model, "config", None), "patch_size", None)
    if "pixel_values" not in batch or size is None:
        return None
    if isinstance(size, int):  # square patches
        size = (size, size)
    height, width = tuple(size)[-2:]  # of video models, (frames, height, width)
    pixels = batch["pixel_values"]  # [batch, channels, height, width]
    return pixels.shape[-2] // height, pixels.shape[-1] // width


def _shown(subject: Subject, row: int, example: Example) -> ShownExample:
    """The title of a row, with its label, and its image if it is one."""
    title = f"test row {row}"
    label = example.get("labels")
    names = names_by_number(getattr(subject.model, "config", None))
    if isinstance(label, int) and label in names:
        title = f"{title}, label {names[label]}"
    pixels = example.get("pixel_values")
    if pixels is None:
        return ShownExample(title)
    return ShownExample(title, (), (), *_thumbnail(pixels))


def _thumbnail(pixels: Tensor) -> tuple[str, int, int]:
    """Shrink an image ``[channels, height, width]`` to RGB bytes.

    Returns:
        Base64 of the bytes ``[height, width, 3]``, height, width.
    """
    colours = pixels[:3].float()
    if len(pixels) < 3:  # grey
        colours = pixels[:1].float().expand(3, -1, -1)
    height, width = colours.shape[1:]
    shrink = min(1.0, _PIXELS / max(height, width))
    size = max(1, round(shrink * height)), max(1, round(shrink * width))
    small = functional.adaptive_avg_pool2d(colours, size)

    # Scale from the darkest to the lightest value; an image of one colour becomes black.
    low, high = small.min(), small.max()
    scaled = (small - low) / (high - low).clamp_min(1e-12) * 255
    data = scaled.round().to(torch.uint8).permute(1, 2, 0).contiguous()
    text = base64.b64encode(data.numpy().tobytes()).decode()
    return text, data.shape[0], data.shape[1]
