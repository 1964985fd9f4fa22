"""The pages that `nguide view` serves on this machine: scans under their attention.

in     folders of runs, predictions or a manifest
out    slices as pictures, curves and texts for the page (frontend/)
first  server.py
"""
