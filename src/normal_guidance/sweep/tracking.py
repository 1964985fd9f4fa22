"""What a training did, for TensorBoard or MLflow: options, curves and final metrics, written once it is complete.

Nothing is written while a model trains, so training is as fast as without.  Each training has an identity and is
written once, however often a command resumes.  TensorBoard's events go to the folder `tensorboard` of the output,
MLflow's runs to the server of MLFLOW_TRACKING_URI or, as mlflow-skinny has no database, to the folder `mlruns`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normal_guidance.base.errors import UserError, choose_one_of, reason
from normal_guidance.base.files import folder_atomically
from normal_guidance.base.system import environment_with, importing
from normal_guidance.sweep.run import HISTORY_TABLE, REPORT, find_folders, load_run, read_history
from normal_guidance.sweep.sweep import HISTORY

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


SERVER = "MLFLOW_TRACKING_URI"  # the variable that names MLflow's server
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"

EXPERIMENT = "normal-guidance"  # that runs of MLflow belong to, unless MLFLOW_EXPERIMENT_NAME names another

IDENTITY = "normal_guidance.identity"  # the tag that tells runs of MLflow apart
AT_ONCE = 1000  # values in one call, which is the most that MLflow takes


@dataclass(frozen=True)
class Training:
    """One complete training, called such as ng/1001, with what was asked for and what came of it."""

    name: str
    options: Mapping[str, Any]
    metrics: Mapping[str, float]  # final numbers
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)  # numbers by epoch, counted from 1

    @property
    def identity(self) -> str:
        """The same for the same training, wherever and whenever it is written."""
        curves = {name: list(values) for name, values in self.curves.items()}
        content = [self.name, dict(self.options), dict(self.metrics), curves]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def values(self) -> list[tuple[str, int, float]]:
        """Name, epoch and number of the final ones, at epoch 0, and of the curves, where they are finite."""
        values = [(name, 0, float(value)) for name, value in self.metrics.items()]
        for name, curve in self.curves.items():
            values += [(name, epoch, value) for epoch, value in enumerate(curve, start=1)]
        return [item for item in values if math.isfinite(item[2])]


def track(trainings: Sequence[Training], to: str, out: Path) -> str:
    """Write trainings that were not written before by one of `TRACKERS`, and say where they are."""
    check_tracker(to)
    return TRACKERS[to](trainings, out)


def check_tracker(to: str) -> None:
    """Refuse an unknown tracker, a missing package and a server that does not answer, before hours of training."""
    choose_one_of("--track", to, TRACKERS)
    with importing("track", f"--track {to} needs the package {to}"):
        import_module("tensorboard.summary.writer.event_file_writer" if to == "tensorboard" else "mlflow.tracking")
    if to == "mlflow" and SERVER in os.environ:
        # MLflow asks once, unless its user said how often; it would ask for minutes.
        with _reached(os.environ[SERVER]) as client, environment_with(RETRIES, os.environ.get(RETRIES, "0")):
            client.get_experiment_by_name(_experiment())


def _to_tensorboard(trainings: Sequence[Training], out: Path) -> str:
    from torch.utils.tensorboard import SummaryWriter

    for training in trainings:
        folder = out / "tensorboard" / training.name / training.identity[:12]
        if folder.is_dir():
            continue
        with folder_atomically(folder) as draft, SummaryWriter(os.fspath(draft)) as writer:
            for name, epoch, value in training.values:
                writer.add_scalar(name if epoch else f"final/{name}", value, epoch)
            options = "\n".join(f"    {name}: {value}" for name, value in training.options.items())
            writer.add_text("options", options)
    return f"tensorboard --logdir {out / 'tensorboard'}"


def _experiment() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)


@contextmanager
def _reached(uri: str) -> Iterator[MlflowClient]:
    """The client of a server; a server that does not answer or refuses is a UserError that names it."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        yield MlflowClient(tracking_uri=uri)
    except (MlflowException, OSError) as error:
        raise UserError(
            f"--track mlflow: {uri} cannot be written to ({reason(error)}); start that server, or correct {SERVER}, or "
            "unset it to write to the folder of the output"
        ) from error


def _to_mlflow(trainings: Sequence[Training], out: Path) -> str:
    from mlflow.entities import Metric, Param

    server = os.environ.get(SERVER)
    if server is None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it MLflow refuses to write files
    with _reached(server or (out / "mlruns").resolve().as_uri()) as client:
        known = client.get_experiment_by_name(_experiment())
        experiment = client.create_experiment(_experiment()) if known is None else known.experiment_id
        for training in trainings:
            before = client.search_runs([experiment], filter_string=f"tags.`{IDENTITY}` = '{training.identity}'")
            if any(run.info.status == "FINISHED" for run in before):
                continue
            for run in before:  # killed while it was written
                client.delete_run(run.info.run_id)
            created = client.create_run(experiment, run_name=training.name, tags={IDENTITY: training.identity})
            run_id = created.info.run_id
            values = [Metric(name, value, 0, epoch) for name, epoch, value in training.values]
            for first in range(0, len(values), AT_ONCE):
                client.log_batch(run_id, metrics=values[first : first + AT_ONCE])
            client.log_batch(run_id, params=[Param(key, str(value)[:6000]) for key, value in training.options.items()])
            client.set_terminated(run_id)
    return f"MLflow: experiment {_experiment()!r} in {server or out / 'mlruns'}"


TRACKERS: dict[str, Callable[[Sequence[Training], Path], str]] = {"tensorboard": _to_tensorboard, "mlflow": _to_mlflow}


def tracked_runs(folder: Path) -> list[Training]:
    """The winners of every complete run METHOD/SEED in a folder; all other configurations are in history.parquet."""
    trainings = []
    for method, seed, path in find_folders(folder):
        if not (path / REPORT).is_file():
            continue
        run = load_run(path)
        asked = {f"asked/{name}": value for name, value in run.report["options"].items()}
        history = read_history(path / HISTORY_TABLE).to_pandas()
        for winner in run.winners:
            rows = history[history["config"] == winner.number].sort_values("epoch")
            scores = {} if winner.test is None else asdict(winner.test)
            tested = {f"test/{name}": float(value) for name, value in scores.items()}
            trainings.append(
                Training(
                    name="/".join(filter(None, (method, str(seed), winner.group))),
                    options={**winner.config.as_json(), **asked},
                    metrics={"selected/epoch": float(winner.epoch), "selected/val_auroc": winner.val_auroc, **tested},
                    curves={curve: rows[curve].tolist() for curve in HISTORY},
                )
            )
    return trainings
