"""The attention pictures of a run: a handful of test rows, as the uncut model attends to them."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headprune.core.errors import HeadPruneError
from headprune.data.features import Example
from headprune.maps.pictures import AttentionPictures, ShownExample
from headprune.run.subject import Subject
from headprune.scoring._attention_maps import attention_maps

#: Examples of a report.
_EXAMPLES = 8
#: Rows up to so many tokens are taken before longer ones: a longer map is no picture any more.
_TOKENS = 48
#: Bytes of fp32 maps that a run makes for its pictures.
_MEMORY = 512 * 2**20
#: Largest side of an example's own picture.
_PIXELS = 32


def draw_attention(subject: Subject) -> AttentionPictures | None:
    """Pictures of the first test rows that are short enough; None, with a note, where the model
    shows no maps."""
    rows = _chosen(subject)
    examples = [subject.data.examples["test"][row] for row in rows]
    batch = subject.data.collate(examples)
    try:
        maps = attention_maps(
            subject.model,
            batch,
            sites=subject.sites,
            tokenizer=subject.preparation.tokenizer if "input_ids" in batch else None,
            image=_grid(subject, batch),
        )
    except Exception as error:  # a picture is not worth a run
        reason = (
            str(error) if isinstance(error, HeadPruneError) else f"{type(error).__name__}: {error}"
        )
        subject.journal.note(warnings=(f"The report has no attention pictures: {reason}",))
        return None
    shown = [_shown(subject, row, example) for row, example in zip(rows, examples, strict=True)]
    return AttentionPictures.of(maps, shown)


def _chosen(subject: Subject) -> list[int]:
    """Numbers of test rows: the first ones of up to 48 tokens, else the shortest; as many as memory
    allows."""
    lengths = [len(example.get("input_ids", ())) for example in subject.data.examples["test"]]
    short = [row for row, length in enumerate(lengths) if length <= _TOKENS]
    rows = short[:_EXAMPLES] or sorted(range(len(lengths)), key=lengths.__getitem__)[:_EXAMPLES]
    heads = sum(len(site.heads) for site in subject.sites)
    tokens = max(max(lengths[row] for row in rows), _image_tokens(subject))
    return rows[: max(1, _MEMORY // (4 * heads * max(tokens, 1) ** 2))]


def _image_tokens(subject: Subject) -> int:
    example = subject.data.examples["test"][0]
    grid = (
        _grid(subject, {"pixel_values": example["pixel_values"][None]})
        if "pixel_values" in example
        else None
    )
    return grid[0] * grid[1] if grid else 0


def _grid(subject: Subject, batch: dict[str, Tensor]) -> tuple[int, int] | None:
    """Rows and columns of an image's patches, where the model's configuration tells their size."""
    size: Any = getattr(getattr(subject.model, "config", None), "patch_size", None)
    if "pixel_values" not in batch or size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return batch["pixel_values"].shape[-2] // height, batch["pixel_values"].shape[-1] // width


def _shown(subject: Subject, row: int, example: Example) -> ShownExample:
    title = f"test row {row}"
    label = example.get("labels")
    names = getattr(getattr(subject.model, "config", None), "id2label", None) or {}
    if isinstance(label, int) and label in names:
        title = f"{title}, label {names[label]}"
    pixels = example.get("pixel_values")
    return (
        ShownExample(title) if pixels is None else ShownExample(title, (), (), *_thumbnail(pixels))
    )


def _thumbnail(pixels: Tensor) -> tuple[str, int, int]:
    """The picture itself, from its darkest to its lightest value, in RGB: base64, height, width."""
    colours = pixels[:3].float() if len(pixels) >= 3 else pixels[:1].float().expand(3, -1, -1)
    height, width = colours.shape[1:]
    shrink = min(1.0, _PIXELS / max(height, width))
    small = functional.adaptive_avg_pool2d(
        colours, (max(1, round(shrink * height)), max(1, round(shrink * width)))
    )
    low, high = small.min(), small.max()
    data = (
        ((small - low) / (high - low).clamp_min(1e-12) * 255)
        .round()
        .to(torch.uint8)
        .permute(1, 2, 0)
    )
    return (
        base64.b64encode(data.contiguous().numpy().tobytes()).decode(),
        data.shape[0],
        data.shape[1],
    )
