"""Wrong batches and losses: every entry point names the batch and says what to pass, and leaves the
model as it was."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.core.errors import InvalidValue
from headprune.model.mistakes import explained_one
from headprune.recovery import Finetune
from headprune.recovery import registry as recoveries
from headprune.scoring import (
    Surgeon,
    fisher_matrix,
    gate_gradients,
    ggn_matrix,
    loss_of,
    mask_losses,
    rescorer,
)
from headprune.scoring import registry as scorers
from tests.laws.support import mask_of

SIZE, LENGTH, WORDS, CLASSES, POSITIONS = 4, 6, 30, 3, 8
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 16, "vocab_size": WORDS, "initializer_range": 0.5}
SIZES |= {"max_position_embeddings": POSITIONS}


def bert(kind=BertForSequenceClassification):
    torch.manual_seed(0)
    config = BertConfig(**SIZES, num_labels=CLASSES, attn_implementation="eager")
    model = kind(config)
    return model.eval()


def good():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (SIZE, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(CLASSES, (SIZE,), generator=generator)}


def mask(model):
    sites = hp.find_sites(model)
    return mask_of(sites, {s.name: s.heads[1:] for s in sites})


# --- entry points: (model, batches, loss) -> anything


def scoring(scorer):
    return lambda model, batches, loss: hp.score(model, batches, scorer, loss=loss, progress=False)


def recovering(method):
    def run(model, batches, loss):
        teacher = {} if isinstance(method, Finetune) else {"teacher": copy.deepcopy(model)}
        hp.prune_(model, mask(model))
        before = {name: x.clone() for name, x in model.state_dict().items()}
        try:
            return hp.recover_(model, batches, method, loss=loss, **teacher)
        finally:
            assert_close(dict(model.state_dict()), before, rtol=0, atol=0)

    return run


def validating(model, batches, loss):
    return hp.recover_(model, [good(), good()], Finetune(patience=1), loss=loss, validation=batches)


def read(verb):
    """A function of gradients, whose loss has a default."""
    return lambda m, b, loss: verb(m, b, **({} if loss is None else {"loss": loss}))


def scoring_until(model, batches, loss):
    return hp.score(model, batches, "taylor", loss=loss, until=hp.Stable(k=1), progress=False)


LABELLED = {
    "score taylor": scoring("taylor"),
    "score leave_one_out": scoring("leave_one_out"),
    "score attattr": scoring("attattr"),
    "score hard_concrete": scoring("hard_concrete"),
    "score surgeon": scoring(Surgeon(curvature="loss")),
    "score until": scoring_until,
    "evaluate": lambda m, b, loss: evaluate(m, b, loss=loss),
    "finetune": recovering(Finetune()),
    "validation": validating,
    "gate_gradients": read(gate_gradients),
    "fisher_matrix": read(fisher_matrix),
    "loss_of": lambda m, b, loss: loss_of(m, b, loss=loss, progress=False)([mask(m)]),
    "mask_losses": lambda m, b, loss: mask_losses(m, b, [mask(m)], loss=loss, progress=False),
    "rescorer": lambda m, b, loss: rescorer(m, b, "taylor", loss=loss, progress=False)(mask(m)),
}
UNLABELLED = {
    **{f"score {name}": scoring(name) for name in ("wanda", "obs", "ggn", "entropy")},
    **{name: recovering(name) for name in recoveries.names() if name != "finetune"},
    "ggn_matrix": lambda m, b, _: ggn_matrix(m, b),
}
ALL = LABELLED | UNLABELLED
SINGLE = {
    "attention_maps": lambda m, b, _: hp.attention_maps(m, b[0]),
    "prune_": lambda m, b, _: hp.prune_(m, mask(m), example=b[0]),
}


def crossed(entries, mistakes):
    """Every entry point and every mistake at least once."""
    a, b = list(entries), list(mistakes)
    pairs = [(a[i % len(a)], b[i % len(b)]) for i in range(max(len(a), len(b)))]
    return pytest.mark.parametrize(("entry", "mistake"), pairs)


def refused(entry, model, batches, loss, *words):
    def looks():
        return [
            [m.training for m in model.modules()],
            [p.requires_grad for p in model.parameters()],
        ]

    before = looks()
    shapes = [x.shape for x in model.state_dict().values()]
    values = [x.clone() for x in model.state_dict().values()]
    with pytest.raises(InvalidValue) as caught:
        entry(model, batches, loss)
    assert looks() == before
    if [x.shape for x in model.state_dict().values()] == shapes:  # it was not cut for a recovery
        assert_close(list(model.state_dict().values()), values, rtol=0, atol=0)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert caught.value.hint, text


# --- what is wrong: the batch or the loss, words


def with_(**other):
    return {**good(), **other}


IDS, RIGHT = good().values()
LABELS = {
    "beyond the classes": (with_(labels=RIGHT + CLASSES), ("labels", "number of classes")),
    "below zero": (with_(labels=RIGHT - CLASSES), ("labels", "number of classes")),
    "floats": (with_(labels=RIGHT.float()), ("labels", "torch.float32", "long()")),
    "one-hot": (with_(labels=functional.one_hot(RIGHT, CLASSES)), ("labels", "[4, 3]")),
    "int8": (with_(labels=RIGHT.to(torch.int8)), ("labels", "torch.int8", "long()")),
    "fewer labels": (with_(labels=RIGHT[:2]), ("labels",)),
    "none": ({"input_ids": IDS}, ("labels",)),
    "a tuple": ((IDS, RIGHT), ("mapping", "labels", "loss=")),
    "a list": ([IDS, RIGHT], ("mapping", "labels", "loss=")),
}
INPUTS = {
    "too long": (with_(input_ids=torch.ones(SIZE, POSITIONS + 3).long()), ("8", "runcat")),
    "beyond the vocabulary": (with_(input_ids=IDS + WORDS), (f"{WORDS} rows", "vocabulary")),
    "below zero": (with_(input_ids=0 * IDS - 1), ("-1 to -1", "vocabulary")),
    "floats for tokens": (with_(input_ids=IDS.float()), ("torch.float32", "whole numbers")),
    "lists": ({"input_ids": IDS.tolist(), "labels": [0, 1, 2, 0]}, ("tensors",)),
    "text": ({"input_ids": ["a b", "c"], "labels": [0, 1]}, ("tensors",)),
    "no example": ({name: x[:0] for name, x in good().items()}, ("examples",)),
    "labels for a mask": ((IDS, torch.tensor([0, 2, 1, 0])), ("mapping", "loss=")),
    "labels of tokens for a mask": ((IDS, 2 * torch.ones_like(IDS)), ("mapping",)),
}


def cross_entropy(model, batch):
    return functional.cross_entropy(
        model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="none"
    )


def of_floats(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits, batch["labels"].float(), reduction="none")


def beyond(model, batch):
    return cross_entropy(model, {**batch, "labels": batch["labels"] + CLASSES})


LOSSES = {
    "reduced": (lambda m, b: cross_entropy(m, b).mean(), ("[4]", "reduction='none'")),
    "one too many": (lambda m, b: functional.pad(cross_entropy(m, b), (0, 1)), ("[4]", "[5]")),
    "a column": (lambda m, b: cross_entropy(m, b)[:, None], ("[4]", "[4, 1]")),
    "complex": (lambda m, b: cross_entropy(m, b).to(torch.complex64), ("complex64", "real")),
    "boolean": (lambda m, b: cross_entropy(m, b) > 1, ("torch.bool", "real")),
    "a number": (lambda m, b: float(cross_entropy(m, b).detach().mean()), ("[4]", "float")),
    "nothing": (lambda m, b: None, ("[4]", "NoneType")),
    "labels beyond": (beyond, ("labels", "number of classes")),
    "labels of floats": (of_floats, ("labels", "whole numbers")),
}


@crossed(LABELLED, LABELS)
def test_labels(entry, mistake):
    wrong, words = LABELS[mistake]
    model = bert()
    model.config.problem_type = "single_label_classification"
    refused(LABELLED[entry], model, [good(), wrong], None, "batch 1", *words)


@crossed(ALL, INPUTS)
def test_inputs(entry, mistake):
    wrong, words = INPUTS[mistake]
    place = len(entry) % 2
    batches = [good(), wrong] if place else [wrong, good()]
    refused(ALL[entry], bert(), batches, None, f"batch {place}", *words)


@crossed(SINGLE, INPUTS)
def test_inputs_of_one_batch(entry, mistake):
    wrong, words = INPUTS[mistake]
    refused(SINGLE[entry], bert(), [wrong], None, *words)


@crossed(LABELLED, LOSSES)
def test_losses(entry, mistake):
    wrong, words = LOSSES[mistake]
    refused(LABELLED[entry], bert(), [good(), good()], wrong, "batch 0", *words)


TOKENS = {
    "number of classes": torch.full((SIZE, LENGTH), CLASSES),
    "torch.float32": torch.ones(SIZE, LENGTH),
    "[4, 5]": torch.ones(SIZE, LENGTH - 1).long(),
    "[4]": torch.ones(SIZE).long(),
}


@pytest.mark.parametrize("entry", ["score taylor", "evaluate", "finetune", "fisher_matrix"])
def test_labels_of_tokens(entry):
    whole = entry == "score taylor"
    for word, labels in TOKENS.items() if whole else list(TOKENS.items())[:1]:
        model, wrong = bert(BertForTokenClassification), [with_(labels=labels)]
        refused(LABELLED[entry], model, wrong, None, "batch 0", "labels", word)


class Own(nn.Module):
    """A module of one's own, whose ``forward`` takes one tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = hp.MultiHeadAttention(8, 4)
        self.head = nn.Linear(8, CLASSES)
        self.positions = nn.Parameter(torch.randn(POSITIONS, 8))
        self.eval()

    def forward(self, rows):
        rows = rows + self.positions[: rows.shape[1]]
        return self.head((rows + self.attention(rows)).mean(1))


def pairs():
    x, y = torch.randn(8, 5, 8), torch.randint(CLASSES, (8,))
    return DataLoader(TensorDataset(x, y), batch_size=SIZE)


SOME = ["score taylor", "loss_of", "finetune", "score obs", "lstsq", "ggn_matrix"]


@pytest.mark.parametrize("entry", SOME)
def test_pairs_for_a_module_of_ones_own(entry):
    words = ("without targets",) if entry == "ggn_matrix" else ("mapping", "'rows': x", "loss=")
    refused(ALL[entry], Own(), pairs(), None, "batch 0", *words)


@pytest.mark.parametrize("entry", ["score wanda", "score entropy", "lstsq"])
def test_keys_that_forward_does_not_take(entry):
    batches = [{"rows": x, "y": y} for x, y in pairs()]
    words = ("forward takes", "It takes rows", "labels")
    refused(UNLABELLED[entry], Own(), batches, None, "batch 0", *words)


def test_what_forward_takes_is_said_of_the_model_inside_a_wrapper():
    wrapped = nn.DataParallel(Own())
    batch = {"rows": torch.randn(SIZE, 5, 8), "y": torch.zeros(SIZE)}
    words = r"batch 0: must be what Own\.forward takes, got .*'y'\. It takes rows;"
    with pytest.raises(InvalidValue, match=words), explained_one(wrapped, batch, "batch 0"):
        wrapped(**batch)


@pytest.mark.parametrize("entry", SOME)
def test_positions_of_ones_own(entry):
    def loss(model, batch):
        return functional.cross_entropy(model(batch["rows"]), batch["labels"], reduction="none")

    batches = [{"rows": x, "labels": y} for x, y in pairs()]
    batches[1]["rows"] = torch.randn(SIZE, POSITIONS + 4, 8)
    words = ("batch 1", f"at most {POSITIONS} tokens long", "positions", f"got {POSITIONS + 4}")
    refused(ALL[entry], Own(), batches, None if entry in UNLABELLED else loss, *words)


# --- datasets and single batches in the place of loaders


class Rows(Dataset[Any]):
    """Examples, one by one."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def rows(tensors=True):
    batch = good()
    found = [{name: x[i] for name, x in batch.items()} for i in range(SIZE)]
    return found if tensors else [{name: x.tolist() for name, x in row.items()} for row in found]


def hugging_face(torch_format):
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list(rows(tensors=False))
    return found.with_format("torch") if torch_format else found


#: Data, and what the message advises.
DATASETS = {
    "TensorDataset": (lambda: TensorDataset(*good().values()), "DataLoader"),
    "Subset": (lambda: Subset(TensorDataset(*good().values()), [0, 2]), "DataLoader"),
    "mappings": (lambda: Rows(rows()), "DataLoader"),
    "mappings of lists": (lambda: Rows(rows(tensors=False)), "DataLoader"),
    "no labels": (lambda: Rows([{"input_ids": row["input_ids"]} for row in rows()]), "DataLoader"),
    "datasets": (lambda: hugging_face(False), "DataLoader"),
    "datasets as torch": (lambda: hugging_face(True), "DataLoader"),
    "a single batch": (good, "[batch]"),
}


@crossed(ALL, DATASETS)
def test_a_dataset_is_no_loader(entry, mistake):
    make, word = DATASETS[mistake]
    refused(ALL[entry], bert(), make(), None, word)


def test_what_is_right_is_taken():
    """Datasets whose items are batches, loaders of pairs with a loss of one's own, and tuples by
    position."""
    model, batch = bert(), good()

    def scored(batches, scorer="taylor", loss=None):
        return torch.tensor(hp.score(model, batches, scorer, loss=loss, progress=False).values)

    def of_pairs(model, pair):
        return cross_entropy(model, dict(zip(("input_ids", "labels"), pair, strict=True)))

    whole = scored([batch, batch])
    assert torch.equal(scored(Rows([batch, batch])), whole)
    pairs = TensorDataset(*batch.values())
    assert_close(scored(DataLoader(pairs, batch_size=SIZE), loss=of_pairs), whole)
    ones = torch.ones_like(IDS)
    by_name = scored([{"input_ids": IDS, "attention_mask": ones}], "wanda")
    for pair in ((IDS, ones), (IDS, ones.bool()), (IDS, ones.float()), [IDS, ones]):
        assert_close(scored([pair], "wanda"), by_name)


class Mine(Exception):
    pass


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("score taylor", ValueError("my own")),
        ("evaluate", torch.OutOfMemoryError("all")),
        ("finetune", Mine("no")),
        ("rescorer", ValueError("my own")),
        ("finetune", torch.OutOfMemoryError("all")),
    ],
)
def test_other_errors_are_those_that_were_raised(entry, error):
    """Also where a batch is too long."""
    long = with_(input_ids=torch.ones(SIZE, POSITIONS + 3).long())
    with pytest.raises(type(error), match=str(error)) as caught:
        ALL[entry](bert(), [long, long], Mock(side_effect=error))
    assert caught.value is error


def test_an_error_of_the_loader_is_none_of_the_batch_before():
    def broken():
        yield good()
        raise IndexError("index out of range in the file")

    with pytest.raises(IndexError, match="in the file"):
        hp.score(bert(), broken(), progress=False)


def test_every_scorer_names_the_batch():
    """What a scorer needs no labels for, too."""
    batches = [good(), INPUTS["beyond the vocabulary"][0]]
    for name in scorers.names():
        if scorers.get(name).needs_data:
            refused(scoring(name), bert(), batches, None, "batch 1", "vocabulary")


class Switched(IterableDataset[Any]):
    """Batches with a switch of the model's."""

    def __iter__(self):
        yield {**good(), "return_dict": True}


def test_a_batch_with_a_switch_is_no_single_example():
    assert hp.score(bert(), Switched(), progress=False).n_examples == SIZE
