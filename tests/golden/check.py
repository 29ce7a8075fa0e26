"""What every stored file is held to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headprune.core.codec import Value


def check_file(
    path: Path, kinds: Mapping[str, type[Value]], facts: Mapping[str, Callable[[Any], bool]]
) -> None:
    """``KIND-VERSION.json`` loads today, says what it said, and is still written so if its version
    is today's."""
    name, _, version = path.stem.rpartition("-")
    kind = kinds[name]
    value = kind.load(path)
    assert facts[path.stem](value)
    assert json.loads(path.read_text(encoding="utf-8"))["version"] == int(version)
    if int(version) == kind.SCHEMA_VERSION:
        assert value.to_json() == path.read_text(encoding="utf-8"), (
            "the stored form changed: raise SCHEMA_VERSION"
        )
