"""The results of a run: its history, its winners' weights, and the models rebuilt from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from normal_guidance.data.typed_tables import read_columns
from normal_guidance.errors import UserError
from normal_guidance.files import read_json_as, write_json, write_parquet
from normal_guidance.tensor_files import read_tensors, write_tensors
from normal_guidance.training.config import AXES, Config
from normal_guidance.training.run_folder import FORMAT, HISTORY_TABLE, REPORT, WINNERS, forget
from normal_guidance.training.selection import group_of
from normal_guidance.training.stacked_model import initial_model
from normal_guidance.training.sweep import Sweep
from normal_guidance.training.sweep_state import HISTORY
from normal_guidance.typed_json import Between, ContentError, read_as

COPY = "copy the run again, or delete it and start it again"


def diverged(result: Sweep) -> int:
    """Count the configurations whose loss or scores became NaN or infinite, in the last epoch too."""
    lost = ~result.history.isfinite().all(2)
    trained = torch.arange(1, len(lost) + 1)[:, None] <= result.trained
    return int((trained & lost).any(0).sum())


def history_table(result: Sweep) -> pa.Table:
    """One row for each configuration and epoch that was trained."""
    epochs, count, _ = result.history.shape
    number, epoch = torch.meshgrid(torch.arange(count), torch.arange(1, epochs + 1), indexing="ij")
    trained = epoch <= result.trained[:, None]
    number, epoch = number[trained], epoch[trained]
    selected = epoch == result.best_epoch[number]
    axes = {axis: pa.array([getattr(config, axis) for config in result.configs]) for axis in AXES}
    numbers = result.history[epoch - 1, number].T.contiguous().numpy()
    return pa.table(
        {
            "config": number.numpy(),
            **{axis: values.take(pa.array(number.numpy())) for axis, values in axes.items()},
            "epoch": epoch.numpy(),
            **dict(zip(HISTORY, numbers, strict=True)),
            "selected": selected.numpy(),
            "winner": (selected & torch.isin(number, torch.tensor([one.number for one in result.winners]))).numpy(),
        }
    )


def group_names(configs: Sequence[Config]) -> dict[tuple[object, ...], str]:
    """A name for each group that has its own winner, fit for a file name; empty where there is only one group."""
    groups = {group_of(config): config for config in configs}
    if len(groups) == 1:
        return dict.fromkeys(groups, "")
    return {group: f"{c.divergence}-lambda{c.guidance_weight}-seed{c.seed}" for group, c in groups.items()}


def winner_file(group: str) -> str:
    """Name of a winner's two files, without .safetensors and .json."""
    return f"best-{group}" if group else "best"


def write_history(folder: Path, result: Sweep) -> None:
    """Write history.parquet."""
    write_parquet(folder / HISTORY_TABLE, history_table(result))


def read_history(path: Path) -> pa.Table:
    """Read a history.parquet; losses and scores of configurations that diverged are NaN."""
    return read_columns(path, HISTORY_SCHEMA, COPY, optional=("val_loss", "winner"))  # the first versions had none


HISTORY_SCHEMA = pa.schema(
    {
        "config": pa.int64(),
        **{**dict.fromkeys(AXES, pa.float64()), "divergence": pa.string(), "seed": pa.int64()},
        "epoch": pa.int64(),
        **dict.fromkeys(HISTORY, pa.float64()),
        "selected": pa.bool_(),
        "winner": pa.bool_(),
    }
)
"""Columns of history.parquet."""


def write_winners(folder: Path, result: Sweep, features: int) -> None:
    """Write the winners' weights and what `load_winner` needs."""
    forget(folder, *WINNERS)  # an earlier, killed start may have had others: CUDA does not promise the same bits
    names = group_names(result.configs)
    for winner in result.winners:
        file = winner_file(names[group_of(winner.config)])
        about = {
            "format": FORMAT,
            "config": winner.config.as_json(),
            "features": features,
            "number": winner.number,
            "epoch": winner.epoch,
            "val_auroc": winner.val_auroc,
            "val_loss": winner.val_loss,
        }
        write_tensors(folder / f"{file}.safetensors", winner.weights, about)
        write_json(folder / f"{file}.json", about)


@dataclass(frozen=True)
class AboutWinner:
    """The types of best.json; what has a default came with later versions."""

    format: int
    config: Config
    features: Annotated[int, Between(1.0, 2.0**31)]
    number: int
    epoch: int
    val_auroc: float
    val_loss: float | None = None


def about_winner(folder: Path, group: str = "") -> AboutWinner:
    """Read a winner's best.json."""
    return read_json_as(folder / f"{winner_file(group)}.json", AboutWinner, COPY)


def winner_model(config: Config, features: int, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the plain model with these weights, in their dtype, ready to predict; others are a RuntimeError."""
    if features > max((size for tensor in weights.values() for size in tensor.shape), default=0):
        raise RuntimeError(f"no weights are of {features} features")  # before a model of that size is made
    dtype = next(iter(weights.values())).dtype
    model = initial_model(config, features).to(dtype)
    model.load_state_dict(dict(weights))
    return model.eval()


def load_winner(folder: str | Path, group: str = "") -> nn.Module:
    """Load the winner of a run as a plain model; `group` names which one, where the run has several."""
    folder = Path(folder)
    if not (folder / REPORT).is_file():
        raise UserError(f"{folder} is not a complete run: {REPORT} is missing; give the folder of a complete run")
    check_group(folder, _winning_groups(folder / REPORT), group)
    path = folder / f"{winner_file(group)}.json"
    about = about_winner(folder, group)
    weights, _ = read_tensors(path.with_suffix(".safetensors"), COPY)
    try:
        return winner_model(about.config, about.features, weights)
    except RuntimeError as error:
        raise UserError(f"{path} and its weights do not fit together ({error}); copy the run again") from error


def check_group(
    folder: Path, groups: Sequence[str], group: str, *, note: str | None = None, choose: str = "choose a group"
) -> None:
    """Refuse a group that has no winner; `groups` are those of the run in `folder` that have one.

    Args:
        note: why the run has no winner at all.
        choose: how the user names a group.
    """
    if group in groups:
        return
    if not groups:
        raise UserError(f"{folder} has no winner: {note or 'no epoch was selected'}; give a run that has one")
    if "" in groups:
        raise UserError(f"{folder} has one winner and no group {group!r}; leave the group out")
    unknown = f"no winner of group {group!r}" if group else "several winners"
    raise UserError(f"{folder} has {unknown}; {choose}: {', '.join(groups)}")


def _winning_groups(path: Path) -> list[str]:
    """The groups that have a winner by the report; other files may lie beside it."""
    winners = read_json_as(path, _Report, COPY, exact=False).winners
    try:
        return [read_as(str, winner.get("group"), "group") for winner in winners]
    except ContentError as error:
        raise UserError(f"{path} is damaged: {error}; {COPY}") from error


@dataclass(frozen=True)
class _Report:
    """What is read here of report.json."""

    winners: list[dict[str, Any]]
