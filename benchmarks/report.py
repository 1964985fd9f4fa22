"""What the benchmarks share: what a figure must name, and names given on the command line.  Needs torch alone."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def machine(device: str, commit: str | None = None) -> dict[str, Any]:
    """Processors, versions, commit (as given, where the code travels without its repository), load, date."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    cuda = torch.device(device).type == "cuda"
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or _described_commit(),
        "load": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _described_commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return git.stdout.strip() or None


def names(table: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument type: comma-separated names out of a table."""
    known = list(table)

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; choose from {','.join(known)}")
        return chosen

    return parse
