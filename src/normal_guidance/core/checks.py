"""Checks of single values that users give: numbers of any library, and devices."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TypeGuard

import torch

from normal_guidance.errors import UserError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of Python or numpy; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number of Python or numpy; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def checked_whole(name: str, value: object, least: int = 1, most: float | int = math.inf) -> int:
    """Return a whole number of a range as Python's own, and refuse others."""
    if not is_whole(value) or not least <= value <= most:
        limits = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
        raise UserError(f"{name} is {value!r}; give a whole number {limits}")
    return int(value)


def check_device(device: torch.device | str | None) -> None:
    """Refuse a device that torch does not know or that this machine does not have; None is the usual one."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"device {str(device)!r} is unknown or not available here; use 'cpu'") from error
