"""Does attention say where the finding is?  Tests on changed scans and untrained models, for runs and bundles.

in     a model, a store, and which part of it to test on
out    trust.json and a page with verdicts
first  examine.py
"""
