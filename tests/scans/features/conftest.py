"""Lets the tests, and the processes that they start, import what lies beside them: fake_scans."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
