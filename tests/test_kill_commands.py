"""A sample of `make kills`: commands that are killed end with the bytes of an uninterrupted run, and leave nothing."""

import json
import subprocess
import sys

import pytest

import kill_commands

SAMPLE = ("split", "store import", "encode", "predict", "predict features")


@pytest.mark.slow
def test_killed_commands_leave_no_trace():
    words = [sys.executable, kill_commands.__file__, "--kills", "2", "--commands", ",".join(SAMPLE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])["kills"]
    assert set(kills) == set(SAMPLE)
    assert min(kills.values()) >= 2


def test_the_comparison_can_fail(tmp_path):
    for name, slope, seconds in (("one", 1, 2.0), ("other", 1, 3.0), ("third", 2, 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps({"slope": slope, "seconds": seconds, "seal": seconds}))
    (tmp_path / "other" / "empty").mkdir()
    one, other, third = (kill_commands.contents(tmp_path / name) for name in ("one", "other", "third"))
    assert one["report.json"] == other["report.json"] != third["report.json"]
    assert other.keys() - one.keys() == {"empty/"}
