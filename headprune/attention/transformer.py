"""An encoder-decoder Transformer for translation, built on ``MultiHeadAttention``.

It is a ``PreTrainedModel``: ``generate``, ``save_pretrained`` and every verb of this package work
on it. Its attentions have the three kinds: ``self`` in the encoder, ``causal`` and ``cross`` in the
decoder.
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
        dropout: Of embeddings, of each sub-layer's output, and inside the feed-forward layers.
        attention_dropout: Of attention weights.
    """

    model_type: ClassVar[str] = "headprune_transformer"
    # Names that Transformers reads in any configuration, for caches among others.
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
    """One layer of a Transformers cache, with the methods that ``MultiHeadAttention`` uses."""

    def __init__(self, cache: Any, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    @property
    def length(self) -> int:
        """Positions held."""
        # From the shape, because Transformers counts no positions for keys without heads.
        layers = self.cache.layers
        if self.layer >= len(layers) or layers[self.layer].keys is None:
            return 0
        return int(layers[self.layer].keys.shape[-2])

    def append_(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        held: tuple[Tensor, Tensor] = self.cache.update(keys, values, self.layer)
        return held


class FeedForward(nn.Sequential):
    """Two linear layers around ``GELU``.

    Args:
        width: Of the residual stream.
        neurons: Width inside.
        dropout: Of the neurons.
    """

    #: By which its layout knows it from any other four modules in a row.
    is_feed_forward: ClassVar[bool] = True

    def __init__(self, width: int, neurons: int, dropout: float) -> None:
        up, down = nn.Linear(width, neurons), nn.Linear(neurons, width)
        super().__init__(up, nn.GELU(), nn.Dropout(dropout), down)


class TransformerLayer(nn.Module):
    """Self-attention, in a decoder cross-attention, and feed-forward: each adds ``f(norm(x))``.

    The norm comes first (Xiong et al. 2020, section 3.3), not last as in Vaswani et al. 2017, so
    that the model trains without a long warm-up. ``GELU`` replaces ``ReLU``.
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
        self.feed_forward = FeedForward(width, config.ffn_dim, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        caches: tuple[_Cached, _Cached] | None = None,
    ) -> Tensor:
        """Run one layer.

        Args:
            x: ``[batch, tokens, width]``.
            mask: Boolean ``[batch, 1, 1, tokens]``, the keys that are no padding; with a cache, of
                all tokens so far.
            memory: ``[batch, source tokens, width]``, the encoder's output; for a decoder.
            memory_mask: Its mask.
            caches: Of self-attention and of cross-attention. The latter is filled at the first step
                and then read.

        Returns:
            ``[batch, tokens, width]``.
        """
        own, across = caches or (None, None)

        # 1. Self-attention.
        y = self.self_norm(x)
        x = x + self.dropout(self.self_attention(y, mask=mask, causal=self.decodes, cache=own))

        # 2. Cross-attention.
        if self.decodes:
            assert memory is not None
            keys = memory
            if across is not None and across.length:
                keys = memory[:, :0]  # the cache has all keys, so none is projected
            y = self.cross_norm(x)
            x = x + self.dropout(self.cross_attention(y, keys, mask=memory_mask, cache=across))

        # 3. Feed-forward.
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


def _attention(config: TransformerConfig, kind: Kind) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.d_model, config.num_attention_heads, dropout=config.attention_dropout, kind=kind
    )


class TransformerStack(nn.Module):
    """Embeddings, sinusoidal positions (Vaswani et al. 2017, section 3.5), layers and a norm."""

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
        """Return the last hidden state, ``[batch, tokens, width]``."""
        _check_options(options)
        caches: list[tuple[_Cached, _Cached] | None] = [None] * len(self.layers)
        past = 0  # tokens in the cache
        if cache is not None:
            for i in range(len(self.layers)):
                own = _Cached(cache.self_attention_cache, i)
                across = _Cached(cache.cross_attention_cache, i)
                caches[i] = (own, across)
            if self.layers:
                past = _Cached(cache.self_attention_cache, 0).length
        # Embeddings are scaled as in Vaswani et al. 2017, section 3.4.
        width = self.embedding.embedding_dim
        x = self.embedding(input_ids) * math.sqrt(width)
        x = self.dropout(x + positions(past, input_ids.shape[1], width, x))
        mask = _keys(attention_mask)
        memory_mask = _keys(memory_mask)
        for layer, pair in zip(self.layers, caches, strict=True):
            x = layer(x, mask, memory, memory_mask, pair)
        return BaseModelOutput(last_hidden_state=self.norm(x))


def positions(start: int, length: int, width: int, like: Tensor) -> Tensor:
    """Return position codes ``[length, width]`` from position ``start`` on.

    Sines of ``position / 10000^(2i / width)``, then their cosines.
    """
    half = (width + 1) // 2
    options: Any = {"device": like.device, "dtype": torch.float32}
    place = torch.arange(start, start + length, **options)[:, None]  # [length, 1]
    rate = torch.exp(torch.arange(half, **options) * (-math.log(10000.0) / half))  # [half]
    angle = place * rate
    # An odd width drops the last cosine.
    return torch.cat([angle.sin(), angle.cos()], 1)[:, :width].to(like.dtype)


def _keys(mask: Tensor | None) -> Tensor | None:
    """Turn a padding mask ``[batch, keys]`` into ``[batch, 1, 1, keys]``, True where visible."""
    if mask is None:
        return None
    return mask[:, None, None, :].bool()


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options of Transformers that this model does not have."""
    for name, value in options.items():
        if value is not None and value is not False and name not in ("return_dict", "use_cache"):
            hint = ""
            if "attent" in name:
                hint = "Attention weights come from MultiHeadAttention(need_weights=True)."
            raise InvalidValue(f"TransformerForTranslation: {name}", "left out", repr(value), hint)


class TransformerForTranslation(PreTrainedModel, GenerationMixin):
    """An encoder-decoder with one matrix for source, target and output embeddings.

    See Vaswani et al. 2017, section 3.4. Called with a source and labels it makes the decoder's
    inputs from the labels, as models of Transformers do. It returns logits and no loss:
    ``headprune.model.losses.default_loss`` computes one per example.

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
        # One matrix is embedding and output layer, so both get the embedding's distribution.
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
        """Compute the logits ``[batch, target tokens, vocabulary]`` of every next token.

        Args:
            input_ids: Source tokens ``[batch, source tokens]``; not needed with
                ``encoder_outputs``.
            attention_mask: 0 where the source is padding.
            decoder_input_ids: Target tokens, one to the right; made from ``labels`` where left out.
            decoder_attention_mask: 0 where they are padding; with a cache, of all tokens so far.
            labels: Target tokens, -100 at padding.
            encoder_outputs: The output of ``encoder``, to use it again.
            past_key_values: Keys and values of earlier tokens.
            use_cache: Begin a cache where none is given.
            options: Other options of Transformers; asking for attention weights or hidden states is
                refused.

        Raises:
            InvalidValue: no source, no target, a static cache, or an unknown option.
        """
        # 1. Inputs of the decoder and output of the encoder.
        _check_options(options)
        if decoder_input_ids is None:
            decoder_input_ids = self._shifted(labels)
        if encoder_outputs is None:
            if input_ids is None:
                raise InvalidValue(
                    "TransformerForTranslation", "given input_ids or encoder_outputs", "neither"
                )
            encoder_outputs = self.encoder(input_ids, attention_mask)
        memory = encoder_outputs[0]  # [batch, source tokens, width]

        # 2. The cache.
        if past_key_values is None and use_cache:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if past_key_values is not None and past_key_values.self_attention_cache.is_compileable:
            hint = "Leave cache_implementation out."
            raise InvalidValue(
                "past_key_values", "a cache that grows with the tokens", "a static one", hint
            )

        # 3. Decode.
        decoded = self.decoder(
            decoder_input_ids, decoder_attention_mask, memory, attention_mask, past_key_values
        )
        logits = self.lm_head(decoded.last_hidden_state)
        return Seq2SeqLMOutput(
            logits=logits, past_key_values=past_key_values, encoder_last_hidden_state=memory
        )

    def _shifted(self, labels: Tensor | None) -> Tensor:
        """Return the decoder's inputs: the start token, then all labels but the last."""
        if labels is None:
            raise InvalidValue(
                "TransformerForTranslation", "given decoder_input_ids or labels", "neither"
            )
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        earlier = labels[:, :-1]
        earlier = earlier.masked_fill(earlier == -100, self.config.pad_token_id)
        return torch.cat([start, earlier], 1)


# So that `from_pretrained` of Transformers' Auto classes knows the model.
AutoConfig.register(TransformerConfig.model_type, TransformerConfig)
AutoModelForSeq2SeqLM.register(TransformerConfig, TransformerForTranslation)
