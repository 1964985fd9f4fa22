"""Small folders of every kind that we write, made by the code that makes them for users, and what reads each of them.

    index/    nguide index       manifest.parquet, problems.csv, report.json
    splits/   nguide split       split-1.csv
    store/    nguide encode      store.json, index.parquet, shards, report.json, problems.csv
    job/      nguide encode      the same, interrupted: store.job with units and statistics
    run/      nguide sweep       config, report, weights, history, predictions
    study/    nguide experiment  a run and a method without one
    bundle/   nguide bundle      two findings: findings.json, bundle.json, weights

A reader returns what its commands would use, and what they would only show, as text that can be compared.  It reads
everything anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))
from normal_guidance.fit.bundle import bundle_run, load_bundle, write_bundle
from normal_guidance.scans.features.encoding import EncodingOptions, encode
from normal_guidance.scans.features.preprocessing import Preprocessing
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.manifest import Finding, read_manifest
from normal_guidance.scans.index.problems import Problem, read_problems, summarize, write_problems
from normal_guidance.scans.index.splits import audit, read_split, split_scans, write_split
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.study.experiment import Study, stored_dataset, train_study
from normal_guidance.study.study_tables import collect
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.predictions import read_predictions
from normal_guidance.sweep.run import load_run, load_winner, read_history, run_sweep
from small_bundle import WINDOW, make_run, tiny

SCANS = 24
NAME = "small"
PROBLEMS = (Problem("scan-0001", "scan-0001/3.dcm", "duplicate", "same position", "left out"),)
OF_TRAINING = ("environments", "seconds", "resumed", "options")
"""Members of a run's report.json that are only shown."""


class Read(NamedTuple):
    """What commands use, and what they only show."""

    used: str
    shown: str = ""


def make_folders(folder: Path) -> Path:
    """Fills a new folder; `READERS` read its folders."""
    folder.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = make_run(folder, SCANS)
    (folder / "splits").mkdir()
    write_split(folder / "splits" / "split-1.csv", _split(made.manifest))
    for name in ("index", "store"):
        write_problems(folder / name / "problems.csv", PROBLEMS)
    _interrupt(folder)
    train_study(_study(folder), make_grid=_grid)
    bundle = bundle_run(made.run)
    first, second = (replace(bundle, finding=Finding(name)) for name in ("any", "other"))
    write_bundle(replace(first, further=(second,)), folder / "bundle")
    torch.set_num_threads(threads)
    return folder


def _split(scans: Any) -> Any:
    return split_scans(scans.scan_ids, scans.patient_ids, [int(label) for label in scans.labels], 1)


def _study(folder: Path) -> Study:
    dataset = stored_dataset([folder / "store"], [folder / "splits"], NAME)
    protocol = Config("ng", epochs=2, batch_size=4, train_above_val=False)
    return Study(dataset, folder / "study", ("ng", "centered_gaussian"), dataset.seeds, protocol)


def _grid(base: Config) -> tuple[Config, ...]:
    return grid(base, lr=[0.1], l1=[0.0])


class _Enough(Exception):  # noqa: N818
    pass


def _interrupt(folder: Path) -> None:
    """An encoding that ends when its units are done, before the store is written."""

    def watch(progress: Any) -> None:
        if len(list((folder / "job" / "store.job").glob("unit-*"))) >= 2:
            raise _Enough

    (folder / "job").mkdir()
    try:
        _resume(folder, watch)
    except _Enough:
        return
    raise RuntimeError("the encoding was not interrupted")


def _resume(folder: Path, watch: Callable[[Any], None] = lambda progress: None) -> Any:
    manifest = read_manifest(folder / "index")
    parts = dict(zip(manifest.scan_ids, _split(manifest).parts, strict=True))
    options = EncodingOptions(unit=64, threads=1)
    return _encode(folder / "job" / "store", manifest, parts, options=options, watch=watch)


def _encode(out: Path, manifest: Any, parts: Mapping[str, str], **options: Any) -> Any:
    how = Preprocessing(windows=(WINDOW,))
    return encode(manifest, tiny, out, preprocessing=how, read=read_volume, parts=parts, **options)


def _text(*values: object) -> str:
    return "\n".join(repr(value) for value in values)


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        whole.update(tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def read_index(folder: Path) -> Read:
    manifest = read_manifest(folder / "index")
    problems = read_problems(folder / "index" / "problems.csv")
    rows = [asdict(row) for row in manifest]
    return Read(_text(manifest.root, manifest.findings, rows), _text(manifest.about, problems, summarize(problems)))


def read_splits(folder: Path) -> Read:
    store, path = open_store(folder / "store"), folder / "splits" / "split-1.csv"
    split = read_split(path)
    return Read(_text(store.with_parts(path).scans["part"].tolist()), _text(audit(split, store), split.counts()))


def read_store(folder: Path) -> Read:
    """The store, and what `nguide encode` says of one that is complete."""
    store, manifest = open_store(folder / "store"), read_manifest(folder / "index")
    bags, columns = store.bags(), store.scans.drop(columns="slice_labels").to_dict("list")
    labels = None if bags.slice_labels is None else bags.slice_labels.tolist()
    turn = ("train", "train", "val", "test")
    part_of = {patient: turn[number % 4] for number, patient in enumerate(sorted(set(manifest.patient_ids)))}
    parts = {row: part_of[patient] for row, patient in zip(manifest.scan_ids, manifest.patient_ids, strict=True)}
    again = _encode(folder / "store", manifest, parts, options=EncodingOptions(threads=1))
    used = (columns, labels, store.provenance, store.recipe, store.findings, store.slice_spacing, store.width)
    return Read(_text(*used, _digest({"": bags.features})), _text(again.failed, again.problems))


def read_job(folder: Path) -> Read:
    """Resumes the encoding, which ends the job."""
    done = _resume(folder)
    used = (done.store.fingerprint, done.store.recipe, done.store.provenance)
    return Read(_text(*used, _digest({"": done.store.bags().features})), _text(done.failed, done.problems))


def read_run(folder: Path) -> Read:
    """As `nguide sweep` with a complete run, and then `nguide bundle`."""
    store = open_store(folder / "store")
    config = Config("ng", lr=0.1, epochs=4, batch_size=4, train_above_val=False)
    run = run_sweep(folder / "run", [config], *(store.part(part) for part in ("train", "val", "test")))
    bundle = bundle_run(folder / "run").as_json()
    shown = {name: run.report.get(name) for name in OF_TRAINING}, bundle.pop("training")
    rest = {name: value for name, value in run.report.items() if name not in OF_TRAINING}
    return Read(_text(run.winners, run.note, run.all_diverged, rest, bundle, _run_files(folder / "run")), _text(shown))


def _run_files(run: Path) -> list[str]:
    history, predictions = read_history(run / "history.parquet"), read_predictions(run / "predictions.parquet")
    return [_digest(load_winner(run).state_dict()), repr(history.to_pydict()), repr(predictions.to_pydict())]


def read_study(folder: Path) -> Read:
    """As `nguide experiment` with a complete study."""
    train_study(_study(folder), make_grid=_grid)
    results, runs = collect(folder / "study", NAME), sorted((folder / "study").glob("*/*"))
    trained = [run for run in runs if (run / "report.json").exists()]
    loaded = [load_run(run).winners for run in trained]
    scored = [read_predictions(run / "predictions.parquet").to_pydict() for run in runs]
    page = json.loads(results.json())
    about = page.pop("about", None)
    return Read(_text(page, [_run_files(run) for run in trained], loaded, scored), _text(about))


def read_bundle(folder: Path) -> Read:
    models = load_bundle(folder / "bundle").each
    known = [model.as_json() for model in models]
    shown = [[about.pop("training"), about.pop("normal_guidance")] for about in known]
    return Read(_text(known, [_digest(model.model.state_dict()) for model in models]), _text(shown))


READERS: dict[str, Callable[[Path], Read]] = {
    "index": read_index,
    "splits": read_splits,
    "store": read_store,
    "job": read_job,
    "run": read_run,
    "study": read_study,
    "bundle": read_bundle,
}
"""By the folder that each reads."""


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that we write; the lock is empty of content."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
