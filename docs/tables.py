"""Write what the docs say about the code, from the code.

    python docs/tables.py

From the registries: docs/layouts.md, scorers.md, selectors.md, the lists of api-methods.md and the
counts in README.md. From the table of properties: refusals.md. From the recipes: recipes.md. From
the imports and docs/decisions: a table and a list of architecture.md.

Whether a layer may lose all its heads is not read off a layout but tried, on each family's tiny
model.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WRITTEN = "<!-- Written by `python docs/tables.py`; do not edit. -->"


def layouts() -> str:
    """docs/layouts.md."""
    from headprune.core.heads import POLICIES
    from headprune.layouts import registry

    every = {name: registry.get(name) for name in registry.names()}
    found = {name: layout for name, layout in every.items() if not layout.is_feed_forward}
    families = sum(len(layout.families) for layout in found.values())
    rows, sections = [], []
    for name, layout in found.items():
        grouped, bare = tried(layout)
        refused = [p for p in POLICIES if p not in layout.policies] if grouped else []
        unit = "key/value group" if grouped else "head"
        policies = ", ".join(layout.policies) if grouped else ""
        named = ", ".join(family for family, _ in layout.families)
        rows.append(
            f"| [{name}](#{name}) | {named} | {layout.gate or 'the module'} | {unit} | {policies} |"
            f" {bare} |"
        )
        sections.append(_section(name, layout, registry.summary(name), refused))
    return f"""{WRITTEN}
# Layouts

{len(found)} layouts for {families} model families and variants, whose tiny models the laws run over, exact in fp64. A
layout matches structure, so it also takes every other model that is built the same way; [coverage](coverage.md) tries
some. For a module that fits none, try [`hp.propose_layouts`](custom-models.md): it finds a layout or says
[why not](refusals.md).

*Gate* is the output projection whose input is gated. *Unit* is what is removed together by default, *policies* what may
be removed where query heads share a key/value head. *No heads kept* says whether a layer may lose all its heads.

| layout | families | gate | unit | policies | no heads kept |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

## Feed-forwards

With `hp.find_sites(model, feed_forward=True)` the neurons of a feed-forward are found too. Each is one row of the
projections up and one column of the projection down, whose input is gated. A feed-forward may lose all its neurons.
Experts of a mixture are refused: an expert runs on some tokens only.

| layout | up | down | |
| --- | --- | --- | --- |
{chr(10).join(_feed_forwards(every))}

{chr(10).join(sections)}"""


def _feed_forwards(layouts: Mapping[str, Any]) -> list[str]:
    from headprune.layouts import registry

    rows = []
    for name, layout in layouts.items():
        if layout.is_feed_forward:
            up = ", ".join(f"`{slab.path}`" for slab in layout.slabs[:-1])
            rows.append(f"| {name} | {up} | `{layout.gate}` | {registry.summary(name)} |")
    return rows


def _section(name: str, layout: Any, summary: str, refused: list[str]) -> str:
    from headprune.model.describe import gate_words, patch_words, slab_words

    lines = [
        f"gate: {gate_words(layout)}",
        *(f"cut: {slab_words(s, layout.is_feed_forward)}" for s in layout.slabs),
        *patch_words(layout),
    ]
    kept = [f"`{path}`" for path in layout.untouched]
    lines += [f"stays as it is: {', '.join(kept)}"] if kept else []
    if refused:
        lines.append(
            f"refused policies: {', '.join(refused)}; only {' and '.join(layout.policies)} can"
            " be cut"
        )
    return "\n".join([f"### {name}", "", summary, "", *(f"- {line}" for line in lines), ""])


def tried(layout: Any) -> tuple[bool, str]:
    """Whether any family shares key/value heads, and what becomes of a layer that loses all heads,
    by kind."""
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
    words = {
        kind: " or ".join(sorted(found, reverse=True)) for kind, found in sorted(answers.items())
    }
    if len(set(words.values())) == 1:
        return grouped, next(iter(words.values()))
    return grouped, "; ".join(f"{kind}: {answer}" for kind, answer in words.items())


def refusals() -> str:
    """docs/refusals.md."""
    from headprune.detect.properties import PROPERTIES

    rows = "\n".join(f"| **{name}** | {meaning} |" for name, meaning in PROPERTIES.items())
    return f"""{WRITTEN}
# What is refused

headprune cuts a module only if the kept part computes what the gated model computes. Any other module is refused before
anything changes, and the message names one of these properties:

| property | meaning |
| --- | --- |
{rows}

Registered [layouts](layouts.md) correct some of them (norms over the whole projection, head counts of a shared
configuration, `torch.nn.MultiheadAttention`).

`prune_` also refuses:

- a layer without heads, where its code or its cache needs one;
- quantised or sharded projections, and adapters other than plain LoRA;
- weights that a hook of an outer module fetches (accelerate), adapters around a whole attention, and PEFT's prefixes;
- tensors shared with something that is not cut, and projections that sit in two places (`gated` refuses these too);
- part of a group of query heads that share a key/value head, unless the policy allows it (x-transformers: only `group`);
- a module whose `forward` someone replaced, where a cut has to replace it too (accelerate's hooks are allowed);
- a cut inside a `gated` block;
- with an example: any result that differs from the gated model's.

`select` refuses `keep_kv` where no head shrinks the cache: latents that all heads share (DeepSeek), or no cache at all.
"""


def plain(value: Any) -> Any:
    """A setting as a user writes it."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def scorers() -> str:
    """docs/scorers.md."""
    from headprune.scoring import registry

    rows = []
    for name in registry.names():
        scorer = registry.get(name)
        paragraph = (inspect.getdoc(scorer) or "").partition("\n\n")[0]
        formula = " ".join(paragraph.split()).replace("``", "`").replace("|", "\\|")
        settings = ", ".join(
            f"{key}={plain(value)!r}" for key, value in dict(scorer().settings).items()
        )
        cells = [
            registry.summary(name).replace("|", "\\|"),
            told(scorer, "When"),
            formula,
            settings,
        ]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return f"""{WRITTEN}
# Scorers

Importance of every prune unit, higher is more important; `hp.score(model, batches, "taylor")`, or several at once,
which share their passes: `hp.score(model, batches, ["taylor", "fisher"])`. [`auto`](how-to.md#which-scorer) tries
several and takes the first whose loss on held-out rows is about the lowest. Gates m multiply a head's slice of the
output projection's input; l_i is the loss of example i. Each scorer's docstring has its source, where it differs from
it, its cost and its settings: `help(hp.scoring.Taylor)`.

| scorer | what it measures | when | formula, cost, what it needs | settings |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

A unit is a head, or with policy `group` a key/value head with all its query heads: their signed gradients are summed
before anything is made positive. `scores.interval`, `scores.rank_interval`, `scores.lowest(k)` and `scores.stable(k)`
say how far to trust a score; `hp.agreement` compares scorers. [Measured](scorers-accuracy.md): which scorers keep the right
heads of two fine-tuned encoders.
"""


def selectors() -> str:
    """docs/selectors.md."""
    from headprune.selection import Selector, registry

    rows = []
    for name in registry.names():
        selector = registry.get(name)
        needs = ", ".join(_NEEDS[need] for need in sorted(selector.needs)) or "scores"
        shared = Selector.__dataclass_fields__
        own = {k: v for k, v in dict(selector().settings).items() if k not in shared}
        settings = ", ".join(f"{k}={plain(v)!r}" for k, v in own.items())
        cells = [
            registry.summary(name),
            told(selector, "When"),
            needs,
            told(selector, "Cost"),
            settings,
        ]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return f"""{WRITTEN}
# Selectors

Which heads are kept under a budget: `hp.select(scores, hp.Budget(keep_heads=0.5))`, with a selector by name or configured:
`hp.select(scores, budget, hp.selection.Quadratic(min_heads=2))`. All are deterministic, and none ever exceeds a budget.
Of equal scores, the later site's head, then the later head, is removed first. Selectors that go by scores alone name close calls in
the plan's notes: heads on either side of the cut that could change places and differ by no more than standard errors.

| selector | what it does | when | goes by | cost | settings |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

Every selector also takes `min_heads`, the fewest heads or neurons of a layer: 1, or 0 where `ladder` prices both under
one budget, so that whole sub-layers may go. With `multiple_of` (default 1) an attention keeps a multiple of that many
heads, or all it has, for hardware that is faster at such widths; neurons have levels of their own. With `min_heads=0` a
layer may lose its attention and adds only a bias; the plan's notes say so. A module that cannot run that way
(`headprune inspect` says which) keeps a head. No plan removes every head and neuron. [Pipelines](pipelines.md) shows what
that gains and risks where few heads are kept. Sources and details: `help(hp.selection.Quadratic)`.

## Budgets

A `Budget` is one of `keep_heads` (a count or a fraction), `keep_params`, `keep_macs` (at a `length` of tokens),
`keep_kv` (all fractions of the whole model's; `keep_kv` does not count the cache of cross-attention, and sliding windows
count like full layers) and `speedup`. A mapping gives groups of sites budgets of their own, by
kind (an encoder's attention is `self`, a decoder's `causal`, between them `cross`; `feed_forward`) or by a pattern over
names. Their fractions are of what the group's units cost, a speed-up is one of the group alone, and sites that are not
named keep all. `must_keep` and `must_remove` name heads by site, in original indices:

```python
plan = hp.select(
    scores,
    {{"self": hp.Budget(keep_heads=0.5), "cross": hp.Budget(keep_heads=0.8)}},
    must_keep={{"model.encoder.layers.0.self_attn": [3]}},
)
```

## Heads and neurons under one budget

Neurons of feed-forwards compete with heads where the sites hold both. A selector decides on about twelve levels per
feed-forward, made of its neurons by rank; the latency table measures those levels. `ladder` measures what each level
costs in quality, and `repriced` measures again near the plan; `headprune prune --speedup 2` does all of this.
Scores of `surgeon` and `fisher` are cheaper; those of `taylor`, `wanda` and `magnitude` do not compare heads with neurons
([measured](pipelines.md)). `keep_heads` counts heads alone.

```python
import copy

sites = hp.find_sites(model, feed_forward=True)
prices = hp.score(model, batches, "ladder", sites=sites)
refitted = hp.scoring.refitted_loss_of(model, batches, sites=sites)
plan = hp.select(prices, hp.Budget(keep_macs=0.8), loss=refitted)  # by the selector repriced
smaller = copy.deepcopy(model)
hp.prune_(smaller, plan, sites=sites, example=batch)
hp.recover_(smaller, batches, "lstsq", teacher=model)

# For a speed:
table = hp.bench.latency_table(model, batch, sites=sites, batch_size=32, length=128)
plan = hp.select(prices, hp.Budget(speedup=1.5), loss=refitted, latency=table)
```

## Speed

A latency table has how long each layer takes with fewer heads or neurons, measured on this device at the given batch size and length.
The plan's notes have the predicted speed; measure that of the cut model. A recipe with `select.speedup` does all of it.

```python
import copy
from functools import partial

table = hp.bench.latency_table(model, batch, batch_size=32, length=128)
plan = hp.select(scores, hp.Budget(speedup=1.3), latency=table)  # by the knapsack
print(plan.notes)  # predicted
small = copy.deepcopy(model)
hp.prune_(small, plan, example=batch)
(row,) = hp.bench.compare_latency(model, small, partial(hp.bench.shaped_batch, batch), [32], [128])
print(row.ratio, row.low, row.high)  # measured
```

## Selectors that run the model

`iterative`, `local_search` and `repriced` run the model while they choose. In Python, pass the function that measures; a
recipe does so itself (`select.recover` puts recoveries between the steps, or before each measurement). With the prices of
`ladder`, a recipe takes `repriced`, and its losses are those of models that `lstsq` has refitted.

```python
rescore = hp.scoring.rescorer(model, batches, "taylor")
plan = hp.select(scores, budget, hp.selection.Iterative(steps=8), rescore=rescore)
plan = hp.select(scores, budget, "local_search", loss=hp.scoring.loss_of(model, batches))
```
"""


_NEEDS = {
    "curvature": "the curvature of `fisher` or `ggn`",
    "loss": "scores, `loss=`",
    "rescore": "scores, `rescore=`",
}


def told(method: type, word: str) -> str:
    """What a docstring says after a word and a colon, up to the next such line or the end of the
    paragraph."""
    text = re.search(
        rf"^{word}: (.+?)(?=\n[A-Z][a-z]+: |\n\n|\Z)",
        inspect.getdoc(method) or "",
        re.DOTALL | re.MULTILINE,
    )
    return " ".join(text[1].replace("``", "`").split()) if text else ""


def recipes() -> str:
    """docs/recipes.md."""
    from headprune.run import load_recipe, shipped_recipes

    rows = []
    for name, path in shipped_recipes().items():
        recipe = load_recipe(path)
        model = recipe.model.path or recipe.model.class_name or recipe.model.import_path
        data = f"{recipe.data.path} {recipe.data.subset or ''}".strip()
        rows.append(
            f"| [{name}](how-to.md#{name}) | {recipe.description} | {recipe.task} | `{model}` |"
            f" `{data}` |"
        )
    return f"""{WRITTEN}
# Recipes

A recipe is a whole run in one YAML file: model, data, scorer, budget, recovery, measurements. `headprune run NAME` runs
one of these, `headprune run FILE --set key=value` yours, and `headprune validate FILE` lists all that is wrong with it.
Each is a case to start from: copy it, or change what differs with `--set`.

| recipe | what it does | task | model | data |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

`digits-vit` and `custom-model` need no network. The others name models and data sets of the hub; where it cannot be
reached, `model.path` and `data.path` are folders, as the comments at the top of each file say.

## Rows

Data is a hub data set, a file (json, jsonl, csv, tsv, parquet, txt) or a folder with a file for each split.

| task | what a row has | metric |
| --- | --- | --- |
| `text_classification` | `data.text`, one column or a pair, and `data.label` | accuracy |
| `regression` | the same, with a number for a label | mean squared error |
| `token_classification` | a list of words and a list of as many labels | accuracy over words |
| `question_answering` | question and context, the columns of `data.text`, and SQuAD's answers, `data.label` | F1 |
| `causal_lm` | `data.text`, or numbers of tokens (`data.tokens`) | perplexity; bits per character |
| `translation` | `data.text` and what it becomes, `data.target`: any text to text | BLEU (sacrebleu) |
| `image_classification` | `data.image`, a picture or an array, and `data.label` | accuracy |
| `audio_classification` | `data.audio`, a path, bytes or an array with its sampling rate, and `data.label` | accuracy |

- **Splits.** A part that the data lacks is drawn from the train rows (`data.holdout`, `data.test_holdout`). A split
  that is named for one purpose (`test_split: validation`) serves no other. No row is in two parts: a row that is
  also a test row is removed from train and validation, one that is also a validation row from train.
  Inputs are compared, text without capitals and white space.
- **Repeated rows** are counted before they are removed, and again as the model reads them: texts that are
  cut to the same `data.max_length` tokens, words that a tokenizer does not know, pictures that a processor makes
  the same. Those stay. Both counts are printed and are in the record (`rows.overlap`), and the report warns of
  them.
- **Labels** are names or numbers. Names, those of a `ClassLabel` too, are put into the order of a model that has
  the same names, in any capitals, with blanks, `_` or `-`; numbers are those of the model's classes. A run prints
  which label is which class. Where the order is only a guess (a model that calls its classes `LABEL_0`,
  `LABEL_1`, ... gets names in sorted order), write `data.labels: [negative, neutral, positive]`,
  the label of every class in the model's order. A model that the recipe does not train answers up to 256 train rows
  first, and where another order of labels fits its answers far better, the run stops and says both accuracies and
  that order; if names or `data.labels` say otherwise, it goes on with a warning.
- **Questions.** A context that is longer than `data.max_length` is cut at its end: there is one window a question. The
  record says how many questions lose their answer so; they have no loss, but count in F1 and exact match. A
  question without an answer (SQuAD 2) is one that the model should answer at its `[CLS]` token; models without that
  token refuse such rows. F1 is what the tables have; `metrics.exact_match` of the record has the other.
- **Sound** is brought to the rate that the model's feature extractor asks for, averaged over channels, and cut or
  filled with silence to `data.seconds`, so that no clip depends on its batch. Wav files are read as they are, other
  formats with `pip install soundfile`.
- **`score.scorer: auto`**, the default, tries several scorers and chooses the first whose loss on held-out rows is
  about the lowest ([which scorer](how-to.md#which-scorer)). The run supplies budget, selector (`global_topk` for one that measures the
  model) and the recoveries that do not train; `keep`, `refit` and `refit_settings` are therefore no settings here, and
  `score.until` is refused. Allowed under `score.settings`: `candidates`, names or `{{name: settings}}`;
  `folds`, the parts that rows are dealt to (2); `random_draws`, the random plans beside them (2); `confidence` (0.95).
- **A model of your own** comes by import path: [docs/custom-models.md](custom-models.md#in-a-recipe).
- **Sweeps** take a recipe as their base: [docs/sweeps.md](sweeps.md).
"""


#: Where architecture.md says who imports whom.
IMPORTS = re.compile(
    r"(<!-- imports, by `python docs/tables.py` -->\n).*?(\n<!-- end of imports -->)", re.DOTALL
)
#: Where it lists the decisions.
DECISIONS = re.compile(
    r"(<!-- decisions, by `python docs/tables.py` -->\n).*?(\n<!-- end of decisions -->)", re.DOTALL
)


def architecture() -> str:
    """docs/architecture.md, with the imports and the decisions of today."""
    import grimp

    graph = grimp.build_graph("headprune", include_external_packages=True, cache_dir=None)
    imported: dict[str, set[str]] = {}
    outside: dict[str, set[str]] = {}
    for module in graph.modules:
        package = _package(module)
        for other in (
            graph.find_modules_directly_imported_by(module)
            if module.startswith("headprune.")
            else ()
        ):
            own = other.startswith("headprune.")
            if own and _package(other) != package:
                imported.setdefault(package, set()).add(_package(other))
            if not own and other != "headprune" and other not in sys.stdlib_module_names:
                outside.setdefault(package, set()).add(other)
    # A package stands above all that it imports.
    below = {
        package: _below(package, imported)
        for package in {_package(m) for m in graph.modules if m.startswith("headprune.")}
    }
    lines = ["| package | imports | other packages |", "| --- | --- | --- |"]
    for package in sorted(below, key=lambda name: (-len(below[name]), name)):
        cells = [", ".join(sorted(found.get(package, ()))) for found in (imported, outside)]
        lines.append(f"| `{package}` | {' | '.join(cells)} |")
    text = (HERE / "architecture.md").read_text(encoding="utf-8")
    text = IMPORTS.sub(lambda found: f"{found[1]}{chr(10).join(lines)}{found[2]}", text)
    return DECISIONS.sub(lambda found: f"{found[1]}{decisions()}{found[2]}", text)


def decisions() -> str:
    """The notes of docs/decisions, by number and title."""
    lines = []
    for note in sorted((HERE / "decisions").glob("*.md")):
        number, _, title = note.read_text(encoding="utf-8").partition("\n")[0][2:].partition(". ")
        lines.append(f"{number}. [{title}](decisions/{note.name})")
    return "\n".join(lines)


def _package(module: str) -> str:
    """``core`` of ``headprune.core.plan``."""
    return module.split(".")[1] if "." in module else module


def _below(package: str, imported: Mapping[str, set[str]]) -> set[str]:
    """All that a package imports, directly or not."""
    found: set[str] = set()
    unvisited = [package]
    while unvisited:
        more = imported.get(unvisited.pop(), set()) - found
        found |= more
        unvisited += more
    return found


def api_methods() -> str:
    """docs/api-methods.md, with every registered method."""
    from headprune import recovery, scoring, selection

    text = (HERE / "api-methods.md").read_text(encoding="utf-8")
    registries = {
        "Scorers": scoring.registry,
        "Selectors": selection.registry,
        "Recoveries": recovery.registry,
    }
    for title, registry in registries.items():
        methods = [registry.get(name) for name in registry.names() if registry.is_builtin(name)]
        lines = [f"::: {method.__module__}.{method.__name__}\n" for method in methods]
        section = re.compile(rf"(^## {title}\n\n).*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
        text = section.sub(rf"\g<1>{chr(10).join(lines)}\n", text)
    return text


def readme() -> str:
    """README.md, with the counts of families, layouts and scorers."""
    from headprune import scoring
    from headprune.layouts import registry

    names = [
        name
        for name in registry.names()
        if registry.is_builtin(name) and not registry.get(name).is_feed_forward
    ]
    n_families = sum(len(registry.get(name).families) for name in names)
    n_scorers = sum(scoring.registry.is_builtin(name) for name in scoring.registry.names())
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\d+(?= families and variants)", str(n_families), text)
    text = re.sub(r"\d+(?= layouts\]\(docs/layouts.md\))", str(len(names)), text)
    return re.sub(r"\d+(?= \[scorers\]\(docs/scorers.md\))", str(n_scorers), text)


#: What is written, from the root of the repository, and by which function.
WRITES = {
    "docs/layouts.md": layouts,
    "docs/scorers.md": scorers,
    "docs/selectors.md": selectors,
    "docs/refusals.md": refusals,
    "docs/recipes.md": recipes,
    "docs/architecture.md": architecture,
    "docs/api-methods.md": api_methods,
    "README.md": readme,
}


def main(root: Path = ROOT) -> None:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in WRITES.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
