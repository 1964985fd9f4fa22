"""The values that the shell's TAB key offers.

The names repeat those of tables whose modules import torch or pydicom, which takes a second; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

CORE = Path(__file__).resolve().parents[1] / "core"

METHODS = ("centered_gaussian", "max", "mean", "abmil", "smap", "ng", "transmil", "smtp", "mhng")
BEYOND = ("evidence", "evidence_ng", "whole_bells", "whole_bells_ng")
FIELD, REGULARIZERS = (
    tuple(sorted(file.stem for file in (CORE / folder).glob("[!_]*.py"))) for folder in ("field", "regularizers")
)
DIVERGENCES = ("forward_kl", "reverse_kl", "squared_error")
NEGATIVES = ("own", "uniform", "none")
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "cosine")
ENCODERS = ("vit-b16-imagenet", "efficientnet-lite0")
WINDOWS = ("head", "lung", "mediastinum", "abdomen", "adc", "percentile", "none")
SOURCES = ("rsna-ich", "rsna-pe", "rsna-at", "prostatex", "folder")
LAYOUTS = ("rsna-ich", "rsna-pe", "rsna-at", "folder")
LABELS = ("image", "patient")
DATASETS = ("semi-synthetic", "lidc-positions")
SCAN_DATASETS = ("prostatex",)
ANATOMIES = ("head", "chest", "abdomen")
ODDITIES = (
    *("tilt", "gaps", "duplicates", "mixed_series", "localizer", "secondary_capture", "one_slice", "unreadable"),
    *("truncated", "wrong_intercept", "bits", "multi_frame", "no_position", "reversed", "shuffled", "double_rows"),
    *("rows_without_image", "indeterminate", "incomplete_organ"),
)
COMPRESSIONS = ("none", "rle", "jpeg2000", "jpeg-lossless", "jpeg-ls", "mixed")
FORMATS = ("npz", "hdf5", "torchmil")
IMPORT_FORMATS = ("npz", "npy", "pt", "hdf5", "parquet", "torchmil")
DTYPES = ("float16", "float32")
DEVICES = ("cpu", "cuda", "cuda:0", "cuda:1")
PRECISIONS = ("auto", "float32", "tf32", "bf16")
TRACKERS = ("tensorboard", "mlflow")
ENGINES = ("auto", "packed", "recorded", "compiled")

Complete = Callable[[str], list[str]]
"""Maps the text typed so far to its completions."""


def one_of(names: Sequence[str]) -> Complete:
    """Return a function that completes one name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def some_of(names: Sequence[str], *whole: str) -> Complete:
    """Return a function that completes the last of several names, separated by commas, and offers each name once.

    Args:
        names: names that may be joined.
        whole: words that stand alone, such as 'all'.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        offered = names if comma else (*whole, *names)
        return [f"{before}{comma}{name}" for name in offered if name.startswith(last) and name not in taken]

    return complete
