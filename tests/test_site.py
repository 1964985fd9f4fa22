"""The site: built strictly, whole without a network, every link leads somewhere, the figure's numbers agree."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

import normal_guidance
from documents import load_module
from normal_guidance import DIVERGENCES, divergence, normal_reference

ROOT = Path(__file__).resolve().parents[1]

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'normal-guidance[docs]'")


NAMES = {*normal_guidance.__all__} - {"figures"}
hook, docstrings = (load_module(ROOT / "docs" / f"{name}.py") for name in ("site_hook", "site_docstrings"))


def build(config: Path, out: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=config.parent)


class Page(HTMLParser):
    """Links, anchors, and what a browser would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "manifest"):
            self.loaded.append(given["href"])
        if tag != "a" and given.get("src"):
            self.loaded.append(given["src"])


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("built") / "site"
    result = build(ROOT / "mkdocs.yml", out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="session")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def is_outside(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def dead_links(pages: dict[Path, Page]) -> list[str]:
    """Every relative link that leads to no file, or to no anchor of it."""
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            missing = not target.exists() or (target in pages and unquote(parts.fragment) not in pages[target].anchors)
            dead += [f"{path.name}: {link}"] if missing else []
    return dead


@pytest.mark.slow
def test_every_link_leads_somewhere(pages):
    assert len(pages) > 50
    assert dead_links({path: page for path, page in pages.items() if path.name != "404.html"}) == []


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site, pages):
    assert [path for path, page in pages.items() if any(map(is_outside, page.loaded))] == []
    fetches = re.compile(r"(?:url\(|@import )[\"']?(?:https?:)?//")
    assert [style for style in site.rglob("*.css") if fetches.search(style.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site, pages):
    links = [link for link in pages[site / "index.html"].links if not is_outside(link)]
    shown = {(site / urlsplit(link).path).resolve() for link in links}
    assert {path.name for path in pages.keys() - shown} == {"404.html"}


@pytest.mark.slow
def test_lists_and_tables_became_lists_and_tables(site):
    """Python-Markdown is stricter than GitHub; what it does not take for a list or a table it prints as it stands."""
    left = re.compile(r"<p>[^<]*\n(?:- |\* |1\. |\|)|<p>\|")
    assert [path.name for path in site.rglob("*.html") if left.search(path.read_text(encoding="utf-8"))] == []


def write_pages(folder: Path, pages: dict[str, str]) -> None:
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def small_project(folder: Path, pages: dict[str, str]) -> Path:
    write_pages(folder / "docs", pages)
    original = (ROOT / "mkdocs.yml").read_text()
    validation = original[original.index("validation:") : original.index("theme:")]
    (folder / "mkdocs.yml").write_text(f"site_name: small\nplugins: []\n{validation}")
    return folder / "mkdocs.yml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# A\n\n[b](b.md)", None),
        ("# A\n\n[c](c.md)", "'c.md'"),
        ("# A\n\n[b](b.md#no)", "'b.md#no'"),
        ("# A\n\n[b](/b.md)", "absolute link"),
    ],
)
def test_a_broken_link_stops_the_build(tmp_path, text, complaint):
    result = build(small_project(tmp_path, {"index.md": text, "b.md": "# B\n"}), tmp_path / "site")
    assert result.returncode == (0 if complaint is None else 1)
    assert complaint is None or complaint in result.stderr


def test_the_check_of_links_can_fail(tmp_path):
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">y</a><a href="b.html#z">z</a><a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<p id="y">')
    pages = {path: Page(path) for path in tmp_path.glob("*.html")}
    assert dead_links(pages) == ["a.html: b.html#z", "a.html: c.html"]


def test_links_lead_to_pages_or_to_the_source_and_code_keeps_its_brackets():
    known = {"howto/fit.md", "log.md", "results/fit.md", "decisions/README.md"}
    text = "[a](fit.md#b) [b](../../LOG.md#x) [c](../../src/normal_guidance/core/bags.py) [d](../decisions/) [e](no.md)"
    assert hook.site_links(text, "docs/howto/x.md", "howto/x.md", known) == (
        "[a](fit.md#b) [b](../log.md#x) "
        f"[c]({hook.SOURCE}/blob/main/src/normal_guidance/core/bags.py) [d](../decisions/README.md) [e](no.md)"
    )
    assert hook.site_links("[a](docs/howto/fit.md) [b](tests)", "LOG.md", "log.md", known) == (
        f"[a](howto/fit.md) [b]({hook.SOURCE}/tree/main/tests)"
    )
    text = "```python\nx[0](fit.md)\n```\n\n[a](../LOG.md)"
    assert hook.site_links(text, "docs/x.md", "x.md", {"log.md"}) == text.replace("../LOG.md", "log.md")


def test_a_list_may_follow_a_paragraph():
    assert hook.as_python_markdown("text\n- a\n- b\n") == "text\n\n- a\n- b\n"
    assert hook.as_python_markdown("- a\n  b\n- c\n") == "- a\n  b\n- c\n"
    assert hook.as_python_markdown("  | t |\n  text\n- c\n") == "  | t |\n  text\n\n- c\n"
    assert hook.as_python_markdown("```\ntext\n- a\n```\n") == "```\ntext\n- a\n```\n"


def test_a_folder_becomes_navigation(tmp_path):
    pages = {"index.md": "# I\n[z](z.md)", "a.md": "# Long: words", "z.md": "# T: the end", "more/m.md": "# M"}
    write_pages(tmp_path / "t", pages)
    (entry,) = hook._expanded([{"T": "t/*"}], tmp_path)
    assert entry == {"T": ["t/index.md", {"The end": "t/z.md"}, {"Long": "t/a.md"}, {"More": [{"M": "t/more/m.md"}]}]}
    assert hook._expanded([{"None": ["none/*"]}], tmp_path) == []
    assert hook._expanded({"T": ["a.md", {"N": "n.md"}]}, tmp_path) == [{"T": ["a.md", {"N": "n.md"}]}]


def test_a_notebook_is_a_page_that_is_called_after_its_heading(tmp_path):
    cell = {"cell_type": "markdown", "source": ["# Fit your own scans: in a notebook\n", "text"]}
    for indent in (None, 1):
        (tmp_path / "n.ipynb").write_text(json.dumps({"cells": [cell]}, indent=indent))
        assert hook._pages(tmp_path, tmp_path) == [{"Fit your own scans": "n.md"}]


def test_the_site_has_at_most_six_tabs():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  - ([\w-]+):", navigation, re.MULTILINE) == [
        *("Start", "How-to", "Concepts", "Results", "Reference", "Project")
    ]


def test_pages_that_are_found_first_exist():
    made = {hook.ERRORS, *hook.ROOT_PAGES.values()}
    assert [one for one in hook.BOOST if one not in made and not (ROOT / "docs" / one).exists()] == []


def test_a_formula_is_drawn_or_refused():
    drawn = hook.formula_svg(r"\frac1P \sum_j r_j \tfrac12", "inline")
    assert drawn.startswith('<svg class="formula-inline" role="img"')
    assert len(re.search(r' d="([^"]*)"', drawn)[1]) > 500
    with pytest.raises(ValueError, match="nothing"):
        hook.formula_svg(r"\nothing{x}", "inline")


def test_examples_become_code():
    assert docstrings.fenced("A.\n\n>>> f()\n1\n\nB.") == "A.\n\n```pycon\n>>> f()\n1\n```\n\nB."


def test_the_command_reference_has_every_command():
    from typer.main import get_command

    from normal_guidance.cli.commands import app

    text = hook.command_reference()
    assert [name for name in get_command(app).commands if f"\n## nguide {name}\n" not in text] == []
    assert "| `--coverage` |" in text


def test_every_public_name_is_in_the_reference():
    shown = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    objects = set(re.findall(r"^::: normal_guidance\.(\S+)$", shown, re.MULTILINE))
    source = Path(normal_guidance.__file__).read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    homes = {f"{node.module}.{alias.name}" for node in imports for alias in node.names if alias.name in NAMES}
    assert {home.removeprefix("normal_guidance.") for home in homes} - objects == set()


@pytest.fixture(scope="module")  # longer, and its event loop would run in the tests of other files
def browser():
    pytest.importorskip("playwright")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("CHROMIUM IS MISSING: THE SITE IS NOT OPENED; apt install chromium, or set CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def open_page(browser, address: Path):
    """A page from the disk; whatever it asks of a network or fails at ends the test."""
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    problems: list[str] = []
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address.as_uri())
    return page, problems


def check_numbers(page) -> dict:
    """What the figure measured, after comparing it with the package."""
    found = json.loads(page.evaluate("JSON.stringify(document.querySelector('.guidance-figure').measured)"))
    attention = torch.tensor([found["attention"]], dtype=torch.float64)
    reference = normal_reference(attention)
    shown = torch.tensor([found["reference"]], dtype=torch.float64)
    torch.testing.assert_close(shown, reference, rtol=1e-9, atol=1e-15)
    for kind in DIVERGENCES:
        expected = divergence(reference, attention, kind).item()
        assert found[kind] == pytest.approx(expected, rel=1e-9, abs=1e-12), kind
        shown = page.inner_text(f".guidance-figure [data-value={kind}]")
        assert float(shown) == pytest.approx(expected, rel=6e-3, abs=1e-12), kind
    return found


@pytest.mark.slow
def test_the_figure_agrees_with_the_package(site, browser):
    page, problems = open_page(browser, site / "concepts" / "guidance.html")
    seen = [check_numbers(page)]
    for name in ("One bell", "One slice", "Flat", "Noise"):
        page.click(f".guidance-figure button:text('{name}')")
        seen.append(check_numbers(page))
    assert seen[2]["forward_kl"] == 0  # one slice is its own reference
    assert seen[3]["forward_kl"] == pytest.approx(0.079, abs=2e-3)

    figure = page.locator(".guidance-figure svg")
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.8, steps=3)
    page.mouse.up()
    dragged = check_numbers(page)
    heights = dragged["attention"][2:15]
    assert all(first > second for first, second in pairwise(heights))  # a straight slope

    page.focus(".guidance-figure .bar:first-child")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    typed = check_numbers(page)
    assert typed["attention"][2] > dragged["attention"][2]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "slice 3"

    page.click(".guidance-figure button:text('Two peaks')")
    before = check_numbers(page)["forward_kl"]
    page.click(".guidance-figure button:text('Let guidance pull')")
    page.wait_for_function(f"document.querySelector('.guidance-figure').measured.forward_kl < {before / 2}")
    assert problems == []


@pytest.mark.slow
def test_search_works_from_a_disk(site, browser):
    page, problems = open_page(browser, site / "reference" / "guidance.html")
    page.click(".md-search__input")
    page.keyboard.type("conformal")
    page.wait_for_selector(".md-search-result__link")
    assert problems == []


@pytest.mark.slow
def test_pages_fit_a_phone(site, browser):
    page, _ = open_page(browser, site / "index.html")
    page.set_viewport_size({"width": 390, "height": 844})
    wide = []
    for name in ("index", "get-started", "results/field", "concepts/guidance", "reference/guidance"):
        page.goto((site / f"{name}.html").as_uri())
        wide += [name] if page.evaluate("document.documentElement.scrollWidth") > 390 else []
    assert wide == []


@pytest.mark.slow
def test_the_box_of_errors_finds_a_message(site, browser):
    page, problems = open_page(browser, site / "reference" / "errors.html")
    rows = page.locator("article tbody tr:visible")
    every = rows.count()
    assert every > 150
    page.fill(".errors-search input", "sensitivity is 3; give a share")
    assert {text.partition(" is")[0] for text in rows.all_inner_texts()} == {"sensitivity"}
    assert page.locator("article h2:visible").all_inner_texts() == ["fit¶", "Lines that the calls share¶"]
    page.fill(".errors-search input", "xylophone")
    assert rows.count() == 0
    page.fill(".errors-search input", "")
    assert rows.count() == every
    assert problems == []
