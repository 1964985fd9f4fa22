"""Whether the values of a scan are those of the scans that a model was trained on.

NIfTI does not say its modality, and headers may be wrong: only values tell CT in HU from MR, windowed copies and masks.
"""

from __future__ import annotations

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.values import ValueRange, Values

HU_SLACK = 500.0
"""HU may lie so far outside those of the training scans: half of the step from air to water."""

NO_AIR = -200.0
"""Lowest values above this are not air, and are accepted only as far as the training scans have them."""

SCALE_SLACK = 4.0
"""Values of other images, which have no unit, may be smaller or larger than in the training scans by this factor."""

NEGATIVE_SHARE = 0.25
"""Images whose training scans have no negative values may reach down to this share of their own highest values."""

DISTINCT_SHARE = 0.1
"""A scan with less than this share of the training scans' different values is a mask or a drawing."""

ANY_CT = ValueRange((-1024.0, -1000.0), (200.0, 3071.0), 640)
ANY_OTHER = ValueRange((0.0, 0.0), (0.0, 0.0), 640)
"""What NIfTI files are compared with where the training scans' values were not recorded."""


def why_not_values(known: ValueRange | None, row: ScanRow, values: Values, *, any_scale: bool) -> list[str]:
    """Reasons why the values of a scan are not as in the training scans; empty if they are.

    Args:
        known: the values of the training scans; None where they were not recorded.
        row: the scan.
        values: its values.
        any_scale: whether the model does not see the scale of values, because its windows are percentiles.
    """
    if known is None:
        if row.kind != "nifti":
            return []
        known, any_scale = (ANY_CT, any_scale) if row.modality == "CT" else (ANY_OTHER, True)
    few = values.distinct < DISTINCT_SHARE * known.distinct
    reasons = [f"it has {values.distinct} different values, as a mask or a drawing has"] if few else []
    return reasons + (_hu(known, values) if row.modality == "CT" else _without_unit(known, values, any_scale))


def _hu(known: ValueRange, values: Values) -> list[str]:
    reasons = []
    if values.low > max(known.low[1], min(known.low[1] + HU_SLACK, NO_AIR)):
        reasons.append(_unlike("lowest", values.low, known.low) + ": it may not be CT in HU")
    if values.high < known.high[0] - HU_SLACK:  # higher ones are metal
        reasons.append(_unlike("highest", values.high, known.high))
    return reasons


def _without_unit(known: ValueRange, values: Values, any_scale: bool) -> list[str]:
    reasons = []
    if known.low[0] >= 0 and values.low < -NEGATIVE_SHARE * abs(values.high):
        reasons.append(_unlike("lowest", values.low, known.low) + ": it may be CT")
    if not any_scale and not known.high[0] / SCALE_SLACK <= values.high <= known.high[1] * SCALE_SLACK:
        reasons.append(_unlike("highest", values.high, known.high))
    return reasons


def _unlike(which: str, value: float, known: tuple[float, float]) -> str:
    return f"its {which} values are about {value:.4g} and those of the training scans {known[0]:.4g} to {known[1]:.4g}"
