"""Read recipes: YAML text and ``--set`` overrides become plain data."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.opening import NotAFile, check_file, read_text

#: A float in YAML 1.2; PyYAML alone reads 1e-3 as a string.
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")

# Limits far above any recipe, for files from anywhere.
#: Characters of a text.
_LONGEST = 200_000
#: Sections within sections.
_DEEPEST = 40
#: Digits of a whole number.
_DIGITS = 100


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers, no tags that run code, and an error on a repeated key.

    Aliases are refused: a few lines of them can expand to any amount of data.
    """

    depth = 0

    def compose_node(
        self,
        parent: yaml.Node | None,
        index: Any,
    ) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise self._refusal("aliases (*name) are not read; write it out")
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self._refusal(f"nested more than {_DEEPEST} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refusal(self, problem: str) -> yaml.composer.ComposerError:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        return yaml.composer.ComposerError(None, None, problem, mark)

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,
    ) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # PyYAML itself refuses it below
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
    """Parse a YAML text.

    Raises:
        InvalidValue: it is not valid YAML (the message names the line), or far too long.
    """
    if len(text) > _LONGEST:
        raise InvalidValue(where, f"YAML of at most {_LONGEST:,} characters", f"{len(text):,}")
    try:
        return yaml.load(text, _Loader)  # a SafeLoader  # nosec B506
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise InvalidValue(where, "valid YAML", " ".join(str(error).split())) from None


# ---------------------------------------------------------------- files


def recipe_folders() -> list[Path]:
    """Return the folders of shipped recipes.

    They are inside the package in a wheel, and next to it in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    folders = [package / "recipes"]
    if (package.parent / "pyproject.toml").is_file():
        folders.append(package.parent / "recipes")
    return [folder for folder in folders if folder.is_dir()]


def shipped_recipes() -> dict[str, Path]:
    """Return the file of every shipped recipe, by name."""
    paths: dict[str, Path] = {}
    for folder in recipe_folders():
        paths.update({path.stem: path for path in folder.rglob("*.yaml")})
    return dict(sorted(paths.items()))


def locate(recipe: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        recipe: A path, or the name of a shipped recipe.

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
        must = "an existing recipe file or the name of a shipped recipe"
        raise InvalidValue(str(recipe), must, "no file", hint)
    must = "a recipe file or the name of a shipped recipe"
    raise UnknownName("recipe", must, repr(str(recipe)), hint)


def read_raw(path: Path) -> dict[str, Any]:
    """Read a recipe file, unchecked.

    Raises:
        InvalidValue: it cannot be read or is not a YAML mapping.
    """
    try:
        # A character has at most 4 bytes.
        text = read_text(path, 4 * _LONGEST)
    except NotAFile:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(str(path), "a readable recipe", error) from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InvalidValue(str(path), "a YAML mapping from keys to values", type(data).__name__)
    return data


# ---------------------------------------------------------------- overrides


def override(raw: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Return a copy of ``raw`` with every ``dotted.path=value`` set.

    Values are YAML; items of lists are numbers.

    >>> override({"score": {"scorer": "taylor"}}, ["score.scorer=random", "select.keep_heads=0.5"])
    {'score': {'scorer': 'random'}, 'select': {'keep_heads': 0.5}}

    Raises:
        InvalidValue: a setting without ``=``, or one that goes through a value that is no section.
    """
    result: dict[str, Any] = _copy(raw)
    for setting in settings:
        path, equals, text = setting.partition("=")
        steps = path.strip().split(".")
        if not equals or not all(steps):
            must = "written key=value, with a dotted key"
            hint = "For example --set score.scorer=random."
            raise InvalidValue(f"--set {setting}", must, repr(setting), hint)
        _put(result, steps, parse_yaml(text, f"--set {path}"), path)
    return result


def _copy(value: Any) -> Any:
    """Copy sections and lists, any mapping as a dict."""
    if isinstance(value, Mapping):
        return {key: _copy(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return list(map(_copy, value))
    return value


def _put(data: Any, steps: list[str], value: Any, path: str) -> None:
    """Set the value at the end of a path; sections that are missing are made."""
    for i, step in enumerate(steps):
        here = ".".join(steps[:i]) or "the recipe"
        key = _key_in(data, step, here, path)
        if i == len(steps) - 1:
            data[key] = value
            return
        if isinstance(data, dict) and data.get(key) is None:
            data[key] = {}
        data = data[key]


def _key_in(data: Any, step: str, here: str, path: str) -> str | int:
    """Return the key or index that a step names in a section or list."""
    if isinstance(data, dict):
        return step
    if not isinstance(data, list):
        must, got = f"a key inside {here}", f"{here} is {data!r}, no section"
        raise InvalidValue(f"--set {path}", must, got)
    if not step.isdigit() or int(step) >= len(data):
        must = f"an item of {here}, 0 to {len(data) - 1}"
        raise InvalidValue(f"--set {path}", must, repr(step))
    return int(step)
