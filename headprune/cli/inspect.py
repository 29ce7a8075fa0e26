"""``headprune inspect``: what of a model can be pruned, what it weighs, and what cannot be and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.cli._shared import AsJson, Debug, emit, guarded, say

if TYPE_CHECKING:
    from torch import nn


def inspect(
    model: Annotated[str, typer.Argument(help="A model folder, hub name, or package:NAME/FOLDER.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the attention modules of a model: heads, prune units, parameters, and those not recognised."""
    with guarded(debug):
        from headprune.run.models import open_model
        from headprune.run.subject import quiet

        quiet()
        found = _inspect(open_model(model))
        if as_json:
            emit(found)
        else:
            _print(found)


def _inspect(model: nn.Module) -> dict[str, Any]:
    from headprune.model.costs import unit_costs
    from headprune.model.sites import attention_like, bind, find_sites

    bound = bind(model, find_sites(model))
    rows: list[dict[str, Any]] = []
    for b in bound:
        costs = unit_costs(b)
        rows.append(
            {
                "site": b.site.name,
                "layout": b.site.layout,
                "kind": b.site.kind,
                "heads": b.site.n_query_heads,
                "kv_heads": b.site.n_kv_heads,
                "head_dim": b.site.head_dim,
                "present": list(b.site.heads),
                "units": len(b.site.units),
                "params": sum(c.params for c in costs),
                "kv_bytes_per_token": sum(c.kv_bytes for c in costs),
            }
        )
    names = [b.site.name for b in bound]
    inside = tuple(f"{n}." if n else "" for n in names)

    def holds_site(name: str) -> bool:
        return any(site.startswith(f"{name}.") for site in names)

    others = [
        {"module": name, "class": type(module).__name__, "reason": _reason(module)}
        for name, module in attention_like(model)
        if name not in names and not name.startswith(inside) and not holds_site(name)
    ]
    totals = {
        "heads": sum(len(b.site.heads) for b in bound),
        "units": sum(len(b.site.units) for b in bound),
        "params": sum(p.numel() for p in model.parameters()),
        "prunable_params": sum(row["params"] for row in rows),
    }
    return {"model": type(model).__name__, "sites": rows, "totals": totals, "not_taken": others}


def _reason(module: nn.Module) -> str:
    from headprune.layouts import registry
    from headprune.model.sites import closest_reason

    return closest_reason(module, [registry.get(name) for name in registry.names()])


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=found["model"], title_justify="left", box=None, pad_edge=False)
    for column in ("site", "layout", "kind"):
        table.add_column(column, overflow="fold")
    for column in ("heads", "units", "width", "parameters"):
        table.add_column(column, justify="right")
    for row in found["sites"]:
        gone = row["heads"] - len(row["present"])
        heads = f"{len(row['present'])} of {row['heads']}" if gone else str(row["heads"])
        cells = (row["site"], row["layout"], row["kind"], heads, str(row["units"]), str(row["head_dim"]))
        table.add_row(*cells, f"{row['params']:,}")
    console = Console(width=None if Console().is_terminal else 200, markup=False)
    console.print(table)
    totals = found["totals"]
    share = 100 * totals["prunable_params"] / totals["params"] if totals["params"] else 0.0
    typer.echo(
        f"{totals['heads']} heads in {totals['units']} prune units; {totals['prunable_params']:,} of "
        f"{totals['params']:,} parameters ({share:.1f} %) can leave with them"
    )
    for other in found["not_taken"]:
        say(f"not taken: {other['module']} ({other['class']}; {other['reason']})")
