"""Statistics of labelled scans: lengths, blocks of positive slices, and their places in a scan.

They fill the three block tables and the density figure of the paper, for any manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from normal_guidance.core.bags import UNKNOWN
from normal_guidance.core.blocks import PERCENTILES, BlockStatistics, block_statistics
from normal_guidance.data.manifest import Manifest
from normal_guidance.errors import UserError

BINS = 20
"""Bars of the density figure, as in the paper."""


@dataclass(frozen=True, eq=False)
class Description:
    """Counts, and statistics of the scans with slice labels; made by `describe`."""

    scans: int
    positive: int
    patients: int
    slices: int
    labelled: int
    """Scans with slice labels."""
    positive_slices: int
    lengths: Mapping[str, float]
    """Mean and percentiles of the slices per scan."""
    blocks: BlockStatistics | None
    """None where no slice is labelled positive."""
    density: np.ndarray
    """Density of the positive slices' relative position j / S in `BINS` equal bins; it integrates to one."""

    def to_dict(self) -> dict[str, Any]:
        """The statistics as JSON values."""
        blocks = self.blocks
        return {
            **{name: getattr(self, name) for name in ("scans", "positive", "patients", "slices", "labelled")},
            "positive_slices": self.positive_slices,
            "lengths": dict(self.lengths),
            "bags_by_blocks": {} if blocks is None else {str(k): v for k, v in blocks.bags_by_blocks.items()},
            "blocks": {} if blocks is None else {**blocks.summary(), "receptive_field": blocks.receptive_field},
            "density": self.density.tolist(),
        }


@runtime_checkable
class LabelledScans(Protocol):
    """The values of a set of scans that `describe_scans` needs; `Bags` and feature stores have them."""

    @property
    def lengths(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def slice_labels(self) -> Tensor | None: ...
    @property
    def patient_ids(self) -> tuple[str, ...]: ...


def describe(manifest: Manifest) -> Description:
    """Describes all scans of a manifest."""
    if not len(manifest):
        raise UserError("the manifest has no scans; index some first")
    column = manifest.table["slice_labels"].combine_chunks()
    known = column.is_valid().to_numpy(zero_copy_only=False)
    labels = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    return _describe(manifest.lengths, manifest.labels, manifest.patient_ids, known, labels)


def describe_scans(scans: LabelledScans) -> Description:
    """Describes scans with features, as `describe` does those of a manifest."""
    lengths, known, labels = scans.lengths.cpu(), np.zeros(len(scans.lengths), bool), np.zeros(0, np.int64)
    if scans.slice_labels is not None:
        packed = scans.slice_labels.cpu()
        known = np.array([bool((own != UNKNOWN).all()) for own in packed.split(lengths.tolist())])
        labels = packed.numpy()[np.repeat(known, lengths.numpy())].astype(np.int64)
    return _describe(lengths.numpy(), scans.labels.cpu().numpy(), scans.patient_ids, known, labels)


def _describe(
    lengths: np.ndarray, labels: np.ndarray, patient_ids: Sequence[str], known: np.ndarray, slice_labels: np.ndarray
) -> Description:
    """`known` says for each scan whether its slices are labelled; `slice_labels` are the packed labels of those."""
    own, positive = lengths[known], int(slice_labels.sum())
    blocks = block_statistics(torch.from_numpy(slice_labels), torch.from_numpy(own)) if positive else None
    return Description(
        scans=len(lengths),
        positive=int(labels.sum()),
        patients=len(set(patient_ids)),
        slices=int(lengths.sum()),
        labelled=int(known.sum()),
        positive_slices=positive,
        lengths=_percentiles(lengths),
        blocks=blocks,
        density=positive_density(slice_labels, own),
    )


def positive_density(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Density of the relative position j / S of the positive slices, j from 1, in `BINS` bins between 0 and 1."""
    ends = np.repeat(lengths.cumsum(), lengths)
    sizes = np.repeat(lengths, lengths)
    slice_number = np.arange(1, len(labels) + 1) - (ends - sizes)
    relative = slice_number[labels == 1] / sizes[labels == 1]
    # A slice at the border of two bins belongs to the lower one: j / S lies in (0, 1].
    found = np.clip(np.ceil(relative * BINS - 1e-9).astype(int) - 1, 0, BINS - 1)
    counts = np.bincount(found, minlength=BINS)
    return counts / max(1, counts.sum()) * BINS


def _percentiles(values: np.ndarray) -> dict[str, float]:
    found = np.quantile(values, list(PERCENTILES.values()))
    return {"mean": float(values.mean()), **dict(zip(PERCENTILES, map(float, found), strict=True))}
