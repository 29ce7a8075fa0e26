"""Checkpoint folders that are damaged, foreign or interrupted, and models of the user's own."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.checkpoints import remote_code
from headprune.core.errors import CheckpointError, InvalidValue, VerificationFailed
from headprune.core.heads import HeadMask
from headprune.layouts import registry
from tests.laws.support import picture

WEIGHTS, MANIFEST = "model.safetensors", "headprune.json"


def model_and_batch(name: str = "bert", seed: int = 0) -> tuple[Any, dict[str, Any]]:
    model, batch = registry.get(name).tiny(seed)
    return model.eval(), batch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cut BERT on disk; copied before anything is done to it."""
    model, _ = model_and_batch()
    hp.prune_heads_(model, {0: [1], 1: [0, 1, 2, 3]})
    return hp.save_pretrained(model, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the weights and makes their hash true again."""
    import hashlib

    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    tensors = {k: v.clone() for k, v in tensors.items()}
    change(tensors)
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    edit(folder / MANIFEST, lambda m: m.update(weights_sha256=digest))


def refuses(folder: Path, words: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=words) as error:
        hp.from_pretrained(folder, **options)
    assert "must be" in str(error.value)


def test_the_folder_loads_before_it_is_damaged(folder: Path) -> None:
    assert [len(s.heads) for s in hp.find_sites(hp.from_pretrained(folder))] == [3, 0, 4]
    assert hp.from_pretrained(str(folder)) is not None


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("size", [0, 4, 200, -1])
def test_truncated_weights(folder: Path, size: int) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:size])
    refuses(folder, r"model\.safetensors: must be a valid safetensors file.*Copy the folder again")


@pytest.mark.parametrize("where", [3, 20, -1], ids=["length", "header", "data"])
def test_one_flipped_byte(folder: Path, where: int) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[where] ^= 0x10
    (folder / WEIGHTS).write_bytes(data)
    refuses(
        folder,
        r"model\.safetensors: must be (the file that headprune\.json describes|a valid safetensors"
        r" file)",
    )


def test_a_flipped_byte_in_the_data_is_found_by_its_hash(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)
    refuses(folder, r"\(SHA-256 [0-9a-f]{12}\.\.\.\), got a file with other contents")


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    refuses(folder, r"model\.safetensors: must be the model's weights, got no such file")


def test_weights_in_a_pickle_are_not_read(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")
    refuses(folder, r"model\.safetensors: must be the model's weights, got no such file")


def test_a_missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("classifier.bias"))
    refuses(
        folder, r"exactly the tensors of BertFor.*, got 1 missing \(classifier\.bias\), 0 unknown"
    )


def test_a_foreign_tensor(folder: Path) -> None:
    rewrite(folder, lambda t: t.update(extra=torch.ones(1)))
    refuses(folder, r"got 0 missing \(\), 1 unknown \(extra\)")


def test_a_tensor_of_another_shape(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"classifier.bias": torch.ones(4)}))
    refuses(folder, r"classifier\.bias: must be of shape \[3\], got \[4\]")


def test_a_tensor_of_another_kind_of_number(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"classifier.bias": t["classifier.bias"].long()}))
    refuses(folder, r"classifier\.bias: must be of a type like torch\.float32, got torch\.int64")


# ---------------------------------------------------------------- manifest


def test_no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    refuses(folder, r"must be a folder that save_pretrained wrote, got no headprune\.json in it")


def test_a_plain_transformers_folder(tmp_path: Path) -> None:
    model, _ = model_and_batch()
    model.save_pretrained(tmp_path)
    refuses(tmp_path, r"must be a folder that save_pretrained wrote, got no headprune\.json in it")


def test_no_folder_and_a_file(tmp_path: Path) -> None:
    refuses(tmp_path / "nowhere", "must be a folder that save_pretrained wrote, got no such folder")
    (tmp_path / "file").write_text("x")
    refuses(tmp_path / "file", "must be a folder that save_pretrained wrote")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "valid JSON"),
        ("{", "valid JSON"),
        ("[1]", "JSON object"),
        ("null", "JSON object"),
        ("{}", "must be 'Manifest', got None"),
        (
            '{"headprune": "HeadMask", "version": 1, "rows": []}',
            "must be 'Manifest', got 'HeadMask'",
        ),
        (b"\xff\xfe\x00", "readable"),
    ],
    ids=["empty", "broken", "list", "null", "no kind", "another kind", "binary"],
)
def test_a_manifest_that_is_none(folder: Path, text: str | bytes, words: str) -> None:
    (folder / MANIFEST).write_bytes(text if isinstance(text, bytes) else text.encode())
    refuses(folder, rf"(?s)headprune\.json: must be a manifest that we can read.*{words}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=99), "version.*99"),
        (
            lambda m: m.update(model_clas="x"),
            "model_clas: must be a known key.*Did you mean 'model_class'",
        ),
        (lambda m: m.pop("mask"), "mask"),
        (lambda m: m.update(transformers="yes"), r"transformers: must be of type bool, got 'yes'"),
        (lambda m: m["mask"]["rows"][0].update(kept=[9]), r"head 9 of .*an index below 4"),
        (lambda m: m["mask"]["rows"][0].update(kept=[2, 0]), "sorted indices"),
    ],
    ids=["version", "unknown key", "missing key", "type", "head", "order"],
)
def test_a_manifest_with_a_fault(folder: Path, change: Any, words: str) -> None:
    edit(folder / MANIFEST, change)
    refuses(folder, rf"(?s)must be a manifest that we can read.*{words}")


def test_a_manifest_of_other_heads(folder: Path) -> None:
    edit(folder / MANIFEST, lambda m: m["mask"]["rows"][2].update(kept=[0, 1]))
    refuses(folder, r"encoder\.layer\.2\..*must be of shape \[8, 16\], got \[16, 16\]")


def test_a_manifest_of_other_sites(folder: Path) -> None:
    edit(
        folder / MANIFEST,
        lambda m: m["mask"]["rows"][2].update(site="bert.encoder.layer.7.attention"),
    )
    refuses(folder, r"(?s)a checkpoint of this model.*layer\.[27]\.attention")


@pytest.mark.parametrize(
    "name", ["BertForTokenClassification", "LlamaForCausalLM", "Nobody", "pipeline", "BertConfig"]
)
def test_a_manifest_of_another_class(folder: Path, name: str) -> None:
    edit(folder / MANIFEST, lambda m: m.update(model_class=name))
    with pytest.raises(CheckpointError):
        hp.from_pretrained(folder)


def test_paths_that_lead_nowhere(folder: Path) -> None:
    edit(folder / MANIFEST, lambda m: m.update(added_biases=["no.such.module.bias"]))
    assert hp.from_pretrained(folder) is not None
    edit(
        folder / MANIFEST,
        lambda m: m.update(aliases=[{"name": "no.such", "stored": "classifier.bias"}]),
    )
    refuses(folder, r"1 unknown \(no\.such\)")


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "ÿ"])
def test_a_broken_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin1")
    refuses(
        folder, r"config\.json: must be the file that headprune\.json describes"
    )  # before anything is built
    _as_if_saved_so(folder)
    refuses(folder, r"config\.json: must be (a valid|a model's) configuration")


def _as_if_saved_so(folder: Path) -> None:
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    edit(folder / "headprune.json", lambda m: m.update(config_sha256=digest))


def test_no_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()
    refuses(folder, r"config\.json: must be a valid configuration, got no such file")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "abc"},
        {"hidden_size": 0},
        {"hidden_size": 17},
        {"hidden_size": None},
        {"hidden_act": "nope"},
    ],
    ids=str,
)
def test_a_configuration_that_builds_nothing(folder: Path, change: dict[str, Any]) -> None:
    edit(folder / "config.json", lambda c: c.update(change))
    _as_if_saved_so(folder)
    refuses(folder, r"config\.json: must be a valid configuration")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 2}, r"layer\.2\.attention.*got one without such a site"),
        ({"num_attention_heads": 8}, "with 4 heads at .*got 8 heads there"),
        (
            {"vocab_size": 51},
            r"word_embeddings\.weight: must be of shape \[51, 16\], got \[50, 16\]",
        ),
        (
            {"num_labels": 4, "id2label": {str(i): str(i) for i in range(4)}, "label2id": {}},
            r"classifier.*\[4",
        ),
    ],
    ids=["layers", "heads", "vocabulary", "labels"],
)
def test_a_configuration_of_another_model(folder: Path, change: dict[str, Any], words: str) -> None:
    edit(folder / "config.json", lambda c: c.update(change))
    _as_if_saved_so(folder)
    refuses(folder, words)


# ---------------------------------------------------------------- a model that is given


class Mine(nn.Module):
    """Not a Transformers class: two attentions, one tied pair of layers, a buffer, and one that is
    not stored."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.first = hp.MultiHeadAttention(8, heads)
        self.second = hp.MultiHeadAttention(8, heads, bias=False)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("table", torch.linspace(0.1, 0.7, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x)) * self.scale * self.table
        return self.down(self.up(x))


def mine(folder: Path, dtype: torch.dtype = torch.float32) -> Mine:
    model = Mine().eval().to(dtype)
    model.scale *= 3.0
    mask = HeadMask.from_keep({"first": [1, 3], "second": []}, {"first": 4, "second": 4})
    hp.prune_(model, mask)
    hp.save_pretrained(model, folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_module_of_ones_own_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    model, x = mine(tmp_path, dtype), torch.randn(2, 5, 8).to(dtype)
    assert {p.name for p in tmp_path.iterdir()} == {WEIGHTS, MANIFEST, "README.md"}
    given = Mine()
    loaded = hp.from_pretrained(tmp_path, model=given)
    assert loaded is given
    assert_close(loaded(x), model(x), rtol=0, atol=0)
    assert loaded.down.weight is loaded.up.weight
    assert loaded.scale.dtype == loaded.table.dtype == dtype
    assert not any(m.training for m in loaded.modules())
    assert (loaded.first.heads, loaded.second.heads) == ((1, 3), ())


def test_a_module_of_ones_own_must_be_given(tmp_path: Path) -> None:
    mine(tmp_path)
    refuses(
        tmp_path,
        r"must be a Transformers model, got class 'Mine'\. Pass from_pretrained\(folder,"
        r" model=\.\.\.\)",
    )


def test_ones_own_class_with_a_name_of_transformers(tmp_path: Path) -> None:
    """Found by name is not enough: the class must be the very one."""

    class BertForSequenceClassification(hf.BertForSequenceClassification):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = -out.logits
            return out

    config, batch = model_and_batch()[0].config, model_and_batch()[1]
    model = BertForSequenceClassification(config).eval()
    hp.prune_heads_(model, {0: [1]})
    hp.save_pretrained(model, tmp_path)
    refuses(tmp_path, "must be a Transformers model")
    loaded = hp.from_pretrained(tmp_path, model=BertForSequenceClassification(config))
    assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Mine(2),
            (
                "for a model with 2 heads at 'first', like the plan's, got 4|with 4 heads at"
                " 'first'.*got 2"
            ),
        ),
        (lambda: model_and_batch()[0], "a checkpoint of this model"),
        (lambda: nn.Linear(2, 2), "no attention-like module"),
        (lambda: type("Yours", (Mine,), {})(), "must be a checkpoint of Yours, got Mine"),
    ],
    ids=["heads", "sites", "no attention", "class"],
)
def test_a_model_that_does_not_fit(tmp_path: Path, make: Any, words: str) -> None:
    mine(tmp_path)
    given = make()
    before = picture(given)
    refuses(tmp_path, words, model=given)
    assert picture(given) == before


def test_what_is_no_model(tmp_path: Path) -> None:
    mine(tmp_path)
    with pytest.raises(InvalidValue, match="model"):
        hp.from_pretrained(tmp_path, model=Mine)


def test_a_given_model_is_not_left_half_cut(tmp_path: Path) -> None:
    mine(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("up.bias"))
    given = Mine()
    before, x = picture(given), torch.randn(2, 5, 8)
    expected = given(x)
    refuses(tmp_path, "1 missing", model=given)
    assert picture(given) == before
    assert_close(given(x), expected, rtol=0, atol=0)


def test_a_given_transformers_model_is_filled(folder: Path) -> None:
    given, batch = model_and_batch(seed=3)
    loaded = hp.from_pretrained(folder, model=given)
    assert loaded is given
    assert_close(loaded(**batch).logits, hp.from_pretrained(folder)(**batch).logits, rtol=0, atol=0)


def test_sites_of_a_layout_of_ones_own(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v)
            )
            out = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.o(out.transpose(1, 2).flatten(2))

    slabs = [hp.HeadSlab(n, "out", u) for n, u in (("q", "query"), ("k", "key"), ("v", "value"))]
    layout = hp.AttentionLayout("odd", "o", (*slabs, hp.HeadSlab("o", "in", "context")), head_dim=4)
    model = nn.Sequential(Attention(), Attention())
    sites = hp.find_sites(model, layouts=[layout])
    hp.prune_heads_(model, {0: [0]}, sites=sites)
    hp.save_pretrained(model, tmp_path, sites=sites)
    given = nn.Sequential(Attention(), Attention())
    loaded = hp.from_pretrained(tmp_path, model=given, sites=hp.find_sites(given, layouts=[layout]))
    x = torch.randn(2, 3, 8)
    assert_close(loaded(x), model(x), rtol=0, atol=0)


# ---------------------------------------------------------------- saving


def test_saving_over_an_earlier_save(folder: Path) -> None:
    """Also over the very file from which the model was read."""
    loaded, batch = hp.from_pretrained(folder), model_and_batch()[1]
    hp.prune_heads_(loaded, {0: [0], 2: [3]})
    expected = loaded(**batch).logits
    hp.save_pretrained(loaded, folder)
    assert_close(loaded(**batch).logits, expected, rtol=0, atol=0)
    assert_close(hp.from_pretrained(folder)(**batch).logits, expected, rtol=0, atol=0)


def test_saving_another_model_over_an_earlier_save(folder: Path) -> None:
    model, batch = model_and_batch("llama")
    hp.save_pretrained(model, folder)
    assert_close(hp.from_pretrained(folder)(**batch).logits, model(**batch).logits, rtol=0, atol=0)


@pytest.mark.parametrize("moment", ["before", "within"])
def test_an_interrupted_save_leaves_the_old_folder(
    folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = model_and_batch()[1]
    expected = hp.from_pretrained(folder)(**batch).logits
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def breaks(tensors: Any, path: Path, **_: Any) -> None:
        if moment == "within":
            Path(path).write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", breaks)
    other, _ = model_and_batch("llama")  # another configuration too
    with pytest.raises(KeyboardInterrupt):
        hp.save_pretrained(other, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before, (
        "nothing is changed and nothing left over"
    )
    assert_close(hp.from_pretrained(folder)(**batch).logits, expected, rtol=0, atol=0)


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="must be a folder, got a file"):
        hp.save_pretrained(model_and_batch()[0], tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_folders_are_made(tmp_path: Path) -> None:
    model, batch = model_and_batch("vit")
    loaded = hp.from_pretrained(hp.save_pretrained(model, tmp_path / "a" / "b"))
    assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_tensors_without_data(tmp_path: Path) -> None:
    model = Mine().to("meta")
    with pytest.raises(CheckpointError, match="a tensor with data, got one on the meta device"):
        hp.save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_extra_state_cannot_be_stored(tmp_path: Path) -> None:
    class Extra(Mine):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    with pytest.raises(CheckpointError, match="Extra state cannot be stored"):
        hp.save_pretrained(Extra(), tmp_path)


def test_weights_that_are_not_contiguous(tmp_path: Path) -> None:
    model, batch = model_and_batch()
    weight = model.classifier.weight.detach()
    model.classifier.weight = nn.Parameter(weight.T.contiguous().T)
    assert not model.classifier.weight.is_contiguous()
    hp.save_pretrained(model, tmp_path)
    # The same numbers; another memory layout may round the product in another way.
    loaded = hp.from_pretrained(tmp_path)
    assert_close(loaded.classifier.weight, model.classifier.weight, rtol=0, atol=0)
    assert_close(loaded(**batch).logits, model(**batch).logits)


def test_parameters_that_are_views_of_one_memory(tmp_path: Path) -> None:
    """Two halves of one tensor are no shared tensor; neither are a matrix and its first rows."""
    model = Mine()
    memory = torch.randn(16, 8)
    model.up.weight, model.down.weight = nn.Parameter(memory[:8]), nn.Parameter(memory[8:])
    hp.save_pretrained(model, tmp_path / "halves")

    def untied() -> Mine:
        given = Mine()
        given.down.weight = nn.Parameter(given.down.weight.detach().clone())
        return given

    x = torch.randn(2, 5, 8)
    loaded = hp.from_pretrained(tmp_path / "halves", model=untied())
    assert_close(loaded.eval()(x), model.eval()(x), rtol=0, atol=0)
    model.up.bias, model.down.bias = (
        nn.Parameter(memory.view(-1)[:8]),
        nn.Parameter(memory.view(-1)[4:12]),
    )
    hp.save_pretrained(model, tmp_path / "overlap")
    loaded = hp.from_pretrained(tmp_path / "overlap", model=untied())
    assert_close(loaded.down.bias, model.down.bias, rtol=0, atol=0)


def test_an_altered_configuration_is_refused(tmp_path: Path) -> None:
    model, _ = registry.get("bert").tiny(0)
    hp.save_pretrained(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"gelu"', '"relu"'))
    with pytest.raises(
        CheckpointError, match=r"config.json: must be the file that headprune.json describes"
    ):
        hp.from_pretrained(tmp_path)


# ---------------------------------------------------------------- a modelling file beside the
# weights


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_auto_model_opens_a_remote_code_folder_without_its_head(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr("sys.path", [*sys.path])  # Transformers adds its folder of modules
    model, batch = model_and_batch(name)
    sites = hp.find_sites(model)
    units = [[0], [], list(range(len(sites[2].units)))]
    keep = {s.name: [h for u in us for h in s.units[u]] for s, us in zip(sites, units, strict=True)}
    hp.prune_(model, HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}))
    hp.save_pretrained(model, tmp_path / "small", format="remote-code")
    body = hf.AutoModel.from_pretrained(tmp_path / "small", trust_remote_code=True).eval()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    expected = model.base_model(**inputs).last_hidden_state
    assert_close(body(**inputs).last_hidden_state, expected, rtol=0, atol=0)


def test_a_body_that_does_not_come_back_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = model_and_batch("llama")
    hp.prune_heads_(model, {0: [0, 1]})
    monkeypatch.setattr(
        remote_code, "_BODY", Template(remote_code._BODY.template.replace("$PREFIX", "elsewhere."))
    )
    with pytest.raises(VerificationFailed, match="LlamaModel out of the written folder"):
        hp.save_pretrained(model, tmp_path / "small", format="remote-code")
    assert list(tmp_path.iterdir()) == []
