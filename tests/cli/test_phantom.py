"""`nguide phantom` writes a dataset, says what is odd about it, and names mistakes without a traceback."""

import json

import pytest
from typer import Typer
from typer.testing import CliRunner

from normal_guidance.cli.commands import Commands
from normal_guidance.cli.scans import phantom

app = Typer(cls=Commands)
app.command()(phantom)
app.callback()(lambda: None)  # so that the command keeps its name

SMALL = ("--size", "32", "--slices", "12", "--scans", "3")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["phantom", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_a_dataset_is_written_and_described(tmp_path):
    code, text = run("rsna-ich", tmp_path / "out", *SMALL, "--positive", "0.34", "--oddities", "tilt")
    assert code == 0, text
    assert "3 scans of 3 patients, 1 positive" in text
    assert "tilt, gantry tilted by 14.0 degrees" in text
    truth = json.loads((tmp_path / "out" / "phantom.json").read_text())
    assert truth["options"]["oddities"] == ["tilt"]
    assert len(list((tmp_path / "out" / "stage_2_train").iterdir())) == sum(len(s["files"]) for s in truth["scans"])


def test_all_oddities_of_the_layout(tmp_path):
    code, text = run("folder", tmp_path / "out", "--size", "32", "--slices", "12", "--scans", "16", "--oddities", "all")
    assert code == 0, text
    assert "multi_frame" in text
    assert "indeterminate" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rsna-xy",), "layout 'rsna-xy' is unknown"),
        (("folder", "--oddities", "tilt,tilt"), "'tilt' is empty or given twice"),
        (("folder", "--oddities", "snow"), "oddity 'snow' is unknown"),
        (("folder", "--compression", "zip"), "compression 'zip' is unknown"),
        (("folder", "--anatomy", "knee"), "anatomy 'knee' is unknown"),
    ],
)
def test_mistakes_are_named(tmp_path, arguments, message):
    layout, *options = arguments
    code, text = run(layout, tmp_path / "out", *SMALL, *options)
    assert code == 2
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()
