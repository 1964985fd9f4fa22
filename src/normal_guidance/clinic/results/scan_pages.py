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
from normal_guidance.statistics.conformal import promise

STATES = ("predicted", "refused", "failed")
"""The states of a scan in the summary that the command, index.html and summary.json share: it has a probability; the
model was not made for it, but --force predicts it; it cannot be read or processed."""

Line = Mapping[str, Any]  # of a summary: `scan_id`, `state`, `reason`, `lacks` (picture, DICOM results)


def count_states(lines: Iterable[Line]) -> dict[str, int]:
    """The number of scans in each state."""
    counts = Counter(line["state"] for line in _one_a_scan(lines))
    return {state: counts[state] for state in STATES}


def count_sentence(lines: Iterable[Line]) -> str:
    """The numbers of scans, without a full stop."""
    scans = _one_a_scan(lines)
    counts = count_states(scans)
    said = [f"{counts[STATES[0]]} of {len(scans)} scans {STATES[0]}"]
    said[0] += "".join(f", {counts[state]} {state}" for state in STATES[1:] if counts[state])
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


SIDES = {None: "no threshold", True: "positive", False: "negative"}  # the result by the threshold, in words
READ_FIRST = "Caution: read this before the result"  # the title of the banner with a scan's cautions
LISTED = 50  # a page shows at most so many problems; prediction.json has all


def scan_page(
    prediction: ScanPrediction,
    bundle: Bundle,
    strips: Sequence[Path | None],
    problems: Sequence[Problem] = (),
    *,
    anonymize: bool = False,
) -> str:
    """Make report.html of a scan, with the picture of each finding inside and the problems of writing its results."""
    caption = (
        "Key slices in the encoder's window, from the feet to the head, and the attention along the scan. The interval "
        "is shaded; the dashed line is the normal distribution with the attention's mean and variance."
    )
    missing = [f"No picture: {problem.detail}." for problem in problems if problem.action.startswith("no picture")]
    sections = []
    for result, strip in zip(prediction.each, strips, strict=True):
        picture = caution("Without a picture", missing) if strip is None else figure(strip, caption)
        shown = [picture, *_key_slices(result)]
        if prediction.further:
            sections.append(Section(result.finding.name if result.finding else "", [*_verdict(result), *shown]))
        else:
            sections.append(Section("Key slices", shown))
    odd = [*prediction.problems, *problems]
    listed = [(problem.kind, problem.file or "the scan", problem.detail, problem.action) for problem in odd[:LISTED]]
    blocks = [table(("kind", "file", "what was found", "what was done"), listed, words=True)]
    if len(odd) > LISTED:
        blocks.append(paragraph(f"{len(odd) - LISTED} more are in prediction.json.", note=True))
    sections += [
        Section("Problems", blocks if odd else [paragraph("None.")]),
        Section("Scan", [_scan(prediction, anonymize)]),
        Section("Model", _models(bundle)),
    ]
    results = _verdict(prediction)
    if prediction.further:
        lines = []
        for each in prediction.each:
            threshold = "none" if each.threshold is None else rounded(each.threshold)
            lines.append((str(each.finding), rounded(each.probability), threshold, SIDES[each.is_positive]))
        results = [table(("finding", "probability", "threshold", "result"), lines)]
    where = f"Body part: {prediction.body_part}; modality: {prediction.row.modality or 'not stated'}."
    lead = [caution(READ_FIRST, prediction.every_caution), *results, paragraph(where), paragraph(CAUTION, note=True)]
    return page(f"Scan {prediction.row.scan_id}", lead, sections)


def _verdict(prediction: ScanPrediction) -> list[str]:
    """The result of one finding: what came out, what was looked for, and which model says so."""
    result = f"Probability {rounded(prediction.probability)}; no threshold was chosen."
    if prediction.threshold is not None:
        side = "positive: at or above" if prediction.is_positive else "negative: below"
        result = f"Probability {rounded(prediction.probability)}, {side} the threshold {rounded(prediction.threshold)}."
    said = [result, f"Looked for: {prediction.sought}."]
    if prediction.model is not None:
        said.append(f"By {prediction.model}.")
    if prediction.attention.max().item() <= 1.01 / len(prediction.row):  # no peak: key slices are chosen by rule only
        said.append("All slices have the same attention: the key slices below say nothing.")
    return list(map(paragraph, said))


def _key_slices(prediction: ScanPrediction) -> list[str]:
    """The table of key slices, and a sentence about the interval."""
    row, numbers = prediction.row, prediction.instance_numbers
    lines = []
    for place in prediction.key_slices:
        name = f"{prediction.key_slice_name(place)} of {len(prediction.key_slices)}"
        number = "none" if numbers[place] is None else str(numbers[place])
        position = f"{row.positions[place]:.1f}" if row.slice_spacing is not None else "unknown"
        lines.append((name, str(place + 1), number, position, f"{100 * prediction.attention[place].item():.2f} %"))
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
    return [details(str(model.finding), "".join(_model(model))) for model in bundle.each]


def _model(bundle: Bundle) -> list[str]:
    training, intervals = bundle.training, bundle.intervals
    test = training["test"] or {}
    held = test.get("intervals")
    tested = f"; it does in {held['held']} of {held['scans']} test scans" if held else ""
    promised = intervals and f"{promise(intervals.coverage)} (calibrated on {intervals.scans} scans{tested})"
    scans = ", ".join(f"{count} {part}" for part, count in training["scans"].items())
    scores = {
        "validation AUROC": training.get("validation_auroc"),
        "out-of-fold AUROC": training.get("out_of_fold_auroc"),
        "test AUROC": test.get("scan_auroc"),
        "test localization AUROC": test.get("localization_auroc"),
    }
    facts = {
        "identity": f"{bundle.identity}; fingerprint {bundle.identity.fingerprint}",
        "method": method_title(bundle.method),
        "encoder": bundle.encoder and f"{bundle.encoder.name} ({bundle.encoder.fingerprint[:12]})",
        "made for": str(bundle.expects) if bundle.encoder else f"slices of {bundle.features} features",
        "trained on": f"{training['dataset'] or 'unknown'}: {scans} scans",
        **{name: None if score is None else f"{score:.3f}" for name, score in scores.items()},
        "interval": promised,
        "seed": str(training["seed"]),
        "date": training["date"],
        "commit": training["commit"],
    }
    return [_facts(facts), *(paragraph(line, note=True) for line in describe(bundle.operation))]


def _facts(facts: Mapping[str, str | None]) -> str:
    return bullets(f"{name}: {value}" for name, value in facts.items() if value)


def index_page(lines: Sequence[Mapping[str, Any]], bundle: Bundle, others: Sequence[Problem]) -> str:
    """Make index.html; `lines` are those of `summary_lines`, and keep their order: a scan's findings in one row."""
    good = [line for line in lines if line["state"] == STATES[0]]
    names = [model.finding.name for model in bundle.each if model.finding] if bundle.further else []
    step = max(1, len(names))
    rows = []
    for start in range(0, len(good), step):
        findings, line = good[start : start + step], good[start]
        # A name may be written from right to left, and must not turn the text around it.
        name = f"<bdi>{escape(line['scan_id'])}</bdi>"
        flag = f"<div class=flag>⚠ {escape(line['cautions'])}</div>" if line["cautions"] else ""
        results = [(escape(rounded(finding["probability"])), SIDES[finding["positive"]]) for finding in findings]
        cells = [*results[0], escape(line["key_slices"])]
        if names:  # each finding in one cell; positive ones stand out
            texts = zip(map(" ".join, results), findings, strict=True)
            cells = [f"<b>{text}</b>" if finding["positive"] else text for text, finding in texts]
        link = f"<a href='{quote(folder_name(line['scan_id']))}/report.html'>{name}</a>{flag}"
        rows.append((link, *cells, str(line["slices"]), str(line["problems"])))
    header = ("scan", *(names or ("probability", "result", "key slices")), "slices", "problems")
    reasons = [(line["scan_id"], line["state"], str(line["reason"])) for line in lines if line["state"] != STATES[0]]
    counts = ", ".join(f"{kind} {count}" for kind, count in summarize(others).items())
    noted = [paragraph(f"Files that belong to no scan: {counts}; see problems.csv.", note=True)] if others else []
    title = "Scans by probability" + (f" of {names[0]}" if names else "")
    sections = [
        Section(title, [raw_table(header, rows)] if rows else []),
        Section("Not predicted", [table(("scan", "state", "why"), reasons, words=True)] if reasons else []),
        Section("Model", [*_models(bundle), *noted]),
    ]
    positive = [line for line in good if line["positive"] == 1]
    of_each = [f"{name} {sum(line['finding'] == name for line in positive)}" for name in names]
    lead = f"{count_sentence(lines)}. Positive: {', '.join(of_each) or len(positive)}."
    return page("Predictions", [paragraph(lead), paragraph(CAUTION, note=True)], sections)
