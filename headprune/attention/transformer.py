"""An encoder-decoder Transformer for translation, built on ``MultiHeadAttention`` and called like
Transformers' own.

It is a ``PreTrainedModel``: ``generate`` decodes it greedily or with beams and a KV cache, folders
hold it like any other, and every verb takes it. The three kinds of attention are told apart:
``self`` in the encoder, ``causal`` and ``cross`` in the decoder.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from headprune.attention.multi_head import MultiHeadAttention
from headprune.core.errors import InvalidValue
from headprune.core.heads import Kind


@strict
class TransformerConfig(PreTrainedConfig):
    """Sizes of a ``TransformerForTranslation``.

    Args:
        vocab_size: Tokens of the one vocabulary that both languages share.
        d_model: Width of the residual stream.
        ffn_dim: Width inside the feed-forward layers.
        encoder_layers, decoder_layers: Layers.
        num_attention_heads: Heads of every attention.
        dropout: Of embeddings, of what each sub-layer adds, and inside the feed-forward layers.
        attention_dropout: Of attention weights.
    """

    model_type: ClassVar[str] = "headprune_transformer"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "decoder_layers",
    }

    vocab_size: int = 8000
    d_model: int = 256
    ffn_dim: int = 1024
    encoder_layers: int = 6
    decoder_layers: int = 6
    num_attention_heads: int = 8
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True


class _Cached:
    """One layer of a Transformers cache, as ``MultiHeadAttention`` takes it."""

    def __init__(self, cache: Any, layer: int) -> None:
        self.cache, self.layer = cache, layer

    @property
    def length(self) -> int:
        """Positions held; the shape tells, because Transformers takes keys of no head for no
        keys."""
        layers = self.cache.layers
        keys = layers[self.layer].keys if self.layer < len(layers) else None
        return 0 if keys is None else int(keys.shape[-2])

    def append_(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.cache.update(keys, values, self.layer)
        return found


class TransformerLayer(nn.Module):
    """``x + f(norm(x))`` for each sub-layer f: self-attention, in a decoder cross-attention, and
    feed-forward.

    The norm comes first (Xiong et al. 2020, section 3.3), where Vaswani et al. 2017 have it last:
    such a model trains without a long warm-up. ``GELU`` in place of ``ReLU``.
    """

    def __init__(self, config: TransformerConfig, decodes: bool) -> None:
        super().__init__()
        width = config.d_model
        self.decodes = decodes
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = _attention(config, "causal" if decodes else "self")
        if decodes:
            self.cross_norm = nn.LayerNorm(width)
            self.cross_attention = _attention(config, "cross")
        self.feed_forward_norm = nn.LayerNorm(width)
        inside = (nn.Linear(width, config.ffn_dim), nn.GELU(), nn.Dropout(config.dropout))
        self.feed_forward = nn.Sequential(*inside, nn.Linear(config.ffn_dim, width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        caches: tuple[_Cached, _Cached] | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            x: ``[batch, tokens, width]``.
            mask: Boolean ``[batch, 1, 1, tokens]``, the keys that are no padding; with a cache, of
                all tokens so far.
            memory: ``[batch, source tokens, width]``, what the encoder returned; for a decoder.
            memory_mask: Its mask.
            caches: Of self-attention and of cross-attention. The latter is filled at the first step
                and then read.
        """
        own, across = caches or (None, None)
        y = self.self_norm(x)
        x = x + self.dropout(self.self_attention(y, mask=mask, causal=self.decodes, cache=own))
        if self.decodes:
            assert memory is not None
            # Keys of earlier steps are all that there are: nothing is left to project.
            keys = memory[:, :0] if across is not None and across.length else memory
            y = self.cross_norm(x)
            x = x + self.dropout(self.cross_attention(y, keys, mask=memory_mask, cache=across))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


def _attention(config: TransformerConfig, kind: Kind) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.d_model, config.num_attention_heads, dropout=config.attention_dropout, kind=kind
    )


class TransformerStack(nn.Module):
    """Tokens in, a normed stream out: embeddings, sinusoidal positions (Vaswani et al. 2017,
    section 3.5), layers."""

    main_input_name = "input_ids"

    def __init__(self, config: TransformerConfig, embedding: nn.Embedding, decodes: bool) -> None:
        super().__init__()
        self.embedding = embedding
        n_layers = config.decoder_layers if decodes else config.encoder_layers
        self.layers = nn.ModuleList(TransformerLayer(config, decodes) for _ in range(n_layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        **options: Any,
    ) -> BaseModelOutput:
        """The last hidden state, ``[batch, tokens, width]``."""
        _check_options(options)
        pair = (
            (cache.self_attention_cache, cache.cross_attention_cache) if cache is not None else None
        )
        caches = [
            (_Cached(pair[0], i), _Cached(pair[1], i)) if pair else None
            for i in range(len(self.layers))
        ]
        past = caches[0][0].length if caches and caches[0] else 0
        width = self.embedding.embedding_dim
        x = self.embedding(input_ids) * math.sqrt(width)
        x = self.dropout(x + positions(past, input_ids.shape[1], width, x))
        mask, memory_mask = _keys(attention_mask), _keys(memory_mask)
        for layer, held in zip(self.layers, caches, strict=True):
            x = layer(x, mask, memory, memory_mask, held)
        return BaseModelOutput(last_hidden_state=self.norm(x))


def positions(start: int, length: int, width: int, like: Tensor) -> Tensor:
    """``[length, width]``: sines and, behind them, cosines of position / 10000^(2i / width), from
    ``start`` on."""
    half = (width + 1) // 2
    place = torch.arange(start, start + length, device=like.device, dtype=torch.float32)[:, None]
    rate = torch.exp(
        torch.arange(half, device=like.device, dtype=torch.float32) * (-math.log(10000.0) / half)
    )
    return torch.cat([(place * rate).sin(), (place * rate).cos()], 1)[:, :width].to(like.dtype)


def _keys(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, None, None, :].bool()


def _check_options(options: dict[str, Any]) -> None:
    """Transformers passes what it was asked for; what is not there is refused and not left out."""
    for name, value in options.items():
        if value is not None and value is not False and name not in ("return_dict", "use_cache"):
            hint = (
                "Attention weights come from MultiHeadAttention(need_weights=True)."
                if "attent" in name
                else ""
            )
            raise InvalidValue(f"TransformerForTranslation: {name}", "left out", repr(value), hint)


class TransformerForTranslation(PreTrainedModel, GenerationMixin):
    """An encoder-decoder whose source, target and output embeddings are one matrix (Vaswani et al.
    2017, section 3.4).

    Called with a source and labels it makes the decoder's inputs from the labels, as Transformers'
    own do. It returns logits and no loss: ``headprune.model.losses.default_loss`` has one an
    example.

    >>> sizes = {
    ...     "vocab_size": 20,
    ...     "d_model": 8,
    ...     "ffn_dim": 8,
    ...     "encoder_layers": 1,
    ...     "decoder_layers": 1,
    ... }
    >>> model = TransformerForTranslation(TransformerConfig(**sizes, num_attention_heads=2)).eval()
    >>> model(torch.tensor([[5, 6, 2]]), labels=torch.tensor([[7, 2]])).logits.shape
    torch.Size([1, 2, 20])
    """

    config_class = TransformerConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "decoder.embedding.weight": "encoder.embedding.weight",
        "lm_head.weight": "encoder.embedding.weight",
    }

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = TransformerStack(config, embedding, decodes=False)
        self.decoder = TransformerStack(config, embedding, decodes=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) or module is self.lm_head:
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool = False,
        **options: Any,
    ) -> Seq2SeqLMOutput:
        """Logits ``[batch, target tokens, vocabulary]`` of every next token.

        Args:
            input_ids: Source tokens ``[batch, source tokens]``; not needed with
                ``encoder_outputs``.
            attention_mask: 0 where the source is padding.
            decoder_input_ids: Target tokens, one to the right; made from ``labels`` where left out.
            decoder_attention_mask: 0 where they are padding; with a cache, of all tokens so far.
            labels: Target tokens, -100 at padding.
            encoder_outputs: What ``encoder`` returned, to use it again.
            past_key_values: Keys and values of the tokens before these.
            use_cache: Begin a cache where none is given.
            options: What Transformers hands on; attention weights and hidden states are not
                returned.

        Raises:
            InvalidValue: no source, no target, a static cache, or an option that is not there.
        """
        _check_options(options)
        if decoder_input_ids is None:
            decoder_input_ids = self._shifted(labels)
        if encoder_outputs is None:
            if input_ids is None:
                raise InvalidValue(
                    "TransformerForTranslation", "given input_ids or encoder_outputs", "neither"
                )
            encoder_outputs = self.encoder(input_ids, attention_mask)
        memory = encoder_outputs[0]
        if past_key_values is None and use_cache:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if past_key_values is not None and past_key_values.self_attention_cache.is_compileable:
            hint = "Leave cache_implementation out."
            raise InvalidValue(
                "past_key_values", "a cache that grows with the tokens", "a static one", hint
            )
        asked = (decoder_input_ids, decoder_attention_mask, memory, attention_mask, past_key_values)
        logits = self.lm_head(self.decoder(*asked).last_hidden_state)
        return Seq2SeqLMOutput(
            logits=logits, past_key_values=past_key_values, encoder_last_hidden_state=memory
        )

    def _shifted(self, labels: Tensor | None) -> Tensor:
        """The decoder's inputs: the start token, then the labels but for the last."""
        if labels is None:
            raise InvalidValue(
                "TransformerForTranslation", "given decoder_input_ids or labels", "neither"
            )
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        return torch.cat(
            [start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, self.config.pad_token_id)], 1
        )


AutoConfig.register(TransformerConfig.model_type, TransformerConfig)
AutoModelForSeq2SeqLM.register(TransformerConfig, TransformerForTranslation)
