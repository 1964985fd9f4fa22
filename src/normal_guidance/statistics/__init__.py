"""How well methods find slices and score scans, and whether a difference between two is real: needs only core."""
