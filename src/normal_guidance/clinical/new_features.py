"""Predict new scans that are given by their features: a feature store, or files that `nguide store import` takes.

Only a model whose features `nguide encode` did not make takes them.  There are no images, hence no pictures and no
DICOM results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

from normal_guidance.clinical.bundle import Bundle
from normal_guidance.clinical.new_scans import RESERVED, NotPredicted
from normal_guidance.clinical.predicting import DEFAULTS, Outcome, PredictOptions, outcome_of, scores_of
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.data.manifest import FEATURES, ScanRow
from normal_guidance.data.problems import Problem
from normal_guidance.data.scan_names import MOST_FOLDER_BYTES, folder_name, same_name
from normal_guidance.errors import UserError
from normal_guidance.features.feature_files import has_suffix
from normal_guidance.features.import_features import checked, read_scans
from normal_guidance.features.scan_layouts import Found, FoundScan
from normal_guidance.features.store import FeatureStore, open_store
from normal_guidance.features.store_place import is_store

Source = str | Path | Bags | FeatureStore
"""A feature store, a file of features, a folder of such files, or scans in memory."""


def predict_features(
    paths: Source | Sequence[Source], bundle: Bundle, options: PredictOptions = DEFAULTS
) -> Iterator[Outcome]:
    """Predict each scan of feature stores and files of features; labels are not read.

    Args:
        paths: stores, files of features, or folders of them; or scans in memory.
        bundle: the model.
        options: how scans are predicted; there is nothing to force, and no worker.
    """
    several = [paths] if isinstance(paths, Source) else list(paths)
    if bundle.encoder is not None:
        raise UserError(
            f"{several[0]} holds features, but the model takes scans: it was trained on features of the encoder "
            f"{bundle.encoder.name}; give the scans"
        )
    first = None
    for scan in _read_all(several):  # a damaged file or a double id is found before a result is written
        first = first or scan
    if first is None:
        raise UserError(f"{several[0]} holds no scan; give a feature store, or a file of features")
    wrong = _wrong_width(first, bundle)
    if wrong:  # all scans of a source have the same width, as a rule: one line instead of many
        raise UserError(f"{first.found.where}: scan {first.scan_id!r} {wrong}; make the features as for training")
    return _outcomes(_read_all(several), bundle, options)


def is_features(path: Path) -> bool:
    """Whether a path is a feature store or a file with the ending of one of features."""
    return is_store(path) or (path.is_file() and has_suffix(path))


def _read_all(sources: Sequence[Source]) -> Iterator[FoundScan]:
    return checked(chain.from_iterable(map(_read, sources)))


def _read(source: Source) -> Iterator[FoundScan]:
    if isinstance(source, FeatureStore):
        return _of_store(source)
    if isinstance(source, Bags):
        return _in_memory(source)
    path = Path(source)
    if is_store(path):
        return _of_store(open_store(path))
    try:
        return read_scans(path).scans
    except UserError as error:
        raise UserError(
            f"the model takes features, because it was trained on features that nguide encode did not make: {error}"
        ) from error


def _of_store(store: FeatureStore) -> Iterator[FoundScan]:
    found = Found(str(store.folder), (), {})
    for number, (scan, patient) in enumerate(zip(store.scan_ids, store.patient_ids, strict=True)):
        features = store.rows(torch.tensor([number]))
        yield FoundScan(found, scan, features, patient_id=patient, recipe=store.recipe)


def _in_memory(bags: Bags) -> Iterator[FoundScan]:
    found = Found("memory", (), {})
    for bag in bags:
        yield FoundScan(found, str(bag.scan_id), bag.features, patient_id=bag.patient_id)


def _outcomes(scans: Iterable[FoundScan], bundle: Bundle, options: PredictOptions) -> Iterator[Outcome]:
    for number, scan in enumerate(scans, start=1):
        row = _row(scan, f"scan-{number:03d}" if options.anonymize else "")
        wrong = _why_not(scan, bundle) or _why_no_folder(row.scan_id)
        if wrong:
            reason = Problem(row.scan_id, "", "failed", wrong, "left out")
            yield NotPredicted(row.scan_id, reason)
        else:
            scores = scores_of(bundle, scan.features)
            yield outcome_of(row, Path(scan.found.where).parent, scores, (), bundle, options)


def _why_not(scan: FoundScan, bundle: Bundle) -> str:
    """The reason why the model cannot take these features; empty if it can."""
    if wrong := _wrong_width(scan, bundle):
        return wrong
    if not len(scan.features):
        return "has no slices"
    finite = scan.features.isfinite()
    if finite.all():
        return ""
    place, feature = (~finite).nonzero()[0].tolist()
    return f"has features that are not finite: slice {place}, feature {feature}: {scan.features[place, feature]:g}"


def _wrong_width(scan: FoundScan, bundle: Bundle) -> str:
    width = scan.features.shape[1]
    if width == bundle.features:
        return ""
    return f"has {width} features a slice, but the model was trained on {bundle.features}"


def _why_no_folder(scan_id: str) -> str:
    name = folder_name(scan_id)
    fits = same_name(name) not in RESERVED and len(name.encode()) <= MOST_FOLDER_BYTES
    return "" if fits else "has an id that cannot be the name of its folder"


def _row(scan: FoundScan, anonymous: str) -> ScanRow:
    """A row without images: every slice names its file and its place in the scan."""
    slices = len(scan.features)
    return ScanRow(
        scan_id=anonymous or scan.scan_id,
        patient_id=anonymous or scan.patient_id or scan.scan_id,
        label=UNKNOWN,
        slice_labels=None,
        kind=FEATURES,
        files=(Path(scan.found.where).name,) * slices,
        frames=tuple(range(slices)),
        positions=tuple(map(float, range(slices))),
        rows=0,
        columns=0,
        modality="",
    )
