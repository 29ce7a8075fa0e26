"""The Trainer of Transformers cuts on a schedule, by the callback of docs/training.md, and goes on
from checkpoints."""

import copy
import itertools
from types import ModuleType

import pytest
import torch
import transformers
from torch import distributed, nn
from torch.testing import assert_close

import headprune as hp
from headprune.attention.kept_heads import KEPT_HEADS
from headprune.core.errors import InvalidValue, UnsupportedModel
from tests.documents import DOCS, blocks
from tests.tiny_models import SIZES


@pytest.fixture(scope="module")
def page():
    module = ModuleType("page")
    texts = [b.text for b in blocks(DOCS / "training.md") if b.language == "python"]
    (defined,) = [
        text.partition("\n\nmodel = ")[0] for text in texts if "class PruneOnSchedule" in text
    ]
    exec(texts[0], module.__dict__)
    exec(defined, module.__dict__)
    return module


class Classifier(nn.Module):
    """Our own attention in a model that is not Transformers' own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.attention = hp.MultiHeadAttention(16, 4, n_kv_heads=2)
        self.second = hp.MultiHeadAttention(16, 4, n_kv_heads=2)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids, labels=None):
        x = self.embedding(input_ids)
        x = x + self.attention(x)
        x = x + self.second(x)
        logits = self.head(x.mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def bert():
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, **SIZES)
    return transformers.BertForSequenceClassification(config)


def built(kind):
    torch.manual_seed(0)
    return kind()


class Freely(transformers.TrainerCallback):
    """Cuts by a fixed plan, after which groups have unlike sizes."""

    def __init__(self, masks):
        self.masks = masks

    def on_step_end(self, args, state, control, **given):
        model, optimizer = given["model"], given["optimizer"]
        if state.global_step in self.masks:
            sites = hp.find_sites(model, policy="free")
            hp.prune_heads_(model, self.masks[state.global_step], sites=sites, optimizer=optimizer)


def trainer_of(model, folder, callbacks, rows, **more):
    settings = {"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 4}
    settings |= {"learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1}
    settings |= {"report_to": "none", "logging_strategy": "no", **more}
    args = transformers.TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **settings)
    return transformers.Trainer(model, args, train_dataset=rows, callbacks=callbacks)


def test_the_pages_callback_cuts_on_its_schedule(page, tmp_path):
    model, callback = built(bert), page.PruneOnSchedule({1: 6, 2: 4}, [page.batch])
    trainer = trainer_of(model, tmp_path, [callback], page.rows)
    trainer.train()
    assert sum(len(site.heads) for site in hp.find_sites(model)) == 4
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    state = trainer.optimizer.state
    for p in model.parameters():
        assert float(state[p]["step"]) == 6
        assert state[p]["exp_avg"].shape == p.shape


@pytest.mark.parametrize("kind", [bert, Classifier], ids=lambda kind: kind.__name__)
def test_a_training_goes_on_from_a_checkpoint(kind, page, tmp_path):
    masks = {2: {0: [3], 1: [0]}, 5: {0: [0]}}
    whole = built(kind)
    model = copy.deepcopy(whole)
    trainer_of(model, tmp_path / "a", [Freely(masks)], page.rows).train()
    resumed = copy.deepcopy(whole)
    hp.prune_heads_(resumed, masks[2], sites=hp.find_sites(resumed, policy="free"))
    asked = {"resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-3")}
    trainer_of(resumed, tmp_path / "b", [Freely(masks)], page.rows).train(**asked)
    assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert any(KEPT_HEADS in name for name in model.state_dict()) == (kind is not bert)
    if kind is bert:  # its weights are stored without metadata, and say all that is computed
        return
    other = copy.deepcopy(whole)
    hp.prune_heads_(other, {0: [0], 1: [3]}, sites=hp.find_sites(other, policy="free"))
    with pytest.raises(InvalidValue, match=r"heads of .* must be those of the module"):
        trainer_of(other, tmp_path / "c", [], page.rows).train(**asked)


@pytest.mark.parametrize("optim", ["adafactor", "sgd"])
def test_the_trainers_optimizers_go_on(optim, page, tmp_path):
    model = built(bert)
    accumulated = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "optim": optim}
    callback = page.PruneOnSchedule({2: 4}, [page.batch])
    trainer = trainer_of(model, tmp_path, [callback], page.rows, **accumulated)
    before = []

    class After(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            before.append({n: p.detach().clone() for n, p in model.named_parameters()})

    trainer.add_callback(After())
    trainer.train()
    for earlier, later in itertools.pairwise(before[1:]):
        # All that a gradient reaches moves in every step.
        moved = [n for n in earlier if "embeddings" not in n and ".key.bias" not in n]
        assert [n for n in moved if torch.equal(earlier[n], later[n])] == []


def test_the_trainer_in_several_processes_says_the_order(page, tmp_path, monkeypatch):
    """It trains a wrapper of its own, which must not go on: one process, wrapped as several would
    be."""
    meeting = f"file://{tmp_path}/group"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        callback = page.PruneOnSchedule({2: 4}, [page.batch])
        trainer = trainer_of(built(bert), tmp_path, [callback], page.rows)
        prepared = trainer.accelerator.prepare_model

        def wrapped(model, **more):
            return nn.parallel.DistributedDataParallel(prepared(model, **more))

        monkeypatch.setattr(trainer.accelerator, "prepare_model", wrapped)
        with pytest.raises(UnsupportedModel, match="DistributedDataParallel: must be made after"):
            trainer.train()
    finally:
        distributed.destroy_process_group()
