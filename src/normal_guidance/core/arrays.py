"""Numbers in any form that people have them: tensors, numpy arrays, pandas columns and lists, as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int, Int64, Shaped
from torch import Tensor

from normal_guidance.base.errors import UserError, shorten


@runtime_checkable
class HasArray(Protocol):
    """What numpy can make an array of: its own arrays and numbers, pandas columns, tensors."""

    def __array__(self) -> Any: ...


Array = Tensor | HasArray | Sequence[Any]
"""A tensor, a numpy array, a pandas column, or a list of numbers, which may be nested."""

PerBag = Int[Tensor, "bags"]  # a whole number for each bag, such as its length or its first row


def as_tensor(values: object, name: str, like: Tensor | None = None) -> Tensor:
    """The values as a tensor, on the device of `like`; a tensor stays as it is, with its gradient and its device."""
    if isinstance(values, Tensor):
        return values
    if values is None or isinstance(values, str | bytes | dict | set) or not isinstance(values, HasArray | Sequence):
        raise UserError(f"{name}: got {_shown(values)}; give numbers in a tensor, an array or a list")
    try:
        tensor = _read(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name}: got {_shown(values)}, {_why(values)}") from error
    return tensor if like is None else tensor.to(like.device)


def with_axes(values: object, name: str, *axes: str) -> Tensor:
    """The values as a tensor that has these axes, none of them empty."""
    tensor = as_tensor(values, name)
    if tensor.ndim != len(axes) or not tensor.numel():
        raise UserError(f"{name} has the shape {tuple(tensor.shape)}; give ({', '.join(axes)})")
    return tensor


def _read(values: object) -> Tensor:
    if isinstance(values, Tensor):
        return values
    if isinstance(values, HasArray):
        array = values.__array__()
        # Torch refuses arrays that are turned round, and warns of read-only ones.
        if any(stride < 0 for stride in array.strides) or not array.flags.writeable or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return torch.as_tensor(array)
    if not isinstance(values, Sequence):
        return torch.as_tensor(values)
    if any(_has_rows(entry) for entry in values):
        return torch.stack([_read(entry) for entry in values])
    # Torch takes numpy's numbers in a list, but no arrays without an axis; indexed with (), both are numbers.
    return torch.as_tensor([entry[()] if hasattr(entry, "__array__") else entry for entry in values])


def _has_rows(entry: object) -> bool:
    """Whether an entry of a list is read on its own: tensors, whose gradient stays, and whatever may have an axis."""
    if hasattr(entry, "__array__"):
        return isinstance(entry, Tensor) or getattr(entry, "ndim", 1) > 0
    return isinstance(entry, Sequence) and not isinstance(entry, str | bytes)


def _shown(values: object) -> str:
    shape, kind = getattr(values, "shape", None), getattr(values, "dtype", None)
    what = shorten(repr(values), 60) if shape is None else f"of shape {tuple(shape)} and type {kind}"
    return f"{type(values).__name__} {what}"


def _why(values: Any) -> str:
    """What is wrong with values that torch does not take, and what to do."""
    kind, singles = getattr(getattr(values, "dtype", None), "kind", ""), _singles(values)
    if kind in ("U", "S") or any(isinstance(single, str) for single in singles):
        return "which holds text; give numbers in a tensor, an array or a list"
    if kind == "O" or any(single is None for single in singles):
        return "which holds objects that are not numbers; give numbers in a tensor, an array or a list"
    return "whose rows differ in length or are not numbers; give rows of equal length, or packed values with lengths"


def _singles(values: object) -> list[object]:
    """The single values of nested lists."""
    return [single for some in values for single in _singles(some)] if isinstance(values, list | tuple) else [values]


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


LEAST_SPREAD = 1 / 200  # of features that vary by about their size, a twentieth of it is left of a destroyed image


def refuse_alike(sd: Float64[Tensor, "features"], mean: Float64[Tensor, "features"], what: str, action: str) -> None:
    """Refuse features of which nine in ten hardly vary over slices: a model would learn from how they were rounded."""
    size = (mean.square() + sd.square()).sqrt()
    shares = (sd / size)[size > 0]  # a feature that is always 0 may be one that these scans do not need
    if not len(shares) or shares.quantile(0.9) < LEAST_SPREAD:
        raise UserError(
            f"{what} are nearly the same in all slices: nine in ten features vary by less than "
            f"1/{1 / LEAST_SPREAD:.0f} of their size; {action}"
        )


def bag_of_rows(lengths: PerBag, total: int | None = None) -> Int64[Tensor, "rows"]:
    """The number of each row's bag; given the `total` of the lengths, it does not wait for a GPU."""
    bags = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(bags, lengths, output_size=total)


def find_bags(rows: Int[Tensor, "rows"], lengths: Int[Tensor, "*steps bags"]) -> Int64[Tensor, "*steps rows"]:
    """The bag of each given row, by binary search, or the number of bags; for all rows `bag_of_rows` is faster."""
    rows = rows.expand(*lengths.shape[:-1], -1).contiguous()
    return torch.searchsorted(lengths.cumsum(-1), rows, right=True)


def place_in_bag(lengths: PerBag) -> Int64[Tensor, "rows"]:
    """Each row's place in its bag, counted from 0."""
    bag = bag_of_rows(lengths)
    return torch.arange(len(bag), device=lengths.device) - (lengths.cumsum(0) - lengths)[bag]


def running_sum(values: Shaped[Tensor, "rows"]) -> Shaped[Tensor, "rows_and_one"]:
    """The sum of all values before each row, and last the sum of all."""
    return F.pad(values.cumsum(0), (1, 0))


def sum_per_bag(values: Shaped[Tensor, "rows"], lengths: PerBag) -> Shaped[Tensor, "bags"]:
    """The sum of each bag's values; flags and whole numbers are exact, as differences of two running sums."""
    if values.is_floating_point():  # added within each bag: a running sum over all bags would lose their digits
        return values.new_zeros(len(lengths)).index_add(0, bag_of_rows(lengths), values)
    running, stops = running_sum(values), lengths.cumsum(0)
    return running[stops] - running[stops - lengths]


def check_lengths(lengths: PerBag, values: Shaped[Tensor, "..."], name: str) -> None:
    """Refuse lengths that are not counts of at least 1, or that do not add up to a vector of `values`."""
    if lengths.ndim != 1 or (len(lengths) and int(lengths.min()) < 1):
        raise UserError(
            f"lengths must be a vector of positive slice counts, got {lengths.tolist()}; leave empty bags out"
        )
    if values.shape != (int(lengths.sum()),):
        raise UserError(
            f"lengths add up to {int(lengths.sum())} slices, but {name} has shape {tuple(values.shape)}: "
            "give one number for every slice of every scan, in the same order"
        )
