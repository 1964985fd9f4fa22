"""DICOM results: judged by dicom3tools and dcmtk, read back by pydicom and highdicom, searched for the patient."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import highdicom
import numpy as np
import pydicom
import pytest
import torch
from highdicom.ko import KeyObjectSelectionDocument
from PIL import Image
from pydicom.sr.codedict import codes

import small_dicom as small
from normal_guidance import __version__
from normal_guidance.clinic.dicom import source_series
from normal_guidance.clinic.dicom.objects import write_dicom
from normal_guidance.fit.bundle import ModelIdentity
from normal_guidance.scans.index.manifest import Finding, ScanRow
from normal_guidance.scans.index.problems import Problem
from small_dicom import KINDS, KOS, RESULTS, SR, STRIP, change_all, errors_of, groups_of, texts_of, write

KEYS = (7, 2, 5)


@pytest.fixture(params=KINDS)
def result(request, scans, results) -> SimpleNamespace:
    """A scan of every kind: its files, their references and headers, its prediction and its results."""
    row, root = scans[request.param]
    truth, headers, prediction = small.true_references(row, root), small.sources(row, root), small.predicted(row, root)
    files = results[request.param]
    return SimpleNamespace(row=row, truth=truth, headers=headers, prediction=prediction, files=files)


def read_all(files: dict[str, Path]) -> dict[str, pydicom.Dataset]:
    return {name: pydicom.dcmread(path) for name, path in files.items()}


@small.needs_dciodvfy
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_valid(scans, results, strip, tmp_path, kind):
    anonymous = write(*scans[kind], strip, tmp_path / "out", anonymize=True)
    for path in (*results[kind].values(), *anonymous.values()):
        assert errors_of(path) == [], path.name
    for path in anonymous.values():  # the validator can fail
        small.change(path, PatientID=None)
        assert any("PatientID" in line for line in errors_of(path))


@small.needs_dsrdump
@pytest.mark.parametrize("result", ["single", "multi_frame"], indirect=True)
def test_dcmtk_reads_the_reports(result):
    text = small.dumped(result.files[KOS])
    assert '<CONTAINER:(113000,DCM,"Of Interest")' in text
    assert "Probability 0.8125, positive by the threshold 0.25." in text
    shown = re.findall(r'IMAGE:.*image,"([\d.]+)"(?:,(\d+))?\)>', text)
    wanted = [result.truth[number] for number in KEYS]
    assert shown == [(uid, "" if frame is None else str(frame)) for uid, frame in wanted]
    text = small.dumped(result.files[SR])
    assert '<CONTAINER:(126000,DCM,"Imaging Measurement Report")' in text
    assert 'NUM:(122157,DCM,"Probability")="0.8125" (1,UCUM,"no units")' in text
    assert text.count('NUM:(attention,99NGUIDE,"Attention of the slice")') == len(result.row) + 3
    assert text.count('SCOORD:(111030,DCM,"Image Region")=(POLYLINE,0/0,32/0,32/32,0/32,0/0)') == 3
    assert all(uid in text for uid, _ in result.truth)


def test_the_report_has_every_number_with_its_slice(result):
    truth, attention = result.truth, result.prediction.attention
    document = highdicom.sr.srread(result.files[SR])
    _, scan, slices = groups_of(result.files[SR])
    values = {measurement.name.value: measurement for measurement in scan.get_measurements()}
    assert list(values) == [codes.DCM.Probability.value, "threshold", "first", "last", "interval"]
    numbers = [measurement.value for measurement in values.values()]
    assert numbers == [0.8125, 0.25, 5, 9, pytest.approx(attention[4:9].sum().item(), rel=1e-6)]
    ends = [values[name].referenced_coordinates[0].ContentSequence for name in ("first", "last")]
    assert [small.of_images(end)[0] for end in ends] == [truth[4], truth[8]]
    (call,) = scan.get_qualitative_evaluations()
    assert call.value == codes.SCT.Positive
    measured = slices.get_measurements()
    assert [measurement.value for measurement in measured] == attention.tolist()
    images = [image for measurement in measured for image in measurement.referenced_images]
    referenced = [(image.referenced_sop_instance_uid, image.referenced_frame_numbers) for image in images]
    assert referenced == [(uid, frame and [frame]) for uid, frame in truth]
    uids = list(dict.fromkeys(uid for uid, _ in truth))
    assert [uid for _, _, uid, *_ in document.get_evidence()] == uids
    library = next(item for item in document.ContentSequence if item.ConceptNameCodeSequence[0].CodeValue == "111028")
    _, region, frame, *images = library.ContentSequence[0].ContentSequence
    assert region.ConceptCodeSequence[0].CodeMeaning == "Head"
    assert result.headers[0].FrameOfReferenceUID == frame.UID
    assert [small.references(image.ReferencedSOPSequence)[0][0] for image in images] == uids


def test_key_objects_and_the_report_show_each_key_slice_as_a_whole(result):
    """Its region is the edge of the image, so that viewers open the slice and nothing within it is outlined."""
    row, (keys, *_) = result.row, groups_of(result.files[SR])
    assert [group.tracking_identifier for group in keys] == [
        f"key slice {rank} of 3: slice {number + 1}, whole slice" for rank, number in enumerate(KEYS, start=1)
    ]
    edge = [[0, 0], [row.columns, 0], [row.columns, row.rows], [0, row.rows], [0, 0]]
    for group, number in zip(keys, KEYS, strict=True):
        assert group.roi.GraphicType == "POLYLINE"
        np.testing.assert_array_equal(group.roi.value, edge)
        assert small.of_images(group.roi.ContentSequence) == [result.truth[number]]
        (attention,) = group.get_measurements()
        assert attention.value == pytest.approx(result.prediction.attention[number].item(), rel=1e-6)
        assert "outlines nothing within the slice" in texts_of(group[0].ContentSequence, "121106")[0]
    read, header = pydicom.dcmread(result.files[KOS]), result.headers[2]
    assert small.of_images(read.ContentSequence) == [result.truth[number] for number in KEYS]
    resolved = KeyObjectSelectionDocument.from_dataset(read).resolve_reference(header.SOPInstanceUID)
    assert resolved == (header.StudyInstanceUID, header.SeriesInstanceUID, header.SOPInstanceUID)
    classes = {item.ReferencedSOPSequence[0].ReferencedSOPClassUID for item in read.ContentSequence[-3:]}
    assert classes == {header.SOPClassUID}


def test_patient_and_study_are_the_sources(result):
    header, read = result.headers[0], list(read_all(result.files).values())
    for written in read:
        assert {name: written[name].value for name in small.IDENTITY} == small.IDENTITY
        assert written.StudyInstanceUID == header.StudyInstanceUID
        assert "PatientIdentityRemoved" not in written
        assert [name for name in small.MORE if name in written and written[name].value == small.MORE[name]] == []
        assert written.ContentDate > small.IDENTITY["StudyDate"]
    assert len({written.SeriesInstanceUID for written in read} | {header.SeriesInstanceUID}) == 4
    assert len({written.SOPInstanceUID for written in read}) == 3
    assert [written.Modality for written in read] == ["KO", "SR", "OT"]
    contents = b"".join(path.read_bytes() for path in result.files.values())
    assert not any(word in contents for word in (b"FROM-THE-TABLE", b"SCANID"))


LONG_NAME = "intraparenchymal_of_the_brain"


@pytest.mark.parametrize(
    ("finding", "code"),
    [
        (Finding("any", "1386000", "Intracranial hemorrhage"), ("1386000", "SCT", "Intracranial hemorrhage")),
        (Finding(LONG_NAME), (LONG_NAME, "99NGUIDE", LONG_NAME.replace("_", " "))),
    ],
)
def test_results_name_the_finding(scans, results, strip, tmp_path, finding, code):
    prediction = small.predicted(*scans["single"], finding=finding)
    files = {path.name: path for path in write_dicom(prediction, strip, tmp_path / "with", place=2)}
    for name, kind in RESULTS.items():
        assert errors_of(files[name]) == []
        dataset = pydicom.dcmread(files[name])
        assert dataset.SeriesNumber == 29820 + kind.place
        assert re.match(rf"{finding.name[:20]}\w*: {kind.title}, of 2", dataset.SeriesDescription)
        assert len(dataset.SeriesDescription) <= 64
        assert dataset.SOPInstanceUID != pydicom.dcmread(results["single"][name]).SOPInstanceUID
    keys, scan, slices = groups_of(files[SR])
    types = [group.finding_type for group in (*keys, scan, slices)]
    assert [(kind.value, kind.scheme_designator, kind.meaning) for kind in types] == [code] * 5
    assert f"Looked for: {finding}, body part HEAD.".encode() in files[KOS].read_bytes()
    assert f"Looked for: {finding}, body part HEAD." in pydicom.dcmread(files[STRIP]).ImageComments


MODEL = ModelIdentity("8d969eef6ecad3c2" * 4, "ng", "0.1.0", "rsna-ich", 320, "2026-11-18")


@pytest.fixture(scope="module")
def first(scans, tmp_path_factory) -> dict[str, Path]:
    """The results of one prediction, to compare the UIDs of others with."""
    folder = tmp_path_factory.mktemp("first")
    return write(*scans["single"], small.make_strip(folder), folder / "out", model=MODEL)


def sentences_of(read: dict[str, pydicom.Dataset]) -> tuple[str, str]:
    (description,) = texts_of(read[KOS].ContentSequence, "113012")
    return description, read[STRIP].ImageComments


@small.needs_dciodvfy
def test_results_say_what_was_looked_for_where_and_by_which_model(first):
    """Also where the finding has no name."""
    sought = "what the labels of rsna-ich call positive; the model does not name its finding"
    trained = "model 8d969eef6eca (ng), trained on 320 scans of rsna-ich with normal-guidance 0.1.0 on 2026-11-18"
    read = read_all(first)
    for name, dataset in read.items():
        assert errors_of(first[name]) == []
        assert dataset.ManufacturerModelName == "normal-guidance ng 8d969eef6eca"
        assert list(dataset.SoftwareVersions) == [__version__, "model 8d969eef6eca"]
    for text in sentences_of(read):
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
    change_all(*copied, BodyPartExamined=part, Laterality="L")
    (_, _, picture), _ = small.read_and_problems(*copied, strip, tmp_path / "out")
    assert (picture.BodyPartExamined, picture.get("Laterality")) == (part, side)
    assert f"body part {part}." in picture.ImageComments
    _, scan, _ = groups_of(tmp_path / "out" / SR)
    assert [site.value.value for site in scan.finding_sites] == ([code] if code else [])


ODD = (
    Problem("A", "SECRET/3.dcm", "duplicate", "same position as SECRET/2.dcm", "left out"),
    Problem("A", "", "unsuitable", "it has 2 slices, the shortest training scan 20", "predicted because of --force"),
    Problem("A", "SECRET/9.dcm", "localizer", "ImageType", "left out"),
)


@small.needs_dciodvfy
@pytest.mark.parametrize("anonymize", [False, True])
def test_results_warn_of_what_was_forced_or_left_out(scans, results, strip, tmp_path, anonymize):
    unproven = "This model was not shown to find slices better than their position does (skill .260 [-.350, .880])."
    odd = {"problems": ODD, "model_cautions": (unproven,)}
    files = write(*scans["single"], strip, tmp_path / "out", anonymize=anonymize, **odd)
    warned = ("Forced: it has 2 slices, the shortest training scan 20.", "Two slices at the same position: left out.")
    cautions = [f"CAUTION: {text}" for text in (*warned, unproven)]
    read = read_all(files)
    for name, dataset in read.items():
        assert errors_of(files[name]) == []
        assert dataset.SeriesDescription.startswith("CAUTION: AI ")
        assert b"SECRET" not in files[name].read_bytes()
    notice = "AI-generated, for research use only, not for diagnosis."
    assert all(text.startswith(f"{notice} {' '.join(cautions)} Looked for") for text in sentences_of(read))
    _, scan, _ = groups_of(files[SR])
    assert texts_of(scan[0].ContentSequence, "121106") == cautions
    assert not any(b"CAUTION" in path.read_bytes() for path in results["single"].values())


@small.needs_dciodvfy
def test_without_a_threshold_there_is_no_call_and_a_negative_scan_has_no_slices_of_interest(scans, strip, tmp_path):
    """Neither key objects, also none from before, nor key slices in the report, which says why."""
    files = write(*scans["single"], strip, tmp_path / "out", threshold=None)
    keys, scan, _ = groups_of(files[SR])
    names = [measurement.name.value for measurement in scan.get_measurements()]
    assert names == ["122157", "first", "last", "interval"]
    assert scan.get_qualitative_evaluations() == []
    assert len(keys) == 3
    assert b"no threshold was chosen" in files[KOS].read_bytes()
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
    truth, read = small.true_references(*scans["multi_frame"]), pydicom.dcmread(results["multi_frame"][STRIP])
    assert read.SOPClassUID == pydicom.uid.SecondaryCaptureImageStorage
    assert read.PhotometricInterpretation == "RGB"
    np.testing.assert_array_equal(read.pixel_array, np.asarray(Image.open(strip)))
    assert small.references(read.SourceImageSequence) == [truth[number] for number in KEYS]
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


def uids_of(files: dict[str, Path]) -> list[str]:
    return [uid for read in read_all(files).values() for uid in (read.SOPInstanceUID, read.SeriesInstanceUID)]


def test_another_number_of_threads_gives_the_same_uids(scans, first, strip, tmp_path):
    """Probability and attention differ in their last bits, and so does the picture; the archive keeps one series."""
    prediction = small.predicted(*scans["single"], model=MODEL)
    near = replace(
        prediction,
        logit=float(np.nextafter(prediction.logit, 2)),
        probability=float(np.nextafter(prediction.probability, 1)),
        log_attention=prediction.log_attention.nextafter(torch.tensor(0.0)),
    )
    assert not torch.equal(near.attention, prediction.attention)
    Image.new("RGB", (30, 20), "red").save(strip)
    again = {path.name: path for path in write_dicom(near, strip, tmp_path / "two")}
    assert uids_of(again) == uids_of(first)
    ids, before = ([group.tracking_uid for group in groups_of(files[SR])[0]] for files in (again, first))
    assert ids == before


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 0.3},
        {"key_positions": (7, 2)},
        {"interval_positions": (4, 9)},
        {"share": 0.8},
        {"share": None, "coverage": 0.9},
        {"problems": ODD},
        {"finding": Finding("any")},
        {"model": replace(MODEL, fingerprint="0" * 64)},
        {"slices": 11},  # before a late one came
    ],
    ids=lambda changes: "-".join(changes),
)
def test_results_that_say_something_else_have_other_uids(scans, first, strip, tmp_path, changes):
    row, root = scans["single"]
    slices = range(changes.get("slices", len(row)))
    said = {"model": MODEL, **{name: value for name, value in changes.items() if name != "slices"}}
    other = write(row.cut(slices), root, strip, tmp_path / "other", **said)
    assert len({*uids_of(first), *uids_of(other)}) == 12


def series_of(row: ScanRow, root: Path, strip: Path, out: Path, **changes) -> dict[int, str]:
    read = read_all(write(row, root, strip, out, **changes)).values()
    return {int(written.SeriesNumber): written.SeriesDescription for written in read}


@pytest.mark.parametrize("pair", [(2, 3), (None, None), (-7, -7), (2**31 - 1, 2**31 - 1), (100_000, 100_000)])
def test_two_reconstructions_of_a_study_are_told_apart(copied, strip, tmp_path, pair):
    """Source numbers that leave no room are replaced by a hash of the series; every number fits an IS."""
    titles = {}
    for number, uid, description in zip(pair, ("1.2.3", "1.2.4"), ("HEAD 5.0 H30s", "HEAD 1.0 H60s"), strict=True):
        change_all(*copied, SeriesNumber=number, SeriesDescription=description, SeriesInstanceUID=uid)
        titles |= series_of(*copied, strip, tmp_path / uid)
    assert len(titles) == len(set(titles.values())) == 6
    assert all(0 < number < 2**31 for number in titles)
    if pair == (2, 3):
        kinds = enumerate(("key slices", "report", "picture"), start=29801)
        expected = {number: f"AI {kind}, research only, of 2 HEAD 5.0 H30s" for number, kind in kinds}
        assert expected.items() < titles.items()


def test_long_names_leave_the_finding_the_warning_and_the_source_readable(copied, strip, tmp_path):
    change_all(*copied, SeriesNumber=99999, SeriesDescription="Kopf nativ, Weichteilfenster, Ärzte" + " lang" * 5)
    titles = list(series_of(*copied, strip, tmp_path / "out", finding=Finding("a" * 32), problems=ODD).values())
    assert titles[0] == f"{'a' * 15}, CAUTION: AI key slices, research only, of 99999"
    assert titles[1].startswith(f"{'a' * 19}, CAUTION: AI report")
    plain = list(series_of(*copied, strip, tmp_path / "short", finding=Finding("any")).values())
    assert plain[0] == "any: AI key slices, research only, of 99999 Kopf nativ, Weichtei"
    assert all(len(title) <= 64 for title in (*titles, *plain))


def test_a_report_has_about_a_kilobyte_a_slice(scans, results, strip, tmp_path):
    row, root = scans["single"]
    shorter = write(row.cut(range(8)), root, strip, tmp_path / "shorter", interval_positions=(4, 7))
    assert results["single"][SR].stat().st_size - shorter[SR].stat().st_size < 1250 * (len(row) - 8)


def secrets_of(headers: list[pydicom.Dataset]) -> set[bytes]:
    """Every text, date and UID of the source's headers, in the encodings that a file may have them in."""
    values = [
        str(element.value)
        for header in headers
        for element in small.everything(header)
        if element.VR in ("PN", "LO", "SH", "LT", "ST", "DA", "TM", "AS")
        or (element.VR == "UI" and not element.value.startswith("1.2.840.10008."))
    ]
    words = {word for value in values for word in (value, *value.split("^")) if len(word) > 3}
    return {word.encode(code) for word in words for code in ("utf-8", "latin-1")}


def without_new_uids(file: Path, secrets: set[bytes]) -> bytes:
    """A file's bytes but for UIDs that are not the source's: their random digits may hold any time of day."""
    content, elements = file.read_bytes(), small.everything(pydicom.dcmread(file))
    for uid in {element.value.encode() for element in elements if element.VR == "UI"} - secrets:
        content = content.replace(uid, b"")
    return content


@pytest.mark.slow(but="single")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_patient_is_left(scans, results, strip, tmp_path, kind):
    headers = small.sources(*scans[kind])
    secrets = secrets_of(headers)
    assert {b"MRN-4711", "Löwenherz".encode(), b"19470321", b"ACC-99812", b"Springfield General"} < secrets
    assert headers[0].StudyInstanceUID.encode() in secrets
    anonymous = write(*scans[kind], strip, tmp_path / "anonymous", anonymize=True)
    for name in RESULTS:
        leaked = {word for word in secrets if word in without_new_uids(anonymous[name], secrets)}
        assert leaked == set(), name
        assert len({word for word in secrets if word in results[kind][name].read_bytes()}) > 10  # the search can find


def test_anonymous_results_say_so_and_agree_with_each_other(scans, strip, tmp_path):
    row, root = scans["single"]
    key, report, picture = read = list(read_all(write(row, root, strip, tmp_path / "out", anonymize=True)).values())
    for written in read:
        assert written.PatientIdentityRemoved == "YES"
        assert written.DeidentificationMethodCodeSequence[0].CodeValue == "113100"
        assert written.PatientName.family_name == "ANONYMOUS"
        assert written.PatientID == key.PatientID != ""
        assert written.StudyInstanceUID == key.StudyInstanceUID
        assert written.ContentDate == "19000101"
        assert not any(
            written[name].value for name in ("StudyDate", "PatientBirthDate", "PatientSex", "AccessionNumber")
        )
        dates = {element.value for element in small.everything(written) if element.VR in ("DA", "DT")}
        assert dates <= {"19000101", ""}
    measured = report.ContentSequence[-1].ContentSequence[0].ContentSequence
    slices = [small.of_images(item.ContentSequence)[0] for item in measured if item.ValueType == "NUM"]
    assert len(set(slices)) == len(row)
    chosen = [slices[number] for number in KEYS]  # the n-th of the report is the n-th of the scan
    assert small.of_images(key.ContentSequence) == chosen == small.references(picture.SourceImageSequence)
    (study,) = report.CurrentRequestedProcedureEvidenceSequence
    assert study.StudyInstanceUID == report.StudyInstanceUID


def test_one_study_stays_one_study_within_a_run_and_no_longer(copied, scans, strip, tmp_path, monkeypatch):
    def pseudonyms(row: ScanRow, root: Path, out: str) -> tuple[str, str]:
        read = pydicom.dcmread(write(row, root, strip, tmp_path / out, anonymize=True)[KOS])
        return read.PatientID, read.StudyInstanceUID

    first = pseudonyms(*copied, "first")
    change_all(*copied, SeriesInstanceUID="1.2.3")
    assert pseudonyms(*copied, "second") == first
    patient, study = pseudonyms(*scans["jpeg2000"], "third")  # of the same patient
    assert patient == first[0]
    assert study != first[1]
    with monkeypatch.context() as patch:
        patch.setattr(source_series, "_SECRET", "another run's")
        assert not set(pseudonyms(*copied, "fourth")) & set(first)
    unknown = []
    for study in ("1.2.3", "1.2.4"):
        change_all(*copied, PatientID="", StudyInstanceUID=study)
        unknown.append(pseudonyms(*copied, study)[0])
    assert len(set(unknown)) == 2  # patients without an id stay apart
