"""Tensors in safetensors files with a seal (`normal_guidance.base.files`), written atomically and checked when read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normal_guidance.base.errors import reading
from normal_guidance.base.files import OPEN, SEAL, is_sealed, seal, write_atomically
from normal_guidance.base.records import parse_json

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""Names of dtypes in the header of a safetensors file, for all that a state or a model may have."""


PIECE = 2**22  # bytes that are read at a time to check a file


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file with a seal, without a second copy in memory of what may be gigabytes."""
    # The library notices a truncated file, but not a changed value; its `save` makes that copy, and its `save_file`
    # opens the file itself, so it could not be synced.
    # Wide dtypes first, as in the library, so that every tensor starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"about": json.dumps(about), SEAL: OPEN}}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = seal(len(text).to_bytes(8, "little") + text, (raw_bytes(tensors[name]) for name in names))

    def write(file: BinaryIO) -> None:
        file.write(head)
        for name in names:
            file.write(raw_bytes(tensors[name]))

    write_atomically(path, write)


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy if it is contiguous on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path, again: str) -> tuple[dict[str, Tensor], Any]:
    """The tensors, mapped to memory, and the metadata of the file, whose seal is checked."""
    with reading(path, again, SafetensorError, wrong="is damaged or was not written by normal-guidance"):
        with path.open("rb") as file:  # piece by piece: it may be larger than the memory
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            file.seek(0)
            is_sealed(file.read(8 + size), path, iter(partial(file.read, PIECE), b""), again)
        with safe_open(path, framework="pt") as tensors:
            about = parse_json((tensors.metadata() or {})["about"])
            return {name: tensors.get_tensor(name) for name in tensors.keys()}, about  # noqa: SIM118 (no mapping)
