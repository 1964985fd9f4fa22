"""Predict new scans: find, check, decode, encode and score them, one after the other.

Worker processes decode, and may die over a damaged file; the encoder and the model are loaded once.  Long scans are
decoded in pieces and encoded in batches, so a scan takes little more memory than the encoder's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.workers import TIMEOUT, Pool
from normal_guidance.clinic.predict.job import Finished, Score
from normal_guidance.clinic.predict.new_scans import RESERVED, FoundScans, NotPredicted, anonymous_problem, find_scans
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.core.arrays import check_device, checked_whole, is_number
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.core.prediction import attention_per_head
from normal_guidance.fit.bundle import Bundle, load_bundle, why_not_values
from normal_guidance.fit.fit_committee import make_plan
from normal_guidance.fit.fitting import FittedModel, fit_model, training_scans
from normal_guidance.fit.slice_finder import (
    Labels,
    ScansLike,
    as_scans,
    with_labels,
)
from normal_guidance.scans.features.arrangements import Found, FoundScan
from normal_guidance.scans.features.convert import checked, read_scans
from normal_guidance.scans.features.decoding import Decoding
from normal_guidance.scans.features.encoders import Encoder
from normal_guidance.scans.features.encoding_job import Encoded
from normal_guidance.scans.features.encoding_machine import (
    EncodingOptions,
    Inputs,
    Machine,
    Setup,
    start_workers,
)
from normal_guidance.scans.features.feature_files import has_suffix
from normal_guidance.scans.features.store import DTYPES, FeatureStore, is_store, open_store, write_store
from normal_guidance.scans.index.manifest import FEATURES, ScanRow
from normal_guidance.scans.index.problems import MOST_FOLDER_BYTES, Problem, folder_name, same_name
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.statistics.conformal import IntervalCalibration
from normal_guidance.statistics.localization import KEYS, key_slices, smallest_interval

SHARE = 0.5
"""Share of the attention that an interval without a promise holds.  Half of the attention is its core, which stays in
place where softmax leaves a little on each of hundreds of slices (`statistics.localization.SHARES`)."""

GO_ON = "refused; --force goes on"
FORCED = "predicted because of --force"

NEEDS_RESCALE = ("CT", "")
"""Modalities whose files must say how stored values become HU: without it they may be off by 1,024.  Scans without a
modality count as CT."""


@dataclass(frozen=True)
class PredictOptions:
    """How scans are predicted.

    Args:
        force: also predict scans that the model was not made for, and scans with an unreadable file.
        keys: key slices, at most.
        share: the interval shall be the shortest with this share of the attention; without it, the model's calibrated
            interval, or else the shortest with `SHARE`.
        workers: processes that read and decode; with 0, a decoder that crashes ends the whole program.
        timeout: seconds for decoding a scan.
        anonymize: keep names, ids and paths out of the results.
        batch_size: slices that go through the encoder together.
    """

    force: bool = False
    keys: int = KEYS
    share: float | None = None
    workers: int = 1
    timeout: float = TIMEOUT
    anonymize: bool = False
    batch_size: int = 64

    def __post_init__(self) -> None:
        checked_whole("keys", self.keys)
        checked_whole("workers", self.workers, 0)
        checked_whole("batch_size", self.batch_size)
        if self.share is not None and not (is_number(self.share) and 0 < self.share <= 1):
            raise UserError(
                f"share is {self.share!r}; give a number above 0 and at most 1: 0.5 is half of the attention"
            )


DEFAULTS = PredictOptions()

Outcome = ScanPrediction | NotPredicted


Known = Callable[[ScanRow, Path], Finished | None]
"""What an earlier start has predicted for a scan below a folder (`PredictionJob.finished`)."""


def predict_found(
    found: FoundScans,
    bundle: Bundle,
    encoder: Encoder | None = None,
    options: PredictOptions = DEFAULTS,
    known: Known = lambda row, root: None,
) -> Iterator[Outcome]:
    """Predict each scan that `find_scans` found; those that are `known` are not read again."""
    with Predictor(bundle, encoder, options) as predictor:
        yield from predictor.predict(found, known)


class Predictor:
    """A model with its encoder and its worker processes, which start with the first scan and stay until the end.

    Args:
        bundle: the model.
        encoder: from `bundle.load_encoder`; loaded when it is needed if left out.
        options: how scans are predicted.
    """

    def __init__(self, bundle: Bundle, encoder: Encoder | None = None, options: PredictOptions = DEFAULTS) -> None:
        self.bundle, self.encoder, self.options = bundle, encoder, options
        self._pool: Pool | None = None

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_workers()

    def predict(self, found: FoundScans, known: Known = lambda row, root: None) -> Iterator[Outcome]:
        """Predict scans that `find_scans` found; those that are `known` are not read again."""
        bundle, options = self.bundle, self.options
        _, preprocessing = bundle.encoding()
        yield from found.unusable
        taken: list[ScanRow] = []
        notes: dict[str, list[Problem]] = {}
        for row in found.rows:
            notes[row.scan_id] = [*found.problems.get(row.scan_id, ()), *found.incomplete.get(row.scan_id, ())]
            reasons = _why_not(row, found, bundle)
            if reasons and not options.force:
                reason = Problem(row.scan_id, "", "unsuitable", "; ".join(reasons), GO_ON)
                yield NotPredicted(row.scan_id, reason, tuple(notes[row.scan_id]))
            else:
                notes[row.scan_id] += [Problem(row.scan_id, "", "unsuitable", one, FORCED) for one in reasons]
                taken.append(row)
        if not taken:
            return
        before = {row.scan_id: one for row in taken if (one := known(row, found.root)) is not None}
        left = [row for row in taken if row.scan_id not in before]
        inputs = Inputs(Decoding(read_volume, found.root, bundle.repair), preprocessing)
        with self._working(len(left)) as machine:
            new = machine.encode(inputs, ((number, [row]) for number, row in enumerate(left)))
            with closing(new):
                for row in taken:
                    if row.scan_id in before:
                        one = before[row.scan_id]
                        yield outcome_of(row, found.root, one.scores, one.problems, bundle, options)
                    else:
                        yield _outcome(row, found.root, next(new)[1], notes[row.scan_id], bundle, options)
                next(new, None)  # its end, since closing it earlier would stop the workers

    @contextmanager
    def _working(self, scans: int) -> Iterator[Machine]:
        """The encoder with workers for so many scans; after an error the next call has new workers."""
        try:
            if self._pool is None:
                self._pool = start_workers(self.options.workers, self.options.timeout, scans)
            self.encoder = self.encoder or self.bundle.load_encoder()
            yield _machine(self.bundle, self.encoder, self.options, self._pool)
        except BaseException:
            self._end_workers()
            raise

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _machine(bundle: Bundle, encoder: Encoder, options: PredictOptions, pool: Pool) -> Machine:
    if encoder.fingerprint != bundle.encoding()[0].fingerprint:
        raise UserError(f"encoder {encoder.name} is not the one of the bundle; load it by bundle.load_encoder()")
    how = EncodingOptions(bundle.repair, options.batch_size, encoder.device, encoder.precision)
    setup = Setup(bundle.load_encoder, encoder.fingerprint, torch.__version__, how, options.workers, options.timeout)
    return Machine(setup, encoder, pool)


def _why_not(row: ScanRow, found: FoundScans, bundle: Bundle) -> list[str]:
    """Reasons why the model was not made for a scan."""
    reasons = bundle.expects.why_not(row)
    mixed = [one for one in found.problems.get(row.scan_id, ()) if one.kind == "mixed_acquisitions"]
    reasons += [f"it mixes several acquisitions: {one.detail}" for one in mixed]
    lost = found.incomplete.get(row.scan_id, ())
    if lost:
        first = lost[0]
        where = f" ({first.file}: {first.detail})" if first.file else ""
        if len(lost) == 1:
            reasons.append(f"1 of its files cannot be read{where}: what it shows would be missing")
        else:
            reasons.append(f"{len(lost)} of its files cannot be read{where}: what they show would be missing")
    return reasons


def _outcome(
    row: ScanRow,
    root: Path,
    encoded: Encoded,
    notes: Sequence[Problem],
    bundle: Bundle,
    options: PredictOptions,
) -> Outcome:
    """The prediction for a scan whose features are there; `notes` are the problems known before."""
    odd = encoded.problems
    if options.anonymize:
        odd = [anonymous_problem(one, row.scan_id) for one in odd]
    if encoded.failed:
        return NotPredicted(row.scan_id, odd[-1]._replace(action="left out"), tuple(notes))
    reasons = _why_not_values(row, encoded, bundle)
    if reasons and not options.force:
        reason = Problem(row.scan_id, "", "unsuitable", "; ".join(reasons), GO_ON)
        return NotPredicted(row.scan_id, reason, (*notes, *odd))
    odd = [*odd, *(Problem(row.scan_id, "", "unsuitable", one, FORCED) for one in reasons)]
    return outcome_of(row, root, scores_of(bundle, encoded.features), (*notes, *odd), bundle, options)


def _why_not_values(row: ScanRow, encoded: Encoded, bundle: Bundle) -> list[str]:
    """Reasons why the values of a decoded scan are not those that the model was trained on."""
    unscaled = [one.detail for one in encoded.problems if one.kind == "no_rescale"]
    if row.modality in NEEDS_RESCALE and unscaled:
        return [f"its values are not HU: {unscaled[0]}"]
    _, preprocessing = bundle.encoding()
    (values,) = encoded.values.values()
    return why_not_values(bundle.expects.values, row, values, any_scale=preprocessing.has_percentiles)


def outcome_of(
    row: ScanRow,
    root: Path,
    scores: Sequence[Score],
    problems: tuple[Problem, ...],
    bundle: Bundle,
    options: PredictOptions,
) -> Outcome:
    """The prediction for a scan from its scores, one for each finding; `problems` are those known before."""
    further: list[ScanPrediction] = []
    for other, own in zip(bundle.further, scores[1:], strict=True):
        found = outcome_of(row, root, [own], problems, other, options)
        if isinstance(found, NotPredicted):
            return found
        further.append(found)
    logit, log_attention = scores[0]
    attention = attention_per_head(log_attention).mean(0)
    if not math.isfinite(logit) or not attention.isfinite().all():
        reason = Problem(row.scan_id, "", "failed", "the model gave numbers that are not finite", "left out")
        return NotPredicted(row.scan_id, reason, problems)
    suitable = all(one.kind != "unsuitable" for one in problems)
    interval, share, coverage = _interval(attention, bundle.intervals if suitable else None, options.share)
    return ScanPrediction(
        row=row,
        root=root,
        method=bundle.method,
        logit=logit,
        probability=bundle.operation.calibration.probability(logit),
        threshold=bundle.threshold,
        log_attention=log_attention,
        key_slices=key_slices(attention, options.keys, row.slice_spacing),
        interval=interval,
        share=share,
        coverage=coverage,
        problems=problems,
        finding=bundle.finding,
        model_cautions=bundle.cautions,
        model=bundle.identity,
        further=tuple(further),
    )


def _interval(
    attention: Float[Tensor, "slices"], calibration: IntervalCalibration | None, share: float | None
) -> tuple[tuple[int, int], float | None, float | None]:
    """First and last slice, and the share of the attention that they hold or the coverage that they promise."""
    lengths = torch.tensor([len(attention)])
    if calibration is not None and share is None:
        first, last = calibration.interval(attention, lengths)
        return (int(first), int(last)), None, calibration.coverage
    held = SHARE if share is None else share
    first, last = smallest_interval(attention, lengths, held)
    return (int(first), int(last)), held, None


def scores_of(bundle: Bundle, features: Float[Tensor, "slices features"]) -> tuple[Score, ...]:
    """The scores of one scan for all findings."""
    return tuple(score(one, features) for one in bundle.each)


@torch.no_grad()
def score(bundle: Bundle, features: Float[Tensor, "slices features"]) -> Score:
    """The logit of one scan and the log-attention of each head over its slices, in float64."""
    stored = features.to(DTYPES[bundle.dtype])  # rounded as the training scans' features were
    rows = stored.to(next(bundle.model.parameters(), features).dtype)
    prediction = bundle.model(rows, torch.tensor([len(rows)]))
    return Score(prediction.logit.item(), prediction.log_attention.double())


# Predict new scans that are given by their features: a feature store, or files that `nguide store import` takes.
# Only a model whose features `nguide encode` did not make takes them.  There are no images, hence no pictures and no
# DICOM results.


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
        wrong = _why_features_differ(scan, bundle) or _why_no_folder(row.scan_id)
        if wrong:
            reason = Problem(row.scan_id, "", "failed", wrong, "left out")
            yield NotPredicted(row.scan_id, reason)
        else:
            scores = scores_of(bundle, scan.features)
            yield outcome_of(row, Path(scan.found.where).parent, scores, (), bundle, options)


def _why_features_differ(scan: FoundScan, bundle: Bundle) -> str:
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


# `ng.fit` and `ng.predict`: what the commands `nguide fit` and `nguide predict` do, from Python.
# `fit` writes the folder of a model, `predict` takes it.  For a model that stays in memory there is `SliceFinder`; to
# train one configuration of one method, `train_model`.


TrainingScans = ScansLike | str | Path
"""Scans to train on: in memory, in a feature store, or the folder of one."""

NewScans = ScansLike | str | Path | Sequence[str | Path]
"""Scans to predict: files and folders, or features in memory or in a store."""


def fit(
    scans: TrainingScans,
    out: str | Path,
    *,
    labels: Labels | None = None,
    patient_ids: Sequence[str] | None = None,
    test: TrainingScans | None = None,
    finding: str | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> FittedModel:
    """Fit a model to features and scan labels, with nothing to choose, and write its folder, as `nguide fit` does.

    `predict` and `nguide predict` take the folder; `report.html` in it says what the model can do.  Labels of slices
    measure the result and calibrate intervals; they never train.

    Args:
        scans: `Bags`, a list of `Bag`, a list of arrays `(slices, features)` with `labels`, a store from `open_store`,
            or the folder of one.  The scans of a store's part "test" are kept for testing.
        out: the folder for the model; it must be new or empty.
        labels: one 0 or 1 per scan, for arrays, or in place of the labels of bags.
        patient_ids: one per scan, for arrays, or in place of those of the bags; a patient's scans share a fold.
            Without it, each array is a patient of its own.
        test: other patients' scans, to measure the model on; arrays as `Bags.from_arrays(arrays, labels)`.
        finding: which finding of a store with several is fitted.
        sensitivity: least sensitivity of the threshold, out of fold; without it, Youden's J chooses.
        coverage: the probability with which intervals shall contain the finding; refused if too few scans have slice
            labels.  Without it, .9 if there are enough.
        seed: of the folds.
        device: where it is fitted, such as "cuda".
        watch: called with the share that is done.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from normal_guidance.study.drawn import shifted_mean
        >>> train, new = (shifted_mean(20, seed, features=4, shift=2.0) for seed in (1, 2))
        >>> arrays = [bag.features.numpy() for bag in train]
        >>> with TemporaryDirectory() as folder:
        ...     made = fit(arrays, f"{folder}/model", labels=train.labels)
        ...     probabilities = [one.probability for one in predict(new, f"{folder}/model")]
        ...     again = [one.probability for one in predict(arrays[:3], f"{folder}/model")]
        >>> len(probabilities), len(again), made.sentences()[0]
        (20, 3, 'It tells scans apart with an AUROC of ...')
    """
    if not isinstance(out, str | Path):
        raise UserError(
            f'out: got {type(out).__name__}; it is the folder for the model; labels have a name: fit(scans, "model", '
            "labels=[0, 1, ...])"
        )
    check_device(device)
    with TemporaryDirectory() as folder:
        if finding is not None and not isinstance(scans, FeatureStore | str | Path):
            raise UserError(f"finding is {finding!r}, but scans in memory have one label without a name; leave it out")
        store = _as_store("scans", scans, Path(folder) / "scans", labels, patient_ids)
        train, own_test = training_scans(_of_finding(store, finding))
        if test is not None and own_test is not None:
            raise UserError(f"store {store.folder} has {len(own_test)} test scans of its own; leave test= out")
        tested = own_test if test is None else _of_finding(_as_store("test", test, Path(folder) / "test"), finding)
        return fit_model(
            train,
            out,
            test=tested,
            plan=make_plan(train.labels.tolist(), train.patient_ids, seed=seed),
            sensitivity=sensitivity,
            coverage=coverage,
            device=device,
            watch=watch,
        )


def _as_store(
    name: str,
    scans: TrainingScans,
    folder: Path,
    labels: Labels | None = None,
    patient_ids: Sequence[str] | None = None,
) -> FeatureStore:
    for what, given in (("labels", labels), ("patient_ids", patient_ids)):
        if given is not None and isinstance(scans, FeatureStore | str | Path):
            where = scans.folder if isinstance(scans, FeatureStore) else scans
            raise UserError(f"{what}: the feature store {where} has its own; leave {what}= out")
    if isinstance(scans, str | Path):
        return open_store(scans)
    found = as_scans(scans, labelled=labels is None, name=name)
    if labels is not None or patient_ids is not None:
        found = with_labels(found, labels, patient_ids)
    return found if isinstance(found, FeatureStore) else write_store(folder, found, provenance={})


def _of_finding(store: FeatureStore, finding: str | None) -> FeatureStore:
    if finding is not None:
        return store.of_finding(finding)
    if len(store.findings) > 1:
        names = ", ".join(one.name for one in store.findings)
        raise UserError(
            f"store {store.folder} has the findings {names}; choose one: finding={store.findings[0].name!r}, or fit "
            "all of them with the command nguide fit"
        )
    return store


def predict(
    scans: NewScans,
    model: Bundle | str | Path,
    *,
    encoder: Encoder | None = None,
    options: PredictOptions = DEFAULTS,
) -> Iterator[Outcome]:
    """Predict each scan, one after the other, as `nguide predict` does; scans that cannot be used come first.

    Each result is a `ScanPrediction` (probability, attention, key slices, interval) or, with the reason, a
    `NotPredicted`.  Nothing is written; `normal_guidance.clinic.write_predictions` makes pages and DICOM of them.

    Args:
        scans: DICOM folders, zip archives, NIfTI files, or folders of such; for a model of your own features, `Bags`,
            a list of arrays `(slices, features)`, a feature store, or what `nguide store import` takes.
        model: the folder that `fit`, `nguide fit` or `nguide bundle` wrote, or that of a run; or the `Bundle` of one,
            loaded once for several calls.
        encoder: from `Bundle.load_encoder`, to load it once for several calls.
        options: how scans are predicted.

    Example:
        >>> predict("new-scans", "nowhere")
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: nowhere is neither a bundle (no bundle.json) nor a complete run (no
        report.json); give the folder of one
    """
    if not isinstance(options, PredictOptions):
        raise UserError(f"options: got {type(options).__name__}; give PredictOptions(), or leave it out")
    bundle = _bundle(model)
    several = _sources(scans)
    in_memory = [one for one in several if not isinstance(one, str | Path)]
    places = [Path(one) for one in several if isinstance(one, str | Path)]
    if in_memory or bundle.encoder is None or any(map(is_features, places)):
        return predict_features(several, bundle, options)
    found = find_scans(
        places,
        workers=options.workers,
        any_modality=options.force,
        modalities=bundle.expects.modalities,
        anonymize=options.anonymize,
    )
    return predict_found(found, bundle, encoder, options)


def _bundle(model: object) -> Bundle:
    if isinstance(model, Bundle):
        return model
    if isinstance(model, str | Path):
        return load_bundle(model)
    raise UserError(
        f"model: got {type(model).__name__}; give the folder that fit or nguide fit wrote. A SliceFinder predicts by "
        "itself, finder.predict(scans), and a torch module by predict_bags(model, bags)"
    )


def _sources(scans: NewScans) -> list[Source]:
    """Paths as they are, scans in memory as bags."""
    if isinstance(scans, str | Path):
        return [scans]
    if isinstance(scans, Sequence) and scans and all(isinstance(one, str | Path) for one in scans):
        return list(scans)
    try:
        return [as_scans(cast(ScansLike, scans))]
    except UserError as error:
        raise UserError(f"{error}; scans that are files are given by their paths") from error
