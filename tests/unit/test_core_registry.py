"""Registries over a package made for the test: names from files, entry points, clashes,
laziness."""

import importlib
import importlib.metadata
import sys

import pytest

import headprune as hp
from headprune.core.errors import InvalidValue, NameClash, UnknownName
from headprune.core.registry import Registry, camel_case
from headprune.selection import registry as selectors
from tests.selection_problems import make, site

FILES = {
    "__init__.py": "",
    "_shared.py": "class Shared: pass\n",
    "slow_one.py": '"""The slow one, exactly.\n\nMore."""\nLOADED = True\nclass SlowOne: pass\n',
    "quick.py": "class Quick: pass\n",
    "broken.py": '"""Cannot be imported."""\nraise RuntimeError("imported")\n',
}


@pytest.fixture
def registry(tmp_path, monkeypatch):
    folder = tmp_path / "fake_entries"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    outside = tmp_path / "fake_outside.py"
    outside.write_text('class Far:\n    """From far away.\n\n    More."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield Registry("gadget", "fake_entries", "fake.gadgets")
    for name in [m for m in sys.modules if m.partition(".")[0] in ("fake_entries", "fake_outside")]:
        del sys.modules[name]


def entry_points(monkeypatch, *points, group="fake.gadgets"):
    """Makes these the entry points that are installed."""
    made = [importlib.metadata.EntryPoint(name, value, group) for name, value in points]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: [p for p in made if p.group == group]
    )


def test_names_are_the_files_without_underscore_and_are_listed_without_import(registry):
    assert registry.names() == ["broken", "quick", "slow_one"]
    assert list(registry) == registry.names()
    assert len(registry) == 3
    assert "quick" in registry
    assert "_shared" not in registry
    summaries = [registry.summary(name) for name in registry.names()]
    assert summaries == ["Cannot be imported.", "", "The slow one, exactly."]
    assert not [m for m in sys.modules if m.startswith("fake_entries.")], "an entry is imported"


def test_an_entry_is_imported_when_it_is_asked_for_and_only_then(registry):
    assert registry.get("slow_one").__name__ == "SlowOne"
    assert "fake_entries.slow_one" in sys.modules
    assert "fake_entries.quick" not in sys.modules
    assert registry.get("slow_one") is registry.get("slow_one")
    with pytest.raises(RuntimeError, match="imported"):
        registry.get("broken")


def test_the_attribute_can_be_another(registry):
    other = Registry("gadget", "fake_entries", "fake.gadgets", attribute=lambda name: "LOADED")
    assert other.get("slow_one") is True


def test_an_unknown_name_gets_a_suggestion_or_the_list(registry):
    with pytest.raises(UnknownName, match=r"a registered gadget, got 'quik'\. .*'quick'\?"):
        registry.get("quik")
    with pytest.raises(UnknownName, match=r"Known: broken, quick, slow_one\."):
        registry.get("zzz")
    for private in ("_shared", "__init__"):
        with pytest.raises(UnknownName):
            registry.get(private)
    with pytest.raises(LookupError):
        registry.summary("zzz")


def test_outside_packages_add_entries(registry, monkeypatch):
    entry_points(monkeypatch, ("far", "fake_outside:Far"))
    assert registry.names() == ["broken", "far", "quick", "slow_one"]
    assert "fake_outside" not in sys.modules
    assert registry.get("far").__name__ == "Far"
    assert registry.summary("far") == "From far away."
    with pytest.raises(UnknownName, match="Did you mean 'far'"):
        registry.get("fare")


def test_entry_points_of_another_group_are_not_ours(registry, monkeypatch):
    entry_points(monkeypatch, ("far", "fake_outside:Far"), group="fake.others")
    assert "far" not in registry


def test_a_clash_is_an_error_that_names_both(registry, monkeypatch):
    entry_points(monkeypatch, ("quick", "fake_outside:Far"))
    for attempt in (registry.names, registry.__len__, lambda: registry.get("quick")):
        with pytest.raises(NameClash, match=r"fake_entries has it.*fake_outside:Far") as caught:
            attempt()
        assert "Rename the entry point" in str(caught.value)
    entry_points(monkeypatch, ("far", "fake_outside:Far"), ("far", "elsewhere:Far"))
    with pytest.raises(NameClash, match=r"fake_outside:Far has it already, got elsewhere:Far"):
        registry.get("far")


def test_one_entry_point_seen_twice_is_no_clash(registry, monkeypatch):
    """A package that is installed and also on the path in development shows its entry points
    twice."""
    entry_points(monkeypatch, ("far", "fake_outside:Far"), ("far", "fake_outside:Far"))
    assert registry.names() == ["broken", "far", "quick", "slow_one"]
    assert registry.get("far").__name__ == "Far"


def test_camel_case():
    assert camel_case("global_topk") == "GlobalTopk"
    assert camel_case("taylor2") == "Taylor2"


def test_an_entry_must_be_of_the_kind_that_is_asked_for(registry):
    class Gadget:
        pass

    with pytest.raises(InvalidValue, match=r"'quick': .* derived from fake_entries\.Gadget"):
        registry.resolve("quick", Gadget, "here")
    assert registry.resolve("quick", registry.get("quick"), "here")[0] == "quick"


def test_an_installed_selector_is_found_by_name_and_by_value(tmp_path, monkeypatch):
    """The whole way, with the registry of the selectors."""
    (tmp_path / "fake_selector.py").write_text(
        "from dataclasses import dataclass\n"
        "from headprune.selection import Selector\n\n"
        "@dataclass(frozen=True)\n"
        "class First(Selector):\n"
        '    """Keeps the first unit of the first site."""\n\n'
        "    def keep(self, problem):\n"
        "        return frozenset({(0, 0)})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry_points(monkeypatch, ("first", "fake_selector:First"), group=selectors.group)
    monkeypatch.setattr(selectors, "_loaded", {})
    monkeypatch.setattr(selectors, "_points", None)
    scores = make([site("x", 3)], [[1.0, 2.0, 3.0]])
    plan = hp.select(scores, hp.Budget(keep_heads=1), "first")
    assert plan.mask.kept("x") == (0,)
    assert plan.selector == "first"
    assert hp.select(scores, hp.Budget(keep_heads=1), hp.selection.First()) == plan
    del sys.modules["fake_selector"]
