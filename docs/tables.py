"""Writes docs/layouts.md from the registry of layouts and docs/refusals.md from the table of properties.

    python docs/tables.py

Whether a layer may lose all its heads is not read off a layout but tried, on each family's tiny model.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WRITTEN = "<!-- Written by `python docs/tables.py`; do not edit. -->"


def layouts() -> str:
    """docs/layouts.md."""
    from headprune.layouts import registry

    found = {name: registry.get(name) for name in registry.names()}
    families = sum(len(layout.families) for layout in found.values())
    rows, sections = [], []
    for name, layout in found.items():
        grouped, bare = tried(layout)
        unit = "key/value group" if grouped else "head"
        policies = ", ".join(layout.policies) if grouped else ""
        named = ", ".join(family for family, _ in layout.families)
        rows.append(f"| [{name}](#{name}) | {named} | {layout.gate or 'the module'} | {unit} | {policies} | {bare} |")
        sections.append(_section(name, layout, registry.summary(name)))
    return f"""{WRITTEN}
# Layouts

{len(found)} layouts for {families} model families whose tiny models the laws run over, exact in fp64. A layout matches
structure, so it also takes every other model that is built the same way; [coverage](coverage.md) tries some. What fits
none is looked at by [`hp.propose_layouts`](custom-models.md) or [refused](refusals.md).

*Gate* is the output projection whose input is gated. *Unit* is what leaves together by default, *policies* what may
leave where query heads share a key/value head. *No heads left* says whether a layer may lose all its heads.

| layout | families | gate | unit | policies | no heads left |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

{chr(10).join(sections)}"""


def _section(name: str, layout: Any, summary: str) -> str:
    from headprune.model.describe import gate_words, patch_words, slab_words

    lines = [f"gate: {gate_words(layout)}", *(f"cut: {slab_words(s)}" for s in layout.slabs), *patch_words(layout)]
    kept = [f"`{path}`" for path in layout.untouched]
    lines += [f"stays as it is: {', '.join(kept)}"] if kept else []
    return "\n".join([f"### {name}", "", summary, "", *(f"- {line}" for line in lines), ""])


def tried(layout: Any) -> tuple[bool, str]:
    """Whether any family shares key/value heads, and what becomes of a layer that loses all heads, by kind."""
    from headprune.core.errors import UnsupportedModel
    from headprune.core.heads import HeadMask
    from headprune.model.sites import find_sites
    from headprune.surgery.prune import prune_

    grouped, answers = False, {}
    for family, _ in layout.families:
        try:
            model, _ = layout.tiny(0, family)
        except ImportError:  # a package that is optional
            continue
        sites = find_sites(model)
        own = [s for s in sites if s.layout == layout.name]
        grouped = grouped or any(s.n_kv_heads < s.n_query_heads for s in own)
        for site in {s.kind: s for s in reversed(own)}.values():
            mask = HeadMask.from_keep({site.name: []}, {s.name: s.n_query_heads for s in sites})
            try:
                prune_(copy.deepcopy(model), mask, sites=sites)
            except UnsupportedModel:
                answers.setdefault(site.kind, set()).add("keeps one head")
            else:
                answers.setdefault(site.kind, set()).add("yes")
    words = {kind: " or ".join(sorted(found, reverse=True)) for kind, found in sorted(answers.items())}
    if len(set(words.values())) == 1:
        return grouped, next(iter(words.values()))
    return grouped, "; ".join(f"{kind}: {answer}" for kind, answer in words.items())


def refusals() -> str:
    """docs/refusals.md."""
    from headprune.surgery.properties import PROPERTIES

    rows = "\n".join(f"| **{name}** | {meaning} |" for name, meaning in PROPERTIES.items())
    return f"""{WRITTEN}
# What is refused

headprune cuts a module only if what is left computes the gated model's numbers. A module that it cannot do this for is
refused before anything changes, and the message says why. The properties that `hp.propose_layouts` and
[coverage](coverage.md) name:

| property | meaning |
| --- | --- |
{rows}

Registered [layouts](layouts.md) know corrections for some of them (norms over the whole projection, head counts of a
shared configuration, `torch.nn.MultiheadAttention`). Besides, `prune_` refuses: a layer without heads where its code
or its cache needs one; quantised, sharded or adapted projections; tensors that are shared with something that is not
cut; part of a group of query heads that share a key/value head, unless the policy allows it; a cut inside a `gated`
block; and, given an example, every result that is not the gated model's.
"""


def main(folder: Path = HERE) -> None:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in (("layouts.md", layouts), ("refusals.md", refusals)):
            (folder / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
