"""A hook of MkDocs: CONTRIBUTING.md, SECURITY.md and CHANGELOG.md, which lie beside docs/, are
pages of the site too.

Links between them and the pages are those of the repository, so that they lead somewhere on a code
host as well; here they become links of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: Files of the repository, and the pages that they are on the site.
BESIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for name, page in BESIDE.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
        for other, there in BESIDE.items():
            text = text.replace(f"]({other}", f"]({there}")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leads links out of docs/ to the pages."""
    for name, page in BESIDE.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return markdown
