"""diffusers-style attention: the processor is proved, the module keeps its counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import headprune as hp
from headprune.layouts._tiny_textbook import Processed, Processor
from headprune.layouts.diffusers import LAYOUT
from headprune.model.sites import reason_against
from tests.laws.support import CLOSE, ragged, shaken


class Mixed(Processor):
    """Attends by the mean of all heads."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None
    ) -> Tensor:
        read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        made = attn.to_q(hidden_states), attn.to_k(read), attn.to_v(read)
        q, k, v = (y.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for y in made)
        heads = scaled_dot_product_attention(q.mean(1, keepdim=True).expand_as(q), k, v)
        return attn.to_out[0](heads.transpose(1, 2).flatten(2))


def test_another_processor_is_refused() -> None:
    module = Processed(12, 4)
    assert reason_against(LAYOUT, module) is None
    module.processor = Mixed()
    assert "by its processor, got Mixed" in str(reason_against(LAYOUT, module))


NORMS = {"qk_norm": "layer_norm", "norm_num_groups": 2, "residual_connection": True}


@pytest.mark.parametrize(
    ("processor", "options"),
    [
        ("AttnProcessor2_0", {}),
        ("AttnProcessor", {"cross_attention_dim": 10}),
        ("AttnProcessor2_0", {**NORMS, "rescale_output_factor": 3.0}),
        ("AttnProcessor", {"bias": True, "upcast_softmax": False}),
    ],
    ids=["self", "cross", "norms", "bias"],
)
def test_real_modules(processor: str, options: dict[str, Any]) -> None:
    package = pytest.importorskip("diffusers.models.attention_processor")
    module = package.Attention(query_dim=16, heads=4, dim_head=4, **options)
    module.set_processor(getattr(package, processor)())
    model = shaken(nn.ModuleList([module]), norms=False).double().eval()
    small, sites = copy.deepcopy(model), hp.find_sites(model)
    x = torch.randn(2, 5, 16).double()
    context = torch.randn(2, 6, 10).double() if "cross_attention_dim" in options else None
    assert [s.kind for s in sites] == ["self" if context is None else "cross"]
    mask = ragged(sites)
    with hp.gated(model, mask):
        expected = model[0](x, encoder_hidden_states=context)
    hp.prune_(small, mask)
    assert_close(small[0](x, encoder_hidden_states=context), expected, **CLOSE)
    assert small[0].heads == mask.n_kept


@pytest.mark.parametrize(
    "options", [{"added_kv_proj_dim": 8}, {"qk_norm": "layer_norm_across_heads", "kv_heads": 4}]
)
def test_joint_attention_and_norms_across_heads_are_refused(options: dict[str, Any]) -> None:
    package = pytest.importorskip("diffusers.models.attention_processor")
    module = package.Attention(query_dim=16, heads=4, dim_head=4, **options)
    assert reason_against(LAYOUT, module) is not None
