"""Figures.  A function `plot_...` makes a `Figure` from tensors, arrays and rows; `draw_...` writes it to a file.

attention     along the slices of scans: attention, with labels and thumbnails; what each divergence does to it; the
              heads' normal references; where the positive slices lie
training      learning curves; the grid of learning rates and L1 strengths
comparisons   methods over seeds, sensitivity, differences with their intervals
deletion      scan scores without the attended slices, or with these alone

`normal_guidance.figures` is this package; its names are loaded when they are first used.  Colours, sizes and saving are
in `normal_guidance.show.figure_style`.

Example:
    >>> import torch
    >>> from normal_guidance import figures
    >>> len(figures.plot_divergences(torch.full((20,), 1 / 20)).axes) > 0
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normal_guidance.base.system import lazy_names

if TYPE_CHECKING:
    from normal_guidance.study.figures.attention import (
        AttendedScan,
        draw_attention,
        draw_density,
        draw_divergences,
        draw_heads,
        plot_attention,
        plot_density,
        plot_divergences,
        plot_heads,
    )
    from normal_guidance.study.figures.comparisons import (
        ForestRow,
        MethodValues,
        SettingValues,
        draw_differences,
        draw_methods,
        draw_sensitivity,
        plot_differences,
        plot_methods,
        plot_sensitivity,
    )
    from normal_guidance.study.figures.deletion import draw_trust, plot_trust
    from normal_guidance.study.figures.training import draw_grid, draw_learning_curves, plot_grid, plot_learning_curves

__all__ = [
    "AttendedScan",
    "ForestRow",
    "MethodValues",
    "SettingValues",
    "draw_attention",
    "draw_density",
    "draw_differences",
    "draw_divergences",
    "draw_grid",
    "draw_heads",
    "draw_learning_curves",
    "draw_methods",
    "draw_sensitivity",
    "draw_trust",
    "plot_attention",
    "plot_density",
    "plot_differences",
    "plot_divergences",
    "plot_grid",
    "plot_heads",
    "plot_learning_curves",
    "plot_methods",
    "plot_sensitivity",
    "plot_trust",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
