"""Small scans, a reader that misbehaves on demand and a tiny encoder, found by name in worker processes and on Ray.

A scan's file is an array, or a word: what its reader does instead of reading.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch

from normal_guidance.base.errors import UnreadableError
from normal_guidance.scans.features.encoders import Encoder
from normal_guidance.scans.features.preprocessing import Preprocessing
from normal_guidance.scans.index.manifest import Manifest, ScanRow, write_manifest
from normal_guidance.scans.index.problems import Problem

SIZE, WIDTH = 8, 5
PREPROCESSING = Preprocessing(windows=((-100.0, 300.0),), size=SIZE)


def make_manifest(folder: Path, lengths: list[int], words: dict[int, str] | None = None) -> Manifest:
    """Scans of so many slices; `words` replaces some scans' arrays."""
    random = np.random.default_rng(0)
    root = folder / "scans"
    root.mkdir(parents=True)
    rows = []
    for number, length in enumerate(lengths):
        name = f"s{number:03d}"
        hu = random.normal(50, 100, (length, 10, 12)).astype(np.float32)
        if number in (words or {}):
            (root / name).write_text((words or {})[number])
        else:
            with (root / name).open("wb") as file:
                np.save(file, hu)
        labels = None if number % 3 == 2 else (np.arange(length) % 2 * (number % 2)).astype(np.int8)
        of_slices = (name,) * length, tuple(range(length)), tuple(map(float, range(length)))
        rows.append(ScanRow(name, f"p{number // 2}", number % 2, labels, "dicom", *of_slices, 10, 12))
    return write_manifest(folder / "manifest.parquet", rows, {"source": "fake", "root": str(root)})


def make_parts(manifest: Manifest) -> dict[str, str]:
    """By patient, in turn."""
    turn = ("train", "val", "test", "train")
    return {row.scan_id: turn[int(row.patient_id[1:]) % 4] for row in manifest}


def read(row: ScanRow, root: Path, *, repair: bool = True) -> tuple[np.ndarray, list[Problem]]:
    """The slices of a scan, or whatever its file says."""
    path = root / row.files[0]
    content = path.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        hu = np.load(path)
        problem = Problem(row.scan_id, row.files[0], "intercept", "wrong", "mended")
        return hu, [problem] if repair and hu[0, 0, 0] > 80 else []
    word = content.decode()
    if word == "unreadable":
        raise UnreadableError("unreadable", f"{row.files[0]}: no image")
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "hang":
        time.sleep(600)
    if word == "short":
        return np.zeros((len(row) - 1, 10, 12), np.float32), []
    if word == "nan":
        return np.full((len(row), 10, 12), np.nan, np.float32), []
    raise RuntimeError(f"line one\nline two of {word}")


def read_slowly(row: ScanRow, root: Path, *, repair: bool = True) -> tuple[np.ndarray, list[Problem]]:
    """As a decoder does, which leaves time to be killed."""
    time.sleep(0.02)
    return read(row, root, repair=repair)


def load(device: str = "cpu", precision: str = "float32", *, scale: float = 1.0, unit_range: bool = False) -> Encoder:
    """A random projection."""
    weights = torch.randn(WIDTH, SIZE * SIZE, generator=torch.Generator().manual_seed(1)) * scale
    layer = torch.nn.Linear(SIZE * SIZE, WIDTH, bias=True)
    layer.weight.data, layer.bias.data = weights, torch.arange(WIDTH, dtype=torch.float32)
    module = torch.nn.Sequential(torch.nn.Flatten(), layer).requires_grad_(False).to(device)
    return Encoder("tiny", 1, SIZE, WIDTH, unit_range, f"tiny-{scale}", module, device)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def load_by_process(driver: int, device: str = "cpu", precision: str = "float32") -> Encoder:
    """Other weights in other processes."""
    return load(device, precision, scale=1.0 if os.getpid() == driver else 2.0)


def make_vit_weights(width: int = 24, layers: int = 2, hidden: int = 20) -> dict[str, torch.Tensor]:
    """A ViT for 12 x 12 images in patches of 4 x 4, with torchvision's names, sizes and order; every number random."""
    vector, of_layers = (width,), {}
    for number in range(layers):
        layer = {
            **{"ln_1.weight": vector, "ln_1.bias": vector},
            **{"self_attention.in_proj_weight": (3 * width, width), "self_attention.in_proj_bias": (3 * width,)},
            **{"self_attention.out_proj.weight": (width, width), "self_attention.out_proj.bias": vector},
            **{"ln_2.weight": vector, "ln_2.bias": vector},
            **{"mlp.0.weight": (hidden, width), "mlp.0.bias": (hidden,)},
            **{"mlp.3.weight": (width, hidden), "mlp.3.bias": vector},
        }
        of_layers |= {f"encoder.layers.encoder_layer_{number}.{name}": shape for name, shape in layer.items()}
    shapes = {
        **{"class_token": (1, 1, width), "conv_proj.weight": (width, 3, 4, 4), "conv_proj.bias": vector},
        **{"encoder.pos_embedding": (1, 10, width), "encoder.ln.weight": vector, "encoder.ln.bias": vector},
        **of_layers,
        **{"heads.head.weight": (10, width), "heads.head.bias": (10,)},
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
