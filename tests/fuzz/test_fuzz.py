"""A sample of the fuzzing finds nothing, and fuzzing finds every defect that is planted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
SOURCES = ("rsna-ich", "rsna-pe", "rsna-at", "folder")
FEATURES = ("npz", "npy", "pt", "hdf5", "hdf5 outward", "parquet", "torchmil", "table", "store")
OWN = ("index", "splits", "store", "job", "run", "study", "bundle")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by Linux's /proc")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Cases that are run alone leave their folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("fuzz")))
        yield


def fuzz(*arguments: str) -> tuple[int, dict, str]:
    done = subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=3600)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_a_sample_of_mutated_files_tables_and_features_finds_nothing():
    code, report, output = fuzz("--cases", "440", "--seed", "2024", "--patience", "600")
    assert report["findings"] == [], output
    assert code == 0
    kinds = {
        "header",
        "pixels",
        "volume",
        "nifti",
        "archive",
        *(f"{what} of {source}" for what in ("files", "table") for source in SOURCES),
        *(f"features: {name}" for name in FEATURES),
        *(f"own: {name}" for name in OWN),
    }
    assert report["cases"] == 440
    assert set(report["outcomes"]) == kinds
    read = sum(counts.get("read", 0) for counts in report["outcomes"].values())
    assert 0 < read < report["cases"], "nothing, or everything, can still be read: the damage is wrong"


@pytest.mark.slow
def test_a_sample_of_flipped_bits_is_refused_or_changes_nothing():
    words = [sys.executable, str(RUN.with_name("flips.py")), "--per-file", "5", "--jobs", "1", "--seed", "5"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {Path(file).parts[0] for file in report["files"]} == set(OWN)
    assert report["findings"] == 0
    assert report["outcomes"]["refused"] > 140, done.stdout
    assert set(report["files"]["study/ng/1/report.json"]) <= {"refused", "same"}


EXPECTED = {
    "traceback": {"FINDING: traceback"},
    "warning": {"FINDING: traceback"},
    "hang": {"FINDING: hang"},
    "write": {"FINDING: outside"},
    "write above": {"FINDING: outside"},
    "write input": {"FINDING: outside"},
    "link": {"FINDING: outside"},
    "native write": {"FINDING: outside"},
    "read": {"FINDING: outside"},
    "memory": {"FINDING: memory"},
    "asked": {"FINDING: memory"},
    "abort": {"FINDING: crash"},
    "decoder": {"decoder died: SIGABRT"},
    "mute": {"FINDING: wrong"},
    "good": {"read"},
    "good error": {"user error"},
}


@pytest.fixture(scope="module")
def planted() -> tuple[int, dict, str]:
    return fuzz("--of", str(RUN.with_name("planted.py")), "--cases", "34", "--seed", "7", "--patience", "15")


@pytest.mark.slow
def test_planted_defects_are_found(planted):
    code, report, output = planted
    assert {kind: set(counts) for kind, counts in report["outcomes"].items()} == EXPECTED, output
    assert code == 1


@pytest.mark.slow
def test_a_finding_says_how_to_repeat_it(planted):
    _, report, output = planted
    finding = next(finding for finding in report["findings"] if finding["of"] == "traceback")
    assert finding["detail"] == "KeyError: 'Rows'"
    assert f"run.py --seed 7 --case {finding['case']}" in output
    again = fuzz("--of", str(RUN.with_name("planted.py")), "--seed", "7", "--case", str(finding["case"]))
    assert again[1]["findings"] == [finding]
    assert "Traceback" in again[2]
