"""Figures: for each, one function makes a `Figure` from plain tensors, arrays and rows, and one writes it to a file.

guidance      what each divergence does to attention; the heads' normal references
attention     attention along the slices of scans, with the truth and thumbnails
datasets      where in a scan the positive slices lie
training      learning curves; the grid of learning rates and L1 strengths
comparisons   methods over seeds, sensitivity, differences with their intervals
style         what all of them share: colours, sizes, saving
"""
