"""Reads recipes: YAML text and ``--set`` overrides become plain data."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.opening import NotAFile, check_file, read_text

_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"
)  # YAML 1.2; PyYAML alone takes 1e-3 for a string


#: Characters of a text, sections within sections, digits of a whole number: far above any recipe.
_LONGEST, _DEEPEST, _DIGITS = 200_000, 40, 100


class _Loader(yaml.SafeLoader):
    """YAML without tags that run code, with the numbers of YAML 1.2, and with an error on a
    repeated key.

    Aliases are refused: some lines of them can stand for any amount of data.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not read; write it out", mark
            )
        self.depth += 1
        if self.depth > _DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"nested more than {_DEEPEST} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # which PyYAML refuses in words
            if key in seen:
                again = f"the key {key!r} stands here again"
                raise yaml.constructor.ConstructorError(None, None, again, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _DIGITS:
            longer = f"a whole number of more than {_DIGITS} digits"
            raise yaml.constructor.ConstructorError(None, None, longer, node.start_mark)
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """The data in a YAML text.

    Raises:
        InvalidValue: it is not valid YAML; the message says in which line. Or it is far too long.
    """
    if len(text) > _LONGEST:
        raise InvalidValue(where, f"YAML of at most {_LONGEST:,} characters", f"{len(text):,}")
    try:
        return yaml.load(text, _Loader)  # a SafeLoader  # nosec B506
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise InvalidValue(where, "valid YAML", " ".join(str(error).split())) from None


def recipe_folders() -> list[Path]:
    """Folders with shipped recipes: inside the package (a wheel) or beside it (a checkout)."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent
    checkout = (beside / "recipes",) if (beside / "pyproject.toml").is_file() else ()
    return [folder for folder in (package / "recipes", *checkout) if folder.is_dir()]


def shipped_recipes() -> dict[str, Path]:
    """Every shipped recipe by name."""
    found = {path.stem: path for folder in recipe_folders() for path in folder.rglob("*.yaml")}
    return dict(sorted(found.items()))


def locate(recipe: str | Path) -> Path:
    """The file of a recipe, given by path or by the name of a shipped one.

    Raises:
        InvalidValue: no such file.
        UnknownName: no shipped recipe of this name.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    if path.exists() and not path.is_dir():
        check_file(path)
    shipped = shipped_recipes()
    if str(recipe) in shipped:
        return shipped[str(recipe)]
    hint = did_you_mean(path.stem, shipped)
    if path.is_dir():
        raise InvalidValue(str(recipe), "a recipe file or the name of a recipe", "a folder", hint)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise InvalidValue(
            str(recipe), "an existing recipe file or the name of a shipped recipe", "no file", hint
        )
    raise UnknownName(
        "recipe", "a recipe file or the name of a shipped recipe", repr(str(recipe)), hint
    )


def read_raw(path: Path) -> dict[str, Any]:
    """The data of a recipe file, unchecked.

    Raises:
        InvalidValue: it cannot be read or is not a YAML mapping.
    """
    try:
        text = read_text(path, 4 * _LONGEST)  # bytes
    except NotAFile:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(str(path), "a readable recipe", error) from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InvalidValue(str(path), "a YAML mapping from keys to values", type(data).__name__)
    return data


def override(raw: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """A copy of ``raw`` with every ``dotted.path=value`` set; values are YAML, list items are
    numbers.

    >>> override({"score": {"scorer": "taylor"}}, ["score.scorer=random", "select.keep_heads=0.5"])
    {'score': {'scorer': 'random'}, 'select': {'keep_heads': 0.5}}

    Raises:
        InvalidValue: a setting without ``=``, or one that goes through a value that is no section.
    """
    result: dict[str, Any] = _copied(raw)
    for setting in settings:
        path, equals, text = setting.partition("=")
        steps = path.strip().split(".")
        if not equals or not all(steps):
            hint = "For example --set score.scorer=random."
            raise InvalidValue(
                f"--set {setting}", "written key=value, with a dotted key", repr(setting), hint
            )
        _put(result, steps, parse_yaml(text, f"--set {path}"), path)
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value


def _put(target: Any, steps: list[str], value: Any, path: str) -> None:
    for i, step in enumerate(steps):
        here = ".".join(steps[:i]) or "the recipe"
        key: Any = step
        if isinstance(target, list):
            if not step.isdigit() or int(step) >= len(target):
                raise InvalidValue(
                    f"--set {path}", f"an item of {here}, 0 to {len(target) - 1}", repr(step)
                )
            key = int(step)
        elif not isinstance(target, dict):
            raise InvalidValue(
                f"--set {path}", f"a key inside {here}", f"{here} is {target!r}, no section"
            )
        if i == len(steps) - 1:
            target[key] = value
            return
        if isinstance(target, dict) and target.get(key) is None:
            target[key] = {}
        target = target[key]
