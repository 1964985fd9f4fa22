"""A sample of the fuzzing finds nothing, and fuzzing finds every defect that is planted."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")

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


def test_a_sample_of_mutated_files_tables_features_and_flipped_bits_finds_nothing():
    code, report, output = fuzz("--cases", "550", "--seed", "2024", "--patience", "600")
    assert report["findings"] == [], output
    assert code == 0
    assert (report["cases"], len(report["outcomes"])) == (550, 32), "a kind of cases was not run"
    read = sum(counts.get("read", 0) for counts in report["outcomes"].values())
    assert 0 < read < report["cases"], "nothing, or everything, can still be read: the damage is wrong"
    flips = Counter()
    for kind, counts in report["outcomes"].items():
        if kind.startswith("flip: "):
            for outcome, count in counts.items():
                flips[outcome.rpartition(": ")[2]] += count
    assert flips["user error"] > 0.75 * flips.total()
    ends = {outcome.rpartition(": ")[2] for outcome in report["outcomes"]["flip: study"]}
    assert ends <= {"user error", "same"}, "a bit that only people see was flipped in a sealed file"


@pytest.mark.slow
def test_planted_defects_are_found_and_a_finding_says_how_to_repeat_it():
    planted = ("--of", str(RUN.with_name("planted.py")), "--seed", "7")
    code, report, output = fuzz(*planted, "--cases", "34", "--patience", "30")
    ended = {kind: set(counts) for kind, counts in report["outcomes"].items()}
    assert ended == {kind: {kind.partition(" -> ")[2]} for kind in ended}, output
    assert (len(ended), code) == (16, 1)
    finding = next(finding for finding in report["findings"] if finding["of"] == "traceback -> FINDING: traceback")
    assert finding["detail"] == "KeyError: 'Rows'"
    assert f"run.py --seed 7 --case {finding['case']}" in output
    again = fuzz(*planted, "--case", str(finding["case"]))
    assert again[1]["findings"] == [finding]
    assert "Traceback" in again[2]
