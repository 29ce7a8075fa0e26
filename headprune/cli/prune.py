"""``headprune prune``: cuts a saved model by a plan, by scores and a budget, or by what its data
say."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.cli._shared import (
    AsJson,
    Debug,
    Quiet,
    Settings,
    echo,
    emit,
    guarded,
    say,
    selector_names,
    watching,
)
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.files import occupied

if TYPE_CHECKING:
    from headprune.checkpoints.checkpoint import Format
    from headprune.core.plan import Budget, PruningPlan


def prune(
    model: Annotated[str, typer.Option(help="A model folder, hub name, or package:NAME/FOLDER.")],
    out: Annotated[Path, typer.Option(help="Folder for the cut model.")],
    plan: Annotated[Path | None, typer.Option(help="A plan, as a run writes it.")] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Scores, as `headprune score` writes them, cut under their own policy; with --keep."
            )
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help=(
                "Data to score on, to refit by and to measure with: a csv, json, parquet or txt"
                " file, a folder with "
                "splits, or a hub name; with --keep. What the run found lies in OUT/run."
            )
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="With --data, where model and columns do not say it.")
    ] = None,
    settings: Settings = None,
    keep: Annotated[
        str | None, typer.Option(help="Heads to keep: a count, or a fraction such as 0.5.")
    ] = None,
    keep_params: Annotated[
        float | None, typer.Option(help="Or a fraction of the parameters.")
    ] = None,
    keep_macs: Annotated[float | None, typer.Option(help="Or of the multiply-adds.")] = None,
    keep_kv: Annotated[float | None, typer.Option(help="Or of the bytes of the KV cache.")] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            help="With --scores or --data; default global_topk.", autocompletion=selector_names
        ),
    ] = None,
    min_heads: Annotated[
        int | None, typer.Option(help="With --scores or --data: of a layer; default 1.")
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            help=(
                "headprune (every cut, bit for bit), transformers (loads without headprune, where"
                " the configuration "
                "can say the head counts), remote-code (a modelling file beside the weights, read"
                " with "
                "trust_remote_code=True), or auto: transformers where it applies, else headprune."
            )
        ),
    ] = "headprune",
    max_shard_size: Annotated[
        str, typer.Option(help="Larger models are written in several files.")
    ] = "50GB",
    merge_adapters: Annotated[
        bool,
        typer.Option(
            "--merge-adapters",
            help="For a folder of PEFT adapters: add them to their base model first.",
        ),
    ] = False,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming",
            help=(
                "With --plan: copy what stays from file to file, without ever loading the model;"
                " nothing is run, so "
                "the cut is not compared with the gated model."
            ),
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Cut a saved model, prove it equal to the gated one, and save it; on data, also score, refit
    and measure it."""
    with guarded(debug):
        if format not in ("auto", "headprune", "transformers", "remote-code"):
            raise InvalidValue(
                "--format", "auto, headprune, transformers or remote-code", repr(format)
            )
        from headprune.run.journal import RUN

        if occupied(
            out, () if data is None else (RUN,)
        ):  # a run on data may have been killed there
            raise InvalidValue("--out", "a new or an empty folder", str(out))
        amounts = {
            "--keep": keep,
            "--keep-params": keep_params,
            "--keep-macs": keep_macs,
            "--keep-kv": keep_kv,
        }
        given = {option: amount for option, amount in amounts.items() if amount is not None}
        _check_source(
            {"--plan": plan, "--scores": scores, "--data": data},
            {"--task": task, "--set": settings},
        )
        own = [] if data is None else _as_settings(given, selector, min_heads, settings)
        decided = _decide(plan, scores, given, selector, min_heads) if data is None else None
        from headprune.checkpoints import weights
        from headprune.data.models import resolve_path
        from headprune.run.subject import quiet as quiet_libraries

        _check_adapters(resolve_path(model, "--model"), merge_adapters)
        weights.check_shard_size(max_shard_size, "--max-shard-size")
        quiet_libraries()
        if streaming:
            _stream(model, decided, out, format, max_shard_size, as_json)
            return
        found = (
            _by_plan(model, decided)
            if decided
            else _on_data(model, str(data), out, task, own, quiet)
        )
        chosen, formats, files = _write(found, model, out, format, max_shard_size)
        if found.copy is not None:
            shutil.rmtree(found.copy)
        if as_json:
            facts = {
                "plan": found.plan.to_dict(),
                **found.facts,
                "format": chosen,
                "formats": formats,
            }
            emit({"out": str(out), **facts, "copied": files})
            return
        echo(found.text)
        for note in found.plan.notes:
            echo(f"note: {note}")
        for name, reason in formats.items():
            echo(f"format {name}: " + (f"no; {reason}" if reason else "yes"))
        echo(f"wrote {out} (format {chosen}{''.join(f', {f}' for f in files)})")
        if chosen == "remote-code":
            echo("who loads it with trust_remote_code=True runs this file:")
            echo(
                "".join(
                    path.read_text(encoding="utf-8") for path in out.glob("modeling_headprune_*.py")
                )
            )


@dataclass(frozen=True)
class _Cut:
    """A cut model in memory, its plan, and what there is to say about it, in words and as data.

    Args:
        model: The model.
        plan: The plan.
        example: A batch for it, None where none could be made up.
        text: What was done, for people.
        facts: The same for machines.
        copy: A folder that has the model too, until it is written.
    """

    model: Any
    plan: PruningPlan
    example: Any
    text: str
    facts: dict[str, Any]
    copy: Path | None = None


def _stream(
    model: str, plan: PruningPlan | None, out: Path, format: str, max_shard_size: str, as_json: bool
) -> None:
    """Cuts from file to file."""
    from headprune.checkpoints.streaming import prune_checkpoint
    from headprune.data.models import resolve_path

    folder = resolve_path(model, "--model")
    if plan is None:
        raise InvalidValue(
            "--streaming", "given with --plan or --scores, for nothing is run", "--data"
        )
    if format not in ("auto", "headprune"):
        raise InvalidValue(
            "--format", "headprune with --streaming; the others compare outputs", repr(format)
        )
    if not Path(folder).is_dir():
        hint = f"Download it first: hf download {model} --local-dir FOLDER."
        raise InvalidValue("--model", "a folder with --streaming", repr(model), hint)
    report = prune_checkpoint(
        folder, plan, out, max_shard_size=max_shard_size, copy_companions=True
    )
    files = list(report.copied)
    if as_json:
        facts = {name: value for name, value in vars(report).items() if name != "copied"}
        emit(
            {
                "out": str(out),
                "plan": plan.to_dict(),
                "report": facts,
                "format": "headprune",
                "copied": files,
            }
        )
        return
    echo(str(report))
    for warning in report.warnings:
        say(f"warning: {warning}")
    echo(f"wrote {out} (format headprune{''.join(f', {f}' for f in files)})")


def _by_plan(model: str, plan: PruningPlan) -> _Cut:
    from headprune.data.models import open_model
    from headprune.model.examples import example_batch
    from headprune.surgery.prune import prune_

    subject = open_model(model, "--model")
    example = example_batch(subject)
    if example is None:
        say(
            "warning: no inputs could be made up for this model; the cut is not compared with the"
            " gated model"
        )
    report = prune_(subject, plan, example=example)
    return _Cut(subject, plan, example, str(report), {"report": _facts(report)})


def _on_data(
    model: str, data: str, out: Path, task: str | None, settings: list[str], quiet: bool
) -> _Cut:
    from headprune.model.examples import example_batch
    from headprune.run.journal import MODEL, RUN
    from headprune.run.on_data import prune_on_data

    folder = out / RUN
    cut, record = prune_on_data(
        model, data, folder, task=task, settings=settings, **watching(quiet)
    )
    assert record.plan is not None
    text = f"{record}\nreport: {folder / 'report.html'}"
    return _Cut(
        cut, record.plan, example_batch(cut), text, {"record": record.to_dict()}, folder / MODEL
    )


def _write(
    found: _Cut, model: str, out: Path, format: str, max_shard_size: str
) -> tuple[Format, Mapping[Format, str | None], list[str]]:
    """Saves the cut model with what belongs to it: the format, what speaks against others, and the
    files copied."""
    from headprune.checkpoints import companions
    from headprune.checkpoints.checkpoint import applicable_formats, save_pretrained
    from headprune.data.models import resolve_path

    formats = applicable_formats(found.model)
    chosen = _chosen(format, formats)
    beside = companions.CompanionFiles(resolve_path(model, "--model"), code=chosen != "remote-code")
    how: dict[str, Any] = {"plan": found.plan, "example": found.example, "processor": beside}
    save_pretrained(found.model, out, format=chosen, max_shard_size=max_shard_size, **how)
    return chosen, formats, beside.copied


def _check_source(sources: Mapping[str, object], with_data: Mapping[str, object]) -> None:
    """What stays is said by a plan, by scores, or found out on data."""
    given = [option for option, value in sources.items() if value is not None]
    if len(given) != 1:
        raise InvalidValue(
            "prune", f"given one of {', '.join(sources)}", " and ".join(given) or "none"
        )
    for option, value in with_data.items():
        if value and given != ["--data"]:
            raise InvalidValue(option, "left out without --data", value)


def _as_settings(
    given: Mapping[str, str | float],
    selector: str | None,
    min_heads: int | None,
    settings: list[str] | None,
) -> list[str]:
    """The budget and the selector as settings of the recipe that is made up; the user's own come
    last."""
    option, amount = _one_budget(given, "--data").popitem()
    own = [f"select.{_kind(option)}={amount}"]
    own += ["select.keep_heads=null"] if option != "--keep" else []
    own += [f"select.selector={selector}"] if selector is not None else []
    own += [f"select.settings.min_heads={min_heads}"] if min_heads is not None else []
    return [*own, *(settings or ())]


def _check_adapters(folder: str, merge: bool) -> None:
    """A cut of adapters is not what a merged model is for: whoever wants one says so."""
    from headprune.data.adapters import is_adapter

    if is_adapter(Path(folder)) and not merge:
        hint = (
            "With it the adapters are added to their base model, which is then cut. Both can be cut"
            " side by side in "
        )
        hint += "Python, see docs/checkpoints.md."
        raise InvalidValue(
            "--model",
            "a whole model, or given with --merge-adapters",
            f"{folder}, PEFT adapters",
            hint,
        )
    if merge and not is_adapter(Path(folder)):
        raise InvalidValue(
            "--merge-adapters", "left out for a model without a folder of adapters", folder
        )


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
            "--format",
            "one that can hold this cut",
            f"{format!r}: {reason}",
            f"Those that can: {others}.",
        )
    return wanted


def _decide(
    plan: Path | None,
    scores: Path | None,
    given: Mapping[str, str | float],
    selector: str | None,
    min_heads: int | None,
) -> PruningPlan:
    from headprune.core.plan import PruningPlan
    from headprune.core.scores import HeadScores
    from headprune.selection import Selector, registry
    from headprune.selection._api import select

    if plan is not None:
        for name, value in {**given, "--selector": selector, "--min-heads": min_heads}.items():
            if value is not None:
                raise InvalidValue(name, "left out with --plan, which says what stays", value)
        return PruningPlan.load(plan)
    budget = _budget(*_one_budget(given, "--scores").popitem())
    _, chosen = registry.resolve(selector or "global_topk", Selector, "--selector")
    if min_heads is not None:
        chosen = replace(chosen, min_heads=min_heads)
    assert scores is not None  # or there would be a plan
    return select(HeadScores.load(scores), budget, chosen)


def _one_budget(given: Mapping[str, str | float], source: str) -> dict[str, str | float]:
    if len(given) != 1:
        must = f"given with {source}, or one of --keep-params, --keep-macs, --keep-kv"
        hint = "For example --keep 0.5, or --keep 36."
        raise InvalidValue("--keep", must, " and ".join(given) or "nothing", hint)
    return dict(given)


def _kind(option: str) -> str:
    return "keep_heads" if option == "--keep" else option.removeprefix("--").replace("-", "_")


def _budget(option: str, amount: str | float) -> Budget:
    from headprune.core.plan import Budget

    if isinstance(amount, str):
        try:
            amount = int(amount) if amount.isdigit() else float(amount)
        except ValueError:
            raise InvalidValue(option, "a count of heads or a fraction", repr(amount)) from None
    return Budget(**{_kind(option): amount})  # type: ignore[arg-type]


def _facts(report: Any) -> dict[str, Any]:
    return {
        "removed": {site: list(heads) for site, heads in report.removed},
        "params_before": report.params_before,
        "params_after": report.params_after,
        "max_difference": report.proof.max_difference if report.proof else None,
        "warnings": list(report.warnings),
    }
