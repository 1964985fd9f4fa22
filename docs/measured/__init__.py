"""Measurements of docs/replication.md, by stage; docs/measure_replication.py runs them."""
