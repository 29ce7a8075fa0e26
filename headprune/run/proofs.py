"""Two proofs of a cut model: it generates like the gated one, and reloads unchanged."""

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

#: Tokens of the prompts, which differ so that the batch is padded.
_PROMPTS = (3, 6, 10, 16)
#: Tokens to generate.
_NEW_TOKENS = 24


def generation_proof(
    original: nn.Module, plan: PruningPlan, pruned: nn.Module, examples: Sequence[Example], pad: int
) -> Proof:
    """Prove that the pruned model generates what the gated model does.

    Both generate greedily with the KV cache, from a left-padded batch of prompts.

    Args:
        original: The uncut model.
        plan: The plan that was cut.
        pruned: The cut model, before any recovery.
        examples: The prompts are the first tokens of the first examples.
        pad: The padding token.

    Raises:
        VerificationFailed: logits differ by more than rounding, at a token before which both models
            read the same tokens. Where two tokens are equally likely up to rounding, as they often
            are in bf16, the models may choose differently.
    """
    # 1. Generate with both models.
    prompts = [_prompt(e, n) for e, n in zip(examples, _PROMPTS, strict=False)]
    batch = Collate(pad, side="left")(prompts)
    with gated(original, plan):
        tokens, logits = _generate(original, batch, pad)
    pruned_tokens, pruned_logits = _generate(pruned, batch, pad)

    # 2. Compare the logits wherever both models read the same tokens.
    n_steps = min(len(logits), len(pruned_logits))
    same = _same_so_far(tokens, pruned_tokens, tokens.shape[1] - len(logits), n_steps)
    expected, got = [], []
    for i, rows in enumerate(same):
        expected.append(logits[i][rows])
        got.append(pruned_logits[i][rows])
    difference = compare(expected, got)
    if not difference.holds:
        must = f"what the gated model generates, up to {difference.tolerance:.1e}"
        got_words = f"a difference of {difference.maximum:.3e}"
        raise VerificationFailed("what the pruned model generates", must, got_words)
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
    """The first tokens of an example, without padding."""
    ids = list(example["input_ids"])[:length]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def _generate(model: nn.Module, batch: dict[str, Tensor], pad: int) -> tuple[Tensor, list[Tensor]]:
    """Generate greedily; return the tokens ``[batch, tokens]`` and every step's logits."""
    generate: Any = model.generate
    settings = {
        "do_sample": False,
        "use_cache": True,
        "max_new_tokens": _NEW_TOKENS,
        "pad_token_id": pad,
    }
    with undisturbed(model), torch.no_grad():
        inputs = to_device(batch, device_of(model))
        # Logits as the model returns them, and not as `generate` processes them.
        out = generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)
    return out.sequences.cpu(), [step.cpu() for step in out.logits]


def _same_so_far(tokens: Tensor, others: Tensor, start: int, n_steps: int) -> list[Tensor]:
    """Find, for every step, the rows where both models have read the same tokens.

    Args:
        tokens: Prompts and generated tokens of one model, ``[batch, tokens]``.
        others: The same of the other model.
        start: Length of the prompts.
        n_steps: Steps that both models generated.

    Returns:
        A mask ``[batch]`` per step. At the first step all rows are the same: the prompts.
    """
    end = start + n_steps - 1
    equal = tokens[:, start:end] == others[:, start:end]
    equal_so_far = equal.cumprod(1).bool()  # [batch, n_steps - 1]
    first = torch.ones_like(tokens[:, :1], dtype=torch.bool)
    return list(torch.cat([first, equal_so_far], 1).T)


def reload_proof(
    model: nn.Module,
    folder: Any,
    batch: Any,
    whole: nn.Module | None = None,
    sites: Sites | None = None,
) -> Proof:
    """Prove that the checkpoint in ``folder`` loads to the saved model, bit for bit.

    Args:
        model: The model that was saved.
        folder: The checkpoint.
        batch: The inputs that both are run on.
        whole: A newly built uncut model, for a class that is the user's own code.
        sites: The sites of ``whole``, if it has layouts of its own.

    Raises:
        VerificationFailed: any difference.
    """
    expected = sample_outputs(model, batch)
    # On the device of the saved model: another one rounds differently.
    loaded = from_pretrained(folder, whole, sites if whole is not None else None)
    loaded = loaded.to(device_of(model))
    difference = compare(expected, sample_outputs(loaded, batch))
    if difference.maximum != 0:
        got = f"a difference of {difference.maximum:.3e}"
        raise VerificationFailed("the saved model, loaded again", "equal to the last bit", got)
    dtype = str(expected[0].dtype).removeprefix("torch.")
    return Proof("reload", 0.0, difference.scale, 0.0, dtype, batch_size(batch))
