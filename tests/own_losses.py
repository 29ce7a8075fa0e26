"""Every class of Transformers that gives a loss, tiny, with a batch: to compare the default loss
with."""

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

#: Sizes, and the names that configurations have for them.
_SIZES = [
    (60, "vocab_size text_vocab_size"),
    (32, "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size n_embed"),
    (2, "num_hidden_layers n_layer n_layers num_layers num_blocks depth latent_layers"),
    (2, "encoder_layers decoder_layers num_decoder_layers decoder_num_hidden_layers"),
    (2, "encoder_num_hidden_layers num_encoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads num_key_value_heads num_kv_heads"),
    (4, "encoder_attention_heads decoder_attention_heads attention_heads"),
    (4, "encoder_num_attention_heads decoder_num_attention_heads"),
    (4, "encoder_num_key_value_heads decoder_num_key_value_heads"),
    (48, "intermediate_size d_inner d_ff hidden_dim ffn_dim moe_intermediate_size mlp_dim"),
    (48, "encoder_ffn_dim decoder_ffn_dim shared_expert_intermediate_size"),
    (8, "head_dim rotary_dim d_kv attention_head_size qk_nope_head_dim v_head_dim"),
    (128, "max_position_embeddings n_positions max_source_positions max_target_positions"),
    (0, "pad_token_id"),
    (1, "bos_token_id decoder_start_token_id cls_token_id"),
    (2, "eos_token_id sep_token_id"),
    (0.3, "initializer_range init_std init_range initializer_factor"),
    (4, "num_local_experts num_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok"),
    (32, "image_size projection_dim out_hidden_size output_dim"),
    (8, "patch_size"),
]
SMALL = {name: size for size, names in _SIZES for name in names.split()}
#: Configurations of models that rotate by three positions, and do not say by how much each.
THREE_POSITIONS = ("Qwen2VLTextConfig", "Qwen2_5_VLTextConfig", "PaddleOCRTextConfig")

#: Parameters of the largest model that is still tried.
MOST = 12_000_000

#: By Transformers' mapping what kind of labels its classes take.
TASKS = {
    "CAUSAL_LM": "next",
    "IMAGE_TEXT_TO_TEXT": "next",
    "MULTIMODAL_LM": "next",
    "MASKED_LM": "tokens",
    "PRETRAINING": "tokens",
    "SEQ_TO_SEQ_CAUSAL_LM": "seq2seq",
    "SPEECH_SEQ_2_SEQ": "seq2seq",
    "SEQUENCE_CLASSIFICATION": "class",
    "IMAGE_CLASSIFICATION": "class",
    "AUDIO_CLASSIFICATION": "class",
    "VIDEO_CLASSIFICATION": "class",
    "TOKEN_CLASSIFICATION": "token class",
    "QUESTION_ANSWERING": "span",
    "MULTIPLE_CHOICE": "choice",
    "NEXT_SENTENCE_PREDICTION": "class",
}


def classes(task):
    """The classes of one of Transformers' mappings that stand in no mapping before it."""
    found = {}
    for mapping in TASKS:
        for value in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).values():
            for name in (value,) if isinstance(value, str) else value:
                found.setdefault(name, mapping)
    return [name for name, mapping in found.items() if mapping == task]


def build(name):
    """A tiny random model of a class.

    Raises:
        Exception: whatever the class makes of such numbers; or it is too large all the same.
    """
    kind = getattr(transformers, name)
    config = _small(kind.config_class)
    if name.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > MOST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = kind(config).eval()
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    return model


def _small(kind):
    """A configuration of a class with small numbers in it and in the configurations that are in
    it."""
    config = kind()
    given = {name: value for name, value in SMALL.items() if _takes(config, name)}
    for name, of in (getattr(kind, "sub_configs", None) or {}).items():
        now = getattr(config, name, None)
        sub = of if now is None else type(now)
        if hasattr(sub, "model_type") and sub.__name__ != "AutoConfig":
            given[name] = _small(sub).to_dict()
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and ("mrope_section" in rope or kind.__name__ in THREE_POSITIONS):
        given["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    return kind(**given)


def _takes(config, name):
    """Whether it has such a number, or leaves the number of a token open."""
    try:
        now = getattr(config, name)
        setattr(config, name, now)
    except Exception:  # one a layer, or one that is not to be set
        return False
    return (isinstance(now, (int, float)) and not isinstance(now, bool)) or (
        now is None and name == "pad_token_id"
    )


def batch_for(model, task):
    """Two examples of what a class takes, with labels, of which not as many count in both."""
    draw = torch.Generator().manual_seed(1)
    batch = _inputs(str(getattr(model, "main_input_name", "input_ids")), draw)
    if task == "VIDEO_CLASSIFICATION":
        batch = {"pixel_values": torch.randn(2, model.config.num_frames, 3, 32, 32, generator=draw)}
    kind = TASKS[task]
    if kind == "next":
        batch["labels"] = batch["input_ids"].clone() if "input_ids" in batch else _tokens(draw)
        batch["labels"][0, :3] = -100
    elif kind == "tokens":
        batch["labels"] = _tokens(draw)
        batch["labels"][0, 5:] = -100
    elif kind == "seq2seq":
        batch["labels"] = _tokens(draw)
    elif kind == "token class":
        batch["labels"] = torch.randint(0, 2, (2, 10), generator=draw)
    elif kind == "span":
        batch |= {"start_positions": torch.tensor([2, 5]), "end_positions": torch.tensor([4, 6])}
    elif kind == "choice":
        batch = {name: torch.stack([values, values.flip(-1)], 1) for name, values in batch.items()}
        batch["labels"] = torch.tensor([1, 0])
    else:
        batch["labels"] = torch.tensor([1, 0])
    if hasattr(model.config, "layer_types"):
        batch["use_cache"] = False  # two layers may all be of a kind that the cache asks nothing
    return batch


def one(batch, number):
    """An example of a batch alone."""
    return {k: v[number : number + 1] if isinstance(v, Tensor) else v for k, v in batch.items()}


def _inputs(main, draw):
    if main == "pixel_values":
        return {main: torch.randn(2, 3, 32, 32, generator=draw)}
    if main == "input_values":
        return {main: torch.randn(2, 2000, generator=draw)}
    if main == "input_features":
        return {main: torch.randn(2, 80, 100, generator=draw)}
    ids = _tokens(draw)
    ids[:, -1] = 2  # Bart's classifiers look for the end
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _tokens(draw):
    return torch.randint(3, 50, (2, 10), generator=draw)
