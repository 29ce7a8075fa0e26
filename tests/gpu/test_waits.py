"""How often scoring waits for the GPU: PyTorch counts the calls that do."""

import warnings
from functools import partial

import pytest
import torch

import headprune as hp
from headprune.model.running import call
from tests.gpu.models import subject

#: Batches of a short and of a long pass; what is done once a call cancels out.
FEW, MANY = 3, 7


def waits(work):
    """Calls in ``work`` that wait for the GPU."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("called a synchronizing" in str(warning.message) for warning in said)


def batches_of(of, count):
    """Batches on the CPU, as a loader gives them, without lengths that our attention looks at."""
    batch = {name: value for name, value in of.batches[0].items() if name != "valid_lens"}
    return [batch] * count


def per_batch(of, work):
    work(batches_of(of, FEW))  # what libraries do once
    few, many = (waits(partial(work, batches_of(of, count))) for count in (FEW, MANY))
    return (many - few) / (MANY - FEW)


@pytest.mark.parametrize(
    "scorer", ["taylor", "fisher", "leave_one_out", "activation_norm", "obs", "ggn", "surgeon"]
)
@pytest.mark.parametrize("of", ["own", "encoder", "decoder"])
def test_scoring_waits_no_more_than_the_model_does(compare, gpu, of, scorer):
    """Of ``taylor`` it is asserted, of the others written down. A model of Transformers may wait by
    itself, where it looks at masks."""
    found = subject(of)
    model = found.copy(gpu)

    def bare(batches):
        for batch in batches:
            moved = {name: value.to(gpu, non_blocking=True) for name, value in batch.items()}
            with torch.no_grad():
                call(model, moved)

    score = partial(hp.score, model, scorer=scorer, loss=found.loss, progress=False)
    own, ours = per_batch(found, bare), per_batch(found, score)
    compare.note("waits a batch", of=of, scorer=scorer, scoring=ours, model_alone=own)
    if scorer == "taylor":
        name = f"waits a batch of taylor on the {of}, beyond the model's own"
        compare(name, max(0.0, ours - own), 0.0, tolerance=0.0)


def test_a_wait_is_seen(compare, gpu):
    """The negative control: to read a value waits."""
    values = torch.ones(3, device=gpu)
    compare.holds("a read value is a wait", waits(lambda: values.sum().item()) == 1)
    compare.holds("a sum is no wait", waits(values.sum) == 0)
