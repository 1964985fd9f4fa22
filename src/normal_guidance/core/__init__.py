"""Bags, guidance, models and metrics: imports torch only."""
