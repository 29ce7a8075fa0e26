"""Records and tables as reports see them, with what lies beside them, and a page as a parser sees
it."""

import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np

from headprune.core.codec import FrozenDict
from headprune.core.heads import AttentionSite, HeadMask, SiteKeep
from headprune.core.ladders import SiteLadder
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.core.plan import Budget, PruningPlan
from headprune.core.record import Proof, QualityRow, RunRecord, SizeRow, SpeedRow
from headprune.core.scores import Cost, CostTable, HeadScores, ModelFingerprint
from headprune.core.sweeps import SweepTable
from headprune.maps.attention_maps import AttentionMaps, SiteMaps
from headprune.maps.pictures import AttentionPictures, ShownExample

NASTY = '<script>alert("x")</script>|`*&'


def scores_of(sites, scale=1.0, errors=True):
    draw = random.Random(0)
    values = tuple(tuple(scale * draw.random() ** 2 for _ in s.units) for s in sites)
    spread = (
        tuple(tuple(0.07 * v + 0.002 * scale for v in row) for row in values) if errors else None
    )
    model, settings = ModelFingerprint("5f1c" * 16, "a94e" * 16), FrozenDict({"reduce": "example"})
    by = ("taylor", settings, 512)
    return HeadScores(tuple(sites), values, spread, *by, model, "d0d0" * 16, 7)


def plan_of(scores, share=0.5):
    ranked = scores.ranked()
    gone = {(u.name, h) for u in ranked[: round(len(ranked) * (1 - share))] for h in u.heads}
    keep = {s.name: [h for h in s.heads if (s.name, h) not in gone] for s in scores.sites}
    mask = HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in scores.sites})
    return PruningPlan(
        mask, Budget(keep_heads=share), "global_topk", FrozenDict(), "taylor", scores.digest
    )


def record_of(n_layers=4, n_heads=8, n_kv=None, **changes):
    """A realistic record of a run that went well."""
    name = "model.layers.{}.self_attn" if n_kv else "bert.encoder.layer.{}.attention.self"
    family = ("llama", "causal") if n_kv else ("bert", "self")
    shape = (n_heads, n_kv or n_heads, 64, 64, (*range(n_heads),))
    sites = [AttentionSite(name.format(i), *family, *shape) for i in range(n_layers)]
    scores = scores_of(sites)
    plan = plan_of(scores)
    total, kept = n_layers * n_heads, plan.mask.n_kept
    test = ("test", 872)
    versions = {"python": "3.12.4", "torch": "2.9.0", "transformers": "5.14.0"}
    machine = {"processor": "AMD EPYC 7B13", "threads": 2, "memory_gib": 7.8, "accelerator": None}
    recipe = {"model": "bert-mini", "data": {"path": "sst2", "split": "train"}}
    rows = {"score": {"split": "train", "rows": list(range(512))}}
    final = "recovered (finetune)"
    record = RunRecord(
        name="sst2-bert-taylor",
        status="done",
        stage="report",
        created="2026-03-02T09:14:31Z",
        recipe=FrozenDict({**recipe, "scorer": "taylor", "keep_heads": 0.5}),
        versions=FrozenDict({**versions, "headprune": "0.1.0"}),
        hardware=FrozenDict(machine),
        git_commit="a996f20c",
        seeds=FrozenDict({"score": 7, "random": list(range(10)), "finetune": 11}),
        rows=FrozenDict({**rows, "test": {"split": "test", "n": 872}}),
        scores=scores,
        plan=plan,
        quality=(
            QualityRow("base", total, "accuracy", 0.9763, *test, 0.0811),
            QualityRow("taylor", kept, "accuracy", 0.9694, *test, 0.1022),
            QualityRow("random", kept, "accuracy", 0.9128, *test, 0.2671, draws=10, spread=0.0214),
            QualityRow("magnitude", kept, "accuracy", 0.9415, *test, 0.1743),
            QualityRow(final, kept, "accuracy", 0.974, *test, 0.0874, trained=True),
        ),
        speed=(
            SpeedRow(1, 128, 0.00812, 0.00871, 0.00798, 0.00866, 1.012, 0.991, 1.034, 200),
            SpeedRow(8, 128, 0.0412, 0.0437, 0.0378, 0.0395, 1.09, 1.071, 1.108, 200),
            SpeedRow(32, 128, 0.1583, 0.1641, 0.1413, 0.1478, 1.12, 1.104, 1.139, 100),
        ),
        size=(
            SizeRow("heads", float(total), float(kept)),
            SizeRow("parameters", 11_171_074.0, 10_120_450.0),
            SizeRow("MACs (128 tokens)", 412_876_800.0, 345_505_792.0),
            SizeRow("KV cache, bytes a token", 4096.0, 2048.0),
        ),
        proofs=(Proof("logits", 3.1e-07, 4.82, 1.0e-05, "float32", 16),),
        timings=FrozenDict({"load": 3.21, "score": 41.8, "finetune": 312.0, "bench": 78.4}),
        warnings=("The speed was measured on two shared cores; expect other ratios elsewhere.",),
    )
    return replace(record, **changes)


def costed(record):
    """The same with what every head costs."""
    units = tuple(
        tuple(Cost(1000, 0, 1000, 64, 512 * len(u)) for u in s.units) for s in record.scores.sites
    )
    table = CostTable(Cost(10**6, 0, 10**5, 10**3, 4096), units, 128)
    return replace(record, scores=replace(record.scores, costs=table))


def of_bert_base(n_layers=12, n_neurons=3072):
    """Made-up scores of BERT-base, or of a model like it, with all of its neurons."""
    draw = random.Random(0)
    sites, values, costs = [], [], []
    for layer in range(n_layers):
        name = f"bert.encoder.layer.{layer}"
        heads, neurons = tuple(range(12)), tuple(range(n_neurons))
        attention = AttentionSite(f"{name}.attention", "bert", "self", 12, 12, 64, 64, heads)
        sites.append(attention)
        values.append(tuple(draw.random() for _ in heads))
        costs.append((Cost(196_800, 0, 196_608, 128, 0),) * 12)
        of_layer = ("feed_forward_bert", "feed_forward", n_neurons, n_neurons, 1, 1, neurons)
        sites.append(AttentionSite(name, *of_layer))
        values.append(tuple(draw.random() / 100 for _ in neurons))
        costs.append((Cost(1537, 0, 1536, 0, 0),) * n_neurons)
    total = CostTable(Cost(109_000_000, 0, 85_000_000, 20_000, 0), tuple(costs), 128)
    by = ("made up", FrozenDict(), 1, ModelFingerprint("s", "w"))
    return HeadScores(tuple(sites), tuple(values), None, *by, costs=total)


def with_neurons():
    """A record of one budget for heads and neurons, and its latency table."""
    scores = of_bert_base(n_layers=6, n_neurons=1536)
    rows, ladders, keep = [], [], []
    for site in scores.sites:
        present = len(site.heads)
        seconds = tuple(0.04262 * count / present for count in range(present + 1))
        rows.append(SiteLatency(site.name, seconds, neurons=site.is_feed_forward))
        ladders.append(SiteLadder(site.name, (present // 6, present), (0.00072, 0.0)))
        keep.append(SiteKeep.of(site, range(present // 6)))
    table = LatencyTable(0.6, tuple(rows), 32, 128, "cpu, 2 threads", "float32")
    scores = replace(scores, ladders=tuple(ladders))
    chosen = ("knapsack", FrozenDict(), "ladder", scores.digest)
    plan = PruningPlan(HeadMask(tuple(keep)), Budget(speedup=3.6), *chosen)
    return replace(record_of(), scores=scores, plan=plan), table


def maps_of(record, n_examples=3, length=6, image=None, words=True):
    """Maps of the record's sites: head 0 looks at the token before, the others here and there."""
    draw = np.random.default_rng(0)
    sites = []
    for site in record.scores.sites:
        weights = (
            draw.random((n_examples, len(site.heads), length, length), dtype=np.float32) ** 6 + 1e-3
        )
        weights[:, 0, np.arange(1, length), np.arange(length - 1)] = 90.0
        if site.kind == "causal":
            weights = weights * np.tri(length, dtype=np.float32)
        weights /= weights.sum(-1, keepdims=True)
        masks = (np.ones((n_examples, length), bool) for _ in range(2))
        sites.append(SiteMaps(site.name, site.kind, site.heads, weights, *masks))
    tokens = (
        tuple(tuple(f"t{i}.{j}" for j in range(length)) for i in range(n_examples)) if words else ()
    )
    return AttentionMaps(tuple(sites), tokens, (), image)


def pictures_of(record, n_examples=3, length=6):
    """Pictures of these maps, of text."""
    return AttentionPictures.of(maps_of(record, n_examples, length))


def image_pictures_of(record, side=3):
    """Pictures of an image with a class token."""
    maps = maps_of(record, 2, side * side + 1, (side, side), words=False)
    own = ShownExample("test row 0, label 7", pixels="AAAA////", height=1, width=2)
    return AttentionPictures.of(maps, [own, replace(own, title="test row 1")])


class Page(HTMLParser):
    """What a browser would see: elements with attributes, and text without tags."""

    VOID = frozenset({"meta", "link", "br", "wbr", "input", "col", "img", "hr"})

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.open = []
        self.words = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def cells(self):
        return [
            a
            for tag, a in self.elements
            if tag == "td" and "cell" in (a.get("class") or "").split()
        ]

    def table_row(self, name, html):
        found = re.search(
            rf'<tr[^>]*><th scope="row"[^>]*>{re.escape(name)}.*?</tr>', html, re.DOTALL
        )
        assert found, f"no row {name}"
        return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", found[0]))


def sweep_table(metric="accuracy"):
    rows = []
    drops = {
        ("taylor", 0.5): (0.01, 0.03),
        ("taylor", 0.25): (0.05, 0.05),
        ("random", 0.5): (0.2, 0.1),
        ("random", 0.25): (0.01, 0.02),
    }
    for (scorer, keep), values in drops.items():
        for seed, lost in enumerate(values):
            row = {"run": f"{scorer}{keep}{seed}", "scorer": scorer, "keep": keep, "seed": seed}
            for split, more in (("validation", 0.0), ("test", 0.01)):
                row |= {split: 0.9 - lost - more, f"{split}_loss": 0.3}
                row[f"{split}_drop"] = lost + more
                row |= {f"{split}_drop_low": lost - 0.01, f"{split}_drop_high": lost + 0.02}
            heads = int(32 * keep)
            row |= {"heads": heads, "params": 1000 * heads, "macs": 10 * heads, "kv": None}
            rows.append(FrozenDict({**row, "plan": "plans/abcdefgh.json"}))
    base = {"validation": 0.9, "test": 0.91, "validation_loss": 0.3, "test_loss": 0.3}
    base |= {"validation_rows": 300, "test_rows": 420}
    base |= {"heads": 32, "params": 40000, "macs": 400, "kv": None}
    failed = (FrozenDict({"scorer": "fisher", "keep": 0.5, "seed": 0, "error": "no | labels"}),)
    return SweepTable(
        "demo", metric, ("scorer", "keep"), ("keep",), FrozenDict(base), tuple(rows), failed
    )
