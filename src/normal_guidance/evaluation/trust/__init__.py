"""Tests of whether a model's attention can be trusted.  A user runs them on a model; no verdict needs slice labels.

shuffled_slices   slices in another order: attention must go with the slices, not stay at the positions
random_weights    untrained weights: attention must be worth more than with these
deletion_curves   the scan's score without the attended slices, or with these alone
deletion          whether attended slices matter, and the alarm for attention that points away from the evidence
examination       all four tests of one model: `examine`
trained_run       all four tests of a run's winner: `examine_run`
"""
