"""Figures.  A function `plot_...` makes a `Figure` from tensors, arrays and rows; `draw_...` writes it to a file.

divergences   what each divergence does to attention; the heads' normal references
attention     attention along the slices of scans, with slice labels and thumbnails
datasets      where in a scan the positive slices lie
training      learning curves; the grid of learning rates and L1 strengths
comparisons   methods over seeds, sensitivity, differences with their intervals
deletion      scan scores without the attended slices, or with these alone

Colours, sizes and saving are in `normal_guidance.presentation.figure_style`.
"""
