"""What travels along with the weights (tokenizers, the model card), and the command that writes it
all."""

from unittest.mock import Mock

import pytest
import transformers as hf
from typer.testing import CliRunner

import headprune as hp
from headprune.checkpoints import card, companions
from headprune.cli.main import app
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadMask
from headprune.core.plan import Budget, PruningPlan
from tests.laws.support import mask_of_units
from tests.unit.test_formats import EMPTY, UNEVEN, UNIFORM, cut, tiny

# ---------------------------------------------------------------- what travels along


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def test_the_tokenizer_travels_along(tmp_path):
    model, _ = cut("bert", UNEVEN)
    hp.save_pretrained(model, tmp_path / "a", processor=[tokenizer()])
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "a")("b a")["input_ids"] == [2, 1]
    with pytest.raises(InvalidValue, match=r"must be a tokenizer or processor .* got int"):
        hp.save_pretrained(model, tmp_path / "b", processor=3)
    assert not (tmp_path / "b").exists()


def test_files_beside_the_weights_are_copied_as_they_are(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    tokenizer().save_pretrained(source)
    (source / "additional_chat_templates").mkdir()
    wanted = ["preprocessor_config.json", "merges.txt", "spiece.model", "chat_template.jinja"]
    wanted += ["additional_chat_templates/tool.jinja"]
    for name in (*wanted, "model.safetensors", "config.json", "README.md", "optimizer.pt"):
        (source / name).write_text(name)
    copied = companions.copy(str(source), out)
    assert set(copied) == {*wanted, "tokenizer.json", "tokenizer_config.json"}
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in copied)


def test_files_of_a_model_on_the_hub_are_asked_for_by_name(tmp_path, monkeypatch):
    asked = []

    def downloaded(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        tokenizer().save_pretrained(tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", downloaded)
    assert "tokenizer.json" in companions.copy("someone/model", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert asked == [("someone/model", [*companions.PATTERNS, "README.md"])]


# ---------------------------------------------------------------- the model card


def test_the_card_states_what_was_cut(tmp_path):
    model, _ = cut("llama", EMPTY)
    model.config._name_or_path = "someone/some-llama"
    budget, mask = Budget(keep_heads=0.5), HeadMask.full(hp.find_sites(model))
    plan = PruningPlan(mask, budget, "global_topk", scorer="taylor", notes=("ties broken",))
    hp.save_pretrained(model, tmp_path, plan=plan)
    text = (tmp_path / "README.md").read_text()
    whole, now = (sum(p.numel() for p in m.parameters()) for m in (tiny("llama")[0], model))
    assert text.startswith('---\nbase_model: "someone/some-llama"\ntags:\n- headprune\n---\n')
    for fact in (
        "Base model: someone/some-llama",
        f"Parameters: {whole:,} before, {now:,} after",
        r"selector global\_topk, scorer taylor, keep 50 % of the heads",
        "ties broken",
        "kept 6 of 18 heads",
        "| `model.layers.0.self_attn` | 0 of 6 | none |",
        "| `model.layers.1.self_attn` | 4 of 6 | 0-1, 4-5 |",
        f"hp.from_pretrained('{tmp_path.name}')",
    ):
        assert fact in text


def test_a_card_that_is_there_is_kept(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    model, _ = cut("vit", UNIFORM)
    hp.save_pretrained(model, tmp_path)
    first = (tmp_path / "README.md").read_text()
    assert first.startswith("---\nlicense: mit\n---\n# Mine\n\n<!-- headprune: begin -->\n")
    (tmp_path / "README.md").write_text(first + "After it.\n")
    hp.save_pretrained(model, tmp_path, format="transformers")
    second = (tmp_path / "README.md").read_text()
    assert second.count(card.BEGIN) == second.count(card.END) == 1
    assert second.endswith("<!-- headprune: end -->\nAfter it.\n")
    assert "from transformers import ViTForImageClassification" in second
    assert "hp.from_pretrained" not in second


def test_a_local_path_does_not_get_into_the_card(tmp_path):
    model, _ = cut("vit", UNIFORM)
    model.config._name_or_path = str(tmp_path / "trained")
    hp.save_pretrained(model, tmp_path / "small")
    text = (tmp_path / "small" / "README.md").read_text()
    assert str(tmp_path) not in text
    assert "Base model: trained" in text


# ---------------------------------------------------------------- the command


@pytest.fixture
def base(tmp_path):
    model, _ = tiny("llama")
    hp.save_pretrained(model, tmp_path / "base", processor=tokenizer(), format="transformers")
    sites = hp.find_sites(model)
    for name, units in (("uniform", UNIFORM), ("uneven", UNEVEN)):
        PruningPlan(mask_of_units(sites, units)).save(tmp_path / f"{name}.json")
    return tmp_path


def prune(base, plan, *more):
    model, file, out = base / "base", base / f"{plan}.json", base / "out"
    given = ["prune", "--model", model, "--plan", file, "--out", out, *more]
    return CliRunner().invoke(app, [*map(str, given)])


@pytest.mark.parametrize(
    ("plan", "form", "written"),
    [
        ("uniform", "auto", "transformers"),
        ("uneven", "remote-code", "remote-code"),
        ("uneven", "auto", "headprune"),
    ],
)
def test_prune_says_which_formats_apply(base, plan, form, written):
    result = prune(base, plan, "--format", form)
    assert result.exit_code == 0, result.output
    assert "format headprune: yes" in result.output
    assert ("format transformers: yes" in result.output) == (plan == "uniform")
    assert "format remote-code: yes" in result.output
    assert f"(format {written}, " in result.output
    files = {p.name for p in (base / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "README.md"} <= files
    assert ("headprune.json" in files) == (written == "headprune")
    if written == "remote-code":
        assert "class HeadPrunedLlamaForCausalLM" in result.output, "what others will run is shown"


def test_prune_refuses_a_format_that_would_corrupt(base):
    result = prune(base, "uneven", "--format", "transformers")
    assert result.exit_code == 2
    assert "the same number of heads in every layer, got layers with 2, 6, 4 heads" in result.output
    assert "Those that can: headprune, remote-code" in result.output
    assert not (base / "out").exists()
    result = prune(base, "uneven", "--format", "onnx")
    assert result.exit_code == 2
    words = "--format: must be one of auto, headprune, transformers, remote-code, gguf, got 'onnx'"
    assert words in result.output


def test_what_lies_beside_the_weights_comes_with_them_or_nothing_does(base, monkeypatch):
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(companions.shutil, "copyfile", Mock(side_effect=full))
        done = prune(base, "uneven")
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr
    assert not (base / "out").exists()
    assert "tokenizer.json" in prune(base, "uneven").stdout
    copied, source = (base / folder / "tokenizer.json" for folder in ("out", "base"))
    assert copied.read_bytes() == source.read_bytes()
