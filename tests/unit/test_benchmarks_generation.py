"""Studies of models that generate: benchmarks/kv_groups.py and benchmarks/translation.py."""

import json
import math
import random
import shlex

import pytest
import torch

import headprune as hp
from tests.benchmark_runs import page_of, record_of, write_rows
from tests.scripts import benchmark
from tests.tiny_models import WORDS


def test_kv_groups_are_cut_and_the_page_says_the_record(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    kv_groups = benchmark("kv_groups")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64)).eval()
    model.save_pretrained(tmp_path)
    draw = random.Random(0)
    rows = [[1, *draw.choices(range(3, 40), k=12)] for _ in range(380)]
    lines = [json.dumps({"input_ids": row}) for row in rows]
    (tmp_path / "stories.jsonl").write_text("\n".join(lines))

    out = tmp_path / "kv-groups-stories.json"
    few = f"--model {tmp_path} --keep 0.5 --steps 3 --out {out}"
    record = record_of(kv_groups, f"{few} --seeds 1 --scorers surgeon")
    assert record["groups"] == 8
    ways = {row["way"]: row for row in record["rows"] if row["scorer"] == "surgeon"}
    assert tuple(ways) == kv_groups.WAYS
    assert all(sum(row["groups"]) == 4 for row in ways.values())
    perplexity = {name: row["perplexity"] for name, row in ways.items()}
    assert perplexity["lstsq+ff"] != perplexity["cut"] != perplexity["trained"]
    # Perplexity of the uncut model over all rows, by plain code; the test rows are a draw of them.
    with torch.no_grad():
        loss = float(model(input_ids=torch.tensor(rows), labels=torch.tensor(rows)).loss)
    assert record["base"] == pytest.approx(math.exp(loss), rel=0.02)

    more = record_of(kv_groups, f"{few} --seeds 2 --scorers surgeon")["rows"]
    assert more[: len(record["rows"])] == record["rows"]
    dense = [row["perplexity"] for row in more if row["scorer"] == "dense"]
    assert len(dense) == 2
    assert dense[0] != dense[1], "a seed is another order of training rows"
    out.write_text(json.dumps(record))
    cells = " | ".join(f"{perplexity[way]:.3f}" for way in kv_groups.WAYS)
    figure = f"--figure --records {tmp_path} --docs {tmp_path}"
    assert f"| surgeon | 50% | {cells} |" in kv_groups.main(shlex.split(figure)).read_text()


@pytest.fixture(scope="module")
def translation():
    pytest.importorskip("sacrebleu")
    return benchmark("translation")


def sentence(draw):
    """A translation says every word in capitals."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(2, 6)))
    return {"en": text, "de": text.upper()}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The arguments of a study of two tiny towers."""
    folder = tmp_path_factory.mktemp("translation")
    write_rows(folder, sentence, validation=8, test=12)
    sizes = ["encoder_layers=1", "decoder_layers=1", "d_model=32", "num_attention_heads=4"]
    settings = [f"model.config.{size}" for size in sizes]
    settings += ["data.vocabulary=300", "data.calibration=24", "decode.max_length=8"]
    where = f"--data {folder} --work {folder / 'work'} --small"
    return f"{where} --set train.epochs=1 {' '.join(settings)}"


def test_translators_are_cut_by_kind_and_a_run_goes_on(translation, given, tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "SHARES", {"all": (0.5,), "cross": (0.5,)})
    out = f"--out {tmp_path / 'translation-small-cpu.json'}"
    record = record_of(translation, f"{given} {out} --ways cut --parts cross")
    assert record["heads"] == {"self": 4, "causal": 4, "cross": 4}
    assert [(row["kept"], row["way"]) for row in record["rows"]] == [(2, "cut"), (1, "cut")]
    more = record_of(translation, f"{given} {out} --parts all cross --ways cut distilled")
    assert more["rows"][:2] == record["rows"]
    ways = {(row["part"], row["kept"], row["way"]): row for row in more["rows"]}
    cuts = [("all", 6), ("cross", 2), ("cross", 1)]
    wanted = {(*cut, way) for cut in cuts for way in ("cut", "distilled")}
    # The whole model is trained as long.
    assert set(ways) == {("all", 12, "distilled"), *wanted}
    assert record["ways"]["distilled"][1]["distill"] == 1.0, "as the recipe says"

    # Two heads between encoder and decoder are removed, and nothing else.
    args = translation.arguments(shlex.split(given))
    settings = [*translation.SMALL, f"data.path={args.data}", "device=cpu", *args.set]
    recipe = translation.load_recipe(translation.locate("translation"), settings)
    base = translation.ready_base(recipe, args.work, print)
    subject = translation.open_base(base, args.work, recipe)
    batches = subject.data.redrawn(24, 0).batches("calibration", 32)
    scores = hp.score(subject.model, batches, "taylor").of("cross")
    best = sorted(scores.units(), key=lambda unit: -unit.value)[:2]
    keep = {site.name: range(4) for site in hp.find_sites(subject.model)}
    keep[best[0].name] = [unit.heads[0] for unit in best]
    hp.prune_(subject.model, hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
    found = subject.judge(subject.model, "test")
    row = ways["cross", 2, "cut"]["test"]
    assert row["bleu"] == pytest.approx(found.value)
    assert row["drop"] == pytest.approx(record["base"]["test"] - found.value)
    assert row["low"] <= row["drop"] <= row["high"]

    with pytest.raises(SystemExit, match="give another --out"):
        translation.main(shlex.split(f"{given} train.epochs=2 {out}"))
    text = page_of(translation, tmp_path, translation.PAGE)
    change, low, high = (0 - 100 * row[name] for name in ("drop", "high", "low"))
    cell = f"{100 * row['bleu']:.2f} ({change:+.2f} [{low:+.2f}, {high:+.2f}])"
    assert f"| between them | 2 of 4 | {cell}" in text
    assert "has not been run yet.\n\nOn a GPU: no GPU record yet.\n" in text
    on_gpu = {**record, "size": "full", "hardware": {"device": "cuda", "gpu": "a GPU"}}
    text = translation.page([record, on_gpu])
    assert f"before the cut) reached {100 * record['base']['test']:.2f}.\n" in text
    assert "no GPU record yet" not in text


def test_a_cell_of_several_draws_has_their_spread(translation):
    draws = [
        {"test": {"bleu": bleu, "drop": drop, "low": drop - 0.02, "high": drop + 0.01}}
        for bleu, drop in ((0.3, 0.01), (0.32, -0.01))
    ]
    assert translation.cell(draws) == "31.00 ± 1.41 (+0.00 [-2.00, +3.00])"
