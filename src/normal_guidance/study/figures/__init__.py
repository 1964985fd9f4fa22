"""Figures.  A function `plot_...` makes a `Figure` from tensors, arrays and rows; `save` writes it to a file.

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
    from normal_guidance.show.figure_style import save as save
    from normal_guidance.study.figures.attention import AttendedScan as AttendedScan
    from normal_guidance.study.figures.attention import plot_attention as plot_attention
    from normal_guidance.study.figures.attention import plot_density as plot_density
    from normal_guidance.study.figures.attention import plot_divergences as plot_divergences
    from normal_guidance.study.figures.attention import plot_heads as plot_heads
    from normal_guidance.study.figures.comparisons import ForestRow as ForestRow
    from normal_guidance.study.figures.comparisons import MethodValues as MethodValues
    from normal_guidance.study.figures.comparisons import SettingValues as SettingValues
    from normal_guidance.study.figures.comparisons import plot_differences as plot_differences
    from normal_guidance.study.figures.comparisons import plot_methods as plot_methods
    from normal_guidance.study.figures.comparisons import plot_sensitivity as plot_sensitivity
    from normal_guidance.study.figures.deletion import plot_trust as plot_trust
    from normal_guidance.study.figures.training import plot_grid as plot_grid
    from normal_guidance.study.figures.training import plot_learning_curves as plot_learning_curves

__all__, __getattr__, __dir__ = lazy_names(__name__)
