"""What people look at: a page for each scan with its picture, and a page that lists all scans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any
from urllib.parse import quote

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from PIL import Image

from normal_guidance.base.files import write_atomically
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.core.guidance import normal_reference
from normal_guidance.core.methods import method_title
from normal_guidance.fit.bundle import Bundle
from normal_guidance.scans.features.windows import Window, middle, plane_of, read_windowed
from normal_guidance.scans.index.geometry import orientation_letters
from normal_guidance.scans.index.problems import Problem, folder_name, summarize
from normal_guidance.show import html
from normal_guidance.show.figure_style import GREEN, ORANGE, WIDTH, label_slices, rounded, save, styled
from normal_guidance.show.html import Section
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
KEYS_SHOWN = "Key slices in the encoder's window, from the feet to the head, and the attention"
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
        f"{KEYS_SHOWN if prediction.has_images else 'The attention'} along the scan. An interval is shaded; the dashed "
        "line is the normal distribution with the attention's mean and variance."
    )
    if bundle.preprocessing is not None and bundle.preprocessing.field is not None:
        caption += f" The encoder saw what is inside the dashed frame: {bundle.preprocessing.field:g} mm."
    missing = [f"No picture: {problem.detail}." for problem in problems if problem.action.startswith("no picture")]
    sections = []
    for result, strip in zip(prediction.each, strips, strict=True):
        picture = html.caution("Without a picture", missing) if strip is None else html.figure(strip, caption)
        shown = [picture, *_key_slices(result)]
        if prediction.further:
            sections.append(Section(result.finding.name if result.finding else "", [*_verdict(result), *shown]))
        else:
            sections.append(Section("Key slices", shown))
    odd = [*prediction.problems, *problems]
    listed = [(problem.kind, problem.file or "the scan", problem.detail, problem.action) for problem in odd[:LISTED]]
    blocks = [html.table(("kind", "file", "what was found", "what was done"), listed, words=True)]
    if len(odd) > LISTED:
        blocks.append(html.paragraph(f"{len(odd) - LISTED} more are in prediction.json.", note=True))
    sections += [
        Section("Problems", blocks if odd else [html.paragraph("None.")]),
        Section("Scan", [_scan(prediction, anonymize)]),
        Section("Model", [*map(html.paragraph, model_cautions(bundle)), *_models(bundle)]),
    ]
    results = _verdict(prediction)
    if prediction.further:
        lines = []
        for each in prediction.each:
            threshold = "none" if each.threshold is None else rounded(each.threshold)
            lines.append((str(each.finding), rounded(each.probability), threshold, SIDES[each.is_positive]))
        results = [html.table(("finding", "probability", "threshold", "result"), lines)]
    where = f"Body part: {prediction.body_part}; modality: {prediction.row.modality or 'not stated'}."
    first, last = html.caution(READ_FIRST, prediction.cautions), html.paragraph(html.CAUTION, note=True)
    lead = [first, *results, html.paragraph(where), last]
    return html.page(f"Scan {prediction.row.scan_id}", lead, sections)


def _result(prediction: ScanPrediction) -> str:
    """The probability, and the side of the threshold that it is on."""
    result = f"probability {rounded(prediction.probability)}"
    if prediction.threshold is None:
        return result
    side = "positive: at or above" if prediction.is_positive else "negative: below"
    return f"{result}, {side} the threshold {rounded(prediction.threshold)}"


def _verdict(prediction: ScanPrediction) -> list[str]:
    """The result of one finding: what came out, what was looked for, and which model says so."""
    none = "; no threshold was chosen" if prediction.threshold is None else ""
    said = [f"{_result(prediction).capitalize()}{none}.", f"Looked for: {prediction.sought}."]
    if prediction.model is not None:
        said.append(f"By {prediction.model}.")
    if prediction.attention.max().item() <= 1.01 / len(prediction.row):  # no peak: key slices are chosen by rule only
        said.append("All slices have the same attention: the key slices below say nothing.")
    return list(map(html.paragraph, said))


def _key_slices(prediction: ScanPrediction) -> list[str]:
    """The table of key slices, and a sentence about the interval."""
    row, numbers = prediction.row, prediction.instance_numbers
    lines = []
    for position in prediction.key_positions:
        name = f"{prediction.key_slice_name(position)} of {len(prediction.key_positions)}"
        number = "none" if numbers[position] is None else str(numbers[position])
        where = f"{row.positions[position]:.1f}" if row.slice_spacing is not None else "unknown"
        lines.append((name, str(position + 1), number, where, f"{100 * prediction.attention[position].item():.2f} %"))
    order = "by their position, from the feet to the head in axial scans; image numbers are DICOM's InstanceNumber"
    interval = (
        f"{prediction.interval_sentence} Slices are counted from 1 "
        f"{order if prediction.has_images else 'in the order of their features'}."
    )
    columns = ("by attention", "slice", "image number", "mm", "attention")
    return [html.paragraph(prediction.key_slices_sentence), html.table(columns, lines), html.paragraph(interval)]


def _scan(prediction: ScanPrediction, anonymize: bool) -> str:
    row = prediction.row
    facts = {
        "patient": None if anonymize else row.patient_id,
        "folder": None if anonymize else str(prediction.root),
        "first file": None if anonymize else row.files[0],
        "modality": row.modality,
        "body part": prediction.body_part,
        "slices": str(len(row)),
        "slice spacing": "unknown" if row.slice_spacing is None else f"{row.slice_spacing:g} mm",
        "pixels": f"{row.rows} x {row.columns}" if prediction.has_images else "none, features only",
    }
    return _facts(facts)


def _models(bundle: Bundle) -> list[str]:
    """The facts about the model, of several findings each behind a line to click on."""
    if not bundle.further:
        return _model(bundle)
    return [html.details(str(model.finding), "".join(_model(model))) for model in bundle.each]


def model_cautions(bundle: Bundle) -> list[str]:
    """What the models were not shown to do: it is of no scan in particular."""
    return list(dict.fromkeys(text for model in bundle.each for text in model.cautions))


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
    return [_facts(facts), *(html.paragraph(line, note=True) for line in describe(bundle.operation))]


def _facts(facts: Mapping[str, str | None]) -> str:
    return html.bullets(f"{name}: {value}" for name, value in facts.items() if value)


Seen = tuple[ScanPrediction, Path | None]  # with the folder of its pictures
PICTURED = 500  # the index has small pictures of so many scans, the most probable ones; of each a few kB
SMALL = 72  # their height in pixels
LEGEND = "Line: attention along the slices; dots: key slices; shaded: the interval of the model below."


def index_page(lines: Sequence[Line], bundle: Bundle, others: Sequence[Problem], seen: Sequence[Seen] = ()) -> str:
    """Make index.html; `lines` are those of `summary_lines`, and keep their order: a scan's findings in one row."""
    looks = {}
    for place, (one, folder) in enumerate(seen):  # the key slices, from the file of `draw_strip`, and the curve
        small = sorted(folder.glob("strip*.jpg"))[:1] if folder and place < PICTURED else []
        curve = html.curve(one.attention.tolist(), one.interval, one.key_slices)
        looks[one.row.scan_id] = "".join([*(html.picture(file, "key slices") for file in small), curve])
    good = [line for line in lines if line["state"] == STATES[0]]
    names = [model.finding.name for model in bundle.each if model.finding] if bundle.further else []
    step = max(1, len(names))
    rows = []
    for start in range(0, len(good), step):
        findings, line = good[start : start + step], good[start]
        flag = f"<div class=flag>⚠ {escape(line['cautions'])}</div>" if line["cautions"] else ""
        results = [(escape(rounded(finding["probability"])), SIDES[finding["positive"]]) for finding in findings]
        cells = [*results[0], escape(line["key_slices"]), escape(line["key_instance_numbers"] or "none")]
        if names:  # each finding in one cell; positive ones stand out
            texts = zip(map(" ".join, results), findings, strict=True)
            cells = [f"<b>{text}</b>" if finding["positive"] else text for text, finding in texts]
        link = html.scan_link(line["scan_id"], page=f"{quote(folder_name(line['scan_id']))}/report.html") + flag
        rows.append((link, *cells, str(line["slices"]), str(line["problems"]), looks.get(line["scan_id"], "")))
    own = ("probability", "result", "key slices", "image numbers")
    header = ("scan", *(map(escape, names) if names else own), "slices", "problems", "key slices and attention")
    reasons = [(line["scan_id"], line["state"], str(line["reason"])) for line in lines if line["state"] != STATES[0]]
    counts = ", ".join(f"{kind} {count}" for kind, count in summarize(others).items())
    noted = [html.paragraph(f"Files that belong to no scan: {counts}; see problems.csv.", note=True)] if others else []
    title = "Scans by probability" + (f" of {names[0]}" if names else "")
    sections = [
        Section(title, [html.raw_table(header, rows, cards=True), html.paragraph(LEGEND, note=True)] if rows else []),
        Section("Not predicted", [html.table(("scan", "state", "why"), reasons, words=True)] if reasons else []),
        Section("Model", [*_models(bundle), *noted]),
    ]
    positive = [line for line in good if line["positive"] == 1]
    of_each = [f"{name} {sum(line['finding'] == name for line in positive)}" for name in names]
    lead = f"{count_sentence(lines)}. Positive: {', '.join(of_each) or len(positive)}."
    first = [html.paragraph(lead), html.caution("Caution: this is so of every scan", model_cautions(bundle))]
    return html.page("Predictions", [*first, html.paragraph(html.CAUTION, note=True)], sections)


CURVE_HEIGHT = 2.1  # height of the attention curve in inches
NARROWEST = 3  # a strip has room for at least so many pictures: a single one as wide as the page would be too large
LINE, CAUTION_LINE = 0.16, 0.22  # height of a line of the heading, and of the cautions, in inches
LINE_LETTERS, CAUTION_LETTERS = 130, 92  # letters of such a line
HEADS_SHOWN = 8  # with more heads, their curves are not drawn: they could not be told apart


def draw_strip(
    prediction: ScanPrediction, window: Window | None, path: Path, *, repair: bool = True, field: float | None = None
) -> Path:
    """Write strip.png: the key slices from the feet to the head, and beneath them the attention along the scan.

    Beside it, strip.jpg has the key slices alone, small.  A scan that is given by its features has the attention only.
    """
    # `window` has the values from black to white (None: from the darkest to the brightest); `field` is the mm of each
    # slice's middle that the encoder saw, of which percentiles are (None: the whole slice).
    if not prediction.has_images:
        return save(plot_strip(prediction, []), path)
    places = sorted(prediction.key_positions)
    images = read_windowed(prediction.row, prediction.root, places, window, field, repair=repair)
    low, high = float(images.min()), float(images.max())
    grey = (255 * (np.hstack(list(images)) - low) / max(high - low, 1.0)).astype(np.uint8)
    small = Image.fromarray(grey).resize((max(1, round(SMALL * grey.shape[1] / grey.shape[0])), SMALL))
    write_atomically(path.with_suffix(".jpg"), lambda file: small.save(file, "JPEG", quality=80))
    return save(plot_strip(prediction, list(zip(places, images, strict=True)), field), path)


# The picture names neither patient nor scan, because anonymous results have it, too.


Pictures = Sequence[tuple[int, Float[np.ndarray, "_ _"]]]  # positions, and the pixels of their slices


@styled
def plot_strip(prediction: ScanPrediction, images: Pictures, field: float | None = None) -> Figure:
    """Draw the figure of `draw_strip`; `images` are positions with the pictures of their slices, or empty."""
    pictures = [WIDTH / max(NARROWEST, len(images)) + 0.9] if images else []
    # Above the pictures: the result, what was looked for and where, and which model did it.
    named = "" if prediction.finding is None else f"{prediction.finding.name}   |   "
    model = method_title(prediction.method) if prediction.model is None else str(prediction.model)
    lines = [
        f"{named}{_result(prediction)}   |   research only, not for diagnosis",
        f"Looked for: {prediction.sought}. Body part: {prediction.body_part}.",
        f"{model[:1].upper()}{model[1:]}.",
        *prediction.model_cautions,
    ]
    heading = [part for line in lines for part in wrap(line, LINE_LETTERS)]
    heights = [*pictures, CURVE_HEIGHT]
    cautions = [line for text in prediction.cautions for line in wrap(f"Caution: {text}", CAUTION_LETTERS)]
    if cautions:
        heights = [CAUTION_LINE * len(cautions) + 0.2, *heights]
    figure = Figure(figsize=(WIDTH, sum(heights) + LINE * len(heading) + 0.3), layout="constrained")
    figure.suptitle("\n".join(heading), fontsize=9)
    *others, bottom = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if images:
        _draw_key_slices(others.pop(), prediction, images, field)
    for panel in others:  # what a reader must know first, also who sees only the picture
        panel.set_facecolor("#FFE9D6")
        text = panel.text(0.5, 0.5, "\n".join(cautions), ha="center", va="center", fontsize=10)
        text.set(fontweight="bold", color="#8A2A00")
    _draw_curve(bottom.subplots(), prediction)
    return figure


def _draw_key_slices(top: SubFigure, prediction: ScanPrediction, images: Pictures, field: float | None) -> None:
    top.suptitle(prediction.key_slices_sentence, fontsize=9, fontweight="bold")
    across = max(NARROWEST, len(images))
    panels = np.atleast_1d(top.subplots(1, across))
    darkest = min(float(image.min()) for _, image in images)
    brightest = max(float(image.max()) for _, image in images)
    for panel in panels:
        panel.set_axis_off()
    margin = (across - len(images)) // 2
    for panel, (position, image) in zip(panels[margin:], images, strict=False):
        panel.imshow(image, cmap="gray", vmin=darkest, vmax=max(brightest, darkest + 1))
        share = f"{100 * prediction.attention[position].item():.3g} % of attention"
        names = (prediction.key_slice_name(position), f"slice {prediction.row.slice_name(position)}", share)
        panel.set_title("\n".join(names), fontsize=8)
        if field is not None:
            down, over = middle(image.shape[0], image.shape[1], prediction.row.pixel_spacing, field)
            size = over.stop - over.start, down.stop - down.start
            seen = Rectangle((over.start - 0.5, down.start - 0.5), *size, fill=False, ls="--", lw=1.2, color=ORANGE)
            panel.add_patch(seen)
        _draw_letters(panel, prediction.row.orientation)


def _draw_letters(panel: Axes, orientation: Sequence[float] | None) -> None:
    """Write the sides of the patient at the edges of a picture; nothing where they are unknown."""
    edges = orientation_letters(orientation)
    if edges is None:
        return
    sides = ((0.03, 0.5, "left", "center"), (0.97, 0.5, "right", "center"))
    ends = ((0.5, 0.97, "center", "top"), (0.5, 0.03, "center", "bottom"))
    for letters, (x, y, across, along) in zip(edges, sides + ends, strict=True):
        text = panel.text(x, y, letters, ha=across, va=along, transform=panel.transAxes, color="white", fontsize=8)
        text.set(fontweight="bold", path_effects=[withStroke(linewidth=2, foreground="black")])


def _draw_curve(panel: Axes, prediction: ScanPrediction) -> None:
    attention, heads = prediction.attention, prediction.head_attention
    slices = np.arange(1, len(attention) + 1)
    bell = normal_reference(heads).mean(0)  # what guidance compares attention with
    if prediction.interval is not None:
        first, last = prediction.interval
        panel.axvspan(first - 0.5, last + 0.5, color=ORANGE, alpha=0.2, lw=0, label="interval")
    panel.set_title(prediction.interval_sentence, fontsize=8)
    if 1 < len(heads) <= HEADS_SHOWN:
        for number, head in enumerate(heads):
            panel.plot(slices, head, color="0.7", lw=0.8, label=None if number else f"each of {len(heads)} heads")
    marker = "o" if len(slices) < 60 else ""
    panel.plot(slices, attention, color=GREEN, lw=1.8, marker=marker, ms=2.5, label="attention")
    panel.plot(slices, bell, color="0.2", ls="--", lw=1, label="normal with its mean and variance")
    top = 1.15 * max(float(heads.max() if len(heads) <= HEADS_SHOWN else attention.max()), float(bell.max()))
    keys = prediction.key_slices
    panel.plot(keys, [top * 0.97] * len(keys), ls="", marker="v", ms=5, color="0.2", label="key slices", clip_on=False)
    located = prediction.row.slice_spacing is not None and plane_of(prediction.row.orientation) == "axial"
    panel.set(xlim=(0.5, len(slices) + 0.5), ylim=(0, top), ylabel="attention")
    # The default number of ticks depends on the size of the panel, which depends on the ticks.
    panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    label_slices(panel, "slice, from the feet to the head" if located else "slice")
    entries = len(panel.get_legend_handles_labels()[1])
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=entries if entries < 5 else 3)
