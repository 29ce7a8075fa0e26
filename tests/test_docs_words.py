"""README and docs stay short: words are counted, without code blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import DOCS, ROOT, words

#: What a script writes begins like this, as a page or as a part of one.
WRITTEN = re.compile(r"(?:^<!-- )?Written by `")
PART = re.compile(
    r"<!-- (?:make docs-figures: [\w-]+|(?:imports|decisions), .*?|formats: begin) -->"
    r".*?<!-- (?:end of [\w-]+|formats: end) -->",
    re.DOTALL,
)
RESULTS = [page for page in sorted(DOCS.glob("*.md")) if "How it was measured" in page.read_text()]


def test_words_are_counted() -> None:
    text = "# One two\n\n| three | four |\n| --- | ---: |\n\n    not this\n\n```sh\nnor this\n```\n"
    assert words(text + "[five](of/a/link.md) <!-- nor this -->") == 5


def test_the_readme_has_at_most_900_words() -> None:
    assert words((ROOT / "README.md").read_text()) <= 900


def test_pages_by_hand_have_at_most_10000_words() -> None:
    """With the decision records."""
    pages = [*DOCS.glob("*.md"), *(DOCS / "decisions").glob("*.md")]
    texts = {page.name: page.read_text() for page in pages}
    by_hand = {
        name: words(PART.sub("", text)) for name, text in texts.items() if not WRITTEN.search(text)
    }
    assert {"index.md", "how-to.md", "faq.md"} <= by_hand.keys()
    assert not {"scorers.md", "tradeoff.md", "coverage.md"} & by_hand.keys()
    assert sum(by_hand.values()) <= 10_000, by_hand


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_a_page_of_results_begins_with_what_was_found(page: Path) -> None:
    lead = re.split(r"^# .*\n", page.read_text(), maxsplit=1, flags=re.MULTILINE)[1]
    lead = lead.partition("<details")[0]
    assert lead.strip().startswith("For those who")
    assert words(lead) <= 120


def test_an_answer_of_the_faq_has_at_most_60_words() -> None:
    _, *answers = re.split(r"^### ", (DOCS / "faq.md").read_text(), flags=re.MULTILINE)
    assert 10 < len(answers) <= 20
    for answer in answers:
        title, _, text = answer.partition("\n")
        text = text.partition("\n## ")[0]
        assert words(text) <= 60, title
