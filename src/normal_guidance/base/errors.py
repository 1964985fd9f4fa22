"""The exceptions that the command line prints without a traceback, and how other errors become one.

with reading(path, "copy it again", SafetensorError):          what goes wrong inside names the path
choose_one_of("divergence", divergence, DIVERGENCES)           refuses what is not in a table
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, or the quota, or the file is as large as the disk or a limit allows."""


def shorten(text: str, most: int = 100) -> str:
    """A foreign text for a message, cut after so many characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def both_sides(of: str, ids: Iterable[str], where: str, others: Iterable[str]) -> str:
    """Three names of each of two sides that should meet, of those that do not: "the table: 'A1'; the store: 'a1'"."""
    here, there, sides = {*ids}, {*others}, []
    for side, names in ((of, sorted(here - there or here)), (where, sorted(there - here or there))):
        shown = ", ".join(repr(shorten(name)) for name in names[:3]) or "none"
        sides.append(f"{side}: {shown}{', ...' if len(names) > 3 else ''}")
    return "; ".join(sides)


LONGEST = 2500  # characters of the longest message


class UserError(ValueError):
    """A mistake that the user can correct; the command line prints it without a traceback and exits with 2.

    The message names the object, the value and the next action.

    >>> raise UserError("scan 'A17' has no slices; remove its row from the manifest")
    Traceback (most recent call last):
    normal_guidance.base.errors.UserError: scan 'A17' has no slices; remove its row from the manifest
    >>> len(str(UserError("x" * 10**6 + "; copy it again")))
    2500
    """

    def __init__(self, message: str = "") -> None:
        # What a damaged file holds may be of any length; the end, which says what to do, is kept.
        whole = len(message) <= LONGEST
        super().__init__(message if whole else f"{message[: LONGEST // 2 - 5]} ... {message[-LONGEST // 2 :]}")


class ContentError(UserError):
    """A member of another type than its field; who reads the file says which file, and what to do."""


FOREIGN = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)
"""What Python and most libraries raise when a file is damaged, or is not what it is called."""


@contextmanager
def reading(path: str | Path, again: str, *foreign: type[Exception], wrong: str = "cannot be read") -> Iterator[None]:
    """Errors in the block become a `UserError` that names the path and says what to do (`again`)."""
    # `foreign` are exceptions of a library's own, beside `FOREIGN`. A `UserError` that names the path stays as it is.
    try:
        yield
    except ContentError as error:
        raise UserError(f"{path} is damaged: {error}; {again}") from error
    except UserError as error:
        if type(error) is not UserError or str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from error
    except FOREIGN + foreign as error:
        raise UserError(f"{path} {wrong} ({reason(error)}); {again}") from error


def reason(error: BaseException) -> str:
    """What another library's error says, on one line and cut; the name of its class if it says nothing."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError) and str(error.args and error.args[0]).isidentifier():
        return f"{error} is missing"
    return shorten(" ".join(str(error).split()), 300) or type(error).__name__


def choose_one_of(what: str, value: object, allowed: Collection[object], hint: str = "") -> None:
    """Refuses a value that is not in a table, whose names the message lists; `hint` stands behind the value."""
    if value not in tuple(allowed):
        raise UserError(f"{what} {shorten(repr(value))} is unknown{hint}; choose one of {', '.join(map(str, allowed))}")


class UnreadableError(ValueError):
    """An image that cannot be used; the code that reads scans catches and records it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail

    def __reduce__(self) -> tuple[type[UnreadableError], tuple[str, str]]:
        return type(self), (self.kind, self.detail)  # so that worker processes can raise it
