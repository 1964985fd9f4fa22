"""Sources of scans and labels: three challenges as Kaggle distributes them, PROSTATEx, and any folder with a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from normal_guidance.scans.index.problems import Report
from normal_guidance.scans.index.prostatex import ATTRIBUTION, open_prostatex
from normal_guidance.scans.index.rsna import AbdomenScans, ChestScans, HeadScans
from normal_guidance.scans.index.source import (
    Candidate,
    FolderScans,
    Group,
    ScanSource,
    SourceOptions,
)

__all__ = ["SOURCES", "Candidate", "Group", "ScanSource", "Source", "SourceOptions"]


@dataclass(frozen=True)
class Source:
    """One kind of dataset."""

    title: str
    open: Callable[[Path, SourceOptions, Report], ScanSource]
    options: tuple[str, ...] = ()
    """Fields of `SourceOptions` that this source uses."""
    attribution: tuple[str, ...] = ()
    """Sentences that a page with results on these scans must carry."""


SOURCES = {
    "rsna-ich": Source("head CT, RSNA 2019 Intracranial Hemorrhage", HeadScans),
    "rsna-pe": Source("chest CT, RSNA 2020 Pulmonary Embolism", ChestScans),
    "rsna-at": Source("abdominal CT, RSNA 2023 Abdominal Trauma", AbdomenScans, ("labels",)),
    "prostatex": Source(
        "prostate MR (ADC maps), PROSTATEx with masks of its lesions", open_prostatex, attribution=ATTRIBUTION
    ),
    "folder": Source("DICOM folders, zips or NIfTI files with a table", FolderScans, ("table", "findings")),
}
"""The sources of `nguide index`."""
