"""The results that `nguide predict` writes.

    OUT/summary.csv, summary.json     one line a scan, also without a prediction; model, options, versions
    OUT/index.html                    all scans by probability
    OUT/predictions.parquet           `normal_guidance.sweep.predictions.PREDICTIONS`; label -1, part 'new'
    OUT/manifest.parquet              files and geometry, for `nguide view`; not for anonymous results or features
    OUT/problems.csv                  everything that was odd
    OUT/SCAN/prediction.json          everything about a scan (`prediction_json`)
    OUT/SCAN/slices.csv               a line a slice
    OUT/SCAN/strip.png                key slices and attention curve, of features the curve alone; not for anonymous
                                      scans whose pixels name the patient
    OUT/SCAN/strip.jpg                the key slices alone, small, for index.html
    OUT/SCAN/report.html              one page, with the strip
    OUT/SCAN/dicom/                   for hospital software, if asked for

A model of several findings gives one line for each scan and finding in the summary, `findings` in prediction.json, a
column of attention for each in slices.csv, strip-NAME.png, dicom/NAME/, and a `group` for each in predictions.parquet.

A slice is counted from 1, as people count.  A scan's folder appears when it is complete,
the files of OUT at the end.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from normal_guidance import __version__
from normal_guidance.base.errors import FULL, UnreadableError, UserError
from normal_guidance.base.files import (
    FORMAT,
    HEAD,
    folder_atomically,
    make_folder,
    read_json,
    write_atomically,
    write_json,
)
from normal_guidance.base.system import importing
from normal_guidance.clinic.predict.job import PREDICTION, SUMMARY, PredictionJob
from normal_guidance.clinic.predict.new_scans import NotPredicted
from normal_guidance.clinic.predict.predicting import Outcome
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.clinic.results.scan_pages import STATES, count_states, draw_strip, index_page, scan_page
from normal_guidance.core.bags import UNKNOWN
from normal_guidance.core.prediction import Prediction
from normal_guidance.fit.bundle import Bundle
from normal_guidance.scans.index.manifest import write_manifest
from normal_guidance.scans.index.problems import Problem, folder_name, read_problems, summarize, write_problems
from normal_guidance.show.text_tables import as_csv
from normal_guidance.sweep.predictions import ScanRows, prediction_table, write_predictions_table
from normal_guidance.sweep.run import PREDICTION_TABLE

NO = "no "  # so begin the actions of problems that cost a scan some results: "no picture, no DICOM results"
NO_PICTURE, NO_DICOM_RESULTS = f"{NO}picture", f"{NO}DICOM results"

NAMED_PIXELS = (
    "its pixels name the patient (BurnedInAnnotation is YES), and a picture would show them; clean the pixels first, "
    "or predict without --anonymize"
)
"""Why an anonymous scan has no picture."""

PART = "new"  # the name in predictions.parquet for the part of scans without a split

NO_DICOM = "its headers do not allow it, or its pixels name the patient; predict without --anonymize to see the reason"
"""The reason in anonymous results: the full one may quote the headers."""

OF_A_MODEL = ("identity", "operation", "intervals", "training")  # in prediction.json, of the model of each finding


@dataclass(frozen=True, eq=False)
class Written:
    """The outcome of a scan: a prediction and its folder, or neither; `problems` are those of writing it."""

    outcome: Outcome
    folder: Path | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def lacking(self) -> tuple[Problem, ...]:
        """Why a part of the results is missing; an odd header is noted, and costs nothing."""
        return tuple(problem for problem in self.problems if problem.action.startswith(NO))

    @property
    def lacks(self) -> str:
        """What is missing of the results of a predicted scan; empty if nothing is."""
        parts = (part.removeprefix(NO) for problem in self.lacking for part in problem.action.split(", "))
        return " and ".join(dict.fromkeys(parts))

    @property
    def complete(self) -> bool:
        return self.folder is not None and not self.lacking


def prediction_json(prediction: ScanPrediction, bundle: Bundle, *, anonymize: bool = False) -> dict[str, Any]:
    """Make the content of prediction.json; `docs/howto/predict.md` says what its fields mean."""
    row, about = prediction.row, _model_json(bundle)
    content = {
        "normal_guidance": __version__,
        "scan_id": row.scan_id,
        "patient_id": None if anonymize else row.patient_id,
        **_finding_json(prediction, anonymize),
        "source": {
            "kind": row.kind,
            "modality": row.modality or None,
            "body_part": row.body_part or None,
            "rows": row.rows or None,
            "columns": row.columns or None,
            "pixel_spacing_mm": row.pixel_spacing and list(row.pixel_spacing),
            "slice_spacing_mm": row.slice_spacing,
            "folder": None if anonymize else str(prediction.root),
            "study_uid": None if anonymize else row.study_uid or None,
            "series_uid": None if anonymize else row.series_uid or None,
            "series_description": None if anonymize else row.series_description or None,
        },
        "problems": [problem._asdict() for problem in prediction.problems],
        "model": {name: about[name] for name in ("identity", "encoder", "expects", *OF_A_MODEL[1:])},
    }
    findings = []
    for of_finding, model in zip(prediction.each, bundle.each, strict=True):
        if of_finding.finding is not None:
            about, numbers = _model_json(model), _finding_json(of_finding, anonymize)
            numbers.pop("slices")
            named = of_finding.finding.as_json()
            findings.append({**named, **numbers, "model": {name: about[name] for name in OF_A_MODEL}})
    return {**content, "findings": findings} if findings else content


def _model_json(bundle: Bundle) -> dict[str, Any]:
    return {"identity": asdict(bundle.identity), **bundle.as_json()}


def _finding_json(prediction: ScanPrediction, anonymize: bool) -> dict[str, Any]:
    """What prediction.json says of each finding, and the number of slices."""
    lines = _slices(prediction, anonymize)
    ends = _interval_ends(prediction)
    about = {"share": prediction.share, "coverage": prediction.coverage, "meaning": prediction.meaning}
    return {
        "sought": prediction.sought,
        "cautions": list(prediction.cautions),
        "model_cautions": list(prediction.model_cautions),
        "method": prediction.method,
        "logit": prediction.logit,
        "probability": prediction.probability,
        "threshold": prediction.threshold,
        "positive": prediction.is_positive,
        "slices": len(lines),
        "key_slices": [lines[position] for position in prediction.key_positions],
        "interval": {**ends, **about} if ends else None,
        "attention": prediction.attention.tolist(),
        "head_attention": prediction.head_attention.tolist(),
    }


def _interval_ends(prediction: ScanPrediction) -> dict[str, int | None]:
    """The ends of the interval; nothing for a scan that was called negative."""
    if prediction.interval is None:
        return {}
    (first, last), numbers = prediction.interval, prediction.instance_numbers
    images = {"first_instance_number": numbers[first - 1], "last_instance_number": numbers[last - 1]}
    return {"first_slice": first, "last_slice": last, **images}


def _slices(prediction: ScanPrediction, anonymize: bool) -> list[dict[str, Any]]:
    row, attention = prediction.row, prediction.attention.tolist()
    return [
        {
            "slice": position + 1,
            "instance_number": number,
            "attention": attention[position],
            "position_mm": row.positions[position] if row.slice_spacing is not None else None,
            **({} if anonymize else {"file": row.files[position], "frame": row.frames[position]}),
        }
        for position, number in enumerate(prediction.instance_numbers)
    ]


def dicom_results(folder: Path) -> list[Path]:
    """The DICOM results of all scans and findings below a folder, in a fixed order."""
    return sorted(folder.rglob("dicom/**/*.dcm"))


def write_scan(
    prediction: ScanPrediction, bundle: Bundle, out: str | Path, dicom: bool = False, anonymize: bool = False
) -> Written:
    """Write a scan's folder below `out`; files that cannot be written are among the returned problems.

    Args:
        prediction: the scan's prediction.
        bundle: the model that made it.
        out: the folder of all results.
        dicom: also write DICOM results.
        anonymize: leave out ids, paths and UIDs; the prediction was made with the same option.
    """
    folder = Path(out) / folder_name(prediction.row.scan_id)
    problems: list[Problem] = []
    with folder_atomically(folder) as draft:
        strips: list[Path | None] = []
        for place, (result, model) in enumerate(zip(prediction.each, bundle.each, strict=True)):
            name = result.finding.name if result.finding and prediction.further else ""
            strip = draft / (f"strip-{name}.png" if name else "strip.png")
            problems += _draw(result, model, strip, dicom, anonymize)
            if dicom and strip.exists():
                problems += _write_dicom(result, strip, draft / "dicom" / name, anonymize, place)
            strips.append(strip if strip.exists() else None)
        problems = list(dict.fromkeys(problems))  # findings share their slices, and what is odd about them
        page = scan_page(prediction, bundle, strips, problems, anonymize=anonymize)
        write_json(draft / PREDICTION, prediction_json(prediction, bundle, anonymize=anonymize))
        write_atomically(draft / "slices.csv", _slices_csv(prediction, anonymize))
        write_atomically(draft / "report.html", page.encode())
    return Written(prediction, folder, tuple(problems))


def _draw(prediction: ScanPrediction, bundle: Bundle, strip: Path, dicom: bool, anonymize: bool) -> list[Problem]:
    action = f"{NO_PICTURE}, {NO_DICOM_RESULTS}" if dicom else NO_PICTURE
    if anonymize and prediction.row.burned_in:
        return [Problem(prediction.row.scan_id, "", "burned_in", NAMED_PIXELS, action)]
    try:
        saw = bundle.preprocessing  # None of features
        window, field = (None, None) if saw is None else (saw.windows[0], saw.field)
        draw_strip(prediction, window, strip, repair=bundle.repair, field=field)
    except UnreadableError as error:  # it could be decoded before, so it has changed since
        detail = "a key slice cannot be read" if anonymize else f"{error.kind}, {error.detail}"
        return [Problem(prediction.row.scan_id, "", "unreadable", detail, action)]
    return []


def _write_dicom(prediction: ScanPrediction, strip: Path, out: Path, anonymize: bool, place: int) -> list[Problem]:
    with importing("dicom", "DICOM results need highdicom"):
        from normal_guidance.clinic.dicom.objects import write_dicom
    problems: list[Problem] = []
    try:
        write_dicom(prediction, strip, out, anonymize=anonymize, report=problems.append, place=place)
    except UserError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
            raise  # the disk's fault, not the scan's: the same command goes on when there is space
        detail = NO_DICOM if anonymize else str(error)
        problems.append(Problem(prediction.row.scan_id, "", "failed", detail, NO_DICOM_RESULTS))
    return problems


def _slices_csv(prediction: ScanPrediction, anonymize: bool) -> bytes:
    first, last = prediction.interval_positions
    rank = {position: number for number, position in enumerate(prediction.key_positions, start=1)}
    heads = prediction.head_attention.tolist()
    columns = {f"attention_head_{number}": head for number, head in enumerate(heads, start=1)} if len(heads) > 1 else {}
    columns |= {
        f"attention_{result.finding.name}": result.attention.tolist() for result in prediction.further if result.finding
    }
    lines = []
    for position, line in enumerate(_slices(prediction, anonymize)):
        values = {name: column[position] for name, column in columns.items()}
        inside = None if prediction.interval is None else int(first <= position <= last)
        lines.append(line | values | {"key_slice_rank": rank.get(position), "in_interval": inside})
    return as_csv(lines, _cell).encode()


def _cell(value: object) -> object:
    """Quote text that begins like a formula: ids come from unknown files, and spreadsheets would run it."""
    if isinstance(value, str):
        line = " ".join(value.split())
        return "'" + line if line.startswith(("=", "+", "-", "@")) else line
    return value


def write_predictions(
    outcomes: Iterable[Outcome],
    bundle: Bundle,
    out: str | Path,
    *,
    dicom: bool = False,
    anonymize: bool = False,
    others: Sequence[Problem] = (),
    about: Mapping[str, Any] | None = None,
    watch: Callable[[Written], object] = lambda written: None,
    job: PredictionJob | None = None,
) -> list[Written]:
    """Write all results into a folder that is empty or does not exist, each scan as soon as it is predicted.

    Args:
        outcomes: outcomes of `predict`.
        bundle: the model that made them.
        out: the folder.
        dicom: also write DICOM results.
        anonymize: leave out ids, paths and UIDs; `outcomes` were made with the same option.
        others: problems of files that belong to no scan.
        about: copied to summary.json.
        watch: receives each scan when it is written.
        job: records each scan, so that it need not be written again; its folder may hold results already.
    """
    out = Path(out)
    if job is None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another folder (-o), or delete it first")
    make_folder(out)
    written: list[Written] = []
    for outcome in outcomes:
        if isinstance(outcome, NotPredicted):
            written.append(Written(outcome))
        else:
            before = None if job is None else _written_before(outcome, out, job)
            written.append(before or write_scan(outcome, bundle, out, dicom, anonymize))
            if job is not None and before is None:
                job.save(outcome, written[-1].problems)
        watch(written[-1])
    predictions = [scan.outcome for scan in written if isinstance(scan.outcome, ScanPrediction)]
    if job is not None:
        job.keep_only([prediction.row.scan_id for prediction in predictions])
    problems = [*others, *(problem for scan in written for problem in problems_of(scan))]
    ordered = sorted(written, key=_by_probability)
    lines = [line for scan in ordered for line in summary_lines(scan, bundle, anonymize=anonymize)]
    write_problems(out / "problems.csv", problems)
    if lines:
        write_atomically(out / "summary.csv", as_csv(lines, _cell).encode())
    by_finding = zip(*(prediction.each for prediction in predictions), strict=True)
    write_predictions_table(out / PREDICTION_TABLE, [_prediction_table(same, anonymize) for same in by_finding])
    if predictions and predictions[0].has_images and not anonymize:
        where = {"source": "predict", "root": str(predictions[0].root), "version": __version__}
        write_manifest(out / "manifest.parquet", [prediction.row for prediction in predictions], where)
    seen = [(scan.outcome, scan.folder) for scan in ordered if isinstance(scan.outcome, ScanPrediction)]
    write_atomically(out / "index.html", index_page(lines, bundle, others, seen).encode())
    summary = {
        "normal_guidance": __version__,
        "anonymous": anonymize,
        **(about or {}),
        "counts": count_states(lines),
        "problems": summarize(problems),
        "scans": lines,
        "model": _model_json(bundle),
        **({"further_models": [_model_json(model) for model in bundle.further]} if bundle.further else {}),
    }
    write_json(out / SUMMARY, summary)
    return written


def _written_before(prediction: ScanPrediction, out: Path, job: PredictionJob) -> Written | None:
    """What an earlier start wrote of the scan; None if it wrote nothing, or other scores."""
    before = job.finished(prediction.row, prediction.root)
    if before is None:
        return None
    folder = out / folder_name(prediction.row.scan_id)
    same = all(
        result.logit == score.logit and torch.equal(result.log_attention, score.log_attention)
        for result, score in zip(prediction.each, before.scores, strict=True)
    )
    if not same or before.problems != prediction.problems:
        shutil.rmtree(folder)
        return None
    return Written(prediction, folder, before.of_writing)


def _by_probability(scan: Written) -> tuple[int, float, str]:
    """The most probable scans first, then refused scans, then failed scans."""
    outcome = scan.outcome
    if isinstance(outcome, ScanPrediction):
        return 0, -outcome.probability, outcome.row.scan_id
    return 1 if outcome.refused else 2, 0.0, outcome.scan_id


def problems_of(scan: Written) -> list[Problem]:
    """All problems of a scan; the reason why it was not predicted comes first."""
    first = [scan.outcome.reason] if isinstance(scan.outcome, NotPredicted) else []
    return [*first, *scan.outcome.problems, *scan.problems]


def summary_lines(scan: Written, bundle: Bundle, *, anonymize: bool = False) -> list[dict[str, Any]]:
    """Make a scan's lines of summary.csv: one, or one for each finding, which is named if it has a name."""
    each = [scan.outcome] if isinstance(scan.outcome, NotPredicted) else scan.outcome.each
    lines = [summary_line(replace(scan, outcome=outcome), anonymize=anonymize) for outcome in each]
    if bundle.finding is None:
        return lines
    findings = [outcome.finding if isinstance(outcome, ScanPrediction) else None for outcome in each]
    names = [finding and finding.name for finding in findings]
    return [{"scan_id": line["scan_id"], "finding": name, **line} for name, line in zip(names, lines, strict=True)]


COLUMNS = (
    *("scan_id", "patient_id", "state", "probability", "threshold", "positive", "logit", "slices", "key_slices"),
    *("key_instance_numbers", "interval_first_slice", "interval_last_slice", "interval_first_instance_number"),
    *("interval_last_instance_number", "interval_meaning", "cautions", "sought", "body_part", "model", "problems"),
    *("lacks", "reason"),
)


def summary_line(scan: Written, *, anonymize: bool = False) -> dict[str, Any]:
    """Make a scan's line of summary.csv, for the first finding."""
    outcome, line = scan.outcome, dict[str, Any].fromkeys(COLUMNS)
    line |= {"problems": len(problems_of(scan)), "lacks": scan.lacks or None}
    if isinstance(outcome, NotPredicted):
        reason = f"{outcome.reason.detail} ({outcome.reason.action.removeprefix('refused; ')})"
        return line | {"scan_id": outcome.scan_id, "state": STATES[1 if outcome.refused else 2], "reason": reason}
    numbers = [outcome.instance_numbers[position] for position in outcome.key_positions]
    ends = {f"interval_{name}": number for name, number in _interval_ends(outcome).items()}
    return line | {
        "scan_id": outcome.row.scan_id,
        "patient_id": None if anonymize else outcome.row.patient_id,
        "state": STATES[0],
        "probability": outcome.probability,
        "threshold": outcome.threshold,
        "positive": None if outcome.is_positive is None else int(outcome.is_positive),
        "logit": outcome.logit,
        "slices": len(outcome.row),
        "key_slices": " ".join(map(str, outcome.key_slices)),
        "key_instance_numbers": " ".join(str(number) for number in numbers if number is not None) or None,
        **ends,
        "interval_meaning": outcome.meaning if ends else None,
        "cautions": " ".join(outcome.cautions) or None,
        "sought": outcome.sought,
        "body_part": outcome.body_part,
        "model": outcome.model and outcome.model.short,
        "reason": scan.lacking[0].detail if scan.lacking else None,
    }


def summary_json(out: Path, summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What `outcome_json` says of each scan, from results that are complete."""
    problems = defaultdict[str, list[Problem]](list)
    for problem in read_problems(out / "problems.csv"):
        problems[problem.scan_id].append(problem)
    for scan_id, lines in groupby(summary["scans"], lambda line: line["scan_id"]):
        yield _scan_json(next(lines), out / folder_name(scan_id), problems[scan_id])


def outcome_json(scan: Written, *, anonymize: bool = False) -> dict[str, Any]:
    """Describe one scan for scripts: prediction.json with `state` and `folder`, or why there is no prediction."""
    return _scan_json(summary_line(scan, anonymize=anonymize), scan.folder, problems_of(scan))


def _scan_json(line: Mapping[str, Any], folder: Path | None, problems: Iterable[Problem]) -> dict[str, Any]:
    shared = {name: line[name] for name in ("scan_id", "state", "lacks", "reason")}
    if folder is None or line["state"] != STATES[0]:
        return {**shared, "problems": [problem._asdict() for problem in problems]}
    content = read_json(folder / PREDICTION, "delete the folder and predict again")
    return {**shared, "folder": str(folder), HEAD: FORMAT, **content}


def _prediction_table(predictions: Sequence[ScanPrediction], anonymize: bool) -> pa.Table:
    """Rows of predictions.parquet: `probability` is calibrated, and each head's attention adds up to one."""
    ids = [prediction.row.scan_id for prediction in predictions]
    scans = ScanRows(
        scan_ids=ids,
        patient_ids=ids if anonymize else [prediction.row.patient_id for prediction in predictions],
        labels=torch.full((len(ids),), UNKNOWN),
        lengths=torch.tensor([len(prediction.row) for prediction in predictions]),
    )
    packed = Prediction(
        logit=torch.tensor([prediction.logit for prediction in predictions]),
        attention=torch.cat([prediction.attention for prediction in predictions]),
        log_attention=torch.cat([prediction.log_attention.log_softmax(dim=-1) for prediction in predictions], dim=1),
    )
    probability = torch.tensor([prediction.probability for prediction in predictions])
    finding = predictions[0].finding
    group = "" if finding is None else finding.name
    return prediction_table(scans, packed, part=PART, group=group, probability=probability)
