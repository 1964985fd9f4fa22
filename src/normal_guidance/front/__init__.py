"""The front door: the functions and the objects that a person in a notebook or a script uses.

in     scans with labels, new scans
out    a fitted model, predictions, pictures and tables of both
first  fitted_model.py
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported; cli/commands.py says why
