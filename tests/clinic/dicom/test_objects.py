"""DICOM results: judged by dicom3tools and dcmtk, read back by pydicom and highdicom, searched for the patient."""

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import highdicom
import numpy as np
import pydicom
import pytest
import torch
from highdicom.ko import KeyObjectSelectionDocument
from PIL import Image
from pydicom.sr.codedict import codes

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.clinic import dicom
from normal_guidance.clinic.dicom import source_series
from normal_guidance.clinic.dicom.objects import KINDS as RESULTS
from normal_guidance.clinic.dicom.objects import write_dicom
from normal_guidance.fit.bundle import ModelIdentity
from normal_guidance.scans.index.manifest import Finding, ScanRow
from normal_guidance.scans.index.problems import Problem
from small_dicom import (
    IDENTITY,
    KINDS,
    KOS,
    MORE,
    SR,
    STRIP,
    change,
    change_all,
    dumped,
    errors_of,
    everything,
    groups_of,
    make_strip,
    needs_dciodvfy,
    needs_dsrdump,
    of_images,
    predicted,
    read_and_problems,
    references,
    sources,
    texts_of,
    true_references,
    write,
)


@needs_dciodvfy
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_valid(scans, results, strip, tmp_path, kind):
    anonymous = write(*scans[kind], strip, tmp_path / "out", anonymize=True)
    for path in (*results[kind].values(), *anonymous.values()):
        assert errors_of(path) == [], path.name


@needs_dciodvfy
def test_the_validator_can_fail(scans, strip, tmp_path):
    for path in write(*scans["single"], strip, tmp_path / "out").values():
        change(path, PatientID=None)
        assert any("PatientID" in line for line in errors_of(path))


@needs_dsrdump
@pytest.mark.parametrize("kind", ["single", "multi_frame"])
def test_dcmtk_reads_the_reports(scans, results, kind):
    row, root = scans[kind]
    files = results[kind]
    truth = true_references(row, root)
    text = dumped(files[KOS])
    assert '<CONTAINER:(113000,DCM,"Of Interest")' in text
    assert 'TEXT:(113012,DCM,"Key Object Description")="AI-generated, for research use only' in text
    assert f"normal-guidance {__version__}, method ng" in text
    assert "Probability 0.8125, positive by the threshold 0.25." in text
    shown = re.findall(r'IMAGE:.*image,"([\d.]+)"(?:,(\d+))?\)>', text)
    wanted = [truth[number] for number in (7, 2, 5)]
    assert shown == [(uid, "" if frame is None else str(frame)) for uid, frame in wanted]
    text = dumped(files[SR])
    assert '<CONTAINER:(126000,DCM,"Imaging Measurement Report")' in text
    assert 'NUM:(122157,DCM,"Probability")="0.8125" (1,UCUM,"no units")' in text
    assert 'NUM:(threshold,99NGUIDE,"Threshold of the probability")="0.25"' in text
    assert 'CODE:(call,99NGUIDE,"Scan by the threshold")=(10828004,SCT,"Positive")' in text
    assert text.count('NUM:(attention,99NGUIDE,"Attention of the slice")') == len(row) + 3
    assert text.count('SCOORD:(111030,DCM,"Image Region")=(POLYLINE,0/0,32/0,32/32,0/32,0/0)') == 3
    assert f'TEXT:(111003,DCM,"Algorithm Version")="{__version__}"' in text
    assert all(uid in text for uid, _ in truth)


@pytest.mark.parametrize("kind", KINDS)
def test_key_objects_are_the_key_slices(scans, results, kind):
    row, root = scans[kind]
    truth = true_references(row, root)
    read = pydicom.dcmread(results[kind][KOS])
    assert of_images(read.ContentSequence) == [truth[number] for number in (7, 2, 5)]
    document = KeyObjectSelectionDocument.from_dataset(read)
    header = sources(row, root)[2]
    resolved = document.resolve_reference(header.SOPInstanceUID)
    assert resolved == (header.StudyInstanceUID, header.SeriesInstanceUID, header.SOPInstanceUID)
    classes = {item.ReferencedSOPSequence[0].ReferencedSOPClassUID for item in read.ContentSequence[-3:]}
    assert classes == {header.SOPClassUID}


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_has_every_number_with_its_slice(scans, results, kind):
    row, root = scans[kind]
    truth, reported = true_references(row, root), predicted(row, root)
    path = results[kind][SR]
    document = highdicom.sr.srread(path)
    _, scan, slices = groups_of(path)
    (probability,) = scan.get_measurements(codes.DCM.Probability)
    assert probability.value == 0.8125
    values = {one.name.value: one for one in scan.get_measurements()}
    assert list(values) == ["122157", "threshold", "first", "last", "interval"]
    assert values["threshold"].value == 0.25
    assert values["interval"].value == pytest.approx(reported.attention[4:9].sum().item(), rel=1e-6)
    assert (values["first"].value, values["last"].value) == (5, 9)
    ends = [values[name].referenced_coordinates[0].ContentSequence for name in ("first", "last")]
    assert [of_images(end)[0] for end in ends] == [truth[4], truth[8]]
    (call,) = scan.get_qualitative_evaluations()
    assert call.value == codes.SCT.Positive
    attention = slices.get_measurements()
    assert [one.value for one in attention] == reported.attention.tolist()
    found = [
        (image.referenced_sop_instance_uid, image.referenced_frame_numbers)
        for one in attention
        for image in one.referenced_images
    ]
    assert found == [(uid, frame and [frame]) for uid, frame in truth]
    assert [one[2] for one in document.get_evidence()] == list(dict.fromkeys(uid for uid, _ in truth))
    library = next(item for item in document.ContentSequence if item.ConceptNameCodeSequence[0].CodeValue == "111028")
    _, region, frame, *images = library.ContentSequence[0].ContentSequence
    assert region.ConceptCodeSequence[0].CodeMeaning == "Head"
    assert sources(row, root)[0].FrameOfReferenceUID == frame.UID
    assert [references(one.ReferencedSOPSequence)[0][0] for one in images] == list(
        dict.fromkeys(uid for uid, _ in truth)
    )


@pytest.mark.parametrize(
    ("finding", "code"),
    [
        (Finding("any", "1386000", "Intracranial hemorrhage"), ("1386000", "SCT", "Intracranial hemorrhage")),
        (
            Finding("intraparenchymal_of_the_brain"),
            ("intraparenchymal_of_the_brain", "99NGUIDE", "intraparenchymal of the brain"),
        ),
    ],
)
def test_results_name_the_finding(scans, results, strip, tmp_path, finding, code):
    row, root = scans["single"]
    one = predicted(row, root, finding=finding)
    files = {path.name: path for path in write_dicom(one, strip, tmp_path / "with", place=2)}
    for name, kind in RESULTS.items():
        assert errors_of(files[name]) == []
        dataset = pydicom.dcmread(files[name])
        assert dataset.SeriesNumber == 29820 + kind.place
        assert re.match(rf"{finding.name[:20]}\w*: {kind.title}, of 2", dataset.SeriesDescription)
        assert len(dataset.SeriesDescription) <= 64
        assert dataset.SOPInstanceUID != pydicom.dcmread(results["single"][name]).SOPInstanceUID
    keys, scan, slices = groups_of(files[SR])
    types = [group.finding_type for group in (*keys, scan, slices)]
    assert [(one.value, one.scheme_designator, one.meaning) for one in types] == [code] * 5
    assert f"Looked for: {finding}, body part HEAD.".encode() in files[KOS].read_bytes()
    assert f"Looked for: {finding}, body part HEAD." in pydicom.dcmread(files[STRIP]).ImageComments


MODEL = ModelIdentity("8d969eef6ecad3c2" * 4, "ng", "0.1.0", "rsna-ich", 320, "2026-11-18")


@needs_dciodvfy
def test_results_say_what_was_looked_for_where_and_by_which_model(first):
    """Also where the finding has no name."""
    sought = "what the labels of rsna-ich call positive; the model does not name its finding"
    trained = "model 8d969eef6eca (ng), trained on 320 scans of rsna-ich with normal-guidance 0.1.0 on 2026-11-18"
    read = {name: pydicom.dcmread(path) for name, path in first.items()}
    for name, one in read.items():
        assert errors_of(first[name]) == []
        assert one.ManufacturerModelName == "normal-guidance ng 8d969eef6eca"
        assert list(one.SoftwareVersions) == [__version__, "model 8d969eef6eca"]
    (description,) = texts_of(read[KOS].ContentSequence, "113012")
    for text in (description, read[STRIP].ImageComments):
        assert f"Looked for: {sought}, body part HEAD." in text
        assert f"{trained}; fingerprint {MODEL.fingerprint}." in text
    assert read[STRIP].BodyPartExamined == "HEAD"
    assert texts_of(read[SR].ContentSequence, "sought") == [sought]
    keys, scan, slices = groups_of(first[SR])
    for group in (*keys, scan, slices):  # TID 4019
        items = group[0].ContentSequence
        assert texts_of(items, "111001") == ["normal-guidance"]
        assert texts_of(items, "111003") == [__version__]
        assert {f"model: {MODEL.fingerprint}", trained, "method: ng"} < set(texts_of(items, "111002"))
    assert [site.value for site in scan.finding_sites] == [codes.SCT.Head]


@pytest.mark.parametrize(
    ("part", "code", "side"), [("PETROUS", None, "L"), ("KNEE", "72696002", "L"), ("CHEST", "816094009", None)]
)
def test_body_parts_have_a_code_and_a_side_where_dicom_knows_them(copied, strip, tmp_path, part, code, side):
    """A side only where there are two: an image of a chest must not say that it is the left one."""
    row, root = copied
    change_all(row, root, BodyPartExamined=part, Laterality="L")
    read, _ = read_and_problems(row, root, strip, tmp_path / "out")
    assert (read[2].BodyPartExamined, read[2].get("Laterality")) == (part, side)
    assert f"body part {part}." in read[2].ImageComments
    _, scan, _ = groups_of(tmp_path / "out" / SR)
    assert [site.value.value for site in scan.finding_sites] == ([code] if code else [])


ODD = (
    Problem("A", "SECRET/3.dcm", "duplicate", "same position as SECRET/2.dcm", "left out"),
    Problem("A", "", "unsuitable", "it has 2 slices, the shortest training scan 20", "predicted because of --force"),
    Problem("A", "SECRET/9.dcm", "localizer", "ImageType", "left out"),
)


@needs_dciodvfy
@pytest.mark.parametrize("anonymize", [False, True])
def test_results_warn_of_what_was_forced_or_left_out(scans, results, strip, tmp_path, anonymize):
    unproven = "This model was not shown to find slices better than their position does (skill .260 [-.350, .880])."
    odd = {"problems": ODD, "model_cautions": (unproven,)}
    files = write(*scans["single"], strip, tmp_path / "out", anonymize=anonymize, **odd)
    cautions = [
        "CAUTION: Forced: it has 2 slices, the shortest training scan 20.",
        "CAUTION: Two slices at the same position: left out.",
        f"CAUTION: {unproven}",
    ]
    read = {name: pydicom.dcmread(path) for name, path in files.items()}
    for name, one in read.items():
        assert errors_of(files[name]) == []
        assert one.SeriesDescription.startswith("CAUTION: AI ")
        assert b"SECRET" not in files[name].read_bytes()
    (description,) = texts_of(read[KOS].ContentSequence, "113012")
    for text in (description, read[STRIP].ImageComments):
        assert text.startswith(
            f"AI-generated, for research use only, not for diagnosis. {' '.join(cautions)} Looked for"
        )
    _, scan, _ = groups_of(files[SR])
    assert texts_of(scan[0].ContentSequence, "121106") == cautions
    assert not any(b"CAUTION" in path.read_bytes() for path in results["single"].values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_shows_each_key_slice_as_a_whole(scans, results, kind):
    """Its region is the edge of the image, so that viewers open the slice and nothing within it is outlined."""
    row, root = scans[kind]
    truth, one = true_references(row, root), predicted(row, root)
    keys, *_ = groups_of(results[kind][SR])
    assert [group.tracking_identifier for group in keys] == [
        f"key slice {rank} of 3: slice {number}, whole slice" for rank, number in ((1, 8), (2, 3), (3, 6))
    ]
    edge = [[0, 0], [row.columns, 0], [row.columns, row.rows], [0, row.rows], [0, 0]]
    for group, number in zip(keys, (7, 2, 5), strict=True):
        assert group.roi.GraphicType == "POLYLINE"
        np.testing.assert_array_equal(group.roi.value, edge)
        assert of_images(group.roi.ContentSequence) == [truth[number]]
        (attention,) = group.get_measurements()
        assert attention.value == pytest.approx(one.attention[number].item(), rel=1e-6)
        assert "outlines nothing within the slice" in texts_of(group[0].ContentSequence, "121106")[0]


def test_without_a_threshold_there_is_no_call(scans, strip, tmp_path):
    files = write(*scans["single"], strip, tmp_path / "out", threshold=None)
    keys, scan, _ = groups_of(files[SR])
    assert [one.name.value for one in scan.get_measurements()] == ["122157", "first", "last", "interval"]
    assert scan.get_qualitative_evaluations() == []
    assert len(keys) == 3
    assert b"no threshold was chosen" in files[KOS].read_bytes()


@needs_dciodvfy
def test_a_negative_scan_has_no_slices_of_interest(scans, strip, tmp_path):
    """Neither key objects, also none from before, nor key slices in the report, which says why."""
    write(*scans["single"], strip, tmp_path / "out")
    files = write(*scans["single"], strip, tmp_path / "out", threshold=0.9)
    assert list(files) == [SR, STRIP]
    keys, scan, slices = groups_of(files[SR])
    assert keys == []
    assert scan.get_qualitative_evaluations()[0].value == codes.SCT.Negative
    (why,) = texts_of(scan[0].ContentSequence, "121106")
    assert why == "NEGATIVE by the threshold: no slice is reported as of interest, and there are no key objects."
    assert len(slices.get_measurements()) == 12
    assert "Probability 0.8125, NEGATIVE by the threshold 0.9." in pydicom.dcmread(files[STRIP]).ImageComments
    assert [line for file in files.values() for line in errors_of(file)] == []


def test_the_strip_is_kept_pixel_by_pixel(scans, results, strip):
    row, root = scans["multi_frame"]
    read = pydicom.dcmread(results["multi_frame"][STRIP])
    assert read.SOPClassUID == pydicom.uid.SecondaryCaptureImageStorage
    assert read.PhotometricInterpretation == "RGB"
    np.testing.assert_array_equal(read.pixel_array, np.asarray(Image.open(strip)))
    assert references(read.SourceImageSequence) == [true_references(row, root)[number] for number in (7, 2, 5)]
    assert (read.BurnedInAnnotation, read.ContentQualification) == ("NO", "RESEARCH")
    assert list(read.PatientOrientation) == ["L", "P"]  # of the slices: the patient's right is on the left
    assert "research use only" in read.DerivationDescription


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "RGBA"])
def test_a_gray_strip_is_monochrome(scans, tmp_path, mode):
    gray = np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8)
    picture = Image.fromarray(gray).convert(mode)
    if mode == "RGBA":
        picture.paste((1, 2, 3, 0), (0, 0, 30, 10))  # transparent, so that its colour is not seen
        gray[:10] = 255
    picture.save(tmp_path / "gray.png")
    read = pydicom.dcmread(write(*scans["single"], tmp_path / "gray.png", tmp_path / "out")[STRIP])
    assert (read.PhotometricInterpretation, read.SamplesPerPixel) == ("MONOCHROME2", 1)
    np.testing.assert_array_equal(read.pixel_array, gray)


@pytest.mark.parametrize("kind", KINDS)
def test_patient_and_study_are_the_sources(scans, results, kind):
    row, root = scans[kind]
    files = results[kind]
    header = sources(row, root)[0]
    read = [pydicom.dcmread(path) for path in files.values()]
    for one in read:
        assert {name: one[name].value for name in IDENTITY} == IDENTITY
        assert one.StudyInstanceUID == header.StudyInstanceUID
        assert "PatientIdentityRemoved" not in one
        assert [name for name in MORE if name in one and one[name].value == MORE[name]] == []
        assert one.ContentDate > IDENTITY["StudyDate"]
    assert len({one.SeriesInstanceUID for one in read} | {header.SeriesInstanceUID}) == 4
    assert len({one.SOPInstanceUID for one in read}) == 3
    assert [one.Modality for one in read] == ["KO", "SR", "OT"]
    for path in files.values():
        content = path.read_bytes()
        assert b"FROM-THE-TABLE" not in content
        assert b"SCANID" not in content


def uids_of(files: dict[str, Path]) -> list[str]:
    read = [pydicom.dcmread(path) for path in files.values()]
    return [uid for one in read for uid in (one.SOPInstanceUID, one.SeriesInstanceUID)]


@pytest.fixture(scope="module")
def first(scans, tmp_path_factory) -> dict[str, Path]:
    """The results of one prediction, to compare the UIDs of others with."""
    folder = tmp_path_factory.mktemp("first")
    return write(*scans["single"], make_strip(folder), folder / "out", model=MODEL)


def test_another_number_of_threads_gives_the_same_uids(scans, first, strip, tmp_path):
    """Probability and attention differ in their last bits, and so does the picture; the archive keeps one series."""
    row, root = scans["single"]
    one = predicted(row, root, model=MODEL)
    near = replace(
        one,
        logit=float(np.nextafter(one.logit, 2)),
        probability=float(np.nextafter(one.probability, 1)),
        log_attention=one.log_attention.nextafter(torch.tensor(0.0)),
    )
    assert not torch.equal(near.attention, one.attention)
    Image.new("RGB", (30, 20), "red").save(strip)
    again = {path.name: path for path in write_dicom(near, strip, tmp_path / "two")}
    assert uids_of(again) == uids_of(first)
    ids = [group.tracking_uid for group in groups_of(again[SR])[0]]
    assert ids == [group.tracking_uid for group in groups_of(first[SR])[0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 0.3},
        {"key_slices": (7, 2)},
        {"interval": (4, 9)},
        {"share": 0.8},
        {"share": None, "coverage": 0.9},
        {"problems": ODD},
        {"finding": Finding("any")},
        {"model": replace(MODEL, fingerprint="0" * 64)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_results_that_say_something_else_have_other_uids(scans, first, strip, tmp_path, changes):
    other = write(*scans["single"], strip, tmp_path / "other", **{"model": MODEL, **changes})
    assert len({*uids_of(first), *uids_of(other)}) == 12


def test_a_late_slice_gives_other_uids(scans, results, strip, tmp_path):
    row, root = scans["single"]
    early = replace(row, files=row.files[:-1], frames=row.frames[:-1], positions=row.positions[:-1])
    early_uids = uids_of(write(early, root, strip, tmp_path / "early"))
    assert not set(early_uids) & set(uids_of(results["single"]))


def series_of(row: ScanRow, root: Path, strip: Path, out: Path, **changes) -> list[tuple[int, str]]:
    read = (pydicom.dcmread(path) for path in write(row, root, strip, out, **changes).values())
    return [(int(one.SeriesNumber), one.SeriesDescription) for one in read]


def test_two_reconstructions_of_a_study_are_told_apart(copied, strip, tmp_path):
    row, root = copied
    found = []
    for number, description in ((2, "HEAD 5.0 H30s"), (3, "HEAD 1.0 H60s")):
        uid = f"1.2.{number}"
        change_all(row, root, SeriesNumber=number, SeriesDescription=description, SeriesInstanceUID=uid)
        found.append(series_of(row, root, strip, tmp_path / str(number)))
    assert found[0] == [
        (29801, "AI key slices, research only, of 2 HEAD 5.0 H30s"),
        (29802, "AI report, research only, of 2 HEAD 5.0 H30s"),
        (29803, "AI picture, research only, of 2 HEAD 5.0 H30s"),
    ]
    assert len({number for number, _ in (*found[0], *found[1])}) == 6
    assert len({title for _, title in (*found[0], *found[1])}) == 6


def test_long_names_leave_the_finding_the_warning_and_the_source_readable(copied, strip, tmp_path):
    row, root = copied
    change_all(row, root, SeriesNumber=99999, SeriesDescription="Kopf nativ, Weichteilfenster, Ärzte" + " lang" * 5)
    long = Finding("a" * 32)
    titles = [title for _, title in series_of(row, root, strip, tmp_path / "out", finding=long, problems=ODD)]
    assert titles[0] == f"{'a' * 15}, CAUTION: AI key slices, research only, of 99999"
    assert titles[1].startswith(f"{'a' * 19}, CAUTION: AI report")
    plain = [title for _, title in series_of(row, root, strip, tmp_path / "short", finding=Finding("any"))]
    assert plain[0] == "any: AI key slices, research only, of 99999 Kopf nativ, Weichtei"
    assert all(len(title) <= 64 for title in (*titles, *plain))


@pytest.mark.parametrize("number", [None, -7, 2**31 - 1, 100_000])
def test_source_numbers_that_leave_no_room_are_replaced(copied, strip, tmp_path, number):
    """By a hash of the series: results of two such series differ, and every number fits an IS."""
    row, root = copied
    found = []
    for series in ("1.2.3", "1.2.4"):
        change_all(row, root, SeriesNumber=number, SeriesInstanceUID=series)
        found += [one for one, _ in series_of(row, root, strip, tmp_path / series)]
    assert len(set(found)) == 6
    assert all(0 < one < 2**31 for one in found)


@pytest.mark.slow
@needs_dciodvfy
def test_two_thousand_slices(scans, strip, tmp_path):
    """All are listed, and the report stays at about 1 kB a slice."""
    row, root = scans["single"]
    content, uid = (root / row.files[0]).read_bytes(), sources(row, root)[0].SOPInstanceUID
    uids = [f"2.25.{number:04}".ljust(len(uid), "7") for number in range(1000, 3000)]
    for number, other in enumerate(uids):
        (tmp_path / f"{number}.dcm").write_bytes(content.replace(uid.encode(), other.encode()))
    files = tuple(f"{number}.dcm" for number in range(2000))
    long = replace(row, files=files, frames=(0,) * 2000, positions=tuple(map(float, range(2000))))
    written = write(long, tmp_path, strip, tmp_path / "out", interval=(100, 1700))
    assert written[SR].stat().st_size < 2_500_000
    assert errors_of(written[SR]) == []
    read = pydicom.dcmread(written[SR])
    (series,) = read.CurrentRequestedProcedureEvidenceSequence[0].ReferencedSeriesSequence
    assert [one.ReferencedSOPInstanceUID for one in series.ReferencedSOPSequence] == uids
    items = read.ContentSequence[-1].ContentSequence[0].ContentSequence
    assert [of_images(one.ContentSequence)[0][0] for one in items if one.ValueType == "NUM"] == uids


def test_without_highdicom_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "highdicom", None)
    with pytest.raises(UserError, match=r"pip install 'normal-guidance\[dicom\]'"):
        runpy.run_path(dicom.__file__)


def secrets_of(row: ScanRow, root: Path) -> set[bytes]:
    """Every text, date and UID of the source's headers, in the encodings that a file may have them in."""
    found: set[bytes] = set()
    for header in sources(row, root):
        values = [
            str(one.value) for one in everything(header) if one.VR in ("PN", "LO", "SH", "LT", "ST", "DA", "TM", "AS")
        ]
        values += [
            one.value for one in everything(header) if one.VR == "UI" and not one.value.startswith("1.2.840.10008.")
        ]
        words = [word for value in values for word in (value, *value.split("^"))]
        found |= {word.encode(code) for word in words if len(word) > 3 for code in ("utf-8", "latin-1")}
    return found


def without_new_uids(file: Path, secrets: set[bytes]) -> bytes:
    """A file's bytes but for UIDs that are not the source's: their random digits may hold any time of day."""
    content = file.read_bytes()
    for uid in {one.value.encode() for one in everything(pydicom.dcmread(file)) if one.VR == "UI"} - secrets:
        content = content.replace(uid, b"")
    return content


@pytest.mark.slow(but="single")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_patient_is_left(scans, results, strip, tmp_path, kind):
    row, root = scans[kind]
    secrets = secrets_of(row, root)
    assert {b"MRN-4711", "Löwenherz".encode(), b"19470321", b"ACC-99812", b"Springfield General"} < secrets
    assert sources(row, root)[0].StudyInstanceUID.encode() in secrets
    anonymous = write(row, root, strip, tmp_path / "anonymous", anonymize=True)
    for name in RESULTS:
        leaked = {word for word in secrets if word in without_new_uids(anonymous[name], secrets)}
        assert leaked == set(), name
        assert len({word for word in secrets if word in results[kind][name].read_bytes()}) > 10  # the search can find


def test_anonymous_results_say_so_and_agree_with_each_other(scans, strip, tmp_path):
    row, root = scans["single"]
    files = write(row, root, strip, tmp_path / "out", anonymize=True)
    key, report, picture = (pydicom.dcmread(files[name]) for name in RESULTS)
    for one in (key, report, picture):
        assert one.PatientIdentityRemoved == "YES"
        assert one.DeidentificationMethodCodeSequence[0].CodeValue == "113100"
        assert one.PatientName.family_name == "ANONYMOUS"
        assert one.PatientID == key.PatientID != ""
        assert one.StudyInstanceUID == key.StudyInstanceUID
        assert one.ContentDate == "19000101"
        assert not any(one[name].value for name in ("StudyDate", "PatientBirthDate", "PatientSex", "AccessionNumber"))
        assert {element.value for element in everything(one) if element.VR in ("DA", "DT")} <= {"19000101", ""}
    items = report.ContentSequence[-1].ContentSequence[0].ContentSequence
    slices = [of_images(item.ContentSequence)[0] for item in items if item.ValueType == "NUM"]
    assert len(set(slices)) == len(row)
    chosen = [slices[number] for number in (7, 2, 5)]  # the n-th of the report is the n-th of the scan
    assert of_images(key.ContentSequence) == chosen == references(picture.SourceImageSequence)
    (study,) = report.CurrentRequestedProcedureEvidenceSequence
    assert study.StudyInstanceUID == report.StudyInstanceUID


def test_one_study_stays_one_study_within_a_run_and_no_longer(copied, scans, strip, tmp_path, monkeypatch):
    def place(row: ScanRow, root: Path, out: str) -> tuple[str, str]:
        one = pydicom.dcmread(write(row, root, strip, tmp_path / out, anonymize=True)[KOS])
        return one.PatientID, one.StudyInstanceUID

    row, root = copied
    first = place(row, root, "first")
    change_all(row, root, SeriesInstanceUID="1.2.3")
    assert place(row, root, "second") == first
    patient, study = place(*scans["jpeg2000"], "third")  # of the same patient
    assert patient == first[0]
    assert study != first[1]
    monkeypatch.setattr(source_series, "_SECRET", "another run's")
    assert not set(place(row, root, "fourth")) & set(first)


def test_patients_without_an_id_stay_apart(copied, strip, tmp_path):
    row, root = copied
    patients = []
    for study in ("1.2.3", "1.2.4"):
        change_all(row, root, PatientID="", StudyInstanceUID=study)
        read = pydicom.dcmread(write(row, root, strip, tmp_path / study, anonymize=True)[KOS])
        patients.append(read.PatientID)
    assert len(set(patients)) == 2
