"""Options, output, errors and exit codes that all commands share."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.core.display import CONTROL, clean
from headprune.core.errors import WARNING, HeadPruneError, ProcessFailed, VerificationFailed

if TYPE_CHECKING:
    from headprune.run.dry import DryRun

#: Exit codes.
FAILED, BAD_INPUT = 1, 2


# ------------------------------------------------------------------------ completions and options


def recipe_names() -> list[str]:
    """Complete a recipe's name in a shell, which completes files by itself."""
    from headprune.recipes.reading import shipped_recipes

    return list(shipped_recipes())


def scorers_of(key: str) -> Callable[[], list[str]]:
    """Return a completion of ``key=SCORER``."""

    def offered() -> list[str]:
        from headprune.scoring import registry

        return [f"{key}={name}" for name in registry.names()]

    return offered


def selector_names() -> list[str]:
    """Complete a selector's name in a shell."""
    from headprune.selection import registry

    return registry.names()


RecipeName = Annotated[
    str,
    typer.Argument(
        help="A recipe file, or the name of a shipped recipe.", autocompletion=recipe_names
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the recipe; may be repeated.",
        autocompletion=scorers_of("score.scorer"),
    ),
]
TextColumn = Annotated[str | None, typer.Option("--text", help="With --data: the column of text.")]
PairColumn = Annotated[
    str | None,
    typer.Option("--text-pair", help="With --data: the column of the second text of a pair."),
]
LabelColumn = Annotated[
    str | None, typer.Option("--label", help="With --data: the column of labels.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write JSON to standard output, and nothing else there.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="No progress: only results, warnings and errors.")
]


# ----------------------------------------------------------------------------------------- output


def say(line: str) -> None:
    """Print a line of progress to standard error; standard output has only the result."""
    echo(line, err=True)


def echo(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print text without control characters, which names and notes from files may contain."""
    typer.echo(clean(text), nl=nl, err=err)


def watching(quiet: bool) -> dict[str, Any]:
    """Return the arguments that show progress: lines, and bars on a terminal.

    Without progress there are only the lines that begin as a warning.
    """
    if quiet:
        return {"say": _say_warning, "progress": False}
    return {"say": say, "progress": None}


def _say_warning(line: str) -> None:
    if line.strip().startswith(WARNING):
        say(line.strip())


def on_terminal(quiet: bool) -> bool:
    """Whether to show a progress bar, which needs a terminal on standard error."""
    return not quiet and sys.stderr.isatty()


def emit(data: Any) -> None:
    """Print JSON to standard output, with control characters escaped."""
    # JSON has no NaN, and other programs refuse it.
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    typer.echo(CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def show(value: Any, text: str | None = None) -> None:
    """Print a value to standard output: in colour on a terminal, plain elsewhere."""
    from rich.console import Console

    # No wrapping and no guesses at what to highlight: the text is that of `str`.
    console = Console(soft_wrap=True, highlight=False)
    markup = getattr(value, "__rich__", None)
    if text is None and markup is not None and console.is_terminal:
        console.print(markup())
    else:
        echo(text if text is not None else str(value))


def show_estimate(estimate: DryRun, as_json: bool) -> None:
    """Print what a dry run found."""
    if as_json:
        emit({**estimate.to_dict(), "seconds": estimate.seconds})
    else:
        show(estimate)


# ----------------------------------------------------------------------------------------- errors


@contextmanager
def guarded(debug: bool) -> Iterator[None]:
    """Turn errors into a message and an exit code: 2 for bad input, else 1."""
    try:
        with warnings.catch_warnings():
            # One line per warning, without the place in the code.
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            yield
    except KeyboardInterrupt:  # what was finished is in the folder, and can be resumed
        say("interrupted")
        raise typer.Exit(FAILED) from None
    except BrokenPipeError:
        # `headprune ls | head`: Python must not flush into the closed pipe when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(FAILED) from None
    except HeadPruneError as error:  # it says what to do
        _print_error(error, str(error), debug)
        failed = isinstance(error, VerificationFailed | ProcessFailed)
        raise typer.Exit(FAILED if failed else BAD_INPUT) from None
    except typer.Exit:  # a command that ends with a code of its own
        raise
    except Exception as error:  # a mistake of headprune's, or of the user's own code
        more = "" if debug else " (--debug shows where)"
        _print_error(error, f"{type(error).__name__}: {error}{more}", debug)
        raise typer.Exit(FAILED) from None


def _print_error(error: Exception, text: str, debug: bool) -> None:
    if debug:
        say("".join(traceback.format_exception(error)).rstrip())
    say(f"error: {text}")


def _show_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    # Warnings for developers, such as deprecations, are not shown.
    if issubclass(category, UserWarning):
        say(f"{WARNING}{message}")
