"""What winners say about every scan, as a table: one row a scan, with its slices' attention as lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.models import Prediction
from normal_guidance.features.store import FeatureStore

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
"""`group` names the winner, empty where there is one only; `attention` is the heads' mean, `log_attention` per head.

Of the slice reference (`SliceReference`) they are the slices' probabilities and logits, and scans have no logit (NaN).
"""


def prediction_table(scans: Bags | FeatureStore, prediction: Prediction, *, part: str, group: str = "") -> pa.Table:
    """Packed predictions for scans of one part, by one winner, as the columns of `PREDICTIONS`.

    Example:
        >>> from normal_guidance.core.models import build_model
        >>> bags = Bags(torch.randn(5, 8), torch.tensor([2, 3]), torch.tensor([0, 1]), scan_ids=("A17", "B02"))
        >>> table = prediction_table(bags, build_model("mean", 8)(bags.features, bags.layout), part="test")
        >>> table["attention"].to_pylist()
        [[0.5, 0.5], [0.333, 0.333, 0.333]]
    """
    lengths, count = scans.lengths.cpu(), len(scans.lengths)
    logit, attention, log_attention = (field.detach().cpu().float() for field in prediction)
    columns = {
        "group": [group] * count,
        "part": [part] * count,
        "scan_id": list(scans.scan_ids),
        "patient_id": list(scans.patient_ids),
        "label": scans.labels.cpu().numpy(),
        "logit": logit.numpy(),
        "probability": logit.sigmoid().numpy(),
        "slices": lengths.numpy(),
        "attention": _lists(attention, lengths),
        "log_attention": _lists_per_head(log_attention, lengths),
    }
    arrays: Sequence[pa.Array] = [
        column if isinstance(column, pa.Array) else pa.array(column, type=PREDICTIONS.field(name).type)
        for name, column in columns.items()
    ]
    return pa.Table.from_arrays(arrays, schema=PREDICTIONS)


def _lists(values: Tensor, lengths: Int[Tensor, "lists"]) -> pa.ListArray:
    """One list after the other, made without a Python object for each number."""
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(values.numpy()))


def _lists_per_head(values: Tensor, lengths: Int[Tensor, "scans"]) -> pa.ListArray:
    """For each scan a list of heads, each a list of its slices."""
    heads = values.shape[0]
    scan_by_scan = torch.cat([part.flatten() for part in values.split(lengths.tolist(), dim=1)])
    inner = _lists(scan_by_scan, lengths.repeat_interleave(heads))
    return pa.ListArray.from_arrays(_offsets(torch.full_like(lengths, heads)), inner)


def _offsets(lengths: Int[Tensor, "lists"]) -> pa.Array:
    return pa.array(np.concatenate([[0], lengths.cumsum(0).numpy()]), type=pa.int32())
