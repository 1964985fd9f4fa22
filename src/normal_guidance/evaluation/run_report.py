"""report.json: the result of a complete run, as it is written and read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from normal_guidance.data.findings import Finding
from normal_guidance.data.manifest import MANIFEST
from normal_guidance.errors import UserError
from normal_guidance.evaluation.predictions import read_predictions
from normal_guidance.features.store_files import DtypeName
from normal_guidance.features.store_place import is_store
from normal_guidance.files import read_json
from normal_guidance.statistics.scores import Scores
from normal_guidance.training.config import Config
from normal_guidance.training.run_folder import HISTORY_TABLE, PREDICTION_TABLE, REPORT
from normal_guidance.training.selection import group_of
from normal_guidance.training.sweep import Sweep
from normal_guidance.training.winners import check_group, diverged, group_names, load_winner, read_history, winner_file
from normal_guidance.typed_json import Between, ContentError, read_as

NOT_OURS = (KeyError, TypeError, ValueError, AttributeError)
"""Errors from reading a JSON file of another shape than ours."""

Share = Annotated[float, Between(0.0, 1.0)]


@dataclass(frozen=True)
class Selected:
    """The best epoch of the best configuration of a group, and its scores on the test scans if there were any."""

    group: str
    """Empty where the run has one group only; else the name in its files: `load_winner(folder, group)`."""
    config: Config
    number: int
    epoch: int
    val_auroc: float
    test: Scores | None


@dataclass(frozen=True)
class Run:
    """A complete run, as its folder describes it."""

    folder: Path
    winners: tuple[Selected, ...]
    """Empty where no epoch of any configuration could be selected."""
    note: str | None
    """Why there are no winners."""
    all_diverged: bool
    seconds: float
    """The sum over all starts."""
    report: Mapping[str, Any]

    def winner(self, group: str = "", *, choose: str = "choose a group") -> Selected:
        """The winner of a group; without a group, the only one."""
        found = {winner.group: winner for winner in self.winners}
        check_group(self.folder, list(found), group, note=self.note, choose=choose)
        return found[group]


def load_run(folder: str | Path) -> Run:
    """Load a complete run from its folder."""
    folder = Path(folder)
    refuse_data(folder)
    if not (folder / REPORT).is_file():
        raise UserError(
            f"{folder} is not a complete run: {REPORT} is missing; start the run again with the same command"
        )
    report = read_json(folder / REPORT)
    try:
        known = read_as(_Content, report, exact=False)
        check_environments(report)
        counts = known.configurations
        return Run(
            folder=folder,
            winners=tuple(_selected(winner) for winner in known.winners),
            note=known.note,
            all_diverged=counts.diverged == counts.trained,
            seconds=known.seconds["total"],
            report=report,
        )
    except (ContentError, KeyError) as error:
        raise UserError(
            f"{folder / REPORT} is damaged or not a report ({error}); give the folder of a run, or copy it again"
        ) from error
    except UserError as error:
        raise UserError(f"{folder / REPORT}: {error}") from error


def refuse_data(folder: Path) -> None:
    """Refuse a store or an index where a run or model is wanted; they have a report.json, too."""
    is_index = all((folder / name).is_file() for name in (MANIFEST, REPORT))
    if is_index or is_store(folder):
        kind = "an index of scans" if is_index else "a feature store"
        raise UserError(
            f"{folder} is {kind}, not a model; give the folder of a run, or one that nguide fit or nguide bundle made"
        )


def check_files(run: Run) -> None:
    """Read what a complete run holds beside its report; a file that is missing or damaged is named."""
    for winner in run.winners:
        load_winner(run.folder, winner.group)
    read_history(run.folder / HISTORY_TABLE)
    read_predictions(run.folder / PREDICTION_TABLE, ("scan_id", "slices"))  # the seal covers the lists of attention


@dataclass(frozen=True)
class _Winner:
    """The types of a winner in report.json; scores are null where they are NaN."""

    group: str
    number: Annotated[int, Between(0.0)]
    epoch: Annotated[int, Between(1.0)]
    val_auroc: Share
    config: Config
    weights: str
    test: _Scores | None


@dataclass(frozen=True)
class _Scores:
    """The types of `Scores`; null where they are NaN, or where the method has none."""

    localization_auroc: Share | None
    localization_auprc: Share | None
    scan_auroc: Share | None
    scan_auprc: Share | None
    localized: Annotated[int, Between(0.0)]
    left_out: Annotated[int, Between(0.0)]


@dataclass(frozen=True)
class _Part:
    """The scans of a part, as `evaluation.runs` identifies them."""

    scans: int
    fingerprint: str
    order: str = ""


@dataclass(frozen=True)
class _Features:
    """How the features were made (`evaluation.runs.features_of`)."""

    recipe: str
    width: Annotated[int, Between(1.0, 2.0**31)]
    dtype: DtypeName
    provenance: dict[str, Any]
    finding: Finding | None = None


@dataclass(frozen=True)
class _Execution:
    """How it was trained; only the precision is read."""

    precision: str


@dataclass(frozen=True)
class _Commit:
    id: str
    dirty: bool | None


@dataclass(frozen=True)
class _Environment:
    """What the tables show of a start."""

    normal_guidance: str
    commit: dict[str, Any] | None
    torch: str
    device: str
    date: str | None


@dataclass(frozen=True)
class _Counted:
    trained: int
    selectable: int
    diverged: int


@dataclass(frozen=True)
class _Content:
    """The types of what `load_run` and the tables take from report.json."""

    winners: tuple[_Winner, ...]
    note: str | None
    configurations: _Counted
    departures: dict[str, Any]
    data: dict[str, _Part]
    execution: dict[str, Any]
    seconds: dict[str, float]
    options: dict[str, Any]
    features: _Features | None = None


def _selected(known: _Winner) -> Selected:
    return Selected(
        group=known.group,
        config=known.config,
        number=known.number,
        epoch=known.epoch,
        val_auroc=known.val_auroc,
        test=None if known.test is None else _scores(known.test),
    )


def _scores(known: _Scores) -> Scores:
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in asdict(known).items()}
    return Scores(**values)


def check_environments(report: Mapping[str, Any]) -> None:
    """Check the types of what the tables show of a run's execution and starts."""
    if "execution" in report:
        read_as(_Execution, report["execution"], "execution", exact=False)
    starts = read_as(list[dict[str, Any]], environments_of(report), "environments")
    if not starts:
        raise ContentError("environments is empty")
    for start in starts:
        known = read_as(_Environment, start, "environment", exact=False)
        if known.commit is not None:
            read_as(_Commit, known.commit, "environment.commit", exact=False)


def report(
    identity: Mapping[str, Any],
    result: Sweep,
    scores: Mapping[str, Scores],
    environments: Sequence[Mapping[str, Any]],
    *,
    seconds: Mapping[str, float],
    resumed: int,
    options: Mapping[str, Any],
    features: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that is needed to check, repeat or compare the run, fit for JSON; a pure function."""
    names = group_names(result.configs)
    winners = [
        {
            "group": (group := names[group_of(winner.config)]),
            "number": winner.number,
            "epoch": winner.epoch,
            "val_auroc": winner.val_auroc,
            "config": winner.config.as_json(),
            "weights": f"{winner_file(group)}.safetensors",
            "test": scores_as_json(scores[group]) if group in scores else None,
        }
        for winner in result.winners
    ]
    return {
        "format": identity["format"],
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
        "features": None if features is None else dict(features),
        "execution": {**identity["execution"], "chunks": list(result.chunks)},
        "seconds": dict(seconds),
        "resumed": resumed,
        "options": dict(options),
        "environments": [dict(one) for one in environments],
    }


def _why_nothing(result: Sweep) -> str:
    """Why no epoch was selected: NaN never is, and the protocol may require training AUROC above validation AUROC."""
    lost, count = diverged(result), len(result.configs)
    reasons = [f"{lost} of {count} configurations diverged"] if lost else []
    if lost < count:
        reasons.insert(0, "no configuration had an epoch whose training AUROC was above its validation AUROC")
    return f"{', '.join(reasons)}: none was selected"


def environments_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where a run was started, one entry for each distinct commit, machine or date; the first reports held only one."""
    if "environments" in report:
        return read_as(list[dict[str, Any]], report["environments"], "environments")
    options, only = (read_as(dict[str, Any], report.get(name), name) for name in ("options", "environment"))
    return [{"date": options.get("date"), **only}]


def scores_as_json(scores: Scores) -> dict[str, Any]:
    """Scores with null for NaN, which JSON lacks."""
    return {name: None if value != value else value for name, value in asdict(scores).items()}


def scores_from_json(scores: Mapping[str, Any]) -> Scores:
    """The inverse of `scores_as_json`; anything else is a `ContentError`."""
    return _scores(read_as(_Scores, scores, "scores"))
