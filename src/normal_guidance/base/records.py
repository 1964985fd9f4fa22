"""JSON read back with types: every value is what its field says, or the error names the field.

    read_as(Calibration, {"slope": 1.0, "intercept": "0"})      intercept is '0', not a number

A dataclass or a NamedTuple says what an object must hold.  Its fields may be texts, numbers, booleans, None, `Literal`,
unions, tuples, lists, mappings and further classes; `Annotated[float, Between(0.0, 1.0)]` bounds a number.  Numbers are
finite.  A member that no field is called after is refused, because a damaged name would else drop a value.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from normal_guidance.base.errors import ContentError, UserError, shorten

T = TypeVar("T")


DEEPEST = 100  # levels of nesting that a file may have; ours have ten
NULL_IS_NAN = "null is NaN"  # in `Annotated[float, NULL_IS_NAN]`: JSON has no NaN


@dataclass(frozen=True)
class Between:
    """The range of a number, its ends included."""

    low: float
    high: float = math.inf

    def __str__(self) -> str:
        return f"{self.low:g} or more" if self.high == math.inf else f"between {self.low:g} and {self.high:g}"


def parse_json(content: bytes | str) -> Any:
    """Parse JSON, more strictly than Python does: no NaN, no member twice, no nesting that exhausts the stack."""
    try:
        value = json.loads(content, parse_constant=_refuse_constant, object_pairs_hook=_members)
    except RecursionError as error:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from error
    level = [value]
    for _ in range(DEEPEST):
        outer = [item for item in level if isinstance(item, dict | list)]
        level = [inner for item in outer for inner in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return value
    raise ValueError(f"nested more than {DEEPEST} levels deep")


def valid_json(value: Any) -> Any:
    """Return the value as strict JSON: null for NaN and infinity, text for paths."""
    if isinstance(value, Mapping):
        return {str(name): valid_json(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []:
        raise ValueError(f"member {twice[0]!r} occurs twice")
    return dict(pairs)


@overload
def read_as(kind: type[T], value: Any, name: str = "", *, exact: bool = True) -> T: ...
@overload
def read_as(kind: Any, value: Any, name: str = "", *, exact: bool = True) -> Any: ...
def read_as(kind: Any, value: Any, name: str = "", *, exact: bool = True) -> Any:
    """The value as a class of ours, or as another type; a `ContentError` names the member that is wrong."""
    # Not `exact`: members that the class does not have are left out, but not in objects further inside.
    if not exact and isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if key in _fields(kind)[0]}
    return _read(kind, value, name)


def _read(kind: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        if value is None and NULL_IS_NAN in inner:
            return math.nan
        value = _read(inner[0], value, name)
        for bound in inner[1:]:
            if isinstance(bound, Between) and not bound.low <= value <= bound.high:
                _refuse(name, value, str(bound))
        return value
    if origin is Literal:
        if value not in inner or type(value) not in map(type, inner):
            _refuse(name, value, f"one of {', '.join(map(str, inner))}")
        return value
    if origin in (Union, types.UnionType):
        return _union(inner, value, name)
    if kind in _PLAIN:
        return _plain(kind, value, name)
    if origin in (tuple, list, Sequence) or kind in (tuple, list):
        return _items(origin or kind, inner, value, name)
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        if not isinstance(value, dict):
            _refuse(name, value, "an object")
        return {key: _read(inner[1] if inner else Any, item, _below(name, key)) for key, item in value.items()}
    return _object(kind, value, name)


_PLAIN = {str: "text", bool: "true or false", int: "a whole number", float: "a number", type(None): "null"}


def _plain(kind: type, value: Any, name: str) -> Any:
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        _refuse(name, value, _PLAIN[kind])
    return value


def _union(kinds: Sequence[Any], value: Any, name: str) -> Any:
    if type(value) in kinds and type(value) in _PLAIN:
        return _plain(type(value), value, name)
    others = [kind for kind in kinds if kind is not type(None)]
    for kind in others[:-1]:
        try:
            return _read(kind, value, name)
        except ContentError:
            continue
    return _read(others[-1], value, name)


def _items(kind: Any, inner: Sequence[Any], value: Any, name: str) -> Any:
    if not isinstance(value, list):
        _refuse(name, value, "a list")
    if kind is tuple and inner and inner[-1] is not ...:
        if len(value) != len(inner):
            _refuse(name, value, f"a list of {len(inner)}")
        kinds = inner
    else:
        kinds = [inner[0] if inner else Any] * len(value)
    items = [_read(wanted, item, f"{name}[{i}]") for i, (wanted, item) in enumerate(zip(kinds, value, strict=True))]
    return items if kind is list else tuple(items)


def _object(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        _refuse(name, value, "an object")
    hints, needed = _fields(kind)
    for key in value:
        if key not in hints:
            raise ContentError(f"{_below(name, key)} is unknown; known are {', '.join(hints)}")
    for key in needed:
        if key not in value:
            raise ContentError(f"{_below(name, key)} is missing")
    known = {key: _read(hints[key], item, _below(name, key)) for key, item in value.items()}
    try:
        return kind(**known)
    except UserError as error:  # the class's own checks, which may repeat a value of any length
        raise UserError(shorten(str(error), 500)) from error


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types of a class's fields, and the names of those without a default."""
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        given = [field for field in fields(kind) if field.init]
        needed = tuple(field.name for field in given if field.default is MISSING and field.default_factory is MISSING)
        return {field.name: hints[field.name] for field in given}, needed
    names: tuple[str, ...] = kind._fields  # of a NamedTuple
    return {name: hints[name] for name in names}, tuple(name for name in names if name not in kind._field_defaults)


def _below(name: str, key: str) -> str:
    return f"{name}.{key:.60}" if name else f"{key:.60}"


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise ContentError(f"{name or 'the content'} is {_shown(value)}, not {wanted}")


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
