"""What every case is held to: its outcome in a word, and errors that say something."""

from __future__ import annotations

from collections.abc import Callable

from guard import Finding

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.index.problems import KINDS as PROBLEM_KINDS

LONGEST_MESSAGE = 3000
"""Longest message on the terminal; problems.csv cuts its own."""


def expect(condition: object, detail: str) -> None:
    if not condition:
        raise Finding("wrong", detail)


def attempt(read: Callable[[], object]) -> str:
    """The outcome of reading; errors must be described in words."""
    try:
        read()
        return "read"
    except UnreadableError as error:
        expect(error.kind in PROBLEM_KINDS and error.detail.strip(), f"an error that says nothing: {error!r}")
        _check_memory(str(error))
        return error.kind
    except UserError as error:
        text = str(error)
        expect(len(text) < LONGEST_MESSAGE, f"a message of {len(text)} characters: {text[:200]}")
        _check_memory(text)
        return "user error"


def _check_memory(text: str) -> None:
    if "MemoryError" in text or "bad_alloc" in text:
        raise Finding("memory", text)
