"""The paper: its data, experiments, tables, figures and pages, and the tests of attention (trust).

in     stores, or data drawn here (`drawn.py`)
out    runs of every method and partition, tables, a page
first  experiment.py
"""
