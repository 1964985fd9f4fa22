"""The file from which a killed run resumes: the sweep's state with a seal, bound to one run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from normal_guidance.errors import UserError
from normal_guidance.tensor_files import read_tensors, write_tensors
from normal_guidance.typed_json import Between, ContentError, read_as

SAVE_EPOCHS, SAVE_SECONDS = 50, 300.0
"""The state is saved after this many epochs or seconds, whichever comes first.

The time is checked after each epoch, so a killed run loses at most that much, plus the epoch being trained.
"""


class StateFile:
    """A `Checkpoint` in a file that belongs to one run and records its time and environments so far."""

    def __init__(
        self,
        path: Path,
        run: str,
        save_epochs: int = SAVE_EPOCHS,
        save_seconds: float = SAVE_SECONDS,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("save_epochs", save_epochs), ("save_seconds", save_seconds)):
            if not value > 0:
                raise UserError(f"{name} is {value}; it must be above 0")
        self.path, self.run = path, run
        self.save_epochs, self.save_seconds = save_epochs, save_seconds
        self.resumed = 0
        """The number of times that the run resumed from a saved state."""
        self.environments = [] if environment is None else [dict(environment)]
        """The distinct environments of all starts of this run, in order of their first start."""
        self._seconds_before, self._begin = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, without time lost when it was killed."""
        return self._seconds_before + time.monotonic() - self._begin

    def due(self, epochs: int, seconds: float) -> bool:
        return epochs >= self.save_epochs or seconds >= self.save_seconds

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        kept = {
            "run": self.run,
            "seconds": self.seconds,
            "resumed": self.resumed,
            "environments": self.environments,
            "sweep": dict(about),
        }
        write_tensors(self.path, tensors, kept)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.path.exists():
            return None
        tensors, kept = read_tensors(self.path, _AFRESH)
        if not isinstance(kept, dict) or kept.get("run") != self.run:
            raise UserError(f"{self.path} belongs to another run; {_AFRESH}")
        try:
            before = read_as(_Kept, kept)
        except ContentError as error:
            raise UserError(f"{self.path} is damaged, or an older version wrote it: {error}; {_AFRESH}") from error
        self.resumed = before.resumed + 1
        self.environments = [
            *before.environments,
            *(one for one in self.environments if one not in before.environments),
        ]
        self._seconds_before, self._begin = before.seconds, time.monotonic()
        return tensors, before.sweep


@dataclass(frozen=True)
class _Kept:
    """What is saved beside the tensors."""

    run: str
    seconds: Annotated[float, Between(0.0)]
    resumed: Annotated[int, Between(0.0)]
    environments: list[dict[str, Any]]
    sweep: dict[str, Any]
    """The sweep's own part, which the sweep reads."""


_AFRESH = "copy it again, or delete it to train from the start"
