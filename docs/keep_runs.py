"""Keeps of finished runs what a page about them needs, small enough for the repository.

    .venv/bin/python docs/keep_runs.py results/semi docs/results/runs/semi-synthetic

For every run METHOD/SEED below the first folder: its report, its configurations, what was selected, and what the
winners say about the test scans.  Of several heads only their mean is kept, which is what localization is scored by;
weights and histories stay behind.  `nguide reproduce semi-synthetic -o FOLDER` makes the tables of the result as it
does of runs, and `docs/compare_runs.py` tests differences, without training; `--report` needs the histories, too.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from normal_guidance.evaluation.predictions import PREDICTIONS
from normal_guidance.training.run_folder import PREDICTION_TABLE

DOCUMENTS = ("report.json", "config.json", "best.json")


def compact(table: pa.Table) -> pa.Table:
    """The test scans, with the heads' mean as the only head.

    Example:
        >>> one = {name: [None] for name in PREDICTIONS.names} | {"part": ["test"], "log_attention": [[[0.0], [0.0]]]}
        >>> compact(pa.table(one, schema=PREDICTIONS))["log_attention"].to_pylist()
        [[[0.0]]]
    """
    table = table.filter(pc.equal(table["part"], "test"))
    means = [[_log_mean(heads)] for heads in table["log_attention"].to_pylist()]
    column = PREDICTIONS.get_field_index("log_attention")
    return table.set_column(column, PREDICTIONS.field(column), pa.array(means, PREDICTIONS.field(column).type))


def _log_mean(heads: list[list[float]]) -> list[float]:
    if len(heads) == 1:
        return heads[0]
    return (torch.tensor(heads, dtype=torch.float64).logsumexp(0) - math.log(len(heads))).tolist()


def keep(run: Path, to: Path) -> int:
    """Copies one run; returns its size in bytes."""
    to.mkdir(parents=True, exist_ok=True)
    for name in DOCUMENTS:
        if (run / name).exists():
            shutil.copyfile(run / name, to / name)
    lists = ["attention.list.element", "log_attention.list.element.list.element"]
    texts = [field.name for field in PREDICTIONS if field.type == pa.string()]
    pq.write_table(
        compact(pq.read_table(run / PREDICTION_TABLE)),
        to / PREDICTION_TABLE,
        compression="zstd",
        compression_level=19,
        use_dictionary=texts,
        use_byte_stream_split=["logit", "probability", *lists],
    )
    return sum(file.stat().st_size for file in to.iterdir())


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"{len(sys.argv) - 1} folders given; give two: the runs, and where to keep them")
    source, target = map(Path, sys.argv[1:])
    for table in sorted(source.glob(f"**/{PREDICTION_TABLE}")):
        run = table.parent
        size = keep(run, target / run.parent.name / run.name)
        print(f"{run.parent.name} {run.name}: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
