"""Models whose weights accelerate offloads: gates, scores, cuts and checkpoints are those of the
model in memory."""

from __future__ import annotations

import copy
from collections import ChainMap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from torch.testing import assert_close

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
from tests.laws.support import CLOSE, EXACT, Subject, logits, picture, ragged, subject_of
from tests.unit.test_sites import ODD, odd_model

KINDS = ["cpu", "disk", "some on disk"]
MODELS = ["bert", "gpt2", "llama"]


def away(model: nn.Module, kind: str, folder: Path) -> Any:
    """A copy that is offloaded, whole or every other layer of it."""
    twin = copy.deepcopy(model)
    if kind == "cpu":
        return cpu_offload(twin)
    if kind == "disk":
        return disk_offload(twin, folder)
    layers = next(n for n, m in twin.named_modules() if isinstance(m, nn.ModuleList))
    homes = {name.rpartition(".")[0] for name in twin.state_dict()}
    device_map = {home: "cpu" for home in homes if not home.startswith(f"{layers}.")}
    device_map |= {
        f"{layers}.{i}": "disk" if i % 2 else "cpu" for i in range(len(twin.get_submodule(layers)))
    }
    return dispatch_model(twin, device_map, offload_dir=folder)


@pytest.fixture(params=MODELS)
def subject(request: pytest.FixtureRequest) -> Subject:
    found = subject_of(request.param)
    found.batch.setdefault("labels", found.batch["input_ids"])
    if request.param == "bert":
        found.batch["labels"] = torch.arange(len(found.batch["input_ids"])) % 2
    return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_model(model: nn.Module, other: nn.Module, batch: Any) -> None:
    here, there = model.state_dict(), state_of(other)
    assert here.keys() == there.keys()
    for name in here:
        assert_close(there[name], here[name], **EXACT, msg=name)
    with torch.no_grad():
        assert_close(logits(other, batch), logits(model, batch), **CLOSE)


def test_scores_are_those_in_memory(subject: Subject, kind: str, tmp_path: Path) -> None:
    model = away(subject.model, kind, tmp_path)
    before = picture(model)
    assert any(t.is_meta for t in model.parameters())
    scorers = [
        "taylor",
        "fisher",
        "ggn",
        "surgeon",
        "leave_one_out",
        "wanda",
        "obs",
        "magnitude",
        "random",
    ]
    plain = hp.score(subject.model, [subject.batch], scorers, progress=False)
    found = hp.score(model, [subject.batch], scorers, progress=False)
    for a, b in zip(plain, found, strict=True):
        assert_close(b.values, a.values, **CLOSE, msg=a.scorer)
        assert (b.model, b.costs, b.data, b.notes) == (a.model, a.costs, a.data, a.notes)
    assert picture(model) == before


def test_gates_are_those_in_memory(subject: Subject, kind: str, tmp_path: Path) -> None:
    model, mask = away(subject.model, kind, tmp_path), subject.ragged()
    with torch.no_grad():
        with hp.gated(subject.model, mask):
            expected = logits(subject.model, subject.batch)
        with hp.gated(model, mask):
            assert_close(logits(model, subject.batch), expected, **EXACT)
        assert_close(logits(model, subject.batch), logits(subject.model, subject.batch), **EXACT)


def test_a_cut_is_that_in_memory_and_stays_offloaded(
    subject: Subject, kind: str, tmp_path: Path
) -> None:
    model, plain = away(subject.model, kind, tmp_path / "offload"), copy.deepcopy(subject.model)
    elsewhere = {name for name, tensor in offloaded(model).items() if tensor.shape}
    last = subject.mask({site.name: site.units[-1] for site in subject.sites})
    for mask in (subject.ragged() | last, last):  # the second composes with the first
        expected, report = (
            hp.prune_(plain, mask, subject.batch),
            hp.prune_(model, mask, subject.batch),
        )
        assert report == expected
        assert_same_model(plain, model, subject.batch)
    assert set(offloaded(model)) == elsewhere
    for folder, one in (("plain", plain), ("away", model)):
        hp.save_pretrained(one, tmp_path / folder / "small")
    assert files(tmp_path / "away" / "small") == files(tmp_path / "plain" / "small")
    remove_hook_from_submodules(model)
    assert not any(t.is_meta for t in model.parameters())
    assert_same_model(plain, model, subject.batch)


def test_a_layer_without_heads_keeps_its_bias(subject: Subject, kind: str, tmp_path: Path) -> None:
    model, plain = away(subject.model, kind, tmp_path), copy.deepcopy(subject.model)
    mask = subject.mask({site.name: [] for site in subject.sites})
    hp.prune_(plain, mask)
    hp.prune_(model, mask, subject.batch)
    assert_same_model(plain, model, subject.batch)


def test_scores_and_plans_know_a_model_that_was_cut(
    subject: Subject, kind: str, tmp_path: Path
) -> None:
    model, plain = away(subject.model, kind, tmp_path), copy.deepcopy(subject.model)
    for one in (plain, model):
        hp.prune_(one, subject.ragged())
    here, there = (hp.score(m, [subject.batch], "taylor", progress=False) for m in (plain, model))
    assert_close(there.values, here.values, **CLOSE)
    assert there.model == here.model
    plan = hp.select(here, hp.Budget(keep_heads=0.75))
    assert hp.prune_(model, plan, subject.batch).warnings == ()


STEPS = [
    (offloaded_cut._NewWeights, "maps"),
    (cut, "_install"),
    (cut, "check_fetched"),
    (prune, "compare"),
]


@pytest.mark.parametrize(("target", "name"), STEPS)
def test_an_error_leaves_the_model_as_it_was(
    target: Any,
    name: str,
    subject: Subject,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = away(subject.model, kind, tmp_path)
    with torch.no_grad():
        expected = logits(model, subject.batch)
    before, kept = picture(model), files(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(target, name, fail)
    with pytest.raises(KeyboardInterrupt):
        hp.prune_(model, subject.ragged(), subject.batch)
    assert picture(model) == before
    assert files(tmp_path) == kept
    with torch.no_grad():
        assert_close(logits(model, subject.batch), expected, **EXACT)


def test_a_copy_that_shares_the_folder_stays_whole(subject: Subject, tmp_path: Path) -> None:
    model = away(subject.model, "disk", tmp_path)
    teacher, before = copy.deepcopy(model), files(tmp_path)
    hp.prune_(model, subject.ragged())
    assert files(tmp_path).items() > before.items()
    with torch.no_grad():
        assert_close(logits(teacher, subject.batch), logits(subject.model, subject.batch), **EXACT)


def test_a_state_dict_of_the_users_is_left_as_it_is(subject: Subject) -> None:
    state = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    given = dict(state)
    model = cpu_offload(subject.copy(), state_dict=state)
    hp.prune_(model, subject.ragged())
    assert state.keys() == given.keys()
    assert all(state[name] is given[name] for name in given)


def test_an_error_in_a_pass_sends_weights_back(subject: Subject, kind: str, tmp_path: Path) -> None:
    model = away(subject.model, kind, tmp_path)
    before = picture(model)
    last = list(hp.find_sites(model))[-1]

    def fail(*args: Any) -> None:
        raise RuntimeError("in the middle of a forward")

    handle = model.get_submodule(last.name).register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        hp.score(model, [subject.batch], "taylor", progress=False)
    handle.remove()
    assert picture(model) == before


def test_an_error_inside_a_module_sends_its_weights_back(
    subject: Subject, kind: str, tmp_path: Path
) -> None:
    model = away(subject.model, kind, tmp_path)
    before = picture(model)
    wrong = {**subject.batch, "input_ids": torch.full_like(subject.batch["input_ids"], 10_000)}
    with pytest.raises(InvalidValue, match=r"batch 0: .* vocabulary"):
        hp.score(model, [wrong], "taylor", progress=False)
    assert picture(model) == before


def test_bare_tensors_of_an_attention_are_cut_where_they_are() -> None:
    """Its parameters are away; its buffer and its plain tensor stay in memory."""
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
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (hp.MultiHeadAttention(8, 2, dtype=torch.float64) for _ in range(2))
        self.two.W_q.weight = self.one.W_q.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x))
        return out


def test_what_is_shared_in_memory_stays_shared() -> None:
    plain, x = Pair(), torch.randn(2, 3, 8, dtype=torch.float64)
    model = cpu_offload(copy.deepcopy(plain))
    mask = hp.HeadMask.from_keep({"one": [1], "two": [1]}, {"one": 2, "two": 2})
    assert hp.prune_(model, mask, x) == hp.prune_(plain, mask, x)
    kept = [offloaded(model)[f"{name}.W_q.weight"].read() for name in ("one", "two")]
    assert kept[0].data_ptr() == kept[1].data_ptr()
    assert_close(kept[0], plain.one.W_q.weight.detach(), **EXACT)


def test_what_accelerate_ties_itself_is_refused(tmp_path: Path) -> None:
    model = dispatch_model(
        Pair(), {"one": "disk", "two": "disk"}, main_device="cpu", offload_dir=tmp_path
    )
    before = picture(model)
    mask = hp.HeadMask.from_keep({"one": [1], "two": [1]}, {"one": 2, "two": 2})
    with pytest.raises(
        UnsupportedModel, match="a parameter of its own, got one that accelerate offloads as tied"
    ):
        hp.prune_(model, mask)
    assert picture(model) == before


def test_a_place_where_a_tied_parameter_was_is_not_taken() -> None:
    """For accelerate it would be that parameter."""
    tensor = torch.arange(5.0)
    assert offloaded_cut._at_a_new_address((), tensor) is tensor
    other = offloaded_cut._at_a_new_address({tensor.data_ptr()}, tensor)
    assert other.data_ptr() != tensor.data_ptr()
    assert_close(other, tensor, **EXACT)


# --- Transformers
# -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    """A tied GPT-2 of two layers in a folder, and its batch."""
    subject = subject_of("gpt2")
    assert subject.model.config.tie_word_embeddings
    subject.model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", subject.batch


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoConfig, GPT2LMHeadModel

    layers = AutoConfig.from_pretrained(folder).n_layer
    device_map = {
        "transformer.wte": "cpu",
        "transformer.wpe": "cpu",
        "transformer.ln_f": "disk",
        "lm_head": "cpu",
    }
    device_map |= {f"transformer.h.{i}": "disk" for i in range(layers)}
    return GPT2LMHeadModel.from_pretrained(
        folder, dtype=torch.float64, device_map=device_map, **options
    )


def test_a_model_that_transformers_offloads(saved: tuple[Path, Any], tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    folder, batch = saved
    plain = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    model, before = loaded(folder, offload_folder=str(tmp_path / "offload")), files(folder)
    mask = ragged(hp.find_sites(plain))
    assert hp.prune_(model, mask, batch) == hp.prune_(plain, mask, batch)
    assert_same_model(plain, model, batch)
    assert files(folder) == before
    for name, one in (("plain", plain), ("away", model)):
        hp.save_pretrained(one, tmp_path / name / "small")
    assert files(tmp_path / "away" / "small") == files(tmp_path / "plain" / "small")


def test_without_a_folder_a_cut_has_no_place(saved: tuple[Path, Any]) -> None:
    folder, batch = saved
    model = loaded(folder)
    before = picture(model)
    hp.score(model, [batch], "taylor", progress=False)
    with pytest.raises(
        UnsupportedModel, match=r"offloaded to a folder, got one that is read.*offload_folder="
    ):
        hp.prune_(model, ragged(hp.find_sites(model)))
    assert picture(model) == before


def test_tied_embeddings_count_and_are_stored_once(tmp_path: Path) -> None:
    subject = subject_of("gpt2")
    count = sum(p.numel() for p in subject.model.parameters())
    for kind in ("cpu", "disk"):
        model = away(subject.model, kind, tmp_path / kind)
        logits(model, subject.batch)  # after which accelerate has two parameters
        assert model.lm_head.weight is not model.transformer.wte.weight
        assert tied(model, offloaded(model)) == {"lm_head.weight": "transformer.wte.weight"}
        assert count_parameters(model) == count


def test_tensors_without_numbers_are_not_taken_for_one(tmp_path: Path) -> None:
    subject = subject_of("llama")
    model = away(subject.model, "cpu", tmp_path)
    hp.prune_(model, subject.mask({site.name: [] for site in subject.sites}))
    assert not any("_proj" in name for name in tied(model, offloaded(model)))


@pytest.mark.parametrize("format", ["transformers", "remote-code"])
def test_formats_that_others_open(format: Any, tmp_path: Path) -> None:
    subject = subject_of("llama")
    model, plain = away(subject.model, "cpu", tmp_path / "offload"), subject.copy()
    mask = subject.mask({site.name: site.units[0] for site in subject.sites})
    for folder, one in (("plain", plain), ("away", model)):
        hp.prune_(one, mask)
        hp.save_pretrained(one, tmp_path / folder / "small", format=format)
    assert files(tmp_path / "away" / "small") == files(tmp_path / "plain" / "small")


# --- what is refused
# --------------------------------------------------------------------------------------------------


def test_weights_that_a_module_around_fetches_are_refused() -> None:
    subject = subject_of("bert")
    model = cpu_offload(subject.model, preload_module_classes=["BertLayer"])
    words = (
        "fetched by a hook of its own module, got weights fetched for a module around"
        " it.*preload_module_classes"
    )
    before = picture(model)
    with pytest.raises(UnsupportedModel, match=words):
        hp.prune_(model, subject.ragged())
    with pytest.raises(
        UnsupportedModel,
        match=r"fetched for each module by a hook of its own.*preload_module_classes",
    ):
        hp.score(model, None, "magnitude")
    assert picture(model) == before


def test_weights_in_another_mapping_are_refused() -> None:
    subject = subject_of("bert")
    model = cpu_offload(subject.copy(), state_dict=ChainMap(subject.model.state_dict()))  # type: ignore[arg-type]
    with pytest.raises(
        UnsupportedModel, match=r"a dictionary or an OffloadedWeightsLoader.*got a ChainMap"
    ):
        hp.prune_(model, subject.ragged())


def test_a_cut_that_makes_a_parameter_anew_is_refused() -> None:
    plain, _ = odd_model()
    model = cpu_offload(plain)

    def adapt(module: nn.Module, whole: nn.Module) -> None:
        module.norm.weight = nn.Parameter(torch.ones(7, dtype=torch.float64))

    sites = hp.find_sites(model, layouts=[replace(ODD, adapt=adapt)])
    before = picture(model)
    words = (
        r"0\.norm\.weight: must be one whose cut only removes rows and columns, .* got one that is"
        r" made anew"
    )
    with pytest.raises(UnsupportedModel, match=words):
        hp.prune_(model, ragged(sites), sites=sites)
    assert picture(model) == before


def test_recovery_and_filling_are_refused(tmp_path: Path) -> None:
    subject = subject_of("bert")
    model, teacher = away(subject.model, "cpu", tmp_path), subject.copy()
    hp.prune_(model, subject.ragged())
    for method in ("mean_fold", "lstsq", "head_rescale"):
        with pytest.raises(UnsupportedModel, match=f"the model for {method}: must be in memory"):
            hp.recover_(model, [subject.batch], method, teacher)
    hp.save_pretrained(model, tmp_path / "small")
    with pytest.raises(
        CheckpointError, match="a freshly built one, got one that accelerate offloads"
    ):
        hp.from_pretrained(tmp_path / "small", cpu_offload(subject.copy()))


def test_a_wrong_pruned_model_is_put_back(
    subject: Subject, kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    model = away(subject.model, kind, tmp_path)
    before = picture(model)
    monkeypatch.setattr(
        offloaded_cut, "_shorter", lambda t, d, rows: t.index_select(d, torch.arange(len(rows))) + 1
    )
    with pytest.raises(VerificationFailed):
        hp.prune_(model, subject.ragged(), subject.batch)
    assert picture(model) == before
