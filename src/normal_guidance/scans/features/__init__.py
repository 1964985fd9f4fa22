"""From a manifest to a store: slices are read, prepared and encoded; users' own features are imported.

in     a manifest, or feature files of other programs
out    a store (`store.py`), which training and prediction read
first  encoding.py
"""
