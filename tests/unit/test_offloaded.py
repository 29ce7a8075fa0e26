"""Models whose weights accelerate offloads: gates, scores, cuts and checkpoints are those of the
model in memory."""

import copy
from collections import ChainMap
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from torch.testing import assert_close
from transformers import GPT2LMHeadModel

import headprune as hp
from headprune.core.errors import (
    CheckpointError,
    InvalidValue,
    UnsupportedModel,
    VerificationFailed,
)
from headprune.model import cut, offloaded_cut
from headprune.model.offloaded import count_parameters, offloaded, state_of, tied
from headprune.surgery import prune
from tests.laws.support import CLOSE, EXACT, logits, picture, ragged, subject_of, unchanged
from tests.unit.test_sites import ODD, odd_model

#: A model, and where its weights are.
CASES = [("bert", "cpu"), ("gpt2", "disk"), ("llama", "some on disk")]


def away(model, kind, folder):
    """A copy that is offloaded, whole or every other layer of it."""
    twin = copy.deepcopy(model)
    if kind == "cpu":
        return cpu_offload(twin)
    if kind == "disk":
        return disk_offload(twin, folder)
    layers = next(n for n, m in twin.named_modules() if isinstance(m, nn.ModuleList))
    homes = {name.rpartition(".")[0] for name in twin.state_dict()}
    device_map = {home: "cpu" for home in homes if not home.startswith(f"{layers}.")}
    for i in range(len(twin.get_submodule(layers))):
        device_map[f"{layers}.{i}"] = "disk" if i % 2 else "cpu"
    return dispatch_model(twin, device_map, offload_dir=folder)


@pytest.fixture(params=CASES, ids=" on ".join)
def case(request, tmp_path):
    name, kind = request.param
    subject = subject_of(name)
    subject.batch.setdefault("labels", subject.batch["input_ids"])
    if name == "bert":
        subject.batch["labels"] = torch.arange(len(subject.batch["input_ids"])) % 2
    return subject, away(subject.model, kind, tmp_path / "offload")


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_model(model, other, batch):
    here, there = model.state_dict(), state_of(other)
    assert here.keys() == there.keys()
    for name in here:
        assert_close(there[name], here[name], **EXACT, msg=name)
    with torch.no_grad():
        assert_close(logits(other, batch), logits(model, batch), **CLOSE)


def assert_saved_alike(model, other, folder, **options):
    for name, one in (("plain", model), ("away", other)):
        hp.save_pretrained(one, folder / name / "small", **options)
    assert files(folder / "away" / "small") == files(folder / "plain" / "small")


def test_scores_and_gates_are_those_in_memory(case):
    subject, model = case
    before = picture(model)
    assert any(t.is_meta for t in model.parameters())
    scorers = ["taylor", "ggn", "surgeon", "leave_one_out", "wanda", "obs", "magnitude"]
    plain = hp.score(subject.model, [subject.batch], scorers, progress=False)
    found = hp.score(model, [subject.batch], scorers, progress=False)
    for a, b in zip(plain, found, strict=True):
        assert_close(b.values, a.values, **CLOSE, msg=a.scorer)
        assert (b.model, b.costs, b.data, b.notes) == (a.model, a.costs, a.data, a.notes)
    assert picture(model) == before
    with torch.no_grad():
        with hp.gated(subject.model, subject.ragged()):
            expected = logits(subject.model, subject.batch)
        with hp.gated(model, subject.ragged()):
            assert_close(logits(model, subject.batch), expected, **EXACT)
        assert_close(logits(model, subject.batch), logits(subject.model, subject.batch), **EXACT)


def test_a_cut_is_that_in_memory_and_stays_offloaded(case, tmp_path):
    subject, model = case
    plain, batch = copy.deepcopy(subject.model), subject.batch
    elsewhere = {name for name, tensor in offloaded(model).items() if tensor.shape}
    last = subject.mask({site.name: site.units[-1] for site in subject.sites})
    for mask in (subject.ragged() | last, last):  # the second composes with the first
        assert hp.prune_(model, mask, batch) == hp.prune_(plain, mask, batch)
        assert_same_model(plain, model, batch)
    assert set(offloaded(model)) == elsewhere
    assert_saved_alike(plain, model, tmp_path)
    here, there = (hp.score(m, [batch], "taylor", progress=False) for m in (plain, model))
    assert_close(there.values, here.values, **CLOSE)
    assert there.model == here.model
    none = subject.mask({site.name: [] for site in subject.sites})
    for one in (plain, model):
        hp.prune_(one, none, batch)  # layers without heads keep their biases
    remove_hook_from_submodules(model)
    assert not any(t.is_meta for t in model.parameters())
    assert_same_model(plain, model, batch)


def test_an_error_leaves_the_model_as_it_was(case, tmp_path, monkeypatch):
    subject, model = case
    with torch.no_grad():
        expected = logits(model, subject.batch)
    on_disk = tmp_path / "offload"
    kept, fail = files(on_disk) if on_disk.is_dir() else {}, Mock(side_effect=KeyboardInterrupt)

    def wrong(tensor, dimension, rows):
        return tensor.index_select(dimension, torch.arange(len(rows))) + 1

    for target, name, do, error in (
        (offloaded_cut._NewWeights, "maps", fail, KeyboardInterrupt),
        (cut, "_install", fail, KeyboardInterrupt),
        (cut, "check_fetched", fail, KeyboardInterrupt),
        (prune, "compare", fail, KeyboardInterrupt),
        (offloaded_cut, "_shorter", wrong, VerificationFailed),
    ):
        with monkeypatch.context() as patch, unchanged(model):
            patch.setattr(target, name, do)
            with pytest.raises(error):
                hp.prune_(model, subject.ragged(), subject.batch)
        assert not on_disk.is_dir() or files(on_disk) == kept, name
    last = model.get_submodule(list(subject.sites)[-1].name)
    with unchanged(model), pytest.raises(KeyboardInterrupt), last.register_forward_hook(fail):
        hp.score(model, [subject.batch], "taylor", progress=False)
    bad = {**subject.batch, "input_ids": torch.full_like(subject.batch["input_ids"], 10_000)}
    with unchanged(model), pytest.raises(InvalidValue, match=r"batch 0: .* vocabulary"):
        hp.score(model, [bad], "taylor", progress=False)
    with torch.no_grad():
        assert_close(logits(model, subject.batch), expected, **EXACT)


def test_what_others_hold_is_left_as_it_is(tmp_path):
    subject = subject_of("llama")
    model = away(subject.model, "disk", tmp_path)
    teacher, before = copy.deepcopy(model), files(tmp_path)
    hp.prune_(model, subject.ragged())
    assert files(tmp_path).items() > before.items()
    with torch.no_grad():
        assert_close(logits(teacher, subject.batch), logits(subject.model, subject.batch), **EXACT)
    state = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    given = dict(state)
    hp.prune_(cpu_offload(subject.copy(), state_dict=state), subject.ragged())
    assert state.keys() == given.keys()
    assert all(state[name] is given[name] for name in given)


def test_bare_tensors_of_an_attention_are_cut_where_they_are():
    plain, x = odd_model()
    model = cpu_offload(copy.deepcopy(plain))
    assert model[0].temperature.is_meta
    assert not model[0].slopes.is_meta
    sites = hp.find_sites(model, layouts=[ODD])
    assert hp.prune_(model, ragged(sites), x, sites) == hp.prune_(plain, ragged(sites), x, sites)
    with torch.no_grad():
        assert_close(model(x), plain(x), **EXACT)
    assert model[0].temperature.is_meta


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = (hp.MultiHeadAttention(8, 2, dtype=torch.float64) for _ in range(2))
        self.two.W_q.weight = self.one.W_q.weight

    def forward(self, x):
        return self.two(self.one(x))


def test_what_is_shared_in_memory_stays_shared_and_what_accelerate_ties_is_refused(tmp_path):
    plain, x = Pair(), torch.randn(2, 3, 8, dtype=torch.float64)
    model = cpu_offload(copy.deepcopy(plain))
    mask = hp.HeadMask.from_keep({"one": [1], "two": [1]}, {"one": 2, "two": 2})
    places = {"one": "disk", "two": "disk"}
    tied_model = dispatch_model(Pair(), places, main_device="cpu", offload_dir=tmp_path)
    words = "got one that accelerate offloads as tied"
    with unchanged(tied_model), pytest.raises(UnsupportedModel, match=words):
        hp.prune_(tied_model, mask)
    assert hp.prune_(model, mask, x) == hp.prune_(plain, mask, x)
    kept = [offloaded(model)[f"{name}.W_q.weight"].read() for name in ("one", "two")]
    assert kept[0].data_ptr() == kept[1].data_ptr()
    assert_close(kept[0], plain.one.W_q.weight.detach(), **EXACT)


def test_a_place_where_a_tied_parameter_was_is_not_taken():
    """For accelerate it would be that parameter."""
    tensor = torch.arange(5.0)
    assert offloaded_cut._at_a_new_address((), tensor) is tensor
    other = offloaded_cut._at_a_new_address({tensor.data_ptr()}, tensor)
    assert other.data_ptr() != tensor.data_ptr()
    assert_close(other, tensor, **EXACT)


# --- Transformers
# -----------------------------------------------------------------------------------------------------


def test_a_model_that_transformers_offloads(tmp_path):
    subject, folder = subject_of("gpt2"), tmp_path / "model"
    assert subject.model.config.tie_word_embeddings
    subject.model.save_pretrained(folder)
    homes = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "lm_head": "cpu"}
    homes |= {f"transformer.{name}": "disk" for name in ("ln_f", "h.0", "h.1", "h.2")}
    options = {"dtype": torch.float64, "device_map": homes}
    plain = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    bare, before = GPT2LMHeadModel.from_pretrained(folder, **options), files(folder)
    mask, words = ragged(hp.find_sites(plain)), r"got one that is read.*offload_folder="
    with unchanged(bare):
        hp.score(bare, [subject.batch], "taylor", progress=False)
        with pytest.raises(UnsupportedModel, match=words):
            hp.prune_(bare, mask)
    offload = str(tmp_path / "offload")
    model = GPT2LMHeadModel.from_pretrained(folder, **options, offload_folder=offload)
    assert hp.prune_(model, mask, subject.batch) == hp.prune_(plain, mask, subject.batch)
    assert_same_model(plain, model, subject.batch)
    assert files(folder) == before
    assert_saved_alike(plain, model, tmp_path)


def test_tied_embeddings_count_and_are_stored_once(tmp_path):
    subject = subject_of("gpt2")
    count = sum(p.numel() for p in subject.model.parameters())
    for kind in ("cpu", "disk"):
        model = away(subject.model, kind, tmp_path / kind)
        logits(model, subject.batch)  # after which accelerate has two parameters
        assert model.lm_head.weight is not model.transformer.wte.weight
        assert tied(model, offloaded(model)) == {"lm_head.weight": "transformer.wte.weight"}
        assert count_parameters(model) == count
    empty = subject_of("llama")
    model = away(empty.model, "cpu", tmp_path)
    hp.prune_(model, empty.mask({site.name: [] for site in empty.sites}))
    names = tied(model, offloaded(model))
    assert not any("_proj" in name for name in names), "tensors without numbers are not one"


@pytest.mark.parametrize("format", ["transformers", "remote-code"])
def test_formats_that_others_open(format, tmp_path):
    subject = subject_of("llama")
    model, plain = away(subject.model, "cpu", tmp_path), subject.copy()
    for one in (plain, model):
        hp.prune_(one, subject.mask({site.name: site.units[0] for site in subject.sites}))
    assert_saved_alike(plain, model, tmp_path, format=format)


# --- what is refused
# --------------------------------------------------------------------------------------------------


def test_weights_that_a_cut_cannot_reach_are_refused():
    subject, (odd, _) = subject_of("bert"), odd_model()

    def adapt(module, whole):
        module.norm.weight = nn.Parameter(torch.ones(7, dtype=torch.float64))

    around = cpu_offload(subject.copy(), preload_module_classes=["BertLayer"])
    mapping = ChainMap(subject.model.state_dict())
    anew = cpu_offload(odd)
    for model, layouts, words in (
        (around, None, "weights fetched for a module around it.*preload_module_classes"),
        (cpu_offload(subject.copy(), state_dict=mapping), None, "got a ChainMap"),
        (anew, [replace(ODD, adapt=adapt)], r"0\.norm\.weight: .* got a new or changed tensor"),
    ):
        sites = hp.find_sites(model, layouts=layouts) if layouts else subject.sites
        with unchanged(model), pytest.raises(UnsupportedModel, match=words):
            hp.prune_(model, ragged(sites), sites=sites)
    with pytest.raises(UnsupportedModel, match=r"by a hook of its own.*preload_module_classes"):
        hp.score(around, None, "magnitude")


def test_recovery_and_filling_are_refused(tmp_path):
    subject = subject_of("bert")
    model, teacher = away(subject.model, "cpu", tmp_path), subject.copy()
    hp.prune_(model, subject.ragged())
    for method in ("mean_fold", "lstsq", "head_rescale"):
        with pytest.raises(UnsupportedModel, match=f"the model for {method}: must be in memory"):
            hp.recover_(model, [subject.batch], method, teacher)
    hp.save_pretrained(model, tmp_path / "small")
    with pytest.raises(CheckpointError, match="got one that accelerate offloads"):
        hp.from_pretrained(tmp_path / "small", cpu_offload(subject.copy()))
