"""The files of CONTRIBUTING.md, run as plugins of another package: they pass the tests it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: A path in backquotes that ends a paragraph with a colon, and the Python block under it.
FILE = re.compile(r"`([\w/]+\.py)`:\n\n```python\n(.*?)```", re.DOTALL)
#: By file: the group of entry points, and the object that it defines.
ENTRIES = {
    "headprune/scoring/clipped_gradient.py": ("headprune.scorers", "ClippedGradient"),
    "my_package/pocket.py": ("headprune.layouts", "LAYOUT"),
    "headprune/selection/first_fit.py": ("headprune.selectors", "FirstFit"),
}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: every file of the page in `my_package`, and its entry points."""
    folder = tmp_path_factory.mktemp("plugin")
    files = dict(FILE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert len(files) == 4, "a scorer, a layout, the model of the layout, a selector"
    package = folder / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    sections = []
    for path, code in files.items():
        stem = Path(path).stem
        (package / f"{stem}.py").write_text(code, encoding="utf-8")
        if path in ENTRIES:
            group, entry = ENTRIES[path]
            sections.append(f"[{group}]\n{stem} = my_package.{stem}:{entry}\n")
    assert len(sections) == len(ENTRIES)
    info = folder / "contributed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: contributed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(sections))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        "tests/laws --scorer clipped_gradient",
        "tests/laws --layout pocket",
        "tests/unit/test_selection.py tests/unit/test_selection_rules.py -k first_fit",
    ],
    ids=["scorer", "layout", "selector"],
)
def test_files_of_the_page_pass_the_tests_that_the_page_names(plugin: Path, arguments: str) -> None:
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert f"pytest {arguments}" in page
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments.split()]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(plugin), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 10, "hardly any test ran"
