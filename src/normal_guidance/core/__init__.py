"""Bags, guidance, models and metrics.  Imports torch only."""
