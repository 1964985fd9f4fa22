"""A sample of `make kills`: commands that are killed end with the bytes of an uninterrupted run, and leave nothing."""

import json
import sys
from pathlib import Path

import pytest

import kill_commands
from killing import run_program

SAMPLE = ("split", "store import", "encode", "predict", "predict features")


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    return run_program(__file__, tmp_path_factory.mktemp("kills"), "2")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_killed_command_leaves_no_trace(seen, name):
    assert seen[name]["kills"] >= 2
    assert (seen[name]["refused"], seen[name]["different"], seen[name]["left"]) == ([], {}, {})


def test_the_comparison_can_fail(tmp_path):
    for name, slope, seconds in (("one", 1, 2.0), ("other", 1, 3.0), ("third", 2, 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps({"slope": slope, "seconds": seconds, "seal": seconds}))
    (tmp_path / "other" / "empty").mkdir()
    one, other, third = (kill_commands.contents(tmp_path / name) for name in ("one", "other", "third"))
    assert one["report.json"] == other["report.json"] != third["report.json"]
    assert other.keys() - one.keys() == {"empty/"}


if __name__ == "__main__":
    attacked = kill_commands.run(Path(sys.argv[1]), int(sys.argv[2]), 1, SAMPLE, lambda line: None)
    print(json.dumps(kill_commands.report(attacked)))
