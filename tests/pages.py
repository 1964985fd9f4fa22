"""What a page must be to be kept and sent as one file."""

import re
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "hr", "link", "input"}


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.styles: list[str] = []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe", "object"), f"<{tag}> may fetch or do something"
        for name, value in attributes:
            assert not name.startswith("on"), f"{name} does something"
            assert name not in ("src", "srcset") or value.startswith("data:"), f"{value[:80]} lies outside"
            assert name != "href" or value.startswith("#"), f"{value} leads outside"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, text):
        if self.open and self.open[-1] == "style":
            self.styles.append(text)


def check_page(page: str) -> None:
    """All tags are closed in order, nothing is fetched from anywhere, and nothing runs."""
    assert page.startswith("<!doctype html>")
    assert "http://" not in page
    assert "https://" not in page
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert not re.search(r"@import|url\(", "".join(checker.styles))
