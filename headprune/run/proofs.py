"""Two more proofs: the cut model generates what the gated one does, and comes back from disk as it
was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.checkpoints.checkpoint import from_pretrained
from headprune.core.errors import VerificationFailed
from headprune.core.plan import PruningPlan
from headprune.core.record import Proof
from headprune.data.features import Collate, Example
from headprune.gating.context import gated
from headprune.model.running import batch_size, device_of, to_device, undisturbed
from headprune.model.sites import Sites
from headprune.surgery.verify import compare, sample_outputs

_PROMPTS = (3, 6, 10, 16)
_NEW_TOKENS = 24


def generation_proof(
    original: nn.Module, plan: PruningPlan, pruned: nn.Module, examples: Sequence[Example], pad: int
) -> Proof:
    """Greedy generation with the KV cache from a left-padded batch of prompts: gated against
    pruned.

    Args:
        original: The uncut model.
        plan: What was cut.
        pruned: The cut model, not recovered yet.
        examples: Where the prompts come from: the first tokens of the first examples.
        pad: The padding token.

    Raises:
        VerificationFailed: logits that differ by more than rounding, at any token that both have
            come to. (Where two tokens are as likely up to rounding, as in bf16 they often are, each
            model may take another.)
    """
    prompts = [_prompt(e, n) for e, n in zip(examples, _PROMPTS, strict=False)]
    batch = Collate(pad, side="left")(prompts)
    with gated(original, plan):
        tokens, logits = _generate(original, batch, pad)
    got_tokens, got_logits = _generate(pruned, batch, pad)
    reached = _reached(tokens, got_tokens, len(logits), len(got_logits))
    seen, got = (
        [step[rows] for step, rows in zip(steps, reached, strict=False)]
        for steps in (logits, got_logits)
    )
    difference = compare(seen, got)
    if not difference.holds:
        must = f"what the gated model generates, up to {difference.tolerance:.1e}"
        raise VerificationFailed(
            "what the pruned model generates", must, f"a difference of {difference.maximum:.3e}"
        )
    dtype = str(logits[0].dtype).removeprefix("torch.")
    return Proof(
        "generation",
        difference.maximum,
        difference.scale,
        difference.tolerance,
        dtype,
        len(prompts),
    )


def _prompt(example: Example, length: int) -> Example:
    ids = list(example["input_ids"])[:length]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def _generate(model: nn.Module, batch: dict[str, Tensor], pad: int) -> tuple[Tensor, list[Tensor]]:
    """Tokens, and the logits of every step."""
    generate: Any = model.generate
    settings = {
        "do_sample": False,
        "use_cache": True,
        "max_new_tokens": _NEW_TOKENS,
        "pad_token_id": pad,
    }
    with undisturbed(model), torch.no_grad():
        inputs = to_device(batch, device_of(model))
        out = generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)
    return out.sequences.cpu(), [step.cpu() for step in out.logits]


def _reached(tokens: Tensor, got: Tensor, n_steps: int, n_got: int) -> list[Tensor]:
    """At every step the rows, ``[batch]``, for which both models read the same tokens before."""
    start, n = tokens.shape[1] - n_steps, min(n_steps, n_got)
    same = (tokens[:, start : start + n - 1] == got[:, start : start + n - 1]).cumprod(1).bool()
    return list(torch.cat([torch.ones_like(tokens[:, :1], dtype=torch.bool), same], 1).T)


def reload_proof(
    model: nn.Module,
    folder: Any,
    batch: Any,
    whole: nn.Module | None = None,
    sites: Sites | None = None,
) -> Proof:
    """The checkpoint in ``folder``, loaded, against the model that was saved: equal to the last
    bit.

    Args:
        model: The model that was saved.
        folder: Where.
        batch: What both are run on.
        whole: For a class that no checkpoint can build: a fresh model before any cut.
        sites: Of ``whole``, where it has layouts of its own.

    Raises:
        VerificationFailed: any difference.
    """
    expected = sample_outputs(model, batch)
    loaded = from_pretrained(folder, whole, sites if whole is not None else None).to(
        device_of(model)
    )
    difference = compare(expected, sample_outputs(loaded, batch))
    if difference.maximum != 0:
        got = f"a difference of {difference.maximum:.3e}"
        raise VerificationFailed("the saved model, loaded again", "equal to the last bit", got)
    dtype = str(expected[0].dtype).removeprefix("torch.")
    return Proof("reload", 0.0, difference.scale, 0.0, dtype, batch_size(batch))
