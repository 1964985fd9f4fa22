"""A node in a hospital: receives series, predicts, sends results, and loses nothing when it is killed.

in     series by C-STORE, from a folder or a DICOMweb server
out    results at its destinations; a queue and an audit on disk
first  node.py, then series_queue.py
"""
