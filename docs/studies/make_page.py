"""Makes the tables of a page from the table of its study, or measures them.

    .venv/bin/python docs/studies/make_page.py phantoms              prints them
    .venv/bin/python docs/studies/make_page.py phantoms --write      puts them into the page
    .venv/bin/python docs/studies/make_page.py replication clamp     one of them

`PAGES` names the pages and their appendices.  Each has a module `page_<name>` with `SECTIONS`: the name of a place in
one of its files and the function that makes its content.  Only what stands in such places is replaced.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
TABLES, IMAGES = DOCS / "results/tables", DOCS / "images"
RESULTS = (
    *("field", "fit", "prostatex", "mitbih", "lidc-positions"),
    *("semi-synthetic", "beyond", "phantoms", "robustness"),
)
PAGES = {
    **{name: (f"results/{name}.md", f"results/appendix/{name}-*.md") for name in RESULTS},
    "replication": ("replication/*.md",),
}
"""The files of docs that hold the places of a page: the page itself and its appendices."""

BLOCK = re.compile(r"<!-- measured: (\w+) -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)


def short(value: float) -> str:
    """Three significant digits, or a whole number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}".removeprefix("0") or "0"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    cells = [list(header), ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def written(page: str) -> dict[str, str]:
    """The tables that a text holds, by the name in the comment before each."""
    return dict(BLOCK.findall(page))


def put(page: str, name: str, made: str) -> str:
    """The text with another table of this name."""
    changed = f"<!-- measured: {name} -->\n\n{made}\n\n<!-- end -->"
    return BLOCK.sub(lambda found: changed if found[1] == name else found[0], page)


def files(page: str) -> list[Path]:
    """The page and its appendices."""
    return [file for pattern in PAGES[page] for file in sorted(DOCS.glob(pattern))]


def make(page: str, sections: Mapping[str, Callable[[], str]], *, write: bool) -> None:
    """Prints the tables, each as soon as it is made, and puts them into the page's files if asked."""
    for name, section in sections.items():
        made = section()
        print(f"## {name}\n\n{made}\n", flush=True)
        for file in files(page) if write else []:
            file.write_text(put(file.read_text(encoding="utf-8"), name, made), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=list(PAGES))
    parser.add_argument("names", nargs="*", help="tables to make; all of the page if none is named")
    parser.add_argument("--write", action="store_true", help="replace the tables of the page")
    chosen = parser.parse_args(arguments)
    module = importlib.import_module(f"page_{chosen.page.replace('-', '_')}")
    if unknown := [name for name in chosen.names if name not in module.SECTIONS]:
        parser.error(f"table {unknown[0]!r} is unknown; choose from {', '.join(module.SECTIONS)}")
    sections = {name: module.SECTIONS[name] for name in chosen.names or module.SECTIONS}
    make(chosen.page, sections, write=chosen.write)
    if chosen.write and hasattr(module, "draw"):
        module.draw()


if __name__ == "__main__":
    main()
