"""What folders hold for the page: predictions, what `nguide predict` says of a scan, curves, and windows.

DIR/METHOD/SEED/predictions.parquet                a study (`nguide experiment`), or runs of `nguide sweep`
DIR/predictions.parquet                            one run, or a model (`nguide fit`)
DIR/predictions.parquet and DIR/manifest.parquet   new scans (`nguide predict`)
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.base.errors import ContentError, UserError, shorten
from normal_guidance.base.files import read_json, read_json_as
from normal_guidance.base.records import read_as
from normal_guidance.clinic.predict.job import PREDICTION, SUMMARY
from normal_guidance.core.guidance import normal_reference
from normal_guidance.core.methods import (
    CEILING,
    COMPARED,
    REFERENCE_TITLES,
    SCAN_REFERENCE,
    SLICE_REFERENCE,
    method_title,
)
from normal_guidance.scans.features.windows import WINDOWS, Percentiles, Range, Window
from normal_guidance.scans.index.manifest import refuse_several
from normal_guidance.scans.index.problems import DOUBTFUL, HARMLESS, KINDS, Caution, Problem, cautions, folder_name
from normal_guidance.statistics import localization as by_attention
from normal_guidance.sweep.predictions import read_predictions
from normal_guidance.sweep.run import NOT_OURS, PREDICTION_TABLE, REPORT, find_folders

BUNDLE, SLICES = "bundle.json", "slices.csv"
PAGES = {"report.html": ("Report", BUNDLE), "index.html": ("Predictions", SUMMARY)}
"""What is shown first, its name, and the file beside it: the report of a model, or the index of new scans."""

AGAIN = "delete the folder and predict again"

BRIEF = ("part", "scan_id", "patient_id", "label", "probability", "slices")  # for the list of scans


@dataclass(frozen=True)
class PredictSummary:
    """What is read here of the summary.json of `nguide predict`."""

    anonymous: bool = False
    model: Any = None
    scans: list[dict[str, Any]] = field(default_factory=list)


def read_summary(folder: Path) -> PredictSummary | None:
    """The summary of new scans; None where `nguide predict` did not make the folder."""
    path = folder / SUMMARY
    return read_json_as(path, PredictSummary, exact=False) if path.is_file() else None


@dataclass(frozen=True)
class PredictionFolder:
    """One method's predictions for the scans of one split."""

    name: str
    title: str
    path: Path
    group: str = ""
    scores: Path | None = None  # where the probabilities are, if not in `path`: the supervised reference has two runs


@dataclass(frozen=True)
class SplitPredictions:
    """Methods that were tested on the same scans; the name is the seed, or empty where there is only one split."""

    name: str
    sources: tuple[PredictionFolder, ...]


def find_splits(folder: Path) -> list[SplitPredictions]:
    """Find every split of a folder, its methods in the order of the paper's tables."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give what nguide fit, predict, sweep or experiment wrote")
    if (folder / PREDICTION_TABLE).is_file():
        return [SplitPredictions("", tuple(_sources_of_run(folder, _method_of(folder))))]
    refuse_several(folder)
    by_seed: dict[int, dict[str, Path]] = {}
    for method, seed, run in find_folders(folder):
        if (run / PREDICTION_TABLE).is_file():
            by_seed.setdefault(seed, {})[method] = run
    if not by_seed:
        raise UserError(
            f"{folder} holds neither {PREDICTION_TABLE} nor METHOD/SEED/{PREDICTION_TABLE}; give what nguide fit, "
            "predict, sweep or experiment wrote, once it has ended"
        )
    splits = [SplitPredictions(str(seed), tuple(_sources_of_seed(runs))) for seed, runs in sorted(by_seed.items())]
    return [split for split in splits if split.sources]


def _sources_of_seed(runs: Mapping[str, Path]) -> Iterator[PredictionFolder]:
    """The folders of one seed by method; the two supervised references become one."""
    for method, run in runs.items():
        if method == SLICE_REFERENCE and SCAN_REFERENCE in runs:
            scores = runs[SCAN_REFERENCE] / PREDICTION_TABLE
            yield PredictionFolder(CEILING, method_title(CEILING), run / PREDICTION_TABLE, scores=scores)
        elif method != SCAN_REFERENCE:  # it sees a scan as a whole, so there is no curve
            yield from _sources_of_run(run, method)


def _sources_of_run(run: Path, method: str) -> Iterator[PredictionFolder]:
    """The predictions of a run, one entry for each winner."""
    path = run / PREDICTION_TABLE
    groups = pc.unique(read_predictions(path, ("group",))["group"]).to_pylist()
    title = method_title(method) if method in (*COMPARED, *REFERENCE_TITLES, CEILING) else method
    is_new = (run / SUMMARY).is_file()
    for group in groups:
        if group and is_new:  # a finding: the method is the same for all
            yield PredictionFolder(group, group, path, group)
        elif group:
            yield PredictionFolder(f"{method} {group}", f"{title}, {group}", path, group)
        else:
            yield PredictionFolder(method, title, path)


def _method_of(folder: Path) -> str:
    """The method by a run's report, the summary of new scans or a model; 'model' where none names it."""
    about: Any = None
    if (folder / REPORT).is_file():
        winners = read_json(folder / REPORT).get("winners")
        about = winners[0] if isinstance(winners, list) and winners else None
    elif summary := read_summary(folder):
        about = summary.model
    elif (folder / BUNDLE).is_file():
        about = read_json(folder / BUNDLE)
    model = about if isinstance(about, dict) else {}
    config = model.get("config")
    method = model.get("method", config.get("method") if isinstance(config, dict) else None)
    return method if isinstance(method, str) else "model"


NOTE = "note"  # the flag of what changes nothing

NO_RESULT = Caution(DOUBTFUL, f"The scan has no {PREDICTION}: what was odd about it is not known.")
"""The caution of a scan whose folder was deleted or renamed after it was predicted."""


Called = dict[str, Any]
"""The result for one finding as the page reads it: key positions in the order of prediction.json, the interval's first
and last position and what it does in words, the threshold and the call."""


@dataclass(frozen=True)
class ScanResult:
    """The result for a scan: that for its first finding, and those for all by their names, where they have names."""

    first: Called
    findings: dict[str, Called]
    problems: tuple[Problem, ...]
    description: str  # SeriesDescription; empty where it is unknown
    of_model: tuple[str, ...] = ()  # cautions about the model

    def of(self, finding: str) -> Called:
        """The result for a finding; without a name, that for the only one."""
        return self.findings.get(finding, self.first)


def read_result(folder: Path, scan_id: str) -> ScanResult | None:
    """Read the result for a scan; None where `nguide predict` did not write the folder."""
    path = folder / folder_name(scan_id) / PREDICTION
    if not path.is_file():
        return None
    about = read_json(path, AGAIN)
    try:
        problems = read_as(tuple[Problem, ...], about.get("problems", []), "problems")
        unknown = next((problem.kind for problem in problems if problem.kind not in KINDS), None)
        if unknown is not None:
            raise ContentError(f"problems has the kind {shorten(unknown)!r}")
        return ScanResult(
            first=_called(about),
            findings={read_as(str, part["name"], "name"): _called(part) for part in about.get("findings", [])},
            problems=problems,
            description=str(about.get("source", {}).get("series_description") or ""),
            of_model=read_as(tuple[str, ...], about.get("model_cautions", []), "model_cautions"),
        )
    except (*NOT_OURS, ContentError) as error:
        raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error


def _called(about: Any) -> Called:
    """The result for a finding from a part of prediction.json, which counts slices from 1."""
    at = about.get("interval")
    ends = at and {f"{end}_position": read_as(int, at[f"{end}_slice"], f"{end}_slice") - 1 for end in ("first", "last")}
    return {
        "key_positions": [read_as(int, key["slice"], "key_slices") - 1 for key in about["key_slices"]],
        "interval": at and {**ends, "meaning": read_as(str, at["meaning"], "meaning")},
        "threshold": read_as(float | None, about.get("threshold"), "threshold"),
        "positive": read_as(bool | None, about.get("positive"), "positive"),
    }


def within(called: Called, slices: int) -> Called:
    """The result without slices that the scan does not have."""
    keys, at = [position for position in called["key_positions"] if 0 <= position < slices], called["interval"]
    is_inside = at and 0 <= at["first_position"] <= at["last_position"] < slices
    return {**called, "key_positions": keys, "interval": at if is_inside else None}


def read_instance_numbers(folder: Path, scan_id: str) -> list[int | None] | None:
    """The InstanceNumber of every slice; None where no slice has one, as in NIfTI."""
    path = folder / folder_name(scan_id) / SLICES
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        words = [line.get("instance_number") or "" for line in csv.DictReader(file)]
    numbers = [int(word) if word.lstrip("-").isdigit() else None for word in words]
    return numbers if any(number is not None for number in numbers) else None


def warnings(problems: Sequence[Problem], of_model: Sequence[str] = ()) -> list[Caution]:
    """A scan's cautions, the gravest first, then notes: on the model, and what was odd and changes nothing."""
    harmless = (problem for problem in problems if problem.kind in HARMLESS)
    texts = [*of_model, *(f"Note: {problem.detail} ({problem.action})." for problem in harmless)]
    return [*cautions(problems), *(Caution(NOTE, text) for text in dict.fromkeys(texts))]


FLAT = 0.01  # attention is flat if its slices differ by less than this share of the highest
DIGITS = 7  # significant digits of a float32; the page receives no more


def curve(
    attention: Float[Tensor, "slices"],
    heads: Float[Tensor, "heads slices"],
    probability: float | None,
    spacing: float | None = None,
) -> dict[str, Any]:
    """Describe one method's attention (or the slice reference's probabilities); `heads` are logarithms."""
    return {
        "probability": number(probability),
        "attention": numbers(attention),
        "normal": numbers(fitted_normal(attention)),
        # One head is the curve itself.
        "heads": [numbers(head) for head in heads.exp()] if len(heads) > 1 else [],
        "key_positions": key_positions(attention, spacing),
    }


def fitted_normal(attention: Float[Tensor, "slices"]) -> Float[Tensor, "slices"]:
    """The normal with the curve's own mean and variance (eqs. 2 and 3), scaled to the curve's sum."""
    total = attention.sum()
    if not total > 0:
        return torch.zeros_like(attention)
    return normal_reference((attention / total)[None])[0] * total


def key_positions(attention: Float[Tensor, "slices"], spacing: float | None = None) -> list[int]:
    """Choose key slices as `nguide predict` does; none where all slices are about equal, as in mean pooling."""
    if attention.max() - attention.min() <= FLAT * attention.max():
        return []
    return list(by_attention.key_positions(attention, spacing=spacing))


def number(value: float | None) -> float | None:
    """Round a number for JSON, which has no NaN."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def numbers(values: Tensor | Sequence[float]) -> list[float | None]:
    return [number(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


# Windows that radiologists use: width and level of the table "windowing (CT)" of Radiopaedia.  Those of encoders are
# wider: -100 to 300 HU keeps bone and blood apart for an encoder, but grey and white matter look the same in it.

CT: dict[str, tuple[str, int, int]] = {
    "brain": ("Brain", 80, 40),
    "subdural": ("Subdural", 200, 80),  # 130 to 300 and 50 to 100 are in use
    "stroke": ("Stroke", 40, 40),  # 8 and 32, the other one in use, leaves little but noise on thin slices
    "bone": ("Bone", 1800, 400),
    "lung": ("Lung", 1500, -600),
    "mediastinum": ("Mediastinum", 400, 40),
    "soft": ("Soft tissue", 400, 50),
}
"""Windows for CT by name: title, width and level in HU."""

FIRST = {"head": "brain", "chest": "mediastinum", "abdomen": "soft"}  # the window that is shown first
BODY_OF_SOURCE = {"rsna-ich": "head", "rsna-pe": "chest", "rsna-at": "abdomen"}
BODY_OF_WINDOW = {"head": "head", "lung": "chest", "mediastinum": "chest", "abdomen": "abdomen"}
"""Part of the body by the dataset, and by the encoder's window: manifests do not record it."""

WHOLE_SCALE = (-1024.0, 3071.0)  # the HU of twelve bits: the window for slices of CT that the encoder saw without one
OWN = (None, None)  # each slice's own, from the 1st to the 99th percentile, which the page measures


def body_of(sources: Sequence[str | None], encoder_windows: Sequence[Window | None]) -> str | None:
    """The part of the body, by the names of datasets or else by the encoder's first window; None if unknown."""
    known = [BODY_OF_SOURCE[source] for source in sources if source in BODY_OF_SOURCE]
    named = [BODY_OF_WINDOW[name] for name in BODY_OF_WINDOW if encoder_windows and encoder_windows[0] == WINDOWS[name]]
    return next(iter(known + named), None)


def display_windows(
    modality: str, body: str | None = None, encoder_windows: Sequence[Window | None] = ()
) -> list[dict[str, Any]]:
    """The windows for scans of a modality, as the page reads them; it starts with the one that is `first`."""
    # CT of an unknown part of the body starts with the model's window, or else with soft tissue.
    whole: Range | tuple[None, None] = WHOLE_SCALE if modality == "CT" else OWN
    shown: list[tuple[str, str, Range | tuple[None, None], str]]
    if modality == "CT":
        first, unit = FIRST.get(body or "", "encoder" if encoder_windows else "soft"), "HU"
        shown = [
            (name, title, (level - width / 2, level + width / 2), "") for name, (title, width, level) in CT.items()
        ]
    else:
        first, unit, adc = "own", "", WINDOWS["adc"]
        shown = [("own", "Auto", OWN, "each slice's 1st to 99th percentile")]
        shown += [("adc", "ADC", adc, "")] if isinstance(adc, tuple) else []
    for number, window in enumerate(encoder_windows, start=1):
        suffix = f" {number}" if len(encoder_windows) > 1 else ""
        seen, note = whole, "the model saw all values"
        if isinstance(window, Percentiles):
            saw = f"the scan's percentiles {window.low:g} to {window.high:g}"
            seen, note = OWN, f"the model saw {saw}; this is each slice's 1st to 99th"
        elif window is not None:
            seen, note = window, "what the model saw"
        shown.append((f"encoder{suffix}", f"Model{suffix}", seen, note))
    start = next(name for name, *_ in shown if name == first or name.startswith(f"{first} "))
    return [
        {"name": name, "title": title, "low": low, "high": high, "unit": unit, "note": note, "first": name == start}
        for name, title, (low, high), note in shown
    ]
