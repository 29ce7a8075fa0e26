"""torch.export, torch.compile and ONNX of cut models, each with a layer that keeps no head and
another one that keeps no neuron."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.export import Dim
from torch.testing import assert_close

import headprune as hp
from headprune.checkpoints import export
from headprune.core.errors import InvalidValue, UnsupportedModel, VerificationFailed
from headprune.layouts import registry
from tests.laws.support import mask_of, shaken


def cut(name, empty=1):
    """A cut model whose layer ``empty`` has no head and another fewer, and inputs.

    The first feed-forward has no neuron, and the last one has fewer.
    """
    model, batch = registry.get(name).tiny(0)
    model = shaken(model, norms=False).eval()
    sites = hp.find_sites(model, feed_forward=True)
    attention = [s for s in sites if not s.is_feed_forward]
    first, *_, last = [s for s in sites if s.is_feed_forward]
    keep = {s.name: s.heads for s in sites}
    if len(attention) > 2:
        keep[attention[2].name] = attention[2].units[1]
    keep[attention[empty].name] = keep[first.name] = ()
    keep[last.name] = last.heads[3:8]
    hp.prune_(model, mask_of(sites, keep), batch)
    return model, {k: v for k, v in batch.items() if k != "labels"}


@pytest.mark.parametrize("name", ["vit", "llama"])
# PyTorch's exporter uses what PyTorch gives up.
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
def test_torch_export(name):
    model, batch = cut(name)
    if name == "llama":
        batch["use_cache"] = False
    free = {n: {0: Dim.AUTO} if isinstance(t, torch.Tensor) else None for n, t in batch.items()}
    program = torch.export.export(model, (), batch, dynamic_shapes=free).module()
    assert_close(program(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    fewer = {n: t[:2] if isinstance(t, torch.Tensor) else t for n, t in batch.items()}
    assert_close(program(**fewer).logits, model(**fewer).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_compiled_in_one_graph(name):
    model, batch = cut(name)
    expected = model(**batch).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(**batch).logits, expected, rtol=0, atol=0)
    torch._dynamo.reset()


def onnxruntime():
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    return pytest.importorskip("onnxruntime", reason="needs the extra onnx")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "opset"), [("bert", None), ("bert", 23), ("llama", 24)])
def test_onnx_equals_the_model(tmp_path, name, opset):
    runtime = onnxruntime()
    model, batch = cut(name)
    before = [(n, type(m), m.training) for n, m in model.named_modules()]
    difference = export.export_onnx(model, batch, tmp_path / "small.onnx", opset=opset)
    assert difference.maximum <= 10 * difference.tolerance
    assert [(n, type(m), m.training) for n, m in model.named_modules()] == before
    session = runtime.InferenceSession(tmp_path / "small.onnx")
    assert [i.name for i in session.get_inputs()] == list(batch)
    assert [o.name for o in session.get_outputs()] == ["logits"]
    twice = {n: torch.cat([t, t]) for n, t in batch.items()}  # a size that was never seen
    (got,) = session.run(None, {n: t.numpy() for n, t in twice.items()})
    # Other kernels.
    assert_close(torch.from_numpy(got), model(**twice).logits, rtol=1e-4, atol=1e-4)
    if opset is not None:
        # One operator for each layer with heads.
        nodes = pytest.importorskip("onnx").load(tmp_path / "small.onnx").graph.node
        n_layers = len([s for s in hp.find_sites(model) if s.heads])
        assert [node.op_type for node in nodes].count("Attention") == n_layers


@pytest.mark.slow
def test_onnx_with_cache_generates(tmp_path):
    """Where the first layer, by which Transformers counts the tokens of a cache, has no head."""
    runtime = onnxruntime()
    model, batch = cut("llama", empty=0)
    export.export_onnx(model, batch, tmp_path / "step.onnx", cache=True)
    session = runtime.InferenceSession(tmp_path / "step.onnx")
    names = [i.name for i in session.get_inputs()]
    assert names[:3] == ["input_ids", "attention_mask", "past_key_values.0.key"]
    ids = batch["input_ids"][:2]
    length = {"max_new_tokens": 5, "min_new_tokens": 5}
    wanted = model.generate(ids, **length, do_sample=False, eos_token_id=49)
    layers = model(input_ids=ids[:, :-1], use_cache=True).past_key_values.layers
    past = [t.detach().numpy() for layer in layers for t in (layer.keys, layer.values)]
    generated = ids
    for _ in range(5):
        values = [generated[:, -1:].numpy(), torch.ones_like(generated).numpy(), *past]
        logits, *past = session.run(None, dict(zip(names, values, strict=True)))
        best = torch.from_numpy(logits)[:, -1].argmax(-1, keepdim=True)
        generated = torch.cat([generated, best], 1)
    assert generated.tolist() == wanted.tolist()


@pytest.mark.slow
def test_a_file_that_differs_is_removed(tmp_path, monkeypatch):
    onnxruntime()
    model, batch = cut("vit")
    write = torch.onnx.export

    def other_weights(step, *arguments, **options):
        twin = copy.deepcopy(step)
        with torch.no_grad():
            twin.model.classifier.bias += 1
        return write(twin, *arguments, **options)

    monkeypatch.setattr(torch.onnx, "export", other_weights)
    words = r"the ONNX file: must be the model up to .* got 1\.0"
    with pytest.raises(VerificationFailed, match=words):
        export.export_onnx(model, batch, tmp_path / "small.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_does_not_take_the_inputs_is_named_with_their_shapes():
    class Session:
        def get_inputs(self):
            return [SimpleNamespace(name="input_ids")]

        def run(self, names, given):
            raise RuntimeError("Got invalid dimensions\n for input: input_ids")

    model, batch = cut("llama")
    words = r"the model for \{'input_ids': \[3, 7\]\}, got Got invalid dimensions for"
    with pytest.raises(VerificationFailed, match=words):
        export._difference(Session(), model, {"input_ids": batch["input_ids"]}, [])


def test_a_file_that_the_runtime_does_not_load(tmp_path):
    runtime = onnxruntime()
    file = tmp_path / "x.onnx"
    file.write_bytes(b"no operators")
    words = "the ONNX file: must be one that ONNX Runtime .* loads, got .*x.onnx"
    with pytest.raises(VerificationFailed, match=words):
        export._session(runtime, file)


def test_what_cannot_be_exported_is_said(tmp_path):
    onnxruntime()
    file, (model, batch) = tmp_path / "x.onnx", cut("bert")
    with pytest.raises(InvalidValue, match="example: must be a mapping of input names to tensors"):
        export.export_onnx(model, [1], file)
    with pytest.raises(InvalidValue, match=r"example\['x'\]: must be .*, got list"):
        export.export_onnx(model, {"x": [1]}, file)
    with pytest.raises(UnsupportedModel, match="cache=True: must be for a model that caches a key"):
        export.export_onnx(model, batch, file, cache=True)
    with pytest.raises(InvalidValue, match="input_ids with at least 4 tokens"):
        export.export_onnx(*cut("vit"), file, cache=True)
    with pytest.raises(InvalidValue, match="opset: must be a count >= 18, got 17"):
        export.export_onnx(model, batch, file, opset=17)
    assert list(tmp_path.iterdir()) == []
