"""Predict new scans: find, check, decode, encode and score them, one after the other.

Worker processes decode, and may die over a damaged file; the encoder and the model are loaded once.  Long scans are
decoded in pieces and encoded in batches, so a scan takes little more memory than the encoder's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.clinical.bundle import Bundle
from normal_guidance.clinical.expected_values import why_not_values
from normal_guidance.clinical.new_scans import FoundScans, NotPredicted, anonymous_problem
from normal_guidance.clinical.prediction_job import Finished, Score
from normal_guidance.clinical.scan_prediction import ScanPrediction, attention_per_head
from normal_guidance.core.checks import checked_whole, is_number
from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.problems import Problem
from normal_guidance.data.volumes import read_volume
from normal_guidance.data.worker_pool import TIMEOUT, Pool
from normal_guidance.errors import UserError
from normal_guidance.features.encoder_inputs import Decoding
from normal_guidance.features.encoders import Encoder
from normal_guidance.features.encoding_folder import Encoded
from normal_guidance.features.encoding_machine import EncodingOptions, Inputs, Machine, Setup, start_workers
from normal_guidance.features.store_files import DTYPES
from normal_guidance.statistics.conformal import IntervalCalibration
from normal_guidance.statistics.key_slices import KEYS, key_slices
from normal_guidance.statistics.localization import smallest_interval

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
