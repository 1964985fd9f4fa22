"""The pages that people read: one for each scan, and one that lists all scans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.core.methods import method_title
from normal_guidance.fit.bundle import Bundle
from normal_guidance.scans.index.problems import Problem, folder_name, summarize
from normal_guidance.show.figure_style import rounded
from normal_guidance.show.html import (
    CAUTION,
    Section,
    bullets,
    caution,
    details,
    figure,
    page,
    paragraph,
    raw_table,
    table,
)
from normal_guidance.statistics.calibration import describe
from normal_guidance.statistics.conformal import IntervalCalibration, promise

# How many scans were predicted, in the words that the command, index.html and summary.json share.
#     predicted   the scan has a probability
#     refused     the model was not made for the scan; --force predicts it
#     failed      the scan cannot be read or processed
#     lacks       what a predicted scan lacks of the results that were asked for: its picture, its DICOM results
# `nguide predict` ends with 0 if all scans are predicted and none lacks anything, otherwise with 1.


STATES = ("predicted", "refused", "failed")
"""The states of a scan in a summary."""

Line = Mapping[str, Any]
"""A line of a summary: `scan_id`, `state`, `lacks` and `reason` are read here; lines of one scan count once."""


def count_states(lines: Iterable[Line]) -> dict[str, int]:
    """The number of scans in each state."""
    counts = Counter(line["state"] for line in _one_a_scan(lines))
    return {state: counts[state] for state in STATES}


def count_sentence(lines: Iterable[Line]) -> str:
    """The numbers of scans, without a full stop."""
    scans = _one_a_scan(lines)
    counts = count_states(scans)
    done, *others = (f"{counts[state]} {state}" for state in STATES if state == STATES[0] or counts[state])
    said = [", ".join([done.replace(" ", f" of {len(scans)} scans ", 1), *others])]
    for lacked in dict.fromkeys(line["lacks"] for line in scans if line.get("lacks")):
        reasons = [line["reason"] for line in scans if line.get("lacks") == lacked]
        verb = "lacks" if len(reasons) == 1 else "lack"
        instance = "" if len(set(reasons)) == 1 else "for instance: "
        said.append(f"{len(reasons)} {verb} {lacked} ({instance}{reasons[0]})")
    return "; ".join(said)


def is_all(lines: Iterable[Line]) -> bool:
    """Whether all scans are predicted and none lacks anything."""
    return all(line["state"] == STATES[0] and not line.get("lacks") for line in lines)


def _one_a_scan(lines: Iterable[Line]) -> list[Line]:
    return list({line["scan_id"]: line for line in lines}.values())


SIDES = {None: "no threshold", True: "positive", False: "negative"}
"""The result by the threshold, in words."""

READ_FIRST = "Caution: read this before the result"
"""The title of the banner with a scan's cautions."""

LISTED = 50
"""A page shows at most so many problems; prediction.json has all."""


def scan_page(
    prediction: ScanPrediction,
    bundle: Bundle,
    strip: Path | None,
    problems: Sequence[Problem] = (),
    *,
    anonymize: bool = False,
    further: Sequence[Path | None] = (),
) -> str:
    """Make report.html of a scan, which needs no other file.

    Args:
        prediction: the scan's prediction.
        bundle: the model that made it.
        strip: its picture.
        problems: those of writing its results.
        anonymize: leave out ids and paths.
        further: the pictures of further findings.
    """
    odd = [*prediction.problems, *problems]
    caption = (
        "Key slices in the encoder's window, from the feet to the head, and the attention along the scan. The interval "
        "is shaded; the dashed line is the normal distribution with the attention's mean and variance."
    )
    strips = (strip, *further) if further else (strip, *[None] * len(prediction.further))
    missing = [f"No picture: {one.detail}." for one in problems if one.action.startswith("no picture")]
    shown = [
        [*([caution("Without a picture", missing)] if path is None else [figure(path, caption)]), *_key_slices(one)]
        for one, path in zip(prediction.each, strips, strict=True)
    ]
    sections = [
        *_by_finding(prediction, shown),
        Section("Problems", [_problems(odd)] if odd else [paragraph("None.")]),
        Section("Scan", [_scan(prediction, anonymize)]),
        Section("Model", _models(bundle)),
    ]
    lead = [caution(READ_FIRST, prediction.every_caution), *_results(prediction), paragraph(CAUTION, note=True)]
    return page(f"Scan {prediction.row.scan_id}", lead, sections)


def _by_finding(prediction: ScanPrediction, shown: Sequence[list[str]]) -> list[Section]:
    """The key slices, in a section for each finding."""
    if not prediction.further:
        return [Section("Key slices", shown[0])]
    return [
        Section(one.finding.name if one.finding else "", [*_verdict_of(one), *blocks])
        for one, blocks in zip(prediction.each, shown, strict=True)
    ]


def _results(prediction: ScanPrediction) -> list[str]:
    """The result in a sentence or, of several findings, in a table."""
    if prediction.further:
        lines = [
            (
                str(one.finding),
                rounded(one.probability),
                "none" if one.threshold is None else rounded(one.threshold),
                SIDES[one.is_positive],
            )
            for one in prediction.each
        ]
        return [table(("finding", "probability", "threshold", "result"), lines), _where(prediction)]
    return [*_verdict_of(prediction), _where(prediction)]


def _verdict_of(prediction: ScanPrediction) -> list[str]:
    """The result of one finding: what was looked for, what came out, and which model says so."""
    said = [_verdict(prediction), f"Looked for: {prediction.sought}."]
    if prediction.model is not None:
        said.append(f"By {prediction.model}.")
    return [*map(paragraph, said), *_evenness(prediction)]


def _where(prediction: ScanPrediction) -> str:
    return paragraph(f"Body part: {prediction.body_part}; modality: {prediction.row.modality or 'not stated'}.")


def _verdict(prediction: ScanPrediction) -> str:
    text = f"Probability {rounded(prediction.probability)}"
    if prediction.threshold is None:
        return f"{text}; no threshold was chosen."
    side = "positive: at or above" if prediction.is_positive else "negative: below"
    return f"{text}, {side} the threshold {rounded(prediction.threshold)}."


def _evenness(prediction: ScanPrediction) -> list[str]:
    """A warning if the attention has no peak: key slices are then chosen by rule only."""
    even = 1 / len(prediction.row)
    if prediction.attention.max().item() > 1.01 * even:
        return []
    return [paragraph("All slices have the same attention: the key slices below say nothing.")]


def _key_slices(prediction: ScanPrediction) -> list[str]:
    """The table of key slices, and a sentence about the interval."""
    row, numbers = prediction.row, prediction.instance_numbers
    lines = []
    of = f" of {len(prediction.key_slices)}"
    for place in prediction.key_slices:
        position = f"{row.positions[place]:.1f}" if row.slice_spacing is not None else "unknown"
        share = f"{100 * prediction.attention[place].item():.2f} %"
        number = "none" if numbers[place] is None else str(numbers[place])
        name = prediction.key_slice_name(place) + of
        lines.append((name, str(place + 1), number, position, share))
    order = "by their position, from the feet to the head in axial scans; image numbers are DICOM's InstanceNumber"
    interval = (
        f"{prediction.interval_sentence} Slices are counted from 1 "
        f"{order if prediction.has_images else 'in the order of their features'}."
    )
    columns = ("by attention", "slice", "image number", "position in mm", "attention")
    return [paragraph(prediction.key_slices_sentence), table(columns, lines), paragraph(interval)]


def _scan(prediction: ScanPrediction, anonymize: bool) -> str:
    row = prediction.row
    spacing = "unknown" if row.slice_spacing is None else f"{row.slice_spacing:g} mm"
    facts = {
        "patient": None if anonymize else row.patient_id,
        "folder": None if anonymize else str(prediction.root),
        "first file": None if anonymize else row.files[0],
        "modality": row.modality,
        "body part": prediction.body_part,
        "slices": str(len(row)),
        "slice spacing": spacing,
        "pixels": f"{row.rows} x {row.columns}" if prediction.has_images else "none, features only",
    }
    return _facts(facts)


def _models(bundle: Bundle) -> list[str]:
    """The facts about the model, of several findings each behind a line to click on."""
    if not bundle.further:
        return _model(bundle)
    return [details(str(one.finding), "".join(_model(one))) for one in bundle.each]


def _model(bundle: Bundle) -> list[str]:
    training = bundle.training
    scans = ", ".join(f"{count} {part}" for part, count in training["scans"].items())
    test = training["test"] or {}
    facts = {
        "identity": f"{bundle.identity}; fingerprint {bundle.identity.fingerprint}",
        "method": method_title(bundle.method),
        "encoder": bundle.encoder and f"{bundle.encoder.name} ({bundle.encoder.fingerprint[:12]})",
        "made for": str(bundle.expects) if bundle.encoder else f"slices of {bundle.features} features",
        "trained on": f"{training['dataset'] or 'unknown'}: {scans} scans",
        "validation AUROC": _number(training.get("validation_auroc")),
        "out-of-fold AUROC": _number(training.get("out_of_fold_auroc")),
        "test AUROC": _number(test.get("scan_auroc")),
        "test localization AUROC": _number(test.get("localization_auroc")),
        "interval": bundle.intervals and _interval(bundle.intervals, test.get("intervals")),
        "seed": str(training["seed"]),
        "date": training["date"],
        "commit": training["commit"],
    }
    return [_facts(facts), *(paragraph(line, note=True) for line in describe(bundle.operation))]


def _interval(calibration: IntervalCalibration, test: Mapping[str, int] | None) -> str:
    tested = f"; it does in {test['held']} of {test['scans']} test scans" if test else ""
    return f"{promise(calibration.coverage)} (calibrated on {calibration.scans} scans{tested})"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _facts(facts: Mapping[str, str | None]) -> str:
    lines = (f"{name}: {value}" for name, value in facts.items() if value)
    return bullets(lines)


def _problems(problems: Sequence[Problem]) -> str:
    shown = [(one.kind, one.file or "the scan", one.detail, one.action) for one in problems[:LISTED]]
    more = len(problems) - len(shown)
    rest = paragraph(f"{more} more are in prediction.json.", note=True) if more else ""
    return table(("kind", "file", "what was found", "what was done"), shown, words=True) + rest


def index_page(lines: Sequence[Mapping[str, Any]], bundle: Bundle, others: Sequence[Problem]) -> str:
    """Make index.html; `lines` are those of `summary_lines`, and keep their order: a scan's findings in one row."""
    good = [line for line in lines if line["state"] == "predicted"]
    rest = [line for line in lines if line["state"] != "predicted"]
    names = [one.finding.name for one in bundle.each if one.finding] if bundle.further else []
    scans = [good[first : first + max(1, len(names))] for first in range(0, len(good), max(1, len(names)))]
    header = ("scan", *(names or ("probability", "result", "key slices")), "slices", "problems")
    rows = [
        (
            f"<a href='{quote(folder_name(line['scan_id']))}/report.html'>{_name(line)}</a>{_flag(line)}",
            *(_cells(own) if names else (*_cells_of(line), escape(line["key_slices"]))),
            str(line["slices"]),
            str(line["problems"]),
        )
        for own in scans
        for line in own[:1]
    ]
    reasons = [(line["scan_id"], line["state"], str(line["reason"])) for line in rest]
    counts = ", ".join(f"{kind} {count}" for kind, count in summarize(others).items())
    noted = [paragraph(f"Files that belong to no scan: {counts}; see problems.csv.", note=True)] if others else []
    sections = [
        Section(
            "Scans by probability" + (f" of {names[0]}" if names else ""), [raw_table(header, rows)] if rows else []
        ),
        Section("Not predicted", [table(("scan", "state", "why"), reasons, words=True)] if reasons else []),
        Section("Model", [*_models(bundle), *noted]),
    ]
    lead = f"{count_sentence(lines)}. {_positive(good, names)}"
    return page("Predictions", [paragraph(lead), paragraph(CAUTION, note=True)], sections)


def _name(line: Mapping[str, Any]) -> str:
    """A scan's name, which may be written from right to left, without turning the text around it."""
    return f"<bdi>{escape(line['scan_id'])}</bdi>"


def _flag(line: Mapping[str, Any]) -> str:
    """The cautions of a scan, below its name."""
    return f"<div class=flag>⚠ {escape(line['cautions'])}</div>" if line["cautions"] else ""


def _cells_of(line: Mapping[str, Any]) -> tuple[str, str]:
    """Probability and result of a line of the summary."""
    positive = None if line["positive"] is None else bool(line["positive"])
    return escape(rounded(line["probability"])), SIDES[positive]


def _cells(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same for each finding of a scan, in one cell; positive ones stand out."""
    texts = [" ".join(_cells_of(line)) for line in lines]
    return [f"<b>{text}</b>" if line["positive"] else text for text, line in zip(texts, lines, strict=True)]


def _positive(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """How many of the predicted scans are positive, of each finding."""
    if not names:
        return f"Positive: {sum(line['positive'] == 1 for line in lines)}."
    counts = {name: sum(line["positive"] == 1 and line["finding"] == name for line in lines) for name in names}
    return f"Positive: {', '.join(f'{name} {count}' for name, count in counts.items())}."
