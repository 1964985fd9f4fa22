"""Numbers in any form that people have them: tensors, numpy arrays, pandas columns and lists, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from normal_guidance.errors import UserError, shorten


@runtime_checkable
class HasArray(Protocol):
    """What numpy can make an array of: its own arrays and numbers, pandas columns, tensors."""

    def __array__(self) -> Any: ...


Array = Tensor | HasArray | Sequence[Any]
"""A tensor, a numpy array, a pandas column, or a list of numbers, which may be nested."""


def as_tensor(values: object, name: str, like: Tensor | None = None) -> Tensor:
    """The values as a tensor; a tensor is returned as it is, so its gradient and its device stay.

    Args:
        values: a tensor, a numpy array, a pandas column, or a list of numbers.
        name: what they are called in the message, if they are none of these.
        like: the tensor on whose device they are used; values that are no tensor yet are put there.
    """
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
        return torch.as_tensor(_usable(values.__array__()))
    if not isinstance(values, Sequence):
        return torch.as_tensor(values)
    if any(_has_rows(one) for one in values):
        return torch.stack([_read(one) for one in values])
    # Torch takes numpy's numbers in a list, but no arrays without an axis; indexed with (), both are numbers.
    return torch.as_tensor([one[()] if hasattr(one, "__array__") else one for one in values])


def _has_rows(one: object) -> bool:
    """Whether an entry of a list is read on its own: tensors, whose gradient stays, and whatever may have an axis."""
    if hasattr(one, "__array__"):
        return isinstance(one, Tensor) or getattr(one, "ndim", 1) > 0
    return isinstance(one, Sequence) and not isinstance(one, str | bytes)


def _usable(array: Any) -> Any:
    """The array in a form that torch takes: it refuses arrays that are turned round, and warns of read-only ones."""
    if any(stride < 0 for stride in array.strides) or not array.flags.writeable or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _shown(values: object) -> str:
    shape, kind = getattr(values, "shape", None), getattr(values, "dtype", None)
    what = shorten(repr(values), 60) if shape is None else f"of shape {tuple(shape)} and type {kind}"
    return f"{type(values).__name__} {what}"


def _why(values: Any) -> str:
    """What is wrong with values that torch does not take, and what to do."""
    kind, ones = getattr(getattr(values, "dtype", None), "kind", ""), _ones(values)
    if kind in ("U", "S") or any(isinstance(one, str) for one in ones):
        return "which holds text; give numbers in a tensor, an array or a list"
    if kind == "O" or any(one is None for one in ones):
        return "which holds objects that are not numbers; give numbers in a tensor, an array or a list"
    return "whose rows differ in length or are not numbers; give rows of equal length, or packed values with lengths"


def _ones(values: object) -> list[object]:
    """The single values of nested lists."""
    return [one for some in values for one in _ones(some)] if isinstance(values, list | tuple) else [values]
