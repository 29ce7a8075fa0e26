"""Checkpoint folders that are damaged, foreign or interrupted, and models of the user's own."""

import copy
import hashlib
import json
import shutil
import sys
from pathlib import Path
from string import Template

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
from tests.laws.support import unchanged
from tests.unit.test_sites import ODD, odd_model

WEIGHTS, MANIFEST, CONFIG = "model.safetensors", "headprune.json", "config.json"


def model_and_batch(name="bert", seed=0):
    model, batch = registry.get(name).tiny(seed)
    return model.eval(), batch


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A cut BERT on disk; copied before anything is done to it."""
    model, _ = model_and_batch()
    hp.prune_heads_(model, {0: [1], 1: [0, 1, 2, 3]})
    return hp.save_pretrained(model, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def manifest(**changes):
    return lambda folder: edit(folder / MANIFEST, lambda m: m.update(changes))


def hashes_made_true(folder):
    """As if the weights and the configuration had been saved as they are now."""
    for key, name in (("weights_sha256", WEIGHTS), ("config_sha256", CONFIG)):
        if (folder / name).is_file():
            digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            manifest(**{key: digest})(folder)


def tensors(change):
    """Damage to the weights that their hash does not tell."""

    def damage(folder):
        found = safetensors.torch.load_file(folder / WEIGHTS)
        change(found)
        safetensors.torch.save_file(found, folder / WEIGHTS, metadata={"format": "pt"})
        hashes_made_true(folder)

    return damage


def config(**changes):
    """Damage to the configuration that its hash does not tell."""

    def damage(folder):
        edit(folder / CONFIG, lambda c: c.update(changes))
        hashes_made_true(folder)

    return damage


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def missing(name):
    return lambda folder: (folder / name).unlink()


def broken(data):
    """A configuration of other bytes, as if it had been saved so."""
    return lambda folder: (written(CONFIG, data)(folder), hashes_made_true(folder))


def heads(index, **changes):
    def damage(folder):
        edit(folder / MANIFEST, lambda m: m["mask"]["rows"][index].update(changes))

    return damage


def flipped(where):
    def damage(folder):
        data = bytearray((folder / WEIGHTS).read_bytes())
        data[where] ^= 0x10
        (folder / WEIGHTS).write_bytes(data)

    return damage


def refuses(folder, words, **options):
    with pytest.raises(CheckpointError, match=words) as error:
        hp.from_pretrained(folder, **options)
    assert "must be" in str(error.value)


def test_the_folder_loads_before_it_is_damaged(folder):
    manifest(added_biases=["no.such.module.bias"])(folder)  # leads nowhere and is passed over
    assert [len(s.heads) for s in hp.find_sites(hp.from_pretrained(folder))] == [3, 0, 4]
    assert hp.from_pretrained(str(folder)) is not None


NO_FILE = r"model\.safetensors: must be the model's weights, got no such file"
NO_SAFETENSORS = r"model\.safetensors: must be a valid safetensors file.*Copy the folder again"
OTHER_BYTES = r"\(SHA-256 [0-9a-f]{12}\.\.\.\), got a file with other contents"
UNREADABLE = r"(?s)headprune\.json: must be a manifest that we can read.*"
NO_CONFIG = r"config\.json: must be a model's configuration"
NO_MODEL = r"config\.json: must be a valid configuration"
BIAS = "classifier.bias"
DAMAGE = {
    "weights cut off": (written(WEIGHTS, b"half"), NO_SAFETENSORS),
    "a flipped byte in the length": (flipped(3), NO_SAFETENSORS),
    "a flipped byte in the data": (flipped(-1), OTHER_BYTES),
    "no weights": (missing(WEIGHTS), NO_FILE),
    "a missing tensor": (tensors(lambda t: t.pop(BIAS)), r"1 missing \(classifier\.bias\), 0 unk"),
    "a foreign tensor": (
        tensors(lambda t: t.update(x=t[BIAS].clone())),
        r"0 missing \(\), 1 unknown",
    ),
    "another shape": (
        tensors(lambda t: t.update({BIAS: torch.ones(4)})),
        r"classifier\.bias: must be of shape \[3\], got \[4\]",
    ),
    "another kind of number": (
        tensors(lambda t: t.update({BIAS: t[BIAS].long()})),
        r"classifier\.bias: must be of a type like torch\.float32, got torch\.int64",
    ),
    "an empty manifest": (written(MANIFEST, b""), UNREADABLE + "valid JSON"),
    "a list as manifest": (written(MANIFEST, b"[1]"), UNREADABLE + "JSON object"),
    "bytes as manifest": (written(MANIFEST, b"\xff\xfe\x00"), UNREADABLE + "readable"),
    "another version": (manifest(version=99), UNREADABLE + "version.*99"),
    "an unknown key": (manifest(model_clas="x"), UNREADABLE + "Did you mean 'model_class'"),
    "a head that is not there": (heads(0, kept=[9]), UNREADABLE + "head 9 of .*an index below 4"),
    "other heads": (heads(2, kept=[0, 1]), r"must be of shape \[8, 16\], got \[16, 16\]"),
    "other sites": (heads(2, site="layer.7"), r"(?s)a checkpoint of this model.*layer\.[27]"),
    "an alias of nothing": (
        manifest(aliases=[{"name": "no.such", "stored": BIAS}]),
        r"1 unknown \(no\.such\)",
    ),
    "another task": (manifest(model_class="BertForTokenClassification"), "must be"),
    "a class of no name": (manifest(model_class="Nobody"), "must be"),
    "no model class": (manifest(model_class="BertConfig"), "must be"),
    "another configuration": (written(CONFIG, b"{}"), "must be the file that headprune.json descr"),
    "a broken configuration": (broken(b"{"), NO_CONFIG),
    "a list as configuration": (broken(b"[1]"), NO_CONFIG),
    "no text as configuration": (broken(b"\xff"), NO_CONFIG),
    "no configuration": (missing(CONFIG), NO_MODEL + ", got no such file"),
    "a width that is text": (config(hidden_size="abc"), NO_MODEL),
    "an unknown activation": (config(hidden_act="nope"), NO_MODEL),
    "fewer layers": (config(num_hidden_layers=2), r"layer\.2\.attention.*got one without such a s"),
    "more heads": (config(num_attention_heads=8), "with 4 heads at .*got 8 heads there"),
    "more words": (config(vocab_size=51), r"be of shape \[51, 16\], got \[50, 16\]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_in_words(folder, damage):
    do, words = DAMAGE[damage]
    do(folder)
    refuses(folder, words)


def test_what_is_no_folder_of_ours(tmp_path):
    refuses(tmp_path / "nowhere", "must be a folder that save_pretrained wrote, got no such folder")
    (tmp_path / "file").write_text("mine")
    refuses(tmp_path / "file", "must be a folder that save_pretrained wrote")
    model, _ = model_and_batch()
    with pytest.raises(CheckpointError, match="must be a folder, got a file"):
        hp.save_pretrained(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    model.save_pretrained(tmp_path)
    refuses(tmp_path, r"that save_pretrained wrote, got no headprune\.json in it")


# ---------------------------------------------------------------- a model that is given


class Mine(nn.Module):
    """Not a Transformers class: two attentions, one tied pair of layers, a buffer, and one that is
    not stored."""

    def __init__(self, heads=4):
        super().__init__()
        self.first = hp.MultiHeadAttention(8, heads)
        self.second = hp.MultiHeadAttention(8, heads, bias=False)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("table", torch.linspace(0.1, 0.7, 8), persistent=False)

    def forward(self, x):
        x = self.second(self.first(x)) * self.scale * self.table
        return self.down(self.up(x))


def mine(folder, dtype=torch.float32):
    model = Mine().eval().to(dtype)
    model.scale *= 3.0
    mask = HeadMask.from_keep({"first": [1, 3], "second": []}, {"first": 4, "second": 4})
    hp.prune_(model, mask)
    hp.save_pretrained(model, folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_module_of_ones_own_comes_back(tmp_path, dtype):
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
    refuses(
        tmp_path, r"Transformers model, got class 'Mine'\. Pass from_pretrained\(folder, model="
    )
    with pytest.raises(InvalidValue, match="model"):
        hp.from_pretrained(tmp_path, model=Mine)


def test_ones_own_class_with_a_name_of_transformers(tmp_path):
    """Found by name is not enough: the class must be the very one."""

    class BertForSequenceClassification(hf.BertForSequenceClassification):
        def forward(self, *args, **kwargs):
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
        (lambda: Mine(2), "with (2|4) heads at 'first'.*got (4|2)"),
        (lambda: model_and_batch()[0], "a checkpoint of this model"),
        (lambda: nn.Linear(2, 2), "no attention-like module"),
        (lambda: type("Yours", (Mine,), {})(), "must be a checkpoint of Yours, got Mine"),
    ],
    ids=["heads", "sites", "no attention", "class"],
)
def test_a_model_that_does_not_fit(tmp_path, make, words):
    mine(tmp_path)
    given = make()
    with unchanged(given):
        refuses(tmp_path, words, model=given)


def test_a_given_model_is_not_left_half_cut(tmp_path):
    mine(tmp_path)
    tensors(lambda t: t.pop("up.bias"))(tmp_path)
    given, x = Mine(), torch.randn(2, 5, 8)
    expected = given(x)
    with unchanged(given):
        refuses(tmp_path, "1 missing", model=given)
    assert_close(given(x), expected, rtol=0, atol=0)


def test_a_given_transformers_model_is_filled(folder):
    given, batch = model_and_batch(seed=3)
    loaded = hp.from_pretrained(folder, model=given)
    assert loaded is given
    assert_close(loaded(**batch).logits, hp.from_pretrained(folder)(**batch).logits, rtol=0, atol=0)


def test_sites_of_a_layout_of_ones_own(tmp_path):
    model, x = odd_model()
    given = copy.deepcopy(model)
    sites = hp.find_sites(model, layouts=[ODD])
    hp.prune_heads_(model, {0: [0, 1]}, sites=sites)
    hp.save_pretrained(model, tmp_path, sites=sites)
    for parameter in given.parameters():
        parameter.data.zero_()
    loaded = hp.from_pretrained(tmp_path, model=given, sites=hp.find_sites(given, layouts=[ODD]))
    assert_close(loaded(x), model(x), rtol=0, atol=0)


# ---------------------------------------------------------------- saving


def test_saving_over_an_earlier_save(folder):
    loaded, batch = hp.from_pretrained(folder), model_and_batch()[1]
    hp.prune_heads_(loaded, {0: [0], 2: [3]})
    expected = loaded(**batch).logits
    hp.save_pretrained(loaded, folder)
    assert_close(loaded(**batch).logits, expected, rtol=0, atol=0)
    assert_close(hp.from_pretrained(folder)(**batch).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("moment", ["before", "within"])
def test_an_interrupted_save_leaves_the_old_folder(folder, moment, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def breaks(tensors, path, **_):
        if moment == "within":
            Path(path).write_bytes(b"half of it")
        raise KeyboardInterrupt

    other, batch = model_and_batch("llama")  # another configuration too
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", breaks)
        with pytest.raises(KeyboardInterrupt):
            hp.save_pretrained(other, folder)
    after = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert after == before, "nothing is changed, and nothing more is there"
    hp.save_pretrained(other, folder)
    assert_close(hp.from_pretrained(folder)(**batch).logits, other(**batch).logits, rtol=0, atol=0)


def test_what_cannot_be_stored_is_refused(tmp_path):
    class Extra(Mine):
        def get_extra_state(self):
            return {"steps": 3}

    words = "a tensor with data, got one on the meta device"
    for model, match in ((Mine().to("meta"), words), (Extra(), "Extra state cannot be stored")):
        with pytest.raises(CheckpointError, match=match):
            hp.save_pretrained(model, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_parameters_that_are_views_or_not_contiguous(tmp_path):
    """Two halves of one tensor are no shared tensor; neither are a matrix and its first rows."""
    model, memory = Mine().eval(), torch.randn(16, 8)
    model.up.weight, model.down.weight = nn.Parameter(memory[:8]), nn.Parameter(memory[8:].T)
    assert not model.down.weight.is_contiguous()
    flat = memory.view(-1)
    model.up.bias, model.down.bias = nn.Parameter(flat[:8]), nn.Parameter(flat[4:12])
    hp.save_pretrained(model, tmp_path / "views")
    untied = Mine()
    untied.down.weight = nn.Parameter(untied.down.weight.detach().clone())
    loaded = hp.from_pretrained(tmp_path / "views", model=untied)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


# ---------------------------------------------------------------- a modelling file beside the
# weights


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_auto_model_opens_a_remote_code_folder_without_its_head(name, tmp_path, monkeypatch):
    cache = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(cache, str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])  # Transformers adds its folder of modules
    model, batch = model_and_batch(name)
    first, second, third = hp.find_sites(model)
    keep = {first.name: first.units[0], second.name: (), third.name: third.heads}
    hp.prune_(model, HeadMask.from_keep(keep, dict.fromkeys(keep, first.n_query_heads)))
    hp.save_pretrained(model, tmp_path / "small", format="remote-code")
    body = hf.AutoModel.from_pretrained(tmp_path / "small", trust_remote_code=True).eval()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    expected = model.base_model(**inputs).last_hidden_state
    assert_close(body(**inputs).last_hidden_state, expected, rtol=0, atol=0)


def test_a_body_that_does_not_come_back_is_not_kept(tmp_path, monkeypatch):
    model, _ = model_and_batch("llama")
    hp.prune_heads_(model, {0: [0, 1]})
    wrong = Template(remote_code._BODY.template.replace("$PREFIX", "elsewhere."))
    monkeypatch.setattr(remote_code, "_BODY", wrong)
    with pytest.raises(VerificationFailed, match="LlamaModel out of the written folder"):
        hp.save_pretrained(model, tmp_path / "small", format="remote-code")
    assert list(tmp_path.iterdir()) == []
