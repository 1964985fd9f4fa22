"""`nguide bundle` and `nguide predict` as a user runs them: what is said, what is written, which exit code."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import nibabel
import numpy as np
import pytest
from pydicom import dcmread

from normal_guidance.base import files
from normal_guidance.base.files import FORMAT, read_json
from normal_guidance.clinic import load_bundle, write_predictions
from normal_guidance.clinic.predict.job import COMMAND
from normal_guidance.clinic.results import result_folder
from normal_guidance.clinic.results.result_folder import write_scan
from normal_guidance.clinic.viewer.gallery import open_gallery
from normal_guidance.fit import bundle as bundles
from normal_guidance.front.predicted import predict
from normal_guidance.scans.features.encoders import Encoder
from orthanc import DICOMWEB, MISSING, ORTHANC, running_orthanc
from small_bundle import copy_series, tiny, use_tiny
from small_command import document, nguide
from small_disk import small_disk
from small_files import rows_of_csv


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    use_tiny(monkeypatch)


@pytest.fixture
def scans(trained, tmp_path) -> Path:
    """A scan to predict, and one of another modality."""
    for name, number, modality in (("good", 0, "CT"), ("mr", 1, "MR")):
        row = trained.manifest[number]
        copy_series(row, trained.manifest.root, tmp_path / "in" / name, Modality=modality)
    return tmp_path / "in"


def record_writing(patch: pytest.MonkeyPatch, most: int | None = None) -> list[str]:
    """The scans that are written from now on; Ctrl-C comes before the one after the first `most`."""
    written: list[str] = []

    def write(prediction, *rest):
        if len(written) == most:
            raise KeyboardInterrupt
        written.append(prediction.row.scan_id)
        return write_scan(prediction, *rest)

    patch.setattr(result_folder, "write_scan", write)
    return written


@pytest.fixture
def predicting(trained, tmp_path) -> Callable[..., tuple[object, ...]]:
    """The words that predict scans into the folder `out`."""

    def words(*scans: object, out: str = "out") -> tuple[object, ...]:
        return ("predict", *scans, "-m", trained.run, "-o", tmp_path / out, "--workers", 0)

    return words


def test_from_a_run_to_a_bundle_to_a_prediction(trained, scans, tmp_path):
    said = nguide("bundle", trained.run, "-o", tmp_path / "bundle", "--sensitivity", 1.0).stdout
    assert "ng on tiny, made for CT, axial" in said
    assert document("bundle", trained.run, "-o", tmp_path / "json") == read_json(tmp_path / "json" / "bundle.json")
    assert "a sensitivity of at least 1): sensitivity 1.000" in said
    words = ("--model", tmp_path / "bundle", "-o", tmp_path / "out", "--workers", 0)
    assert nguide("predict", scans / "good", *words).stdout.startswith("scan good: probability 0.")
    held = read_json(tmp_path / "out" / "good" / "prediction.json")
    assert held["model"]["operation"]["point"]["target"] == 1.0
    nguide("bundle", trained.run, "-o", tmp_path / "bundle", code=2)


def every_file(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@pytest.mark.parametrize("damage", [None, "report.html", "record"])
def test_a_killed_command_goes_on_and_ends_the_same(trained, scans, tmp_path, monkeypatch, damage, predicting):
    for number in (2, 3):
        copy_series(trained.manifest[number], trained.manifest.root, scans / f"scan{number}")
    out = tmp_path / "out"
    command = predicting(scans)
    said = nguide(*command, code=1)
    whole = every_file(out)
    again = nguide(*command, code=1).stdout
    assert again == f"{out} is complete already; nothing was done; open {out / 'index.html'}\n"
    told = [json.loads(line) for line in nguide(*command, "--json", code=1).stdout.splitlines()]
    assert {one["scan_id"]: one["state"] for one in told} == {
        "good": "predicted",
        "scan2": "predicted",
        "scan3": "predicted",
        "mr": "refused",
    }
    shutil.rmtree(out)

    with monkeypatch.context() as patch:
        record_writing(patch, most=2)
        nguide(*command, code=130)
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out", "out.job"]
    other = ("predict", scans, "-m", trained.run, "-o", out, "--keys", 2)
    assert "with other options: options.keys was 5, now it is 2; choose another" in nguide(*other, code=2).stderr
    if damage == "report.html":
        (out / "good" / "report.html").write_text("changed")
    if damage == "record":
        next((tmp_path / "out.job").glob("*.safetensors")).write_bytes(b"damaged")

    (out / f".scan9.{'0' * 32}.partial").mkdir()  # as a killed process leaves it
    with monkeypatch.context() as patch:
        written = record_writing(patch)
        resumed = nguide(*command, code=1)
    assert len(written) == (1 if damage is None else 2)
    assert every_file(out) == whole
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out"]
    assert resumed.stderr == said.stderr


def test_what_is_refused_or_odd_or_no_scan_does_not_stop_the_rest(scans, tmp_path, predicting):
    """A study with a segmentation in it once always ended with 1, and drafts of a killed process are not scans."""
    count = len(list((scans / "mr").iterdir()))
    shutil.copytree(scans / "good", scans / f".good.{'a' * 32}.partial")
    header = dcmread(next((scans / "good").iterdir()))
    header.SOPClassUID = header.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.66.4"
    header.Modality, header.SeriesInstanceUID = "SEG", "1.2.3"
    (scans / "good" / "other").mkdir()
    header.save_as(scans / "good" / "other" / "seg.dcm")
    said = nguide(*predicting(scans / "good", out="one")).stdout
    assert "1 of 1 scans predicted; " in said
    assert "1 file belongs to no scan (1 no image); see" in said
    assert "other/seg.dcm" in (tmp_path / "one" / "problems.csv").read_text()

    sorted((scans / "good").glob("*.dcm"))[3].unlink()
    (scans / "notes.txt").write_text("no image")
    result = nguide(*predicting(scans), code=1)
    assert "scan good: probability" in result.stdout
    assert f"; problems: 1 gap, see {tmp_path / 'out' / 'good'}\n" in result.stdout
    assert "1 of 2 scans predicted, 1 refused; " in result.stdout
    assert f"2 files belong to no scan (2 no image); see {tmp_path / 'out' / 'problems.csv'}\n" in result.stdout
    assert result.stderr == f"scan mr: refused: Modality is MR, not CT ({count} files) (--force goes on)\n"
    forced = nguide(*predicting(scans, out="forced"), "--force").stdout
    assert "; CAUTION: Forced: its modality is MR; the model was trained on CT" in forced
    assert read_json(tmp_path / "forced" / "summary.json")["options"]["force"] is True


def test_the_sentence_and_the_summary_count_the_same(trained, scans, tmp_path, predicting):
    """A scan without DICOM results is predicted: once "0 of 9 scans predicted" stood above eight predictions."""
    for number in (2, 3):
        row = trained.manifest[number]
        files = copy_series(row, trained.manifest.root, scans / f"twins{number}")
        for file in files:  # slices with one UID: results could not say which one they mean
            header = dcmread(file)
            header.SOPInstanceUID = "1.2.3"
            header.save_as(file)
    words = (*predicting(scans), "--dicom")
    said = nguide(*words, code=1).stdout
    assert "3 of 4 scans predicted, 1 refused; 2 lack DICOM results (for instance: scan 'twins" in said
    summary = read_json(tmp_path / "out" / "summary.json")
    assert summary["counts"] == {"predicted": 3, "refused": 1, "failed": 0}
    lacks = {line["scan_id"]: line["lacks"] for line in summary["scans"]}
    assert lacks == {"good": None, "mr": None, "twins2": "DICOM results", "twins3": "DICOM results"}
    assert "3 of 4 scans predicted, 1 refused; 2 lack DICOM results (" in (tmp_path / "out/index.html").read_text()


def test_json_is_one_object_a_scan(scans, tmp_path, predicting):
    words = predicting(scans / "good", scans / "mr")
    result = nguide(*words, "--keys", 2, "--share", 0.9, "--json", code=1)
    refused, good = map(json.loads, result.stdout.splitlines())
    assert (refused["scan_id"], refused["state"]) == ("mr", "refused")
    assert (good["state"], len(good["key_slices"])) == ("predicted", 2)
    assert (good["positive"], good["interval"]) == (False, None)
    assert good["format"] == FORMAT, "which a program may ask for, as in the file"
    file = read_json(tmp_path / "out" / "good" / "prediction.json")
    assert file.items() <= good.items()


def test_a_volume_has_no_dicom_results_but_all_others(trained, tmp_path, predicting):
    row = trained.manifest[0]
    volume = np.random.default_rng(0).uniform(-1024, 1500, (16, 16, len(row))).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([1.0, 1.0, row.slice_spacing, 1.0])), tmp_path / "v.nii.gz")
    words = (*predicting(tmp_path / "v.nii.gz"), "--dicom")
    result = nguide(*words, code=1)
    assert "scan v: no DICOM results: " in result.stderr
    assert "1 of 1 scans predicted; 1 lacks DICOM results (scan 'v' is the NIfTI file v.nii.gz" in result.stdout
    assert nguide(*words, code=1).stdout.startswith(f"{tmp_path / 'out'} is complete")
    assert (tmp_path / "out" / "v" / "report.html").exists()


def test_names_of_any_script_go_all_the_way(trained, tmp_path, monkeypatch, predicting):
    """Once every such scan was called `scan`, `scan-2`, ...: two patients were told apart by the order of folders."""
    given = {
        "頭部CT 山田": "頭部CT-山田",
        "أحمد": "أحمد",
        "José": "José",
        "日" * 80: "日" * 50,
        "日" * 80 + "月": "日" * 50 + "-2",
        "👍": "scan",
        "con": "scan-con",
        "<b>‮'": "b",
    }
    for number, name in enumerate(given):
        row = trained.manifest[number]
        copy_series(row, trained.manifest.root, tmp_path / "in" / name, SeriesInstanceUID=f"1.2.{number + 3}")
    out = tmp_path / "out"
    command = (*predicting(tmp_path / "in"), "--dicom")
    with monkeypatch.context() as patch:
        written = record_writing(patch, most=4)
        nguide(*command, code=130)
    with monkeypatch.context() as patch:
        rest = record_writing(patch)
        nguide(*command)
    assert sorted(written + rest) == sorted(given.values())  # each was written once
    assert {path.name for path in out.iterdir() if path.is_dir()} == set(given.values())
    assert {row["scan_id"] for row in rows_of_csv(out / "summary.csv")} == set(given.values())
    links = re.findall(r"<a href='([^']+/report.html)' ", (out / "index.html").read_text(encoding="utf-8"))
    assert {unquote(link) for link in links} == {f"{name}/report.html" for name in given.values()}
    for name in given.values():
        assert read_json(out / name / "prediction.json")["scan_id"] == name
        assert dcmread(out / name / "dicom" / "structured_report.dcm").Modality == "SR"
        assert f"<h1>Scan {name}</h1>" in (out / name / "report.html").read_text(encoding="utf-8")
    gallery = open_gallery(out)
    assert set(gallery.manifest.scan_ids) == set(given.values())
    assert {one["id"]: one["positive"] for one in gallery.scans(0)} == {
        name: [read_json(out / name / "prediction.json")["positive"]] for name in given.values()
    }
    said = [json.loads(line)["scan_id"] for line in nguide(*command, "--json").stdout.splitlines()]
    assert sorted(said) == sorted(given.values())


PROGRAM = Path(__file__).parents[1] / "node_program.py"


def test_two_at_once_are_one(trained, scans, tmp_path):
    """Both once succeeded, and the summary held the scan of one of them."""
    out = tmp_path / "out"
    (tmp_path / "gate").mkdir()
    options = ("-m", trained.run, "--workers", 0, "-o")
    words = [sys.executable, PROGRAM, "predict", scans / "good", *options, out]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen([*map(str, words)], env=os.environ | {"NODE_GATE": str(tmp_path / "gate")}, **pipes)
    try:
        while not (tmp_path / "gate" / "began").exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        same = nguide("predict", scans / "good", *options, out, code=2)
        assert (
            f"{out}.job is being written by process {first.pid} on {socket.gethostname()}; wait until it ends, or "
            "choose another folder\n"
        ) in same.stderr
        (tmp_path / "link").symlink_to(out)  # another name for the same folder
        assert "being written by" in nguide("predict", scans / "good", *options, tmp_path / "link", code=2).stderr
        other = nguide("predict", scans / "mr", *options, out, "--force", code=2)
        assert "holds predictions of another model, of other scans or with other options" in other.stderr
        assert len(same.stderr.splitlines()) == len(other.stderr.splitlines()) == 1
        (tmp_path / "gate" / "go").touch()
        said, errors = first.communicate()
        assert (first.returncode, errors) == (0, "")
        assert "1 of 1 scans predicted" in said
    finally:
        first.kill()
        first.wait()
    assert [line["scan_id"] for line in read_json(out / "summary.json")["scans"]] == ["good"]
    assert (out / "good" / "report.html").exists()
    assert not (tmp_path / "out.job").exists()


@pytest.mark.parametrize("scan", ["good", "mr"])
def test_results_that_another_process_completed_meanwhile_stay(trained, scans, tmp_path, monkeypatch, scan):
    """The other one began and ended while this one read its scans, so there is neither a lock nor a job."""
    out, kept = tmp_path / "out", {}

    def load(name: str, **_: object) -> Encoder:
        if not kept:
            kept["nothing yet"] = b""
            one = next(iter(predict(scans / "good", load_bundle(trained.run), encoder=tiny())))
            write_predictions([one], load_bundle(trained.run), out, about={COMMAND: {"scans": "of the other"}})
            kept.update(every_file(out))
        return tiny()

    monkeypatch.setattr(bundles, "load_encoder", load)
    words = ("predict", scans / scan, "-m", trained.run, "-o", out, "--workers", 0, "--force")
    said = nguide(*words, code=2).stderr
    assert said == (
        f"error: {out} was written by another process meanwhile, and is complete; open {out / 'index.html'}, or choose "
        "another folder (-o)\n"
    )
    assert {"nothing yet": b"", **every_file(out)} == kept
    assert not (tmp_path / "out.job").exists()


PLACES = {
    "scan": ["strip.png", "structured_report.dcm", "prediction.json", "report.html"],
    "records": ["config.json", "good.safetensors"],
    "tables": ["problems.csv", "summary.csv", "predictions.parquet", "manifest.parquet", "index.html", "summary.json"],
}
"""Files that predict writes, in their order."""


@pytest.mark.slow(but="scan")
@pytest.mark.parametrize("place", PLACES)
def test_a_full_disk_is_told_and_resumed_from(scans, tmp_path, monkeypatch, place, predicting):
    nguide(*predicting(scans / "good", out="whole"), "--dicom")
    for name in PLACES[place]:

        def sync(file, original=files.sync, name=name):
            if f"/.{name}." in file.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(file)

        with monkeypatch.context() as patch:
            patch.setattr(files, "sync", sync)
            said = nguide(*predicting(scans / "good"), "--dicom", code=74).stderr
        line = said.splitlines()[-1]
        assert line.startswith("error: no space left on device (")
        assert f" at {tmp_path / 'out'}; free some space, or choose a folder on another disk; " in line
        assert line.endswith("; start the same command again to go on")
        assert "Traceback" not in said
    nguide(*predicting(scans / "good"), "--dicom")
    assert known(every_file(tmp_path / "out")) == known(every_file(tmp_path / "whole"))


def known(content: dict[str, bytes]) -> dict[str, bytes]:
    """The files; only their names where they hold the time of writing."""
    return {name: b"" if name.endswith(".dcm") else held for name, held in content.items()}


def test_folders_for_dicom_results_on_a_full_disk(scans, tmp_path, monkeypatch, predicting):
    """A folder that cannot be made was once taken for the scan's fault: exit code 1, and no DICOM results for ever."""
    made = Path.mkdir

    def mkdir(self, *arguments, **options):
        if self.name == "dicom":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return made(self, *arguments, **options)

    words = (*predicting(scans / "good"), "--dicom")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        assert "No space left on device" in nguide(*words, code=74).stderr
    nguide(*words)
    assert (tmp_path / "out" / "good" / "dicom" / "strip.dcm").exists()


@pytest.mark.parametrize("room", ["40k", "100k", "200k"])
def test_a_disk_that_is_really_full(trained, scans, tmp_path, room):
    """The strip is larger than the first two, the page than the third."""
    with small_disk(tmp_path / "disk", room) as disk:
        command = ("predict", scans / "good", "-m", trained.run, "-o", disk / "out", "--workers", 0)
        said = nguide(*command, code=74).stderr
        assert said.splitlines()[-1].startswith("error: no space left on device (")
        assert said.endswith("; start the same command again to go on\n")
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        nguide(*command)


@pytest.fixture
def usual_umask():
    """The umask of most machines: files are readable for everyone."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, set[int]]:
    """The permissions of all files, and those of all folders, below a folder and of itself."""
    every = [folder, *folder.rglob("*")]
    return {
        "files": {one.stat().st_mode & 0o777 for one in every if one.is_file()},
        "folders": {one.stat().st_mode & 0o777 for one in every if one.is_dir()},
    }


def test_only_the_user_may_read_what_is_written(trained, scans, tmp_path, monkeypatch, usual_umask, predicting):
    copy_series(trained.manifest[2], trained.manifest.root, scans / "second")
    command = (*predicting(scans), "--dicom")
    with monkeypatch.context() as patch:
        record_writing(patch, most=1)
        nguide(*command, code=130)
    private = {"files": {0o600}, "folders": {0o700}}
    assert modes(tmp_path / "out.job") == modes(tmp_path / "out") == private
    nguide(*command, code=1)
    assert modes(tmp_path / "out") == private
    kinds = {one.suffix for one in (tmp_path / "out").rglob("*") if one.is_file()}
    assert kinds == {".csv", ".dcm", ".html", ".json", ".parquet", ".png", ".jpg"}
    assert os.umask(0o022) == 0o022  # a program that runs the command keeps its own


@pytest.mark.skipif(ORTHANC is None or not DICOMWEB.exists(), reason=MISSING)
def test_a_study_comes_from_a_server_and_its_results_go_there(trained, tmp_path):
    row, root = trained.manifest[0], trained.manifest.root
    uids = {"StudyInstanceUID": "1.2.3", "SeriesInstanceUID": "1.2.3.1"}
    files = copy_series(row, root, tmp_path / "files", **uids)
    nguide("predict", tmp_path / "files", "--model", trained.run, "-o", tmp_path / "local", "--workers", 0)
    with running_orthanc(tmp_path / "orthanc") as archive:
        for file in files:
            archive.store(file)
        study, out = f"{archive.dicomweb}/studies/1.2.3", tmp_path / "out"
        words = ("predict", study, "--model", trained.run, "-o", out, "--store", archive.dicomweb, "--workers", 0)
        assert "1 of 1 scans" in nguide(*words).output
        stored = sorted(one["MainDicomTags"]["Modality"] for one in archive.series())
        assert stored.count("SR") == 1
        assert len({one["ParentStudy"] for one in archive.series()}) == 1
        assert "complete already" in nguide(*words).output  # what is stored again is not a second result
        assert sorted(one["MainDicomTags"]["Modality"] for one in archive.series()) == stored
        (name,) = {path.name for path in out.iterdir() if path.is_dir()}
        local = read_json(tmp_path / "local" / "files" / "prediction.json")
        assert read_json(out / name / "prediction.json")["probability"] == pytest.approx(local["probability"], abs=1e-6)
        said = nguide("predict", archive.dicomweb, "--model", trained.run, "-o", tmp_path / "x", code=2).output
        assert "names no study" in said
