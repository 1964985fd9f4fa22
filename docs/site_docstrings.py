"""An extension of griffe: examples of docstrings that start with >>> become code, wherever they stand."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class FencedExamples(Extension):
    """Put every run of lines from ``>>>`` to the next blank line between fences."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    run = re.compile(r"^( *)>>> .*(?:\n(?! *\n| *$).*)*", re.MULTILINE)
    return run.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)
