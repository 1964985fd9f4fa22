"""Training: a grid of configurations at once, the paper's protocol, and runs on disk.

in     bags of a store (`ScanSet`) and a grid (`config.py`)
out    a run: winners' weights, history, report, predictions (`run.py`)
first  sweep.py
"""
