"""Transformers' own tools take cut models: ``pipeline``, ``generate`` and the Trainer."""

from types import ModuleType

import pytest
import torch
import transformers
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import headprune as hp
from headprune.core.errors import InvalidValue
from tests.documents import DOCS, blocks
from tests.tiny_models import bert, llama, word_tokenizer

TEXTS = ["w1 w2 w3", "w4 w5"]


def test_a_pipeline_takes_a_cut_classifier(tmp_path):
    folder = bert(tmp_path / "whole")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    hp.prune_heads_(model, {0: [0], 1: [1, 2]})
    hp.save_pretrained(model, tmp_path / "small", processor=tokenizer)
    again = hp.from_pretrained(tmp_path / "small")
    classify = transformers.pipeline("text-classification", model=again, tokenizer=tokenizer)
    logits = model.eval()(**tokenizer(TEXTS, return_tensors="pt", padding=True)).logits
    scores = torch.tensor([answer["score"] for answer in classify(TEXTS)])
    assert_close(scores, logits.softmax(-1).amax(-1), rtol=1e-5, atol=1e-6)


def test_a_pipeline_generates_with_a_cut_model(tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(llama(tmp_path / "whole")).eval()
    word_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    hp.prune_heads_(model, {0: [0, 1]})
    write = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = write(
        TEXTS[0], max_new_tokens=4, do_sample=False, pad_token_id=0, return_tensors=True
    )
    # Every token is the most likely one after all before it, without a cache.
    ids = answer["generated_token_ids"]
    prompt = len(tokenizer(TEXTS[0])["input_ids"])
    assert len(ids) > prompt
    for place in range(prompt, len(ids)):
        logits = model(torch.tensor([ids[:place]]), use_cache=False).logits
        assert ids[place] == int(logits[0, -1].argmax())


def test_the_how_to_with_the_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ModuleType("page")
    texts = [b.text for b in blocks(DOCS / "how-to.md") if b.language == "python"]
    (code,) = [text for text in texts if "transformers.Trainer(" in text]
    exec(code, page.__dict__)
    before, after = page.losses[: page.steps], page.losses[page.steps :]
    assert len(before) == len(after) == page.steps, "the callback saw both trainings"
    assert sum(len(site.heads) for site in hp.find_sites(page.again)) == 4
    with torch.no_grad():
        answers = page.model.eval()(**page.batch).logits
        assert torch.equal(page.again(**page.batch).logits, answers)


def test_batches_of_pairs_are_refused_with_the_line_that_makes_mappings(tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert(tmp_path / "m"))
    pairs = TensorDataset(torch.randint(30, (8, 5)), torch.randint(2, (8,)))
    batches = DataLoader(pairs, batch_size=4)
    with pytest.raises(InvalidValue, match="Give mappings: batches = ") as refusal:
        hp.score(model, batches, "taylor")
    line = str(refusal.value).partition("mappings: ")[2].partition(", or pass")[0]
    names = {"batches": batches}
    exec(line, names)
    for scorer in ("taylor", "confidence"):
        hp.score(model, names["batches"], scorer)
    hp.recover_(model, names["batches"], hp.recovery.Finetune(epochs=1))


class _OwnTargets(torch.nn.Module):
    """A classifier that names its labels as nanoGPT does and also returns its loss."""

    def __init__(self, folder):
        super().__init__()
        self.bert = transformers.AutoModelForSequenceClassification.from_pretrained(bert(folder))

    def forward(self, idx, targets=None):
        logits = self.bert(idx).logits
        loss = None if targets is None else torch.nn.functional.cross_entropy(logits, targets)
        return logits, loss


def test_the_refusal_of_pairs_has_the_names_of_the_models_own_arguments(tmp_path):
    model = _OwnTargets(tmp_path / "m").eval()
    batches = [(torch.randint(30, (4, 5)), torch.randint(2, (4,)))]
    with pytest.raises(InvalidValue, match="and pass loss=") as refusal:
        hp.score(model, batches, "taylor")
    line = str(refusal.value).partition("mappings: ")[2].partition(", and pass")[0]
    names = {"batches": batches}
    exec(line, names)
    assert names["batches"][0].keys() == {"idx", "targets"}

    def loss(model, batch):
        logits = model(**batch)[0]
        return torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="none")

    assert hp.score(model, names["batches"], "taylor", loss=loss).n_examples == 4
