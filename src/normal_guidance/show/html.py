"""HTML pages in one file: styles, tables and pictures are inside it, and nothing is fetched from a network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

STYLE = """
:root { color-scheme: light; --ink: #1d2430; --soft: #5b6675; --line: #dfe4ea; --tint: #f5f7f9; --mark: #00573f; }
html { background: #fff; } * { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
body { color: var(--ink); margin: 0; background: #fff; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 24px 80px; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 6px; }
h2 { font-size: 20px; margin: 46px 0 10px; padding-top: 12px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 26px 0 6px; }
p { margin: 8px 0; } .note { color: var(--soft); font-size: 14px; }
nav { margin: 18px 0 4px; } nav a { margin-right: 18px; color: var(--mark); text-decoration: none; }
nav a:hover { text-decoration: underline; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; margin: 6px 0 14px; }
th, td { padding: 4px 14px 4px 0; text-align: right; white-space: nowrap; }
th { border-bottom: 1.5px solid var(--ink); font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tbody tr:nth-child(even) td { background: var(--tint); }
tbody tr:last-child td { border-bottom: 1px solid var(--line); }
figure { margin: 18px 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: 14px; }
.cards th:last-child, .look { text-align: left; }
.look img, .look svg { display: block; max-width: 100%; } .look svg { margin-top: 3px; }
.caution { border: 2px solid #8a2a00; background: #ffe9d6; color: #6b2000; padding: 8px 16px; margin: 14px 0; }
.caution p { font-size: 17px; font-weight: 700; } .caution ul { margin: 4px 0; font-weight: 600; }
.flag { color: #8a2a00; font-weight: 600; white-space: normal; max-width: 420px; }
ul.findings { padding-left: 0; list-style: none; }
ul.findings li { padding: 5px 12px; border-left: 3px solid var(--line); margin: 5px 0; }
ul.findings li.shown { border-color: var(--mark); }
details { border: 1px solid var(--line); border-radius: 6px; padding: 6px 14px; margin: 10px 0; }
summary { cursor: pointer; font-weight: 600; } pre { font-size: 14px; overflow-x: auto; }
@media (max-width: 640px) {
main { padding: 16px 14px 60px; } h1 { font-size: 23px; overflow-wrap: anywhere; } h2 { margin-top: 30px; }
p, li { overflow-wrap: anywhere; } figure img { min-width: 640px; } .flag { max-width: none; }
td:first-child { white-space: normal; min-width: 110px; } th, td { padding-right: 9px; }
.cards thead { display: none; } .cards tr { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 8px 0; }
.cards td, .cards tbody tr:nth-child(even) td { background: none; border: 0; padding: 0; text-align: left; }
.cards td { white-space: normal; } .cards td:first-child, .cards td.look { flex: 0 0 100%; }
.cards tr { border-bottom: 1px solid var(--line); } .cards td[data-of]::before { content: attr(data-of) " "; }
.cards td[data-of]::before { color: var(--soft); }
}
@media print { details { border: 0; } nav { display: none; } }
"""


@dataclass(frozen=True)
class Section:
    """A heading and the blocks of HTML below it."""

    title: str
    blocks: Sequence[str]

    @property
    def anchor(self) -> str:
        return "-".join(self.title.lower().split())


def page(title: str, lead: Sequence[str], sections: Sequence[Section], *, reload: int | None = None) -> str:
    """The whole page; the blocks of `lead` stand above the first section.  It loads itself after `reload` seconds."""
    shown = [section for section in sections if section.blocks]
    links = "".join(f"<a href='#{section.anchor}'>{escape(section.title)}</a>" for section in shown)
    bodies = [
        f"<h2 id={section.anchor}>{escape(section.title)}</h2>\n" + "\n".join(section.blocks) for section in shown
    ]
    return "\n".join(
        [
            "<!doctype html>",
            f"<html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>",
            "<meta name=viewport content='width=device-width, initial-scale=1'>",
            "" if reload is None else f"<meta http-equiv=refresh content={reload}>",
            # Nothing may be fetched, even if a name in the data tried to.
            "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; img-src data:; "
            "style-src 'unsafe-inline'\">",
            f"<style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(title)}</h1>",
            *lead,
            f"<nav>{links}</nav>",
            *bodies,
            "</main></body></html>\n",
        ]
    )


def paragraph(text: str, *, note: bool = False) -> str:
    """A paragraph of plain text; a note is small and grey."""
    return f"<p{' class=note' if note else ''}>{escape(text)}</p>"


def caution(title: str, sentences: Iterable[str]) -> str:
    """A banner with what a reader must know first; nothing where there are no sentences."""
    listed = bullets(sentences)
    return f"<div class=caution role=alert>{paragraph(title)}{listed}</div>" if "<li>" in listed else ""


def findings(sentences: Iterable[tuple[str, bool]]) -> str:
    """A list of sentences; those marked True, which statistics have shown, get a coloured edge."""
    items = (f"<li{' class=shown' if shown else ''}>{escape(sentence)}</li>" for sentence, shown in sentences)
    return f"<ul class=findings>{''.join(items)}</ul>"


def bullets(lines: Iterable[str]) -> str:
    """A bulleted list of plain texts."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def figure(path: Path, caption: str) -> str:
    """A PNG, embedded in the page, with its caption."""
    return f"<figure><div class=wide>{picture(path, caption)}</div><figcaption>{escape(caption)}</figcaption></figure>"


def picture(path: Path, alt: str) -> str:
    """A PNG or JPEG, embedded in the page."""
    kind = "jpeg" if path.suffix == ".jpg" else "png"
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(alt, quote=True)}" src="data:image/{kind};base64,{data}">'


def curve(values: Sequence[float], interval: tuple[int, int] | None = None, marks: Iterable[int] = ()) -> str:
    """A small drawing of a value along the slices, with an interval and marked slices, which count from 1."""
    step, top = 300 / len(values), max(values) or 1.0
    line = " ".join(f"{(place + 0.5) * step:.1f},{50 - 40 * value / top:.1f}" for place, value in enumerate(values))
    parts = [f"<polyline points='{line}' fill='none' stroke='#00573f' stroke-width='2'/>"]
    if interval is not None:
        left, right = (interval[0] - 1) * step, interval[1] * step
        parts.insert(0, f"<rect x='{left:.1f}' y='0' width='{right - left:.1f}' height='50' fill='#f6dfb8'/>")
    for mark in marks:
        parts.append(f"<circle cx='{(mark - 0.5) * step:.1f}' cy='4' r='3' fill='#1d2430'/>")
    parts.append("<path d='M0 50.5H300' stroke='#5b6675'/>")
    about = "width='300' height='51' viewBox='0 0 300 51' role='img' aria-label='attention along the slices'"
    return f"<svg {about}>{''.join(parts)}</svg>"


def scan_link(scan_id: str, number: int | None = None, page: str | None = None) -> str:
    """A scan's name, which leads to its page if it has one; in the viewer it leads to the scan, and to its slice."""
    # A name may be written from right to left, and must not turn the text around it.
    facts = {"href": page, "data-scan": scan_id, "data-slice": number}
    known = "".join(f" {name}='{escape(str(fact), quote=True)}'" for name, fact in facts.items() if fact is not None)
    return f"<a{known}><bdi>{escape(scan_id)}</bdi></a>"


def details(summary: str, block: str) -> str:
    """A block that is hidden until its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{block}</details>"


def preformatted(text: str) -> str:
    """Text with its line breaks, in a font of one width."""
    return f"<pre>{escape(text)}</pre>"


CAUTION = (
    "Research software, not a medical device: not for diagnosis. Attention shows where the model looked, which "
    "need not be where a finding is."
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """Make a table of plain text; with `words`, cells are aligned left and wrapped."""
    return raw_table([escape(name) for name in header], [[escape(cell) for cell in row] for row in rows], words=words)


def raw_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False, cards: bool = False) -> str:
    """Make a table whose cells and names of columns are HTML.

    With `cards`, a row is a card on a small screen: its first cell is the title, its last a drawing.
    """
    style = " style='text-align: left; white-space: normal; vertical-align: top'" if words else ""
    styles = ["", *(f" data-of='{name}'" for name in header[1:-1]), " class=look"] if cards else [style] * len(header)
    top = "".join(f"<th{style}>{name}</th>" for name in header)
    lines = ("".join(f"<td{own}>{cell}</td>" for own, cell in zip(styles, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{cells}</tr>" for cells in lines)
    kind = " class=cards" if cards else ""
    return f"<div class=wide><table{kind}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


ROWS = 10  # of a long table that a notebook shows


def notebook_html(sentences: Iterable[str], table: pd.DataFrame) -> str:
    """What a notebook shows of an object, without a style of its own: sentences, and the first rows of a table."""
    shown = table.head(ROWS).to_html(index=False, border=0, na_rep="", float_format="{:.3f}".format)
    left = len(table) - ROWS
    more = paragraph(f"{left} more rows in .to_pandas()") if left > 0 else ""
    return f"<div>{bullets(sentences)}<div style='overflow-x: auto'>{shown}</div>{more}</div>"
