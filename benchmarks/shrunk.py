"""Tiny random models of any model type of Transformers: its default configuration with every size
shrunk, and a batch.

Heuristics by the names of settings and inputs. They fail for some types; ``family_coverage.py``
lists which.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

EXAMPLES, TOKENS, VOCABULARY, IMAGE = 3, 7, 64, 32

#: What a whole-number setting is shrunk to, by its name; the first pattern that is found in it
#: decides.
SIZES: tuple[tuple[str, int], ...] = (
    (r"feat_extract_layers|num_labels|num_queries|num_channels$|in_channels|in_chans", 0),
    (r"mrope|rotary_dim|rope_dim$|rotary_ndims", 4),
    (
        r"head_dim|head_size|d_kv|dim_head|d_head|kv_channels|dim_per_head|head_width|key_dim|attention_key",
        8,
    ),
    (r"q_lora_rank|kv_lora_rank|lora|_rank$|time_step_rank", 8),
    (r"key_value_heads|kv_heads|num_kv|multi_query_group|num_key_value|query_groups", 2),
    (r"heads|n_head$|num_attention_head|attn_head|num_head", 4),
    (r"experts_per|top_?k$|topk|n_group$|n_active", 1),
    (r"expert|n_routed", 4),
    (r"token_i(d|ndex)$|_id$|_ids$|_idx$", 3),
    (r"num_.*layers|n_?layers?$|_layers$|_depth|^depth$|num_blocks|_blocks$|n_block|num_stages", 2),
    (r"vocab", VOCABULARY),
    (r"image_size|img_size|input_size|resolution|crop_size", IMAGE),
    (r"patch_size|tubelet|patch_stride", 8),
    (
        r"max_pos|n_pos|n_ctx|seq_len|max_len|context_len|position_embeddings|max_source|max_target",
        64,
    ),
    (r"mel|num_freq|n_fft|input_feat|feature_size", 16),
    (r"window|chunk|block_size", 4),
    (r"groups", 2),
)
#: Settings that follow from others.
LEFT_OUT = (
    "id2label",
    "label2id",
    "transformers_version",
    "out_features",
    "out_indices",
    "stage_names",
)
#: Settings that are changed where the shrunk configuration does not run.
CHANGES = (("num_key_value_heads", 4), ("hidden_size", 64), ("head_dim", 8))
LAYERS = re.compile(r"num_hidden_layers|^n_?layers?$|^num_layers$|^encoder_layers$|^depth$")


def shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration's settings with every size small, nested configurations too."""
    settings = {k: v for k, v in settings.items() if k not in LEFT_OUT}
    small = {key: _shrunk(key, value) for key, value in settings.items()}
    n_layers = next(
        (v for k, v in settings.items() if LAYERS.search(k) and isinstance(v, int)), None
    )
    kinds = settings.get("layer_types")
    few = list(dict.fromkeys(kinds)) if isinstance(kinds, list) and len(kinds) == n_layers else []
    few = few * 2 if len(few) == 1 else few
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == n_layers:
            small[key] = few if key == "layer_types" else small[key][: len(few) or 2]
        elif few and LAYERS.search(key) and value == n_layers:
            small[key] = len(few)
    return small


def with_sections(settings: dict[str, Any]) -> dict[str, Any]:
    """The same with rotary angles split among time, height and width of a head of 8."""
    found = {
        k: with_sections(v) if k.endswith("config") and isinstance(v, dict) else v
        for k, v in settings.items()
    }
    if "rope_parameters" in found:
        given = found["rope_parameters"] or {"rope_type": "default", "rope_theta": 10000.0}
        found["rope_parameters"] = {**given, "mrope_section": [2, 1, 1]}
    return found


def _shrunk(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        if "mrope_section" in value:
            return {**value, "mrope_section": [2, 1, 1]}
        return shrunk(value) if key.endswith("config") else value
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        if re.search(r"depth|layers", key):
            return [1] * len(value)
        if re.search(
            r"index|indices|indexes|out_features|stride|kernel|padding|ratio|offset|token", key
        ):
            return value
        return [_shrunk(key, v) for v in value]
    if value is None and key in ("vocab_size", "pad_token_id", "mask_token_id"):
        return VOCABULARY if key == "vocab_size" else 3
    if type(value) is not int or value < 0:
        return value
    for pattern, size in SIZES:
        if re.search(pattern, key):
            heads = (
                "head" in pattern and 2 < value < size
            )  # 3 of them would not divide a width of 32
            return size if heads else min(value, size) if size else value
    return min(value, 32)


def models(model_type: str) -> Iterator[Any]:
    """Tiny models of one model type: the shrunk default configuration, then ones with small changes
    to it."""
    import torch
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    kind = MODEL_MAPPING[config_class]
    default = config_class().to_dict()
    small = shrunk(default)
    problem: Exception | None = None
    for settings in (
        small,
        with_sections(small),
        *({**small, k: v} for k, v in CHANGES if k in small),
    ):
        try:
            torch.manual_seed(0)
            config = config_class.from_dict(settings)
            model = (kind if not isinstance(kind, tuple) else kind[0])(config).eval()
        except Exception as error:  # noqa: PERF203
            problem = problem or error
        else:
            yield model
    if problem is not None:
        raise problem


def settings_of(model: Any, name: str, default: Any) -> Any:
    """A setting of the configuration or of one nested in it."""
    configs = [model.config, *(v for v in vars(model.config).values() if hasattr(v, "to_dict"))]
    return next((getattr(c, name) for c in configs if getattr(c, name, None) is not None), default)


def examples(model: Any) -> Iterator[dict[str, Any]]:
    """Batches that a model may take, from the names of its inputs; the likeliest first."""
    import inspect

    import torch

    torch.manual_seed(1)
    takes = inspect.signature(model.forward).parameters
    size = settings_of(model, "image_size", IMAGE)
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    height, width = (v if isinstance(v, int) and v < 512 else IMAGE for v in (height, width))
    channels, mels = settings_of(model, "num_channels", 3), settings_of(model, "num_mel_bins", 16)
    frames = settings_of(model, "num_frames", 4)
    hidden = settings_of(model, "hidden_size", 32)
    mask = torch.ones(EXAMPLES, TOKENS, dtype=torch.long)
    mask[-1, -3:] = 0
    ids = torch.randint(4, VOCABULARY - 4, (EXAMPLES, TOKENS))
    long = 2 * settings_of(model, "max_source_positions", 50)
    known: dict[str, list[Any]] = {
        "input_ids": [ids],
        "decoder_input_ids": [ids[:, :5]],
        "pixel_values": [torch.randn(EXAMPLES, channels, height, width)],
        "pixel_values_videos": [torch.randn(EXAMPLES, frames, channels, height, width)],
        "input_features": [torch.randn(EXAMPLES, mels, long), torch.randn(EXAMPLES, 64, mels)],
        "input_values": [
            torch.randn(EXAMPLES, 800),
            torch.randn(EXAMPLES, 64, mels),
            torch.randn(EXAMPLES, 1, 800),
        ],
        "inputs_embeds": [torch.randn(EXAMPLES, TOKENS, hidden)],
        "hidden_states": [torch.randn(EXAMPLES, TOKENS, hidden)],
        "past_values": [
            torch.randn(EXAMPLES, 64, settings_of(model, "num_input_channels", 1)),
            torch.randn(3, 64),
        ],
        "bbox": [torch.randint(0, 10, (EXAMPLES, TOKENS, 4)).sort(-1).values],
        "bool_masked_pos": [None],
        "input_points": [None],
    }
    known["pixel_values"].append(torch.randn(EXAMPLES, frames, channels, height, width))
    main = model.main_input_name if isinstance(model.main_input_name, str) else "input_ids"
    required = [
        name
        for name, p in takes.items()
        if p.default is inspect.Parameter.empty
        and p.kind is p.POSITIONAL_OR_KEYWORD
        and name in known
    ]
    both = (
        {"input_ids", "pixel_values"} if "logit_scale" in dict(model.named_parameters()) else set()
    )
    names = {n for n in (main, *required, *both) if n in takes and n in known}
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        names.add("decoder_input_ids")
    if "bbox" in takes:
        names.add("bbox")
    for wanted in (
        names,
        names - {"pixel_values"},
        {"input_ids"} & set(takes),
        {"pixel_values"} & set(takes),
    ):
        order = sorted(wanted)
        for values in itertools.product(*(known[n] for n in order)) if wanted else ():
            batch = dict(zip(order, values, strict=True))
            if "input_ids" in batch and "attention_mask" in takes:
                yield {**batch, "attention_mask": mask}
            yield batch


def with_images(model: Any) -> Iterator[dict[str, Any]]:
    """Batches of text and images for a model that puts an image's features in the places of a token
    of its own.

    How many places an image takes, and whether its pixels have an axis of images, is found by
    trying.
    """
    import inspect

    import torch

    torch.manual_seed(2)
    takes = inspect.signature(model.forward).parameters
    token = settings_of(model, "image_token_id", settings_of(model, "image_token_index", None))
    if type(token) is not int or not {"input_ids", "pixel_values"} <= set(takes):
        return
    size = getattr(getattr(model.config, "vision_config", None), "image_size", IMAGE)
    size = size if isinstance(size, int) and size < 512 else IMAGE
    pixels = torch.randn(EXAMPLES, 3, size, size)
    ids = torch.randint(4, VOCABULARY - 4, (EXAMPLES, TOKENS))
    more = {"image_sizes": torch.full((EXAMPLES, 2), size)} if "image_sizes" in takes else {}
    for n_places, values in itertools.product(range(1, 41), (pixels, pixels[:, None])):
        mixed = torch.cat([ids[:, :2], torch.full((EXAMPLES, n_places), token), ids[:, 2:]], 1)
        mask = torch.ones_like(mixed)
        mask[-1, -2:] = 0
        yield {"input_ids": mixed, "pixel_values": values, "attention_mask": mask, **more}


def built(model_type: str) -> tuple[Any, Any]:
    """A tiny model and a batch that it runs on.

    Raises:
        ValueError: none of the configurations and batches that were tried does.
    """
    import torch

    from headprune.model.running import call, outputs

    problems: list[Exception] = []
    try:
        for model in models(model_type):
            if sum(p.numel() for p in model.parameters()) > 20_000_000:
                problems.append(ValueError("more than 20 million parameters after shrinking"))
                continue
            for batch in itertools.chain(with_images(model), examples(model)):
                try:
                    with torch.no_grad():
                        if outputs(call(model, batch)):
                            return model, batch
                except Exception as error:  # noqa: PERF203
                    problems.append(error)
    except Exception as error:
        problems.append(error)
    first = problems[0] if problems else ValueError("no batch")
    raise ValueError(f"{type(first).__name__}: {' '.join(str(first).split())[:200]}")
