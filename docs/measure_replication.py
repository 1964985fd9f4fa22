"""Measures what docs/replication.md says is measured: one function per item (docs/measured/), each makes a table.

    .venv/bin/python docs/measure_replication.py                        all items, about a minute on two cores
    .venv/bin/python docs/measure_replication.py --only clamp,uniform   some of them
    .venv/bin/python docs/measure_replication.py --runs results/gpu     and those that need finished runs
    .venv/bin/python docs/measure_replication.py --write                puts the tables into the page

Runs are folders METHOD/SEED as `nguide reproduce semi-synthetic` leaves them: their histories and, for TransMIL's
family, their predictions.  Everything else is drawn here, from fixed seeds, and read from the published numbers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from measured import ceilings, data, evaluation, guidance, models, selection

PAGE = Path(__file__).with_name("replication.md")
BLOCK = re.compile(r"<!-- measured: (\w+) -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)

SECTIONS: dict[str, Callable[[], str]] = {
    section.__name__: section
    for section in (
        data.order,
        data.repairs,
        data.draws,
        data.gray,
        guidance.variance,
        guidance.reference,
        guidance.clamp,
        guidance.uniform,
        guidance.class_token,
        models.gaussian,
        models.smoothing,
        models.parameters,
        models.clipping,
        models.batches,
        selection.difficulty,
        selection.margin,
        evaluation.ties,
        evaluation.spreads,
        evaluation.seeds,
        ceilings.ceilings,
        ceilings.blocks,
        ceilings.receptive_field,
        ceilings.oracle,
    )
}
"""What can be measured anywhere."""

FROM_RUNS: dict[str, Callable[[Sequence[Path]], str]] = {"selection": selection.selection, "heads": selection.heads}
"""What needs finished runs."""


def written(page: str) -> dict[str, str]:
    """The tables that a page holds, by the name in the comment before each."""
    return dict(BLOCK.findall(page))


def put(page: str, name: str, made: str) -> str:
    """The page with another table of this name."""
    changed = f"<!-- measured: {name} -->\n\n{made}\n\n<!-- end -->"
    return BLOCK.sub(lambda found: changed if found[1] == name else found[0], page)


def show(page: Path, sections: Mapping[str, Callable[[], str]], *, write: bool) -> None:
    """Prints the tables, each as soon as it is made, and puts them into the page if asked."""
    for name, section in sections.items():
        made = section()
        print(f"## {name}\n\n{made}\n", flush=True)
        if write:
            page.write_text(put(page.read_text(encoding="utf-8"), name, made), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of items, joined by commas")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="folders of runs METHOD/SEED")
    parser.add_argument("--write", action="store_true", help="replace the tables of the page")
    chosen = parser.parse_args()
    sections = dict(SECTIONS)
    if chosen.runs:
        sections |= {name: partial(section, chosen.runs) for name, section in FROM_RUNS.items()}
    names = chosen.only.split(",") if chosen.only else list(sections)
    for name in names:
        if name not in sections:
            hint = "it needs --runs" if name in FROM_RUNS else f"choose of {', '.join([*SECTIONS, *FROM_RUNS])}"
            parser.error(f"item {name!r} cannot be measured: {hint}")
    show(PAGE, {name: sections[name] for name in names}, write=chosen.write)


if __name__ == "__main__":
    main()
