"""Which configuration and epoch other rules would have kept; most of it needs finished runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from measured.data import slice_auroc
from measured.text import digits, short, table
from normal_guidance.core.metrics import auroc
from normal_guidance.core.models import METHODS
from normal_guidance.evaluation.study_predictions import read_prediction
from normal_guidance.simulate.semi_synthetic import SEEDS, SemiSynthetic, bayes_scan_scores, semi_synthetic_part
from normal_guidance.training.run_folder import PREDICTION_TABLE
from normal_guidance.training.selection import Selection


def difficulty() -> str:
    """How well the Bayes oracle ranks the scans of each set: how hard the set happens to be."""
    rows = []
    for seed in SEEDS:
        found = []
        for part in SemiSynthetic._fields:
            bags = semi_synthetic_part(seed, part)
            found.append(auroc(bayes_scan_scores(bags), bags.labels).item())
        rows.append((seed, *(digits(value, 4) for value in found)))
    return table(["seed", "training set", "validation set", "test set"], rows)


def margin() -> str:
    """Standard error of an AUROC by Hanley and McNeil's formula, half of the scans being positive."""
    rows = []
    for name, scans, area in (("validation", 2500, 0.7545), ("test", 1000, 0.7545)):
        n, both, lone = scans / 2, area / (2 - area), 2 * area**2 / (1 + area)
        square = (area * (1 - area) + (n - 1) * (both + lone - 2 * area**2)) / n**2
        rows.append((name, f"{scans:,}", digits(area, 4), digits(math.sqrt(square), 4)))
    return table(["set", "scans", "scan AUROC", "standard error"], rows)


class History(NamedTuple):
    """AUROC by epoch (row, the first is epoch 1) and configuration (column), and the configurations' L1 and lr."""

    train: np.ndarray
    val: np.ndarray
    l1: np.ndarray
    lr: np.ndarray


class Selected(NamedTuple):
    """What a rule keeps, and the best validation AUROC of every configuration (-inf: none could be selected)."""

    config: int
    epoch: int
    best: np.ndarray


def read_history(path: Path) -> History:
    rows = pd.read_parquet(path)
    configs = rows.drop_duplicates("config").sort_values("config")
    return History(
        train=rows.pivot(index="epoch", columns="config", values="train_auroc").to_numpy(),
        val=rows.pivot(index="epoch", columns="config", values="val_auroc").to_numpy(),
        l1=configs["l1"].to_numpy(),
        lr=configs["lr"].to_numpy(),
    )


def select(history: History, *, train_above_val: bool = True, patience: int | None = None) -> Selected:
    """The first best epoch of every configuration, and of these the best."""
    no_weights = {"": torch.zeros(len(history.lr))}
    selection = Selection(no_weights, train_above_val, patience)
    for epoch, (train, val) in enumerate(zip(history.train, history.val, strict=True), start=1):
        selection.update(epoch, torch.tensor(train), torch.tensor(val), no_weights)
    best = selection.val.numpy()
    winner = int(best.argmax())
    return Selected(winner, int(selection.epoch[winner]), best)


RULES: dict[str, dict[str, object]] = {
    "the rule": {},
    "no filter": {"train_above_val": False},
    "patience 100": {"patience": 100},
    "patience 50": {"patience": 50},
}


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """METHOD/SEED of whole runs, in the order of the paper's tables."""
    found = [path.parent for folder in folders for path in folder.glob("*/*/history.parquet")]
    methods = list(METHODS)
    return sorted(found, key=lambda run: (methods.index(run.parent.name), run.name))


def title(run: Path) -> str:
    """The method, and in what the run departs from the paper's protocol."""
    changed = json.loads((run / "config.json").read_text())["departures"]
    return ", ".join([run.parent.name, *(f"{name} {value}" for name, value in changed.items())])


def selection(folders: Sequence[Path]) -> str:
    rows = []
    for run in run_folders(folders):
        history = read_history(run / "history.parquet")
        chosen = {name: select(history, **rule) for name, rule in RULES.items()}  # type: ignore[arg-type]
        kept = chosen["the rule"]
        top = kept.best[kept.config]
        words = [f"{_point(history, kept)}: {digits(top, 4)}"]
        for one in list(chosen.values())[1:]:
            change = f"{one.best[one.config] - top:+.4f}".replace("0.", ".")
            same = (one.config, one.epoch) == (kept.config, kept.epoch)
            words.append("same" if same else f"{_point(history, one)}: {change}")
        near = int((kept.best > top - 0.001).sum())
        rows.append((title(run), run.name, *words, int(np.isinf(kept.best).sum()), near))
    return table(["method", "seed", *RULES, "skipped", "within .001"], rows)


def _point(history: History, one: Selected) -> str:
    return f"{short(history.l1[one.config])}, {short(history.lr[one.config])}, {one.epoch}"


def heads(folders: Sequence[Path]) -> str:
    """Localization by the heads' mean attention, beside each head by itself."""
    rows = []
    for run in run_folders(folders):
        if run.parent.name not in ("transmil", "smtp", "mhng") or not (run / PREDICTION_TABLE).exists():
            continue
        bags = semi_synthetic_part(int(run.name), "test")
        prediction = read_prediction(run, bags)
        alone = sorted(slice_auroc(head, bags) for head in prediction.log_attention)
        own = 1 - prediction.attention.sum() / len(bags)
        shown = [slice_auroc(prediction.slice_scores, bags), alone[0], median(alone), alone[-1], own.item()]
        rows.append((title(run), run.name, *(digits(value, 4) for value in shown)))
    return table(["method", "seed", "mean of heads", "worst head", "median", "best head", "share kept"], rows)
