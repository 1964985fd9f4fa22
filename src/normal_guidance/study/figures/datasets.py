"""Figures about a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from normal_guidance.base.errors import UserError
from normal_guidance.show.figure_style import COLORS, WIDTH, save, styled


def draw_density(densities: Mapping[str, Float[np.ndarray, "bins"]], path: Path) -> Path:
    """Writes the figure of `plot_density`.

    Example:
        >>> import tempfile
        >>> draw_density({"head CT": np.ones(20)}, Path(tempfile.mkdtemp()) / "density.png").name
        'density.png'
    """
    return save(plot_density(densities), path)


@styled
def plot_density(densities: Mapping[str, Float[np.ndarray, "bins"]]) -> Figure:
    """Where in a scan the positive slices lie: density by relative position, one panel per dataset or part."""
    if not densities:
        raise UserError("there is no density to draw; give the density of at least one dataset")
    figure = Figure(figsize=(min(WIDTH, 3.2 * len(densities)), 2.4), layout="constrained")
    panels = figure.subplots(1, len(densities), squeeze=False, sharey=True)[0]
    for panel, (title, density), color in zip(panels, densities.items(), cycle(COLORS), strict=False):
        edges = np.linspace(0, 1, len(density) + 1)
        panel.stairs(density, edges, fill=True, color=color, alpha=0.35)
        panel.stairs(density, edges, color=color, lw=1.4)
        panel.axhline(1, color="0.5", lw=0.8, ls=":")  # slices that are equally likely everywhere
        panel.set(title=title, xlabel="slice / slices of the scan", xlim=(0, 1))
    panels[0].set_ylabel("density of positive slices")
    return figure
