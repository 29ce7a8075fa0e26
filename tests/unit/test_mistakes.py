"""Wrong batches and losses: every entry point names the batch and says what to pass, and leaves the
model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.gating.learned import learned_gates
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

SIZE, LENGTH, WORDS, CLASSES, POSITIONS = 4, 6, 30, 3, 8


def bert(kind: Any = BertForSequenceClassification) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        vocab_size=WORDS,
        max_position_embeddings=POSITIONS,
        num_labels=CLASSES,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    model: nn.Module = kind(config)
    return model.eval()


def good() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (SIZE, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(CLASSES, (SIZE,), generator=generator)}


def mask(model: nn.Module) -> hp.HeadMask:
    sites = hp.find_sites(model)
    return hp.HeadMask.from_keep(
        {s.name: s.heads[1:] for s in sites}, {s.name: s.n_query_heads for s in sites}
    )


# ---------------------------------------------------------------- entry points: (model, batches,
# loss) -> anything


Entry = Callable[[nn.Module, Any, Any], Any]


def scoring(scorer: Any) -> Entry:
    return lambda model, batches, loss: hp.score(model, batches, scorer, loss=loss, progress=False)


def recovering(method: Any) -> Entry:
    def run(model: nn.Module, batches: Any, loss: Any) -> Any:
        teacher = {} if isinstance(method, Finetune) else {"teacher": copy.deepcopy(model)}
        hp.prune_(model, mask(model))
        before = {name: x.clone() for name, x in model.state_dict().items()}
        try:
            return hp.recover_(model, batches, method, loss=loss, **teacher)
        finally:
            assert_close(dict(model.state_dict()), before, rtol=0, atol=0)

    return run


def validating(model: nn.Module, batches: Any, loss: Any) -> Any:
    return hp.recover_(model, [good(), good()], Finetune(patience=1), loss=loss, validation=batches)


LABELLED: dict[str, Entry] = {
    **{
        f"score {name}": scoring(name)
        for name in ("taylor", "leave_one_out", "attattr", "hard_concrete")
    },
    "score surgeon": scoring(Surgeon(curvature="loss")),
    "score until": lambda m, b, loss: hp.score(
        m, b, "taylor", loss=loss, until=hp.Stable(k=1), progress=False
    ),
    "evaluate": lambda m, b, loss: evaluate(m, b, loss=loss),
    "finetune": recovering(Finetune()),
    "validation": validating,
    "gate_gradients": lambda m, b, loss: gate_gradients(
        m, b, **({} if loss is None else {"loss": loss})
    ),
    "fisher_matrix": lambda m, b, loss: fisher_matrix(
        m, b, **({} if loss is None else {"loss": loss})
    ),
    "loss_of": lambda m, b, loss: loss_of(m, b, loss=loss, progress=False)([mask(m)]),
    "mask_losses": lambda m, b, loss: mask_losses(m, b, [mask(m)], loss=loss, progress=False),
    "rescorer": lambda m, b, loss: rescorer(m, b, loss=loss, progress=False)(mask(m)),
}
UNLABELLED: dict[str, Entry] = {
    **{f"score {name}": scoring(name) for name in ("wanda", "obs", "ggn", "entropy")},
    **{name: recovering(name) for name in recoveries.names() if name != "finetune"},
    "ggn_matrix": lambda m, b, _: ggn_matrix(m, b),
}
SINGLE: dict[str, Entry] = {
    "attention_maps": lambda m, b, _: hp.attention_maps(m, b[0]),
    "prune_": lambda m, b, _: hp.prune_(m, mask(m), example=b[0]),
}


def refused(entry: Entry, model: nn.Module, batches: Any, loss: Any, *words: str) -> InvalidValue:
    before = {name: x.clone() for name, x in model.state_dict().items()}
    training = [m.training for m in model.modules()]
    kinds = [type(m) for m in model.modules()]
    asked = [p.requires_grad for p in model.parameters()]
    with pytest.raises(InvalidValue) as caught:
        entry(model, batches, loss)
    if set(model.state_dict()) == set(before) and all(
        x.shape == before[n].shape for n, x in model.state_dict().items()
    ):
        assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert [m.training for m in model.modules()] == training
    assert [type(m) for m in model.modules()] == kinds or "recover" in repr(entry)
    assert [p.requires_grad for p in model.parameters()] == asked
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert caught.value.hint, text
    return caught.value


# ---------------------------------------------------------------- what is wrong: the second batch,
# the loss, words


def with_(**other: Any) -> dict[str, Any]:
    return {**good(), **other}


LABELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "beyond the classes": (
        with_(labels=torch.tensor([0, 1, CLASSES, 2])),
        ("labels", "number of classes"),
    ),
    "below zero": (with_(labels=torch.tensor([0, -1, 1, 2])), ("labels", "number of classes")),
    "floats": (
        with_(labels=torch.tensor([0.0, 1.0, 2.0, 1.0])),
        ("labels", "torch.float32", "long()"),
    ),
    "one-hot integers": (
        with_(labels=functional.one_hot(torch.tensor([0, 1, 2, 1]))),
        ("labels", "[4, 3]"),
    ),
    "int8": (
        with_(labels=torch.tensor([0, 1, 2, 1], dtype=torch.int8)),
        ("labels", "torch.int8", "long()"),
    ),
    "fewer labels": (with_(labels=torch.tensor([0, 1])), ("labels",)),
    "none": ({"input_ids": good()["input_ids"]}, ("labels",)),
    "a tuple": ((good()["input_ids"], good()["labels"]), ("mapping", "labels", "loss=")),
    "a list": ([good()["input_ids"], good()["labels"]], ("mapping", "labels", "loss=")),
}
INPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "too long": (
        with_(input_ids=torch.ones(SIZE, POSITIONS + 3).long()),
        (str(POSITIONS), "runcat"),
    ),
    "beyond the vocabulary": (
        with_(input_ids=torch.full((SIZE, LENGTH), WORDS)),
        (f"{WORDS} rows", "vocabulary"),
    ),
    "below zero": (with_(input_ids=torch.full((SIZE, LENGTH), -1)), ("-1 to -1", "vocabulary")),
    "floats for tokens": (
        with_(input_ids=torch.ones(SIZE, LENGTH)),
        ("torch.float32", "whole numbers"),
    ),
    "lists": ({"input_ids": good()["input_ids"].tolist(), "labels": [0, 1, 2, 0]}, ("tensors",)),
    "text": ({"input_ids": ["a b", "c"], "labels": [0, 1]}, ("tensors",)),
    "no example": ({name: x[:0] for name, x in good().items()}, ("examples",)),
    "labels for a mask": ((good()["input_ids"], torch.tensor([0, 2, 1, 0])), ("mapping", "loss=")),
    "labels of tokens for a mask": (
        (good()["input_ids"], 2 * torch.ones(SIZE, LENGTH).long()),
        ("mapping",),
    ),
}


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(
        model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="none"
    )


LOSSES: dict[str, tuple[Callable[[nn.Module, Any], Any], tuple[str, ...]]] = {
    "reduced": (lambda m, b: cross_entropy(m, b).mean(), ("[4]", "reduction='none'")),
    "one too many": (lambda m, b: torch.cat([cross_entropy(m, b), torch.zeros(1)]), ("[4]", "[5]")),
    "a column": (lambda m, b: cross_entropy(m, b)[:, None], ("[4]", "[4, 1]")),
    "complex": (lambda m, b: cross_entropy(m, b).to(torch.complex64), ("complex64", "real")),
    "boolean": (lambda m, b: cross_entropy(m, b) > 1, ("torch.bool", "real")),
    "a number": (lambda m, b: float(cross_entropy(m, b).detach().mean()), ("[4]", "float")),
    "nothing": (lambda m, b: None, ("[4]", "NoneType")),
    "labels beyond": (
        lambda m, b: cross_entropy(m, {**b, "labels": b["labels"] + CLASSES}),
        ("labels", "number of classes"),
    ),
    "labels of floats": (
        lambda m, b: functional.cross_entropy(
            m(input_ids=b["input_ids"]).logits, b["labels"].float(), reduction="none"
        ),
        ("labels", "whole numbers"),
    ),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("batch", LABELS)
@pytest.mark.parametrize("entry", LABELLED)
def test_labels(entry: str, batch: str, place: int) -> None:
    wrong, words = LABELS[batch]
    model = bert()
    model.config.problem_type = "single_label_classification"
    batches = [good(), good()]
    batches[place] = wrong
    refused(LABELLED[entry], model, batches, None, f"batch {place}", *words)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("batch", INPUTS)
@pytest.mark.parametrize("entry", [*LABELLED, *UNLABELLED])
def test_inputs(entry: str, batch: str, place: int) -> None:
    wrong, words = INPUTS[batch]
    batches: list[Any] = [good(), good()]
    batches[place] = wrong
    refused({**LABELLED, **UNLABELLED}[entry], bert(), batches, None, f"batch {place}", *words)


@pytest.mark.parametrize("batch", INPUTS)
@pytest.mark.parametrize("entry", SINGLE)
def test_inputs_of_one_batch(entry: str, batch: str) -> None:
    wrong, words = INPUTS[batch]
    model = bert()
    before = model.state_dict()
    refused(SINGLE[entry], model, [wrong], None, *words)
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("entry", LABELLED)
def test_losses(entry: str, loss: str) -> None:
    wrong, words = LOSSES[loss]
    refused(LABELLED[entry], bert(), [good(), good()], wrong, "batch 0", *words)


def test_labels_of_tokens() -> None:
    batch = good()
    for labels, word in (
        (torch.full((SIZE, LENGTH), CLASSES), "number of classes"),
        (torch.ones(SIZE, LENGTH), "torch.float32"),
        (torch.ones(SIZE, LENGTH - 1).long(), "[4, 5]"),
        (torch.ones(SIZE).long(), "[4]"),
    ):
        for entry in LABELLED.values():
            wrong = [batch | {"labels": labels}]
            refused(entry, bert(BertForTokenClassification), wrong, None, "batch 0", "labels", word)


class Own(nn.Module):
    """A module of one's own, whose ``forward`` takes one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = hp.MultiHeadAttention(8, 4)
        self.head = nn.Linear(8, CLASSES)
        self.positions = nn.Parameter(torch.randn(POSITIONS, 8))
        self.eval()

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows + self.positions[: rows.shape[1]]
        found: Tensor = self.head((rows + self.attention(rows)).mean(1))
        return found


def pairs() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(8, 5, 8, generator=generator),
        torch.randint(CLASSES, (8,), generator=generator),
    )
    return DataLoader(TensorDataset(x, y), batch_size=SIZE)


@pytest.mark.parametrize("entry", [*LABELLED, *UNLABELLED])
def test_pairs_for_a_module_of_ones_own(entry: str) -> None:
    words = ("without targets",) if entry == "ggn_matrix" else ("mapping", "'rows': x", "loss=")
    refused({**LABELLED, **UNLABELLED}[entry], Own(), pairs(), None, "batch 0", *words)


@pytest.mark.parametrize("entry", UNLABELLED)
def test_keys_that_forward_does_not_take(entry: str) -> None:
    batches = [{"rows": x, "y": y} for x, y in pairs()]
    words = (
        ("without targets",)
        if entry == "ggn_matrix"
        else ("forward takes", "It takes rows", "labels")
    )
    refused(UNLABELLED[entry], Own(), batches, None, "batch 0", *words)


def test_what_forward_takes_is_said_of_the_model_inside_a_wrapper() -> None:
    wrapped, batch = (
        nn.DataParallel(Own()),
        {"rows": torch.randn(SIZE, 5, 8), "y": torch.zeros(SIZE)},
    )
    words = r"batch 0: must be what Own\.forward takes, got .*'y'\. It takes rows;"
    with pytest.raises(InvalidValue, match=words), explained_one(wrapped, batch, "batch 0"):
        wrapped(**batch)


@pytest.mark.parametrize("entry", [*LABELLED, *UNLABELLED])
def test_positions_of_ones_own(entry: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["rows"]), batch["labels"], reduction="none")

    batches = [{"rows": x, "labels": y} for x, y in pairs()]
    batches[1]["rows"] = torch.randn(SIZE, POSITIONS + 4, 8)
    words = ("batch 1", f"at most {POSITIONS} long", "positions", f"got {POSITIONS + 4}")
    refused(
        {**LABELLED, **UNLABELLED}[entry],
        Own(),
        batches,
        None if entry in UNLABELLED else loss,
        *words,
    )


# ---------------------------------------------------------------- datasets in the place of loaders


class Rows(Dataset[Any]):
    """Examples, one by one."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


def rows(tensors: bool = True) -> list[dict[str, Any]]:
    batch = good()
    found = [{name: x[i] for name, x in batch.items()} for i in range(SIZE)]
    return found if tensors else [{name: x.tolist() for name, x in row.items()} for row in found]


def hugging_face(torch_format: bool) -> Any:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list(rows(tensors=False))
    return found.with_format("torch") if torch_format else found


DATASETS: dict[str, Callable[[], Any]] = {
    "TensorDataset": lambda: TensorDataset(good()["input_ids"], good()["labels"]),
    "Subset": lambda: torch.utils.data.Subset(TensorDataset(*good().values()), [0, 2]),
    "mappings": lambda: Rows(rows()),
    "mappings of lists": lambda: Rows(rows(tensors=False)),
    "rows without labels": lambda: Rows([{"input_ids": row["input_ids"]} for row in rows()]),
    "datasets": lambda: hugging_face(False),
    "datasets as torch": lambda: hugging_face(True),
}


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("entry", [*LABELLED, *UNLABELLED])
def test_a_dataset_is_no_loader(entry: str, dataset: str) -> None:
    refused({**LABELLED, **UNLABELLED}[entry], bert(), DATASETS[dataset](), None, "DataLoader")


def test_what_is_right_is_taken() -> None:
    """Datasets whose items are batches, loaders of pairs with a loss of one's own, and tuples by
    position."""
    model, batch = bert(), good()
    whole = hp.score(model, [batch, batch], progress=False)
    assert hp.score(model, Rows([batch, batch]), progress=False).values == whole.values

    def of_pairs(model: nn.Module, pair: Any) -> Tensor:
        return cross_entropy(model, dict(zip(("input_ids", "labels"), pair, strict=True)))

    pairs = TensorDataset(batch["input_ids"], batch["labels"])
    found = hp.score(model, DataLoader(pairs, batch_size=SIZE), loss=of_pairs, progress=False)
    assert_close(torch.tensor(found.values), torch.tensor(whole.values))
    ids, ones = batch["input_ids"], torch.ones(SIZE, LENGTH).long()
    by_name = hp.score(model, [{"input_ids": ids, "attention_mask": ones}], "wanda", progress=False)
    for pair in ((ids, ones), (ids, ones.bool()), (ids, ones.float()), [ids, ones]):
        assert_close(
            torch.tensor(hp.score(model, [pair], "wanda", progress=False).values),
            torch.tensor(by_name.values),
        )


@pytest.mark.parametrize("entry", [*LABELLED, *UNLABELLED])
def test_a_single_batch_is_not_an_iterable_of_batches(entry: str) -> None:
    refused({**LABELLED, **UNLABELLED}[entry], bert(), good(), None, "[batch]")


def test_other_errors_stay_what_they_are() -> None:
    class Mine(Exception):
        pass

    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise Mine("mine")

    for entry in LABELLED.values():
        with pytest.raises(Mine, match="mine") as caught:
            entry(bert(), [good(), good()], failing)
        assert "batch 0" in "".join(getattr(caught.value, "__notes__", ["batch 0"]))


def test_an_error_of_the_loader_is_none_of_the_batch_before() -> None:
    def broken() -> Any:
        yield good()
        raise IndexError("index out of range in the file")

    with pytest.raises(IndexError, match="in the file"):
        hp.score(bert(), broken(), progress=False)


def test_every_scorer_names_the_batch() -> None:
    """What a scorer needs no labels for, too."""
    batches = [good(), with_(input_ids=torch.full((SIZE, LENGTH), WORDS))]
    for name in scorers.names():
        scorer = scorers.get(name)
        if scorer.needs_data:
            refused(scoring(name), bert(), batches, None, "batch 1", "vocabulary")


def test_learned_gates_leave_the_model_as_it_was() -> None:
    model = bert()
    kinds = [type(m) for m in model.modules()]
    with (
        pytest.raises((IndexError, HeadPruneError)),
        learned_gates(model, hp.gating.HardConcrete(keep=0.5)),
    ):
        model(torch.full((SIZE, LENGTH), WORDS))
    assert [type(m) for m in model.modules()] == kinds


# --- what is not translated
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("my own problem"), torch.OutOfMemoryError("no memory")], ids=str
)
def test_a_long_batch_is_not_to_blame_for_everything(error: Exception) -> None:
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    config.max_position_embeddings = 8
    model = LlamaForCausalLM(config).eval()

    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise error

    with pytest.raises(type(error), match=str(error)) as caught:
        hp.score(model, [{"input_ids": torch.randint(20, (2, 12))}], loss=failing, progress=False)
    assert caught.value is error


class Switched(IterableDataset[Any]):
    """Batches with a switch of the model's."""

    def __iter__(self) -> Any:
        ids = torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(0))
        yield {"input_ids": ids, "labels": torch.tensor([0, 1, 0, 1]), "return_dict": True}


def test_a_batch_with_a_switch_is_no_single_example() -> None:
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    found = hp.score(BertForSequenceClassification(config).eval(), Switched(), progress=False)
    assert found.n_examples == 4
