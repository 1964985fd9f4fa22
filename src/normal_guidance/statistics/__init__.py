"""Scores of methods on slices and scans, and tests of the differences between them.  Imports only `core`."""
