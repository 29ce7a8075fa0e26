"""Every kind of iterable, in everything that reads batches: each example counts once, or the
iterable is refused."""

from collections.abc import Iterator

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

import headprune as hp
from headprune import recovery, scoring
from headprune.bench import evaluate
from headprune.core.errors import InvalidValue
from headprune.model.batches import Batches
from headprune.recovery import Finetune
from headprune.run.gradual import prune_gradually_
from headprune.scoring import loss_of, rescorer
from headprune.scoring._base import Scorer
from tests.processes_work import SCORERS

N_BATCHES = 3
REFUSED = "batches: must be (sized and )?readable more than once"


class OwnIterator:
    """``iter`` gives the same iterator at every call."""

    def __init__(self, data):
        self.iterator = iter(data)

    def __iter__(self):
        return self.iterator


class NewIterator(OwnIterator):
    """``iter`` gives a new iterator at every call, and all of them read from one."""

    def __iter__(self):
        yield from self.iterator


class Stream(OwnIterator, IterableDataset[Tensor]):
    """A dataset that can be read once, and has a length all the same."""

    def __len__(self):
        return N_BATCHES


class ByIndex:
    """Iterable by ``__getitem__`` alone."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, index):
        return self.data[index]


def hugging_face(data):
    """A streamed dataset of batches, which can be read again."""
    rows = [{"x": x.tolist()} for x in data]
    return datasets.IterableDataset.from_generator(lambda: iter(rows)).with_format("torch")


def workers(data):
    return DataLoader(data, None, num_workers=1, persistent_workers=True)


AGAIN = {
    "list": list,
    "tqdm(list)": lambda data: tqdm(data, disable=True),
    "persistent DataLoader": workers,
    "by index": ByIndex,
    "IterableDataset": hugging_face,
}
ONCE = {
    "iterator": iter,
    "generator": lambda data: (x for x in data),
    "zip": lambda data: zip(data, strict=True),
    "tqdm(generator)": lambda data: tqdm((x for x in data), disable=True),
    "tqdm(generator, total)": lambda data: tqdm((x for x in data), total=N_BATCHES, disable=True),
    "own iterator": OwnIterator,
    "new iterator": NewIterator,
    "DataLoader(stream)": lambda data: DataLoader(Stream(data), batch_size=None),
}
KINDS = AGAIN | ONCE
#: One that is read again, one that is kept, one that must be refused where it is read twice.
SOME = ["by index", "generator", "new iterator"]


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 4))


def loss(model, batch):
    """Of a batch of any of the kinds."""
    if isinstance(batch, dict):
        batch = batch["x"]
    x = batch[0] if isinstance(batch, tuple) else batch
    return model(x).square().mean((1, 2))


def data():
    """The first batch is unlike the others, so that it is missed where it does not count."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 5, 8, generator=generator) * scale for scale in (9.0, 1.0, 2.0)]


def name_of(scorer):
    return scoring.registry.resolve(scorer, Scorer, "scorer")[0]


def told(find, kind):
    """What is found of batches of a kind, None where they are refused; and how often a list of them
    is read."""
    counted = Counted(data())
    expected = find(counted)
    try:
        found = find(KINDS[kind](data()))
    except InvalidValue as error:
        if kind in AGAIN or not error.must.endswith("readable more than once"):
            raise
        return None, counted.passes
    assert_close(found, expected, rtol=1e-6, atol=1e-9)
    return found, counted.passes


class Counted(list[Tensor]):
    """Counts the passes."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def test_the_scorers_and_recoveries_are_those_of_the_registry():
    assert {name_of(s) for s in SCORERS} == set(scoring.registry.names())
    methods = {recovery.registry.resolve(m, recovery.Recovery, "method")[0] for m in METHODS}
    assert methods == set(recovery.registry.names())


@pytest.mark.parametrize("kind", SOME[1:])
@pytest.mark.parametrize("scorer", SCORERS, ids=name_of)
def test_every_scorer_counts_every_example_once(scorer, kind):
    def find(batches):
        scores = hp.score(model_of(), batches, scorer, loss=loss, progress=False)
        return torch.tensor(scores.values), scores.n_examples

    found, passes = told(find, kind)
    assert found is not None or passes > 1, "one pass does not need another"


@pytest.mark.parametrize("kind", KINDS)
def test_several_scorers_count_every_example_once(kind):
    def find(batches):
        many = hp.score(model_of(), batches, ["taylor", "leave_one_out"], loss=loss, progress=False)
        return [(torch.tensor(scores.values), scores.n_examples) for scores in many]

    found, _ = told(find, kind)
    # what is an iterator is kept
    assert found is not None or not isinstance(KINDS[kind](data()), Iterator)


@pytest.mark.parametrize("kind", SOME)
def test_reading_until_the_set_is_settled_begins_at_the_first_example(kind):
    stable = hp.Stable(k=2)

    def find(batches):
        scores = hp.score(model_of(), batches, "taylor", loss=loss, until=stable, progress=False)
        return torch.tensor(scores.values), scores.n_examples

    assert told(find, kind)[0] is not None


METHODS = [
    Finetune(steps=N_BATCHES),
    Finetune(epochs=2, learning_rate=0.01),
    "head_rescale",
    "lstsq",
    "mean_fold",
    recovery.MeanFold(measure=False),
]


def recovered(batches, method, **more):
    """The weights after a recovery, and how many examples it saw."""
    small = model_of()
    hp.prune_heads_(small, {0: [0], 1: [1, 2]})
    teacher = None if isinstance(method, Finetune) else model_of()
    report = hp.recover_(small, batches, method, teacher, loss, **more)
    return dict(small.state_dict()), report.n_examples


CASES = [(method, kind) for method in METHODS for kind in SOME]
CASES += [(METHODS[0], "DataLoader(stream)")]


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_every_recovery_sees_every_example_as_often(method, kind):
    if isinstance(method, Finetune) and kind == "by index":
        with pytest.raises(InvalidValue, match="must be sized and readable more than once"):
            recovered(KINDS[kind](data()), method)
        return
    found, passes = told(lambda batches: recovered(batches, method), kind)
    assert found is not None or passes > 1 or isinstance(method, Finetune)


@pytest.mark.parametrize("kind", ["generator", "new iterator"])
def test_validation_that_is_read_once_is_refused(kind):
    with pytest.raises(InvalidValue, match=r"validation.*readable more than once"):
        recovered(data(), Finetune(steps=2, eval_every=1), validation=ONCE[kind](data()))


def masks():
    return [hp.HeadMask.from_keep({"0": [1], "1": k}, {"0": 4, "1": 4}) for k in ([0], [2])]


def losses_for_selectors(batches):
    rise = loss_of(model_of(), batches, loss=loss, progress=False)
    return [torch.from_numpy(rise(masks())) for _ in range(2)]


def scores_for_selectors(batches):
    rescore = rescorer(model_of(), batches, loss=loss, progress=False)
    return [torch.tensor(rescore(mask).values) for mask in masks()]


def evaluation(batches):
    return evaluate(model_of(), batches, loss).losses


def stages(batches):
    settings, budget = Finetune(steps=2, learning_rate=1e-9), hp.Budget(keep_heads=2)
    more = {"stages": 2, "finetune": settings, "calibration": batches, "loss": loss}
    report = prune_gradually_(model_of(), data(), budget, **more)
    return [int(str(stage.plan.scores)[:12], 16) for stage in report.stages]  # digests


@pytest.mark.parametrize(
    ("find", "kind"),
    [
        *((losses_for_selectors, kind) for kind in SOME),
        *((scores_for_selectors, kind) for kind in SOME),
        *((evaluation, kind) for kind in SOME),
        (stages, "new iterator"),
    ],
)
def test_what_else_reads_batches_counts_every_example_once(find, kind):
    found, passes = told(find, kind)
    assert found is not None or passes > 1
    assert found is not None or find is not evaluation


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_loses_no_batch(kind):
    """Also a second look, and one after a pass."""
    batches = Batches.of(KINDS[kind](data()))
    assert Batches.of(batches) is batches
    for first in (batches.first(), batches.first()):
        assert_close(loss(model_of(), first), loss(model_of(), data()[0]))
    assert len(list(batches)) == N_BATCHES
    assert batches.again() is (kind in AGAIN)
    if kind in AGAIN:
        assert len(list(batches)) == N_BATCHES
    else:
        for read in (batches.first, lambda: list(batches)):
            with pytest.raises(InvalidValue, match=REFUSED):
                read()
