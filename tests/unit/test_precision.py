"""Proofs of equality compute without TF32, however PyTorch is set, and leave its settings as they
were."""

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.model.precision import full_precision
from tests.laws.support import subject_of


@pytest.fixture(autouse=True)
def _settings():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def settings():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("products", "convolutions"), [("highest", True), ("high", False)])
def test_settings_come_back(products, convolutions):
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions

    def fails():
        with full_precision():
            assert settings() == ("highest", False)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert settings() == (products, convolutions)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="this PyTorch has the old switch",
)
def test_settings_of_the_newer_switch_come_back():
    """PyTorch refuses to answer by its old switch once the new one says something else."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix"):
        torch.get_float32_matmul_precision()
    with full_precision():
        assert (matmul.fp32_precision, convolution.fp32_precision) == ("ieee", "none")
    assert (matmul.fp32_precision, convolution.fp32_precision) == ("tf32", "tf32")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    with full_precision():
        assert (matmul.fp32_precision, convolution.fp32_precision) == ("ieee", "ieee")
    assert convolution.fp32_precision == "tf32"


class Watched(nn.Module):
    """An attention that notes how PyTorch is set whenever it runs."""

    def __init__(self):
        super().__init__()
        self.attention = hp.MultiHeadAttention(16, 4)
        self.seen = []

    def forward(self, x):
        self.seen.append(settings())
        return self.attention(x)


def test_the_proof_of_a_cut_runs_without_tf32():
    """With TF32, gated and pruned differ by 24 times what the proof allows (width 256,
    emulated)."""
    model, mask = Watched().eval(), hp.HeadMask.from_keep({"attention": [0, 3]}, {"attention": 4})
    torch.set_float32_matmul_precision("high")
    report = hp.prune_(model, mask, torch.randn(2, 5, 16))
    assert report.proof is not None
    assert model.seen == [("highest", False)] * 2
    assert settings() == ("high", True)


def test_passes_are_proven_without_tf32_and_played_back_with_it():
    subject = subject_of("multi_head_attention")
    model, seen = subject.model.float(), []
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append(settings()))
    batch = {"x": subject.batch["x"].float(), "valid_lens": subject.batch["valid_lens"]}
    torch.set_float32_matmul_precision("high")
    loss = lambda m, b: m(**b).square().sum(1)  # noqa: E731
    hp.score(model, [batch], "leave_one_out", loss=loss, progress=False)
    assert ("highest", False) in seen
    assert seen[-1] == ("high", True)
