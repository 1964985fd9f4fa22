"""A trained model with everything that new scans need, and nothing about the patients it was trained on.

    bundle.json          method, configuration, encoder and its fingerprint, preprocessing, expected scans, calibration,
                         threshold, and how the model was trained
    model.safetensors    the model's weights, without the encoder's

A bundle is read from such a folder, or straight from the folder of a run that was trained on a store.  A store which
`nguide encode` made records how slices become features; a model of other features takes features instead of scans.
A folder of several findings has a bundle for each, in a folder of its name, and findings.json
(`normal_guidance.scans.index.manifest`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.base.files import (
    folder_atomically,
    make_folder,
    read_json,
    write_json,
)
from normal_guidance.base.records import Between, ContentError, read_as
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.methods import COMMITTEE, EVERY_METHOD, refuse_removed
from normal_guidance.fit.committee import Committee
from normal_guidance.scans.features.encoders import Encoder, Precision, load_encoder
from normal_guidance.scans.features.preprocessing import (
    Preprocessing,
    ScanSummary,
    is_encoded,
    scans_behind,
)
from normal_guidance.scans.features.windows import plane_of
from normal_guidance.scans.index.manifest import Finding, ScanRow, ValueRange, Values, findings_in, write_findings
from normal_guidance.statistics.calibration import Operation, choose_operation
from normal_guidance.statistics.conformal import IntervalCalibration
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.predictions import read_predictions
from normal_guidance.sweep.run import (
    NOT_OURS,
    PREDICTION_TABLE,
    REPORT,
    Run,
    Selected,
    environments_of,
    find_folders,
    load_run,
    load_winner,
    refuse_data,
    winner_model,
)

# The kind of scan that a model was made for, and why a scan is not of that kind.


SPACING_SLACK = 1.5
"""Slice spacing may be smaller or larger than in the training scans by this factor."""

FEWEST_SHARE = 0.5
"""A scan is too short with less than this share of the slices of the shortest training scan."""


@dataclass(frozen=True)
class Expectations:
    """The kind of the training scans; what was not recorded is None or empty, and not checked.

    Args:
        modalities: as DICOM abbreviates them.
        planes: axial, coronal, sagittal.
        slice_spacing: low and high in mm, the 1st and 99th percentile of the training scans.
        fewest_slices: of the shortest training scan.
        most_slices: of the longest training scan; longer scans are accepted.
        values: of the training scans; `clinical.expected_values` compares a scan's with them.
    """

    modalities: tuple[str, ...] = ()
    planes: tuple[str, ...] = ()
    slice_spacing: tuple[float, float] | None = None
    fewest_slices: Annotated[int, Between(0.0)] | None = None
    most_slices: Annotated[int, Between(0.0)] | None = None
    values: ValueRange | None = None

    @staticmethod
    def from_scans(scans: ScanSummary | None) -> Expectations:
        """Make expectations from the summary of the training scans; empty ones from None."""
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

    def as_json(self) -> dict[str, Any]:
        """The fields; `read_as` is the inverse."""
        return asdict(self)

    def why_not(self, row: ScanRow) -> list[str]:
        """Reasons why a scan is not of this kind, each with its value and the range; empty if it is."""
        return [*self._modality(row), *self._plane(row), *self._spacing(row), *self._slices(row)]

    def _modality(self, row: ScanRow) -> list[str]:
        if not self.modalities or row.modality in self.modalities:
            return []
        return [f"its modality is {row.modality}; the model was trained on {', '.join(self.modalities)}"]

    def _plane(self, row: ScanRow) -> list[str]:
        plane = plane_of(row.orientation)
        if not self.planes or plane is None or plane in self.planes:
            return []
        return [f"its slices are {plane}; the model was trained on {' and '.join(self.planes)} ones"]

    def _spacing(self, row: ScanRow) -> list[str]:
        if self.slice_spacing is None or row.slice_spacing is None:
            return []
        low, high = self.slice_spacing
        least, most = low / SPACING_SLACK, high * SPACING_SLACK
        if least <= row.slice_spacing <= most:
            return []
        trained = f"{low:.3g} to {high:.3g} mm"
        return [
            f"its slices are {row.slice_spacing:.3g} mm apart; the model was trained on {trained} and takes "
            f"{least:.3g} to {most:.3g} mm"
        ]

    def _slices(self, row: ScanRow) -> list[str]:
        if self.fewest_slices is None or len(row) >= self.least_slices:
            return []
        return [
            f"it has {len(row)} slice{'' if len(row) == 1 else 's'}; the model was trained on {self.fewest_slices} to "
            f"{self.most_slices} and takes {self.least_slices} or more"
        ]

    @property
    def least_slices(self) -> int:
        """The least number of slices that a scan must have."""
        return 1 if self.fewest_slices is None else math.ceil(self.fewest_slices * FEWEST_SHARE)

    def __str__(self) -> str:
        """Describe the kind of scan for people."""
        spacing = self.slice_spacing
        parts = [
            ", ".join(self.modalities),
            ", ".join(self.planes),
            "" if spacing is None else f"slices {spacing[0]:.3g} to {spacing[1]:.3g} mm apart",
            "" if self.fewest_slices is None else f"{self.fewest_slices} to {self.most_slices} slices",
        ]
        return ", ".join(part for part in parts if part) or "not recorded"


# Whether the values of a scan are those of the scans that a model was trained on.
# NIfTI does not say its modality, and headers may be wrong: only values tell CT in HU from MR, windowed copies and
# masks.


HU_SLACK = 500.0
"""HU may lie so far outside those of the training scans: half of the step from air to water."""

NO_AIR = -200.0
"""Lowest values above this are not air, and are accepted only as far as the training scans have them."""

SCALE_SLACK = 4.0
"""Values of other images, which have no unit, may be smaller or larger than in the training scans by this factor."""

NEGATIVE_SHARE = 0.25
"""Images whose training scans have no negative values may reach down to this share of their own highest values."""

DISTINCT_SHARE = 0.1
"""A scan with less than this share of the training scans' different values is a mask or a drawing."""

ANY_CT = ValueRange((-1024.0, -1000.0), (200.0, 3071.0), 640)
ANY_OTHER = ValueRange((0.0, 0.0), (0.0, 0.0), 640)
"""What NIfTI files are compared with where the training scans' values were not recorded."""


def why_not_values(known: ValueRange | None, row: ScanRow, values: Values, *, any_scale: bool) -> list[str]:
    """Reasons why the values of a scan are not as in the training scans; empty if they are.

    Args:
        known: the values of the training scans; None where they were not recorded.
        row: the scan.
        values: its values.
        any_scale: whether the model does not see the scale of values, because its windows are percentiles.
    """
    if known is None:
        if row.kind != "nifti":
            return []
        known, any_scale = (ANY_CT, any_scale) if row.modality == "CT" else (ANY_OTHER, True)
    few = values.distinct < DISTINCT_SHARE * known.distinct
    reasons = [f"it has {values.distinct} different values, as a mask or a drawing has"] if few else []
    return reasons + (_hu(known, values) if row.modality == "CT" else _without_unit(known, values, any_scale))


def _hu(known: ValueRange, values: Values) -> list[str]:
    reasons = []
    if values.low > max(known.low[1], min(known.low[1] + HU_SLACK, NO_AIR)):
        reasons.append(_unlike("lowest", values.low, known.low) + ": it may not be CT in HU")
    if values.high < known.high[0] - HU_SLACK:  # higher ones are metal
        reasons.append(_unlike("highest", values.high, known.high))
    return reasons


def _without_unit(known: ValueRange, values: Values, any_scale: bool) -> list[str]:
    reasons = []
    if known.low[0] >= 0 and values.low < -NEGATIVE_SHARE * abs(values.high):
        reasons.append(_unlike("lowest", values.low, known.low) + ": it may be CT")
    if not any_scale and not known.high[0] / SCALE_SLACK <= values.high <= known.high[1] * SCALE_SLACK:
        reasons.append(_unlike("highest", values.high, known.high))
    return reasons


def _unlike(which: str, value: float, known: tuple[float, float]) -> str:
    return f"its {which} values are about {value:.4g} and those of the training scans {known[0]:.4g} to {known[1]:.4g}"


# Which model made a result: a fingerprint that no other model has, and how it was trained.


@dataclass(frozen=True)
class ModelIdentity:
    """A model as every result names it.

    Args:
        fingerprint: SHA-256 of its weights and of everything that turns a scan into a result.
        method: a name in `METHODS`, or that of a committee.
        version: of normal-guidance, which trained it; None if unknown.
        dataset: what it was trained on; None if unknown.
        scans: how many training scans there were.
        date: of the training; None if unknown.
    """

    fingerprint: str
    method: str
    version: str | None = None
    dataset: str | None = None
    scans: int | None = None
    date: str | None = None

    @property
    def short(self) -> str:
        """The first letters of the fingerprint: enough to tell models apart, and to read aloud."""
        return self.fingerprint[:12]

    def __str__(self) -> str:
        scans = (
            "" if self.scans is None else f" on {self.scans} scans" + (f" of {self.dataset}" if self.dataset else "")
        )
        version = f" with normal-guidance {self.version}" if self.version else ""
        date = f" on {self.date[:10]}" if self.date else ""
        training = f", trained{scans}{version}{date}" if scans or version or date else ""
        return f"model {self.short} ({self.method}){training}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


FORMAT = 1
"""Version of bundle.json; a bundle of another version is refused."""

BUNDLE, WEIGHTS = "bundle.json", "model.safetensors"

AGAIN = "make the bundle again: nguide bundle RUN -o BUNDLE"


@dataclass(frozen=True)
class EncoderId:
    """Which encoder made the features: other weights under the same name have another fingerprint."""

    name: str
    fingerprint: str


@dataclass(frozen=True, eq=False)
class Bundle:
    """A model, ready for new scans.

    Args:
        config: method and hyperparameters; None for a committee (`nguide fit`), which needs none.
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
            them.  Empty for the model of a run and for one of an earlier version, where nothing was recorded.
        further: models of other findings, of the same features; scans are encoded once for all.
    """

    config: Config | None
    model: nn.Module
    features: int
    dtype: str
    encoder: EncoderId | None
    preprocessing: Preprocessing | None
    repair: bool
    expects: Expectations
    operation: Operation
    training: Mapping[str, Any]
    intervals: IntervalCalibration | None = None
    finding: Finding | None = None
    cautions: tuple[str, ...] = ()
    further: tuple[Bundle, ...] = ()

    @property
    def each(self) -> tuple[Bundle, ...]:
        """The bundles of all findings, this one first."""
        return (self, *self.further)

    @property
    def method(self) -> str:
        """A name in `METHODS`, or `COMMITTEE`."""
        return COMMITTEE if self.config is None else self.config.method

    @property
    def threshold(self) -> float | None:
        """The probability from which on a scan is positive; None if none could be chosen."""
        return None if self.operation.point is None else self.operation.point.threshold

    @cached_property
    def identity(self) -> ModelIdentity:
        """Which model this is, for its results."""
        about = {name: value for name, value in self.as_json().items() if name not in ("format", "normal_guidance")}
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
        return {
            "format": FORMAT,
            "normal_guidance": __version__,
            "method": self.method,
            "config": None if self.config is None else self.config.as_json(),
            "committee": self.model.as_json() if isinstance(self.model, Committee) else None,
            "features": self.features,
            "dtype": self.dtype,
            "encoder": None if self.encoder is None else asdict(self.encoder),
            "preprocessing": None if self.preprocessing is None else self.preprocessing.to_dict(),
            "repair": self.repair,
            "expects": self.expects.as_json(),
            "operation": self.operation.as_json(),
            "intervals": None if self.intervals is None else self.intervals.to_dict(),
            "training": dict(self.training),
            **({} if self.finding is None else {"finding": self.finding.as_json()}),
            **({"cautions": list(self.cautions)} if self.cautions else {}),  # else older models keep their fingerprints
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
        """Load the encoder that the model was trained with; one with other weights is refused.

        Args:
            name: name or place of the encoder, if it has changed since training.
            weights: the weights' file, if the model was trained with the user's own weights.
            device: see `load_encoder`.
            precision: see `load_encoder`.
            offline: make no network call.
        """
        own, preprocessing = self.encoding()
        wanted = (name or own.name).partition("+")[0]  # NAME+HASH: weights of the user's own
        channels = preprocessing.channels
        encoder = load_encoder(
            wanted, weights=weights, device=device, precision=precision, channels=channels, offline=offline
        )
        if encoder.fingerprint != own.fingerprint:
            raise UserError(
                f"the model was trained with the encoder {own.name}, fingerprint "
                f"{own.fingerprint[:16]}, but {encoder.name} here has {encoder.fingerprint[:16]}; give the "
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
        return _together(folder, {one: load_bundle(folder / one.name) for one in findings})
    if (folder / BUNDLE).is_file():
        return _read(folder)
    refuse_data(folder)
    if (folder / REPORT).is_file():
        return bundle_run(folder)
    raise UserError(
        f"{folder} is neither a bundle (no {BUNDLE}) nor a complete run (no {REPORT}); give the folder of one"
        f"{_runs_below(folder)}"
    )


def _together(folder: Path, bundles: Mapping[Finding, Bundle]) -> Bundle:
    """The first bundle with the others; all must be of their findings and take the same features."""
    first, *others = bundles.values()
    for finding, one in bundles.items():
        same = all(getattr(one, name) == getattr(first, name) for name in ("features", "dtype", "encoder", "repair"))
        if one.finding != finding or not same or one.preprocessing != first.preprocessing:
            raise UserError(
                f"{folder / finding.name} was not fitted together with {folder / next(iter(bundles)).name}; fit all "
                "findings again: nguide fit STORE -o MODEL"
            )
    return replace(first, further=tuple(others))


def _runs_below(folder: Path) -> str:
    """Name a run in a folder of runs, METHOD/SEED, which people give by mistake."""
    first = next((run for _, _, run in find_folders(folder) if (run / REPORT).is_file()), None)
    return "" if first is None else f", such as {first}"


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
        return _together(folder, {one: bundle_run(folder / one.name, sensitivity=sensitivity) for one in findings})
    if (folder / BUNDLE).is_file():
        return _again(folder, sensitivity)
    refuse_data(folder)
    if not (folder / REPORT).is_file():
        raise UserError(f"{folder} is not a complete run (no {REPORT}); give the folder of one{_runs_below(folder)}")
    run = load_run(folder)
    winner = run.winner(group, choose=f"choose a group with nguide bundle {folder} --group NAME")
    method = EVERY_METHOD.get(winner.config.method)
    if method is None or not method.scores_scans:
        raise UserError(
            f"{run.folder} is a run of {winner.config.method}, which does not score scans; give another run"
        )
    made = _features(run)
    model = load_winner(run.folder, group)
    try:
        return make_bundle(
            winner.config, model, made, _operation(run, group, sensitivity), _training(run, winner, made)
        )
    except ContentError as error:
        raise UserError(f"{run.folder / REPORT} is damaged: {error}; copy the run again") from error
    except NOT_OURS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{run.folder / REPORT} is damaged ({error!r}); copy the run again") from error


def make_bundle(
    config: Config | None,
    model: nn.Module,
    features: Mapping[str, Any],
    operation: Operation,
    training: Mapping[str, Any],
    intervals: IntervalCalibration | None = None,
) -> Bundle:
    """The bundle of a model that was trained on a store, with notes about what is not known of its features.

    Args:
        features: how the store's features were made (`evaluation.runs.features_of`).
    """
    provenance, scans = features["provenance"], scans_behind(features["provenance"])
    encoded = is_encoded(provenance)
    if not encoded:
        note = "nguide encode did not make the features: new ones must be made exactly as those of the training scans"
        operation = replace(operation, notes=(*operation.notes, note))
    elif scans is None:
        note = "the store does not record which scans it was made from, so new scans are not checked; encode it again"
        operation = replace(operation, notes=(*operation.notes, note))
    return Bundle(
        config=config,
        model=model,
        features=features["width"],
        dtype=features["dtype"],
        encoder=read_as(EncoderId, provenance["identity"]["encoder"], "encoder") if encoded else None,
        preprocessing=Preprocessing.from_dict(provenance["preprocessing"]) if encoded else None,
        repair=encoded and read_as(bool, provenance["identity"]["execution"]["repair"], "repair"),
        expects=Expectations.from_scans(scans),
        operation=operation,
        training=training,
        intervals=intervals,
        finding=_finding(features),
    )


def _finding(about: Mapping[str, Any]) -> Finding | None:
    """The finding that a report or a bundle names, if it does."""
    return read_as(Finding, about["finding"], "finding") if "finding" in about else None


def _again(folder: Path, sensitivity: float | None) -> Bundle:
    """The bundle in the folder of `nguide fit`, with another threshold if one is asked for."""
    if not (folder / PREDICTION_TABLE).is_file():
        raise UserError(f"{folder} is a bundle already; use it: nguide predict SCAN --model {folder} -o OUT")
    bundle = _read(folder)
    if sensitivity is None:
        return bundle
    known = bundle.operation
    chosen = _chosen_on(folder, known.scans, "", sensitivity)
    kept = [note for note in known.notes if note not in _chosen_on(folder, known.scans, "", None).notes]
    return replace(bundle, operation=replace(chosen, notes=(*chosen.notes, *kept)))


def _features(run: Run) -> Mapping[str, Any]:
    """How the features were made; a run that does not record it is refused."""
    made = run.report.get("features")
    if made is None:
        raise UserError(
            f"{run.folder} does not say how its features were made: it was trained without a store, or by an earlier "
            "version; train it again on a store of nguide encode or nguide store import"
        )
    return made


def _operation(run: Run, group: str, sensitivity: float | None) -> Operation:
    return _chosen_on(run.folder, "validation", group, sensitivity)


def _chosen_on(folder: Path, scans: str, group: str, sensitivity: float | None) -> Operation:
    """Calibration and threshold from a folder's predictions for its validation or out-of-fold scans."""

    def logits_and_labels(part: str) -> tuple[Tensor, Tensor]:
        rows = read_predictions(folder / PREDICTION_TABLE, ("label", "logit"), part=part, group=group)
        return torch.tensor(rows["logit"].to_numpy()).double(), torch.tensor(rows["label"].to_numpy()).long()

    test, own = logits_and_labels("test"), "val" if scans == "validation" else scans
    tested = test if len(test[0]) else None
    return choose_operation(*logits_and_labels(own), sensitivity=sensitivity, test=tested, scans=scans)


def _training(run: Run, winner: Selected, features: Mapping[str, Any]) -> dict[str, Any]:
    """How the model was trained, for people to read; numbers of scans, never their names."""
    report, (first, *_) = run.report, environments_of(run.report)
    summary = scans_behind(features["provenance"])
    scores: Mapping[str, Any] = next(one for one in report["winners"] if one["group"] == winner.group)
    return {
        "dataset": None if summary is None else summary.source,
        "scans": {part: about["scans"] for part, about in report["data"].items()},
        "validation_auroc": winner.val_auroc,
        "test": scores["test"],
        "epoch": winner.epoch,
        "seed": winner.config.seed,
        "commit": (first.get("commit") or {}).get("id"),
        "date": first.get("date"),
        "normal_guidance": first.get("normal_guidance"),
    }


def write_bundle(bundle: Bundle, out: str | Path) -> Path:
    """Write a bundle into a folder that is empty or does not exist; the folder appears when it is complete."""
    with folder_atomically(out) as draft:
        if bundle.further:
            findings = [one.finding for one in bundle.each if one.finding]
            for finding, one in zip(findings, bundle.each, strict=True):
                make_folder(draft / finding.name)
                fill_folder(one, draft / finding.name)
            write_findings(draft, findings)
        else:
            fill_folder(bundle, draft)
    return Path(out)


def fill_folder(bundle: Bundle, folder: Path) -> None:
    """Write the two files of a bundle into a folder."""
    weights = {name: tensor.contiguous() for name, tensor in bundle.model.state_dict().items()}
    write_tensors(folder / WEIGHTS, weights, {"format": FORMAT, "method": bundle.method})
    sha256 = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    write_json(folder / BUNDLE, {**bundle.as_json(), "weights": {"file": WEIGHTS, "sha256": sha256}})


def _read(folder: Path) -> Bundle:
    path = folder / BUNDLE
    content = read_json(path, f"copy the bundle again, or {AGAIN}")
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path}: format {content.get('format')!r:.60}, but this version reads format {FORMAT}; {AGAIN}"
        )
    weights = _weights(folder, content)
    try:
        if isinstance(config := content.get("config"), dict):
            refuse_removed(str(config.get("method")))
        known = read_as(_Content, content)
        return Bundle(
            config=known.config,
            model=_model(known.config, content, weights),
            features=known.features,
            dtype=known.dtype,
            encoder=known.encoder,
            preprocessing=None if known.encoder is None else Preprocessing.from_dict(known.preprocessing or {}),
            repair=known.repair,
            expects=known.expects,
            operation=known.operation,
            training=content["training"],
            intervals=None if known.intervals is None else IntervalCalibration.from_dict(known.intervals),
            finding=known.finding,
            cautions=known.cautions,
        )
    except ContentError as error:
        raise UserError(f"{path} is damaged: {error}; copy it again, or {AGAIN}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (*NOT_OURS, RuntimeError, StopIteration) as error:
        raise UserError(f"{path} is damaged ({error!r}); copy it again, or {AGAIN}") from error


@dataclass(frozen=True)
class _Tested:
    """Scores on test scans, as `_Training` has them."""

    scan_auroc: float | None
    localization_auroc: float | None
    localization_auprc: float | None = None
    scan_auprc: float | None = None
    localized: int | None = None
    left_out: int | None = None
    intervals: dict[str, int] | None = None


@dataclass(frozen=True)
class _Training:
    """How a model was trained, of a run or of `nguide fit`; for people to read."""

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
    repeats: int | None = None


@dataclass(frozen=True)
class _WeightsFile:
    file: str
    sha256: str


@dataclass(frozen=True)
class _Content:
    """The types of bundle.json; what has a default came with later versions."""

    format: int
    normal_guidance: str
    config: Config | None
    features: Annotated[int, Between(1.0, 2.0**31)]
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    encoder: EncoderId | None
    preprocessing: dict[str, Any] | None
    repair: bool
    expects: Expectations
    operation: Operation
    training: _Training
    weights: _WeightsFile
    method: str = ""
    committee: dict[str, Any] | None = None
    intervals: dict[str, Any] | None = None
    finding: Finding | None = None
    cautions: tuple[str, ...] = ()


def _model(config: Config | None, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    if config is None:
        return Committee.from_json(content["committee"], weights)
    return winner_model(config, content["features"], weights)


def _weights(folder: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        wanted = str(content["weights"]["sha256"])
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read or checked ({error!r}); copy the bundle again, or {AGAIN}") from error
    if found != wanted:
        raise UserError(f"{path} is not the file that {BUNDLE} names (sha256 {found[:16]}, not {wanted[:16]}); {AGAIN}")
    return read_tensors(path, f"copy the bundle again, or {AGAIN}")[0]
