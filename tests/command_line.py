"""The command line, called within the process of the tests."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from headprune.cli.main import app


def call(line: str, *words: object, **settings: Any) -> Any:
    """Runs ``headprune`` with the words of a line; words after it may hold spaces."""
    return CliRunner().invoke(app, [*line.split(), *map(str, words)], **settings)


def done(line: str, *words: object) -> Any:
    """Runs a command that must end well."""
    result = call(line, *words)
    assert result.exit_code == 0, result.output
    return result


def json_of(line: str, *words: object) -> Any:
    """What a command that ends well prints as JSON."""
    return json.loads(done(line, *words, "--json").stdout)


def refused(line: str, *words: object) -> str:
    """The message of a command that takes its input for bad."""
    result = call(line, *words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    message: str = result.stderr
    return message
