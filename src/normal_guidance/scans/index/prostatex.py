"""PROSTATEx: ADC maps of the prostate (MR) with masks of the lesions, one scan per patient.

    PROSTATEx_Classes.csv                       ID (ProstateX-0000_Finding1), Clinically Significant (True, False)
    Images/ADC/ProstateX-0001_ep2d_diff_tra_8.nii.gz
    Masks/ADC/ProstateX-0005-Finding1-ep2d_diff_tra_DYNDIST_MIX_ADC_ROI.nii.gz     one mask per finding

A scan is positive if one of its findings is clinically significant; its positive slices are those in which a mask of
such a finding has a voxel, unknown without such a mask.  A scan without a row in the table counts as negative.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.containers import Mask, is_nifti
from normal_guidance.scans.index.labels import BINARY
from normal_guidance.scans.index.manifest import Labels
from normal_guidance.scans.index.problems import Problem, Report
from normal_guidance.scans.index.source import (
    Candidate,
    FileGroup,
    FolderScans,
    ScanSource,
    SourceOptions,
    bad_row,
    list_below,
    missing,
    read_texts,
    slices_of_masks,
)

if TYPE_CHECKING:
    from normal_guidance.scans.index.dicom_slices import Header
    from normal_guidance.scans.index.geometry import Ordered


LESIONS = "Files/lesions"  # the folder of the clone that holds the table, the images and the masks

TABLE, IMAGES, MASKS = "PROSTATEx_Classes.csv", "Images/ADC", "Masks/ADC"
DERIVED = "labels.csv"
ID, SIGNIFICANT = "ID", "Clinically Significant"
MODALITY = "MR"

ATTRIBUTION = (
    'Masks: Cuocolo et al., "PROSTATEx masks" (github.com/rcuocolo/PROSTATEx_masks, CC BY 4.0).',
    "Images: SPIE-AAPM-NCI PROSTATEx challenge (The Cancer Imaging Archive). Cite both.",
)
"""What a page with results on these scans says."""


def open_prostatex(root: Path, options: SourceOptions, report: Report) -> ScanSource:
    """Opens the clone, its folder Files/lesions, or a folder with labels.csv."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give the clone of github.com/rcuocolo/PROSTATEx_masks")
    if (root / DERIVED).is_file() and not (root / TABLE).is_file():
        return FolderScans(root, SourceOptions(table=root / DERIVED), report, MODALITY)
    return ProstateScans(root / LESIONS if (root / LESIONS).is_dir() else root, report)


class ProstateScans(ScanSource):
    """The ADC maps and masks as the public repository holds them."""

    def __init__(self, base: Path, report: Report) -> None:
        for name in (TABLE, IMAGES, MASKS):
            if not (base / name).exists():
                clone = f"the clone of github.com/rcuocolo/PROSTATEx_masks, which has {LESIONS}/{name}"
                raise UserError(f"{base / name} is not there; give {clone}")
        self.root, self.report = base.resolve(), report
        self.significant = _read_classes(base / TABLE, report)
        self.images = self._find_images()
        self.masks = self._find_masks()
        self.expected_groups = len(self.images)

    def _volumes(self, folder: str) -> list[str]:
        return sorted(file for file in list_below(self.root, folder, self.report) if is_nifti(file))

    def _find_images(self) -> dict[str, str]:
        """The image of each patient; of several, the one whose name sorts first."""
        images: dict[str, str] = {}
        for file in self._volumes(IMAGES):
            named = re.match(r"(ProstateX-\d+)_", PurePosixPath(file).name)
            if named is None:
                detail = "the name does not begin with a patient, as ProstateX-0001_ does"
                self.report(Problem("", file, "image_without_label", detail, "left out"))
            elif named[1] in images:
                detail = f"a second image of the patient, beside {images[named[1]]}"
                self.report(Problem(named[1], file, "double_scan", detail, "the first one counts"))
            else:
                images[named[1]] = file
        return images

    def _find_masks(self) -> dict[str, list[str]]:
        """The masks of each patient's significant findings; those that the table does not list are reported."""
        masks: dict[str, list[str]] = defaultdict(list)
        for file in self._volumes(MASKS):
            named = re.match(r"(ProstateX-\d+)[-_](Finding\d+)[-_]", PurePosixPath(file).name)
            patient, finding = named.groups() if named else ("", "")
            if finding not in self.significant.get(patient, {}):
                detail = f"{TABLE} has no row {patient}_{finding}" if named else "the name has no patient and finding"
                self.report(Problem(patient, file, "image_without_label", detail, "mask ignored"))
            elif self.significant[patient][finding]:
                masks[patient].append(file)
        return masks

    def groups(self) -> Iterator[FileGroup]:
        for patient, file in self.images.items():
            yield FileGroup(patient, [file], self.masks.get(patient, ()), MODALITY)

    def candidates(self, group: FileGroup, headers: Sequence[Header]) -> Iterator[Candidate]:
        if headers:
            yield Candidate(group.name, group.name, headers)

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        patient = candidate.scan_id
        known = self.significant.get(patient)
        if known is None:
            detail = f"no row of {TABLE}"
            self.report(Problem(patient, "", "image_without_label", detail, "no finding: counts as negative"))
        if not any((known or {}).values()):
            return Labels(0, np.zeros(len(ordered.slices), np.int8))
        wanted = self.masks.get(patient, [])
        names = [PurePosixPath(file).name for file in wanted]
        for finding, significant in self.significant[patient].items():
            if significant and not any(re.match(rf"{patient}[-_]{finding}[-_]", name) for name in names):
                action = "its slices count as negative" if names else "positive without slice labels"
                detail = f"{finding} is clinically significant and has no mask in {MASKS}"
                self.report(Problem(patient, "", "label_mismatch", detail, action))
        return Labels(1, self._slices(patient, wanted, ordered, masks) if wanted else None)

    def _slices(
        self, patient: str, wanted: Sequence[str], ordered: Ordered, masks: Sequence[Mask]
    ) -> np.ndarray | None:
        """The slices in which a mask has a voxel; None, with a report, if a mask is missing, empty or does not fit."""
        try:
            if len(masks) < len(wanted):
                raise ValueError(f"{len(wanted) - len(masks)} of {len(wanted)} masks cannot be read")
            slices = slices_of_masks(masks, ordered)
            if not slices.any():
                raise ValueError(f"mask {wanted[0]} has no voxel")
        except ValueError as error:
            self.report(Problem(patient, "", "label_mismatch", str(error), "positive without slice labels"))
            return None
        return slices

    def finish(self) -> None:
        for patient in sorted(self.significant.keys() - self.images.keys()):
            findings = ", ".join(self.significant[patient])
            self.report(missing(patient, "", f"no image in {IMAGES}; the table has {findings}"))


def _read_classes(path: Path, report: Report) -> dict[str, dict[str, bool]]:
    """Whether each finding of each patient is clinically significant."""
    texts = read_texts(path, (ID, SIGNIFICANT), report)
    classes: dict[str, dict[str, bool]] = {}
    for name, word in zip(texts[ID].to_pylist(), texts[SIGNIFICANT].to_pylist(), strict=True):
        named = re.fullmatch(r"(ProstateX-\d+)[-_](Finding\d+)", name)
        if named is None or word.lower() not in BINARY:
            report(bad_row(path, f"{ID} is {name!r}, {SIGNIFICANT} is {word!r}"))
            continue
        (patient, finding), value = named.groups(), bool(BINARY[word.lower()])
        known = classes.setdefault(patient, {})
        if finding in known:
            same = known[finding] == value
            kind, action = ("double_label", "counted once") if same else ("conflicting_label", "counts as True")
            report(Problem(patient, path.name, kind, f"{finding} is {known[finding]} and {value}", action))
        known[finding] = value or known.get(finding, False)
    if not classes:
        raise UserError(f"{path} has no usable row; it needs {ID} (ProstateX-0000_Finding1) and {SIGNIFICANT}")
    return classes
