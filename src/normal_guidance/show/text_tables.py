"""Tables of plain text, written as Markdown, LaTeX, HTML, CSV and JSON.

Markdown, LaTeX and HTML are for reading: three digits, like the paper's. CSV and JSON are for computing: every digit,
one record per number, and an empty field (null) where there is no number.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from normal_guidance.base.records import valid_json
from normal_guidance.show.html import paragraph, raw_table

NOTHING = "-"  # the text for a missing number


def digits(value: float | None) -> str:
    """Round to three digits, halves up whatever the binary fraction; never "-.000", and "-" for NaN."""
    if value is None or not math.isfinite(value):
        return NOTHING
    whole = thousandths(value)
    return ("-" if whole < 0 else "") + f"{abs(whole) / 1000:.3f}".lstrip("0")


def thousandths(value: float) -> int:
    """The number that `digits` prints, in thousandths, to compare numbers as printed."""
    # Halves go towards +infinity, so that a difference from a printed number equals the difference of printed numbers.
    # The inner rounding removes the rounding error of a mean.
    return math.floor(round(value * 1000, 9) + 0.5)


def signed(difference: float | None) -> str:
    """Like `digits`, with a plus sign for positive numbers."""
    text = digits(difference)
    return text if text[0] == "-" or text == digits(0.0) else f"+{text}"


def interval(low: float, high: float, number: Callable[[float], str] = digits) -> str:
    """The ends of an interval in brackets, or why there are none."""
    known = math.isfinite(low) and math.isfinite(high)
    return f"[{number(low)}, {number(high)}]" if known else "[too few scans for an interval]"


def yes_no(answer: bool | None) -> str:
    """A yes or no in a table, "-" for None."""
    return NOTHING if answer is None else "yes" if answer else "no"


def p_value(p: float) -> str:
    """A p-value in a sentence; never "p = .000"."""
    return f"p < {digits(0.001)}" if p < 0.001 else f"p = {digits(p)}"


LATEX_HEAD = r"% \usepackage{booktabs,graphicx}" + "\n"

_LATEX = {
    **{special: rf"\{special}" for special in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "≤": r"$\le$",
    "×": r"$\times$",
    "λ": r"$\lambda$",
}


@dataclass(frozen=True)
class Grid:
    """A table of plain texts, before any markup; `bold` holds (row, column), and the caption may be empty."""

    title: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] = frozenset()

    def markdown(self, level: int = 3) -> str:
        """The table for GitHub, under a heading of this level."""
        lines = [list(map(_escape_markdown, self.header)), *self._marked(_escape_markdown, "**{}**")]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = ["<"] + [">"] * (len(widths) - 1)
        padded = [
            [f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)] for line in lines
        ]
        rule = [f":{'-' * (widths[0] + 1)}", *(f"{'-' * (width + 1)}:" for width in widths[1:])]
        header, *body = (f"| {' | '.join(line)} |" for line in padded)
        head = [f"{'#' * level} {_escape_markdown(self.title)}", ""]
        caption = [_escape_markdown(self.caption), ""] if self.caption else []
        return "\n".join([*head, *caption, header, f"|{'|'.join(rule)}|", *body, ""])

    def latex(self) -> str:
        """The table for LaTeX; needs booktabs, and graphicx for wide tables."""
        header, *body = (
            " & ".join(line) + r" \\"
            for line in [list(map(_escape_latex, self.header)), *self._marked(_escape_latex, r"\textbf{{{}}}")]
        )
        # Six columns fit a page; wider tables shrink to the width of the text.
        shrink, close = (r"\resizebox{\linewidth}{!}{", "}") if len(self.header) > 6 else ("", "")
        return "\n".join(
            [
                r"\begin{table}[ht]",
                r"\centering",
                rf"\caption{{{_escape_latex(f'{self.title}. {self.caption}')}}}",
                rf"{shrink}\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
                r"\toprule",
                header,
                r"\midrule",
                *body,
                r"\bottomrule",
                rf"\end{{tabular}}{close}",
                r"\end{table}",
                "",
            ]
        )

    def html(self) -> str:
        """A table with its title as caption, for `normal_guidance.show.html`."""
        title = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        note = paragraph(self.caption, note=True) if self.caption else ""
        header = [escape(text).replace(" %", "&nbsp;%") for text in self.header]
        return title + note + raw_table(header, self._marked(escape, "<b>{}</b>"))

    def _marked(self, mark: Callable[[str], str], bold: str) -> list[list[str]]:
        """The rows with every text marked up, and those in `bold` put into a pattern such as "**{}**"."""
        return [
            [bold.format(mark(text)) if (r, c) in self.bold else mark(text) for c, text in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\*_`<\[])", r"\\\1", text)


def _escape_latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w-])-(?=\.?\d)", "$-$", escaped)  # a hyphen is too short for a minus


def _csv_field(value: object) -> object:
    if isinstance(value, bool):
        return yes_no(value)
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if isinstance(value, float) and math.isnan(value) else value


def as_csv(records: Sequence[Mapping[str, object]], cell: Callable[[object], object] = _csv_field) -> str:
    """Records as CSV: a line with the first record's field names, then one line per record."""
    return csv_text(records[0], (map(cell, record.values()) for record in records))


def csv_text(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table as CSV, its lines ended as on Unix."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()


def as_json(value: Mapping[str, object]) -> str:
    """JSON for a file; NaN and infinity become null."""
    return json.dumps(valid_json(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
