"""docs/glossary.md: one row a word, in alphabetical order."""

import re
from pathlib import Path

GLOSSARY = Path(__file__).resolve().parents[1] / "docs/glossary.md"


def words(page: str) -> list[str]:
    """The words of the table as they are sorted: small letters, without punctuation."""
    return [re.sub(r"[^a-z ]", "", word.lower()) for word in re.findall(r"^\| \*\*(.+?)\*\* \| \S", page, re.MULTILINE)]


def test_words_are_in_alphabetical_order():
    page = GLOSSARY.read_text(encoding="utf-8")
    assert len(words(page)) == page.count("\n| **") > 60
    assert words(page) == sorted(set(words(page)))
