"""Write the model card's section on a cut: kept heads, plan, sizes, results, loading."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from headprune.core.display import escape
from headprune.core.files import write_atomic
from headprune.core.heads import AttentionSite, HeadCounts
from headprune.core.opening import read_bytes
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.version import __version__
from headprune.model.offloaded import count_parameters
from headprune.model.saves import BEGIN as BEGIN
from headprune.model.saves import CARD as CARD
from headprune.model.saves import END as END
from headprune.report.verdict import card_lines

#: Follows the title of the section where the rest of the card is the base model's.
_OTHERS = (
    "The rest of this card describes the model before the cut; its results were measured on that"
    " model."
)
_TITLE = "## Attention heads"

#: Python code that loads a folder, by its format.
LOADING = {
    "headprune": "import headprune as hp\n\nmodel = hp.from_pretrained({folder!r}{more})",
    "transformers": "from transformers import {kind}\n\nmodel = {kind}.from_pretrained({folder!r})",
    "remote-code": (
        "from transformers import {auto}\n\n# Runs the modelling file that lies beside the weights:"
        " read it first.\nmodel = {auto}.from_pretrained({folder!r}, trust_remote_code=True)"
    ),
    "gguf": "from llama_cpp import Llama\n\nmodel = Llama('{folder}/model.gguf')",
}


def section(
    model: nn.Module,
    sites: Iterable[AttentionSite],
    loading: str,
    plan: PruningPlan | None = None,
    params_before: int | None = None,
    record: RunRecord | None = None,
) -> str:
    """The section's text, without its markers.

    Args:
        model: The cut model.
        sites: Its sites.
        loading: Python code that loads the folder.
        plan: The plan by which it was cut, if that is known.
        params_before: Parameters of the whole model, if that is known.
        record: Of the run that cut it: its metrics, scores, speed and proofs.
    """
    sites = list(sites)
    kept = HeadCounts.present(sites)
    whole = HeadCounts.sum((s.n_query_heads, s.is_feed_forward) for s in sites)
    lines = [
        _TITLE,
        "",
        f"headprune {__version__} kept {kept.of(whole)}.",
        "",
        f"- Model: {_code(type(model).__name__)}",
    ]
    base = base_model(model)
    if base:
        lines.append(f"- Base model: {escape(base)}")
    lines.append(_parameters(count_parameters(model), params_before))
    if plan is not None:
        lines += _plan_lines(plan, sites)
    if record is not None:
        lines += _record_lines(record)
    what = "attention | heads kept"
    if whole.neurons is not None:
        what = "layer | heads or neurons kept"
    lines += ["", f"| {what} | which |", "| --- | --- | --- |"]
    for s in sites:
        count = f"{len(s.heads)} of {s.n_query_heads}"
        # Thousands of neurons have no place in a table; the folder's files list them.
        which = "neurons" if s.is_feed_forward else _ranges(s.heads)
        lines.append(f"| {_code(s.name)} | {count} | {which} |")
    if record is not None:
        lines += _measured(record)
    lines += ["", "```python", loading, "```"]
    return "\n".join(lines)


def _parameters(after: int, before: int | None) -> str:
    if before is None:
        return f"- Parameters: {after:,}"
    share = 100 * (after / before - 1)
    return f"- Parameters: {before:,} before, {after:,} after ({share:+.1f} %)"


def _plan_lines(plan: PruningPlan, sites: list[AttentionSite]) -> list[str]:
    """How a plan was chosen, and its notes."""
    how = f"selector {plan.selector}, scorer {plan.scorer or 'none'}, {plan.wanted or 'no budget'}"
    # The policy matters only where query heads share key/value heads.
    if any(s.n_kv_heads < s.n_query_heads for s in sites):
        how += f", policy {plan.policy}"
    return [f"- Plan: {escape(how)}", *(f"- Note: {escape(note)}" for note in plan.notes)]


def _record_lines(record: RunRecord) -> list[str]:
    """The verdict, quality, speed and proofs, a line each."""
    lines = []
    if record.quality:
        lines += [f"- {escape(line)}" for line in card_lines(record)]
    for proof in record.proofs:
        limits = f"{proof.max_difference:.1e}, allowed {proof.tolerance:.1e}"
        rows = f"{proof.n_examples} examples in {proof.dtype}"
        lines.append(f"- Proof of {escape(proof.what)}: largest difference {limits}; {rows}")
    return lines


def _measured(record: RunRecord) -> list[str]:
    """The table of metrics, and the picture of the scores."""
    lines = []
    with_neurons = any(row.kept_neurons is not None for row in record.quality)
    if record.quality:
        kept = "heads, neurons" if with_neurons else "heads"
        lines += [
            "",
            f"| model | {kept} | metric | value | rows |",
            "| --- | ---: | --- | ---: | --- |",
        ]
    for row in record.quality:
        value = f"{row.value:.4f}"
        if row.spread is not None:
            value += f" ± {row.spread:.4f}"
        rows = f"{row.n_examples} {escape(row.split)}"
        kept = f"{row.kept_heads}"
        if with_neurons:
            kept += ", -" if row.kept_neurons is None else f", {row.kept_neurons:,}"
        cells = (escape(row.name), kept, escape(row.metric), value, rows)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if record.scores is not None:
        # Names of sites cannot end a block that is indented.
        lines += ["", *(f"    {line}" for line in str(record.scores).splitlines())]
    return lines


def write(folder: Path, text: str, hub_name: str = "", old: str | None = None) -> Path:
    """Write the section to ``README.md``: in place of an earlier one, else at the end.

    Args:
        folder: Where the card is or will be.
        text: The section.
        hub_name: The base model's repository, which a new card names where hubs read it.
        old: The text around the section; by default that of the card that is there.

    Returns:
        The file.
    """
    path = folder / CARD
    block = f"{BEGIN}\n{text}\n{END}\n"
    if old is None and not path.is_file():
        # A new card, with metadata that hubs read.
        known = [f"base_model: {json.dumps(hub_name)}"] if hub_name else []
        metadata = "\n".join(["---", *known, "tags:", "- headprune", "---", ""])
        return write_atomic(path, f"{metadata}\n{block}".encode())
    if old is None:
        old = read(path)
    # In place of an earlier section, else at the end.
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        return write_atomic(path, _encoded(before + block + after.removeprefix("\n")))
    return write_atomic(path, _encoded(f"{old}{_gap_after(old)}{block}"))


def read(path: Path) -> str:
    """Read a card; bytes that are no UTF-8 are written again as they were."""
    return read_bytes(path).decode(errors="surrogateescape")


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _gap_after(text: str) -> str:
    """What separates a section from the text before it: one empty line."""
    if not text or text.endswith("\n\n"):
        return ""
    return "\n" if text.endswith("\n") else "\n\n"


def carry(folder: Path, original: Path) -> None:
    """Put the text of the base model's card, above all its licence, around the section.

    Args:
        folder: With a card that has a section.
        original: The base model's card.
    """
    own = read(folder / CARD).partition(BEGIN)[2].partition(END)[0].strip("\n")
    words, begin, rest = read_bytes(original).decode(errors="replace").partition(BEGIN)
    if begin:  # without the section of an earlier cut
        words += rest.partition(END)[2].removeprefix("\n")
    if own and words.strip():
        write(folder, own.replace(_TITLE, f"{_TITLE}\n\n{_OTHERS}", 1), old=words)


def base_model(model: Any) -> str:
    """The model's name on the hub, or that of its folder, if known."""
    return hub_name(model) or Path(origin(model)).name


def hub_name(model: Any) -> str:
    """The repository of the hub that the model was loaded from; empty for a folder."""
    name = origin(model)
    return name if _is_hub_name(name) else ""


def origin(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def _is_hub_name(name: str) -> bool:
    """Whether a name, which comes from a file, can be that of a repository on the hub."""
    # The name of a folder here may look like that of a repository.
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name, re.ASCII)
    return bool(is_name) and not Path(name).exists()


def _code(name: str) -> str:
    """A name as Markdown code, unless it has characters that could end that."""
    return f"`{name}`" if re.fullmatch(r"[\w.<>\[\]-]+", name) else escape(name)


def _ranges(heads: tuple[int, ...]) -> str:
    """``0-2, 5``: consecutive heads as a range."""
    # A range starts where the head before was removed, and stops likewise.
    starts = [h for h in heads if h - 1 not in heads]
    stops = [h for h in heads if h + 1 not in heads]
    ranges = []
    for start, stop in zip(starts, stops, strict=True):
        both = f"{start}-{stop}"
        ranges.append(str(start) if start == stop else both)
    return ", ".join(ranges) or "none"
