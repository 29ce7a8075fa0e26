"""Our own multi-head attention: W_q, W_k, W_v and W_o apart, and a gate on every head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from headprune.attention.attend import attend, repeated
from headprune.attention.cache import Cache
from headprune.attention.compatibility import resolve_compatibility
from headprune.attention.kept_heads import check_heads, say_heads, store_heads_
from headprune.attention.linear import cut_features, replace_features_
from headprune.attention.masks import join_masks
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import KINDS, AttentionSite, Kind, Policy
from headprune.core.indices import indices
from headprune.core.layout import GATES_ATTRIBUTE, STATE_ATTRIBUTE, HeadState
from headprune.core.slabs import HeadGeometry, kept_rows, used_groups

if TYPE_CHECKING:
    from typing_extensions import Self


@final
class MultiHeadAttention(nn.Module):
    """Multi-head attention with a gate g_i on every head, whose heads can be removed for good.

    ``h_i = g_i · f(W_i^q q, W_i^k k, W_i^v v)`` and the output is ``W_o [h_1; ...; h_h]``, Vaswani
    et al. 2017, section 3.2.2; the gates are those of Michel et al. 2019, section 2.3. The rows of
    ``W_q.weight`` are the heads' matrices ``W_i^q [head_dim, query_size]`` one under the other, and
    so for ``W_k`` and ``W_v``; head i reads the columns ``i * value_dim`` to
    ``(i + 1) * value_dim`` of ``W_o.weight``. With fewer key/value heads, consecutive query heads
    share one (Ainslie et al. 2023).

    A head keeps its original index for ever: ``heads`` lists the indices that are present. Head
    counts are read from ``n_heads`` and ``n_kv_heads`` at every call, so weights cut from outside
    work where those are kept true.

    Args:
        query_size: Width of the queries.
        n_heads: Query heads.
        key_size: Width of the keys; None is ``query_size``.
        value_size: Width of the values; None is ``key_size``.
        output_size: Width of the output; None is ``query_size``.
        head_dim: Width of a query or key head; None is ``query_size / n_heads``.
        value_dim: Width of a value head; None is ``head_dim``.
        n_kv_heads: Key/value heads, a divisor of ``n_heads`` (1 is multi-query); None is
            ``n_heads``.
        bias: Whether W_q, W_k and W_v have a bias.
        output_bias: Whether W_o has one; None is as ``bias``.
        dropout: Probability that an attention weight is dropped in training.
        batch_first: Sequences are ``[batch, length, width]``; otherwise ``[length, batch, width]``.
        compatibility: ``scaled_dot_product``, ``additive`` or a callable, see ``Compatibility``.
        kind: What it is there for in its model: ``self``, ``causal`` or ``cross``. Sites say so,
            and budgets by kind go by it; what a query sees is up to the arguments of each call.
        device: Where the parameters live.
        dtype: Their type.

    Raises:
        InvalidValue: sizes that do not fit each other.
        UnknownName: an unknown compatibility function.

    >>> attention = MultiHeadAttention(100, n_heads=5).eval()
    >>> queries, keys = torch.ones(2, 4, 100), torch.ones(2, 6, 100)
    >>> attention(queries, keys, valid_lens=torch.tensor([3, 2])).shape
    torch.Size([2, 4, 100])
    >>> attention.prune_heads_(keep=[1, 3])
    (0, 2, 4)
    >>> attention.heads, attention.W_q
    ((1, 3), Linear(in_features=100, out_features=40, bias=True))
    """

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
        if kind not in KINDS:
            raise InvalidValue("kind", f"one of {', '.join(KINDS)}", repr(kind))
        self.kind = kind
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.head_dim = query_size // n_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        HeadGeometry(self.n_heads, self.n_kv_heads, self.head_dim, self.value_dim)
        self.dropout = dropout
        self.batch_first = batch_first
        self.compatibility = resolve_compatibility(compatibility, self.head_dim, device, dtype)
        key_size = query_size if key_size is None else key_size
        value_size = key_size if value_size is None else value_size
        output_size = query_size if output_size is None else output_size
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
        """Head counts and widths as they are now, and which heads share a key/value head."""
        state = getattr(self, STATE_ATTRIBUTE, None)
        if state is None or state.n_query_heads == state.n_kv_heads:
            return HeadGeometry(self.n_heads, self.n_kv_heads, self.head_dim, self.value_dim)
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
        """Attends from ``query`` to ``key``; a query that may see no key gets zeros from every
        head.

        Shapes are batch-first here; ``heads`` are the present ones. Where two masks are given, both
        must allow.

        Args:
            query: ``[batch, queries, query_size]``.
            key: ``[batch, keys, key_size]``; None is ``query``, self-attention.
            value: ``[batch, keys, value_size]``; None is ``key``.
            valid_lens: Integers ``[batch]`` or ``[batch, queries]``: only so many keys are seen.
            mask: Boolean, broadcastable to ``[batch, heads, queries, keys]``; True may be seen.
            causal: A query sees its own position and earlier ones; the queries are the last
                positions of the keys.
            hide_self: A query does not see its own position.
            gates: ``[heads]`` or ``[batch, heads]``, one factor a head, differentiable; None costs
                nothing.
            need_weights: Return the attention weights too, as they are before dropout; this takes
                the slow path.
            cache: Keys and values of earlier steps; this call's are appended. ``keys`` in the
                shapes above counts all.

        Returns:
            ``[batch, queries, output_size]``; with ``need_weights`` also
            ``[batch, heads, queries, keys]``.

        Raises:
            InvalidValue: a wrong shape or dtype, or lengths out of range.
        """
        key = query if key is None else key
        value = key if value is None else value
        to_itself = key is query and cache is None
        self._check(query, key, value)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        batch, queries = query.shape[:2]
        keys = key.shape[1] + (0 if cache is None else cache.length)
        shape = (batch, self.n_heads, queries, keys)
        joined = join_masks(shape, query.device, valid_lens, mask, causal, hide_self, to_itself)
        if gates is not None:
            self._check_gates(gates, batch)
        if self.n_heads == 0:
            return self._no_heads(query, key, keys, cache, need_weights)
        q = self.W_q(query).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)
        k = self.W_k(key).unflatten(-1, (self.n_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.W_v(value).unflatten(-1, (self.n_kv_heads, self.value_dim)).transpose(1, 2)
        if cache is not None:
            k, v = cache.append_(k, v)
        state = getattr(self, STATE_ATTRIBUTE, None)
        if (
            state is not None and state.uneven
        ):  # the cache stays compact, attention sees a key a query head
            k, v = repeated(k, state.uneven), repeated(v, state.uneven)
        dropout = self.dropout if self.training else 0.0
        group = 1 if state is not None and state.uneven else self.n_heads // self.n_kv_heads
        context, weights = attend(
            q, k, v, self.compatibility, joined, self.heads, dropout, need_weights, group
        )
        context = context.transpose(1, 2)  # [batch, queries, heads, value_dim]
        if gates is not None:
            # No look at the values: a gate of one must still carry its gradient.
            context = context * gates.to(context.dtype).reshape(-1, 1, self.n_heads, 1)
        # W_o is called batch-first and as a module: gates from outside multiply its input.
        output = self.W_o(context.flatten(2))
        output = output if self.batch_first else output.transpose(0, 1)
        return output if weights is None else (output, weights)

    def _no_heads(
        self, query: Tensor, key: Tensor, keys: int, cache: Cache | None, need_weights: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """W_o's bias or zeros for every query, without any matrix product; a cache still counts
        positions."""
        batch, queries = query.shape[:2]
        if cache is not None:
            shape = (batch, 0, key.shape[1])
            cache.append_(
                key.new_zeros(*shape, self.head_dim), key.new_zeros(*shape, self.value_dim)
            )
        length = (batch, queries) if self.batch_first else (queries, batch)
        output = query.new_zeros(*length, self.W_o.out_features)
        if self.W_o.bias is not None:
            output = output + self.W_o.bias
        return (output, query.new_zeros(batch, 0, queries, keys)) if need_weights else output

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if torch.jit.is_tracing():  # whose sizes are tensors
            return
        axes = "[batch, length, {}]" if self.batch_first else "[length, batch, {}]"
        for name, x, projection in (
            ("query", query, self.W_q),
            ("key", key, self.W_k),
            ("value", value, self.W_v),
        ):
            if x.dim() != 3 or x.shape[-1] != projection.in_features:
                raise InvalidValue(
                    name, f"of shape {axes.format(projection.in_features)}", list(x.shape)
                )
        if key.shape[:2] != value.shape[:2]:
            raise InvalidValue(
                "value", f"as long as key, {list(key.shape[:2])}", list(value.shape[:2])
            )
        batch = 0 if self.batch_first else 1
        if query.shape[batch] != key.shape[batch]:
            raise InvalidValue(
                "key", f"of query's batch size {query.shape[batch]}", key.shape[batch]
            )

    def _check_gates(self, gates: Tensor, batch: int) -> None:
        if not isinstance(gates, Tensor) or not gates.is_floating_point():
            got = getattr(gates, "dtype", type(gates).__name__)
            raise InvalidValue(
                "gates", "a floating-point tensor", got, "Convert a mask with `.float()`."
            )
        if not torch.jit.is_tracing() and tuple(gates.shape) not in (
            (self.n_heads,),
            (batch, self.n_heads),
        ):
            must = (
                f"of shape [heads] = {[self.n_heads]} or [batch, heads] = {[batch, self.n_heads]}"
            )
            hint = "There is one gate for each head that is present, see `heads`."
            raise InvalidValue("gates", must, list(gates.shape), hint)

    def prune_heads_(self, keep: Iterable[int], policy: Policy = "group") -> tuple[int, ...]:
        """Removes every head that is not in ``keep`` from the weights, in place.

        The output width, dtype, device and what requires a gradient stay. With no head left the
        module returns W_o's bias, or zeros. An optimizer made before holds the old parameters.

        Args:
            keep: Original indices of the heads that stay, in any order.
            policy: What may leave where heads share a key/value head: ``group`` whole groups,
                ``balanced`` the same number in every group that stays, ``free`` any. A key/value
                head leaves with the last that reads it.

        Returns:
            Original indices of the removed heads.

        Raises:
            UnknownName: a head that is not present.
            InvalidValue: no indices, or a part of a group.
            UnsupportedModel: a projection that is quantised, parametrised or wrapped; nothing has
                been changed then.
        """
        present = self.heads
        state = getattr(self, STATE_ATTRIBUTE, None) or HeadState(
            self.n_heads, self.n_kv_heads, present
        )
        counts = (state.n_query_heads, state.n_kv_heads, self.head_dim, self.value_dim)
        policy = "balanced" if policy == "group" and state.n_kv_heads == 1 else policy
        site = AttentionSite(
            type(self).__name__, "headprune", "self", *counts, heads=present, policy=policy
        )
        kept = site.check(indices(keep, "keep"))
        if kept == present:
            return ()
        positions = [present.index(head) for head in kept]
        geometry = self.geometry
        kv = used_groups(geometry, positions)
        cuts = {}
        for name, axis, unit in (
            ("W_q", "out", "query"),
            ("W_k", "out", "key"),
            ("W_v", "out", "value"),
        ):
            rows = kept_rows(geometry, (unit,), "sequential", positions, kv)
            cuts[name] = cut_features(getattr(self, name), axis, rows, name)  # type: ignore[arg-type]
        columns = kept_rows(geometry, ("context",), "sequential", positions, kv)
        cuts["W_o"] = cut_features(self.W_o, "in", columns, "W_o")
        if GATES_ATTRIBUTE in self.W_o.__dict__:
            hint = "Leave the hp.gated block first: its gates are for the heads that are there now."
            raise UnsupportedModel(
                type(self).__name__, "cut outside of gated blocks", "gates on it", hint
            )
        tied = _tied(getattr(self, name) for name in cuts)
        for name, tensors in cuts.items():
            module = getattr(self, name)
            for key, tensor in tensors.items():
                old = module._parameters[key]
                if (
                    old is not None and id(old) in tied
                ):  # one parameter for several projections stays one
                    new = tied[id(old)]
                    tied[id(old)] = tensors[key] = (
                        nn.Parameter(tensor, old.requires_grad) if new is None else new
                    )
            replace_features_(module, tensors)
        self.n_heads, self.n_kv_heads = len(kept), len(kv)
        setattr(self, STATE_ATTRIBUTE, HeadState(state.n_query_heads, state.n_kv_heads, kept))
        store_heads_(self, bool(kept))
        return tuple(head for head in present if head not in kept)

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
        """Multi-head attention from single heads; see ``convert.from_heads``."""
        from headprune.attention.convert import from_heads

        return from_heads(
            heads, W_o, dropout=dropout, batch_first=batch_first, compatibility=compatibility
        )

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> Self:
        """The same function as PyTorch's module; see ``convert.from_torch``."""
        from headprune.attention.convert import from_torch

        return from_torch(module)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same function as PyTorch's module; see ``convert.to_torch``."""
        from headprune.attention.convert import to_torch

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
        kv = "" if self.n_kv_heads == self.n_heads else f", n_kv_heads={self.n_kv_heads}"
        value = "" if self.value_dim == self.head_dim else f", value_dim={self.value_dim}"
        state = getattr(self, STATE_ATTRIBUTE, None)
        present = "" if state is None else f", heads={list(state.heads)} of {state.n_query_heads}"
        return f"n_heads={self.n_heads}{kv}, head_dim={self.head_dim}{value}{present}"


def _tied(projections: Iterable[nn.Module]) -> dict[int, nn.Parameter | None]:
    """Identities of the parameters that several projections share, each with no successor yet."""
    count = Counter(
        id(p) for module in projections for p in module._parameters.values() if p is not None
    )
    return {identity: None for identity, n in count.items() if n > 1}
