"""The default model: fitted, measured out of fold, described on a page, bundled, exported and shared.

in     a store
out    a bundle (`bundle.py`), which prediction loads, and its page
first  fitting.py
"""
