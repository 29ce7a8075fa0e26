"""Attention and feed-forwards that match no layout: which these are, and what each lacks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from headprune.attention.linear import is_conv1d
from headprune.attention.multi_head import MultiHeadAttention
from headprune.core.coverage import NotTaken
from headprune.core.errors import UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.core.layout import AttentionLayout
from headprune.model.matching import lookup, reason_against

#: Modules that an error lists at most.
_LISTED = 8
#: Class names of attention.
_KIND = re.compile(r"attention|attn|MHS?A(?![a-z])")
#: Why the experts of a mixture are no sites.
_EXPERTS = "an expert of a mixture runs on some tokens only, which no gate fits"
#: Names of experts, of what is inside of one, and of all together.
_EXPERT_NAME = re.compile(r"(^|\.)experts(\.|$)|expert[^.]*\.\d")
#: Why a feed-forward that a layout matches is no site.
TOKENS_FIRST = "the attention beside it has no batch_first=True, so no gate per example fits"
#: Class names of feed-forwards.
_FEED_FORWARD = re.compile(r"mlp|feed_?forward|ffn|experts", re.IGNORECASE)
#: Names of feed-forwards in the module around them.
_FEED_FORWARD_NAME = re.compile(r"(mlp|ffn?|feed_?forward)_?\d*", re.IGNORECASE)
#: Names of projections of queries, of keys and of values.
_QUERIES = re.compile(r"(^|_)w?(q|query|queries)(_|\d|$)", re.IGNORECASE)
_KEYS = re.compile(r"(^|_)w?(k|keys?)(_|\d|$)", re.IGNORECASE)
_VALUES = re.compile(r"(^|_)w?(v|values?)(_|\d|$)", re.IGNORECASE)
#: One projection of keys and values, and one of all three.
_KEYS_VALUES = re.compile(r"(^|_)w?(kv|vk|keys?_values?)(_|\d|$)", re.IGNORECASE)
_ALL_THREE = re.compile(r"qkv|kqv|query_key_value", re.IGNORECASE)
#: Lines of nanoGPT's attention that take the model's width for that of the heads, and lines that
#: read the width of the heads from the projection, which a cut makes narrower.
_NANOGPT = (
    ("B, T, C = x.size()", "(B, T, _), C = x.size(), self.c_proj.in_features"),
    ("self.c_attn(x).split(self.n_embd, dim=2)", "self.c_attn(x).split(C, dim=2)"),
)


def attention_like(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List modules that a person would call attention.

    By their class name, with parameters; by parts or tensors that are named like queries, keys and
    values; or by the sizes of their projections. The last are one from a width to three times as
    much (queries, keys and values in one) and one that keeps the width (the output).

    Yields:
        Names and modules.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if _KIND.search(kind) or _KIND.search(kind.lower()):
            if _has_parameters(module):
                yield name, module
        elif _has_roles(module) or _has_sizes(module):
            yield name, module


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_roles(module: nn.Module) -> bool:
    """Whether parts or tensors are named like queries, keys and values."""
    names = []
    for name, part in (*module._modules.items(), *module._parameters.items()):
        if part is not None and _has_matrix(part):
            names.append(name)
    if _matching(names, _ALL_THREE):
        return True
    # Two projections, one of queries and one of keys and values together.
    queries = _matching(names, _QUERIES)
    if queries and _matching(names, _KEYS_VALUES) - queries:
        return True
    keys, values = _matching(names, _KEYS), _matching(names, _VALUES)
    # Three different parts: one name may match several patterns.
    return bool(queries and keys and values) and len(queries | keys | values) >= 3


def _matching(names: Iterable[str], pattern: re.Pattern[str]) -> set[str]:
    return {name for name in names if pattern.search(name)}


def _has_matrix(part: nn.Module | Tensor) -> bool:
    """Whether a part can be a projection.

    Norms and biases may be named like queries and keys, too.
    """
    tensors = part.parameters() if isinstance(part, nn.Module) else [part]
    return any(tensor.ndim > 1 for tensor in tensors)


def _has_sizes(module: nn.Module) -> bool:
    """Whether its projections have the sizes of attention's, and nothing else mixes features.

    One maps some width to three times as much, another keeps that width. A second half of a
    feed-forward layer or a convolution would be something else.
    """
    sizes = set()
    for part in module._modules.values():
        if part is not None and _has_matrix(part):
            sizes.add(_features(part))
    return any(sizes == {(n, 3 * n), (n, n)} for n, _ in sizes if n)


def _features(part: nn.Module) -> tuple[int, int]:
    """Features in and out of a linear layer; zeros for everything else."""
    if is_conv1d(part):
        return int(part.nx), int(part.nf)  # type: ignore[arg-type]
    return (part.in_features, part.out_features) if isinstance(part, nn.Linear) else (0, 0)


# ---------------------------------------------------------------- the closest layout


@dataclass(frozen=True)
class _Match:
    """How much of a layout a module has.

    Args:
        layout: The layout.
        missing: Paths that the layout needs and the module has not.
        slabs: Paths of the slabs that the layout needs.
        n_slabs: How many of those the module has.
        n_unwanted: Paths that the module has and the layout rules out.
    """

    layout: AttentionLayout
    missing: list[str]
    slabs: list[str]
    n_slabs: int
    n_unwanted: int

    @property
    def share(self) -> float:
        """The part of the layout's needs that the module has."""
        return 1 - len(self.missing) / len((*self.slabs, *self.layout.requires))

    @property
    def order(self) -> tuple[float, int, int, int]:
        return self.share, self.n_slabs, -self.n_unwanted, -len(self.layout.requires)


def _match(module: nn.Module, layout: AttentionLayout) -> _Match:
    slabs = [slab.path for slab in layout.slabs if not slab.optional]
    missing = [path for path in (*layout.requires, *slabs) if lookup(module, path) is None]
    n_slabs = sum(path not in missing for path in slabs)
    n_unwanted = 0
    for path in layout.absent:
        part = lookup(module, path)
        n_unwanted += part is not None and part is not False  # a flag that is off counts as absent
    return _Match(layout, missing, slabs, n_slabs, n_unwanted)


def closest_reason(module: nn.Module, layouts: Iterable[AttentionLayout]) -> str:
    """Explain what a module lacks for the closest layout, if it has most of what that needs.

    The closest layout has the largest share of its needs fulfilled; of equals, the most slabs, then
    the fewest parts that must be absent.
    """
    best = max((_match(module, layout) for layout in layouts), key=lambda match: match.order)
    # With less than half of it, to name the layout would mislead.
    if best.share <= 0.5 or best.n_slabs <= len(best.slabs) / 2:
        parts = [name for name, part in module.named_children() if _has_parameters(part)]
        return f"no layout is close; its parts are {', '.join(parts) or 'parameters only'}"
    if best.missing:
        reason: str | None = f"it has no {', '.join(map(repr, best.missing))}"
    else:
        reason = reason_against(best.layout, module)
    return f"nearest layout {best.layout.name!r}: {reason}"


def _lines_to_change(modules: Iterable[nn.Module]) -> str:
    """For attention like nanoGPT's, the lines of its code that have to change first; else empty."""
    for module in modules:
        try:
            code = inspect.getsource(module.forward)
        except (OSError, TypeError):  # made at run time, or not in Python
            continue
        if all(old in code for old, _ in _NANOGPT):
            changes = "; ".join(f"`{old}` to `{new}`" for old, new in _NANOGPT)
            return f"In {type(module).__name__}.forward change two lines: {changes}. Then: "
    return ""


def unmatched_attention(
    model: nn.Module, taken: Collection[str], layouts: Iterable[AttentionLayout]
) -> tuple[NotTaken, ...]:
    """Group attention-like modules that no layout matches by class and reason.

    Args:
        model: The model.
        taken: Names of its sites. Modules inside of one, or around one, are not listed.
        layouts: All layouts of attention.
    """
    found = _unmatched(model, attention_like(model), taken, taken, list(layouts))
    return _grouped(found, is_feed_forward=False)


def unmatched_feed_forwards(
    model: nn.Module, sites: Collection[AttentionSite], layouts: Collection[AttentionLayout]
) -> tuple[NotTaken, ...]:
    """Group modules like feed-forwards that no layout matches by class and reason.

    Args:
        model: The model.
        sites: Its sites. Modules inside of one, or around a feed-forward, are not listed.
        layouts: All layouts of feed-forwards.
    """
    names = [site.name for site in sites]
    taken = [site.name for site in sites if site.is_feed_forward]
    found = [*_unmatched(model, _feed_forward_like(model, layouts), names, taken, layouts)]
    # One line for all experts of a layer.
    for name, module in model.named_modules():
        if is_expert(name) and not is_expert(name.rpartition(".")[0]):
            found.append((name, type(module).__name__, _EXPERTS))
    return _grouped(found, is_feed_forward=True)


def _feed_forward_like(
    model: nn.Module, layouts: Collection[AttentionLayout]
) -> Iterator[tuple[str, nn.Module]]:
    """List modules that a person would call feed-forwards, without mixtures and their experts.

    By their class name, with parameters; by their own name and two layers; by a layer that widens
    before one that narrows as much; or by all the parts that a layout needs.

    Yields:
        Names and modules.
    """
    named: list[str] = []  # what such a feed-forward contains is no other one
    for name, module in model.named_modules():
        if is_expert(name) or hasattr(module, "experts") or name.startswith(tuple(named)):
            continue
        if _FEED_FORWARD.search(type(module).__name__):
            if _has_parameters(module):
                yield name, module
        elif _is_named_feed_forward(name, module) or _widens_and_narrows(module):
            named.append(f"{name}.")
            yield name, module
        elif any(not _match(module, layout).missing for layout in layouts):
            yield name, module


def _is_named_feed_forward(name: str, module: nn.Module) -> bool:
    """Whether it goes by such a name and has two layers; a list of modules is none."""
    is_named = _FEED_FORWARD_NAME.fullmatch(name.rpartition(".")[2])
    if not is_named or isinstance(module, nn.ModuleList):
        return False
    layers = [part for part in module.modules() if _features(part) != (0, 0)]
    return len(layers) > 1


def _widens_and_narrows(module: nn.Module) -> bool:
    """Whether its layers are one ``d -> n``, or two, and then one ``n -> d``, with n > d.

    Attention has more of them; an adapter's layers narrow first.
    """
    sizes = [_features(part) for part in module.children() if _has_matrix(part)]
    if len(sizes) not in (2, 3) or sizes[0][0] >= sizes[0][1]:
        return False
    narrow, wide = sizes[0]
    return sizes == [(narrow, wide)] * (len(sizes) - 1) + [(wide, narrow)]


def is_tokens_first(model: nn.Module, name: str) -> bool:
    """Whether attention beside a feed-forward, by its name, has the tokens before the examples."""
    for part in model.get_submodule(name.rpartition(".")[0]).children():
        if isinstance(part, (nn.MultiheadAttention, MultiHeadAttention)) and not part.batch_first:
            return True
    return False


def _unmatched(
    model: nn.Module,
    candidates: Iterable[tuple[str, nn.Module]],
    sites: Collection[str],
    taken: Collection[str],
    layouts: Collection[AttentionLayout],
) -> Iterator[tuple[str, str, str]]:
    """Explain for each of some modules why no layout takes it.

    Args:
        model: The model.
        candidates: Names and modules.
        sites: Names of sites, inside of which nothing is listed.
        taken: Names of the sites of the same kind, which are not listed, nor what is around them.
        layouts: All layouts of that kind.

    Yields:
        Names, classes and reasons.
    """
    inside = tuple(f"{name}." if name else "" for name in sites)
    around = {"", *taken, *names_around(taken)} if taken else set()
    for name, module in candidates:
        if name in around or name.startswith(inside):
            continue
        # Where a layout takes it, the caller left it out on purpose.
        taken_by = next((one for one in layouts if reason_against(one, module) is None), None)
        if taken_by is None:
            yield name, type(module).__name__, closest_reason(module, layouts)
        elif taken_by.is_feed_forward and is_tokens_first(model, name):
            yield name, type(module).__name__, TOKENS_FIRST


def _grouped(found: Iterable[tuple[str, str, str]], is_feed_forward: bool) -> tuple[NotTaken, ...]:
    """Group names, classes and reasons by the latter two."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, reason in found:
        groups.setdefault((kind, reason), []).append(name)
    return tuple(
        NotTaken(tuple(names), kind, reason, is_feed_forward)
        for (kind, reason), names in groups.items()
    )


def is_expert(name: str) -> bool:
    """Whether a module, by its name, is an expert of a mixture, part of one, or all of them.

    >>> is_expert("mlp.experts.3.up_proj"), is_expert("moe.expert_list.3"), is_expert("expert")
    (True, True, False)
    """
    return bool(_EXPERT_NAME.search(name))


def no_feed_forwards_error(
    model: nn.Module, layouts: Collection[AttentionLayout]
) -> UnsupportedModel:
    """Make the error for a model none of whose feed-forwards a layout takes."""
    unmatched = unmatched_feed_forwards(model, (), layouts)
    got = "no module that looks like one"
    if unmatched:
        got = f"none of {'; '.join(map(str, unmatched[:_LISTED]))}"
    hint = "For a module of your own give find_sites a layout of kind 'feed_forward'."
    must = "a model with a feed-forward that headprune knows"
    return UnsupportedModel(type(model).__name__, must, got, hint)


def names_around(names: Iterable[str]) -> Iterator[str]:
    """Names of the modules that contain one of these: ``a`` and ``a.b`` for ``a.b.c``."""
    for name in names:
        parent = name.rpartition(".")[0]
        while parent:
            yield parent
            parent = parent.rpartition(".")[0]


def no_sites_error(model: nn.Module, layouts: list[AttentionLayout]) -> UnsupportedModel:
    """Make the error for a model without sites."""
    modules = list(attention_like(model))
    got = "no attention-like module"
    if modules:
        lines = []
        for name, module in modules[:_LISTED]:
            reason = closest_reason(module, layouts)
            lines.append(f"{name or 'the model itself'} ({type(module).__name__}; {reason})")
        n_more = len(modules) - _LISTED
        more = f" and {n_more} more" if n_more > 0 else ""
        got = f"attention-like modules that fit no layout: {'; '.join(lines)}{more}"
    hint = _lines_to_change(module for _, module in modules) + (
        "Let headprune.propose_layouts(model, example) look for a layout and prove it, or describe"
        " your module with headprune.AttentionLayout; pass either as"
        " find_sites(model, layouts=[...])."
    )
    must = "a model with attention that headprune knows"
    return UnsupportedModel(type(model).__name__, must, got, hint)
