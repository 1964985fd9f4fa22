"""A dataset is the same for the same seed, complete or absent, and only its pixels reveal its labels."""

from operator import attrgetter
from pathlib import Path

import numpy as np
import pydicom
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json
from normal_guidance.scans.phantom.drafts import make_draft
from normal_guidance.scans.phantom.phantom_files import LAYOUTS, write_phantom
from normal_guidance.scans.phantom.plan import plan

SMALL = {"size": 32, "slices": 12}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow(but="rsna-ich")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_seed_gives_the_same_bytes(tmp_path, layout):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_phantom(layout, tmp_path / name, scans=2, seed=seed, compression="mixed", oddities=("gaps",), **SMALL)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


@pytest.mark.slow(but="rsna-ich")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_pixels_and_tables_give_the_label_away(tmp_path, layout):
    """With all scans positive or none, names, sizes and headers of the files are the same."""
    files = {}
    for name, share in (("all", 1.0), ("none", 0.0)):
        write_phantom(layout, tmp_path / name, scans=4, seed=5, positive=share, **SMALL)
        files[name] = {file: path for path, file in _dicom_files(tmp_path / name)}
    assert files["all"].keys() == files["none"].keys()
    different = 0
    for file, path in files["all"].items():
        one, other = pydicom.dcmread(path), pydicom.dcmread(files["none"][file])
        assert path.stat().st_size == files["none"][file].stat().st_size
        different += one.PixelData != other.PixelData
        for dataset in (one, other):
            del dataset.PixelData
        assert one == other
    assert 0 < different < len(files["all"])


def _dicom_files(folder: Path) -> list[tuple[Path, str]]:
    return [(path, path.relative_to(folder).as_posix()) for path in sorted(folder.rglob("*.dcm"))]


@pytest.mark.parametrize("layout", ["rsna-ich", "rsna-at"])
def test_names_and_uids_do_not_rank_positive_scans(layout):
    plans = plan(LAYOUTS[layout].anatomy, 300, seed=2, positive=0.5)
    labels = np.array([one.label for one in plans])
    drafts = [make_draft(one, np.zeros((one.slices, 1, 1), np.int16), *LAYOUTS[layout].ids(one)) for one in plans]
    for key in ("series_uid", "study_uid", "patient_id", "scan_id", "date", "encoding.intercept"):
        values = [attrgetter(key)(draft) for draft in drafts]
        ranks = np.unique(values, return_inverse=True)[1]
        assert ranks.max() == 0 or abs(np.corrcoef(ranks, labels)[0, 1]) < 0.2, key


def test_uids_are_unique(tmp_path):
    write_phantom("rsna-pe", tmp_path / "out", scans=4, **SMALL)
    headers = [pydicom.dcmread(path, stop_before_pixels=True) for path, _ in _dicom_files(tmp_path / "out")]
    assert len({one.SOPInstanceUID for one in headers}) == len(headers)
    assert len({one.SeriesInstanceUID for one in headers}) == len({one.StudyInstanceUID for one in headers}) == 4


def test_phantom_json_is_what_is_returned(tmp_path):
    truth = write_phantom("folder", tmp_path / "out", scans=2, anatomy="chest", **SMALL)
    assert read_json(tmp_path / "out" / "phantom.json") == truth
    assert truth["anatomy"] == "chest"
    assert truth["options"]["size"] == 32


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="not empty"):
        write_phantom("folder", tmp_path, scans=1, **SMALL)
    assert contents(tmp_path) == {"mine.txt": b"keep"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "rsna"}, "layout 'rsna' is unknown; choose one of rsna-ich, rsna-pe, rsna-at, folder"),
        ({"size": 8}, "size is 8"),
        ({"contrast": -1.0}, "contrast is -1.0"),
        ({"contrast": float("nan")}, "contrast is nan"),
        ({"compression": "zip"}, "compression 'zip' is unknown; choose one of none, rle"),
        ({"anatomy": "chest"}, "anatomy 'chest': scans of rsna-ich are of the head; use folder"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        write_phantom(**{"layout": "rsna-ich", "out": tmp_path / "out", "scans": 1, **options})
    assert not (tmp_path / "out").exists()
