"""The interval of a share."""

from __future__ import annotations

import math


def wilson(found: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The ends of a share's interval (Wilson, 1927)."""
    share = found / of
    middle, spread = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + (z / (2 * of)) ** 2)
    return max(0.0, (middle - spread) / (1 + z * z / of)), min(1.0, (middle + spread) / (1 + z * z / of))
