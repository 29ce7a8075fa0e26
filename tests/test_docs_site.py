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


NAMED = sorted(_named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def listed(page: str) -> list[str]:
    """What a page of the reference lists."""
    return re.findall(r"^::: headprune\.([\w.]+)$", (DOCS / page).read_text(), re.MULTILINE)


def test_every_page_is_in_the_nav_once() -> None:
    assert sorted({*(page.name for page in DOCS.glob("*.md")), *BESIDE}) == NAMED, "mkdocs.yml: nav"


def test_every_public_name_is_in_the_reference() -> None:
    values = set(hp.__all__) - {"__version__", *hp._PACKAGES}
    assert {name for name in listed("api.md") if "." not in name} == values
    methods = set()
    for registry in (scoring.registry, selection.registry, recovery.registry):
        for entry in map(registry.get, registry.names()):
            methods.add(f"{entry.__module__.removeprefix('headprune.')}.{entry.__name__}")
    told = {name for name in listed("api-methods.md") if not name.startswith("gating.")}
    assert told == methods


def test_every_name_that_pages_and_notebooks_use_is_in_the_reference() -> None:
    known = {*listed("api.md"), *listed("api-methods.md")}
    known = {name.rpartition(".")[2] for name in known} | OF_THE_HOUSE
    packages, seen = "|".join(hp._PACKAGES), set()
    for_users = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
    for path in (*for_users, *(ROOT / "notebooks").glob("*.ipynb")):
        text = path.read_text()
        used = re.findall(rf"\bhp\.(?:{packages})\.(\w+)", text)
        for names in re.findall(rf"\bfrom headprune\.(?:{packages})[\w.]* import ([\w, ]+)", text):
            used += re.split(r",\s*", names)
        assert set(used) <= known, path.name
        seen |= set(used)
    assert {"shaped_batch", "prepared", "rescorer"} <= seen, "it looked at nothing"


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
    own = {**os.environ, **proxies, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path: _Page(path) for path in sorted(folder.glob("*.html")) if path.name != "404.html"}


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: dict[Path, _Page]) -> None:
    assert {path.stem for path in site} == {Path(name).stem for name in NAMED}
    for path, page in site.items():
        assert page.loads
        assert not [url for url in page.loads if urlsplit(url).netloc], path.name


def test_links_of_the_site_lead_somewhere(site: dict[Path, _Page]) -> None:
    seen = 0
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = path
            if parts.path not in ("", "."):
                target = (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {link}"
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in site[target].anchors, f"{path.name}: {link}"
                seen += 1
    assert seen > 100


def test_docstrings_are_on_the_page_with_their_examples(site: dict[Path, _Page]) -> None:
    (api,) = (path.read_text(encoding="utf-8") for path in site if path.name == "api.html")
    text = re.sub(r"<[^>]+>", "", api)
    assert "Measure how important each head is" in text
    assert "&gt;&gt;&gt; scores = score(" in text
    assert "<blockquote>" not in api, "a prompt that became a quotation"
