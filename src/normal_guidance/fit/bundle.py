"""A trained model with everything that new scans need, and nothing about the patients it was trained on.

    bundle.json          method, configuration, encoder and its fingerprint, preprocessing, expected scans, calibration,
                         threshold, and how the model was trained
    model.safetensors    the model's weights, without the encoder's

A bundle is read from such a folder, or straight from the folder of a run that was trained on a store.  A store which
`nguide encode` made records how slices become features; a model of other features takes features instead of scans.
A folder of several findings has a bundle for each, in a folder of its name, and findings.json.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from normal_guidance import __version__
from normal_guidance.base.errors import UserError, reading
from normal_guidance.base.files import folder_atomically, make_folder, read_json, write_json
from normal_guidance.base.records import Between, read_as
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.methods import ENSEMBLE, EVERY_METHOD
from normal_guidance.fit.ensemble import Ensemble
from normal_guidance.scans.features.encoders import Encoder, Precision, load_encoder
from normal_guidance.scans.features.preprocessing import Preprocessing, ScanSummary, is_encoded, scans_behind
from normal_guidance.scans.features.store import DtypeName
from normal_guidance.scans.features.windows import plane_of
from normal_guidance.scans.index.manifest import Finding, ScanRow, ValueRange, Values, findings_in, write_findings
from normal_guidance.statistics.calibration import Operation, choose_operation
from normal_guidance.statistics.conformal import IntervalCalibration
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.predictions import read_predictions
from normal_guidance.sweep.run import (
    PREDICTION_TABLE,
    REPORT,
    find_folders,
    load_run,
    load_winner,
    record_as_json,
    refuse_data,
    winner_model,
)

SPACING_SLACK = 1.5  # slice spacing may be smaller or larger than in the training scans by this factor
FEWEST_SHARE = 0.5  # a scan is too short with less than this share of the slices of the shortest training scan


@dataclass(frozen=True)
class Expectations:
    """The kind of the training scans; what was not recorded is None or empty, and not checked."""

    modalities: tuple[str, ...] = ()  # as DICOM abbreviates them
    planes: tuple[str, ...] = ()  # axial, coronal, sagittal
    slice_spacing: tuple[float, float] | None = None  # in mm, the 1st and 99th percentile of the training scans
    fewest_slices: Annotated[int, Between(0.0)] | None = None
    most_slices: Annotated[int, Between(0.0)] | None = None  # longer scans are accepted
    values: ValueRange | None = None  # `why_not_values` compares a scan's with them

    @staticmethod
    def from_scans(scans: ScanSummary | None) -> Expectations:
        if scans is None:
            return Expectations()
        spacing = scans.slice_spacing
        return Expectations(
            modalities=tuple(scans.modalities),
            planes=tuple(scans.planes),
            slice_spacing=None if spacing is None else (spacing.low, spacing.high),
            fewest_slices=scans.slices.fewest,
            most_slices=scans.slices.most,
            values=scans.values,
        )

    def why_not(self, row: ScanRow) -> list[str]:
        """Reasons why a scan is not of this kind, each with its value and the range; empty if it is."""
        reasons = []
        if self.modalities and row.modality not in self.modalities:
            reasons.append(f"its modality is {row.modality}; the model was trained on {', '.join(self.modalities)}")
        plane = plane_of(row.orientation)
        if self.planes and plane is not None and plane not in self.planes:
            reasons.append(f"its slices are {plane}; the model was trained on {' and '.join(self.planes)} ones")
        if self.slice_spacing is not None and row.slice_spacing is not None:
            low, high = self.slice_spacing
            least, most = low / SPACING_SLACK, high * SPACING_SLACK
            if not least <= row.slice_spacing <= most:
                reasons.append(
                    f"its slices are {row.slice_spacing:.3g} mm apart; the model was trained on {low:.3g} to "
                    f"{high:.3g} mm and takes {least:.3g} to {most:.3g} mm"
                )
        if len(row) < self.least_slices:
            reasons.append(
                f"it has {len(row)} slice{'' if len(row) == 1 else 's'}; the model was trained on {self.fewest_slices} "
                f"to {self.most_slices} and takes {self.least_slices} or more"
            )
        return reasons

    @property
    def least_slices(self) -> int:
        return 1 if self.fewest_slices is None else math.ceil(self.fewest_slices * FEWEST_SHARE)

    def __str__(self) -> str:
        spacing = self.slice_spacing
        parts = [
            ", ".join(self.modalities),
            ", ".join(self.planes),
            "" if spacing is None else f"slices {spacing[0]:.3g} to {spacing[1]:.3g} mm apart",
            "" if self.fewest_slices is None else f"{self.fewest_slices} to {self.most_slices} slices",
        ]
        return ", ".join(part for part in parts if part) or "not recorded"


HU_SLACK = 500.0  # HU may lie so far outside those of the training scans: half of the step from air to water
NO_AIR = -200.0  # lowest values above this are not air, and are accepted only as far as the training scans have them

SCALE_SLACK = 4.0  # values of other images, which have no unit, may differ from the training scans' by this factor
NEGATIVE_SHARE = 0.25  # where no training scan has negative values, a scan's reach down to this share of its highest
DISTINCT_SHARE = 0.1  # a scan with less than this share of the training scans' different values is a mask or a drawing

# What NIfTI files are compared with where the training scans' values were not recorded.
ANY_CT, ANY_OTHER = ValueRange((-1024.0, -1000.0), (200.0, 3071.0), 640), ValueRange((0.0, 0.0), (0.0, 0.0), 640)


def why_not_values(known: ValueRange | None, row: ScanRow, values: Values, *, any_scale: bool) -> list[str]:
    """Reasons why the values of a scan are not as in the training scans, if those were recorded; empty if they are."""
    # NIfTI does not say its modality, and headers may be wrong: only values tell CT in HU from MR, windowed copies and
    # masks.  `any_scale`: the model does not see the scale of values, because its windows are percentiles.
    if known is None:
        if row.kind != "nifti":
            return []
        known, any_scale = (ANY_CT, any_scale) if row.modality == "CT" else (ANY_OTHER, True)
    reasons = []

    def unlike(which: str, value: float, expected: tuple[float, float], why: str = "") -> None:
        trained = f"those of the training scans {expected[0]:.4g} to {expected[1]:.4g}"
        reasons.append(f"its {which} values are about {value:.4g} and {trained}{why}")

    if values.distinct < DISTINCT_SHARE * known.distinct:
        reasons.append(f"it has {values.distinct} different values, as a mask or a drawing has")
    if row.modality == "CT":
        if values.low > max(known.low[1], min(known.low[1] + HU_SLACK, NO_AIR)):
            unlike("lowest", values.low, known.low, ": it may not be CT in HU")
        if values.high < known.high[0] - HU_SLACK:  # higher ones are metal
            unlike("highest", values.high, known.high)
        return reasons
    if known.low[0] >= 0 and values.low < -NEGATIVE_SHARE * abs(values.high):
        unlike("lowest", values.low, known.low, ": it may be CT")
    if not any_scale and not known.high[0] / SCALE_SLACK <= values.high <= known.high[1] * SCALE_SLACK:
        unlike("highest", values.high, known.high)
    return reasons


@dataclass(frozen=True)
class ModelIdentity:
    """A model as every result names it; what is unknown is None."""

    fingerprint: str  # SHA-256 of its weights and of everything that turns a scan into a result
    method: str
    version: str | None = None  # of normal-guidance, which trained it
    dataset: str | None = None
    scans: int | None = None  # how many training scans there were
    date: str | None = None

    @property
    def short(self) -> str:
        return self.fingerprint[:12]  # enough to tell models apart, and to read aloud

    def __str__(self) -> str:
        dataset = f" of {self.dataset}" if self.dataset else ""
        scans = "" if self.scans is None else f" on {self.scans} scans{dataset}"
        version = f" with normal-guidance {self.version}" if self.version else ""
        date = f" on {self.date[:10]}" if self.date else ""
        training = f", trained{scans}{version}{date}" if scans or version or date else ""
        return f"model {self.short} ({self.method}){training}"


BUNDLE, WEIGHTS = "bundle.json", "model.safetensors"
AGAIN = "make the bundle again: nguide bundle RUN -o BUNDLE"


@dataclass(frozen=True)
class EncoderId:
    """Which encoder made the features: other weights under the same name have another fingerprint."""

    name: str
    fingerprint: str


@dataclass(frozen=True, eq=False, kw_only=True)
class BundleFacts:
    """What a bundle and its file hold in the same form; `Bundle` says what each is."""

    config: Config | None
    features: Annotated[int, Between(1.0, 2.0**31)]
    dtype: DtypeName
    encoder: EncoderId | None
    repair: bool
    expects: Expectations
    operation: Operation
    finding: Finding | None = None
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Bundle(BundleFacts):
    """A model, ready for new scans.

    Args:
        config: method and hyperparameters; None for an ensemble (`nguide fit`), which needs none.
        model: with its weights, in eval mode.
        features: number of features per slice.
        dtype: dtype of the store that it was trained on; features are rounded to it.
        encoder: which encoder makes the features; None if `nguide encode` did not make them.
        preprocessing: how a scan is prepared for the encoder; None without an encoder.
        repair: whether known mistakes in the files are mended.
        expects: which scans it was made for.
        operation: calibration and threshold.
        training: dataset, numbers of scans, scores, seed, commit, date; for people to read.
        intervals: makes intervals that contain the finding with a known probability; None without slice labels.
        finding: what it finds; None where it has no name.
        cautions: sentences about what the model was not shown to do (`MeasuredFit.cautions`); each of its results says
            them.  Empty for the model of a run, where nothing was recorded.
        further: models of other findings, of the same features; scans are encoded once for all.
    """

    model: nn.Module
    preprocessing: Preprocessing | None
    training: Mapping[str, Any]
    intervals: IntervalCalibration | None = None
    further: tuple[Bundle, ...] = ()

    @property
    def each(self) -> tuple[Bundle, ...]:
        """The bundles of all findings, this one first."""
        return (self, *self.further)

    @property
    def method(self) -> str:
        """A name in `METHODS`, or `ENSEMBLE`."""
        return ENSEMBLE if self.config is None else self.config.method

    @property
    def threshold(self) -> float | None:
        """The probability from which on a scan is positive; None if none could be chosen."""
        return None if self.operation.point is None else self.operation.point.threshold

    @cached_property
    def identity(self) -> ModelIdentity:
        """Which model this is, for its results."""
        about = {name: value for name, value in self.as_json().items() if name != "normal_guidance"}
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        dataset = self.training.get("dataset")
        return ModelIdentity(
            digest.hexdigest(),
            self.method,
            self.training.get("normal_guidance"),
            None if dataset == "folder" else dataset,  # the source of users' own scans, which names none
            self.training.get("scans", {}).get("train"),
            self.training.get("date"),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything but the weights."""
        facts = {each.name: record_as_json(getattr(self, each.name)) for each in fields(BundleFacts)}
        for name in ("finding", "cautions"):
            if not facts[name]:
                del facts[name]
        return {
            "normal_guidance": __version__,
            "method": self.method,
            **facts,
            "ensemble": self.model.as_json() if isinstance(self.model, Ensemble) else None,
            "preprocessing": None if self.preprocessing is None else self.preprocessing.to_dict(),
            "intervals": None if self.intervals is None else self.intervals.to_dict(),
            "training": dict(self.training),
        }

    def encoding(self) -> tuple[EncoderId, Preprocessing]:
        """How a scan becomes features; a model that does not know it is refused."""
        if self.encoder is None or self.preprocessing is None:
            raise UserError(
                "the model was trained on features that nguide encode did not make, so how a new scan becomes such "
                "features is unknown; give features: nguide predict FEATURES --model MODEL -o OUT"
            )
        return self.encoder, self.preprocessing

    def load_encoder(
        self,
        name: str | None = None,
        *,
        weights: Path | None = None,
        device: str = "cpu",
        precision: Precision = "float32",
        offline: bool = False,
    ) -> Encoder:
        """Load the encoder that the model was trained with, as `load_encoder` does; one with other weights is refused.

        Args:
            name: name or place of the encoder, if it has changed since training.
            weights: the weights' file, if the model was trained with the user's own weights.
        """
        known, preprocessing = self.encoding()
        wanted = (name or known.name).partition("+")[0]  # NAME+HASH: weights of the user's own
        channels = preprocessing.channels
        encoder = load_encoder(
            wanted, weights=weights, device=device, precision=precision, channels=channels, offline=offline
        )
        if encoder.fingerprint != known.fingerprint:
            raise UserError(
                f"the model was trained with the encoder {known.name}, fingerprint "
                f"{known.fingerprint[:16]}, but {encoder.name} here has {encoder.fingerprint[:16]}; give the "
                "right one: --encoder NAME, or --weights FILE"
            )
        return encoder


def load_bundle(folder: str | Path) -> Bundle:
    """Load a bundle from its folder, or make it from a run with one winner; a folder of several findings gives all.

    Example:
        >>> load_bundle("nowhere")
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: nowhere is neither a bundle (no bundle.json) nor a complete run (no
        report.json); give the folder of one
    """
    folder = Path(folder)
    findings = findings_in(folder)
    if findings:
        return _together(folder, {finding: load_bundle(folder / finding.name) for finding in findings})
    return _read(folder) if (folder / BUNDLE).is_file() else bundle_run(folder)


def _together(folder: Path, bundles: Mapping[Finding, Bundle]) -> Bundle:
    """The first bundle with the others; all must be of their findings and take the same features."""
    first, *others = bundles.values()
    shared = ("features", "dtype", "encoder", "preprocessing", "repair")
    for finding, bundle in bundles.items():
        if bundle.finding != finding or any(getattr(bundle, name) != getattr(first, name) for name in shared):
            raise UserError(
                f"{folder / finding.name} was not fitted together with {folder / next(iter(bundles)).name}; fit all "
                "findings again: nguide fit STORE -o MODEL"
            )
    return replace(first, further=tuple(others))


def bundle_run(folder: str | Path, *, group: str = "", sensitivity: float | None = None) -> Bundle:
    """Make the bundle of a run's winner, or of what `nguide fit` made.

    Args:
        folder: folder of the run or of the model.
        group: which winner, where the run has several.
        sensitivity: least sensitivity of the threshold on the validation scans; without it, Youden's J chooses.
    """
    folder = Path(folder)
    findings = findings_in(folder)
    if findings:
        return _together(folder, {each: bundle_run(folder / each.name, sensitivity=sensitivity) for each in findings})
    if (folder / BUNDLE).is_file():
        return _with_threshold(folder, sensitivity)
    refuse_data(folder)
    if not (folder / REPORT).is_file():
        # People give a folder of runs, METHOD/SEED, by mistake.
        below = [f", such as {run}" for _, _, run in find_folders(folder) if (run / REPORT).is_file()]
        raise UserError(
            f"{folder} is neither a bundle (no {BUNDLE}) nor a complete run (no {REPORT}); give the folder of one"
            f"{below[0] if below else ''}"
        )
    run = load_run(folder)
    winner = run.winner(group, choose=f"choose a group with nguide bundle {folder} --group NAME")
    method = EVERY_METHOD.get(winner.config.method)
    if method is None or not method.scores_scans:
        raise UserError(
            f"{run.folder} is a run of {winner.config.method}, which does not score scans; give another run"
        )
    features = run.report.get("features")
    if features is None:
        raise UserError(
            f"{run.folder} does not say how its features were made: it was trained without a store; train it again on "
            "a store of nguide encode or nguide store import"
        )
    model, operation = load_winner(run.folder, group), _operation(run.folder, "validation", sensitivity, group)
    with reading(run.folder / REPORT, "copy the run again", wrong="is damaged"):
        training = training_record(
            features["provenance"],
            run.report["environments"][0],
            scans={part: about["scans"] for part, about in run.report["data"].items()},
            validation_auroc=winner.val_auroc,
            test=record_as_json(winner.test),
            epoch=winner.epoch,
            seed=winner.config.seed,
        )
        return make_bundle(winner.config, model, features, operation, training)


def make_bundle(
    config: Config | None,
    model: nn.Module,
    features: Mapping[str, Any],
    operation: Operation,
    training: Mapping[str, Any],
    intervals: IntervalCalibration | None = None,
) -> Bundle:
    """The bundle of a model of a store's `features_of`, with notes about what is not known of its features."""
    provenance, scans = features["provenance"], scans_behind(features["provenance"])
    encoded, note = is_encoded(provenance), ""
    if not encoded:
        note = "nguide encode did not make the features: new ones must be made exactly as those of the training scans"
    elif scans is None:
        note = "the store does not record which scans it was made from, so new scans are not checked; encode it again"
    return Bundle(
        config=config,
        model=model,
        features=features["width"],
        dtype=features["dtype"],
        encoder=read_as(EncoderId, provenance["identity"]["encoder"], "encoder") if encoded else None,
        preprocessing=Preprocessing.from_dict(provenance["preprocessing"]) if encoded else None,
        repair=encoded and read_as(bool, provenance["identity"]["execution"]["repair"], "repair"),
        expects=Expectations.from_scans(scans),
        operation=replace(operation, notes=(*operation.notes, note)) if note else operation,
        training=training,
        intervals=intervals,
        finding=read_as(Finding, features["finding"], "finding") if "finding" in features else None,
    )


def _with_threshold(folder: Path, sensitivity: float | None) -> Bundle:
    """The bundle in the folder of `nguide fit`, with another threshold if one is asked for."""
    if not (folder / PREDICTION_TABLE).is_file():
        raise UserError(f"{folder} is a bundle already; use it: nguide predict SCAN --model {folder} -o OUT")
    bundle = _read(folder)
    if sensitivity is None:
        return bundle
    known = bundle.operation
    chosen = _operation(folder, known.scans, sensitivity)
    kept = [note for note in known.notes if note not in _operation(folder, known.scans, None).notes]
    return replace(bundle, operation=replace(chosen, notes=(*chosen.notes, *kept)))


def _operation(folder: Path, scans: str, sensitivity: float | None, group: str = "") -> Operation:
    """Calibration and threshold from a folder's predictions for its validation or out-of-fold scans."""

    def logits_and_labels(part: str) -> tuple[Tensor, Tensor]:
        rows = read_predictions(folder / PREDICTION_TABLE, ("label", "logit"), part=part, group=group)
        return torch.tensor(rows["logit"].to_numpy()).double(), torch.tensor(rows["label"].to_numpy()).long()

    test, chosen_on = logits_and_labels("test"), logits_and_labels("val" if scans == "validation" else scans)
    return choose_operation(*chosen_on, sensitivity=sensitivity, test=test if len(test[0]) else None, scans=scans)


def training_record(provenance: Mapping[str, Any], made: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """How a model was trained, for people to read (`made` is the environment); numbers of scans, never their names."""
    summary = scans_behind(provenance)
    return {
        "dataset": None if summary is None else summary.source,
        **known,
        "commit": (made.get("commit") or {}).get("id"),
        "date": made.get("date"),
        "normal_guidance": made.get("normal_guidance"),
    }


def write_bundle(bundle: Bundle, out: str | Path) -> Path:
    """Write a bundle into a folder that is empty or does not exist; the folder appears when it is complete."""
    with folder_atomically(out) as draft:
        fill_folder(bundle, draft)
    return Path(out)


def fill_folder(bundle: Bundle, folder: Path) -> None:
    if bundle.further:
        models = {model.finding: model for model in bundle.each if model.finding}
        for finding, model in models.items():
            make_folder(folder / finding.name)
            fill_folder(replace(model, further=()), folder / finding.name)
        write_findings(folder, list(models))
        return
    weights = {name: tensor.contiguous() for name, tensor in bundle.model.state_dict().items()}
    write_tensors(folder / WEIGHTS, weights, {"method": bundle.method})
    sha256 = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    write_json(folder / BUNDLE, {**bundle.as_json(), "weights": sha256})


def _ensemble(known: BundleFile, weights: Mapping[str, Tensor]) -> Ensemble:
    model = Ensemble.from_json(known.ensemble or {}, weights)
    if model.features != known.features:
        raise ValueError(f"its weights are of {model.features} features, not of {known.features}")
    return model


def _read(folder: Path) -> Bundle:
    path, again = folder / BUNDLE, f"copy the bundle again, or {AGAIN}"
    content = read_json(path, again)
    with reading(path, again, StopIteration, wrong="is damaged"):
        known = read_as(BundleFile, content)
    file, wanted = folder / WEIGHTS, known.weights
    with reading(file, again, wrong="cannot be read or checked"):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != wanted:
        different = f"sha256 {digest[:16]}, not {wanted[:16]}"
        raise UserError(f"{file} is not the file that {BUNDLE} names ({different}); {AGAIN}")
    weights, _ = read_tensors(file, again)
    with reading(path, again, StopIteration, wrong="is damaged"):
        return Bundle(
            **{each.name: getattr(known, each.name) for each in fields(BundleFacts)},
            model=winner_model(known.config, known.features, weights) if known.config else _ensemble(known, weights),
            preprocessing=None if known.encoder is None else Preprocessing.from_dict(known.preprocessing or {}),
            training=content["training"],
            intervals=None if known.intervals is None else IntervalCalibration.from_dict(known.intervals),
        )


@dataclass(frozen=True)
class _Tested:
    scan_auroc: float | None
    localization_auroc: float | None
    localization_auprc: float | None = None
    scan_auprc: float | None = None
    localized: int | None = None
    left_out: int | None = None
    intervals: dict[str, int] | None = None


@dataclass(frozen=True)
class _Training:
    """How a run, or `nguide fit`, trained."""

    dataset: str | None
    scans: dict[str, int]
    test: _Tested | None
    seed: int
    commit: str | None
    date: str | None
    normal_guidance: str | None = None
    validation_auroc: float | None = None
    out_of_fold_auroc: float | None = None
    epoch: int | None = None
    members: int | None = None
    folds: int | None = None
    inputs: str | None = None  # a hash of what `nguide fit` was given


@dataclass(frozen=True, eq=False, kw_only=True)
class BundleFile(BundleFacts):
    """The types of bundle.json."""

    normal_guidance: str
    method: str
    ensemble: dict[str, Any] | None
    preprocessing: dict[str, Any] | None
    intervals: dict[str, Any] | None
    training: _Training
    weights: str  # the SHA-256 of their file
