"""Translations of an encoder-decoder, and how good they are: BLEU by sacrebleu."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from headprune.bench.quality import Quality, evaluate
from headprune.core.bleu import bleu
from headprune.core.errors import InvalidValue
from headprune.model.batches import Batches
from headprune.model.running import device_of, to_device, undisturbed


def check_sacrebleu(where: str) -> None:
    """Refuses to go on without the package that counts n-grams.

    Raises:
        InvalidValue: sacrebleu is not installed.
    """
    if importlib.util.find_spec("sacrebleu") is None:
        hint = "Install it: pip install sacrebleu."
        raise InvalidValue(
            where, "a task whose packages are installed", "no package sacrebleu", hint
        )


def translate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    beams: int = 1,
    max_length: int = 64,
) -> list[str]:
    """One translation a source sentence, in the order of the batches.

    Args:
        model: A Transformers encoder-decoder that generates, or ``TransformerForTranslation``; left
            as it was found.
        batches: With ``input_ids`` and ``attention_mask``; what else they hold is not read.
        tokenizer: Turns tokens into text.
        beams: 1 takes the likeliest token every time; more search so many translations at once.
        max_length: Tokens of a translation at most.
    """
    found: list[str] = []
    generate: Any = model.generate
    wanted = {
        "num_beams": beams,
        "do_sample": False,
        "max_new_tokens": max_length,
        "use_cache": True,
    }
    device = device_of(model)
    with undisturbed(model, packed=True), torch.no_grad():
        for batch in batches:
            sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
            tokens = generate(**to_device(sources, device), **wanted)
            found += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return found


def evaluate_translation(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    references: Sequence[str],
    tokenizer: Any,
    *,
    beams: int = 1,
    max_length: int = 64,
) -> Quality:
    """BLEU (as a fraction of 1) of a model's own translations, and its losses on the references.

    BLEU is sacrebleu's with its defaults (tokenizer ``13a``, case counts, smoothing ``exp``),
    divided by 100; it is taken of the sums of ``Quality.amounts``, whose rows are those of
    ``headprune.core.bleu.bleu``.

    Args:
        model: See ``translate``.
        batches: With labels, too.
        references: The true translations, in the order of the batches.
        tokenizer: See ``translate``.
        beams: See ``translate``.
        max_length: See ``translate``.

    Raises:
        InvalidValue: sacrebleu is missing, or there is not one reference a sentence.
    """
    check_sacrebleu("evaluate_translation")
    from sacrebleu.metrics import BLEU

    read = Batches.of(batches)  # twice
    quality = evaluate(model, read)
    if len(references) != quality.n_examples:
        raise InvalidValue(
            "references", f"one for each of {quality.n_examples} sentences", len(references)
        )
    translations = translate(model, read, tokenizer, beams=beams, max_length=max_length)
    scorer = BLEU(
        effective_order=True
    )  # it is the counts that are taken; the order matters to one sentence's score
    scores = [
        scorer.sentence_score(said, [true])
        for said, true in zip(translations, references, strict=True)
    ]
    amounts = tuple((*map(float, s.counts), *map(float, s.totals)) for s in scores)
    counts = tuple(float(s.ref_len) for s in scores)
    value = float(bleu(np.array(amounts).sum(0), np.array(counts).sum()))
    return replace(quality, metric="bleu", value=value, amounts=amounts, counts=counts)
