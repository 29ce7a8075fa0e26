"""``headprune prune``: cut a saved model by a plan, by scores, or on data."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.cli._shared import (
    AsJson,
    Debug,
    LabelColumn,
    PairColumn,
    Quiet,
    Settings,
    TextColumn,
    echo,
    emit,
    guarded,
    say,
    selector_names,
    show_estimate,
    watching,
)
from headprune.core.errors import WARNING, InvalidValue, UnsupportedModel, check_one_of
from headprune.core.files import occupied, pruned_name

if TYPE_CHECKING:
    from headprune.checkpoints.checkpoint import Format
    from headprune.core.plan import Budget, PruningPlan
    from headprune.core.record import RunRecord
    from headprune.recipes.schema import Recipe


#: What the guessed recipe says where heads and neurons share a budget. One cut by measured prices
#: costs a fraction of what `auto` does, which tries several.
_WITH_NEURONS = (
    "select.feed_forward=true",
    "score.scorer=ladder",
)


def prune(
    # What to cut, and where to save it.
    model: Annotated[str, typer.Option(help="A model folder, hub name, or package:NAME/FOLDER.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the cut model; default: the model's name and -pruned."),
    ] = None,
    # Where the choice of heads comes from: one of these three.
    plan: Annotated[Path | None, typer.Option(help="A plan, as a run writes it.")] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            help=("Scores from `headprune score`; their policy applies. Needs a budget (--keep).")
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help=(
                "Data to score on, to refit by and to measure with: a csv, tsv, json, parquet or "
                "txt file, a folder with splits, or a hub name; with --keep. With a budget of "
                "heads, auto tries several scorers, which takes tens of times as long as --set "
                "score.scorer=taylor; --dry-run estimates it. The run's record and report are in "
                "OUT/run."
            )
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="With --data, if model and columns do not determine it."),
    ] = None,
    text: TextColumn = None,
    text_pair: PairColumn = None,
    label: LabelColumn = None,
    settings: Settings = None,
    # How much to keep: one of these five.
    keep: Annotated[
        str | None, typer.Option(help="Heads to keep: a count, or a fraction such as 0.5.")
    ] = None,
    keep_params: Annotated[
        float | None, typer.Option(help="Fraction of the parameters to keep.")
    ] = None,
    keep_macs: Annotated[
        float | None, typer.Option(help="Fraction of the multiply-adds to keep.")
    ] = None,
    keep_kv: Annotated[
        float | None, typer.Option(help="Fraction of the KV cache's bytes to keep.")
    ] = None,
    speedup: Annotated[
        float | None,
        typer.Option(
            help=(
                "Or, with --data: how many times as fast, measured here for batches of 32 of your "
                "rows (--set select.latency.batch_size=8); removes heads and neurons."
            )
        ),
    ] = None,
    feed_forward: Annotated[
        bool | None,
        typer.Option(
            "--feed-forward/--no-feed-forward",
            help="With --data: choose neurons of feed-forwards, too; the default with --speedup.",
        ),
    ] = None,
    # How to choose them.
    selector: Annotated[
        str | None,
        typer.Option(
            help="With --scores or --data; by default what suits the scores.",
            autocompletion=selector_names,
        ),
    ] = None,
    min_heads: Annotated[
        int | None,
        typer.Option(
            help=(
                "With --scores or --data: fewest heads, or neurons, per layer; default 1, or 0 "
                "where measured prices (ladder) weigh heads against neurons."
            )
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            help=(
                "With --scores or --data: GPUs that will share each layer. The numbers of kept "
                "key/value heads, and of kept neurons, are multiples of it."
            )
        ),
    ] = None,
    # How to save the cut model.
    format: Annotated[
        str,
        typer.Option(
            help=(
                "headprune (every cut, bit for bit), transformers (loads without headprune, where "
                "the configuration can say the head counts), remote-code (a modelling file beside "
                "the weights, read with trust_remote_code=True; vLLM), gguf (llama.cpp), or auto: "
                "transformers where it applies, else headprune."
            )
        ),
    ] = "headprune",
    max_shard_size: Annotated[
        str, typer.Option(help="Larger models are written in several files.")
    ] = "50GB",
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Upload OUT, without OUT/run, to the Hugging Face hub, too."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: make a new repository private.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --format gguf: f32, f16, bf16 or q8_0; default the model's own."),
    ] = None,
    no_tokenizer: Annotated[
        bool,
        typer.Option(
            "--no-tokenizer",
            help="With --format gguf: leave the tokenizer out; llama.cpp then takes token ids.",
        ),
    ] = False,
    # How to read the model.
    merge_adapters: Annotated[
        bool,
        typer.Option(
            "--merge-adapters",
            help="For a folder of PEFT adapters: add them to their base model first.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="With --data: only estimate time and memory; nothing is written.",
        ),
    ] = False,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming",
            help=(
                "With --plan or --scores: copy the kept weights from file to file, without loading "
                "the model; nothing is run, so the cut is not compared with the gated model."
            ),
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Cut, prove and save a model; with data, also score, refit and measure it."""
    with guarded(debug):
        # 1. Check the options before anything is loaded.
        _check_format(format, dtype, no_tokenizer)
        folder = out or Path(pruned_name(model))
        _check_out(folder, on_data=data is not None)
        sources = {"--plan": plan, "--scores": scores, "--data": data}
        columns = {"--text": text, "--text-pair": text_pair, "--label": label}
        with_data = {"--task": task, **columns, "--set": settings, "--speedup": speedup}
        if dry_run:
            with_data["--dry-run"] = "--dry-run"
        if feed_forward is not None:
            flag = "--feed-forward" if feed_forward else "--no-feed-forward"
            with_data[flag] = flag
        _check_source(sources, with_data)
        if streaming and data is not None:
            must = "given with --plan or --scores: streaming runs no model"
            raise InvalidValue("--streaming", must, "--data")
        amounts = {
            "--keep": keep,
            "--keep-params": keep_params,
            "--keep-macs": keep_macs,
            "--keep-kv": keep_kv,
            "--speedup": speedup,
        }
        chosen = _Choice(_given(amounts), selector, min_heads, feed_forward, tensor_parallel)
        # Reading the budget checks it, so that is done now, too.
        recipe_settings, decided = [], None
        if data is not None:
            recipe_settings = _as_settings(chosen, settings)
        else:
            decided = _decide(plan, scores, chosen)
        _check_model(model, merge_adapters, max_shard_size)
        _check_push(push, private)

        # 2. Cut: from file to file, by the plan, or by a run on the data.
        target = _Target(model, folder, format, max_shard_size, dtype, push, private, no_tokenizer)
        named = {"task": task, "text": text, "text_pair": text_pair, "label": label}
        if dry_run:
            _estimate(target, str(data), named, recipe_settings, quiet, as_json)
            return
        if streaming:
            _stream(target, decided, as_json)
            return
        if decided is not None:
            cut = _by_plan(model, decided)
        else:
            cut = _on_data(target, str(data), named, recipe_settings, quiet)

        # 3. Save and report.
        written = _write(cut, target)
        if cut.copy is not None:
            shutil.rmtree(cut.copy)
        if as_json:
            emit(_as_data(cut, target, written))
        else:
            _print(cut, target, written)


@dataclass(frozen=True)
class _Choice:
    """How heads are chosen without a plan.

    Args:
        amounts: The budgets that were given, by option; one of them is needed.
        selector: Name of the selector; None is the default.
        min_heads: Heads to keep per layer, at least; None is the default.
        feed_forward: Whether neurons are chosen, too; None is the default.
        tensor_parallel: GPUs that share each layer; None is the default.
    """

    amounts: Mapping[str, str | float]
    selector: str | None
    min_heads: int | None
    feed_forward: bool | None = None
    tensor_parallel: int | None = None


@dataclass(frozen=True)
class _Target:
    """What is cut, and how the result is saved.

    Args:
        model: The model as it was given.
        out: Folder for the cut model.
        format: The format that was asked for.
        max_shard_size: Largest file of weights.
        dtype: Of a GGUF file.
        push: The repository of the hub that it goes to, too.
        private: Whether a new repository is private.
        no_tokenizer: Whether a GGUF file has no tokenizer.
    """

    model: str
    out: Path
    format: str
    max_shard_size: str
    dtype: str | None
    push: str | None
    private: bool
    no_tokenizer: bool


@dataclass(frozen=True)
class _CutModel:
    """A cut model in memory, with its plan and a report.

    Args:
        model: The model.
        plan: The plan.
        example: A batch for it; None if none could be made up.
        text: What was done, for people.
        facts: The same as data.
        record: The same for the model card.
        notes: Of the plan, where they were not printed yet.
        copy: A folder that has the model too, to be removed when the model is saved.
    """

    model: Any
    plan: PruningPlan
    example: Any
    text: str
    facts: dict[str, Any]
    record: RunRecord
    notes: tuple[str, ...]
    copy: Path | None = None


@dataclass(frozen=True)
class _Written:
    """The format that was saved, why others do not apply, copied files, and the hub's address."""

    format: Format
    formats: Mapping[Format, str | None]
    files: list[str]
    pushed: str | None


# ----------------------------------------------------------------------------------- option checks


def _given(options: Mapping[str, str | float | None]) -> dict[str, str | float]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def _check_format(format: str, dtype: str | None, no_tokenizer: bool) -> None:
    """Refuse an unknown format, and a GGUF file without its package or of an unknown dtype."""
    from headprune.checkpoints import gguf_file
    from headprune.checkpoints.checkpoint import FORMATS

    check_one_of("--format", format, ("auto", *FORMATS))
    gguf_file.check_dtype(dtype, format, "--dtype")
    if format == "gguf":
        gguf_file.check_installed()
    elif no_tokenizer:
        raise InvalidValue("--no-tokenizer", "given with --format gguf only", repr(format))


def _check_out(out: Path, on_data: bool) -> None:
    """Refuse a folder with files, except those of a killed run on data."""
    from headprune.run.journal import RUN

    allowed = (RUN,) if on_data else ()
    if occupied(out, allowed):
        hint = "Name another with --out."
        raise InvalidValue("--out", "a new or an empty folder", str(out), hint)


def _check_source(sources: Mapping[str, object], with_data: Mapping[str, object]) -> None:
    """Require exactly one source of the plan; refuse options that only work with --data."""
    # 1. Exactly one source.
    given = [option for option, value in sources.items() if value is not None]
    if len(given) != 1:
        must = f"given one of {', '.join(sources)}"
        got = " and ".join(given) or "none"
        raise InvalidValue("prune", must, got, "For example: --data rows.csv --keep 0.5.")
    # 2. Options that only a run on data has.
    for option, value in with_data.items():
        if value and given != ["--data"]:
            raise InvalidValue(option, "given with --data only", value)


def _check_model(model: str, merge: bool, max_shard_size: str) -> None:
    """Refuse adapters that nobody asked to merge, and a shard size that is none."""
    from headprune.checkpoints import weights
    from headprune.data.adapters import is_adapter
    from headprune.data.models import resolve_path
    from headprune.run.subject import quiet as quiet_libraries

    folder = resolve_path(model, "--model")
    # Merging changes what the user has, so it is done only if asked for.
    if is_adapter(Path(folder)) and not merge:
        must, got = "a whole model, or given with --merge-adapters", f"{folder}, PEFT adapters"
        hint = "With it the adapters are added to their base model, which is then cut. "
        hint += "Both can be cut side by side in Python, see docs/checkpoints.md."
        raise InvalidValue("--model", must, got, hint)
    if merge and not is_adapter(Path(folder)):
        must = "given with a folder of PEFT adapters only"
        raise InvalidValue("--merge-adapters", must, folder)
    weights.check_shard_size(max_shard_size, "--max-shard-size")
    quiet_libraries()


def _check_push(push: str | None, private: bool) -> None:
    """Refuse a repository that cannot be written, before any long work."""
    from headprune.checkpoints.hub import check_access

    if push is not None:
        check_access(push, "--push")
    elif private:
        raise InvalidValue("--private", "given with --push only", "given")


# ------------------------------------------------------------------------------- choice of heads


def _as_settings(chosen: _Choice, settings: list[str] | None) -> list[str]:
    """Express budget and selector as settings of the guessed recipe; the user's own come last."""
    from headprune.core.plan import read_keep

    option, amount = _one_budget(chosen.amounts, "--data")
    if isinstance(amount, str):
        named = any(setting.startswith("select.must_remove") for setting in settings or ())
        amount = read_keep(amount, option, whole=named)
    lines = [f"select.{_kind(option)}={amount}"]
    if option != "--keep":  # the guessed recipe has this budget
        lines.append("select.keep_heads=null")
    neurons = option == "--speedup" if chosen.feed_forward is None else chosen.feed_forward
    if neurons:
        lines += _WITH_NEURONS
    if chosen.selector is not None:
        lines.append(f"select.selector={chosen.selector}")
    if chosen.min_heads is not None:
        lines.append(f"select.settings.min_heads={chosen.min_heads}")
    if chosen.tensor_parallel is not None:
        lines.append(f"select.tensor_parallel={chosen.tensor_parallel}")
    return [*lines, *(settings or ())]


def _decide(plan: Path | None, scores: Path | None, chosen: _Choice) -> PruningPlan:
    """Load the plan, or make it from the scores."""
    from headprune.core.plan import PruningPlan
    from headprune.core.scores import HeadScores
    from headprune.selection import Selector, registry
    from headprune.selection._api import default_selector, select

    # A plan says everything, so nothing else may be given with it.
    if plan is not None:
        unused = {
            "--selector": chosen.selector,
            "--min-heads": chosen.min_heads,
            "--tensor-parallel": chosen.tensor_parallel,
        }
        for name, value in {**chosen.amounts, **unused}.items():
            if value is not None:
                raise InvalidValue(name, "left out with --plan, which has the heads to keep", value)
        return PruningPlan.load(plan)
    assert scores is not None  # as `_check_source` made sure
    budget = _budget(*_one_budget(chosen.amounts, "--scores"), chosen.tensor_parallel)
    found = HeadScores.load(scores)
    name = chosen.selector or default_selector(found, budget)
    _, selector = registry.resolve(name, Selector, "--selector")
    if chosen.min_heads is not None:
        selector = replace(selector, min_heads=chosen.min_heads)
    return select(found, budget, selector)


def _one_budget(amounts: Mapping[str, str | float], source: str) -> tuple[str, str | float]:
    """Return the option and the amount of the only budget."""
    if len(amounts) > 1:
        option = next(iter(amounts))
        raise InvalidValue(option, "the only budget", " and ".join(amounts), "Give one of them.")
    if not amounts:
        others = "--keep-params, --keep-macs, --keep-kv"
        if source == "--data":
            others += ", --speedup"
        must = f"given with {source}, or one of {others}"
        hint = "For example --keep 0.5, or --keep 36."
        raise InvalidValue("--keep", must, "nothing", hint)
    return next(iter(amounts.items()))


def _kind(option: str) -> str:
    """The recipe key of a budget's option."""
    if option == "--keep":
        return "keep_heads"
    return option.removeprefix("--").replace("-", "_")


def _budget(option: str, amount: str | float, tensor_parallel: int | None) -> Budget:
    from headprune.core.plan import Budget, read_keep

    if isinstance(amount, str):
        amount = read_keep(amount, option)
    return Budget(**{_kind(option): amount}, tensor_parallel=tensor_parallel)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- cut


def _stream(target: _Target, plan: PruningPlan | None, as_json: bool) -> None:
    """Cut from file to file, without loading the model."""
    from headprune.checkpoints.streaming import prune_checkpoint
    from headprune.data.models import resolve_path

    folder = resolve_path(target.model, "--model")
    assert plan is not None  # `prune` refuses --data
    # 1. Refuse what needs the model in memory.
    if target.format not in ("auto", "headprune"):
        must = "headprune with --streaming; the others compare outputs"
        raise InvalidValue("--format", must, repr(target.format))
    if not Path(folder).is_dir():
        hint = f"Download it first: hf download {target.model} --local-dir FOLDER."
        raise InvalidValue("--model", "a folder with --streaming", repr(target.model), hint)
    # 2. Copy what is kept.
    size = target.max_shard_size
    report = prune_checkpoint(folder, plan, target.out, max_shard_size=size, copy_companions=True)
    files = list(report.copied)
    pushed = _push(target)
    # The report's files have a key of their own, and the plan says which sites have neurons.
    if as_json:
        others = ("copied", "feed_forwards")
        facts = {name: value for name, value in vars(report).items() if name not in others}
        data = {
            "out": str(target.out),
            "plan": plan.to_dict(),
            "report": facts,
            "format": "headprune",
            "copied": files,
            "pushed": pushed,
        }
        emit(data)
        return
    echo(str(report))
    for warning in report.warnings:
        say(f"{WARNING}{warning}")
    echo(_wrote(target, "headprune", files, pushed))


def _by_plan(model: str, plan: PruningPlan) -> _CutModel:
    """Load the model and cut it by a plan."""
    from headprune.core.record import RunRecord
    from headprune.data.models import open_model
    from headprune.model.examples import example_batch
    from headprune.run.journal import now
    from headprune.surgery.prune import prune_

    # A batch of made-up tokens, images or waves is enough to compare outputs.
    subject = open_model(model, "--model")
    example = example_batch(subject)
    if example is None:
        text = "no inputs could be made up for this model; "
        text += "the cut is not compared with the gated model"
        say(f"{WARNING}{text}")
    report = prune_(subject, plan, example=example)
    facts = {
        "removed": {site: list(heads) for site, heads in report.removed},
        "params_before": report.params_before,
        "params_after": report.params_after,
        "max_difference": report.proof.max_difference if report.proof else None,
        "warnings": list(report.warnings),
    }
    proofs = (report.proof,) if report.proof else ()
    record = RunRecord("prune", "done", "prune", now(), plan=plan, proofs=proofs)
    return _CutModel(subject, plan, example, str(report), {"report": facts}, record, plan.notes)


def _check_before_run(target: _Target, recipe: Recipe) -> None:
    """Refuse a format that cannot hold a cut of the model, or its tokenizer, before a run."""
    from headprune.checkpoints import companions, gguf_tokenizer
    from headprune.checkpoints.any_cut import check_any_cut
    from headprune.data.imported import own_layouts
    from headprune.data.models import model_without_weights, resolve_path
    from headprune.run import recovering

    if target.format in ("auto", "headprune"):
        return
    model: Any = model_without_weights(target.model, recipe.task)
    if model is None:
        return
    layouts = own_layouts(recipe.model)
    neurons = recipe.select.feed_forward
    biased = recovering.biased(recipe)
    check_any_cut(model, target.format, "--format", neurons, layouts, biased)
    selector = recipe.select.selector
    if target.format == "transformers" and selector != "uniform":
        say(
            f"{WARNING}--format transformers needs equally many heads, and neurons, in all layers;"
            f" selector {selector} may keep others, uniform does not. A cut that does not fit can"
            " be saved by this command with another --format: its run is kept."
        )
    if target.format == "gguf" and not target.no_tokenizer:
        folder = companions.home_of(resolve_path(target.model, "--model"))
        gguf_tokenizer.check(folder, model.config.vocab_size)


def _estimate(
    target: _Target,
    data: str,
    named: dict[str, Any],
    settings: list[str],
    quiet: bool,
    as_json: bool,
) -> None:
    """Estimate a run on the data by a batch or two, and print it."""
    from headprune.data.guess import guess
    from headprune.run.dry import dry_run
    from headprune.run.on_data import checked_recipe

    say_line = watching(quiet)["say"]
    guessed = guess(target.model, data, **named)
    recipe = checked_recipe(guessed, settings, partial(_check_before_run, target), say_line)
    show_estimate(dry_run(recipe, say=say_line), as_json)


def _on_data(
    target: _Target,
    data: str,
    named: dict[str, Any],
    settings: list[str],
    quiet: bool,
) -> _CutModel:
    """Score, cut, refit and measure on data, in a run inside the model's folder."""
    from headprune.model.examples import example_batch
    from headprune.report.verdict import verdict
    from headprune.run.journal import MODEL, RUN
    from headprune.run.on_data import prune_on_data

    # If this is killed and called again, the run resumes, or is reused.
    folder = target.out / RUN
    check = partial(_check_before_run, target)
    watched, said = watching(quiet), set()

    def say_and_note(line: str) -> None:
        # A stage begins as "[name] 5 of 12"; one that is reused "was done before".
        if not line.endswith("was done before"):
            said.add(line.partition(" ")[0])
        watched["say"](line)

    progress = {**watched, "say": say_and_note}
    cut, record = prune_on_data(
        target.model, data, folder, **named, settings=settings, check=check, **progress
    )
    assert record.plan is not None  # a finished run has one
    judged = verdict(record, str(folder))
    # Print the table unless the progress lines showed it; those of a resumed run are incomplete.
    shown = not quiet and all(f"[{stage}]" in said for stage in ("select", "compare"))
    table = "" if shown else f"\n{record}\n"
    text = f"{judged}\n{table}\nreport: {folder / 'report.html'}"
    notes = () if shown else record.plan.notes
    facts = {"record": record.to_dict()}
    model, example = folder / MODEL, example_batch(cut)
    return _CutModel(cut, record.plan, example, text, facts, record, notes, model)


# ------------------------------------------------------------------------------- save and report


def _write(cut: _CutModel, target: _Target) -> _Written:
    """Save the cut model with the files that belong to it, such as its tokenizer."""
    from headprune.checkpoints import companions
    from headprune.checkpoints.checkpoint import applicable_formats, save_pretrained
    from headprune.data.models import resolve_path

    formats = applicable_formats(cut.model)
    format = _choose_format(target.format, formats)
    folder = resolve_path(target.model, "--model")
    # The other files of the model's folder. Its code is left out where new code is written.
    has_code, has_tokenizer = format != "remote-code", not target.no_tokenizer
    files = companions.CompanionFiles(folder, code=has_code, tokenizer=has_tokenizer)
    save_pretrained(
        cut.model,
        target.out,
        format=format,
        max_shard_size=target.max_shard_size,
        plan=cut.plan,
        record=cut.record,
        example=cut.example,
        processor=files,
        dtype=target.dtype,  # type: ignore[arg-type]
    )
    return _Written(format, formats, files.copied, _push(target))


def _push(target: _Target) -> str | None:
    """Upload the folder where that was asked for; return the address."""
    from headprune.checkpoints.hub import upload

    if target.push is None:
        return None
    return upload(target.out, target.push, private=target.private or None)


def _choose_format(asked: str, formats: Mapping[Format, str | None]) -> Format:
    """Choose the format, and refuse one that cannot hold this cut.

    Raises:
        UnsupportedModel: the format cannot hold this cut.
    """
    from headprune.checkpoints.checkpoint import automatic_format

    # A reason in `formats` says why a format does not apply.
    if asked == "auto":
        return automatic_format(formats["transformers"])
    format = next(name for name in formats if name == asked)
    reason = formats[format]
    if reason:
        others = ", ".join(name for name, against in formats.items() if not against)
        got, hint = f"{asked!r}: {reason}", f"Those that can: {others}."
        raise UnsupportedModel("--format", "one that can hold this cut", got, hint)
    return format


def _as_data(cut: _CutModel, target: _Target, written: _Written) -> dict[str, Any]:
    """The result for ``--json``."""
    return {
        "out": str(target.out),
        "plan": cut.plan.to_dict(),
        **cut.facts,
        "format": written.format,
        "formats": written.formats,
        "copied": written.files,
        "pushed": written.pushed,
    }


def _print(cut: _CutModel, target: _Target, written: _Written) -> None:
    """Print the result for people."""
    # What was done.
    echo(cut.text)
    for note in cut.notes:
        echo(f"note: {note}")
    # Which formats can hold this cut, and which one was written.
    for name, reason in written.formats.items():
        answer = f"no; {reason}" if reason else "yes"
        echo(f"format {name}: {answer}")
    echo(_wrote(target, written.format, written.files, written.pushed))
    if written.format == "remote-code":
        # The user publishes this code with the model, and should read it first.
        echo("loading it with trust_remote_code=True runs this file:")
        modules = target.out.glob("modeling_headprune_*.py")
        echo("".join(path.read_text(encoding="utf-8") for path in modules))


def _wrote(target: _Target, format: str, files: list[str], pushed: str | None) -> str:
    more = "".join(f", {file}" for file in files)
    text = f"wrote {target.out} (format {format}{more})"
    return f"{text}\nuploaded to {pushed}" if pushed else text
