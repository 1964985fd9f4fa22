"""predictions.parquet: one row a scan, with its slices' attention as lists; its schema, its writer and its reader.

Runs, studies and `nguide predict` write this file; reports, bundles and `nguide view` read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.base.files import write_parquet
from normal_guidance.base.tables import read_columns, refuse_rows
from normal_guidance.core.bags import LabelledScans
from normal_guidance.core.prediction import Prediction

PREDICTIONS = pa.schema(
    {
        "group": pa.string(),
        "part": pa.string(),
        "scan_id": pa.string(),
        "patient_id": pa.string(),
        "label": pa.int8(),
        "logit": pa.float32(),
        "probability": pa.float32(),
        "slices": pa.int32(),
        "attention": pa.list_(pa.float32()),
        "log_attention": pa.list_(pa.list_(pa.float32())),
    }
)
"""`group` names the winner, empty where there is only one; `attention` is the heads' mean, `log_attention` per head.
For `SliceReference` these two hold the slices' probabilities and logits, and the scans' logit is NaN."""

NULLABLE = ("patient_id",)  # new scans whose ids are left out have no patient
AGAIN = "copy the run again, or delete it and start it again"


class ScanRows(NamedTuple):
    """Scans without features, as prediction makes them."""

    scan_ids: Sequence[str]
    patient_ids: Sequence[str]
    labels: Int[Tensor, "scans"]
    lengths: Int[Tensor, "scans"]


def prediction_table(
    scans: LabelledScans | ScanRows,
    prediction: Prediction,
    *,
    part: str,
    group: str = "",
    probability: Float[Tensor, "scans"] | None = None,
) -> pa.Table:
    """Rows of `PREDICTIONS` from the packed prediction by one winner; without `probability`, the logit's sigmoid."""
    lengths, count = scans.lengths.cpu(), len(scans.lengths)
    prediction = prediction.on_host()
    logit = prediction.logit.float()
    columns = {
        "group": [group] * count,
        "part": [part] * count,
        "scan_id": list(scans.scan_ids),
        "patient_id": list(scans.patient_ids),
        "label": scans.labels.cpu().numpy(),
        "logit": logit.numpy(),
        "probability": (logit.sigmoid() if probability is None else probability.float()).numpy(),
        "slices": lengths.numpy(),
        "attention": [scan.numpy() for scan in prediction.attention.float().split(lengths.tolist())],
        "log_attention": [list(scan.numpy()) for scan in prediction.log_attention.float().split(lengths.tolist(), 1)],
    }
    return pa.table(columns, schema=PREDICTIONS)


def packed_prediction(table: pa.Table) -> Prediction:
    """The inverse of `prediction_table`: the packed prediction in rows of one winner, all with the same heads."""
    per_scan = table["log_attention"].combine_chunks()
    heads = len(per_scan[0])
    flat = torch.from_numpy(per_scan.flatten().flatten().to_numpy().copy())
    scan_by_scan = flat.split([heads * slices for slices in table["slices"].to_pylist()])
    return Prediction(
        logit=torch.from_numpy(table["logit"].to_numpy().copy()),
        attention=torch.from_numpy(table["attention"].combine_chunks().flatten().to_numpy().copy()),
        log_attention=torch.cat([scan.reshape(heads, -1) for scan in scan_by_scan], dim=1),
    )


def write_predictions_table(path: Path, tables: Sequence[pa.Table]) -> None:
    """Write rows of `PREDICTIONS`, atomically; without tables, a file without rows."""
    write_parquet(path, pa.concat_tables([PREDICTIONS.empty_table(), *tables]))


def read_predictions(
    path: Path, columns: Sequence[str] = PREDICTIONS.names, *, part: str | None = None, group: str | None = None
) -> pa.Table:
    """Read columns of predictions.parquet, for all rows or only those of one part or one winner."""
    wanted = {name: value for name, value in (("part", part), ("group", group)) if value is not None}
    names = [name for name in PREDICTIONS.names if name in columns or name in wanted]
    table = read_columns(path, pa.schema([PREDICTIONS.field(name) for name in names]), AGAIN, NULLABLE)
    _check_lists(path, table)
    for name, value in wanted.items():
        table = table.filter(pc.equal(table[name], value))
    return table.select(list(columns))


def _check_lists(path: Path, table: pa.Table) -> None:
    """Refuse attention that does not fit the slices, where these columns are read."""
    if not {"scan_id", "slices"} <= set(table.column_names):
        return
    slices = table["slices"]
    refuse_rows(path, table, pc.less(slices, 1), "has no slice", AGAIN)
    if "attention" in table.column_names:
        wrong = pc.not_equal(pc.list_value_length(table["attention"]), slices)
        refuse_rows(path, table, wrong, "has not as many numbers of attention as slices", AGAIN)
    if "log_attention" in table.column_names:
        heads = table["log_attention"].combine_chunks()
        each = pc.list_value_length(heads.flatten()).to_numpy()
        of_scan = pc.list_parent_indices(heads).to_numpy()
        faulty = of_scan[each != slices.to_numpy()[of_scan]]
        wrong = np.isin(np.arange(len(heads)), faulty) | (heads.value_lengths().to_numpy() < 1)
        refuse_rows(path, table, pa.array(wrong), "has not as many numbers of log_attention as slices", AGAIN)
