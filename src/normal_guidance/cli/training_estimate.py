"""What `--dry-run` of `nguide sweep` and `nguide experiment` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from normal_guidance.base.system import size_text, time_text
from normal_guidance.cli.json_output import print_json

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.sweep.estimate import SweepEstimate

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Train a few batches, estimate time, memory and disk, and write nothing."),
]


def print_estimates(found: Sequence[tuple[SweepEstimate, int]], console: Console, as_json: bool) -> None:
    """Print what each method would take, and all of them, one run after the other."""
    from rich.table import Table

    from normal_guidance.cli.progress_bar import say

    total = sum(one.total_s * runs for one, runs in found)
    if as_json:
        methods = [{**asdict(one), "runs": runs} for one, runs in found]
        print_json({"methods": methods, "total_s": total})
        return
    if not found:
        say(console, "All runs are complete. Nothing was written.")
        return
    first = found[0][0]
    say(console, f"{first.scans:,} scans, {first.slices:,} slices, {first.batches:,} batches x {first.epochs:,} epochs")
    table = Table()
    table.add_column("method")
    for column in ("runs", "configurations", "engine", "ms a step", "first step after", "memory", "disk", "time"):
        table.add_column(column, justify="right")
    for one, runs in found:
        together = f"{one.configs}" if one.chunks == 1 else f"{one.configs} in {one.chunks} parts"
        table.add_row(
            one.method,
            str(runs),
            together,
            one.engine,
            f"{1000 * one.step_s:,.{0 if one.step_s > 0.1 else 2}f}",
            f"{one.first_step_s:.1f} s",
            size_text(one.device_bytes),
            size_text(one.disk_bytes),
            time_text(runs * one.total_s),
        )
    console.print(table)
    say(console, f"Estimated time on {first.device}: {time_text(total)}. Nothing was written.")
