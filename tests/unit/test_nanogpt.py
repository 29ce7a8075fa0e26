"""Attention written as in nanoGPT is refused with the lines to change; after that it is cut."""

import re
from types import SimpleNamespace

import pytest
import torch

import headprune as hp
from headprune.core.errors import UnsupportedModel
from tests.scripts import script

#: The same parts, names and branches: one projection for queries, keys and values, two kinds of
#: attention, and the model's width where that of the heads is meant.
CODE = """
import torch
from torch import nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.dropout, self.flash = config.dropout, config.flash
        if not self.flash:
            causal = torch.ones(config.block_size, config.block_size).tril()
            self.register_buffer("bias", causal[None, None])

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            weights = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
            weights = weights.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(weights, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([CausalSelfAttention(config) for _ in range(2)])
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = x + block(x)
        return self.lm_head(x)
"""


def built(folder, name, code, flash):
    """A model of code in a file, as a user has it."""
    file = folder / f"{name}.py"
    file.write_text(code)
    sizes = {"n_embd": 16, "n_head": 4, "vocab_size": 20, "block_size": 12}
    torch.manual_seed(0)
    return script(file).GPT(SimpleNamespace(**sizes, bias=True, dropout=0.1, flash=flash)).eval()


@pytest.mark.parametrize("flash", [True, False])
def test_the_refusal_names_two_lines_and_changing_them_is_enough(flash, tmp_path):
    ids = torch.randint(20, (2, 8))
    whole = built(tmp_path, "as_published", CODE, flash)
    with pytest.raises(UnsupportedModel, match="change two lines") as refusal:
        hp.find_sites(whole)

    code = CODE
    for old, new in re.findall(r"`(.+?)` to `(.+?)`", str(refusal.value)):
        assert code.count(old) == 1
        code = code.replace(old, new)
    model = built(tmp_path, "changed", code, flash)
    model.load_state_dict(whole.state_dict())
    assert torch.equal(model(ids), whole(ids))
    sites = hp.find_sites(model, layouts=hp.propose_layouts(model, ids))
    report = hp.prune_heads_(model, {0: [1], 1: [0, 2]}, example=ids, sites=sites)
    assert report.proof is not None
    assert [block.n_head for block in model.h] == [3, 2]
