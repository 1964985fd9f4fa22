"""The exception that the command line prints without a traceback, texts in its messages, and errors of full disks."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, or the quota, or the file is as large as the disk or a limit allows."""


def shorten(text: str, most: int = 100) -> str:
    """A foreign text for a message, cut after so many characters."""
    return text if len(text) <= most else f"{text[:most]}..."


LONGEST = 2500
"""Characters of the longest message."""


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


class UnreadableError(ValueError):
    """An image that cannot be used; the code that reads scans catches and records it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail

    def __reduce__(self) -> tuple[type[UnreadableError], tuple[str, str]]:
        return type(self), (self.kind, self.detail)  # so that worker processes can raise it
