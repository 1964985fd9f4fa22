"""Draws a whole phantom dataset and writes it as real DICOM, with label tables and phantom.json, the truth about it.

Slices are CT Image Storage and, for the oddities, secondary captures and multi-frame CT.
Reference: DICOM PS3.3, A.3 (CT Image IOD), A.8.1 (Secondary Capture), A.70 (Legacy Converted Enhanced CT).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from normal_guidance import __version__
from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.base.files import folder_atomically, read_json, write_atomically, write_json
from normal_guidance.base.system import importing
from normal_guidance.scans.phantom.drafts import ODDITIES, TILT, Draft, Image, assign_oddities, checksum, make_draft
from normal_guidance.scans.phantom.plan import ORGANS, ScanPlan, plan, stream
from normal_guidance.scans.phantom.rendering import render
from normal_guidance.show.text_tables import csv_text

with importing("dicom", "phantoms are written with pydicom"):
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.sequence import Sequence as DicomSequence
    from pydicom.uid import (
        UID,
        CTImageStorage,
        ExplicitVRLittleEndian,
        JPEG2000Lossless,
        JPEGLosslessSV1,
        JPEGLSLossless,
        LegacyConvertedEnhancedCTImageStorage,
        RLELossless,
        SecondaryCaptureImageStorage,
    )

COMPRESSIONS = {
    "none": ExplicitVRLittleEndian,
    "rle": RLELossless,
    "jpeg2000": JPEG2000Lossless,
    "jpeg-lossless": JPEGLosslessSV1,
    "jpeg-ls": JPEGLSLossless,
}
"""Transfer syntaxes by name; all are lossless."""

JPEG = {"jpeg-lossless": "JPEGLosslessProcess14_1", "jpeg-ls": "JPEGLSLossless"}  # as GDCM calls them

MAKER = "PHANTOM"  # manufacturer; the patient's name begins with it, too


def write_draft(root: Path, draft: Draft, names: Mapping[str, str]) -> None:
    """Writes all files of a scan; `names` are their paths below `root`, by uid."""
    for folder in {(root / name).parent for name in names.values()}:
        folder.mkdir(parents=True, exist_ok=True)
    if draft.oddity == "multi_frame":
        _write(root / names[draft.images[0].uid], _multi_frame(draft), draft.compression)
    for image in draft.extras if draft.oddity == "multi_frame" else draft.files:
        path = root / names[image.uid]
        _write(path, _single(draft, image), "none" if image.capture else draft.compression)
        if image.cut is not None:
            content = path.read_bytes()
            pixels = content.rindex(b"\xe0\x7f\x10\x00")
            begin, end, share = (0, pixels, 0.5) if image.cut == "header" else (pixels, len(content), 0.6)
            path.write_bytes(content[: int(begin + share * (end - begin))])


def _write(path: Path, dataset: Dataset, compression: str) -> None:
    if compression in ("rle", "jpeg2000"):
        # The plugin is named because pydicom prefers gdcm, which crashes on RLE on some machines.
        plugin = "pydicom" if compression == "rle" else ""
        dataset.compress(COMPRESSIONS[compression], encoding_plugin=plugin, generate_instance_uid=False)
    dataset.save_as(path, enforce_file_format=True)
    if compression in JPEG:
        transcode(path, JPEG[compression])


def transcode(path: Path, syntax: str) -> None:
    """Compresses a file by GDCM, in the transfer syntax that it calls so: pydicom cannot write these."""
    with importing("dicom", "--compression jpeg-lossless, jpeg-ls and mixed need gdcm"):
        import gdcm
    reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
    reader.SetFileName(str(path))
    change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, syntax)))
    if not reader.Read():
        raise RuntimeError(f"gdcm cannot read {path}")
    change.SetInput(reader.GetImage())
    if not change.Change():
        raise RuntimeError(f"gdcm cannot compress {path} as {syntax}")
    writer.SetFileName(str(path))
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    if not writer.Write():
        raise RuntimeError(f"gdcm cannot write {path}")


def _single(draft: Draft, image: Image) -> Dataset:
    dataset = _common(draft, SecondaryCaptureImageStorage if image.capture else CTImageStorage, image.uid)
    if image.series_uid is not None:
        dataset.SeriesInstanceUID = image.series_uid
        dataset.SeriesNumber = 3
    dataset.InstanceNumber = image.instance
    dataset.ImageType = list(image.image_type)
    if image.capture:
        dataset.Modality = "OT"
        dataset.ConversionType = "WSD"
        dataset.SeriesDescription = "PHANTOM screen save"
        _set_pixels(dataset, (image.hu.clip(-160, 240) + 160).astype(np.int32) * 255 // 400, 8, False)
        return dataset
    dataset.KVP = "120"
    dataset.AcquisitionNumber = 1
    dataset.GantryDetectorTilt = _number(TILT if draft.oddity == "tilt" else 0.0)
    dataset.WindowCenter, dataset.WindowWidth = "40", "400"
    if image.position is not None and image.orientation is not None:
        dataset.ImagePositionPatient = [_number(value) for value in image.position]
        dataset.ImageOrientationPatient = [_number(value) for value in image.orientation]
        dataset.SliceLocation = _number(image.position[2])
    dataset.PixelSpacing = [_number(draft.pixel_spacing)] * 2
    dataset.SliceThickness = _number(draft.slice_spacing)
    dataset.RescaleIntercept, dataset.RescaleSlope, dataset.RescaleType = str(draft.encoding.intercept), "1", "HU"
    _set_pixels(dataset, draft.encoding.store(image.hu), draft.encoding.bits, draft.encoding.signed)
    return dataset


def _common(draft: Draft, sop_class: UID, uid: str) -> Dataset:
    """Patient, study, series, frame of reference and equipment: the same in all files of a scan."""
    part = draft.plan.anatomy.upper()
    empty = ("AccessionNumber", "ReferringPhysicianName", "PatientBirthDate", "PatientSex")
    dataset = _item(
        SpecificCharacterSet="ISO_IR 192",
        SOPClassUID=sop_class,
        SOPInstanceUID=uid,
        StudyDate=draft.date,
        ContentDate=draft.date,
        StudyTime="120000",
        ContentTime="120000",
        Modality="CT",
        Manufacturer=MAKER,
        StudyDescription=f"PHANTOM {part}",
        SeriesDescription=f"PHANTOM {part} axial",
        PatientName=f"PHANTOM^{part}",
        PatientID=draft.patient_id,
        PatientIdentityRemoved="YES",
        DeidentificationMethod="PHANTOM: no patient",
        BodyPartExamined=part,
        PatientPosition="HFS",
        StudyInstanceUID=draft.study_uid,
        SeriesInstanceUID=draft.series_uid,
        StudyID="1",
        SeriesNumber=2,
        FrameOfReferenceUID=draft.frame_uid,
        PositionReferenceIndicator="",
        QualityControlImage="YES",
        BurnedInAnnotation="NO",
        **dict.fromkeys(empty, ""),
    )
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = sop_class
    dataset.file_meta.MediaStorageSOPInstanceUID = UID(uid)
    return dataset


def _set_pixels(dataset: Dataset, values: np.ndarray, bits: int, signed: bool) -> None:
    allocated = 8 if bits <= 8 else 16
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.Rows, dataset.Columns = values.shape[-2:]
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = allocated, bits, bits - 1
    dataset.PixelRepresentation = int(signed)
    content = values.astype("u1" if allocated == 8 else "<u2").tobytes()
    dataset.add_new(0x7FE00010, "OB" if allocated == 8 else "OW", content + b"\0" * (len(content) % 2))


def _multi_frame(draft: Draft) -> Dataset:
    """All slices in one file: shared and per-frame functional groups instead of one header each."""
    first = draft.images[0]
    dataset = _common(draft, LegacyConvertedEnhancedCTImageStorage, first.uid)
    dataset.InstanceNumber = 1
    dataset.ImageType = ["DERIVED", "PRIMARY", "AXIAL", "NONE"]
    dataset.ManufacturerModelName, dataset.DeviceSerialNumber, dataset.SoftwareVersions = MAKER, "0", "0"
    frame = {"PixelPresentation": "MONOCHROME", "VolumetricProperties": "VOLUME"}
    frame["VolumeBasedCalculationTechnique"] = "NONE"
    for name, value in frame.items():
        setattr(dataset, name, value)
    dataset.LossyImageCompression = "00"
    dataset.PresentationLUTShape = "IDENTITY"
    dataset.AcquisitionContextSequence = DicomSequence()
    dataset.NumberOfFrames = len(draft.images)
    dataset.DimensionOrganizationSequence = [_item(DimensionOrganizationUID=draft.new_uid("dimension"))]
    pointers = {"DimensionIndexPointer": 0x00200032, "FunctionalGroupPointer": 0x00209113}
    dataset.DimensionIndexSequence = [_item(DimensionOrganizationUID=draft.new_uid("dimension"), **pointers)]
    spacing, thickness = _number(draft.pixel_spacing), _number(draft.slice_spacing)
    rescale = _item(RescaleIntercept=str(draft.encoding.intercept), RescaleSlope="1", RescaleType="HU")
    shared = _item(
        PixelMeasuresSequence=[_item(PixelSpacing=[spacing] * 2, SliceThickness=thickness)],
        PlaneOrientationSequence=[_item(ImageOrientationPatient=[_number(v) for v in first.orientation or ()])],
        PixelValueTransformationSequence=[rescale],
        CTImageFrameTypeSequence=[_item(FrameType=list(dataset.ImageType), **frame)],
        UnassignedSharedConvertedAttributesSequence=[_item(KVP="120")],
    )
    dataset.SharedFunctionalGroupsSequence = [shared]
    dataset.PerFrameFunctionalGroupsSequence = [
        _item(
            PlanePositionSequence=[_item(ImagePositionPatient=[_number(v) for v in image.position or ()])],
            FrameContentSequence=[_item(DimensionIndexValues=[number])],
            UnassignedPerFrameConvertedAttributesSequence=[_item(InstanceNumber=image.instance)],
        )
        for number, image in enumerate(draft.images, start=1)
    ]
    volume = np.stack([image.hu for image in draft.images])
    _set_pixels(dataset, draft.encoding.store(volume), draft.encoding.bits, draft.encoding.signed)
    return dataset


def _item(**values: Any) -> Dataset:
    item = Dataset()
    for name, value in values.items():
        setattr(item, name, value)
    return item


def _number(value: float) -> str:
    """A decimal string: at most 16 characters."""
    return f"{value:.6f}".rstrip("0").rstrip(".") or "0"


# The label tables have all columns of Kaggle's tables, in their order.


Row = Sequence[Any]

ICH_TYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")
"""Rows of a slice in stage_2_train.csv, in its order."""

SOLID = ("kidney", "liver", "spleen")
GRADES = ("healthy", "low", "high")


@dataclass(frozen=True)
class FolderLayout:
    """The arrangement of a dataset."""

    anatomy: str | None  # the body part; None: any
    ids: Callable[[ScanPlan], tuple[str, str]]
    """scan_id and patient_id; an empty scan_id stands for the SeriesInstanceUID."""
    path: Callable[[Draft, Image], str]
    tables: Callable[[Sequence[Draft], int], Mapping[str, str]]  # label tables by path, as text; the number is the seed


def _labelled(draft: Draft) -> list[Image]:
    """The images with rows in a label table; one of them may have no file."""
    images = draft.files
    ghost = Image(draft.new_uid("ghost"), draft.next_instance, images[0].hu)
    return [*images, ghost] if draft.oddity == "rows_without_image" else images


def _doubled(draft: Draft, rows: Sequence[Row]) -> list[Row]:
    """The rows; the last one occurs twice if the scan has the oddity of double rows."""
    return [*rows, *(rows[-1:] if draft.oddity == "double_rows" else ())]


def _folder_number(plan: ScanPlan, name: str, owner: int, low: int = 10_000, high: int = 66_000) -> int:
    """A number in Kaggle's style: unique for every owner, in an order that reveals nothing."""
    turn, place = divmod(owner, high - low)
    return low + turn * (high - low) + _order(plan.seed, name, high - low)[place]


@lru_cache(maxsize=4)
def _order(seed: int, name: str, count: int) -> list[int]:
    return [int(number) for number in stream(seed, name).permutation(count)]


def _ich_name(image: Image) -> str:
    return f"ID_{image.key[-9:]}"


def _ich_tables(drafts: Sequence[Draft], seed: int) -> dict[str, str]:
    images: list[list[Row]] = []
    for draft in drafts:
        for (image,) in _doubled(draft, [(image,) for image in _labelled(draft)]):
            shown = {*image.kinds, "any"} if image.label else set()
            images.append([(f"{_ich_name(image)}_{kind}", int(kind in shown)) for kind in ICH_TYPES])
    order = stream(seed, "rows").permutation(len(images)).tolist()
    return {"stage_2_train.csv": csv_text(("ID", "Label"), (row for number in order for row in images[number]))}


def _pe_key(plan: ScanPlan, name: str) -> str:
    return plan.stream(name).bytes(6).hex()


def _pe_exam(draft: Draft) -> dict[str, int]:
    """The labels of the whole exam, which repeat in all rows."""
    random = draft.plan.stream("exam")
    motion, opaque, flow, defect, chronic, wide = (random.random(6) < (0.02, 0.02, 0.3, 0.02, 0.15, 0.45)).tolist()
    indeterminate = draft.oddity == "indeterminate"
    positive, kinds = bool(draft.label), frozenset[str]().union(*(image.kinds for image in draft.images))
    exam = {
        "negative_exam_for_pe": not positive and not indeterminate,
        "qa_motion": motion,
        "qa_contrast": opaque,
        "flow_artifact": flow,
        "rv_lv_ratio_gte_1": positive and wide,
        "rv_lv_ratio_lt_1": positive and not wide,
        "leftsided_pe": "left" in kinds,
        "chronic_pe": positive and chronic,
        "true_filling_defect_not_pe": defect,
        "rightsided_pe": "right" in kinds,
        "acute_and_chronic_pe": False,
        "central_pe": "central" in kinds,
        "indeterminate": indeterminate,
    }
    return {name: int(value) for name, value in exam.items()}


def _pe_tables(drafts: Sequence[Draft], seed: int) -> dict[str, str]:
    rows: list[Row] = []
    for draft in drafts:
        study, exam = _pe_key(draft.plan, "study key"), _pe_exam(draft)
        images = _labelled(draft)
        rows += _doubled(draft, [(study, draft.scan_id, image.key, image.label, *exam.values()) for image in images])
    columns = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "pe_present_on_image", *exam)
    return {"train.csv": csv_text(columns, rows)}


def _at_series(plan: ScanPlan) -> int:
    return _folder_number(plan, "series numbers", plan.number)


def _at_ids(plan: ScanPlan) -> tuple[str, str]:
    patient = str(_folder_number(plan, "patient numbers", plan.patient))
    return f"{patient}_{_at_series(plan)}", patient


def _at_tables(drafts: Sequence[Draft], seed: int) -> dict[str, str]:
    images: list[Row] = []
    series: list[Row] = []
    of_patient: dict[str, list[Draft]] = {}
    for draft in drafts:
        number, patient = _at_series(draft.plan), draft.patient_id
        of_patient.setdefault(patient, []).append(draft)
        injured = [(image, kind) for image in draft.files for kind in sorted(image.kinds) if image.label]
        rows: list[Row] = [(patient, number, image.instance, kind) for image, kind in injured]
        if draft.oddity == "rows_without_image":
            rows.append((patient, number, draft.next_instance, injured[0][1]))
        images += _doubled(draft, rows)
        aorta = round(float(draft.plan.stream("aorta").uniform(90, 330)), 1)
        series.append((patient, number, aorta, int(draft.oddity == "incomplete_organ")))
    patients: list[Row] = []
    for patient, scans in of_patient.items():
        kinds = {kind for draft in scans for image in draft.images for kind in image.kinds}
        injuries = scans[0].plan.injuries
        bowel, leak = int("Bowel" in kinds), int("Active_Extravasation" in kinds)
        grades = [int(injuries.get(organ, "healthy") == grade) for organ in SOLID for grade in GRADES]
        any_injury = int(bool(bowel or leak or injuries.keys() & ORGANS.keys()))
        patients.append((patient, 1 - bowel, bowel, 1 - leak, leak, *grades, any_injury))
    columns = ("patient_id", "bowel_healthy", "bowel_injury", "extravasation_healthy", "extravasation_injury")
    organs = (f"{organ}_{grade}" for organ in SOLID for grade in GRADES)
    return {
        "image_level_labels_2024.csv": csv_text(("patient_id", "series_id", "instance_number", "injury_name"), images),
        "train_series_meta.csv": csv_text(("patient_id", "series_id", "aortic_hu", "incomplete_organ"), series),
        "train_2024.csv": csv_text((*columns, *organs, "any_injury"), patients),
    }


def _folder_ids(plan: ScanPlan) -> tuple[str, str]:
    """The ids contain the seed: scans of another seed belong to other patients."""
    of_seed = f"{plan.seed}-" if plan.seed else ""
    return f"scan-{of_seed}{plan.number:04d}", f"PHANTOM-{of_seed}{plan.patient:04d}"


def _folder_tables(drafts: Sequence[Draft], seed: int) -> dict[str, str]:
    rows = []
    for draft in drafts:
        slices = " ".join(str(image.label) for image in draft.images)
        rows.append((draft.scan_id, draft.patient_id, f"scans/{draft.scan_id}", draft.label, slices))
    return {"labels.csv": csv_text(("scan_id", "patient_id", "path", "label", "slice_labels"), rows)}


LAYOUTS: Mapping[str, FolderLayout] = {
    "rsna-ich": FolderLayout(
        "head",
        ids=lambda plan: ("", f"ID_{plan.patient_stream('patient id').bytes(4).hex()}"),
        path=lambda draft, image: f"stage_2_train/{_ich_name(image)}.dcm",
        tables=_ich_tables,
    ),
    "rsna-pe": FolderLayout(
        "chest",
        ids=lambda plan: (_pe_key(plan, "series key"), ""),
        path=lambda draft, image: f"train/{_pe_key(draft.plan, 'study key')}/{draft.scan_id}/{image.key}.dcm",
        tables=_pe_tables,
    ),
    "rsna-at": FolderLayout(
        "abdomen",
        ids=_at_ids,
        path=lambda draft, image: f"train_images/{draft.patient_id}/{_at_series(draft.plan)}/{image.instance}.dcm",
        tables=_at_tables,
    ),
    "folder": FolderLayout(
        None,
        ids=_folder_ids,
        path=lambda draft, image: f"scans/{draft.scan_id}/{image.instance:04d}.dcm",
        tables=_folder_tables,
    ),
}


TRUTH = "phantom.json"  # the file with the truth about the dataset; code that reads the scans must not need it

MIN_SIZE, MAX_SIZE = 32, 1024
"""Rows and columns of a slice."""

MIXED = "mixed"  # the compressions in turn, one per scan


def write_phantom(
    layout: str,
    out: str | Path,
    *,
    scans: int,
    seed: int = 0,
    size: int = 128,
    contrast: float = 1.0,
    positive: float | None = None,
    slices: int | None = None,
    anatomy: str | None = None,
    oddities: Sequence[str] = (),
    compression: str = "none",
) -> dict[str, Any]:
    """Draws a dataset of phantoms and writes it as DICOM, the same bytes for the same arguments; returns the truth."""
    # `contrast` is the lesions': 0 makes them invisible.  `slices` is a median, `positive` a share.
    # Only the layout folder takes an anatomy.  A folder that the same arguments filled before is left as it is.
    choose_one_of("layout", layout, LAYOUTS)
    chosen = LAYOUTS[layout]
    if anatomy is not None and chosen.anatomy not in (None, anatomy):
        raise UserError(f"anatomy {anatomy!r}: scans of {layout} are of the {chosen.anatomy}; use folder")
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise UserError(f"size is {size}; give rows and columns of a slice, from {MIN_SIZE} to {MAX_SIZE}")
    if not 0 <= contrast <= 5:
        raise UserError(f"contrast is {contrast}; give a factor from 0 (invisible) to 5")
    choose_one_of("compression", compression, (*COMPRESSIONS, MIXED))
    part = chosen.anatomy or anatomy or "head"
    numbers = {"scans": scans, "seed": seed, "size": size, "contrast": contrast, "positive": positive, "slices": slices}
    about = {
        "about": "PHANTOM: drawn by a program, no patients",
        "version": __version__,
        "layout": layout,
        "anatomy": part,
        "options": {**numbers, "oddities": list(oddities), "compression": compression},
    }
    if (Path(out) / TRUTH).is_file():
        truth = read_json(Path(out) / TRUTH, "delete the folder, and draw it again")
        if {name: truth.get(name) for name in about} == about:
            return truth  # drawn with the same arguments before
    plans = plan(part, scans, seed, positive=positive, slices=slices)
    assigned = assign_oddities(oddities, [scan.label for scan in plans], stream(seed, "oddities"), layout)
    truths, drafts, in_turn = [], [], list(COMPRESSIONS)
    with folder_atomically(out) as folder:
        for scan in plans:
            draft = make_draft(scan, render(scan, size, contrast=contrast), *chosen.ids(scan))
            draft.compression = in_turn[scan.number % len(in_turn)] if compression == MIXED else compression
            draft.oddity, detail, odd = assigned.get(scan.number), "", list[Image]()
            if draft.oddity is not None:
                detail, odd = ODDITIES[draft.oddity].change(draft, scan.stream("oddity"))
            if draft.oddity in ("wrong_intercept", "bits", "multi_frame", "truncated"):
                draft.compression = "none"  # an encoder would hide what is wrong with the pixels
            names = {image.uid: chosen.path(draft, image) for image in draft.files}
            if draft.oddity == "multi_frame":
                names.update(dict.fromkeys([image.uid for image in draft.images], names[draft.images[0].uid]))
            write_draft(folder, draft, names)  # not synced: thousands of files that can be drawn again
            odd_files = [names[image.uid] for image in odd]
            truths.append({**_truth(draft, names), "oddity": draft.oddity, "detail": detail, "odd_files": odd_files})
            # The label tables do not need the pixels; those of a dataset would fill the memory.
            nothing = draft.images[0].hu[:0]
            draft.change(hu=nothing)
            draft.extras = [replace(image, hu=nothing) for image in draft.extras]
            drafts.append(draft)
        for name, text in chosen.tables(drafts, seed).items():
            write_atomically(folder / name, text.encode())
        truth = {**about, "scans": truths}
        write_json(folder / TRUTH, truth)
    return truth


def _truth(draft: Draft, names: Mapping[str, str]) -> dict[str, Any]:
    """The truth about a scan: its slices in order, from the feet to the head, with their labels and HU."""
    return {
        "scan_id": draft.scan_id,
        "patient_id": draft.patient_id,
        "series_uid": draft.series_uid,
        "label": draft.label,
        "files": [names[image.uid] for image in draft.images],
        "frames": list(range(len(draft.images))) if draft.oddity == "multi_frame" else [0] * len(draft.images),
        "slice_labels": [image.label for image in draft.images],
        "hu_sha256": checksum(draft.images),
        "slice_spacing": draft.slice_spacing,
        "pixel_spacing": draft.pixel_spacing,
        "transfer_syntax": str(COMPRESSIONS[draft.compression]),
        "lesions": [[block.start, block.stop, block.kind] for block in draft.plan.blocks],
        "injuries": dict(draft.plan.injuries),
    }
