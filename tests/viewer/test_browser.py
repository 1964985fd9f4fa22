"""The page in a real Chromium: what a reader does, and whether the screen shows what it should."""

import io
import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from normal_guidance.data.manifest import Manifest
from normal_guidance.data.volumes import read_volume
from normal_guidance.viewer.gallery import Gallery, open_gallery
from normal_guidance.viewer.server import FILES, STATIC
from small_viewer import Served, rows_of, write_predictions

playwright_api = pytest.importorskip("playwright.sync_api", reason="PLAYWRIGHT IS MISSING: NO BROWSER TEST RUNS")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
LAPTOP = {"width": 1366, "height": 768}
SOFTWARE_GL = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
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
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SOFTWARE_GL)
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

    def start(served: Served = server, *, url: str | None = None, where=browser, **options):
        contexts.append(where.new_context(viewport=LAPTOP, **options))
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
        context.close()
    assert [url for base, url in asked if not url.startswith((f"{base}/", "data:", "blob:"))] == []
    expected = re.compile(
        r"Failed to load resource: .*( 401| 403| 422|CONNECTION_REFUSED)"
    )  # tests that provoke them look at the page
    assert [text for text in complaints if not expected.match(text)] == []


def screen(page, panel: int = 0) -> np.ndarray:
    """What is drawn in a panel, grey; without the words over it."""
    return grey(page.locator(".picture").nth(panel).screenshot(style=".overlay { visibility: hidden }"))


def grey(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), float)


def drawn(page, panel: int = 0) -> tuple[int, int]:
    """Scan and place on the screen."""
    scan, place, _ = page.locator(".panel").nth(panel).get_attribute("data-drawn").split("/")
    return int(scan), int(place)


def wait_for_place(page, place: int, panel: int = 0) -> None:
    page.wait_for_function(
        "([panel, place]) => document.querySelectorAll('.panel')[panel].dataset.drawn.split('/')[1] === String(place)",
        arg=[panel, place],
    )


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


def windowed(manifest: Manifest, gallery: Gallery, scan: int, place: int, low: float, high: float) -> np.ndarray:
    row = gallery.row(scan)
    volume, _ = read_volume(row, manifest.root)
    return np.clip((volume[place] - low) / (high - low), 0, 1)


# ----------------------------------------------------------------------------------------------------
# Logging in
# ----------------------------------------------------------------------------------------------------


def test_the_token_is_asked_for_and_then_gone(open_page, server):
    page = open_page(url=f"{server.base}/")
    page.fill("#token", "not the token")
    page.click("button")
    page.wait_for_selector("text=This is not the token")
    page.fill("#token", server.access.token)
    page.click("button")
    page.wait_for_selector("body.ready")
    assert server.access.token not in page.url
    assert server.access.session not in page.evaluate("document.cookie")
    page.reload()  # the cookie is enough
    page.wait_for_selector("body.ready")


# ----------------------------------------------------------------------------------------------------
# Slices
# ----------------------------------------------------------------------------------------------------


def test_the_slice_is_drawn_as_the_file_has_it(open_page, gallery, manifest):
    page = open_page()
    assert page.locator(".panel").first.get_attribute("data-display") == "webgl"
    scan, place = drawn(page)
    expected = windowed(manifest, gallery, scan, place, -100, 300)
    seen = screen(page)
    agreement = correlation(seen, on_screen(expected, seen))
    assert agreement > 0.95
    for wrong in (expected[::-1], expected[:, ::-1], expected.T):
        assert correlation(seen, on_screen(wrong, seen)) < agreement - 0.005


def test_wheel_and_keys_go_through_the_slices(open_page, gallery):
    page = open_page()
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
        page.keyboard.press(key)
        wait_for_place(page, expected)
        assert page.locator(".place b").first.inner_text() == f"Slice {expected + 1}"
    position = gallery.row(scan).positions[max(0, last - 10)]
    assert page.locator(".position").first.inner_text() == f"{position:.1f} mm".replace("-", "−")


@pytest.mark.slow
def test_click_and_drag_on_the_curve_jump(open_page):
    page = open_page()
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


@pytest.mark.slow
def test_windows_change_the_picture(open_page, gallery, manifest):
    page = open_page()
    pictures = {}
    for window in gallery.about()["windows"]:
        page.click(f"#windows button:text-is('{window['title']}')")
        bounds = f"{window['low']:g}:{window['high']:g}"
        page.wait_for_selector(f".panel[data-drawn$='/{bounds}']")
        pictures[window["name"]] = screen(page)
        expected = windowed(manifest, gallery, *drawn(page), window["low"], window["high"])
        assert correlation(pictures[window["name"]], on_screen(expected, pictures[window["name"]])) > 0.9
    assert changed(pictures["head"], pictures["lung"])
    page.keyboard.press("2")
    page.wait_for_selector(".panel[data-drawn$='/-1350:150']")
    np.testing.assert_allclose(screen(page), pictures["lung"], atol=1)
    assert "Lung" in page.locator(".overlay .window").first.inner_text()


# ----------------------------------------------------------------------------------------------------
# Curves and methods
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_methods_over_each_other_and_side_by_side(open_page, gallery):
    page = open_page()
    alone = grey(page.locator(".curve").first.screenshot())
    assert page.locator(".chart .attention").count() == 1
    page.select_option("#method-b", "mhng")
    page.wait_for_selector(".line.b .attention")
    assert changed(grey(page.locator(".curve").first.screenshot()), alone)
    assert page.locator(".line .normal").count() == 2
    assert page.locator("thead th").all_inner_texts()[-2:] == ["A", "B"]

    page.click("#beside")
    page.wait_for_selector(".panel:nth-child(2)[data-drawn]")
    scan, place = drawn(page, 1)
    assert (scan, place) == drawn(page, 0)
    np.testing.assert_allclose(screen(page, 1), screen(page, 0), atol=1)  # the same slice
    page.keyboard.press("Home")
    wait_for_place(page, 0, panel=0)
    wait_for_place(page, 0, panel=1)

    page.click("#linked")  # each at its own peak
    methods = gallery.scan(0, scan)["methods"]
    peaks = [methods[name]["key_slices"][0] for name in ("ng", "mhng")]
    assert peaks[0] != peaks[1]
    for panel, peak in enumerate(peaks):
        wait_for_place(page, peak, panel)
    assert changed(screen(page, 1), screen(page, 0))
    page.locator(".stage").nth(1).click()
    page.keyboard.press("Home")
    wait_for_place(page, 0, panel=1)
    assert drawn(page, 0)[1] == peaks[0]

    page.click("#over")
    page.wait_for_selector(".panel:nth-child(2)", state="hidden")


@pytest.mark.slow
def test_heads_truth_and_key_slices_are_drawn(open_page, gallery):
    page = open_page()
    scan = gallery.scan(0, drawn(page)[0])
    assert page.locator("#heads").is_disabled()  # one head
    assert page.locator(".chart .key").count() == len(scan["methods"]["ng"]["key_slices"]) > 0
    positive = [place for place, label in enumerate(scan["truth"]) if label]
    chart, bar = page.locator(".chart").first.bounding_box(), page.locator(".chart .truth").bounding_box()
    step = (chart["width"] - 46 - 14) / scan["slices"]
    assert bar["width"] == pytest.approx(step * len(positive), abs=1.5)
    assert bar["x"] == pytest.approx(chart["x"] + 46 + step * positive[0], abs=1.5)
    page.select_option("#method-a", "mhng")
    assert page.locator(".chart .head").count() == 0
    page.locator(".stage").first.click()
    page.keyboard.press("h")
    page.wait_for_selector(".chart .head")
    assert page.locator(".chart .head").count() == 4
    page.keyboard.press("h")
    page.wait_for_selector(".chart .head", state="detached")
    page.keyboard.press("End")
    keys = scan["methods"]["mhng"]["key_slices"]
    for place in (*keys, keys[0]):
        page.keyboard.press("k")
        wait_for_place(page, place)


# ----------------------------------------------------------------------------------------------------
# The list
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_list_sorts_filters_and_searches(open_page, gallery):
    page = open_page()
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
    page.click("th.score button")
    assert scores() == sorted(scores(), reverse=True)
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
    page.click(f"tr[data-number='{chosen[0]['number']}']")
    page.wait_for_selector(f".panel[data-drawn^='{chosen[0]['number']}/']")
    page.locator(".stage").first.click()
    page.keyboard.press("n")
    following = shown()[shown().index(chosen[0]) + 1]["number"]
    page.wait_for_selector(f".panel[data-drawn^='{following}/']")
    kept = page.url
    page.goto("about:blank")
    page.goto(kept)  # the address remembers
    page.wait_for_selector(f".panel[data-drawn^='{following}/']")


# ----------------------------------------------------------------------------------------------------
# What is missing, and what is hostile
# ----------------------------------------------------------------------------------------------------


def test_without_an_index_there_are_curves_and_the_command(open_page, study):
    with Served(open_gallery(study)) as served:
        page = open_page(served)
        assert f"nguide view {study} --index INDEX" in page.inner_text("#missing")
        assert page.locator(".chart .attention").count() == 1
        assert "no slice labels" in page.inner_text(".legend")
        page.keyboard.press("End")
        page.wait_for_function("document.querySelector('.place b').innerText !== 'Slice 1'")


@pytest.mark.slow
def test_a_slice_that_cannot_be_read_is_told_in_its_place(open_page, study, manifest, tmp_path):
    root = tmp_path / "scans"
    shutil.copytree(manifest.root, root)
    moved = Gallery(study, open_gallery(study).splits, Manifest(manifest.table, {**manifest.about, "root": str(root)}))
    for row in manifest:
        (root / row.files[-1]).write_bytes(b"this is no image")
    with Served(moved) as served:
        page = open_page(served)
        end = len(moved.row(drawn(page)[0])) - 1
        page.keyboard.press("End")
        page.wait_for_selector(f".message.error:has-text('Slice {end + 1} cannot be read')")
        assert page.locator(".picture").first.evaluate("one => getComputedStyle(one).visibility") == "hidden"
        page.keyboard.press("ArrowUp")
        page.wait_for_selector(".message", state="hidden")
        assert page.locator(".picture").first.is_visible()


@pytest.mark.slow
def test_without_webgl_slices_are_drawn_plainly(open_page, server, gallery, manifest, browser):
    plain = browser.browser_type.launch(executable_path=CHROMIUM, args=NO_GL)
    try:
        page = open_page(server, where=plain)
        assert page.locator(".panel").first.get_attribute("data-display") == "canvas"
        assert "no WebGL 2" in page.inner_text(".overlay")
        seen = screen(page)
        expected = windowed(manifest, gallery, *drawn(page), -100, 300)
        assert correlation(seen, on_screen(expected, seen)) > 0.95
        page.context.close()
    finally:
        plain.close()


def test_names_from_strangers_are_text(open_page, manifest, tmp_path):
    name = "<img src=x onerror=\"document.title='taken'\"><script>1</script>"
    write_predictions(tmp_path, [rows_of(manifest)[0] | {"scan_id": name, "patient_id": name}])
    with Served(open_gallery(tmp_path)) as served:
        page = open_page(served)
        assert page.locator("button.scan").get_attribute("title") == name
        assert page.locator("aside img, tbody script").count() == 0
        assert page.title() != "taken"


@pytest.mark.slow
def test_a_server_that_is_gone_is_told(open_page, gallery):
    with Served(gallery) as served:
        page = open_page(served)
    page.click("tbody tr:nth-child(3)")
    assert page.wait_for_selector("#error:has-text('nguide view still running')").is_visible()
    page.context.clear_cookies()


# ----------------------------------------------------------------------------------------------------
# Looks
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_fits_a_laptop_in_light_and_dark_and_shows_the_focus(open_page):
    grounds = []
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [
            1366,
            768,
        ]
        page.select_option("#method-b", "mhng")
        page.click("#beside")
        page.wait_for_selector(".panel:nth-child(2)[data-drawn]")
        for selector in ("header", "main", ".toolbar"):
            assert page.locator(selector).evaluate("one => one.scrollWidth <= one.clientWidth"), selector
        assert page.locator(".stage").nth(1).bounding_box()["height"] > 300
    assert grounds[0] != grounds[1]
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator(".stage").first.click()
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    assert "next key slice" in page.inner_text("#help")
    page.keyboard.press("Escape")
    page.wait_for_selector("#help", state="hidden")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[0]
