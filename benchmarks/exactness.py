"""How exact every model family is: gated against pruned, reloaded against pruned, and a layer that
loses every head.

    python benchmarks/exactness.py
    python benchmarks/exactness.py --families bert llama --out /tmp/exactness.json

For each family that the layouts name, a tiny random model runs in fp64 throughout: the largest
difference between its outputs with gates and its outputs once cut, over several ragged plans; the
difference after saving and loading (fp32, must be 0); and whether each of its layers may be left
without heads. Writes one JSON record with the versions used.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import headprune as hp
from headprune.core.errors import HeadPruneError, UnsupportedModel
from headprune.core.files import write_atomic
from headprune.layouts import registry
from headprune.model.double import Doubled, double_
from headprune.model.running import call, outputs
from headprune.run.surroundings import git_commit, hardware, versions

RECORDS = Path(__file__).parent / "records"


def measure(layout: str, family: str, plans: int = 5) -> dict[str, Any]:
    """One row of the table."""
    model, batch = _shaken(*registry.get(layout).tiny(0, family))
    double, wide = (
        double_(model),
        {k: v.double() if v.is_floating_point() else v for k, v in batch.items()},
    )
    sites = hp.find_sites(double)
    full = _run(double, wide)
    gaps, effects = [], []
    for seed in range(plans):
        small, mask = copy.deepcopy(double), _ragged(sites, seed)
        with hp.gated(double, mask, sites):
            gated = _run(double, wide)
        hp.prune_(small, mask, sites=sites)
        gaps.append(_gap(_run(small, wide), gated))
        effects.append(_gap(gated, full))
    empty = {site.name: _empty(double, wide, sites, site.name) for site in sites}
    return {
        "layout": layout,
        "sites": len(sites),
        "kinds": sorted({s.kind for s in sites}),
        "gated_minus_pruned": max(gaps),
        "gated_minus_full": min(effects),
        "reloaded_minus_pruned": _reloaded(layout, family),
        "zero_heads": sorted({v if isinstance(v, str) else "ok" for v in empty.values()}),
        "zero_heads_difference": max(
            (v for v in empty.values() if isinstance(v, float)), default=None
        ),
    }


def _empty(model: nn.Module, batch: Any, sites: Any, name: str) -> float | str:
    """The difference when one site loses all heads, or ``refused``."""
    mask = hp.HeadMask.from_keep({name: []}, {s.name: s.n_query_heads for s in sites})
    small = copy.deepcopy(model)
    try:
        hp.prune_(small, mask, sites=sites)
    except UnsupportedModel:
        return "refused"
    with hp.gated(model, mask, sites):
        return _gap(_run(small, batch), _run(model, batch))


def _reloaded(layout: str, family: str) -> float | str:
    """The difference that saving and loading makes, in the model's own dtype."""
    model, batch = _shaken(*registry.get(layout).tiny(0, family))
    hp.prune_(model, _ragged(hp.find_sites(model), 1))
    full = None if hasattr(model, "config") else registry.get(layout).tiny(1, family)[0]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            hp.save_pretrained(model, folder)
            loaded = hp.from_pretrained(folder, full)
        except HeadPruneError as error:
            return f"refused: {error}"
        return _gap(outputs(call(loaded, batch)), outputs(call(model, batch)))


def _shaken(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Biases and norms are zeros and ones in fresh models, which would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval(), batch


def _ragged(sites: Any, seed: int) -> hp.HeadMask:
    """Another number of units at every site, never none of them."""
    rng, keep = random.Random(seed), {}
    for index, site in enumerate(sites):
        n_kept = 1 + (index + seed) % max(1, len(site.units) - 1)
        keep[site.name] = [h for unit in rng.sample(site.units, n_kept) for h in unit]
    return hp.HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})


def _run(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.no_grad(), Doubled():
        return outputs(call(model, batch))


def _gap(got: list[Tensor], expected: list[Tensor]) -> float:
    if [t.shape for t in got] != [t.shape for t in expected]:
        return float("inf")
    return max(
        (float((a - b).abs().max()) for a, b in zip(got, expected, strict=True) if a.numel()),
        default=0.0,
    )


def is_exact(row: dict[str, Any]) -> bool:
    """Whether cuts equal gates, gates do something, and a checkpoint gives back every bit."""
    return (
        "error" not in row
        and row["gated_minus_pruned"] < 1e-9 < row["gated_minus_full"]
        and row["reloaded_minus_pruned"] == 0
        and all(v in ("ok", "refused") for v in row["zero_heads"])
        and (row["zero_heads_difference"] or 0.0) < 1e-9
    )


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows for people."""
    head = (
        f"{'family':<32}{'layout':<22}{'|gated - pruned|':>17}{'|reloaded - pruned|':>21}  layer"
        " without heads"
    )
    lines = [head]
    for family, row in rows.items():
        if "error" in row:
            lines.append(f"{family:<32}{row['layout']:<22}  {row['error']}")
            continue
        reloaded = row["reloaded_minus_pruned"]
        reloaded = f"{reloaded:.1e}" if isinstance(reloaded, float) else "see record"
        gap = row["zero_heads_difference"]
        zero = " / ".join(row["zero_heads"]) + (f" ({gap:.1e})" if gap is not None else "")
        lines.append(
            f"{family:<32}{row['layout']:<22}{row['gated_minus_pruned']:>17.1e}{reloaded:>21} "
            f" {zero}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", help="default: all of the registry")
    parser.add_argument("--out", type=Path, default=RECORDS / "exactness.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows: dict[str, dict[str, Any]] = {}
    for layout in registry.names():
        for family, _ in registry.get(layout).families:
            if args.families is None or family in args.families:
                try:
                    rows[family] = measure(layout, family)
                except Exception as error:  # a row of its own, and exit code 1
                    rows[family] = {"layout": layout, "error": f"{type(error).__name__}: {error}"}
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    surroundings = {
        "created": when,
        "commit": git_commit(),
        "versions": dict(versions()),
        "hardware": hardware(torch.device("cpu")),
    }
    write_atomic(
        args.out,
        (json.dumps({**surroundings, "rows": rows}, indent=1, default=str) + "\n").encode(),
    )
    print(table(rows))
    wrong = [f for f, r in rows.items() if not is_exact(r)]
    print(
        f"{len(rows)} families, {len(rows) - len(wrong)} exact"
        + (f", not exact: {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
