"""``serve-check``: each engine on a cut model, how answers are judged, and what is refused."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import headprune as hp
from headprune.core.errors import InvalidValue, UnknownName
from headprune.core.heads import HeadMask
from headprune.layouts import registry
from headprune.serving import asking, check, servers
from headprune.serving.asking import Answer
from headprune.serving.check import serve_check
from headprune.serving.engines import ENGINES
from tests.command_line import call, json_of, refused
from tests.laws.support import shaken

NEW = check.NEW_TOKENS


def saved(folder, name, format, seed=0):
    """A tiny model whose second layer has no head and whose third has fewer."""
    model, batch = registry.get(name).tiny(seed)
    model = shaken(model, norms=False).eval()
    sites = hp.find_sites(model)
    keep = {s.name: s.units[1] if i == 2 else s.heads for i, s in enumerate(sites)}
    keep[sites[1].name] = ()
    hp.prune_(model, HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}), batch)
    return hp.save_pretrained(model, folder / f"{name}-{format}-{seed}", format=format)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama"), "llama", "remote-code")


def within(monkeypatch):
    def asked(name, engine, place, python):
        home = servers if engine.prepare is None else asking
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["asked", name, str(place)])
            home.main()
        return json.loads((place / f"{name}.json").read_text())

    monkeypatch.setattr(check, "_asked", asked)


def row_of(folder, name, **settings):
    (row,) = serve_check(folder, [name], trust_remote_code=True, **settings).rows
    return row


# ---------------------------------------------------------------- engines


def test_sums_in_8_bits_do_not_overflow(tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    # The largest activations and weights: signed ones overflow on processors without VNNI.
    linear = torch.nn.Linear(64, 8, bias=False).requires_grad_(False)
    linear.weight.fill_(1.0)
    example = {"input": torch.ones(2, 64)}
    run = ENGINES["onnxruntime-int8"].prepare(linear, example, tmp_path)
    torch.testing.assert_close(run(example)[0], linear(**example), rtol=0.01, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, engine in ENGINES.items() if engine.prepare])
@pytest.mark.parametrize("model", ["bert", "llama"])
@pytest.mark.filterwarnings("default")  # of the engines' own packages
def test_an_engine_answers_like_the_reference(name, model, tmp_path, monkeypatch):
    for package in ENGINES[name].packages:
        pytest.importorskip(package)
    within(monkeypatch)
    format = "remote-code" if name == "transformers" else "headprune"
    row = row_of(saved(tmp_path, model, format), name)
    exact = ENGINES[name].exact
    assert row.status == ("equal" if exact else "lower precision"), row
    assert row.difference is not None
    assert row.tokens == (2 * NEW if model == "llama" else None)
    # Rounding to 8 bits shows, and is no other model.
    assert exact or 0 < row.difference < 1, row


def test_two_engines_in_processes_of_their_own(llama):
    line = f"serve-check {llama} --trust-remote-code --engine transformers --engine llama.cpp"
    found = json_of(line)
    assert (found["model"], found["prompts"], found["failed"]) == (
        *("HeadPrunedLlamaForCausalLM", 2),
        False,
    )
    first, second = found["rows"]
    assert (first["status"], first["tokens_equal"], first["tokens"]) == ("equal", 2 * NEW, 2 * NEW)
    assert (second["status"], second["note"]) == ("not applicable", "no GGUF file in the folder")


def test_other_weights_differ_and_fail_the_command(llama, tmp_path, monkeypatch):
    within(monkeypatch)
    other = saved(tmp_path, "llama", "headprune", seed=1)
    line = f"serve-check {llama} --trust-remote-code --reference {other} --engine transformers"
    result = call(line)
    assert result.exit_code == 1
    table = [line.split() for line in result.stdout.splitlines()]
    assert table[1] == ["engine", "version", "result", "difference", "tokens"]
    assert table[2][0] == "transformers"
    assert table[2][2] == "differs"


def test_an_engine_that_crashes_is_a_row_with_its_last_words(llama, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of luck >&2\nexit 7\n")
    python.chmod(0o755)
    row = row_of(llama, "torch.export", pythons={"torch.export": str(python)})
    assert (row.status, row.note) == ("failed", "it ended with code 7: out of luck")


def test_an_engine_that_is_not_installed_says_how_to_install_it(llama, monkeypatch):
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    found = serve_check(llama, ["openvino"], trust_remote_code=True)
    assert found.rows[0].status == "not installed"
    assert found.rows[0].note.startswith("pip install openvino")
    assert not found.failed


@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_a_folder_that_only_headprune_opens(name, tmp_path):
    row = row_of(saved(tmp_path, "llama", "headprune"), name)
    assert row.status == "not applicable"
    assert "only headprune opens this folder" in row.note


def test_a_folder_of_the_models_own_save_pretrained(tmp_path, monkeypatch):
    within(monkeypatch)
    model = hp.from_pretrained(saved(tmp_path, "llama", "headprune"))
    model.save_pretrained(tmp_path / "own")
    found = serve_check(tmp_path / "own", ["headprune", "transformers"])
    assert found.reference == "headprune on own, fp32"
    assert [row.status for row in found.rows] == ["equal", "not applicable"]
    assert "only headprune opens this folder" in found.rows[1].note


def test_an_environment_without_headprune_is_refused(llama, tmp_path):
    # This Python, but nothing outside its standard library.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd /\nexec {sys._base_executable} -I -S "$@"\n')
    python.chmod(0o755)
    line = f"serve-check {llama} --trust-remote-code --python openvino={python}"
    message = refused(line)
    assert "--python: must be a Python where headprune is installed, for openvino" in message


# ---------------------------------------------------------------- servers, by stand-ins


class Stood:
    """The model of a folder, behind the calls of vLLM and llama-cpp-python."""

    def __init__(self, folder):
        self.model = check.reference(folder, trust=True)
        self.metadata = {"general.file_type": "0"}  # of a GGUF file: fp32

    @torch.no_grad()
    def logits(self, ids):
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    # vLLM
    def generate(self, prompts, settings, use_tqdm):
        results = []
        for prompt in prompts:
            ids = list(prompt["prompt_token_ids"])
            first = self.logits(ids)[-1].log_softmax(-1).tolist()
            for _ in range(settings.max_tokens):
                ids.append(int(self.logits(ids)[-1].argmax()))
            new = ids[len(prompt["prompt_token_ids"]) :]
            by_token = {i: SimpleNamespace(logprob=value) for i, value in enumerate(first)}
            output = SimpleNamespace(token_ids=new, logprobs=[by_token])
            results.append(SimpleNamespace(outputs=[output]))
        return results

    # llama-cpp-python
    def reset(self):
        self.read = []

    def eval(self, tokens):
        self.read += tokens
        self.n_tokens = len(self.read)
        self.scores = np.zeros((64, self.model.config.vocab_size), dtype=np.float32)
        self.scores[: self.n_tokens] = self.logits(self.read)


def test_vllm_is_asked_for_log_probabilities(llama, monkeypatch):
    engine = Stood(llama)
    package = SimpleNamespace(
        LLM=lambda **settings: engine, SamplingParams=SimpleNamespace, __version__="0"
    )
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: package)
    within(monkeypatch)
    row = row_of(llama, "vllm")
    assert (row.status, row.compared) == ("equal", "log-probabilities")
    assert row.tokens_equal == row.tokens == 2 * NEW
    engine.generate = lambda *_, **__: 1 / 0
    assert row_of(llama, "vllm").note == "ZeroDivisionError: division by zero"


def test_llama_cpp_opens_every_gguf_file(llama, tmp_path, monkeypatch):
    engine = Stood(llama)
    package = SimpleNamespace(Llama=lambda path, **settings: engine, __version__="0")
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: package)
    within(monkeypatch)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(InvalidValue, match=r"GGUF files only. Give --reference FOLDER"):
        serve_check(tmp_path)
    found = serve_check(
        tmp_path, ["llama.cpp", "openvino"], reference_folder=llama, trust_remote_code=True
    )
    assert [row.status for row in found.rows] == ["equal", "equal", "not applicable"]
    assert [row.note for row in found.rows[:2]] == ["a.gguf", "b.gguf"]
    engine.metadata = {"general.file_type": "7"}
    (tmp_path / "b.gguf").unlink()
    row = row_of(tmp_path, "llama.cpp", reference_folder=llama)
    assert row.status == "lower precision"


# ---------------------------------------------------------------- how answers are judged


def judged(logits, tokens, exact=True, gap=0.5):
    expected = Answer([torch.tensor([[[1.0, 2.0]]])], [[1, 1, 0]], [[0.5, gap, 0.5]])
    found = {"what": "logits", "exact": exact, "version": "1", "tokens": [tokens]}
    row = check.judged("an engine", expected, [torch.tensor([[logits]])], found)
    return row.status, row.tokens_equal, row.note


def test_an_answer_is_judged_by_logits_and_tokens():
    assert judged([1.0, 2.00001], [1, 1, 0]) == ("equal", 3, "")
    assert judged([1.0, 2.1], [1, 1, 0]) == ("differs", 3, "")
    assert judged([1.0, 2.1], [1, 1, 0], exact=False) == ("lower precision", 3, "")
    other = "correlation -1.00 with the reference's outputs"
    assert judged([2.0, 1.0], [1, 1, 0], exact=False) == ("differs", 3, other)
    constant = "correlation 0.00 with the reference's outputs"
    assert judged([0.0, 0.0], [1, 1, 0], exact=False) == ("differs", 3, constant)
    assert judged([1.0, 2.0], [1, 0, 0]) == ("differs", 1, "different tokens")
    assert judged([1.0, 2.0], [1, 1]) == ("differs", 2, "different tokens")
    tie = "the first different token is a tie"
    assert judged([1.0, 2.0], [1, 0, 0], gap=1e-6) == ("equal", 1, tie)
    for logits in ([1.0], [1.0, float("nan")]):
        status, _, note = judged(logits, [1, 1, 0], exact=False)
        assert (status, note) == ("differs", "outputs of other shapes, or not finite")


# ---------------------------------------------------------------- what is refused


def test_what_cannot_be_checked_is_refused_before_any_work(llama, tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'openvino'"):
        serve_check(llama, ["openvin"])
    assert "FOLDER: must be an existing folder" in refused(f"serve-check {tmp_path / 'none'}")
    message = refused(f"serve-check {llama}")
    assert "must be a folder without code" in message
    assert "give --trust-remote-code" in message
    message = refused(f"serve-check {llama} --python vllm={tmp_path}/python")
    assert "--python: must be ENGINE=PATH of a Python that exists" in message
