"""A gated call, captured as a CUDA graph: gates that are changed in place take effect when it is
replayed.

This file runs last (``conftest.LAST``): a capture that fails may leave the GPU's context unusable.
"""

import pytest
import torch

import headprune as hp
from headprune.model.running import call
from tests.gpu import tolerances
from tests.gpu.models import subject
from tests.laws.support import logits


@pytest.mark.parametrize("of", ["own", "encoder"])
def test_a_gated_call_is_captured(compare, gpu, of):
    found = subject(of)
    batch = found.data(gpu)[0]
    # Without padding: masks and lengths are looked at, and to look ends a capture.
    batch = {"x": batch["x"]} if of == "own" else {"input_ids": batch["input_ids"].clamp(min=3)}
    model = found.copy(gpu)
    gates = {s.name: torch.ones(s.n_query_heads, device=gpu) for s in found.sites}
    changed = {s.name: torch.linspace(0, 1, s.n_query_heads, device=gpu) for s in found.sites}
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad(), hp.gated(model, gates):
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what libraries do once must not be part of the graph
            for _ in range(3):
                call(model, batch)
        torch.cuda.current_stream().wait_stream(aside)
        try:
            with torch.cuda.graph(graph):
                captured = logits(model, batch)
        except RuntimeError as error:
            compare.note("not captured", of=of, why=str(error)[:600])
            if of == "own":
                raise
            pytest.skip(f"the {of} cannot be captured: {str(error)[:200]}")
        graph.replay()
        opened = captured.clone()
        for name, gate in gates.items():
            gate.copy_(changed[name])
        graph.replay()
        replayed = captured.clone()
    with torch.no_grad():
        whole = logits(model, batch)
        with hp.gated(model, changed):
            wanted = logits(model, batch)
    close = tolerances.OUTPUTS["fp32"]
    compare(f"a captured call of the {of}, gates open", opened, whole, close, "fp32")
    compare(f"a captured call of the {of}, other gates", replayed, wanted, close, "fp32")
    compare.differs("other gates do something", replayed, whole, close, "fp32")
