"""The documentation's site builds with warnings as errors and without a network, and its links lead
somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import headprune as hp
from headprune import recovery, scoring, selection
from tests.documents import DOCS, PAGES, ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
#: Parts of the code itself, which a page or a notebook shows: no names for use.
OF_THE_HOUSE = {"example_model", "registry"}
#: Pages that the hook docs/beside.py adds.
BESIDE = {"contributing.md", "security.md", "changelog.md"}


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(part)


def test_every_page_is_in_the_nav_once() -> None:
    named = list(_named(CONFIG["nav"]))
    assert sorted(named) == sorted({*(page.name for page in DOCS.glob("*.md")), *BESIDE}), (
        "mkdocs.yml: nav"
    )


def test_every_public_name_is_in_the_reference() -> None:
    values = {name for name in hp.__all__ if name != "__version__" and name not in hp._ROOMS}
    assert {name for name in _directives("api.md") if "." not in name} == values
    entries = [
        registry.get(name)
        for registry in (scoring.registry, selection.registry, recovery.registry)
        for name in registry.names()
    ]
    methods = {
        f"{entry.__module__.removeprefix('headprune.')}.{entry.__name__}" for entry in entries
    }
    listed = {name for name in _directives("api-methods.md") if not name.startswith("gating.")}
    assert listed == methods


def test_every_name_that_pages_and_notebooks_use_is_in_the_reference() -> None:
    listed = {
        name.rpartition(".")[2]
        for page in ("api.md", "api-methods.md")
        for name in _directives(page)
    }
    named: dict[str, str] = {}
    for_users = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
    for path in (*for_users, *(ROOT / "notebooks").glob("*.ipynb")):
        text = path.read_text()
        rooms = re.findall(rf"\bhp\.({'|'.join(hp._ROOMS)})\.(\w+)", text)
        imports = re.findall(
            rf"\bfrom headprune\.({'|'.join(hp._ROOMS)})[\w.]* import ([\w, ]+)", text
        )
        for room, names in (*rooms, *imports):
            named |= {
                name: f"{path.name}: headprune.{room}.{name}" for name in re.split(r",\s*", names)
            }
    assert {"shaped_batch", "prepared", "rescorer"} <= named.keys(), "it looked at nothing"
    assert [where for name, where in named.items() if name not in listed | OF_THE_HOUSE] == []


def _directives(page: str) -> list[str]:
    return re.findall(r"^::: headprune\.([\w.]+)$", (DOCS / page).read_text(), re.MULTILINE)


class _Page(HTMLParser):
    """The anchors of a built page, where it links to, and what a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loads.append(given["href"])
        if tag in ("script", "img", "iframe") and "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, _Page]:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:9"  # whatever the build would fetch fails
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nowhere)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, **proxies, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return {path: _Page(path) for path in sorted(folder.glob("*.html")) if path.name != "404.html"}


def test_the_site_has_every_page(site: dict[Path, _Page]) -> None:
    assert {path.stem for path in site} == {Path(name).stem for name in _named(CONFIG["nav"])}


def test_links_of_the_site_lead_somewhere(site: dict[Path, _Page]) -> None:
    seen = 0
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (
                (path.parent / unquote(parts.path)).resolve()
                if parts.path not in ("", ".")
                else path
            )
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {link}"
            if parts.fragment and target.suffix == ".html" and target in site:
                assert unquote(parts.fragment) in site[target].anchors, f"{path.name}: {link}"
                seen += 1
    assert seen > 100


def test_a_browser_loads_nothing_from_elsewhere(site: dict[Path, _Page]) -> None:
    for path, page in site.items():
        assert page.loads
        assert not [url for url in page.loads if urlsplit(url).netloc], path.name


def test_docstrings_are_on_the_page_with_their_examples(site: dict[Path, _Page]) -> None:
    (api,) = (path for path in site if path.name == "api.html")
    text = re.sub(r"<[^>]+>", "", api.read_text(encoding="utf-8"))
    assert "Measure how important each head is" in text
    assert "&gt;&gt;&gt; scores = score(" in text
    assert "<blockquote>" not in api.read_text(encoding="utf-8"), "a prompt that became a quotation"
