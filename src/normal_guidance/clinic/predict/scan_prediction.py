"""The prediction for one scan, from which JSON, pictures, pages and DICOM results are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.prediction import attention_per_head
from normal_guidance.fit.bundle import ModelIdentity
from normal_guidance.scans.index.manifest import FEATURES, Finding, ScanRow
from normal_guidance.scans.index.problems import Problem, cautions
from normal_guidance.statistics.conformal import promise


@dataclass(frozen=True, eq=False)
class ScanPrediction:
    """The prediction for one scan.

    A position is a slice's place in `row` and in arrays, counted from 0; a slice is counted from 1, as people count.
    Both ascend from the feet to the head in axial scans.

    Args:
        row: the scan's ids, files and geometry, as a manifest has them; its label is meaningless here.
        root: the folder that `row.files` are relative to.
        method: a name in `METHODS`.
        logit: the model's, not calibrated.
        probability: calibrated, if the model's bundle has a calibration.
        threshold: the probability from which on a scan is positive; None if none was chosen.
        log_attention: one row a head, as the model gives it in float64; its exponential need not sum to one.
        key_positions: where attention is highest, the highest first.
        interval_positions: first and last position of the interval, both included; `meaning` says what of.
        share: of the attention that the interval holds, as the shortest that does; None for a calibrated interval.
        coverage: the probability with which the interval of a positive scan contains the whole finding; None where
            nothing is promised.
        problems: everything that was odd about the scan.
        finding: what was looked for; None where it has no name.
        model: which model it is of.
        model_cautions: what that model was not shown to do (`Bundle.cautions`).
        further: the predictions for other findings of the same scan.
    """

    row: ScanRow
    root: Path
    method: str
    logit: float
    probability: float
    threshold: float | None
    log_attention: Float[Tensor, "heads slices"]
    key_positions: tuple[int, ...]
    interval_positions: tuple[int, int]
    share: float | None
    coverage: float | None = None
    problems: tuple[Problem, ...] = ()
    finding: Finding | None = None
    model: ModelIdentity | None = None
    model_cautions: tuple[str, ...] = ()
    further: tuple[ScanPrediction, ...] = ()

    def __repr__(self) -> str:
        side = {None: "no threshold", True: "positive", False: "negative"}[self.is_positive]
        sought = "" if self.finding is None else f"{self.finding.name} "
        return f"ScanPrediction({self.row.scan_id!r}, {sought}probability {self.probability:.3f}, {side})"

    @property
    def each(self) -> tuple[ScanPrediction, ...]:
        """The predictions for all findings, this one first."""
        return (self, *self.further)

    @cached_property
    def head_attention(self) -> Float[Tensor, "heads slices"]:
        """One row a head; each sums to one over the slices."""
        return attention_per_head(self.log_attention)

    @cached_property
    def attention(self) -> Float[Tensor, "slices"]:
        """The heads' mean; it sums to one."""
        return self.head_attention.mean(0)

    @property
    def has_images(self) -> bool:
        """Whether there are slices to look at; a scan may also be given by its features alone."""
        return self.row.kind != FEATURES

    @property
    def instance_numbers(self) -> list[int | None]:
        """DICOM's number of every slice, which hospital software shows; None where there is none, as in NIfTI."""
        return list(self.row.instance_numbers or [None] * len(self.row))

    @property
    def is_positive(self) -> bool | None:
        """Whether the probability reaches the threshold; None if there is none."""
        return None if self.threshold is None else self.probability >= self.threshold

    @property
    def sought(self) -> str:
        """What was looked for."""
        if self.finding is not None:
            return str(self.finding)
        dataset = (self.model and self.model.dataset) or "its training scans"
        return f"what the labels of {dataset} call positive; the model does not name its finding"

    @property
    def cautions(self) -> tuple[str, ...]:
        """What is wrong with this scan, and what a reader must know of it before trusting its result."""
        return tuple(caution.text for caution in cautions(self.problems))

    @property
    def body_part(self) -> str:
        """The body part that the source's headers name; "not stated" where they name none."""
        return self.row.body_part or "not stated"

    @property
    def key_slices(self) -> tuple[int, ...]:
        """The key slices, counted from 1, the highest attention first."""
        return tuple(position + 1 for position in self.key_positions)

    @property
    def interval(self) -> tuple[int, int] | None:
        """First and last slice, counted from 1, both included; None for a scan that was called negative."""
        first, last = self.interval_positions
        return None if self.is_positive is False else (first + 1, last + 1)

    @property
    def key_slices_sentence(self) -> str:
        """What the key slices say: those of a scan that was called negative point at no finding."""
        if self.is_positive is None:
            return "Highest attention; no threshold was chosen, so the scan is called neither positive nor negative."
        if self.is_positive:
            return "Highest attention, scan called positive: where the model looked, which need not show the finding."
        return "Highest attention, scan called negative: the key slices point at no finding."

    def key_slice_name(self, position: int) -> str:
        """The name of a key slice, counted by attention among the key slices: "key slice 1" has the highest."""
        return f"key slice {self.key_positions.index(position) + 1}"

    @property
    def meaning(self) -> str:
        """What the interval does: these words follow "the interval" in every result."""
        if self.coverage is not None:
            return promise(self.coverage)
        return f"is the shortest with {100 * (self.share or 0):g} % of the attention and promises nothing"

    @property
    def interval_sentence(self) -> str:
        """Where the interval is, and its meaning; a scan that was called negative has none."""
        if self.interval is None:
            return "No interval: the scan is called negative."
        first, last = map(self.row.slice_name, self.interval_positions)
        where = f"slice {first}" if first == last else f"slices {first} to {last}"
        return f"The interval, {where} of {len(self.row)}, {self.meaning}."
