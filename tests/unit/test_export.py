"""torch.export, torch.compile and ONNX of cut models, with a layer that has no head left in
each."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.testing import assert_close

import headprune as hp
from headprune.checkpoints import export
from headprune.core.errors import InvalidValue, UnsupportedModel, VerificationFailed
from headprune.core.heads import HeadMask
from headprune.layouts import registry
from tests.laws.support import shaken

NAMES = ["bert", "vit", "llama", "gpt2"]


def cut(name: str, empty: int = 1) -> tuple[Any, Any, dict[str, Any]]:
    """The full model, the cut one whose layer ``empty`` has no head and another fewer, and
    inputs."""
    model, batch = registry.get(name).tiny(0)
    full = shaken(model, norms=False).eval()
    model = copy.deepcopy(full)
    sites = hp.find_sites(model)
    keep = {s.name: s.units[1] if i == 2 else s.heads for i, s in enumerate(sites)}
    keep[sites[empty].name] = ()
    hp.prune_(model, HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}), batch)
    return full, model, {k: v for k, v in batch.items() if k != "labels"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings(
    "ignore:.*treespec:FutureWarning"
)  # PyTorch's exporter uses what PyTorch gives up
def test_torch_export(name: str) -> None:
    _, model, batch = cut(name)
    if name in ("llama", "gpt2"):
        batch["use_cache"] = False
    free: Any = {
        n: {0: Dim.AUTO} if isinstance(t, torch.Tensor) else None for n, t in batch.items()
    }
    program = torch.export.export(model, (), batch, dynamic_shapes=free).module()
    assert_close(program(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    fewer = {n: t[:2] if isinstance(t, torch.Tensor) else t for n, t in batch.items()}
    assert_close(program(**fewer).logits, model(**fewer).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_in_one_graph_with_no_break_of_ours(name: str) -> None:
    full, model, batch = cut(name)
    expected = model(**batch).logits
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(**batch).logits, expected, rtol=0, atol=0)
    breaks = []
    for each in (full, model):
        torch._dynamo.reset()
        breaks.append(torch._dynamo.explain(each)(**batch).graph_break_count)
    assert breaks[0] == breaks[1]
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_onnx_equals_the_model(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    _, model, batch = cut(name)
    before = [(n, type(m), m.training) for n, m in model.named_modules()]
    difference = export.export_onnx(model, batch, tmp_path / "small.onnx")
    assert difference.maximum <= 10 * difference.tolerance
    assert [(n, type(m), m.training) for n, m in model.named_modules()] == before
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    assert [i.name for i in session.get_inputs()] == list(batch)
    assert [o.name for o in session.get_outputs()] == ["logits"]
    twice = {n: torch.cat([t, t]) for n, t in batch.items()}  # a size that was never seen
    (got,) = session.run(None, {n: t.numpy() for n, t in twice.items()})
    assert_close(
        torch.from_numpy(got), model(**twice).logits, rtol=1e-4, atol=1e-4
    )  # other kernels


@pytest.mark.slow
@pytest.mark.parametrize(("name", "empty"), [("llama", 0), ("gpt2", 1)])
def test_onnx_with_cache_generates(name: str, empty: int, tmp_path: Path) -> None:
    """Also where the first layer, by which Transformers counts the tokens of a cache, has no
    head."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    _, model, batch = cut(name, empty)
    export.export_onnx(model, batch, tmp_path / "step.onnx", cache=True)
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    ids = batch["input_ids"][:2]
    wanted = model.generate(
        ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=49
    )
    out = model(input_ids=ids[:, :-1], use_cache=True)
    past = [
        t.numpy()
        for layer in out.past_key_values.layers
        for t in (layer.keys.detach(), layer.values.detach())
    ]
    generated = ids
    for _ in range(5):
        mask = torch.ones_like(generated)
        values = [generated[:, -1:].numpy(), mask.numpy(), *past]
        names = [i.name for i in session.get_inputs()]
        assert names[:3] == ["input_ids", "attention_mask", "past_key_values.0.key"]
        logits, *past = session.run(None, dict(zip(names, values, strict=True)))
        generated = torch.cat(
            [generated, torch.from_numpy(logits)[:, -1].argmax(-1, keepdim=True)], 1
        )
    assert generated.tolist() == wanted.tolist()


@pytest.mark.slow
def test_a_file_that_differs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    _, model, batch = cut("vit")
    write = torch.onnx.export

    def other_weights(step: Any, *arguments: Any, **options: Any) -> Any:
        twin = copy.deepcopy(step)
        with torch.no_grad():
            twin.model.classifier.bias += 1
        return write(twin, *arguments, **options)

    monkeypatch.setattr(torch.onnx, "export", other_weights)
    with pytest.raises(
        VerificationFailed, match=r"the ONNX file: must be the model up to .* got 1\.0"
    ):
        export.export_onnx(model, batch, tmp_path / "small.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_does_not_take_the_inputs_is_named_with_their_shapes() -> None:
    class Session:
        def get_inputs(self) -> list[Any]:
            return [SimpleNamespace(name="input_ids")]

        def run(self, names: None, given: Any) -> None:
            raise RuntimeError("Got invalid dimensions\n for input: input_ids")

    _, model, batch = cut("llama")
    inputs = {"input_ids": batch["input_ids"]}
    words = (
        r"the ONNX file: must be the model for \{'input_ids': \[3, 7\]\}, got Got invalid"
        r" dimensions for"
    )
    with pytest.raises(VerificationFailed, match=words):
        export._difference(Session(), model, inputs, [])


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    _, model, batch = cut("bert")
    with pytest.raises(InvalidValue, match="example: must be a mapping of input names to tensors"):
        export.export_onnx(model, [1], tmp_path / "x.onnx")  # type: ignore[arg-type]
    with pytest.raises(
        UnsupportedModel,
        match="cache=True: must be for a model that caches a key and a value per layer",
    ):
        export.export_onnx(model, batch, tmp_path / "x.onnx", cache=True)
    with pytest.raises(InvalidValue, match="input_ids with at least 4 tokens"):
        export.export_onnx(cut("vit")[1], cut("vit")[2], tmp_path / "x.onnx", cache=True)
    assert list(tmp_path.iterdir()) == []
