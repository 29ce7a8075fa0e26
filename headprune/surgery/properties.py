"""The properties for which an attention is refused: one name each, quoted by every refusal and listed in the docs."""

from __future__ import annotations

import re

from torch import nn

from headprune.core.errors import HeadPruneError
from headprune.surgery.trace import Core

#: Name of a property, and what it means. docs/refusals.md is written from this table.
PROPERTIES: dict[str, str] = {
    "norm across heads": "A norm over several heads stands between the attention and its output projection, so the "
    "heads that stay would change when one leaves. A gate at the output projection is then not the removal of a head.",
    "norm over the whole projection": "Queries or keys are normalised over all heads at once, so that cutting the "
    "projection changes every head's norm.",
    "talking heads": "A matrix mixes the heads' scores or probabilities with each other: no head can leave alone.",
    "no output projection": "No projection of its own takes the heads' outputs side by side, so there is no place "
    "for gates; or one native function does everything and calls none.",
    "heads not side by side": "The output projection's input is not whole heads one after another (examples or tokens "
    "on one axis with others, or values of several heads mixed), so a gate would not meet one head.",
    "heads made by other modules": "Queries, keys or values come from outside of the module, from a module that is "
    "shared or whose sizes no head count explains.",
    "projections that are no matrices": "Queries, keys or values are made by a convolution or another layer that is no "
    "plain floating-point matrix (quantised and adapted ones too).",
    "head counts kept elsewhere": "The sizes fit, but the module's code takes its head count from where no cut can "
    "change it for this module alone: a configuration that layers share, a closure, a number in the code.",
    "one head": "There is a single head; a cut would take the whole layer.",
    "shared tensors": "A tensor of the attention is used elsewhere in the model too.",
    "no effect on the example": "Gates of zero change no output, so the example proves nothing.",
    "does not run in fp64": "The model does not run in fp64 on the example, or not twice alike, so nothing is proven.",
    "no softmax attention": "The module computes no softmax over positions (state spaces, Fourier, linear attention).",
}


def why_not(module: nn.Module, core: Core, failures: list[Exception]) -> tuple[str, str]:
    """The property for which a module with this core is refused, and what was seen; after all guesses failed."""
    if not core.fused and not core.before and not core.after:
        bare = [n for n, p in module.named_parameters(recurse=False) if p.ndim > 1]
        name = "projections that are no matrices" if bare else "heads made by other modules"
        return name, f"bare tensors {', '.join(bare)}" if bare else "the module around the softmax calls no projection"
    gates = [p for p in core.after if p.linear]
    if core.fused or not gates:
        return "no output projection", "one native function does it all" if core.fused else "none is called after it"
    n_heads = core.scores[1] if len(core.scores) >= 4 else 0
    mixing = [p.path for p in (*core.before, *core.after) if p.made[-1:] == p.given[-1:] == (n_heads,)]
    if mixing and any(p.given[-1] > n_heads for p in gates):
        return "talking heads", f"{', '.join(mixing)} mixes the {n_heads} heads"
    for path in core.norms:
        if any(p.shape[-1:] == gates[0].given[-1:] for p in module.get_submodule(path).parameters()):
            return "norm across heads", f"{path!r} comes before {gates[0].path!r}"
    curved = [p.path for p in core.before if not p.linear]
    if curved:
        return "projections that are no matrices", ", ".join(curved)
    text = " ".join(str(f) for f in failures)
    if "shared" in text or "cut in one way" in text:
        return "shared tensors", _line(failures, r"shared|cut in one way")
    made = {q.made[-1] for q in core.before if q.made}
    latent = {q.given[-1] for q in core.before if q.given} - {q.given[-1] for q in core.before[:1] if q.given}
    whole = [
        name
        for name, p in module.named_parameters()
        if p.ndim == 1 and "norm" in name and p.shape[0] in made - latent and n_heads > 1
    ]
    if whole:
        return "norm over the whole projection", f"{whole[0]!r} spans all {n_heads} heads"
    if not failures:
        one = n_heads == 1
        reason = "the softmax sees one head" if one else "the sizes of its projections fit no whole number of heads"
        return ("one head" if one else "heads made by other modules"), reason
    for pattern, name in (
        ("no effect", "no effect on the example"),
        ("a unit to remove", "one head"),
        (r"an nn\.Linear or a Conv1D|floating-point nn\.Parameter", "projections that are no matrices"),
    ):
        if re.search(pattern, text):
            return name, _line(failures, pattern)
    if all(re.search(r"gates|a gate an example|unflatten", str(f)) for f in failures):
        return "heads not side by side", _line(failures, "")
    return "head counts kept elsewhere", _line(
        [f for f in failures if not isinstance(f, HeadPruneError)] or failures, ""
    )


def _line(failures: list[Exception], pattern: str) -> str:
    found = next(f for f in failures if re.search(pattern, str(f)))
    return (str(found).strip() or type(found).__name__).partition("\n")[0]
