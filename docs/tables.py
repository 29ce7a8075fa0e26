"""Writes docs/layouts.md and docs/scorers.md from their registries and docs/refusals.md from the table of properties.

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
    from headprune.core.heads import POLICIES
    from headprune.layouts import registry

    found = {name: registry.get(name) for name in registry.names()}
    families = sum(len(layout.families) for layout in found.values())
    rows, sections = [], []
    for name, layout in found.items():
        grouped, bare = tried(layout)
        refused = [p for p in POLICIES if p not in layout.policies] if grouped else []
        unit = "key/value group" if grouped else "head"
        policies = ", ".join(layout.policies) if grouped else ""
        named = ", ".join(family for family, _ in layout.families)
        rows.append(f"| [{name}](#{name}) | {named} | {layout.gate or 'the module'} | {unit} | {policies} | {bare} |")
        sections.append(_section(name, layout, registry.summary(name), refused))
    return f"""{WRITTEN}
# Layouts

{len(found)} layouts for {families} model families and variants, whose tiny models the laws run over, exact in fp64. A
layout matches structure, so it also takes every other model that is built the same way; [coverage](coverage.md) tries
some. What fits none is looked at by [`hp.propose_layouts`](custom-models.md) or [refused](refusals.md).

*Gate* is the output projection whose input is gated. *Unit* is what leaves together by default, *policies* what may
leave where query heads share a key/value head. *No heads left* says whether a layer may lose all its heads.

| layout | families | gate | unit | policies | no heads left |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

{chr(10).join(sections)}"""


def _section(name: str, layout: Any, summary: str, refused: list[str]) -> str:
    from headprune.model.describe import gate_words, patch_words, slab_words

    lines = [f"gate: {gate_words(layout)}", *(f"cut: {slab_words(s)}" for s in layout.slabs), *patch_words(layout)]
    kept = [f"`{path}`" for path in layout.untouched]
    lines += [f"stays as it is: {', '.join(kept)}"] if kept else []
    if refused:
        lines.append(f"refused policies: {', '.join(refused)}; only {' and '.join(layout.policies)} can be cut")
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
shared configuration, `torch.nn.MultiheadAttention`). Besides, `prune_` refuses: a layer without heads where its code or
its cache needs one; quantised, sharded or adapted projections; weights that accelerate offloads; adapters around a
whole attention, and prefixes that PEFT makes for all heads; tensors that are shared with something that is not cut, and
projections that sit in two places (`gated` refuses these too); part of a group of query heads that share a key/value
head, unless the policy allows it (x-transformers finds a key/value head by a query head's place, so there whole groups
leave, policy `group`); a module whose `forward` someone replaced, where a cut has to replace it too (accelerate's hooks
are no such thing); a cut inside a `gated` block; and, given an example, every result that is not the gated model's.
`select` refuses `keep_kv` where no head shrinks the cache: latents that all heads share (DeepSeek), or no cache at all.
"""


def scorers() -> str:
    """docs/scorers.md."""
    import inspect

    from headprune.scoring import registry

    rows = []
    for name in registry.names():
        scorer = registry.get(name)
        formula = (inspect.getdoc(scorer) or "").partition("\n")[0].replace("``", "`").replace("|", "\\|")
        settings = ", ".join(f"{key}={value!r}" for key, value in dict(scorer().settings).items())
        rows.append(f"| `{name}` | {registry.summary(name).replace('|', chr(92) + '|')} | {formula} | {settings} |")
    return f"""{WRITTEN}
# Scorers

Importance of every prune unit, higher is more important; `hp.score(model, batches, "taylor")`, or several at once,
which share their passes: `hp.score(model, batches, ["taylor", "fisher"])`. Gates m multiply a head's slice of the
output projection's input; l_i is the loss of example i. Each scorer's docstring has its source, where it differs from
it, its cost and its settings: `help(hp.scoring.Taylor)`.

| scorer | what it measures | formula, cost, what it needs | settings |
| --- | --- | --- | --- |
{chr(10).join(rows)}

A unit is a head, or with policy `group` a key/value head with all its query heads: their signed gradients are summed
before anything is made positive. Which scores can be trusted how far is said by `scores.interval`,
`scores.rank_interval`, `scores.lowest(k)` and `scores.stable(k)`; `hp.agreement` compares scorers. Which of them keep
the right heads of two fine-tuned encoders is measured in [scorers-accuracy.md](scorers-accuracy.md).
"""


def main(folder: Path = HERE) -> None:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in (("layouts.md", layouts), ("scorers.md", scorers), ("refusals.md", refusals)):
            (folder / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
