"""DICOM results in a hospital's viewer: OHIF in Chromium, on a study that Orthanc serves."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image

from normal_guidance.clinic.dicom.objects import write_dicom
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.clinic.results.scan_pages import draw_strip
from normal_guidance.fit.bundle import ModelIdentity
from normal_guidance.scans.features.windows import parse_windows
from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import Finding, read_manifest
from normal_guidance.scans.index.problems import Problem
from normal_guidance.scans.phantom.phantom_files import write_phantom
from ohif_viewer import serve_viewer
from orthanc import DICOMWEB, MISSING, ORTHANC, running_orthanc
from small_dicom import predicted

playwright_api = pytest.importorskip("playwright.sync_api", reason="PLAYWRIGHT IS MISSING: NO BROWSER TEST RUNS")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
SCREEN = {"width": 1920, "height": 1080}
SOFTWARE_GL = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]

FORCED = Problem("A", "", "unsuitable", "slices are 13.8 mm apart", "predicted because of --force")


@pytest.fixture
def scan(tmp_path) -> ScanPrediction:
    """A positive scan whose key slices are 8, 3 and 6, counted from 1; so are its InstanceNumbers."""
    write_phantom("folder", tmp_path / "scans", scans=1, size=128, slices=12, positive=1.0)
    index("folder", tmp_path / "scans", tmp_path / "index", table=tmp_path / "scans" / "labels.csv")
    manifest = read_manifest(tmp_path / "index")
    return predicted(
        manifest[0],
        manifest.root,
        problems=(FORCED,),
        finding=Finding("any", "1386000", "Intracranial hemorrhage"),
        model=ModelIdentity("8d969eef6ecad3c2" * 4, "ng", "0.1.0", "phantoms", 320, "2026-11-18"),
    )


@pytest.fixture
def page(scan, tmp_path):
    """OHIF's page of a study that Orthanc has, the scan and its results for two findings; its first image is shown."""
    if ORTHANC is None or not DICOMWEB.exists():
        pytest.skip(MISSING)
    strip = draw_strip(scan, parse_windows("head")[0], tmp_path / "strip.png")
    files = write_dicom(scan, strip, tmp_path / "any")
    negative = replace(scan, finding=Finding("epidural"), threshold=0.9, interval_positions=(9, 10))
    files += write_dicom(negative, strip, tmp_path / "epidural", place=1)
    with running_orthanc(tmp_path / "orthanc") as pacs:
        for file in [*(scan.root / file for file in scan.row.files), *files]:
            assert pacs.store(file)["Status"] == "Success"
        study = pydicom.dcmread(files[0]).StudyInstanceUID
        with serve_viewer(pacs.dicomweb) as url, playwright_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SOFTWARE_GL)
            page = browser.new_page(viewport=SCREEN)
            page.set_default_timeout(120_000)
            page.add_init_script("localStorage.setItem('shownTours', JSON.stringify(['basicViewerTour']))")
            page.goto(f"{url}/viewer?StudyInstanceUIDs={study}")
            wait_for_page(page)
            yield page
            browser.close()


def wait_for_page(page) -> None:
    page.wait_for_function("document.querySelector('[data-cy=viewport-pane]')?.innerText.includes('(1/12)')")


def wait_for_slice(page, number: int) -> None:
    """Wait until the viewport shows an image by its InstanceNumber; OHIF writes 'I:8 (5/12)'."""
    words = f"I:{number} "
    page.wait_for_function(
        "words => document.querySelector('[data-cy=viewport-pane]').innerText.replace(/\\s+/g, ' ')"
        ".replace('I: ', 'I:').includes(words)",
        arg=words,
    )


def draw_again(page) -> None:
    """Scroll away and back: OHIF draws the regions of a report with the next image, not with the first."""
    page.mouse.move(SCREEN["width"] / 2, SCREEN["height"] / 2)
    page.mouse.wheel(0, 100)
    page.wait_for_timeout(1000)
    page.mouse.wheel(0, -100)


def wait_for_words(page, words: str) -> None:
    page.wait_for_function("words => document.querySelector('svg.svg-layer').textContent.includes(words)", arg=words)


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="CHROMIUM IS MISSING: WHAT OHIF SHOWS IS NOT TESTED; apt install chromium")
def test_reports_open_the_key_slices_and_tell_the_result(page, scan, tmp_path):
    """A report without regions left OHIF's viewport empty; this one leads through the key slices to the result."""
    report = "[data-cy=study-browser-thumbnail-no-image]:has-text('%s, CAUTION: AI report, research only, of 2')"
    page.locator(report % "any").dblclick()
    page.get_by_text("No", exact=True).click()  # whether to go on with its own measurements
    wait_for_slice(page, 8)
    draw_again(page)
    wait_for_slice(page, 8)
    wait_for_words(page, f"Attention of the slice: {scan.attention[7]:.2f}")
    keep(page, "ohif-key-slice.png", tmp_path)
    arrow = page.locator("[data-cy=viewport-pane] .cursor-pointer:has(> svg.rotate-180)")
    for number in (3, 6):
        arrow.click()
        wait_for_slice(page, number)
    arrow.click()
    wait_for_slice(page, 5)  # the first slice of the interval
    wait_for_words(page, "CAUTION: Forced: slices are 13.8 mm apart.")
    wait_for_words(page, "Probability: 0.81")
    keep(page, "ohif-scan.png", tmp_path)
    page.reload()
    wait_for_page(page)
    page.locator(report % "epidural").dblclick()  # negative, so that no key slice is opened
    wait_for_slice(page, 10)
    draw_again(page)
    wait_for_words(page, "NEGATIVE by the threshold")
    keep(page, "ohif-negative.png", tmp_path)


def keep(page, name: str, folder: Path) -> None:
    """Save what the page shows, into OHIF_PICTURES if it is set; an empty viewport fails."""
    path = Path(os.environ.get("OHIF_PICTURES") or folder) / name
    page.screenshot(path=path)
    middle = np.asarray(Image.open(path).convert("L"))[300:800, 700:1300]
    assert middle.std() > 20, f"{path}: the viewport is empty"
