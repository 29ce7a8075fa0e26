"""``headprune inspect``: a model's prunable heads, and what a cut changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.cli._shared import AsJson, Debug, echo, emit, guarded, say

if TYPE_CHECKING:
    from torch import nn

    from headprune.core.coverage import NotTaken
    from headprune.core.heads import Policy
    from headprune.model.sites import BoundSite


def inspect(
    model: Annotated[str, typer.Argument(help="A model folder, hub name, or package:NAME/FOLDER.")],
    policy: Annotated[
        str,
        typer.Option(
            help=(
                "What may be removed where query heads share a key/value head: group, balanced "
                "or free."
            )
        ),
    ] = "group",
    feed_forward: Annotated[
        bool, typer.Option("--feed-forward", help="Show feed-forwards too, and their neurons.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show a model's attention modules, what a cut changes, and modules that are not recognised."""
    with guarded(debug):
        from headprune.core.errors import UnsupportedModel
        from headprune.data.models import open_model
        from headprune.model.sites import find_sites, has_cut_neurons, not_taken
        from headprune.run.subject import quiet

        quiet()
        # A model without any site is refused, after a list of what looks like attention.
        opened = open_model(model)
        try:
            find_sites(opened, feed_forward=feed_forward)
        except UnsupportedModel:
            _say_not_taken(not_taken(opened, []))
            raise
        facts = _inspect(opened, policy, feed_forward)  # type: ignore[arg-type]
        if as_json:
            emit(facts)
        else:
            _print(facts)
            if not feed_forward and has_cut_neurons(opened):
                say("Neurons of feed-forwards were removed; --feed-forward shows them.")


def _inspect(model: nn.Module, policy: Policy, feed_forward: bool = False) -> dict[str, Any]:
    """Collect everything that the command shows, as JSON data."""
    from headprune.core.heads import HeadCounts
    from headprune.model.sites import bind, find_sites

    sites = find_sites(model, policy=policy, feed_forward=feed_forward)
    bound = bind(model, sites)
    rows = list(map(_row, bound))
    counts = HeadCounts.present(sites)
    totals = {
        "heads": counts.heads,
        "units": sum(len(b.site.units) for b in bound),
        "params": sum(p.numel() for p in model.parameters()),
        "prunable_params": sum(row["params"] for row in rows),
        "kv_bytes_per_token": sum(row["kv_bytes_per_token"] for row in rows),
    }
    if counts.neurons is not None:
        totals["neurons"] = counts.neurons
    return {
        "model": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "sites": rows,
        "totals": totals,
        "cache": _cache_words(bound),
        "tensor_parallel": _tensor_parallel(model) if counts.heads else [],
        "layouts": _layouts(model, bound),
        "not_taken": list(map(_as_data, sites.not_taken)),
    }


def _row(bound: BoundSite) -> dict[str, Any]:
    """The facts about one site."""
    from headprune.model.costs import unit_costs

    site = bound.site
    # Costs of all heads as one unit: what several units share is saved by none of them alone.
    bundles = (site.heads,) if site.heads else ()
    costs = unit_costs(replace(bound, site=replace(site, bundles=bundles)))
    # If no query heads share a key/value head, all policies are the same.
    shares = site.n_kv_heads < site.n_query_heads
    return {
        "site": site.name,
        "layout": site.layout,
        "kind": site.kind,
        "heads": site.n_query_heads,
        "kv_heads": site.n_kv_heads,
        "head_dim": site.head_dim,
        "present": list(site.heads),
        "units": len(site.units),
        "policy": site.policy,
        "policies": list(bound.layout.policies) if shares else ["group"],
        "params": sum(c.params for c in costs),
        "kv_bytes_per_token": sum(c.kv_bytes for c in costs),
    }


def _layouts(model: nn.Module, bound: Sequence[BoundSite]) -> dict[str, dict[str, Any]]:
    """What a cut changes, by layout."""
    # Sites of one layout differ in size, but a cut changes the same parts of them.
    layouts: dict[str, dict[str, Any]] = {}
    for b in bound:
        layouts[b.layout.name] = _layout(b)
    # Try to remove all heads once per layout and kind of attention, at its first site.
    firsts: dict[tuple[str, str], BoundSite] = {}
    for b in reversed(bound):
        if b.site.heads:
            firsts[b.layout.name, b.site.kind] = b
    for (name, kind), b in firsts.items():
        layouts[name]["without_heads"][kind] = _without_heads(model, b)
    return layouts


def _layout(bound: BoundSite) -> dict[str, Any]:
    """What a cut of this layout's sites changes, as text."""
    from headprune.model.describe import gate_words, patch_words, slab_words

    return {
        "gate": gate_words(bound.layout),
        "cut": [slab_words(slab, bound.layout.is_feed_forward) for slab in bound.slabs],
        "patched": patch_words(bound.layout),
        "without_heads": {},
    }


def _without_heads(model: nn.Module, bound: BoundSite) -> str:
    """Say whether all heads of a layer can be removed, by trying it."""
    from headprune.core.errors import UnsupportedModel
    from headprune.core.heads import HeadMask
    from headprune.model.cut import cut_

    site = bound.site
    mask = HeadMask.from_keep({site.name: []}, {site.name: site.n_query_heads})
    # Whether the code around a layer can do without its output, is not known before it is cut.
    try:
        cut_(model, [bound], mask).restore()
    except UnsupportedModel as error:
        return f"no: must be {error.must}"
    return "yes"


_COMPACT = (
    "the cache stores each key/value head that a kept head reads, once; only those that no kept"
    " head reads are removed"
)
#: What a policy means for the KV cache; ``mqa`` is any policy with a single key/value head.
_CACHE = {
    "group": (
        "group: a key/value head is removed with all its query heads, and the cache shrinks by it"
    ),
    "balanced": f"balanced: {_COMPACT}",
    "free": (
        f"free: {_COMPACT}; if groups get unequal sizes, every step repeats keys and values for"
        " each query head, which costs time and memory in the step, not in the cache"
    ),
    "mqa": (
        "one key/value head for all query heads (MQA): under every policy, it and the cache are"
        " kept as long as one query head is"
    ),
}


def _cache_words(bound: list[BoundSite]) -> list[str]:
    """What the policies mean for a KV cache, if heads share keys and values."""
    used = set()
    for b in bound:
        site = b.site
        if site.kind == "causal" and site.n_kv_heads < site.n_query_heads:
            used.add("mqa" if site.n_kv_heads == 1 else site.policy)
    return [words for policy, words in _CACHE.items() if policy in used]


def _tensor_parallel(model: nn.Module) -> list[int]:
    """The numbers of GPUs among which a decoder's layers can be split."""
    from headprune.model.sites import all_cut_sites

    counts, is_decoder = [], False
    for site in all_cut_sites(model):
        is_decoder = is_decoder or site.kind == "causal"
        # A feed-forward's groups are its neurons.
        counts.append(len(site.groups))
    common = math.gcd(*counts)
    if not is_decoder:
        return []
    return [n for n in range(1, common + 1) if common % n == 0]


def _as_data(group: NotTaken) -> dict[str, Any]:
    names = list(group.modules)
    return {
        "module": names[0],
        "modules": names,
        "class": group.kind,
        "reason": group.reason,
        "feed_forward": group.is_feed_forward,
    }


def _of_data(group: dict[str, Any]) -> NotTaken:
    from headprune.core.coverage import NotTaken

    modules, kind = tuple(group["modules"]), group["class"]
    return NotTaken(modules, kind, group["reason"], group["feed_forward"])


def _say_not_taken(groups: Sequence[NotTaken]) -> None:
    """Print the modules like attention or feed-forwards that no layout recognises."""
    for group in groups:
        say(f"not recognised: {group}")
    if not all(group.is_feed_forward for group in groups):
        hint = "headprune.propose_layouts(model, example) looks for a layout of such modules"
        say(f"{hint} and proves it.")


def _print(facts: dict[str, Any]) -> None:
    """Print what ``_inspect`` collected, for people."""
    # 1. The sites.
    _print_table(facts)

    # 2. The totals.
    totals = facts["totals"]
    share = 100 * totals["prunable_params"] / totals["params"] if totals["params"] else 0.0
    parameters = f"{totals['prunable_params']:,} of {totals['params']:,} parameters ({share:.1f} %)"
    neurons = f" and {totals['neurons']:,} neurons" if "neurons" in totals else ""
    units = f"{totals['heads']} heads{neurons} in {totals['units']} prune units"
    echo(f"{units}; {parameters} can be removed with them")
    if totals["kv_bytes_per_token"]:
        echo(f"{totals['kv_bytes_per_token']:,} bytes of KV cache per token can be saved")
    for line in facts["cache"]:
        echo(line)
    if facts["tensor_parallel"]:
        counts = ", ".join(map(str, facts["tensor_parallel"]))
        shared = "key/value heads and cut neurons" if neurons else "key/value heads"
        echo(f"tensor parallelism: {counts} (divisors of every layer's {shared})")

    # 3. What a cut changes.
    for name, layout in facts["layouts"].items():
        echo(f"\n{name}: gates at the {layout['gate']}. A cut changes")
        for line in (*layout["cut"], *layout["patched"]):
            echo(f"  {line}")
        answers = layout["without_heads"]
        if answers:  # none where a cut has emptied all layers of this layout
            unit = "neurons" if "feed_forward" in answers else "heads"
            echo(f"  all {unit} of a layer may be removed: {_empty_words(answers)}")

    # 4. What is not recognised.
    _say_not_taken(list(map(_of_data, facts["not_taken"])))


def _empty_words(answers: dict[str, str]) -> str:
    """Whether layers may lose all heads, as one answer if that is possible."""
    # Otherwise one answer per kind, such as "self: yes; cross: no".
    if len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return "; ".join(map(": ".join, answers.items()))


def _print_table(facts: dict[str, Any]) -> None:
    """Print a table with a row per site."""
    from rich.console import Console
    from rich.table import Table

    title = f"{facts['model']}, {facts['dtype']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("site", "layout", "kind"):
        table.add_column(column, overflow="fold")
    for column in ("heads", "units", "width", "parameters", "KV bytes/token"):
        table.add_column(column, justify="right")
    table.add_column("policies")
    for row in facts["sites"]:
        table.add_row(*_cells(row))
    # Without a terminal the width is fixed, so that rows do not wrap in a file.
    console = Console(width=None if Console().is_terminal else 200, markup=False)
    console.print(table)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a site's row."""
    n_present, n_heads, n_kv_heads = len(row["present"]), row["heads"], row["kv_heads"]
    heads = str(n_heads)
    if n_present < n_heads:
        heads = f"{n_present} of {n_heads}"
    if n_kv_heads < n_heads:
        heads += f" / {n_kv_heads}"
    cache = f"{row['kv_bytes_per_token']:,}" if row["kv_bytes_per_token"] else ""

    # The policy in use is in brackets; with a single policy there is nothing to choose.
    policies = ""
    if len(row["policies"]) > 1:
        names = [f"[{name}]" if name == row["policy"] else name for name in row["policies"]]
        policies = ", ".join(names)
        if n_kv_heads == 1:
            policies = "one key/value head is kept"
    return (
        row["site"],
        row["layout"],
        row["kind"],
        heads,
        str(row["units"]),
        str(row["head_dim"]),
        f"{row['params']:,}",
        cache,
        policies,
    )
