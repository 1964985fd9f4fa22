"""The paths of a scan's files and the label tables: Kaggle's three layouts, and folders with one table.

The tables have all columns of Kaggle's tables, in their order.  A layout does not use pixels.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from normal_guidance.simulate.phantom.drafts import Draft, Image
from normal_guidance.simulate.phantom.plan import ORGANS, ScanPlan, stream

Row = Sequence[Any]

ICH_TYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")
"""Rows of a slice in stage_2_train.csv, in its order."""

PE_COLUMNS = (
    "StudyInstanceUID",
    "SeriesInstanceUID",
    "SOPInstanceUID",
    "pe_present_on_image",
    "negative_exam_for_pe",
    "qa_motion",
    "qa_contrast",
    "flow_artifact",
    "rv_lv_ratio_gte_1",
    "rv_lv_ratio_lt_1",
    "leftsided_pe",
    "chronic_pe",
    "true_filling_defect_not_pe",
    "rightsided_pe",
    "acute_and_chronic_pe",
    "central_pe",
    "indeterminate",
)
"""Columns of train.csv."""

AT_PATIENT_COLUMNS = (
    "patient_id",
    "bowel_healthy",
    "bowel_injury",
    "extravasation_healthy",
    "extravasation_injury",
    *(f"{organ}_{grade}" for organ in ("kidney", "liver", "spleen") for grade in ("healthy", "low", "high")),
    "any_injury",
)
"""Columns of train_2024.csv."""


@dataclass(frozen=True)
class FolderLayout:
    """The arrangement of a dataset."""

    anatomy: str | None
    """The body part; None: any."""
    ids: Callable[[ScanPlan], tuple[str, str]]
    """scan_id and patient_id; an empty scan_id stands for the SeriesInstanceUID."""
    place: Callable[[Draft, Image], str]
    """Path of a file."""
    tables: Callable[[Sequence[Draft], int], Mapping[str, str]]
    """Label tables by path, as text; the number is the seed."""


def _csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _labelled(draft: Draft) -> list[Image]:
    """The images with rows in a label table; one of them may have no file."""
    images = draft.files
    if draft.flags.get("rows_without_image"):
        ghost = Image(draft.new_uid("ghost"), draft.next_instance, images[0].hu, 0, frozenset(), None)
        images = [*images, ghost]
    return images


def _doubled(draft: Draft, rows: list[Row], count: int = 1) -> list[Row]:
    """The rows; the last `count` of them occur twice if the scan has the oddity of double rows."""
    return rows + rows[-count:] if draft.flags.get("double_rows") else rows


def _number(plan: ScanPlan, name: str, owner: int, low: int = 10_000, high: int = 66_000) -> int:
    """A number in Kaggle's style: unique for every owner, in an order that reveals nothing."""
    turn, place = divmod(owner, high - low)
    return low + turn * (high - low) + _order(plan.seed, name, high - low)[place]


@lru_cache(maxsize=4)
def _order(seed: int, name: str, count: int) -> list[int]:
    return [int(number) for number in stream(seed, name).permutation(count)]


def _ich_ids(plan: ScanPlan) -> tuple[str, str]:
    return "", f"ID_{plan.patient_stream('patient id').bytes(4).hex()}"


def _ich_name(image: Image) -> str:
    return f"ID_{image.key[-9:]}"


def _ich_place(draft: Draft, image: Image) -> str:
    return f"stage_2_train/{_ich_name(image)}.dcm"


def _ich_tables(drafts: Sequence[Draft], seed: int) -> dict[str, str]:
    images: list[list[Row]] = []
    for draft in drafts:
        of_scan: list[Row] = [(draft, image) for image in _labelled(draft)]
        for _, image in _doubled(draft, of_scan):
            shown = {*image.kinds, "any"} if image.label else set()
            images.append([(f"{_ich_name(image)}_{kind}", int(kind in shown)) for kind in ICH_TYPES])
    order = stream(seed, "rows").permutation(len(images)).tolist()
    return {"stage_2_train.csv": _csv(("ID", "Label"), (row for number in order for row in images[number]))}


def _pe_key(plan: ScanPlan, name: str) -> str:
    return plan.stream(name).bytes(6).hex()


def _pe_ids(plan: ScanPlan) -> tuple[str, str]:
    return _pe_key(plan, "series key"), ""


def _pe_place(draft: Draft, image: Image) -> str:
    return f"train/{_pe_key(draft.plan, 'study key')}/{draft.scan_id}/{image.key}.dcm"


def _pe_exam(draft: Draft) -> dict[str, int]:
    """The labels of the whole exam, which repeat in all rows."""
    random = draft.plan.stream("exam")
    chances = ("qa_motion", "qa_contrast", "flow_artifact", "true_filling_defect_not_pe", "chronic_pe", "wide")
    drawn = dict(zip(chances, (random.random(6) < (0.02, 0.02, 0.3, 0.02, 0.15, 0.45)).tolist(), strict=True))
    positive, kinds = bool(draft.label), frozenset[str]().union(*(image.kinds for image in draft.images))
    indeterminate = bool(draft.flags.get("indeterminate"))
    exam = {
        "negative_exam_for_pe": not positive and not indeterminate,
        "qa_motion": drawn["qa_motion"],
        "qa_contrast": drawn["qa_contrast"],
        "flow_artifact": drawn["flow_artifact"],
        "rv_lv_ratio_gte_1": positive and drawn["wide"],
        "rv_lv_ratio_lt_1": positive and not drawn["wide"],
        "leftsided_pe": "left" in kinds,
        "chronic_pe": positive and drawn["chronic_pe"],
        "true_filling_defect_not_pe": drawn["true_filling_defect_not_pe"],
        "rightsided_pe": "right" in kinds,
        "acute_and_chronic_pe": False,
        "central_pe": "central" in kinds,
        "indeterminate": indeterminate,
    }
    return {name: int(value) for name, value in exam.items()}


def _pe_tables(drafts: Sequence[Draft], seed: int) -> dict[str, str]:
    rows: list[Row] = []
    for draft in drafts:
        study, exam = _pe_key(draft.plan, "study key"), tuple(_pe_exam(draft).values())
        of_scan = [(study, draft.scan_id, image.key, image.label, *exam) for image in _labelled(draft)]
        rows += _doubled(draft, [*of_scan])
    return {"train.csv": _csv(PE_COLUMNS, rows)}


def _at_series(plan: ScanPlan) -> int:
    return _number(plan, "series numbers", plan.number)


def _at_ids(plan: ScanPlan) -> tuple[str, str]:
    patient = str(_number(plan, "patient numbers", plan.patient))
    return f"{patient}_{_at_series(plan)}", patient


def _at_place(draft: Draft, image: Image) -> str:
    return f"train_images/{draft.patient_id}/{_at_series(draft.plan)}/{image.instance}.dcm"


def _at_tables(drafts: Sequence[Draft], seed: int) -> dict[str, str]:
    images: list[Row] = []
    series: list[Row] = []
    patients: dict[str, list[Draft]] = {}
    for draft in drafts:
        patients.setdefault(draft.patient_id, []).append(draft)
        number, patient = _at_series(draft.plan), draft.patient_id
        injured = [(image, kind) for image in draft.files for kind in sorted(image.kinds) if image.label]
        rows: list[Row] = [(patient, number, image.instance, kind) for image, kind in injured]
        if draft.flags.get("rows_without_image"):
            rows.append((patient, number, draft.next_instance, injured[0][1]))
        images += _doubled(draft, rows)
        aorta = round(float(draft.plan.stream("aorta").uniform(90, 330)), 1)
        series.append((patient, number, aorta, draft.flags.get("incomplete_organ", 0)))
    return {
        "image_level_labels_2024.csv": _csv(("patient_id", "series_id", "instance_number", "injury_name"), images),
        "train_series_meta.csv": _csv(("patient_id", "series_id", "aortic_hu", "incomplete_organ"), series),
        "train_2024.csv": _csv(AT_PATIENT_COLUMNS, (_at_patient(name, scans) for name, scans in patients.items())),
    }


def _at_patient(name: str, scans: Sequence[Draft]) -> list[Any]:
    kinds = {kind for draft in scans for image in draft.images for kind in image.kinds}
    injuries = scans[0].plan.injuries
    bowel, leak = int("Bowel" in kinds), int("Active_Extravasation" in kinds)
    row: list[Any] = [name, 1 - bowel, bowel, 1 - leak, leak]
    for organ in ("kidney", "liver", "spleen"):
        row += [int(injuries.get(organ, "healthy") == grade) for grade in ("healthy", "low", "high")]
    return [*row, int(bool(bowel or leak or injuries.keys() & ORGANS.keys()))]


def _folder_ids(plan: ScanPlan) -> tuple[str, str]:
    """The ids contain the seed: scans of another seed belong to other patients."""
    of_seed = f"{plan.seed}-" if plan.seed else ""
    return f"scan-{of_seed}{plan.number:04d}", f"PHANTOM-{of_seed}{plan.patient:04d}"


def _folder_place(draft: Draft, image: Image) -> str:
    return f"scans/{draft.scan_id}/{image.instance:04d}.dcm"


def _folder_tables(drafts: Sequence[Draft], seed: int) -> dict[str, str]:
    rows = [
        (
            draft.scan_id,
            draft.patient_id,
            f"scans/{draft.scan_id}",
            draft.label,
            " ".join(str(image.label) for image in draft.images),
        )
        for draft in drafts
    ]
    return {"labels.csv": _csv(("scan_id", "patient_id", "path", "label", "slice_labels"), rows)}


LAYOUTS: Mapping[str, FolderLayout] = {
    "rsna-ich": FolderLayout("head", _ich_ids, _ich_place, _ich_tables),
    "rsna-pe": FolderLayout("chest", _pe_ids, _pe_place, _pe_tables),
    "rsna-at": FolderLayout("abdomen", _at_ids, _at_place, _at_tables),
    "folder": FolderLayout(None, _folder_ids, _folder_place, _folder_tables),
}
"""Layouts by name."""
