"""``headprune prune``: cuts a saved model by a plan, or by scores and a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.cli._shared import AsJson, Debug, emit, guarded, say
from headprune.core.errors import InvalidValue, UnsupportedModel

if TYPE_CHECKING:
    from headprune.core.plan import Budget, PruningPlan
    from headprune.surgery.checkpoint import Format


def prune(
    model: Annotated[str, typer.Option(help="A model folder, hub name, or package:NAME/FOLDER.")],
    out: Annotated[Path, typer.Option(help="Folder for the cut model.")],
    plan: Annotated[Path | None, typer.Option(help="A plan, as a run writes it.")] = None,
    scores: Annotated[
        Path | None,
        typer.Option(help="Scores, as `headprune score` writes them, cut under their own policy; with --keep."),
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Heads to keep: a count, or a fraction such as 0.5.")] = None,
    keep_params: Annotated[float | None, typer.Option(help="Or a fraction of the parameters.")] = None,
    keep_macs: Annotated[float | None, typer.Option(help="Or of the multiply-adds.")] = None,
    keep_kv: Annotated[float | None, typer.Option(help="Or of the bytes of the KV cache.")] = None,
    selector: Annotated[str | None, typer.Option(help="With --scores; default global_topk.")] = None,
    min_heads: Annotated[int | None, typer.Option(help="With --scores: a layer keeps so many; default 1.")] = None,
    format: Annotated[
        str,
        typer.Option(
            help="headprune (every cut, bit for bit), transformers (loads without headprune, where the configuration "
            "can say the head counts), remote-code (a modelling file beside the weights, read with "
            "trust_remote_code=True), or auto: transformers where it applies, else headprune."
        ),
    ] = "headprune",
    max_shard_size: Annotated[str, typer.Option(help="Larger models are written in several files.")] = "50GB",
    merge_adapters: Annotated[
        bool,
        typer.Option("--merge-adapters", help="For a folder of PEFT adapters: add them to their base model first."),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Cut a saved model, prove it equal to the gated one, and save it."""
    with guarded(debug):
        if format not in ("auto", "headprune", "transformers", "remote-code"):
            raise InvalidValue("--format", "auto, headprune, transformers or remote-code", repr(format))
        if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
            raise InvalidValue("--out", "a new or an empty folder", str(out))
        amounts = {"--keep": keep, "--keep-params": keep_params, "--keep-macs": keep_macs, "--keep-kv": keep_kv}
        decided = _decide(plan, scores, amounts, selector, min_heads)
        from headprune.model.examples import example_batch
        from headprune.run.models import open_model, resolve_path
        from headprune.run.subject import quiet
        from headprune.surgery.checkpoint import applicable_formats, save_pretrained
        from headprune.surgery.formats import companions, weights
        from headprune.surgery.prune import prune_

        _check_adapters(resolve_path(model, "--model"), merge_adapters)
        weights.check_shard_size(max_shard_size, "--max-shard-size")
        quiet()
        subject = open_model(model, "--model")
        example = example_batch(subject)
        if example is None:
            say("warning: no inputs could be made up for this model; the cut is not compared with the gated model")
        report = prune_(subject, decided, example=example)
        formats = applicable_formats(subject)
        chosen = _chosen(format, formats)
        save_pretrained(subject, out, format=chosen, plan=decided, example=example, max_shard_size=max_shard_size)
        files = companions.copy(resolve_path(model, "--model"), out)
        if as_json:
            facts = {"plan": decided.to_dict(), "report": _facts(report), "format": chosen, "formats": formats}
            emit({"out": str(out), **facts, "copied": files})
            return
        typer.echo(str(report))
        for note in decided.notes:
            typer.echo(f"note: {note}")
        for name, reason in formats.items():
            typer.echo(f"format {name}: " + (f"no; {reason}" if reason else "yes"))
        typer.echo(f"wrote {out} (format {chosen}{''.join(f', {f}' for f in files)})")
        if chosen == "remote-code":
            typer.echo("who loads it with trust_remote_code=True runs this file:")
            typer.echo("".join(path.read_text(encoding="utf-8") for path in out.glob("modeling_headprune_*.py")))


def _check_adapters(folder: str, merge: bool) -> None:
    """A cut of adapters is not what a merged model is for: whoever wants one says so."""
    from headprune.run.adapters import is_adapter

    if is_adapter(Path(folder)) and not merge:
        hint = "With it the adapters are added to their base model, which is then cut. Both can be cut side by side in "
        hint += "Python, see docs/checkpoints.md."
        raise InvalidValue("--model", "a whole model, or given with --merge-adapters", f"{folder}, PEFT adapters", hint)
    if merge and not is_adapter(Path(folder)):
        raise InvalidValue("--merge-adapters", "left out for a model without a folder of adapters", folder)


def _chosen(format: str, formats: Mapping[Format, str | None]) -> Format:
    """The format to write; ``auto`` never takes the one that makes others run code.

    Raises:
        UnsupportedModel: it cannot hold this cut.
    """
    if format == "auto":
        return "headprune" if formats["transformers"] else "transformers"
    wanted = next(name for name in formats if name == format)
    if reason := formats[wanted]:
        others = ", ".join(name for name, against in formats.items() if not against)
        raise UnsupportedModel(
            "--format", "one that can hold this cut", f"{format!r}: {reason}", f"Those that can: {others}."
        )
    return wanted


def _decide(
    plan: Path | None,
    scores: Path | None,
    amounts: Mapping[str, str | float | None],
    selector: str | None,
    min_heads: int | None,
) -> PruningPlan:
    from headprune.core.plan import PruningPlan
    from headprune.core.scores import HeadScores
    from headprune.selection import Selector, registry
    from headprune.selection._api import select

    if (plan is None) == (scores is None):
        raise InvalidValue("prune", "given one of --plan and --scores", "neither" if plan is None else "both")
    given = {option: amount for option, amount in amounts.items() if amount is not None}
    if plan is not None:
        for name, value in {**given, "--selector": selector, "--min-heads": min_heads}.items():
            if value is not None:
                raise InvalidValue(name, "left out with --plan, which says what stays", value)
        return PruningPlan.load(plan)
    if scores is None or len(given) != 1:
        must = f"given with --scores, or one of {', '.join(option for option in amounts if option != '--keep')}"
        hint = "For example --keep 0.5, or --keep 36."
        raise InvalidValue("--keep", must, " and ".join(given) or "nothing", hint)
    budget = _budget(*given.popitem())
    _, chosen = registry.resolve(selector or "global_topk", Selector, "--selector")
    if min_heads is not None:
        chosen = replace(chosen, min_heads=min_heads)
    return select(HeadScores.load(scores), budget, chosen)


def _budget(option: str, amount: str | float) -> Budget:
    from headprune.core.plan import Budget

    kind = "keep_heads" if option == "--keep" else option.removeprefix("--").replace("-", "_")
    if isinstance(amount, str):
        try:
            amount = int(amount) if amount.isdigit() else float(amount)
        except ValueError:
            raise InvalidValue(option, "a count of heads or a fraction", repr(amount)) from None
    return Budget(**{kind: amount})  # type: ignore[arg-type]


def _facts(report: Any) -> dict[str, Any]:
    return {
        "removed": {site: list(heads) for site, heads in report.removed},
        "params_before": report.params_before,
        "params_after": report.params_after,
        "max_difference": report.proof.max_difference if report.proof else None,
        "warnings": list(report.warnings),
    }
