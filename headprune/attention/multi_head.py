"""Our own multi-head attention: separate W_q, W_k, W_v and W_o, and a gate on every head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from headprune.attention.attend import attend, repeated
from headprune.attention.cache import Cache
from headprune.attention.compatibility import resolve_compatibility
from headprune.attention.convert import from_heads, from_torch, to_torch
from headprune.attention.kept_heads import check_heads, say_heads, store_heads_
from headprune.attention.linear import Axis, cut_features, replace_features_
from headprune.attention.masks import join_masks
from headprune.core.errors import InvalidValue, UnsupportedModel, check_one_of
from headprune.core.heads import ATTENTION_KINDS, AttentionSite, Kind, Policy
from headprune.core.indices import indices
from headprune.core.layout import GATES_ATTRIBUTE, STATE_ATTRIBUTE, HeadState
from headprune.core.slabs import HeadGeometry, kept_rows, used_groups

if TYPE_CHECKING:
    from typing_extensions import Self


@final
class MultiHeadAttention(nn.Module):
    """Multi-head attention with a gate on every head, whose heads can be removed.

    ``h_i = g_i · f(W_i^q q, W_i^k k, W_i^v v)``; the output is ``W_o [h_1; ...; h_h]``. Vaswani et
    al. 2017, section 3.2.2; gates: Michel et al. 2019, section 2.3. Consecutive query heads share a
    key/value head (Ainslie et al. 2023).

    Args:
        query_size: Width of the queries.
        n_heads: Query heads.
        key_size: Of the keys; default ``query_size``.
        value_size: Of the values; default ``key_size``.
        output_size: Of the output; default ``query_size``.
        head_dim: Width of a query or key head; default ``query_size / n_heads``.
        value_dim: Width of a value head; default ``head_dim``.
        n_kv_heads: A divisor of ``n_heads``, its default.
        bias: Of W_q, W_k and W_v.
        output_bias: Of W_o; default ``bias``.
        dropout: Of attention weights.
        batch_first: ``[batch, length, width]``; otherwise ``[length, batch, width]``.
        compatibility: ``scaled_dot_product``, ``additive`` or a callable.
        kind: ``self``, ``causal`` or ``cross``; it hides no key.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        InvalidValue: wrong sizes.
        UnknownName: an unknown ``compatibility``.

    >>> attention = MultiHeadAttention(100, n_heads=5).eval()
    >>> queries, keys = torch.ones(2, 4, 100), torch.ones(2, 6, 100)
    >>> attention(queries, keys, valid_lens=torch.tensor([3, 2])).shape
    torch.Size([2, 4, 100])
    >>> attention.prune_heads_(keep=[1, 3])
    (0, 2, 4)
    >>> attention.heads, attention.W_q
    ((1, 3), Linear(in_features=100, out_features=40, bias=True))
    """

    # Row blocks of W_q.weight are the heads' matrices W_i^q [head_dim, query_size], and so for W_k
    # and W_v. Head i reads the columns i * value_dim to (i + 1) * value_dim of W_o.weight.
    # Head counts are read from `n_heads` and `n_kv_heads` at every call, so weights cut from
    # outside work where these attributes are updated too.

    def __init__(
        self,
        query_size: int,
        n_heads: int,
        *,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        n_kv_heads: int | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
        compatibility: str | Callable[..., Tensor] = "scaled_dot_product",
        kind: Kind = "self",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if n_heads < 1:
            raise InvalidValue(
                "n_heads", "at least 1", n_heads, "Heads can all be removed later, by prune_heads_."
            )
        if head_dim is None and query_size % n_heads:
            hint = "Or give head_dim."
            raise InvalidValue("query_size", f"a multiple of n_heads = {n_heads}", query_size, hint)
        if not 0 <= dropout < 1:
            raise InvalidValue("dropout", "a probability, 0 <= dropout < 1", dropout)
        check_one_of("kind", kind, ATTENTION_KINDS)
        self.kind = kind
        self.n_heads = n_heads
        self.n_kv_heads = _or(n_kv_heads, n_heads)
        self.head_dim = _or(head_dim, query_size // n_heads)
        self.value_dim = _or(value_dim, self.head_dim)
        # Refuses head counts that do not fit each other.
        HeadGeometry(self.n_heads, self.n_kv_heads, self.head_dim, self.value_dim)
        self.dropout = dropout
        self.batch_first = batch_first
        self.compatibility = resolve_compatibility(compatibility, self.head_dim, device, dtype)
        key_size = _or(key_size, query_size)
        value_size = _or(value_size, key_size)
        output_size = _or(output_size, query_size)
        output_bias = bias if output_bias is None else output_bias

        def linear(n_in: int, n_out: int, bias: bool) -> nn.Linear:
            return nn.Linear(n_in, n_out, bias, device, dtype)

        self.W_q = linear(query_size, self.n_heads * self.head_dim, bias)
        self.W_k = linear(key_size, self.n_kv_heads * self.head_dim, bias)
        self.W_v = linear(value_size, self.n_kv_heads * self.value_dim, bias)
        self.W_o = linear(self.n_heads * self.value_dim, output_size, output_bias)

    @property
    def heads(self) -> tuple[int, ...]:
        """Original indices of the heads that are present."""
        state = getattr(self, STATE_ATTRIBUTE, None)
        return tuple(range(self.n_heads)) if state is None else state.heads

    @property
    def geometry(self) -> HeadGeometry:
        """Present head counts and widths, and which heads share a key/value head."""
        state = getattr(self, STATE_ATTRIBUTE, None)
        if state is None or state.n_query_heads == state.n_kv_heads:
            return HeadGeometry(self.n_heads, self.n_kv_heads, self.head_dim, self.value_dim)
        # Grouped heads: the groups follow from the original indices.
        whole = HeadGeometry(state.n_query_heads, state.n_kv_heads, self.head_dim, self.value_dim)
        return whole.keep(state.heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        valid_lens: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        hide_self: bool = False,
        gates: Tensor | None = None,
        need_weights: bool = False,
        cache: Cache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from ``query`` to ``key``; a query that may see no key gets zeros from every head.

        Shapes are batch-first here; ``heads`` are the present ones. Of several masks, all must
        allow a key.

        Args:
            query: ``[batch, queries, query_size]``.
            key: ``[batch, keys, key_size]``; None is ``query``, self-attention.
            value: ``[batch, keys, value_size]``; None is ``key``.
            valid_lens: Integers ``[batch]`` or ``[batch, queries]``: how many keys are seen,
                from the first.
            mask: Boolean, broadcastable to ``[batch, heads, queries, keys]``; True may be seen.
            causal: A query sees its own position and earlier ones; the queries are the last
                positions of the keys.
            hide_self: A query does not see its own position.
            gates: ``[heads]`` or ``[batch, heads]``, one factor per head, differentiable; None
                costs nothing.
            need_weights: Return the attention weights before dropout too; this is slower.
            cache: Keys and values of earlier steps; this call's are appended. ``keys`` in the
                shapes above counts all.

        Returns:
            ``[batch, queries, output_size]``; with ``need_weights`` also
            ``[batch, heads, queries, keys]``.

        Raises:
            InvalidValue: a wrong shape or dtype, or lengths out of range.
        """
        # 1. Inputs, batch-first.
        if key is None:
            key = query
        if value is None:
            value = key
        to_itself = key is query and cache is None
        self._check(query, key, value)
        if not self.batch_first:
            query = query.transpose(0, 1)
            key = key.transpose(0, 1)
            value = value.transpose(0, 1)

        # 2. One mask. In a trace sizes are tensors, so nothing is added in place.
        batch, queries = query.shape[:2]
        keys = key.shape[1]
        if cache is not None:
            keys = keys + cache.length
        shape = (batch, self.n_heads, queries, keys)
        joined = join_masks(shape, query.device, valid_lens, mask, causal, hide_self, to_itself)
        if gates is not None:
            self._check_gates(gates, batch)
        if self.n_heads == 0:
            return self._no_heads(query, key, keys, cache, need_weights)

        # 3. Attend.
        q, k, v, group = self._projected(query, key, value, cache)
        dropout = self.dropout if self.training else 0.0
        context, weights = attend(
            q, k, v, self.compatibility, joined, self.heads, dropout, need_weights, group
        )

        # 4. Gates and output projection.
        context = context.transpose(1, 2)  # [batch, queries, heads, value_dim]
        if gates is not None:
            # Never skipped for gates of one: they must still carry their gradient.
            context = context * gates.to(context.dtype).reshape(-1, 1, self.n_heads, 1)
        # W_o is called batch-first and as a module: gates from outside multiply its input.
        output = self.W_o(context.flatten(2))
        if not self.batch_first:
            output = output.transpose(0, 1)
        return output if weights is None else (output, weights)

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Project to heads, with the keys and values of the cache.

        Returns:
            ``[batch, heads, queries, head_dim]``, ``[batch, kv_heads, keys, head_dim]``,
            ``[batch, kv_heads, keys, value_dim]``, and query heads per key/value head.
        """
        q = self.W_q(query).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)
        k = self.W_k(key).unflatten(-1, (self.n_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.W_v(value).unflatten(-1, (self.n_kv_heads, self.value_dim)).transpose(1, 2)
        if cache is not None:
            k, v = cache.append_(k, v)
        state = getattr(self, STATE_ATTRIBUTE, None)
        if state is not None and state.uneven:
            # Groups of different sizes. The cache stays compact; attention gets one key per query
            # head.
            return q, repeated(k, state.uneven), repeated(v, state.uneven), 1
        return q, k, v, self.n_heads // self.n_kv_heads

    def _no_heads(
        self, query: Tensor, key: Tensor, keys: int, cache: Cache | None, need_weights: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return W_o's bias or zeros for every query, without any matrix product."""
        batch, queries = query.shape[:2]
        if cache is not None:
            # The cache still counts positions.
            shape = (batch, 0, key.shape[1])
            no_keys = key.new_zeros(*shape, self.head_dim)
            no_values = key.new_zeros(*shape, self.value_dim)
            cache.append_(no_keys, no_values)
        length = (batch, queries) if self.batch_first else (queries, batch)
        output = query.new_zeros(*length, self.W_o.out_features)
        if self.W_o.bias is not None:
            output = output + self.W_o.bias
        if need_weights:
            return output, query.new_zeros(batch, 0, queries, keys)
        return output

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        # In a trace sizes are tensors, which cannot be compared.
        if torch.jit.is_tracing():
            return
        axes = "[batch, length, {}]" if self.batch_first else "[length, batch, {}]"
        for name, x, projection in (
            ("query", query, self.W_q),
            ("key", key, self.W_k),
            ("value", value, self.W_v),
        ):
            if x.dim() != 3 or x.shape[-1] != projection.in_features:
                must = f"of shape {axes.format(projection.in_features)}"
                raise InvalidValue(name, must, list(x.shape))
        if key.shape[:2] != value.shape[:2]:
            must = f"as long as key, {list(key.shape[:2])}"
            raise InvalidValue("value", must, list(value.shape[:2]))
        batch = 0 if self.batch_first else 1
        if query.shape[batch] != key.shape[batch]:
            must = f"of query's batch size {query.shape[batch]}"
            raise InvalidValue("key", must, key.shape[batch])

    def _check_gates(self, gates: Tensor, batch: int) -> None:
        if not isinstance(gates, Tensor) or not gates.is_floating_point():
            got = getattr(gates, "dtype", type(gates).__name__)
            raise InvalidValue(
                "gates", "a floating-point tensor", got, "Convert a mask with `.float()`."
            )
        shapes = ((self.n_heads,), (batch, self.n_heads))
        if not torch.jit.is_tracing() and tuple(gates.shape) not in shapes:
            must = (
                f"of shape [heads] = {[self.n_heads]} or [batch, heads] = {[batch, self.n_heads]}"
            )
            hint = "There is one gate for each head that is present, see `heads`."
            raise InvalidValue("gates", must, list(gates.shape), hint)

    def prune_heads_(self, keep: Iterable[int], policy: Policy = "group") -> tuple[int, ...]:
        """Remove every head that is not in ``keep`` from the weights, in place.

        The output width, dtype, device and ``requires_grad`` do not change. Without heads the
        module returns W_o's bias, or zeros. An optimizer made before holds the old parameters.

        Args:
            keep: Original indices of the kept heads, in any order.
            policy: Which query heads that share a key/value head may be removed: whole groups
                (``group``), the same number in every kept group (``balanced``), or any (``free``).
                A key/value head is removed with the last query head that reads it.

        Returns:
            Original indices of the removed heads.

        Raises:
            UnknownName: a head that is not present.
            InvalidValue: no indices, or a part of a group.
            UnsupportedModel: a projection that is quantised, parametrised or wrapped; nothing has
                been changed then.
        """
        # 1. The heads to keep, as positions among the present ones.
        present = self.heads
        state = getattr(self, STATE_ATTRIBUTE, None)
        if state is None:
            state = HeadState(self.n_heads, self.n_kv_heads, present)
        counts = (state.n_query_heads, state.n_kv_heads, self.head_dim, self.value_dim)
        if policy == "group" and state.n_kv_heads == 1:
            policy = "balanced"  # the only group would be all heads
        site = AttentionSite(
            type(self).__name__, "headprune", "self", *counts, heads=present, policy=policy
        )
        kept = site.check(indices(keep, "keep", state.n_query_heads))
        if kept == present:
            return ()
        positions = list(map(present.index, kept))
        kv = used_groups(self.geometry, positions)

        # 2. All cuts before any change, so that a refusal changes nothing.
        cuts = self._cuts(positions, kv)
        if GATES_ATTRIBUTE in self.W_o.__dict__:
            hint = "Leave the hp.gated block first: its gates are for the heads that are there now."
            raise UnsupportedModel(
                type(self).__name__, "cut outside of gated blocks", "gates on it", hint
            )

        # 3. Change the module.
        self._install_(cuts)
        self.n_heads = len(kept)
        self.n_kv_heads = len(kv)
        setattr(self, STATE_ATTRIBUTE, HeadState(state.n_query_heads, state.n_kv_heads, kept))
        store_heads_(self, bool(kept))
        return tuple(head for head in present if head not in kept)

    def _cuts(self, positions: Sequence[int], kv: Sequence[int]) -> dict[str, dict[str, Tensor]]:
        """Compute the new tensors of each projection for the kept query and key/value heads."""
        geometry = self.geometry
        # W_q, W_k and W_v write head features; W_o reads them.
        parts: tuple[tuple[str, Axis, Any], ...] = (
            ("W_q", "out", "query"),
            ("W_k", "out", "key"),
            ("W_v", "out", "value"),
            ("W_o", "in", "context"),
        )
        cuts = {}
        for name, axis, unit in parts:
            rows = kept_rows(geometry, (unit,), "sequential", positions, kv)
            cuts[name] = cut_features(getattr(self, name), axis, rows, name)
        return cuts

    def _install_(self, cuts: dict[str, dict[str, Tensor]]) -> None:
        """Put the new tensors into the projections; tied parameters stay tied."""
        projections = {name: getattr(self, name) for name in cuts}
        tied = _tied(projections.values())
        successors: dict[int, nn.Parameter] = {}  # by the identity of the old parameter
        for name, tensors in cuts.items():
            module = projections[name]
            for key, tensor in tensors.items():
                old = module._parameters[key]
                if old is None or id(old) not in tied:
                    continue
                if id(old) not in successors:
                    successors[id(old)] = nn.Parameter(tensor, old.requires_grad)
                tensors[key] = successors[id(old)]
            replace_features_(module, tensors)

    @classmethod
    def from_heads(
        cls,
        heads: Sequence[tuple[Tensor, Tensor, Tensor]],
        W_o: Tensor | None = None,
        *,
        dropout: float = 0.0,
        batch_first: bool = True,
        compatibility: str | Callable[..., Tensor] = "scaled_dot_product",
    ) -> Self:
        """Build the module from single heads; see ``convert.from_heads``."""
        return from_heads(
            cls, heads, W_o, dropout=dropout, batch_first=batch_first, compatibility=compatibility
        )

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> Self:
        """Build the module that computes the same as PyTorch's; see ``convert.from_torch``."""
        return from_torch(cls, module)

    def to_torch(self) -> nn.MultiheadAttention:
        """Build PyTorch's module that computes the same; see ``convert.to_torch``."""
        return to_torch(self)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        say_heads(self, destination, prefix)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any
    ) -> None:
        check_heads(self, state_dict, prefix, metadata)
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def extra_repr(self) -> str:
        shown = [f"n_heads={self.n_heads}"]
        if self.n_kv_heads != self.n_heads:
            shown.append(f"n_kv_heads={self.n_kv_heads}")
        shown.append(f"head_dim={self.head_dim}")
        if self.value_dim != self.head_dim:
            shown.append(f"value_dim={self.value_dim}")
        state = getattr(self, STATE_ATTRIBUTE, None)
        if state is not None:
            shown.append(f"heads={list(state.heads)} of {state.n_query_heads}")
        return ", ".join(shown)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _tied(projections: Iterable[nn.Module]) -> set[int]:
    """Return the identities of the parameters that several projections share."""
    count: Counter[int] = Counter()
    for module in projections:
        for parameter in module._parameters.values():
            if parameter is not None:
                count[id(parameter)] += 1
    return {identity for identity, n in count.items() if n > 1}
