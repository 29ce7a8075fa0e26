"""What tests of benchmark scripts share: tiny models, rows of made-up words, records and pages."""

import json
import random
import shlex

import torch

from tests.tiny_models import WORDS, bert

#: Values of ``--set`` for a ViT that learns the digits in a second.
TINY_DIGITS = (
    "train.epochs=1 model.config.hidden_size=16 model.config.num_hidden_layers=2 "
    "model.config.num_attention_heads=4 model.config.intermediate_size=16 model.config.patch_size=4"
)


def question(draw):
    """Some words; the first of them says the label."""
    words = draw.choices(WORDS, k=draw.randint(3, 7))
    return {"text": " ".join(words), "label": WORDS.index(words[0]) % 3}


def graded_pair(draw):
    """Two sentences; the grade is the share of words that they have in common."""
    first, second = (draw.choices(WORDS, k=draw.randint(3, 7)) for _ in range(2))
    second[: draw.randint(0, 3)] = first[: draw.randint(0, 3)]
    grade = 5 * len({*first} & {*second}) / len({*first, *second})
    return {"sentence1": " ".join(first), "sentence2": " ".join(second or first), "score": grade}


def write_rows(folder, make, train=60, validation=20, test=40):
    """Writes so many rows of each split into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in (("train", train), ("validation", validation), ("test", test)):
        rows = [json.dumps(make(draw)) for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))


def encoder_study(folder, task):
    """Writes rows of a task and a tiny encoder; returns the arguments of a study of them."""
    write_rows(folder / task, graded_pair if task == "stsb" else question)
    torch.manual_seed(0)
    model = bert(folder / "model", "BertModel", hidden_size=16)
    return f"--task {task} --data {folder / task} --work {folder} --model {model}"


def record_of(study, command):
    """The record that a study writes with these arguments."""
    return json.loads(study.main(shlex.split(command)).read_text(encoding="utf-8"))


def page_of(study, folder, page):
    """A page that a study writes from the records in a folder."""
    study.main(["--figure", "--records", str(folder), "--docs", str(folder)])
    return (folder / page).read_text(encoding="utf-8")
