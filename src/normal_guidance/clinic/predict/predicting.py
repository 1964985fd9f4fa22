"""Predict new scans: find, check, decode, encode and score them, one after the other.

Worker processes decode, and may die over a damaged file; the encoder and the model are loaded once.  Long scans are
decoded in pieces and encoded in batches, so a scan takes little more memory than the encoder's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.workers import TIMEOUT, Pool
from normal_guidance.clinic.predict.job import DoneScan, Score
from normal_guidance.clinic.predict.new_scans import (
    GO_ON,
    RESERVED,
    FoundScans,
    NotPredicted,
    anonymous_problem,
)
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.core.arrays import checked_whole, is_number
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.core.prediction import attention_per_head
from normal_guidance.fit.bundle import Bundle, why_not_values
from normal_guidance.scans.features.arrangements import Found, FoundScan
from normal_guidance.scans.features.convert import checked, read_scans
from normal_guidance.scans.features.encoders import Encoder
from normal_guidance.scans.features.encoding_job import Encoded
from normal_guidance.scans.features.encoding_machine import EncodingOptions, Inputs, Machine, Setup, start_workers
from normal_guidance.scans.features.feature_files import has_suffix
from normal_guidance.scans.features.store import DTYPES, FeatureStore, open_store
from normal_guidance.scans.features.store_place import is_store
from normal_guidance.scans.features.windows import Decoding
from normal_guidance.scans.index.manifest import FEATURES, ScanRow
from normal_guidance.scans.index.problems import MOST_FOLDER_BYTES, Problem, folder_name, same_name
from normal_guidance.statistics.localization import KEYS, key_positions, smallest_interval

SHARE = 0.5
"""Share of the attention that an interval without a promise holds.  Half of the attention is its core, which stays in
place where softmax leaves a little on each of hundreds of slices (`statistics.localization.SHARES`)."""

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

Known = Callable[[ScanRow, Path], DoneScan | None]  # by an earlier start (`PredictionJob.finished`)


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


class Predictor(AbstractContextManager["Predictor"]):
    """A model, its encoder (loaded when needed), and its workers, which start with the first scan and stay."""

    def __init__(self, bundle: Bundle, encoder: Encoder | None = None, options: PredictOptions = DEFAULTS) -> None:
        self.bundle, self.encoder, self.options = bundle, encoder, options
        self._pool: Pool | None = None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def predict(self, found: FoundScans, known: Known = lambda row, root: None) -> Iterator[Outcome]:
        """Predict scans that `find_scans` found; those that are `known` are not read again."""
        from normal_guidance.scans.index.volumes import read_volume  # needs extras, which features do without

        _, preprocessing = self.bundle.encoding()
        yield from found.unusable
        rows: list[ScanRow] = []
        notes: dict[str, list[Problem]] = {}
        for row in found.rows:
            odd = [*found.problems.get(row.scan_id, ()), *found.incomplete.get(row.scan_id, ())]
            unsuitable = self._judged(row, _why_not(row, found, self.bundle))
            if unsuitable and not self.options.force:
                yield NotPredicted(row.scan_id, unsuitable[0], tuple(odd))
            else:
                notes[row.scan_id] = [*odd, *unsuitable]
                rows.append(row)
        if not rows:
            return
        before = {row.scan_id: done for row in rows if (done := known(row, found.root)) is not None}
        left = [row for row in rows if row.scan_id not in before]
        inputs = Inputs(Decoding(read_volume, found.root, self.bundle.repair), preprocessing)
        with self._working(len(left)) as machine:
            new = machine.encode(inputs, ((number, [row]) for number, row in enumerate(left)))
            with closing(new):
                for row in rows:
                    if done := before.get(row.scan_id):
                        yield outcome_of(row, found.root, done.scores, done.problems, self.bundle, self.options)
                    else:
                        yield self._outcome(row, found.root, next(new)[1], notes[row.scan_id])
                next(new, None)  # its end, since closing it earlier would stop the workers

    def _judged(self, row: ScanRow, reasons: Sequence[str]) -> list[Problem]:
        """Reasons against a scan as problems: one that refuses it or, forced, one for each."""
        if reasons and not self.options.force:
            return [Problem(row.scan_id, "", "unsuitable", "; ".join(reasons), GO_ON)]
        return [Problem(row.scan_id, "", "unsuitable", reason, FORCED) for reason in reasons]

    def _outcome(self, row: ScanRow, root: Path, encoded: Encoded, notes: Sequence[Problem]) -> Outcome:
        """The prediction for a scan whose features are there; `notes` are the problems known before."""
        odd = encoded.problems
        if self.options.anonymize:
            odd = [anonymous_problem(problem, row.scan_id) for problem in odd]
        if encoded.failed:
            return NotPredicted(row.scan_id, odd[-1]._replace(action="left out"), tuple(notes))
        unscaled = [problem.detail for problem in encoded.problems if problem.kind == "no_rescale"]
        if row.modality in NEEDS_RESCALE and unscaled:
            reasons = [f"its values are not HU: {unscaled[0]}"]
        else:
            (values,), (_, seen) = encoded.values.values(), self.bundle.encoding()
            reasons = why_not_values(self.bundle.expects.values, row, values, any_scale=seen.has_percentiles)
        unsuitable = self._judged(row, reasons)
        if unsuitable and not self.options.force:
            return NotPredicted(row.scan_id, unsuitable[0], (*notes, *odd))
        scores = scores_of(self.bundle, encoded.features)
        return outcome_of(row, root, scores, (*notes, *odd, *unsuitable), self.bundle, self.options)

    @contextmanager
    def _working(self, scans: int) -> Iterator[Machine]:
        """The encoder with workers for so many scans; after an error the next call has new workers."""
        bundle, options = self.bundle, self.options
        try:
            if self._pool is None:
                self._pool = start_workers(options.workers, options.timeout, scans)
            encoder = self.encoder = self.encoder or bundle.load_encoder()
            if encoder.fingerprint != bundle.encoding()[0].fingerprint:
                raise UserError(
                    f"encoder {encoder.name} is not the one of the bundle; load it by bundle.load_encoder()"
                )
            how = EncodingOptions(bundle.repair, options.batch_size, encoder.device, encoder.precision)
            same = (encoder.fingerprint, encoder.engine, torch.__version__)
            setup = Setup(bundle.load_encoder, *same, how, options.workers, options.timeout)
            yield Machine(setup, encoder, self._pool)
        except BaseException:
            self.__exit__()
            raise


def _why_not(row: ScanRow, found: FoundScans, bundle: Bundle) -> list[str]:
    """Reasons why the model was not made for a scan."""
    mixed = [problem for problem in found.problems.get(row.scan_id, ()) if problem.kind == "mixed_acquisitions"]
    reasons = [*bundle.expects.why_not(row), *(f"it mixes several acquisitions: {problem.detail}" for problem in mixed)]
    if lost := found.incomplete.get(row.scan_id, ()):
        where = f" ({lost[0].file}: {lost[0].detail})" if lost[0].file else ""
        them = "it shows" if len(lost) == 1 else "they show"
        reasons.append(f"{len(lost)} of its files cannot be read{where}: what {them} would be missing")
    return reasons


def outcome_of(
    row: ScanRow,
    root: Path,
    scores: Sequence[Score],
    problems: tuple[Problem, ...],
    bundle: Bundle,
    options: PredictOptions,
) -> Outcome:
    """The prediction for a scan from its scores, one for each finding; `problems` are those known before."""
    suitable = all(problem.kind != "unsuitable" for problem in problems)
    made: list[ScanPrediction] = []
    for model, (logit, log_attention) in zip(bundle.each, scores, strict=True):
        attention = attention_per_head(log_attention).mean(0)
        if not math.isfinite(logit) or not attention.isfinite().all():
            reason = Problem(row.scan_id, "", "failed", "the model gave numbers that are not finite", "left out")
            return NotPredicted(row.scan_id, reason, problems)
        # No promise holds for a scan that the model was not made for.
        lengths, promised = torch.tensor([len(attention)]), model.intervals if suitable and not options.share else None
        share = None if promised else options.share or SHARE
        ends = promised.interval(attention, lengths) if promised else smallest_interval(attention, lengths, share or 1)
        made.append(
            ScanPrediction(
                row=row,
                root=root,
                method=model.method,
                logit=logit,
                probability=model.operation.calibration.probability(logit),
                threshold=model.threshold,
                log_attention=log_attention,
                key_positions=key_positions(attention, options.keys, row.slice_spacing),
                interval_positions=(int(ends[0]), int(ends[1])),
                share=share,
                coverage=promised.coverage if promised else None,
                problems=problems,
                finding=model.finding,
                model_cautions=model.cautions,
                model=model.identity,
            )
        )
    return replace(made[0], further=tuple(made[1:]))


def scores_of(bundle: Bundle, features: Float[Tensor, "slices features"]) -> tuple[Score, ...]:
    """The scores of one scan for all findings."""
    return tuple(score(model, features) for model in bundle.each)


@torch.no_grad()
def score(bundle: Bundle, features: Float[Tensor, "slices features"]) -> Score:
    """The logit of one scan and the log-attention of each head over its slices, in float64."""
    stored = features.to(DTYPES[bundle.dtype])  # rounded as the training scans' features were
    rows = stored.to(next(bundle.model.parameters(), features).dtype)
    prediction = bundle.model(rows, torch.tensor([len(rows)]))
    return Score(prediction.logit.item(), prediction.log_attention.double())


# Scans given by their features, for a model whose features `nguide encode` did not make: no images, hence no pictures
# and no DICOM results.

Source = str | Path | Bags | FeatureStore  # a feature store, a file of features, a folder of such, or scans in memory


def is_features(path: Path) -> bool:
    """Whether a path is a feature store or a file with the ending of one of features."""
    return is_store(path) or (path.is_file() and has_suffix(path))


def predict_features(
    paths: Source | Sequence[Source], bundle: Bundle, options: PredictOptions = DEFAULTS
) -> Iterator[Outcome]:
    """Predict each scan of stores, files of features, folders of them, or in memory; labels are not read."""
    several = [paths] if isinstance(paths, Source) else list(paths)
    if bundle.encoder is not None:
        raise UserError(
            f"{several[0]} holds features, but the model takes scans: it was trained on features of the encoder "
            f"{bundle.encoder.name}; give the scans"
        )
    scans = _read_all(several)
    first = next(scans, None)
    if first is None:
        raise UserError(f"{several[0]} holds no scan; give a feature store, or a file of features")
    for _ in scans:  # a damaged file or a double id is found before a result is written
        pass
    if wrong := _wrong_width(first, bundle):  # all scans of a source have the same width, as a rule: one line for all
        raise UserError(f"{first.found.where}: scan {first.scan_id!r} {wrong}; make the features as for training")
    return _of_features(_read_all(several), bundle, options)


def _read_all(sources: Sequence[Source]) -> Iterator[FoundScan]:
    return checked(chain.from_iterable(map(_read, sources)))


def _read(source: Source) -> Iterator[FoundScan]:
    if isinstance(source, str | Path) and is_store(Path(source)):
        source = open_store(source)
    if isinstance(source, str | Path):
        try:
            _, _, scans = read_scans(source)
        except UserError as error:
            raise UserError(
                f"the model takes features, because it was trained on features that nguide encode did not make: {error}"
            ) from error
        yield from scans
        return
    where, recipe = (str(source.folder), source.recipe) if isinstance(source, FeatureStore) else ("memory", "")
    for number, (scan, patient) in enumerate(zip(source.scan_ids, source.patient_ids, strict=True)):
        features = source.rows(torch.tensor([number]))
        yield FoundScan(Found(where, (), {}), scan, features, patient_id=patient, recipe=recipe)


def _of_features(scans: Iterable[FoundScan], bundle: Bundle, options: PredictOptions) -> Iterator[Outcome]:
    for number, scan in enumerate(scans, start=1):
        anonymous = f"scan-{number:03d}" if options.anonymize else ""
        places = range(len(scan.features))
        row = ScanRow(  # without images: every slice names its file and its place in the scan
            scan_id=anonymous or scan.scan_id,
            patient_id=anonymous or scan.patient_id or scan.scan_id,
            label=UNKNOWN,
            slice_labels=None,
            kind=FEATURES,
            files=(Path(scan.found.where).name,) * len(places),
            frames=tuple(places),
            positions=tuple(map(float, places)),
            rows=0,
            columns=0,
            modality="",
        )
        if wrong := _why_not_features(scan, bundle, folder_name(row.scan_id)):
            yield NotPredicted(row.scan_id, Problem(row.scan_id, "", "failed", wrong, "left out"))
        else:
            scores = scores_of(bundle, scan.features)
            yield outcome_of(row, Path(scan.found.where).parent, scores, (), bundle, options)


def _why_not_features(scan: FoundScan, bundle: Bundle, folder: str) -> str:
    """The reason why these features cannot be predicted, with a folder for their results; empty if they can."""
    if wrong := _wrong_width(scan, bundle):
        return wrong
    if not len(scan.features):
        return "has no slices"
    finite = scan.features.isfinite()
    if not finite.all():
        place, feature = (~finite).nonzero()[0].tolist()
        return (
            f"has features that are not finite: position {place}, feature {feature}: {scan.features[place, feature]:g}"
        )
    fits = same_name(folder) not in RESERVED and len(folder.encode()) <= MOST_FOLDER_BYTES
    return "" if fits else "has an id that cannot be the name of its folder"


def _wrong_width(scan: FoundScan, bundle: Bundle) -> str:
    width = scan.features.shape[1]
    if width == bundle.features:
        return ""
    return f"has {width} features a slice, but the model was trained on {bundle.features}"
