"""The style of all figures: colours that mean the same thing everywhere, sizes that fit a report, and saving.

The paper's figures are blue, orange, green and red.  These are the same four by name, in the shades of Okabe and Ito:
the paper's orange and green (#FF7F0E, #2CA02C) look alike to a protanope, 5 apart in CIELAB where these are 52 apart.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec

import torch
from jaxtyping import Int
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import rgb2hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import make_folder, write_atomically
from normal_guidance.core.guidance import DivergenceName
from normal_guidance.core.methods import BEYOND, CEILING, ENSEMBLE, EVERY_METHOD, FIELD, NAMED, REFERENCE_TITLES
from normal_guidance.core.regularizers import REGULARIZERS

WIDTH = 9.0
"""Inches: a figure as wide as a report's page.  Text of 9 points is then about 13 pixels high on a page of 1,000."""

DPI = 150

FORMATS = ("png", "svg")

BLUE, ORANGE, GREEN, RED = COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")


METHOD_COLORS = {
    "centered_gaussian": "#666666",
    "max": "#CC79A7",
    "mean": "#88CCEE",
    "abmil": BLUE,
    "smap": ORANGE,
    "ng": GREEN,
    "transmil": "#332288",
    "smtp": "#A65C00",
    "mhng": "#00573F",
    "evidence": "#CDC12F",
    "evidence_ng": "#64530C",
    "whole_bells": "#EE9F63",
    "whole_bells_ng": "#490037",
    ENSEMBLE: "#AA0044",
    **dict.fromkeys((CEILING, *REFERENCE_TITLES), "#000000"),
    **{name: rgb2hex(colormaps["gist_rainbow"](place / len(FIELD))) for place, name in enumerate(FIELD)},
}

"""Blue is unguided, orange smooth, green guided: full shades for ABMIL, dark ones for TransMIL.

Methods that the paper does not have are yellow (evidence) and apricot (bells), their guided versions darker.  What
`nguide fit` makes is crimson.  References are black.  The field's methods are spread over the rainbow, and a
regularized method is a darker shade of its model.
"""

for _name, _method in EVERY_METHOD.items():
    if _name not in METHOD_COLORS and _method.regularizer is not None:
        _light = 1 - 0.15 * (1 + [*REGULARIZERS].index(_method.regularizer))
        _red, _green, _blue = to_rgb(METHOD_COLORS[_method.model])
        METHOD_COLORS[_name] = rgb2hex((_light * _red, _light * _green, _light * _blue))

METHOD_MARKERS = {
    **{name: "s" if name in ("transmil", "smtp", "mhng") else "o" for name in METHOD_COLORS},
    ENSEMBLE: "P",
    **dict.fromkeys(BEYOND, "D"),
    **{name: "^" for name, method in EVERY_METHOD.items() if method.model in FIELD},
    **{name: "v" for name in EVERY_METHOD if name not in NAMED},
}
"""Squares for TransMIL and its variants, diamonds for heads beyond the paper, triangles for the field's methods and,
pointing down, for regularized ones."""

DIVERGENCE_COLORS: dict[DivergenceName, str] = {"forward_kl": GREEN, "reverse_kl": RED, "squared_error": ORANGE}
"""The same colours as in the paper."""

TRUTH = "slices labelled positive"  # the name of the filled slices in legends

STYLE: dict[Any, object] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "normal-guidance",  # the same figure gives the same file
}

P = ParamSpec("P")


def styled(plot: Callable[P, Figure]) -> Callable[P, Figure]:
    """A function that makes a figure, run under `STYLE` whatever the caller's own settings are."""

    return rc_context(STYLE)(plot)


class Picture(Figure):
    """A figure that a notebook shows, also where pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        held = BytesIO()
        with rc_context(STYLE):
            self.savefig(held, format="png", dpi=DPI)
        return held.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG or SVG, by the end of the name; makes the folder; the file appears whole or not at all."""
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise UserError(f"{path}: figures are written as {' or '.join(FORMATS)}; change the end of the name")
    make_folder(path.parent)
    metadata = {"Date": None} if form == "svg" else None
    with rc_context(STYLE):
        write_atomically(path, lambda file: figure.savefig(file, format=form, dpi=DPI, metadata=metadata))
    return path


def method_color(method: str) -> str:
    """A method's colour in every figure."""
    if method not in METHOD_COLORS:
        raise UserError(f"method {method!r} has no colour; choose one of {', '.join(METHOD_COLORS)}")
    return METHOD_COLORS[method]


def shortened(text: str, most: int = 24) -> str:
    """A long name, such as a scan's, shortened to its beginning and its end."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def label_slices(panel: Axes, text: str = "slice") -> None:
    """Labels an axis of slices and gives it ticks at whole numbers only."""
    panel.set_xlabel(text)
    panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def fill_truth(panel: Axes, slice_labels: Int[Tensor, "slices"] | None) -> None:
    """Fills blocks of slices labelled positive, where labels are known; a slice reaches half a slice to either side."""
    if slice_labels is None:
        return
    positive = torch.nn.functional.pad((slice_labels == 1).long(), (1, 1))
    change = positive.diff()
    first, behind = (change == 1).nonzero().flatten() + 1, (change == -1).nonzero().flatten() + 1
    for number, (start, end) in enumerate(zip(first.tolist(), behind.tolist(), strict=True)):
        label = TRUTH if number == 0 else None  # one entry of the legend for all
        panel.axvspan(start - 0.5, end - 0.5, color=RED, alpha=0.18, lw=0, label=label)


def rounded(probability: float) -> str:
    """Round to two digits, but never to 0 or 1."""
    if probability > 0.99:
        return "> 0.99"
    return "< 0.01" if probability < 0.01 else f"{probability:.2f}"
