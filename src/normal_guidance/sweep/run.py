"""A sweep from the data to the report in one call; a killed run resumes from its folder.

    lock                 held by the one process that may write
    config.json          what the run is: configurations, execution, fingerprints of the data
    state.safetensors    progress of the training; deleted when the run is complete
    history.parquet      every configuration and epoch
    best.safetensors     the winner's weights; with several groups of configurations, one file for each
    best.json            the configuration that rebuilds its model: `WinnerFile`
    predictions.parquet  the winners' prediction for every scan (`predictions.py`)
    report.json          versions, times, scores: `RunFile`; written last, so a folder that has it is complete

Every file is written atomically: whenever the process dies, the same command resumes from the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from normal_guidance import __version__
from normal_guidance.base.errors import ContentError, UserError, reading
from normal_guidance.base.files import (
    LOCK,
    difference,
    is_draft,
    lock_folder,
    read_json,
    read_json_as,
    write_json,
    write_parquet,
)
from normal_guidance.base.records import Between, read_as
from normal_guidance.base.system import source_version
from normal_guidance.base.tables import read_columns
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import EVERYTHING
from normal_guidance.scans.features.store import DtypeName, FeatureStore, dtype_name, fingerprint_of
from normal_guidance.scans.features.store_place import is_store
from normal_guidance.scans.index.manifest import MANIFEST, Finding
from normal_guidance.statistics.split_results import Scores, score
from normal_guidance.sweep.config import (
    AXES,
    L1_STRENGTHS,
    LEARNING_RATES,
    Config,
    Execution,
    check_together,
    departures,
)
from normal_guidance.sweep.execution import current_device
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.predictions import AGAIN, prediction_table, read_predictions, write_predictions_table
from normal_guidance.sweep.stack import initial_model
from normal_guidance.sweep.sweep import (
    HISTORY,
    SAVE_EPOCHS,
    SAVE_SECONDS,
    Count,
    SelectedEpoch,
    StateFile,
    Sweep,
    SweepProgress,
    Winner,
    check_scans,
    group_of,
    sweep,
)

CONFIG, STATE, REPORT = "config.json", "state.safetensors", "report.json"
HISTORY_TABLE, PREDICTION_TABLE = "history.parquet", "predictions.parquet"
WINNERS = ("best.json", "best.safetensors", "best-*.json", "best-*.safetensors")

NOT_OURS = (KeyError, TypeError, ValueError, AttributeError)  # from reading a JSON file of another shape than ours

Data = Bags | FeatureStore
Share = Annotated[float, Between(0.0, 1.0)]
Width = Annotated[int, Between(1.0, 2.0**31)]


# What the files hold; each record is written as it is read.


@dataclass(frozen=True)
class Selected:
    """The best epoch of the best configuration of a group, and its scores on the test scans if there were any."""

    group: str  # empty where the run has one group only; else the name in its files: `load_winner(folder, group)`
    number: Count
    epoch: Annotated[int, Between(1.0)]
    val_auroc: Share
    config: Config
    weights: str  # the name of the file
    test: Scores | None


@dataclass(frozen=True)
class ConfigCounts:
    trained: Count
    selectable: Count
    diverged: Count


@dataclass(frozen=True)
class RunPart:
    """The scans of one part; their order decides which share a batch."""

    scans: Count
    fingerprint: str
    order: str = ""


@dataclass(frozen=True)
class RunFeatures:
    """How a store's features were made (`features_of`)."""

    recipe: str
    width: Width
    dtype: DtypeName
    provenance: dict[str, Any]
    finding: Finding | None = None


@dataclass(frozen=True)
class RunExecution:
    device: str
    precision: str
    engine: str
    chunk: int | None
    chunks: tuple[Count, ...]  # the number of configurations that finished together, chunk by chunk


@dataclass(frozen=True)
class RunSeconds:
    """Times, summed over all starts."""

    training: float
    evaluation: float
    saving: float
    total: float


@dataclass(frozen=True)
class SourceCommit:
    id: str
    dirty: bool | None
    told: bool = False  # whether NGUIDE_COMMIT named it


@dataclass(frozen=True)
class Environment:
    """Where and with what one start ran."""

    date: str | None
    normal_guidance: str
    commit: SourceCommit | None
    python: str
    torch: str
    numpy: str
    triton: str | None
    device: str
    threads: int


@dataclass(frozen=True)
class RunFile:
    """report.json: everything that is needed to check, repeat or compare a complete run."""

    winners: tuple[Selected, ...]  # empty where no epoch of any configuration could be selected
    note: str | None  # why there are no winners
    configurations: ConfigCounts
    departures: dict[str, Any]  # what differs from the paper's protocol and grid
    seeds: dict[str, Any]
    data: dict[str, RunPart]
    execution: RunExecution
    seconds: RunSeconds
    resumed: Count
    options: dict[str, Any]  # what was asked for, as the command has it
    environments: tuple[Environment, ...]  # one for each distinct commit, machine or date of a start
    features: RunFeatures | None = None


@dataclass(frozen=True, kw_only=True)
class WinnerFile(SelectedEpoch):
    config: Config
    features: Width


def record_as_json(value: Any) -> Any:
    """A record as JSON, with null for NaN."""
    if isinstance(value, Config):
        return value.as_json()
    if isinstance(value, Mapping):
        return {name: record_as_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [record_as_json(inner) for inner in value]
    if is_dataclass(value):
        return {each.name: record_as_json(getattr(value, each.name)) for each in fields(value)}
    return None if isinstance(value, float) and math.isnan(value) else value


def environments_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    starts = report.get("environments")
    if not read_as(list[Environment], starts, "environments"):
        raise ContentError("environments is empty")
    return starts  # type: ignore[return-value]


# A folder belongs to one run, which its config.json identifies.


def identity_of(configs: Sequence[Config], execution: Execution, data: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a run, as config.json holds it; a run started again with anything else is refused."""
    return {
        "data": dict(data),
        "execution": {
            "device": torch.device(execution.device).type,
            "precision": execution.precision,
            "engine": "slotted" if execution.slotted else "packed",
            "chunk": execution.chunk,
        },
        "configs": [config.as_json() for config in configs],
        "departures": {**departures(configs[0]), **_other_grid(configs)},
    }


def _other_grid(configs: Sequence[Config]) -> dict[str, Any]:
    """The axes whose values differ from the paper's, and missing pairs; guidance counts for guided methods only."""
    paper: dict[str, Sequence[Any]] = {"lr": LEARNING_RATES, "l1": L1_STRENGTHS}
    if configs[0].spec.regularizer is not None:
        paper["guidance_weight"] = (1.0,)
    if configs[0].spec.guided:
        paper["divergence"] = ("forward_kl",)
    values = {axis: sorted({getattr(config, axis) for config in configs}) for axis in paper}
    other: dict[str, Any] = {axis: given for axis, given in values.items() if given != sorted(paper[axis])}
    pairs: dict[tuple[object, ...], set[tuple[float, float]]] = defaultdict(set)
    for config in configs:
        pairs[group_of(config)].add((config.l1, config.lr))
    least, full = min(map(len, pairs.values())), len(values["lr"]) * len(values["l1"])
    return other | ({"pairs": f"{least} of {full} (l1, lr)"} if least < full else {})


@contextmanager
def open_run(folder: str | Path, identity: Mapping[str, Any]) -> Iterator[Path]:
    """Lock a folder for one run, new or begun before; a folder of another run is refused."""
    path = Path(folder)
    with lock_folder(path):
        if not is_begun(path, identity):
            # Without a state or a report, results cannot be assigned to a run.
            forget(path, *WINNERS, HISTORY_TABLE, PREDICTION_TABLE)
            write_json(path / CONFIG, identity)
        if (path / REPORT).exists():
            (path / STATE).unlink(missing_ok=True)  # left over from a run killed between its report and this step
        yield path


def state_of(folder: Path, identity: Mapping[str, Any], **options: Any) -> StateFile:
    """The file of a run's state; the options are those of `StateFile`."""
    run = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return StateFile(folder / STATE, run, **options)


def is_begun(folder: str | Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder holds something of a run of this `identity`, whole or in part; another run is refused."""
    folder = Path(folder)
    names: set[str] = set()
    with reading(folder, "choose another folder"), suppress(FileNotFoundError, NotADirectoryError):
        names = {file.name for file in folder.iterdir()}
    path = folder / CONFIG
    if CONFIG not in names:
        if others := sorted(name for name in names if name != LOCK and not is_draft(Path(name))):
            raise UserError(f"{folder} holds {others[0]!r} but no {CONFIG}, so it is not a run; choose another folder")
        return False
    before = read_json(path)
    if names.isdisjoint((STATE, REPORT)):
        return False
    changed = difference({name: before.get(name) for name in identity}, identity)
    if changed:
        raise UserError(
            f"{folder} holds another run: {changed}; give another folder (--out), or the data and options that the run "
            "began with"
        )
    return True


def forget(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()


# Its history, and its winners' weights, from which the models are rebuilt.


def diverged(result: Sweep) -> int:
    """How many configurations had a loss or score that became NaN or infinite, in the last epoch too."""
    lost = ~result.history.isfinite().all(2)
    trained = torch.arange(1, len(lost) + 1)[:, None] <= result.trained
    return int((trained & lost).any(0).sum())


def history_table(result: Sweep) -> pa.Table:
    epochs, count, _ = result.history.shape
    number, epoch = torch.meshgrid(torch.arange(count), torch.arange(1, epochs + 1), indexing="ij")
    trained = epoch <= result.trained[:, None]
    number, epoch = number[trained], epoch[trained]
    selected, winners = epoch == result.best_epoch[number], torch.tensor([each.number for each in result.winners])
    numbers = result.history[epoch - 1, number].T.contiguous().numpy()
    return pa.table(
        {
            "config": number.numpy(),
            **{axis: np.array([getattr(config, axis) for config in result.configs])[number.numpy()] for axis in AXES},
            "epoch": epoch.numpy(),
            **dict(zip(HISTORY, numbers, strict=True)),
            "selected": selected.numpy(),
            "winner": (selected & torch.isin(number, winners)).numpy(),
        }
    )


def group_names(configs: Sequence[Config]) -> dict[tuple[object, ...], str]:
    """A name for each group that has its own winner, fit for a file name; empty where there is only one group."""
    groups = {group_of(config): config for config in configs}
    if len(groups) == 1:
        return dict.fromkeys(groups, "")
    return {group: f"{c.divergence}-lambda{c.guidance_weight}-seed{c.seed}" for group, c in groups.items()}


def winners_by_name(result: Sweep) -> dict[str, Winner]:
    names = group_names(result.configs)
    return {names[group_of(winner.config)]: winner for winner in result.winners}


def winner_file(group: str) -> str:
    """The name of a winner's files without .safetensors and .json."""
    return f"best-{group}" if group else "best"


def write_history(folder: Path, result: Sweep) -> None:
    write_parquet(folder / HISTORY_TABLE, history_table(result))


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


def read_history(path: Path) -> pa.Table:
    """Read a history.parquet; losses and scores of configurations that diverged are NaN."""
    return read_columns(path, HISTORY_SCHEMA, AGAIN)


def write_winners(folder: Path, result: Sweep, features: int) -> None:
    forget(folder, *WINNERS)  # an earlier, killed start may have had others: CUDA does not promise the same bits
    for group, winner in winners_by_name(result).items():
        file, selected = winner_file(group), {each.name: getattr(winner, each.name) for each in fields(SelectedEpoch)}
        about = record_as_json({"config": winner.config, "features": features, **selected})
        write_tensors(folder / f"{file}.safetensors", winner.weights, about)
        write_json(folder / f"{file}.json", about)


def about_winner(folder: Path, group: str = "") -> WinnerFile:
    return read_json_as(folder / f"{winner_file(group)}.json", WinnerFile, AGAIN)


def winner_model(config: Config, features: int, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the plain model with these weights, in their dtype, ready to predict; others are a RuntimeError."""
    for what, size in (("features", features), ("hidden units", config.hidden or 0)):
        if size > max((most for tensor in weights.values() for most in tensor.shape), default=0):
            raise RuntimeError(f"no weights are of {size} {what}")  # before a model of that size is made
    dtype = next(iter(weights.values())).dtype
    model = initial_model(config, features).to(dtype)
    model.load_state_dict(dict(weights))
    return model.eval()


def load_winner(folder: str | Path, group: str = "") -> nn.Module:
    """Load the winner of a run as a plain model; `group` names which one, where the run has several."""
    folder = Path(folder)
    load_run(folder).winner(group)
    path, about = folder / f"{winner_file(group)}.json", about_winner(folder, group)
    weights, _ = read_tensors(path.with_suffix(".safetensors"), AGAIN)
    with reading(path, "copy the run again", wrong="and its weights do not fit together"):
        return winner_model(about.config, about.features, weights)


# A complete run.


@dataclass(frozen=True)
class Run:
    """A complete run, as its folder describes it."""

    folder: Path
    winners: tuple[Selected, ...]
    note: str | None  # why there are no winners
    all_diverged: bool
    seconds: float  # the sum over all starts
    report: Mapping[str, Any]

    def winner(self, group: str = "", *, choose: str = "choose a group") -> Selected:
        """The winner of a group; without a group, the only one; `choose` says how the user names a group."""
        winners = {winner.group: winner for winner in self.winners}
        if group in winners:
            return winners[group]
        if not winners:
            raise UserError(f"{self.folder} has no winner: {self.note}; give a run that has one")
        if "" in winners:
            raise UserError(f"{self.folder} has one winner and no group {group!r}; leave the group out")
        unknown = f"no winner of group {group!r}" if group else "several winners"
        raise UserError(f"{self.folder} has {unknown}; {choose}: {', '.join(winners)}")


def load_run(folder: str | Path) -> Run:
    folder = Path(folder)
    refuse_data(folder)
    path = folder / REPORT
    if not path.is_file():
        raise UserError(
            f"{folder} is not a complete run: {REPORT} is missing; start the run again with the same command, or give "
            "the folder of a complete run"
        )
    again = "give the folder of a run, or copy it again"
    report = read_json(path, again)
    with reading(path, again):
        known = read_as(RunFile, report)
        environments_of(report)
    all_diverged = known.configurations.diverged == known.configurations.trained
    return Run(folder, known.winners, known.note, all_diverged, known.seconds.total, report)


def refuse_data(folder: Path) -> None:
    """Refuse a store or an index where a run or model is wanted; they have a report.json, too."""
    is_index = all((folder / name).is_file() for name in (MANIFEST, REPORT))
    if is_index or is_store(folder):
        kind = "an index of scans" if is_index else "a feature store"
        raise UserError(
            f"{folder} is {kind}, not a model; give the folder of a run, or one that nguide fit or nguide bundle made"
        )


def run_sweep(
    folder: str | Path,
    configs: Sequence[Config],
    train: Data,
    val: Data,
    test: Data | None = None,
    execution: Execution | None = None,
    *,
    save_epochs: int = SAVE_EPOCHS,
    save_seconds: float = SAVE_SECONDS,
    options: Mapping[str, Any] | None = None,
    watch: Callable[[SweepProgress], None] | None = None,
) -> Run:
    """Train all configurations, score the winners on the test scans and write everything, `options` too, to `folder`.

    Started again with the same arguments, a killed run resumes from its last state, which is at most `save_epochs`
    epochs or `save_seconds` back, plus the epoch it was in; a complete run is only loaded.
    """
    execution = execution or Execution()
    identity = _identity(configs, train, val, test, execution)
    with open_run(folder, identity) as path:
        if not (path / REPORT).exists():
            saving = {"save_epochs": save_epochs, "save_seconds": save_seconds}
            state = state_of(path, identity, environment=environment(execution), **saving)
            result = sweep(configs, train, val, execution, checkpoint=state, watch=watch)
            write_history(path, result)
            write_winners(path, result, val.width)
            parts = {"val": val} | ({} if test is None else {"test": test})
            scores = _write_predictions(path, result, parts, execution)
            write_json(path / REPORT, _report(identity, result, scores, state, options or {}, features_of(train)))
            (path / STATE).unlink(missing_ok=True)
    run = load_run(folder)
    for winner in run.winners:
        load_winner(run.folder, winner.group)
    read_history(run.folder / HISTORY_TABLE)
    read_predictions(run.folder / PREDICTION_TABLE, ("scan_id", "slices"))  # the seal covers the lists of attention
    return run


def check_sweep(
    folder: str | Path,
    configs: Sequence[Config],
    train: Data,
    val: Data,
    test: Data | None = None,
    execution: Execution | None = None,
) -> None:
    """Refuse at once a model, scans or a folder that `run_sweep` would refuse, perhaps hours later."""
    identity = _identity(configs, train, val, test, execution or Execution())
    initial_model(configs[0], train.width)
    is_begun(folder, identity)


def _identity(
    configs: Sequence[Config], train: Data, val: Data, test: Data | None, execution: Execution
) -> dict[str, Any]:
    """What a run is of; refuse what cannot be trained before a folder is made for it."""
    check_together(configs)
    check_scans(configs[0], train, val)
    parts = {"train": train, "val": val} | ({} if test is None else {"test": test})
    return identity_of(configs, execution, {part: fingerprints_of(part, scans) for part, scans in parts.items()})


def fingerprints_of(part: str, scans: Data) -> dict[str, Any]:
    """Identify the scans and their order, which decides which scans share a batch."""
    return {
        "scans": len(scans),
        "fingerprint": scans.fingerprint if isinstance(scans, FeatureStore) else fingerprint_of({part: scans}),
        "order": hashlib.sha256("\n".join(scans.scan_ids).encode()).hexdigest()[:16],
    }


def features_of(scans: Data) -> dict[str, Any] | None:
    """How a store's features were made, and its finding, which new scans need; None for bags in memory."""
    if not isinstance(scans, FeatureStore):
        return None
    return {
        "recipe": scans.recipe,
        "width": scans.width,
        "dtype": dtype_name(scans.dtype),
        "provenance": dict(scans.provenance),
        **({} if scans.finding is None else {"finding": scans.finding.as_json()}),
    }


def _write_predictions(
    folder: Path, result: Sweep, parts: Mapping[str, Data], execution: Execution
) -> dict[str, Scores]:
    """Write every winner's predictions for every part, and return each group's scores on the test part."""
    tables, scores = [], {}
    with current_device(execution.device):
        for group, winner in winners_by_name(result).items():
            for part, scans in parts.items():
                model = winner_model(winner.config, scans.width, winner.weights).to(execution.device)
                prediction = predict_bags(model, scans).on_host()
                tables.append(prediction_table(scans, prediction, part=part, group=group))
                if part == "test":
                    scores[group] = score(scans, prediction.slice_scores, prediction.logit)
    write_predictions_table(folder / PREDICTION_TABLE, tables)
    return scores


def _report(
    identity: Mapping[str, Any],
    result: Sweep,
    scores: Mapping[str, Scores],
    state: StateFile,
    options: Mapping[str, Any],
    features: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The content of a `RunFile`."""
    winners = [
        Selected(
            group=group,
            number=winner.number,
            epoch=winner.epoch,
            val_auroc=winner.val_auroc,
            config=winner.config,
            weights=f"{winner_file(group)}.safetensors",
            test=scores.get(group),
        )
        for group, winner in winners_by_name(result).items()
    ]
    content = {
        "winners": winners,
        "note": None if winners else _why_nothing(result),
        "configurations": {
            "trained": len(result.configs),
            "selectable": int((result.best_epoch > 0).sum()),
            "diverged": diverged(result),
        },
        "departures": identity["departures"],
        "seeds": {"order": result.configs[0].seed, "weights": sorted({config.seed for config in result.configs})},
        "data": identity["data"],
        "features": features,
        "execution": {**identity["execution"], "chunks": result.chunks},
        "seconds": {**result.seconds, "total": state.total},
        "resumed": state.resumed,
        "options": options,
        "environments": state.environments,
    }
    return record_as_json(content)


def _why_nothing(result: Sweep) -> str:
    """Why no epoch was selected: NaN never is, and the protocol may require training AUROC above validation AUROC."""
    lost, count = diverged(result), len(result.configs)
    reasons = [f"{lost} of {count} configurations diverged"] if lost else []
    if lost < count:
        reasons.insert(0, "no configuration had an epoch whose training AUROC was above its validation AUROC")
    return f"{', '.join(reasons)}: none was selected"


def environment(execution: Execution) -> dict[str, Any]:
    """Date, versions, commit and machine that a run is started with."""
    cuda = torch.device(execution.device).type == "cuda"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "normal_guidance": __version__,
        "commit": source_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "triton": next((package.version for package in distributions(name="triton")), None),
        "device": torch.cuda.get_device_name(execution.device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def find_folders(folder: Path, methods: Sequence[str] | None = None) -> Iterator[tuple[str, int, Path]]:
    """Yield method, seed and path of every folder DIR/METHOD/SEED, by method in the given order, then by seed."""
    if methods is None:  # those of the paper's tables first
        rank = {method: number for number, method in enumerate(EVERYTHING)}
        names = (path.name for path in folder.glob("*") if path.is_dir())
        methods = sorted(names, key=lambda name: (rank.get(name, len(rank)), name))
    for method in methods:
        seeds = (path for path in (folder / method).glob("*") if path.name.isdecimal())
        for path in sorted(seeds, key=lambda path: int(path.name)):
            yield method, int(path.name), path
