"""Law 3: gated = pruned: outputs, gradients, kernels, padding, checkpointing, compilation."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import headprune as hp
from tests.laws.support import (
    CLOSE,
    DEEP,
    TRANSFORMERS,
    Subject,
    no_dropout,
    objective,
    picture,
    set_implementation,
    subject_of,
)


@pytest.mark.parametrize("seed", range(3))
def test_outputs(subject: Subject, seed: int) -> None:
    mask = subject.ragged(seed)
    expected, small = subject.run_gated(mask), subject.copy()
    report = hp.prune_(small, mask, subject.batch)
    assert_close(subject.run(small), expected, **CLOSE)
    assert report.n_removed == mask.n_heads - mask.n_kept > 0
    assert report.params_after == sum(p.numel() for p in small.parameters()) < report.params_before
    assert report.proof.max_difference <= 1e-10
    assert dict(report.removed) == {s: mask.removed(s) for s in mask.sites if mask.removed(s)}
    assert [s.heads for s in report.sites] == [mask.kept(s) for s in mask.sites]
    assert (expected - subject.run()).abs().max() > 1e-4


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_outputs_with_every_kernel(name: str, implementation: str) -> None:
    subject = subject_of(name)
    set_implementation(subject.model, implementation)
    for mask in (subject.ragged(1), subject.mask({s.name: s.units[-1] for s in subject.sites})):
        small = subject.copy()
        hp.prune_(small, mask)
        assert_close(subject.run(small), subject.run_gated(mask), **CLOSE)
        # And after the cut the kernel can still be chosen.
        other = "sdpa" if implementation == "eager" else "eager"
        set_implementation(small, other)
        # Eager attention takes its softmax in float32, whatever the model's dtype.
        assert_close(subject.run(small), subject.run_gated(mask), rtol=1e-5, atol=1e-5)


# Said by Transformers' own call.
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
# Said as PyTorch imports inductor.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
# Transformers has no flex attention for GPT-2.
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_flex_attention_forward(name: str) -> None:
    subject = subject_of(name)
    model = subject.model.float()
    subject.batch = {k: v.float() if v.is_floating_point() else v for k, v in subject.batch.items()}
    set_implementation(model, "flex_attention")
    mask, small = subject.mask({s.name: s.units[-1] for s in subject.sites}), copy.deepcopy(model)
    # Inductor would take half a minute a model; uncompiled, the same operator computes the same
    # thing.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = subject.run_gated(mask)
        hp.prune_(small, mask)
        assert_close(subject.run(small), expected, rtol=1e-5, atol=1e-5)
        assert (expected - subject.run(model)).abs().max() > 1e-4


def test_gradients_of_the_inputs(subject: Subject) -> None:
    mask, small = subject.ragged(), subject.copy()
    hp.prune_(small, mask)

    def inputs(model: nn.Module) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
        if "input_ids" in subject.batch:
            embedded = (
                model.get_input_embeddings()(subject.batch["input_ids"]).detach().requires_grad_()
            )
            return {"input_ids": None, "inputs_embeds": embedded}, embedded
        key = "x" if "x" in subject.batch else "pixel_values"
        leaf = subject.batch[key].clone().requires_grad_()
        return {key: leaf}, leaf

    changes, leaf = inputs(small)
    (got,) = torch.autograd.grad(objective(subject.run(small, **changes)), leaf)
    changes, leaf = inputs(subject.model)
    with hp.gated(subject.model, mask):
        (expected,) = torch.autograd.grad(objective(subject.run(**changes)), leaf)
    assert expected.abs().max() > 1e-4
    assert_close(got, expected, **CLOSE)


# Images have no padding.
@pytest.mark.parametrize("subject", [name for name in DEEP if name != "vit"], indirect=True)
def test_padding_does_not_reach_the_tokens(subject: Subject) -> None:
    """The shortest example on its own and among longer ones: the pruned model keeps the masks in
    order."""
    small = subject.copy()
    hp.prune_(small, subject.ragged())
    together = subject.run(small)
    if "attention_mask" in subject.batch:
        last = int(subject.batch["attention_mask"][2].sum())
        alone = subject.run(
            small, input_ids=subject.batch["input_ids"][2:, :last], attention_mask=None, labels=None
        )
        assert last < subject.batch["input_ids"].shape[1]
        together = together[2:] if together.ndim == 2 else together[2:, :last]
    else:
        last = int(subject.batch["valid_lens"][2])
        alone = subject.run(small, x=subject.batch["x"][2:, :last], valid_lens=torch.tensor([last]))
        together = together[2:]
    # Llama's rotary tables and eager softmax are in float32.
    assert_close(together, alone, rtol=1e-6, atol=1e-6)


def test_gradient_checkpointing_gives_the_same_gate_gradients(subject: Subject) -> None:
    model = no_dropout(subject.model).train()
    site = subject.sites[0]
    gate = torch.full((site.n_query_heads,), 0.7, dtype=torch.float64, requires_grad=True)
    calls: list[str] = []
    model.get_submodule(f"{site.name}.{subject.layout.gate}").register_forward_hook(
        lambda *_: calls.append("o")
    )

    def gradient(checkpointed: bool) -> torch.Tensor:
        calls.clear()
        with hp.gated(model, {site.name: gate}):
            if checkpointed and subject.layout.name == "multi_head_attention":
                out = checkpoint(lambda: subject.run(model), use_reentrant=False)
            else:
                out = subject.run(
                    model, **({"use_cache": False} if "input_ids" in subject.batch else {})
                )
            found: torch.Tensor = torch.autograd.grad(objective(out), gate)[0]
        return found

    expected = gradient(checkpointed=False)
    assert calls == ["o"]
    if hasattr(model, "gradient_checkpointing_enable"):
        # Transformers renames this within version 5.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable()
    got = gradient(checkpointed=True)
    assert calls == ["o", "o"], "the forward did not run again"
    assert expected.abs().min() > 1e-6
    assert_close(got, expected, **CLOSE)


# Dynamo looks at .grad of the gates' views, behind a filter of its own that does not stop warnings
# from being errors.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_a_model_that_was_compiled_and_run_before(subject: Subject) -> None:
    """Gates take effect inside the block, other values the next time, and none afterwards; then
    comes the knife."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    # MultiHeadAttention looks at the values of valid_lens, which no whole graph can.
    batch = {k: v for k, v in subject.batch.items() if k != "valid_lens"}
    for layers in [m for m in subject.model.modules() if isinstance(m, nn.ModuleList)]:
        del layers[1:]  # one layer says all, and tracing is slow
    subject = dataclasses.replace(subject, batch=batch, sites=hp.find_sites(subject.model))
    assert len(subject.sites) == 1
    model, mask, site = subject.model, subject.ragged(), subject.sites[0]
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    base = subject.run()
    try:
        assert_close(subject.run(compiled), base, **CLOSE)
    except torch._dynamo.exc.Unsupported:
        if torch.__version__ >= "2.9":
            raise
        pytest.skip("this PyTorch cannot trace the model of Transformers, gates or not")
    before, ungated = picture(model), graphs[-1]
    expected = subject.run_gated(mask)
    with hp.gated(compiled, mask):
        assert_close(subject.run(compiled), expected, **CLOSE)
    assert graphs[-1] > ungated
    for value in (0.25, 0.5):
        gate = torch.full((site.n_query_heads,), value, dtype=torch.float64, requires_grad=True)
        with hp.gated(compiled, {site.name: gate}):
            (got,) = torch.autograd.grad(objective(subject.run(compiled)), gate)
        with hp.gated(model, {site.name: gate}):
            (wanted,) = torch.autograd.grad(objective(subject.run()), gate)
        assert_close(got, wanted, **CLOSE)
    assert len(graphs) == 3, "another value of a gate was compiled anew"
    assert picture(model) == before
    assert_close(subject.run(compiled), base, **CLOSE)
    assert hp.find_sites(compiled) == subject.sites
    hp.prune_(compiled, mask)
    assert_close(subject.run(compiled), expected, **CLOSE)
