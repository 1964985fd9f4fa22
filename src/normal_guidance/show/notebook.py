"""What a notebook shows of an object: sentences and the first rows of a table, without a style of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from normal_guidance.show.html import bullets, paragraph

if TYPE_CHECKING:
    import pandas as pd

ROWS = 10  # of a long table


def notebook_html(sentences: Iterable[str], table: pd.DataFrame) -> str:
    """The sentences as a list, then at most `ROWS` rows of the table."""
    shown = table.head(ROWS).to_html(index=False, border=0, na_rep="", float_format="{:.3f}".format)
    left = len(table) - ROWS
    more = paragraph(f"{left} more rows in .to_pandas()") if left > 0 else ""
    return f"<div>{bullets(sentences)}<div style='overflow-x: auto'>{shown}</div>{more}</div>"
