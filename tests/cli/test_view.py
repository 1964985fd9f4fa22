"""`nguide view` from the outside: what it prints, what it refuses, and how it ends."""

import shutil
import signal
import subprocess
import sys

import httpx
import pytest

from killing import signals_of_a_terminal
from normal_guidance.clinic.viewer import server
from normal_guidance.clinic.viewer.gallery import open_gallery
from normal_guidance.sweep.predictions import write_predictions_table
from small_command import nguide, output_of


def test_a_folder_without_a_predicted_scan_is_told(tmp_path):
    write_predictions_table(tmp_path / "predictions.parquet", [])
    said = output_of("view", tmp_path, code=2)
    assert "no scan in it was predicted; its summary.csv says why" in said


def test_anonymous_results_say_why_there_are_no_images(small_experiment, tmp_path, monkeypatch):
    """Where the scans lie is left out of them on purpose, so --index would not help."""
    shutil.copy(next(small_experiment.folder.glob("ng/*/predictions.parquet")), tmp_path)
    monkeypatch.setattr(server, "serve", lambda gallery, port, announce: None)
    assert "images: no, give --index INDEX to see them" in nguide("view", tmp_path).stdout
    (tmp_path / "summary.json").write_text('{"anonymous": true}')
    said = "images: no, anonymous results do not record where the scans are; predict without --anonymize to see them"
    assert said in nguide("view", tmp_path).stdout
    (missing,) = open_gallery(tmp_path).about()["missing"]
    assert "these results are anonymous" in missing["why"]
    assert missing["command"].startswith("nguide predict SCAN")


PAGE = """
from normal_guidance.clinic.viewer import server
server.read_page = lambda static: {"/": (b"<title>drawn</title>", "text/html")}
"""
"""In place of the page, which is not built everywhere."""

SLOW = """
import asyncio, time
from normal_guidance.cli import endings
close = asyncio.Runner.close
def slowly(runner):
    time.sleep(3 * endings.SECONDS_TO_NOTICE)
    close(runner)
asyncio.Runner.close = slowly
"""
"""The event loop closes so slowly that the signal is repeated meanwhile."""

MAIN = "from normal_guidance.cli.__main__ import main\nmain()"


@pytest.mark.slow(but=("SIGINT", "SIGHUP"))
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        pytest.param(signal.SIGINT, 0, "", id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, "terminated; nothing was written\n", id="SIGTERM"),
        pytest.param(signal.SIGHUP, 129, "terminal closed; nothing was written\n", id="SIGHUP"),
    ],
)
def test_it_prints_an_address_and_serves_until_a_signal(small_experiment, number, code, line):
    """Ctrl-C is its normal end, and other signals are not."""
    words = [sys.executable, "-c", PAGE + SLOW + MAIN, "view", str(small_experiment.folder), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, preexec_fn=signals_of_a_terminal) as process:
        try:
            images, opened, _ = (process.stdout.readline() for _ in range(3))
            address, _, token = opened.split()[1].partition("#token=")
            with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}) as client:
                page = client.get("/").text
                first, second = client.get("/api/gallery").json()["splits"]
            process.send_signal(number)
            _, complaints = process.communicate(timeout=600)
        finally:
            process.kill()
    assert "images: no, give --index INDEX to see them" in images
    assert page == "<title>drawn</title>"
    assert (first["name"], second["name"]) == ("1001", "2001")
    assert {"ng", "ceiling"} <= {method["name"] for method in first["methods"]}
    assert (process.returncode, complaints) == (code, line)
