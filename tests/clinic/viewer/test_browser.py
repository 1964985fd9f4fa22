"""The page in a real Chromium: what a reader does, and whether the screen shows what it should."""

import io
import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from normal_guidance.clinic.viewer.gallery import Gallery, open_gallery
from normal_guidance.clinic.viewer.server import FILES, STATIC
from normal_guidance.fit.fit_page import HINT
from normal_guidance.scans.index.manifest import Manifest, write_manifest
from normal_guidance.scans.index.problems import Problem
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.show.html import Section, paragraph, raw_table, scan_link
from normal_guidance.show.html import page as page_of
from small_viewer import Served, rows_of, write_predictions, write_result

playwright_api = pytest.importorskip("playwright.sync_api", reason="PLAYWRIGHT IS MISSING: NO BROWSER TEST RUNS")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
LAPTOP = {"width": 1366, "height": 768}
PHONE = {"width": 400, "height": 800}
SMALLEST = """() => Math.min(...[...document.querySelectorAll("body *")]
  .filter((one) => one.getClientRects().length)
  .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .map((one) => parseFloat(getComputedStyle(one).fontSize)))"""
NO_GL = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer", "--disable-3d-apis"]

if not CHROMIUM:
    pytest.skip(
        "CHROMIUM IS MISSING: NO BROWSER TEST RUNS; apt install chromium, or set CHROMIUM", allow_module_level=True
    )
if not all((STATIC / name).is_file() for name, _ in FILES.values()):
    node = "" if shutil.which("npm") else " (NODE IS MISSING, TOO)"
    pytest.skip(f"THE PAGE IS NOT BUILT{node}: NO BROWSER TEST RUNS; make viewer", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=NO_GL)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(gallery):
    with Served(gallery) as server:
        yield server


@pytest.fixture
def open_page(browser, server):
    """Lends a function that opens the page, logged in; nothing may be asked of others, and nothing may go wrong."""
    contexts, asked, complaints = [], [], []

    def start(served: Served = server, *, url: str | None = None, **options):
        contexts.append(browser.new_context(**{"viewport": LAPTOP, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(300_000)
        page.on("request", lambda request: asked.append((served.base, request.url)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url or served.access.url)
        if url is None:
            page.wait_for_selector("body.ready")
            page.wait_for_selector(".panel[data-drawn]")
        return page

    yield start
    for context in contexts:
        assert context.cookies() == []  # they would go to every port of the host
        context.close()
    assert [url for base, url in asked if not url.removeprefix("blob:").startswith(f"{base}/")] == []
    # Tests that provoke these look at the page.
    expected = re.compile(r"Failed to load resource: .*( 401| 403| 422|CONNECTION_REFUSED)")
    assert [text for text in complaints if not expected.match(text)] == []


@pytest.fixture
def page(open_page):
    return open_page()


def screen(page, panel: int = 0) -> np.ndarray:
    """What is drawn in a panel, grey; without the words over it."""
    return grey(page.locator(".picture").nth(panel).screenshot(style=".overlay, .ruler { visibility: hidden }"))


def grey(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), float)


def drawn(page, panel: int = 0) -> tuple[int, int]:
    scan, place, _ = page.locator(".panel").nth(panel).get_attribute("data-drawn").split("/")
    return int(scan), int(place)


def wait_for_place(page, place: int, panel: int = 0) -> None:
    page.wait_for_function(
        "([panel, place]) => document.querySelectorAll('.panel')[panel].dataset.drawn.split('/')[1] === String(place)",
        arg=[panel, place],
    )


def press(page, key: str, then: int | str, panel: int = 0, **state) -> None:
    page.keyboard.press(key)
    if isinstance(then, str):
        page.wait_for_selector(then, **state)
    else:
        wait_for_place(page, then, panel)


def click(page, selector: str, then: str, **state) -> None:
    page.click(selector)
    page.wait_for_selector(then, **state)


def on_screen(image: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A square slice, as large as it is drawn in the middle of a wide panel; nearest pixels do for comparing."""
    height, width = like.shape
    whole = np.zeros(like.shape)
    places = (np.arange(height) * len(image) / height).astype(int)
    left = (width - height) // 2
    whole[:, left : left + height] = image[np.ix_(places, places)]
    return whole


def changed(a: np.ndarray, b: np.ndarray) -> bool:
    """More than a percent of the pixels, and not just by the noise of smoothing."""
    return bool((np.abs(a - b) > 8).mean() > 0.01)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def test_the_token_is_asked_for_and_leaves_the_address_and_a_new_one_is_taken_in_the_same_tab(open_page, server):
    page = open_page(url=f"{server.base}/")
    page.fill("#token", "not the token")
    click(page, "#login button", "text=This is not the token")
    page.fill("#token", server.access.token)
    click(page, "#login button", "body.ready")
    page.reload()  # the tab remembers
    page.wait_for_selector("body.ready")
    page.evaluate("sessionStorage.setItem('token', 'of an earlier start')")
    page.goto(server.access.url)  # differs behind the # only, so the browser loads nothing by itself
    page.wait_for_function("() => sessionStorage.getItem('token') !== 'of an earlier start'")
    page.wait_for_selector("body.ready")
    assert server.access.token not in page.url


def test_wheel_keys_and_cine_go_through_the_slices(page, gallery):
    scan, place = drawn(page)
    last = len(gallery.row(scan)) - 1
    before = screen(page)
    page.locator(".stage").first.hover()
    page.mouse.wheel(0, 100)
    wait_for_place(page, place + 1)
    assert changed(screen(page), before)
    for _ in range(5):
        page.mouse.wheel(0, -10)  # as a touch pad does
    wait_for_place(page, place)
    np.testing.assert_allclose(screen(page), before, atol=1)
    for key, expected in [
        ("Home", 0),
        ("ArrowDown", 1),
        ("ArrowRight", 2),
        ("ArrowUp", 1),
        ("ArrowLeft", 0),
        ("ArrowUp", 0),
        ("PageDown", min(10, last)),
        ("End", last),
        ("ArrowDown", last),
        ("PageUp", max(0, last - 10)),
    ]:
        press(page, key, expected)
        assert page.locator(".place b").first.inner_text() == f"Slice {expected + 1}"
    position = gallery.row(scan).positions[max(0, last - 10)]
    assert page.locator(".position").first.inner_text() == f"{position:.1f} mm".replace("-", "−")
    page.select_option("#speed", "25")
    page.locator(".stage").first.focus()
    press(page, "End", last)
    press(page, "Space", 1)  # past the end
    page.keyboard.press("Home")  # the reader goes elsewhere, which stops it
    assert page.locator("#play").get_attribute("aria-pressed") == "false"
    page.wait_for_timeout(300)
    assert drawn(page)[1] == 0


def test_click_and_drag_on_the_curve_jump(page):
    chart = page.locator(".chart").first
    slices = int(chart.get_attribute("aria-valuemax"))
    box = chart.bounding_box()
    left, right = box["x"] + 46, box["x"] + box["width"] - 14

    def x_of(place: int) -> float:
        return left + (right - left) * (place + 0.5) / slices

    page.mouse.click(x_of(2), box["y"] + 40)
    wait_for_place(page, 2)
    before = screen(page)
    page.mouse.click(x_of(slices - 3), box["y"] + 60)
    wait_for_place(page, slices - 3)
    assert changed(screen(page), before)
    page.mouse.down()
    page.mouse.move(x_of(4), box["y"] + 60, steps=3)
    wait_for_place(page, 4)
    page.mouse.move(box["x"] - 300, box["y"])  # beyond the edge is the first
    wait_for_place(page, 0)
    page.mouse.up()
    page.mouse.move(x_of(5), box["y"] + 60)
    assert drawn(page)[1] == 0


def test_slices_are_drawn_as_the_files_have_them_in_every_window(page, gallery, manifest):
    pictures = {}
    for window in gallery.about()["windows"]["CT"]:
        page.click(f"#windows button:text-is('{window['title']}')")
        bounds = f"{window['low']:g}:{window['high']:g}"
        page.wait_for_selector(f".panel[data-drawn$='/{bounds}']")
        pictures[window["name"]] = seen = screen(page)
        scan, place = drawn(page)
        hu, _ = read_volume(gallery.row(scan), manifest.root)
        expected = np.clip((hu[place] - window["low"]) / (window["high"] - window["low"]), 0, 1)
        agreement = correlation(seen, on_screen(expected, seen))
        assert agreement > (0.95 if window["name"] == "brain" else 0.9)
        for wrong in (expected[::-1], expected[:, ::-1], expected.T) if window["name"] == "brain" else ():
            assert correlation(seen, on_screen(wrong, seen)) < agreement - 0.005
    assert changed(pictures["brain"], pictures["lung"])
    press(page, "5", ".panel[data-drawn$='/-1350:150']")
    np.testing.assert_allclose(screen(page), pictures["lung"], atol=1)
    assert page.locator(".overlay .window").first.inner_text() == "Lung  W 1500 L −600 HU"


def window_on_screen(page) -> list[float]:
    bounds = page.locator(".panel").first.get_attribute("data-drawn").split("/")[2]
    return list(map(float, bounds.split(":")))


def drag(page, x: float, y: float) -> None:
    """From the middle of the slice, by so many pixels right and down."""
    box = page.locator(".stage").first.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] + x, middle[1] + y, steps=3)
    page.mouse.up()


def test_heads_start_in_the_brain_window_and_dragging_changes_it(page):
    assert page.locator(".overlay .window").first.inner_text() == "Brain  W 80 L 40 HU"
    before = screen(page)
    drag(page, 125, 0)  # half of what doubles the width
    page.wait_for_selector(".panel[data-drawn$='/-20:100']")
    assert changed(screen(page), before)
    drag(page, 0, -50)  # up: a lower level, by 50 / 250 of the width
    page.wait_for_function("document.querySelector('.panel').dataset.drawn.split('/')[2] !== '-20:100'")
    assert window_on_screen(page) == pytest.approx([-44, 76])
    assert page.locator("#windows [aria-pressed=true]").count() == 0
    press(page, "1", ".panel[data-drawn$='/0:80']")
    assert not changed(screen(page), before)


def test_zoom_and_move_keep_what_lies_under_the_pointer(page):
    before = screen(page)
    page.locator(".stage").first.hover()  # the middle
    page.keyboard.down("Control")
    for _ in range(3):
        page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_selector(".zoom:has-text('zoom 2.1')")
    larger = screen(page)
    height, width = before.shape
    half = round(height / 2 / 1.0025**300)
    part = before[height // 2 - half : height // 2 + half, width // 2 - half : width // 2 + half]
    seen = larger[:, width // 2 - height // 2 : width // 2 + height // 2]
    magnified = np.asarray(Image.fromarray(part).resize(seen.shape[::-1]))
    assert correlation(magnified, seen) > 0.95  # larger around the middle
    page.keyboard.press("g")
    drag(page, 40, 25)
    moved = screen(page)
    np.testing.assert_allclose(moved[25 + 30 : -30, 40 + 30 : -30], larger[30 : -25 - 30, 30 : -40 - 30], atol=1)
    page.keyboard.press("0")
    page.wait_for_function("document.querySelector('.zoom').textContent === ''")
    assert not changed(screen(page), before)
    assert window_on_screen(page) == [0, 80]  # moving left the window alone


@pytest.mark.parametrize("unit", ["mm", "pixels"])
def test_the_ruler_measures_millimetres_or_pixels(open_page, serve, study, manifest, tmp_path, unit):
    rows = [replace(row, pixel_spacing=row.pixel_spacing if unit == "mm" else None) for row in manifest]
    write_manifest(tmp_path / "manifest.parquet", rows, manifest.about)
    page = open_page(serve(open_gallery(study, tmp_path), None))
    row = rows[0]
    page.keyboard.press("r")
    drag(page, 90, 0)
    text = page.locator(".ruler text").text_content()
    height = page.locator(".stage").first.bounding_box()["height"]
    size = row.rows * row.pixel_spacing[0] if unit == "mm" else row.rows  # of the height of the stage
    assert text == f"{90 * size / height:.1f} {unit}"
    page.keyboard.press("+")
    assert page.locator(".ruler text").text_content() == text  # zoom does not change what was measured
    page.keyboard.press("ArrowDown")
    assert page.locator(".ruler text").count() == 0  # it belongs to its slice
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Delete")
    assert page.locator(".ruler text").count() == 0


def test_two_methods_over_each_other_and_side_by_side(page, gallery):
    alone = grey(page.locator(".curve").first.screenshot())
    assert page.locator(".chart .attention").count() == 1
    page.select_option("#method-b", "mhng")
    page.wait_for_selector(".line.b .attention")
    assert changed(grey(page.locator(".curve").first.screenshot()), alone)
    assert page.locator(".line .normal").count() == 2
    assert page.locator("thead th").all_inner_texts()[-2:] == ["A", "B"]

    click(page, "#beside", ".panel:nth-child(2)[data-drawn]")
    scan, place = drawn(page, 1)
    assert (scan, place) == drawn(page, 0)
    np.testing.assert_allclose(screen(page, 1), screen(page, 0), atol=1)  # the same slice
    press(page, "Home", 0, panel=0)
    wait_for_place(page, 0, panel=1)

    page.click("#linked")  # each at its own peak
    methods = gallery.scan(0, scan)["methods"]
    peaks = [methods[name]["key_positions"][0] for name in ("ng", "mhng")]
    assert peaks[0] != peaks[1]
    for panel, peak in enumerate(peaks):
        wait_for_place(page, peak, panel)
    assert changed(screen(page, 1), screen(page, 0))
    page.locator(".stage").nth(1).click()
    press(page, "Home", 0, panel=1)
    assert drawn(page, 0)[1] == peaks[0]

    click(page, "#over", ".panel:nth-child(2)", state="hidden")


def test_heads_truth_and_key_slices_are_drawn(page, gallery):
    scan = gallery.scan(0, drawn(page)[0])
    assert page.locator("#heads").is_hidden()  # one head
    assert page.locator(".chart .key").count() == len(scan["methods"]["ng"]["key_positions"]) > 0
    positive = [place for place, label in enumerate(scan["truth"]) if label]
    chart, bar = page.locator(".chart").first.bounding_box(), page.locator(".chart .truth").bounding_box()
    step = (chart["width"] - 46 - 14) / scan["slices"]
    assert bar["width"] == pytest.approx(step * len(positive), abs=1.5)
    assert bar["x"] == pytest.approx(chart["x"] + 46 + step * positive[0], abs=1.5)
    page.select_option("#method-a", "mhng")
    assert page.locator(".chart .head").count() == 0
    page.locator(".stage").first.click()
    press(page, "h", ".chart .head")
    assert page.locator(".chart .head").count() == 4
    press(page, "h", ".chart .head", state="detached")
    page.keyboard.press("End")
    keys = scan["methods"]["mhng"]["key_positions"]
    for number, place in enumerate((*keys, keys[0])):
        press(page, "k", place)
        told = f"key slice {number % len(keys) + 1} of {len(keys)}"
        assert page.locator(".overlay .attention").inner_text().endswith(told)


def test_the_list_sorts_filters_and_searches(page, gallery):
    scans = {scan["number"]: scan for scan in gallery.scans(0)}
    names = [method["name"] for method in gallery.about()["splits"][0]["methods"]]

    def shown() -> list[dict]:
        return [
            scans[int(number)]
            for number in page.eval_on_selector_all("tbody tr", "all => all.map(r => r.dataset.number)")
        ]

    def scores() -> list[float]:
        return [scan["scores"][names.index("ng")] for scan in shown()]

    assert len(shown()) == len(scans)
    assert scores() == sorted(scores(), reverse=True)  # what needs a look first is at the top
    assert drawn(page)[0] == shown()[0]["number"]
    page.click("th.score button")
    assert scores() == sorted(scores())
    page.select_option("#label", "1")
    assert {scan["label"] for scan in shown()} == {1}
    page.select_option("#part", "val")
    chosen = [scan for scan in scans.values() if scan["label"] == 1 and scan["part"] == "val"]
    assert len(shown()) == len(chosen) > 0
    assert page.inner_text("#count") == f"{len(chosen)} of {len(scans)} scans"
    page.select_option("#part", "")
    page.select_option("#label", "")
    page.fill("#search", chosen[0]["id"].upper())
    assert chosen[0] in shown()
    page.press("#search", "1")  # a letter in a word, and no window
    page.fill("#search", "")
    click(page, f"tr[data-number='{chosen[0]['number']}']", f".panel[data-drawn^='{chosen[0]['number']}/']")
    page.locator(".stage").first.click()
    page.keyboard.press("n")
    following = shown()[shown().index(chosen[0]) + 1]["number"]
    page.wait_for_selector(f".panel[data-drawn^='{following}/']")
    kept = page.url
    page.goto("about:blank")
    page.goto(kept)  # the address remembers
    page.wait_for_selector(f".panel[data-drawn^='{following}/']")


def test_a_slice_that_cannot_be_read_is_told_in_its_place(open_page, serve, study, manifest, tmp_path):
    root = tmp_path / "scans"
    shutil.copytree(manifest.root, root)
    moved = Gallery(study, open_gallery(study).splits, Manifest(manifest.table, {**manifest.about, "root": str(root)}))
    for row in manifest:
        (root / row.files[-1]).write_bytes(b"this is no image")
    page = open_page(serve(moved, None))
    end = len(moved.row(drawn(page)[0])) - 1
    press(page, "End", f".message.error:has-text('Slice {end + 1} cannot be read')")
    assert page.locator(".picture").first.evaluate("one => getComputedStyle(one).visibility") == "hidden"
    press(page, "ArrowUp", ".message", state="hidden")
    assert page.locator(".picture").first.is_visible()


def test_without_an_index_there_are_curves_and_the_command_and_names_from_strangers_are_text(
    open_page, serve, manifest, tmp_path
):
    name = "<img src=x onerror=\"document.title='taken'\"><script>1</script>"
    write_predictions(tmp_path, [rows_of(manifest)[0] | {"scan_id": name, "patient_id": name}])
    page = open_page(serve(open_gallery(tmp_path), None))
    assert page.locator("button.scan").get_attribute("title") == name
    assert page.locator("aside img, tbody script").count() == 0
    assert page.title() != "taken"
    assert f"nguide view {tmp_path} --index INDEX" in page.inner_text("#missing")
    assert page.locator(".chart .attention").count() == 1
    assert "no slice labels" in page.inner_text(".legend")
    page.keyboard.press("End")
    page.wait_for_function("document.querySelector('.place b').innerText !== 'Slice 1'")


def test_a_server_that_is_gone_is_told(open_page, gallery):
    with Served(gallery) as served:
        page = open_page(served)
    page.click("tbody tr:nth-child(3)")
    assert page.wait_for_selector("#error:has-text('nguide view still running')").is_visible()


@pytest.fixture(scope="module")
def predicted(manifest, tmp_path_factory):
    """Two scans as `nguide predict` leaves them: one was forced and lacks slices, with key slices 4 and 2."""
    folder = tmp_path_factory.mktemp("predicted")
    rows = [row | {"label": -1, "part": "new"} for row in rows_of(manifest)[:2]]
    write_predictions(folder, rows)
    kept = [replace(row, slice_labels=None, label=0) for row in list(manifest)[:2]]
    numbered = replace(kept[0], instance_numbers=tuple(range(100, 100 + len(kept[0]))))
    about = {"source": "predict", "root": str(manifest.root)}
    write_manifest(folder / "manifest.parquet", [numbered, kept[1]], about)
    odd = [
        Problem("A", "", "unsuitable", "it has 4 slices", "predicted because of --force")._asdict(),
        Problem("A", "", "gap", "10 mm: 1 missing", "kept")._asdict(),
    ]
    for row, problems in zip(rows, (odd, []), strict=True):
        source = {"series_description": "HEAD <b>5 mm</b>"}
        write_result(folder, row["scan_id"], source=source, positive=row["probability"] >= 0.25, problems=problems)
    refused = {"scan_id": "C", "state": "refused", "reason": "its modality is MR"}
    (folder / "summary.json").write_text(json.dumps({"model": {}, "scans": [refused]}))
    with Served(open_gallery(folder)) as served:
        yield served, rows


def test_a_model_opens_on_its_report_whose_scans_lead_to_their_slices(open_page, manifest, phantom, tmp_path):
    """On a phone: nothing is wider than the screen, no letters are small; scripts in the report never run."""
    write_predictions(tmp_path / "model", rows_of(manifest))
    (tmp_path / "model" / "bundle.json").write_text("{}")
    links = [scan_link(name, 3) for name in (manifest.scan_ids[2], "gone")]
    evil = "<script>parent.document.title = 'taken'</script><img src=x onerror=\"parent.document.title = 'taken'\">"
    wide = raw_table(["a very wide table"] * 12, [links * 6])
    sections = [Section("Scans", [HINT, wide, *links])]
    (tmp_path / "model" / "report.html").write_text(page_of("The verdict", [paragraph("first")], sections))
    with Served(open_gallery(tmp_path / "model", phantom / "index")) as served:
        page = open_page(served, viewport={"width": 390, "height": 800})
        report = page.frame_locator("#page")
        assert report.locator("h1").inner_text() == "The verdict"
        assert not report.locator(".hint").is_visible()
        (frame,) = (one for one in page.frames if one != page.main_frame)
        for one in (page, frame):
            assert one.evaluate("document.documentElement.scrollWidth") == 390
            assert one.evaluate(SMALLEST) >= 14
        assert report.locator("[data-scan=gone]").last.get_attribute("href") is None
        report.locator(f"p ~ a[data-scan='{manifest.scan_ids[2]}']").click()
        page.wait_for_selector(".panel[data-drawn^='2/2/']")
        assert page.inner_text(".place b") == "Slice 3"
        assert "scan=2&slice=3" in page.url
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate(SMALLEST) >= 14
        page.click("#page-button")
        assert report.locator("h1").is_visible()
        assert "#" not in page.url
    (tmp_path / "model" / "report.html").write_text(evil)
    frames = "() => document.querySelector('#page').contentDocument?.images.length"
    with Served(open_gallery(tmp_path / "model")) as served:
        context = page.context.browser.new_context()
        fresh = context.new_page()  # it complains of the script that it refused
        fresh.goto(served.access.url)
        fresh.wait_for_function(frames)
        assert fresh.title() != "taken"
        context.close()


def test_a_predicted_scan_shows_its_call_key_slices_interval_and_what_is_wrong(open_page, predicted):
    """What was forced or is incomplete is flagged in the list, too, and so is what was not predicted."""
    served, rows = predicted
    page = open_page(served)
    assert page.locator("tr[data-number='0'] .flag").all_inner_texts() == ["forced", "incomplete"]
    assert page.locator("tr[data-number='1'] .flag").count() == 0
    click(page, "tr[data-number='0']", "#warnings:has-text('Forced: ')")
    assert "Slices are missing" in page.inner_text("#warnings")
    page.wait_for_selector(".panel[data-drawn^='0/3/']")
    words = page.inner_text(".overlay")
    call = "positive" if rows[0]["probability"] >= 0.25 else "negative"
    assert f"{call}: probability {rows[0]['probability']:.3f}, threshold .250".replace(" 0.", " .") in words
    assert "InstanceNumber 103" in words
    assert "HEAD <b>5 mm</b>" in words
    assert "key slice 1 of 2" in words
    press(page, "k", 1)
    assert "key slice 2 of 2" in page.inner_text(".overlay")
    press(page, "ArrowDown", 2)
    assert "key slice" not in page.inner_text(".overlay")  # other slices have no number
    assert "rank" not in page.inner_text(".overlay")
    chart, shade = page.locator(".chart").first.bounding_box(), page.locator(".chart .interval").bounding_box()
    step = (chart["width"] - 46 - 14) / rows[0]["slices"]
    assert shade["width"] == pytest.approx(4 * step, abs=1.5)
    assert shade["x"] == pytest.approx(chart["x"] + 46 + step, abs=1.5)
    click(page, "tr[data-number='1']", "#warnings", state="hidden")
    page.click("#not-predicted summary")
    assert "C its modality is MR" in page.inner_text("#not-predicted")


def test_it_fits_a_phone(open_page, predicted):
    page = open_page(predicted[0], viewport=PHONE, has_touch=True)
    for word in ("scrollWidth", "scrollHeight"):
        assert page.evaluate(f"document.documentElement.{word}") == PHONE[word.removeprefix("scroll").lower()]
    assert page.locator(".stage").first.bounding_box()["height"] > 250
    assert page.locator("aside").is_hidden()
    page.tap("#list-button")
    page.tap("tr[data-number='0']")
    page.wait_for_selector(".panel[data-drawn^='0/3/']")
    assert page.locator("aside").is_hidden()
    assert page.locator("#warnings").is_visible()


def test_it_fits_a_laptop_in_light_and_dark_and_shows_the_focus(open_page):
    grounds = []
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        assert size == list(LAPTOP.values())
        page.select_option("#method-b", "mhng")
        click(page, "#beside", ".panel:nth-child(2)[data-drawn]")
        for selector in ("header", "main", ".toolbar"):
            assert page.locator(selector).evaluate("one => one.scrollWidth <= one.clientWidth"), selector
        assert page.locator(".stage").nth(1).bounding_box()["height"] > 300
    assert grounds[0] != grounds[1]
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator(".stage").first.click()
    press(page, "?", "#help[open]")
    assert "next key slice" in page.inner_text("#help")
    press(page, "Escape", "#help", state="hidden")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[0]
