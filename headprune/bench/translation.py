"""Translations of an encoder-decoder, and their BLEU by sacrebleu."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from headprune.bench.quality import Quality, evaluate
from headprune.core.bars import bar
from headprune.core.bleu import bleu
from headprune.core.errors import InvalidValue
from headprune.model.batches import Batches
from headprune.model.running import device_of, to_device, undisturbed


def check_sacrebleu(where: str) -> None:
    """Check that the package that counts n-grams is installed.

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
    """Translate every source sentence, in the order of the batches.

    Args:
        model: A Transformers encoder-decoder that generates, or ``TransformerForTranslation``; it
            does not change.
        batches: With ``input_ids`` and ``attention_mask``; nothing else is read.
        tokenizer: Turns tokens into text.
        beams: Width of the beam search; 1 is greedy.
        max_length: Most tokens of a translation.
    """
    translations: list[str] = []
    generate: Any = model.generate
    options = {
        "num_beams": beams,
        "do_sample": False,
        "max_new_tokens": max_length,
        "use_cache": True,
    }
    device = device_of(model)
    with undisturbed(model, packed=True), torch.no_grad():
        for batch in bar(batches, "translation"):
            sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
            tokens = generate(**to_device(sources, device), **options)  # [batch, target tokens]
            translations += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return translations


def evaluate_translation(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    references: Sequence[str],
    tokenizer: Any,
    *,
    beams: int = 1,
    max_length: int = 64,
) -> Quality:
    """Compute BLEU of a model's translations, from 0 to 1, and its losses on the references.

    BLEU is sacrebleu's with its defaults (tokenizer ``13a``, case-sensitive, smoothing ``exp``),
    divided by 100. It is computed from the sums of ``Quality.amounts``, see
    ``headprune.core.bleu``.

    Args:
        model: See ``translate``.
        batches: As for ``translate``, with labels.
        references: The true translations, in the order of the batches.
        tokenizer: See ``translate``.
        beams: See ``translate``.
        max_length: See ``translate``.

    Raises:
        InvalidValue: sacrebleu is missing, or not one reference per sentence.
    """
    check_sacrebleu("evaluate_translation")
    from sacrebleu.metrics import BLEU

    # `evaluate` and `translate` both read all batches.
    reread = Batches.of(batches)
    quality = evaluate(model, reread)
    if len(references) != quality.n_examples:
        must = f"one for each of {quality.n_examples} sentences"
        raise InvalidValue("references", must, len(references))
    translations = translate(model, reread, tokenizer, beams=beams, max_length=max_length)

    # Only the n-gram counts are used; effective_order avoids a warning about single sentences.
    scorer = BLEU(effective_order=True)
    amounts = []  # per sentence: matched n-grams, then all n-grams, by order
    counts = []  # lengths of the references
    for translation, reference in zip(translations, references, strict=True):
        score = scorer.sentence_score(translation, [reference])
        amounts.append(tuple(map(float, [*score.counts, *score.totals])))
        counts.append(float(score.ref_len))
    value = float(bleu(np.array(amounts).sum(0), np.array(counts).sum()))
    return replace(
        quality,
        metric="bleu",
        value=value,
        amounts=tuple(amounts),
        counts=tuple(counts),
        outputs=tuple(translations),
    )
