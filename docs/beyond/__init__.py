"""The study behind docs/results/beyond.md, one file a stage; docs/measure_beyond.py runs it."""
