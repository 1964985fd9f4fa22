"""The page itself: every text escaped, every tag closed, nothing fetched."""

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest

from normal_guidance.show import html
from normal_guidance.show.html import Section
from normal_guidance.show.text_tables import Grid
from pages import check_page

HOSTILE = "<script>alert(1)</script>\"'&"


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG and so on")
    return path


class Texts(HTMLParser):
    """(Innermost tag, text) of a page, and the attributes of its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found, self.attributes, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.attributes.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, text):
        if text.strip():
            self.found.append((self.open[-1] if self.open else None, text))


def test_every_block_shows_its_text_as_it_is(picture):
    blocks = {
        "p": html.paragraph(HOSTILE),
        "li": html.bullets([HOSTILE, "plain"]),
        "summary": html.details(HOSTILE, html.paragraph("inside")),
        "pre": html.preformatted(HOSTILE),
        "figcaption": html.figure(picture, HOSTILE),
    }
    for tag, block in blocks.items():
        assert (tag, HOSTILE) in Texts(block).found, block
        assert "<script" not in block
    _, (_, box), image, _ = Texts(blocks["figcaption"]).attributes
    assert box == {"class": "wide"}  # which scrolls on a small screen
    content = base64.b64encode(picture.read_bytes()).decode()
    assert image == ("img", {"alt": HOSTILE, "src": f"data:image/png;base64,{content}"})


def test_a_link_to_a_scan_is_a_link_in_the_viewer_only_unless_it_has_a_page():
    (name, attributes), _ = Texts(html.scan_link(HOSTILE, 5)).attributes
    assert (name, attributes) == ("a", {"data-scan": HOSTILE, "data-slice": "5"})
    assert Texts(html.scan_link(HOSTILE, page="a/report.html")).attributes[0][1]["href"] == "a/report.html"
    assert Texts(html.scan_link(HOSTILE)).found == [("bdi", HOSTILE)]


def test_a_curve_has_its_peak_its_interval_and_its_marks():
    parts = dict(Texts(html.curve([0.1, 0.4, 0.2], (2, 3), [2])).attributes)
    assert parts["polyline"]["points"] == "50.0,40.0 150.0,10.0 250.0,30.0"
    assert (parts["rect"]["x"], parts["rect"]["width"]) == ("100.0", "200.0")
    assert parts["circle"]["cx"] == "150.0"
    assert "rect" not in dict(Texts(html.curve([0.0, 0.0])).attributes)


def test_findings_that_are_shown_and_notes_are_marked():
    texts = Texts(html.findings([(HOSTILE, True), ("no difference", False)]))
    assert texts.found == [("li", HOSTILE), ("li", "no difference")]
    assert [attributes for tag, attributes in texts.attributes if tag == "li"] == [{"class": "shown"}, {}]
    assert Texts(html.paragraph("small", note=True)).attributes == [("p", {"class": "note"})]


def test_tables_show_their_texts_as_they_are():
    grid = Grid(HOSTILE, "a < b", [HOSTILE, "n"], [[HOSTILE, "1"], ["x", "2"]], frozenset({(1, 1)}))
    assert Texts(grid.html()).found == [
        ("h3", HOSTILE), ("p", "a < b"), ("th", HOSTILE), ("th", "n"),
        ("td", HOSTILE), ("td", "1"), ("td", "x"), ("b", "2"),
    ]  # fmt: skip


def test_a_page_is_whole_and_leaves_empty_sections_out(picture):
    sections = [
        Section("Main findings", [html.paragraph("one"), html.figure(picture, "two")]),
        Section("Nothing", []),
        Section("Records", [html.details("three", html.preformatted("four"))]),
    ]
    page = html.page(HOSTILE, [html.paragraph("lead")], sections)
    check_page(page)
    texts = Texts(page)
    assert {("title", HOSTILE), ("h1", HOSTILE)} <= {*texts.found}
    assert [attributes["href"] for tag, attributes in texts.attributes if tag == "a"] == ["#main-findings", "#records"]
    assert [attributes["id"] for tag, attributes in texts.attributes if tag == "h2"] == ["main-findings", "records"]


@pytest.mark.parametrize(
    "page",
    [
        "<!doctype html><p>one",
        "<!doctype html><p><b>one</p></b>",
        "<!doctype html></p>",
        "<!doctype html><img src='a.png'>",
        "<!doctype html><img src='//b.org/a.png'>",
        "<!doctype html><a href='a.html'>one</a>",
        "<!doctype html><p>see https://b.org</p>",
        "<!doctype html><style>@import 'a.css';</style>",
        "<!doctype html><style>p { background: url(a.png); }</style>",
        "<!doctype html><script>one()</script>",
        "<!doctype html><p onclick='one()'>one</p>",
        "<p>one</p>",
    ],
)
def test_the_check_of_pages_can_fail(page):
    with pytest.raises(AssertionError):
        check_page(page)
