"""A made-up batch for a model whose inputs can be read off its configuration."""

from __future__ import annotations

import torch
from torch import nn

from headprune.model.losses import is_encoder_decoder


def example_batch(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Make a small batch of tokens (one row padded), images or waves.

    Images and waves have the weights' dtype. None for a model that takes something else.
    """
    config = getattr(model, "config", None)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    main_input = getattr(model, "main_input_name", "input_ids")
    generator = torch.Generator().manual_seed(0)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if isinstance(size, int) and isinstance(channels, int):
        return {"pixel_values": torch.rand(2, channels, size, size, generator=generator).to(dtype)}
    if main_input == "input_values":
        return {"input_values": torch.randn(2, 4000, generator=generator).to(dtype)}
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int) or main_input != "input_ids":
        return None
    # Random tokens; the second row ends in padding.
    ids = torch.randint(0, vocabulary, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if is_encoder_decoder(model):
        batch["decoder_input_ids"] = torch.randint(0, vocabulary, (2, 5), generator=generator)
    return batch
