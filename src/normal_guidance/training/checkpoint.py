"""The file from which a killed run resumes: the sweep's state with a checksum, bound to one run."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normal_guidance.errors import UserError
from normal_guidance.files import write_atomically

SAVE_EPOCHS, SAVE_SECONDS = 50, 300.0
"""The state is saved after this many epochs or seconds, whichever comes first.

The time is checked after each epoch, so a killed run loses at most that much, plus the epoch being trained.
"""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""Names of dtypes in the header of a safetensors file, for all that a state or a model may have."""


class StateFile:
    """A `Checkpoint` in a file that belongs to one run and records its time and environments so far.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     state = StateFile(Path(folder, "state.safetensors"), "run A")
        ...     state.save({"history": torch.zeros(2, 0)}, {"epoch": 7})
        ...     tensors, about = state.load()
        ...     tensors["history"].shape, about, state.resumed
        (torch.Size([2, 0]), {'epoch': 7}, 1)
    """

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
            "crc32": _checksum(tensors),
            "seconds": self.seconds,
            "resumed": self.resumed,
            "environments": self.environments,
            "sweep": dict(about),
        }
        write_tensors(self.path, tensors, kept)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.path.exists():
            return None
        tensors, kept = read_tensors(self.path)
        if not isinstance(kept, dict) or kept.get("run") != self.run:
            raise UserError(f"{self.path} belongs to another run; {_AFRESH}")
        if missing := [name for name in ("crc32", "seconds", "resumed", "environments", "sweep") if name not in kept]:
            raise UserError(f"{self.path} does not hold {missing[0]!r}: an older version wrote it; {_AFRESH}")
        if kept["crc32"] != _checksum(tensors):
            raise UserError(f"{self.path} is damaged (its checksum is wrong); {_AFRESH}")
        self.resumed = kept["resumed"] + 1
        before = kept["environments"]
        self.environments = [*before, *(one for one in self.environments if one not in before)]
        self._seconds_before, self._begin = kept["seconds"], time.monotonic()
        return tensors, kept["sweep"]


_AFRESH = "copy it again, or delete it to train from the start"


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    """The CRC-32 of all names and values.  safetensors notices a truncated file, but not a changed value."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(_raw(tensors[name]), zlib.crc32(name.encode(), total))
    return total


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file without a second copy in memory of what may be gigabytes.

    The library's `save` makes that copy, and its `save_file` opens the file itself, so it could not be synced.
    """
    # Wide dtypes first, as in the library, so that every tensor starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"about": json.dumps(about)}}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_raw(tensors[name]))

    write_atomically(path, write)


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy if it is contiguous on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors, mapped to memory, and the metadata of the file."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged or was not written by normal-guidance ({error}); {_AFRESH}") from error
