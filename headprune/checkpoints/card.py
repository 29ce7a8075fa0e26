"""The section of a model card that states what was cut: base model, heads left, why, sizes, and how
to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from headprune.core.display import escape
from headprune.core.files import write_atomic
from headprune.core.heads import AttentionSite
from headprune.core.opening import read_bytes
from headprune.core.plan import PruningPlan
from headprune.core.version import __version__
from headprune.model.offloaded import count_parameters

CARD = "README.md"
_OTHERS = (
    "The other words of this card are those of the model before the cut; what they measured was"
    " measured on it."
)
BEGIN, END = "<!-- headprune: begin -->", "<!-- headprune: end -->"

LOADING = {
    "headprune": "import headprune as hp\n\nmodel = hp.from_pretrained({folder!r}{more})",
    "transformers": "from transformers import {kind}\n\nmodel = {kind}.from_pretrained({folder!r})",
    "remote-code": (
        "from transformers import {auto}\n\n# Runs the modelling file that lies beside the weights:"
        " read it first.\nmodel = {auto}.from_pretrained({folder!r}, trust_remote_code=True)"
    ),
}


def section(
    model: nn.Module,
    sites: Iterable[AttentionSite],
    loading: str,
    plan: PruningPlan | None = None,
    params_before: int | None = None,
) -> str:
    """The section's text, without its markers."""
    sites = list(sites)
    left, full = sum(len(s.heads) for s in sites), sum(s.n_query_heads for s in sites)
    after = count_parameters(model)
    lines = ["## Attention heads", ""]
    lines.append(f"headprune {__version__} left {left} of {full} heads.")
    lines += ["", f"- Model: {_code(type(model).__name__)}"]
    if base := base_model(model):
        lines.append(f"- Base model: {escape(base)}")
    if params_before is not None:
        share = 100 * (1 - after / params_before)
        lines.append(f"- Parameters: {params_before:,} before, {after:,} after (-{share:.1f} %)")
    else:
        lines.append(f"- Parameters: {after:,}")
    if plan is not None:
        budget = plan.wanted or "no budget"
        policy = (
            f", policy {plan.policy}" if any(s.n_kv_heads < s.n_query_heads for s in sites) else ""
        )
        how = f"selector {plan.selector}, scorer {plan.scorer or 'none'}, {budget}{policy}"
        lines += [f"- Plan: {escape(how)}", *(f"- Note: {escape(note)}" for note in plan.notes)]
    lines += ["", "| attention | heads left | which |", "| --- | --- | --- |"]
    lines += [
        f"| {_code(s.name)} | {len(s.heads)} of {s.n_query_heads} | {_ranges(s.heads)} |"
        for s in sites
    ]
    return "\n".join([*lines, "", "```python", loading, "```"])


def write(folder: Path, text: str, hub_name: str = "", old: str | None = None) -> Path:
    """Puts the section into ``README.md``: in place of an earlier one, else at its end; other text
    stays.

    Args:
        folder: Where the card is or will be.
        text: The section.
        hub_name: The base model's repository, which a new card names where hubs read it.
        old: The text that stays; by default that of the card that is there.
    """
    path = folder / CARD
    block = f"{BEGIN}\n{text}\n{END}\n"
    if old is None and not path.is_file():
        known = [f"base_model: {json.dumps(hub_name)}"] if hub_name else []
        head = "\n".join(["---", *known, "tags:", "- headprune", "---", ""])
        return write_atomic(path, f"{head}\n{block}".encode())
    old = read_bytes(path).decode() if old is None else old
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        return write_atomic(path, (before + block + after.removeprefix("\n")).encode())
    gap = "" if not old or old.endswith("\n\n") else "\n" if old.endswith("\n") else "\n\n"
    return write_atomic(path, f"{old}{gap}{block}".encode())


def carry(folder: Path, original: Path) -> None:
    """Lets the words of the base model's card, above all its licence, stay around the section of
    this one."""
    ours = read_bytes(folder / CARD).decode().partition(BEGIN)[2].partition(END)[0].strip("\n")
    before, begin, rest = read_bytes(original).decode(errors="replace").partition(BEGIN)
    words = (
        before + rest.partition(END)[2].removeprefix("\n") if begin else before
    )  # without an earlier cut's section
    if ours and words.strip():
        title = "## Attention heads\n"
        write(folder, ours.replace(title, f"{title}\n{_OTHERS}\n", 1), old=words)


def base_model(model: Any) -> str:
    """What the model was loaded from: its name on the hub, or the last part of a folder's path; or
    nothing."""
    return hub_name(model) or Path(_origin(model)).name


def hub_name(model: Any) -> str:
    """The repository of the hub that the model was loaded from; empty for a folder's."""
    name = _origin(model)
    return name if _is_hub_name(name) else ""


def _origin(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def _is_hub_name(name: str) -> bool:
    """It comes out of a file: what is no such name is not told to hubs."""
    return (
        bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name, re.ASCII))
        and not Path(name).exists()
    )


def _code(name: str) -> str:
    """A name of code as code, unless it holds what would end that."""
    return f"`{name}`" if re.fullmatch(r"[\w.<>\[\]-]+", name) else escape(name)


def _ranges(heads: tuple[int, ...]) -> str:
    """``0-2, 5``: consecutive heads as a range."""
    starts = [h for h in heads if h - 1 not in heads]
    stops = [h for h in heads if h + 1 not in heads]
    return (
        ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))
        or "none"
    )
