"""Attention that can be trusted: four tests that a user runs on a model, none of which needs slice labels.

shuffling     slices in another order: attention must go with the slices, not stay at the places
randomizing   weights that have learnt nothing: attention must be worth more than with these
curves        the scan's score without the attended slices, or with these alone
deleting      whether attended slices matter, and the alarm for attention that points away from the evidence
examining     all of them: `examine`
runs          the same for the folder of a run: `examine_run`
"""
