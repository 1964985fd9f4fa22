"""The paper's tables about a dataset: scans and their lengths, and three tables of blocks of positive slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normal_guidance.core.blocks import GAP, PERCENTILES
from normal_guidance.data.dataset_statistics import Description
from normal_guidance.presentation.text_tables import Grid

BLOCKS = f"A block may bridge up to {GAP} negative slices."


def description_tables(name: str, parts: Mapping[str, Description]) -> list[Grid]:
    """The tables of one dataset, one row for each part (for instance 'all', or 'train', 'val' and 'test')."""
    scans = Grid(
        f"Scans of {name}",
        "",
        ["Part", "Scans", "Positive", "Patients", "Slices", "With slice labels", "Positive slices"],
        [
            [part, *(f"{n:,}" for n in (d.scans, d.positive, d.patients, d.slices, d.labelled, d.positive_slices))]
            for part, d in parts.items()
        ],
    )
    lengths = _percentiles("Slices in a scan", "", [(part, d.lengths) for part, d in parts.items()], "{:.0f}")
    known = {part: d.blocks for part, d in parts.items() if d.blocks is not None}
    if not known:
        return [scans, lengths]
    most = max(max(blocks.bags_by_blocks) for blocks in known.values())
    numbers = Grid(
        "Blocks in a positive scan",
        f"How many of the scans with positive slices have so many blocks. {BLOCKS}",
        ["Part", *(f"{n} block{'s' * (n > 1)}" for n in range(1, most + 1))],
        [[part, *_shares(blocks.bags_by_blocks, most)] for part, blocks in known.items()],
    )
    sizes = [(part, blocks.summary()["length"]) for part, blocks in known.items()]
    fractions = [(part, blocks.summary()["fraction"]) for part, blocks in known.items()]
    return [
        scans,
        lengths,
        numbers,
        _percentiles("Slices in a block", BLOCKS, sizes, "{:.0f}"),
        _percentiles("Share of the scan in a block", BLOCKS, fractions, "{:.3f}"),
    ]


def _shares(bags_by_blocks: Mapping[int, int], most: int) -> list[str]:
    total = sum(bags_by_blocks.values())
    return [f"{bags_by_blocks[n]}/{total}" if n in bags_by_blocks else "-" for n in range(1, most + 1)]


def _percentiles(title: str, caption: str, rows: Sequence[tuple[str, Mapping[str, float]]], form: str) -> Grid:
    columns = ["mean", *PERCENTILES]
    cells = [[part, *(form.format(values[column]) for column in columns)] for part, values in rows]
    return Grid(title, caption, ["Part", *(column.capitalize() for column in columns)], cells)
