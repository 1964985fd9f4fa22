"""Scans from a real DICOMweb server and results to it; wrong addresses and answers end in one sentence."""

import pytest
from pydicom import dcmread

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.predict.dicomweb import TOKEN, DicomWeb, fetch_all, parse_place
from orthanc import DICOMWEB, MISSING, ORTHANC, running_orthanc
from small_bundle import copy_series

pytestmark = pytest.mark.skipif(ORTHANC is None or not DICOMWEB.exists(), reason=MISSING)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_orthanc(tmp_path_factory.mktemp("orthanc")) as running:
        yield running


@pytest.fixture(scope="module")
def stored(server, trained, tmp_path_factory):
    files = []
    for number in (1, 2):
        out = tmp_path_factory.mktemp(f"series-{number}")
        uids = {"StudyInstanceUID": "1.2.3", "SeriesInstanceUID": f"1.2.3.{number}", "StudyDate": "20261118"}
        files += copy_series(trained.manifest[0], trained.manifest.root, out, **uids)
    DicomWeb(server.dicomweb).store(files)
    return files


def test_what_is_fetched_is_what_was_stored(server, stored, tmp_path):
    folders = fetch_all(parse_place(f"{server.dicomweb}/studies/1.2.3"), tmp_path, ("CT",))
    assert len(folders) == 2
    fetched, expected = (
        {dataset.SOPInstanceUID: dataset for dataset in map(dcmread, files)}
        for files in ([file for folder in folders for file in folder.iterdir()], stored)
    )
    assert fetched == expected
    (only,) = fetch_all(parse_place(f"{server.dicomweb}/studies/1.2.3/series/1.2.3.2"), tmp_path / "one", ("CT",))
    assert {dcmread(file).SeriesInstanceUID for file in only.iterdir()} == {"1.2.3.2"}


def test_series_are_found_by_study_modality_and_date_and_an_incomplete_one_is_not_taken(server, stored, tmp_path):
    client = DicomWeb(server.dicomweb)
    facts = {(series.series_uid, series.slices, series.modality) for series in client.series("1.2.3")}
    assert facts == {(uid, len(stored) // 2, "CT") for uid in ("1.2.3.1", "1.2.3.2")}
    assert len(client.series(since="20261118")) == 2
    assert client.series(since="20261119") == client.series(modality="MR") == []
    (series,) = client.series("1.2.3", "1.2.3.1")
    with pytest.raises(UserError, match="objects of series"):
        client.fetch(series._replace(slices=series.slices + 1), tmp_path)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("{web}/studies/9.9", "has no series of study 9.9"),
        ("{web}-not-there/studies/1.2.3", "HTTP status 404"),
        ("https://pacs.invalid/web/studies/1.2.3", "cannot be reached"),
        ("http://pacs.hospital/web/studies/1.2.3", "is not https"),
        ("{web}/studies/1.2.3/instances/1", "after the study"),
        ("{web}/studies/../1", "is not a UID"),
        ("https://me:secret@pacs/web", "is not the address"),
        ("{web}/studies/1.2.3", "none of MR"),
    ],
)
def test_wrong_places_and_other_modalities_are_told(server, stored, tmp_path, monkeypatch, place, words):
    monkeypatch.setenv(TOKEN, "secret")  # which is not sent in the clear
    with pytest.raises(UserError, match=words) as told:
        fetch_all(parse_place(place.format(web=server.dicomweb)), tmp_path / "x", ("MR",))
    assert "\n" not in str(told.value)
