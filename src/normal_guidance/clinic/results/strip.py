"""One picture of a scan's result; it names neither patient nor scan, because anonymous results have it, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.core.guidance import normal_reference
from normal_guidance.core.methods import method_title
from normal_guidance.scans.features.windows import Percentiles, Window, apply_windows, in_field, plane_of, range_of
from normal_guidance.scans.index.geometry import orientation_letters
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.show.figure_style import GREEN, ORANGE, WIDTH, label_slices, rounded, save, styled

CURVE_HEIGHT = 2.1  # height of the attention curve in inches
NARROWEST = 3  # a strip has room for at least so many pictures: a single one as wide as the page would be too large
LINE, CAUTION_LINE = 0.16, 0.22  # height of a line of the heading, and of the cautions, in inches
LINE_LETTERS, CAUTION_LETTERS = 130, 92  # letters of such a line
HEADS_SHOWN = 8  # with more heads, their curves are not drawn: they could not be told apart


def draw_strip(
    prediction: ScanPrediction, window: Window | None, path: Path, *, repair: bool = True, field: float | None = None
) -> Path:
    """Write strip.png: the key slices from the feet to the head, and beneath them the attention along the scan."""
    # `window` has the values from black to white (None: from the darkest to the brightest); where they are percentiles,
    # `field` is the mm of each slice's middle that they are of (None: the whole slice).
    places = sorted(prediction.key_slices)
    images = _images(prediction, places, window, repair, field)
    return save(plot_strip(prediction, list(zip(places, images, strict=True))), path)


def _images(
    prediction: ScanPrediction, places: Sequence[int], window: Window | None, repair: bool, field: float | None
) -> np.ndarray:
    """Read these slices only, unless the window is of the scan's percentiles."""
    row = prediction.row
    if isinstance(window, Percentiles):
        whole, _ = read_volume(row, prediction.root, repair=repair)
        seen = in_field(whole, row.pixel_spacing, field)
        return apply_windows(whole[list(places)], [range_of(window, seen)])[0]
    volume, _ = read_volume(row.cut(places), prediction.root, repair=repair)
    return apply_windows(volume, [window])[0]


@styled
def plot_strip(prediction: ScanPrediction, images: Sequence[tuple[int, Float[np.ndarray, "_ _"]]]) -> Figure:
    """Draw the figure of `draw_strip`; `images` are slices, counted from 0, with their pictures."""
    across = max(NARROWEST, len(images))
    heading, heights = _heading(prediction), [WIDTH / across + 0.9, CURVE_HEIGHT]
    cautions = [line for text in prediction.cautions for line in wrap(f"Caution: {text}", CAUTION_LETTERS)]
    if cautions:
        heights = [CAUTION_LINE * len(cautions) + 0.2, *heights]
    figure = Figure(figsize=(WIDTH, sum(heights) + LINE * len(heading) + 0.3), layout="constrained")
    figure.suptitle("\n".join(heading), fontsize=9)
    *banner, top, bottom = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel in banner:  # what a reader must know first, also who sees only the picture
        panel.set_facecolor("#FFE9D6")
        text = panel.text(0.5, 0.5, "\n".join(cautions), ha="center", va="center", fontsize=10)
        text.set(fontweight="bold", color="#8A2A00")
    _draw_key_slices(top, prediction, images, across)
    _draw_curve(bottom.subplots(), prediction)
    return figure


def _draw_key_slices(
    top: SubFigure, prediction: ScanPrediction, images: Sequence[tuple[int, Float[np.ndarray, "_ _"]]], across: int
) -> None:
    top.suptitle(prediction.key_slices_sentence, fontsize=9, fontweight="bold")
    panels = np.atleast_1d(top.subplots(1, across))
    numbers = prediction.instance_numbers
    darkest = min(float(image.min()) for _, image in images)
    brightest = max(float(image.max()) for _, image in images)
    for panel in panels:
        panel.set_axis_off()
    margin = (across - len(images)) // 2
    for panel, (place, image) in zip(panels[margin:], images, strict=False):
        panel.imshow(image, cmap="gray", vmin=darkest, vmax=max(brightest, darkest + 1))
        instance = "" if numbers[place] is None else f" (image {numbers[place]})"
        share = f"{100 * prediction.attention[place].item():.3g} % of attention"
        panel.set_title(f"{prediction.key_slice_name(place)}\nslice {place + 1}{instance}\n{share}", fontsize=8)
        _draw_letters(panel, prediction.row.orientation)


def _draw_letters(panel: Axes, orientation: Sequence[float] | None) -> None:
    """Write the sides of the patient at the edges of a picture; nothing where they are unknown."""
    edges = orientation_letters(orientation)
    if edges is None:
        return
    sides = ((0.03, 0.5, "left", "center"), (0.97, 0.5, "right", "center"))
    ends = ((0.5, 0.97, "center", "top"), (0.5, 0.03, "center", "bottom"))
    for letters, (x, y, across, along) in zip(edges, sides + ends, strict=True):
        text = panel.text(x, y, letters, ha=across, va=along, transform=panel.transAxes, color="white", fontsize=8)
        text.set(fontweight="bold", path_effects=[withStroke(linewidth=2, foreground="black")])


def _heading(prediction: ScanPrediction) -> list[str]:
    """The lines above the pictures: the result, what was looked for and where, and which model did it."""
    result = f"probability {rounded(prediction.probability)}"
    if prediction.threshold is not None:
        side = "positive: at or above" if prediction.is_positive else "negative: below"
        result += f", {side} the threshold {rounded(prediction.threshold)}"
    named = "" if prediction.finding is None else f"{prediction.finding.name}   |   "
    model = method_title(prediction.method) if prediction.model is None else str(prediction.model)
    lines = [
        f"{named}{result}   |   research only, not for diagnosis",
        f"Looked for: {prediction.sought}. Body part: {prediction.body_part}.",
        f"{model[:1].upper()}{model[1:]}.",
    ]
    return [part for line in lines for part in wrap(line, LINE_LETTERS)]


def _draw_curve(panel: Axes, prediction: ScanPrediction) -> None:
    attention, heads = prediction.attention, prediction.head_attention
    slices = np.arange(1, len(attention) + 1)
    bell = normal_reference(heads).mean(0)  # what guidance compares attention with
    first, last = prediction.interval
    panel.axvspan(first + 0.5, last + 1.5, color=ORANGE, alpha=0.2, lw=0, label="interval")
    panel.set_title(prediction.interval_sentence, fontsize=8)
    if 1 < len(heads) <= HEADS_SHOWN:
        for number, head in enumerate(heads):
            panel.plot(slices, head, color="0.7", lw=0.8, label=None if number else f"each of {len(heads)} heads")
    marker = "o" if len(slices) < 60 else ""
    panel.plot(slices, attention, color=GREEN, lw=1.8, marker=marker, ms=2.5, label="attention")
    panel.plot(slices, bell, color="0.2", ls="--", lw=1, label="normal with its mean and variance")
    top = 1.15 * max(float(heads.max() if len(heads) <= HEADS_SHOWN else attention.max()), float(bell.max()))
    keys = [place + 1 for place in prediction.key_slices]
    panel.plot(keys, [top * 0.97] * len(keys), ls="", marker="v", ms=5, color="0.2", label="key slices", clip_on=False)
    located = prediction.row.slice_spacing is not None and plane_of(prediction.row.orientation) == "axial"
    panel.set(xlim=(0.5, len(slices) + 0.5), ylim=(0, top), ylabel="attention")
    # The default number of ticks depends on the size of the panel, which depends on the ticks.
    panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    label_slices(panel, "slice, from the feet to the head" if located else "slice")
    entries = len(panel.get_legend_handles_labels()[1])
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=entries if entries < 5 else 3)
