"""``headprune inspect``: what of a model can be pruned, what it weighs, what a cut changes, and
what cannot and why."""

from __future__ import annotations

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
            help="What may leave where query heads share a key/value head: group, balanced or free."
        ),
    ] = "group",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the attention modules of a model: heads, prune units, what a cut changes, and those not
    recognised."""
    with guarded(debug):
        from headprune.core.errors import UnsupportedModel
        from headprune.data.models import open_model
        from headprune.model.sites import find_sites, not_taken
        from headprune.run.subject import quiet

        quiet()
        opened = open_model(model)
        try:
            find_sites(opened)
        except UnsupportedModel:
            _say_not_taken(not_taken(opened, []))
            raise
        found = _inspect(opened, policy)  # type: ignore[arg-type]
        if as_json:
            emit(found)
        else:
            _print(found)


def _inspect(model: nn.Module, policy: Policy) -> dict[str, Any]:
    from headprune.model.sites import bind, find_sites

    sites = find_sites(model, policy=policy)
    bound = bind(model, sites)
    rows = [_row(b) for b in bound]
    totals = {
        "heads": sum(len(b.site.heads) for b in bound),
        "units": sum(len(b.site.units) for b in bound),
        "params": sum(p.numel() for p in model.parameters()),
        "prunable_params": sum(row["params"] for row in rows),
        "kv_bytes_per_token": sum(row["kv_bytes_per_token"] for row in rows),
    }
    layouts = {b.layout.name: _layout(b) for b in bound}
    for b in {(b.layout.name, b.site.kind): b for b in reversed(bound) if b.site.heads}.values():
        layouts[b.layout.name]["no_heads_left"][b.site.kind] = _without_heads(model, b)
    others = list(map(_as_data, sites.not_taken))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    facts = {
        "sites": rows,
        "totals": totals,
        "cache": _cache_words(bound),
        "layouts": layouts,
        "not_taken": others,
    }
    return {"model": type(model).__name__, "dtype": dtype, **facts}


def _row(bound: BoundSite) -> dict[str, Any]:
    from headprune.model.costs import unit_costs

    site = bound.site
    # All heads as one unit: what several units share leaves with none of them alone.
    costs = unit_costs(
        replace(bound, site=replace(site, bundles=(site.heads,) if site.heads else ()))
    )
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
        # Where no query heads share a key/value head, all policies are the same.
        "policies": (
            list(bound.layout.policies) if site.n_kv_heads < site.n_query_heads else ["group"]
        ),
        "params": sum(c.params for c in costs),
        "kv_bytes_per_token": sum(c.kv_bytes for c in costs),
    }


def _layout(bound: BoundSite) -> dict[str, Any]:
    """What a cut of this layout's sites changes, in words."""
    from headprune.model.describe import gate_words, patch_words, slab_words

    return {
        "gate": gate_words(bound.layout),
        "cut": [slab_words(s) for s in bound.slabs],
        "patched": patch_words(bound.layout),
        "no_heads_left": {},
    }


def _without_heads(model: nn.Module, bound: BoundSite) -> str:
    """Whether a layer may lose all its heads: tried, and put back."""
    from headprune.core.errors import UnsupportedModel
    from headprune.core.heads import HeadMask
    from headprune.model.cut import cut_

    site = bound.site
    try:
        cut_(
            model, [bound], HeadMask.from_keep({site.name: []}, {site.name: site.n_query_heads})
        ).restore()
    except UnsupportedModel as error:
        return f"no: must be {error.must}"
    return "yes"


def _cache_words(bound: list[BoundSite]) -> list[str]:
    """What the policies in use mean for a KV cache; nothing where no heads share keys and
    values."""
    shared = [
        b.site
        for b in bound
        if b.site.kind == "causal" and b.site.n_kv_heads < b.site.n_query_heads
    ]
    used = {"mqa" if site.n_kv_heads == 1 else site.policy for site in shared}
    return [words for policy, words in _CACHE.items() if policy in used]


_COMPACT = (
    "the cache keeps every key/value head that a kept head reads, once, and shrinks only by those"
    " that none reads"
)
_CACHE = {
    "group": "group: a key/value head leaves with all its query heads, and the cache shrinks by it",
    "balanced": f"balanced: {_COMPACT}",
    "free": (
        f"free: {_COMPACT}; where that leaves groups of unlike size, every step repeats keys and"
        " values for each query head: time and memory of a step, not of the cache"
    ),
    "mqa": (
        "one key/value head for all query heads (MQA): it stays as long as one of them does,"
        " whatever the policy, and so does the cache"
    ),
}


def _as_data(group: NotTaken) -> dict[str, Any]:
    names = list(group.modules)
    return {"module": names[0], "modules": names, "class": group.kind, "reason": group.reason}


def _of_data(group: dict[str, Any]) -> NotTaken:
    from headprune.core.coverage import NotTaken

    return NotTaken(tuple(group["modules"]), group["class"], group["reason"])


def _say_not_taken(groups: Sequence[NotTaken]) -> None:
    for group in groups:
        say(f"not taken: {group}")
    if groups:
        say(
            "headprune.propose_layouts(model, example) looks for a layout of such modules and"
            " proves it."
        )


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{found['model']}, {found['dtype']}", title_justify="left", box=None, pad_edge=False
    )
    for column in ("site", "layout", "kind"):
        table.add_column(column, overflow="fold")
    for column in ("heads", "units", "width", "parameters", "KV bytes/token"):
        table.add_column(column, justify="right")
    table.add_column("policies")
    for row in found["sites"]:
        gone = row["heads"] - len(row["present"])
        heads = f"{len(row['present'])} of {row['heads']}" if gone else str(row["heads"])
        heads += f" / {row['kv_heads']}" if row["kv_heads"] < row["heads"] else ""
        policies = ", ".join(f"[{p}]" if p == row["policy"] else p for p in row["policies"])
        if row["kv_heads"] == 1:
            policies = "one key/value head stays"
        cells = (
            row["site"],
            row["layout"],
            row["kind"],
            heads,
            str(row["units"]),
            str(row["head_dim"]),
        )
        cache = f"{row['kv_bytes_per_token']:,}" if row["kv_bytes_per_token"] else ""
        table.add_row(
            *cells, f"{row['params']:,}", cache, policies if len(row["policies"]) > 1 else ""
        )
    console = Console(width=None if Console().is_terminal else 200, markup=False)
    console.print(table)
    totals = found["totals"]
    share = 100 * totals["prunable_params"] / totals["params"] if totals["params"] else 0.0
    echo(
        f"{totals['heads']} heads in {totals['units']} prune units; {totals['prunable_params']:,}"
        f" of {totals['params']:,} parameters ({share:.1f} %) can leave with them"
    )
    if totals["kv_bytes_per_token"]:
        echo(f"{totals['kv_bytes_per_token']:,} bytes of KV cache a token are theirs")
    for line in found["cache"]:
        echo(line)
    for name, layout in found["layouts"].items():
        echo(f"\n{name}: gates at the {layout['gate']}. A cut changes")
        for line in (*layout["cut"], *layout["patched"]):
            echo(f"  {line}")
        answers = layout["no_heads_left"]
        words = (
            {next(iter(answers.values()))}
            if len(set(answers.values())) == 1
            else map(": ".join, answers.items())
        )
        echo(f"  a layer may lose all its heads: {'; '.join(words)}")
    _say_not_taken([_of_data(group) for group in found["not_taken"]])
