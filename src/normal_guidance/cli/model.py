"""Commands on models: `nguide fit`, `bundle`, `export` and `hub`."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import LARGEST_SEED, count_text, time_text
from normal_guidance.cli.command import (
    ENCODERS,
    WINDOWS,
    AsJson,
    Model,
    Out,
    Verbose,
    add_command,
    make_group,
    need_extras,
    one_of,
    print_result,
    some_of,
)
from normal_guidance.cli.options import Device, Track, choose_execution, parse_list
from normal_guidance.cli.train import track_fits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from normal_guidance.fit.bundle import Bundle
    from normal_guidance.fit.fitting import FittedFindings, ModelFit


def fit(
    scans: Annotated[Path, typer.Argument(metavar="SCANS", help="Folder of scans (DICOM, NIfTI), or a feature store.")],
    labels: Annotated[Path | None, typer.Argument(metavar="[LABELS]", show_default=False)] = None,
    out: Out = Path("model"),
    split: Path | None = None,
    keep_test: bool = False,
    sensitivity: float | None = None,
    coverage: float | None = None,
    finding: str | None = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED)] = 0,
    device: Device = None,
    track: Track = None,
    findings: str | None = None,
    encoder: Annotated[str | None, one_of(ENCODERS), typer.Option(show_default="efficientnet-lite0")] = None,
    window: Annotated[str | None, some_of(WINDOWS), typer.Option(show_default=False)] = None,
    field: Annotated[float | None, typer.Option(metavar="MM")] = None,
    offline: bool = False,
    dry_run: bool = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Fit a model to scans and their labels, with nothing to choose, and say what it can do.

    nguide fit SCANS LABELS.csv -o MODEL finds the scans, encodes their slices and fits the model; nguide fit STORE -o
    MODEL begins with features. The folder has a report for people, report.html, and nguide predict takes it. Labels of
    slices measure the result and calibrate intervals; they never train. Every scan is predicted by models that did not
    see its patient, so all scans say what the model can do. Start a killed command again to resume it: MODEL.index and
    MODEL.store beside the model keep what is done.

    Args:
        labels: Table (.csv, .parquet) with the scans, their label (0 or 1) and, where known, patient, path, modality
            (CT or MR) and slice labels; columns and files are found by their names.
        out: Folder for the model; it must be new or empty.
        split: Table (.csv, .parquet) with scan_id and part: all but the part test is trained on. Default: the parts
            that the store records, if any.
        keep_test: Keep the part test aside even if it has fewer than 30 scans; else they are trained on, too.
        sensitivity: Set the threshold to find this share of the positive scans, such as 0.95.
        coverage: Probability with which an interval shall contain the whole finding of a positive scan; it needs slice
            labels. Default: 0.9, if enough scans have them.
        finding: Findings to fit, of a store that has several: any,epidural. Default: all of them.
        seed: Seed of the folds, of initial weights and of the order of scans.
        dry_run: Index the scans, encode and fit a few, estimate disk, memory and time, and write nothing.

    Scans:
        findings: Columns of LABELS with 0 or 1, instead of label, with a SNOMED CT code where known:
            any=1386000,epidural.
        encoder: vit-b16-imagenet, efficientnet-lite0, or a Hugging Face id or folder.
        window: As in nguide encode. Default: -100:300 HU for CT, percentile for MR.
        field: Encode only the middle of each slice, a square of so many mm, for a small organ in a large image.
        offline: Make no network call.
    """
    from normal_guidance.scans.features.store_place import check_store, is_store

    given = {"--findings": findings, "--encoder": encoder, "--window": window, "--field": field}
    if labels is None:
        check_store(scans)  # before the imports below, which take seconds
        if named := [name for name, value in given.items() if value is not None] + ["--dry-run"] * dry_run:
            raise UserError(f"{named[0]} is for a folder of scans, and {scans} is a feature store; leave it out")
    elif is_store(scans):
        raise UserError(f"{scans} is a feature store with labels of its own; leave {labels} out")
    else:
        need_extras("nguide fit of scans", "dicom", "encoders")
    from normal_guidance.fit.fit_ensemble import make_plan
    from normal_guidance.fit.fit_page import PAGE, leaderboard
    from normal_guidance.fit.fitting import finished_before, fit_findings, fit_model, inputs_of, training_scans
    from normal_guidance.fit.measured import check_shares
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.show.progress_bar import Shown, make_console, print_grid, say, watch
    from normal_guidance.statistics.calibration import describe

    check_shares(sensitivity, coverage)  # before the scans are encoded
    asked = {"scans": scans, "split": split, "sensitivity": sensitivity, "coverage": coverage, "seed": seed}
    options: dict[str, Any] = {"sensitivity": sensitivity, "coverage": coverage}
    options["device"] = choose_execution(device, "auto").device
    console = make_console(stderr=as_json)
    tell = partial(say, console)
    models: Mapping[str, ModelFit]

    with watch(console, "fit", lambda now: now) as update:
        if labels is None:
            opened = open_store(scans)
        else:
            from normal_guidance.front.scans_to_store import ScanFolder, scans_to_store
            from normal_guidance.scans.index.manifest import parse_findings

            if scans.is_file() and labels.is_dir():
                raise UserError(
                    f"{scans} is a file and {labels} a folder; give the scans first: nguide fit {labels} {scans}"
                )
            chosen: dict[str, Any] = {
                name.removeprefix("--"): value for name, value in given.items() if value is not None
            }
            if findings is not None:
                chosen["findings"] = parse_findings(findings)
            folder = ScanFolder(scans, labels, **chosen, device=options["device"], offline=offline)
            if dry_run:
                forecast = folder.forecast(out, tell, update)
                print_result(as_json, forecast.as_json(), forecast.lines())
                return
            opened = scans_to_store(folder, out, tell, update)
        if split is not None:
            opened = opened.with_parts(split)
        names = [known.name for known in opened.findings] if finding is None else parse_list("--finding", finding, str)
        if len(names) > 1:
            tell(f"{len(opened)} scans of {len({*opened.patient_ids})} patients, findings {', '.join(names)}")
            of_each = fit_findings(
                opened,
                out,
                names,
                seed=seed,
                keep_test=keep_test,
                watch=lambda name, share: update(Shown(f"fitting {name}", share, f"{share:.0%}")),
                **options,
            )
            models, bundle = of_each.models, of_each.bundle
            document, lines = _findings_result(out, of_each)
        else:
            kept, test = training_scans(opened.of_finding(names[0]) if names else opened, keep_test=keep_test)
            plan = make_plan(kept.labels.tolist(), kept.patient_ids, seed=seed)
            if finished_before(out, inputs_of(kept, test, plan, sensitivity, coverage)):
                print_result(
                    as_json,
                    {"folder": out, "report": out / PAGE, "complete_before": True},
                    [f"{out} is complete already; nothing was done", f"Report: {out / PAGE}"],
                )
                return
            begin = time.monotonic()
            if labels is None:
                positive = int(kept.labels.sum())
                tell(
                    f"Scans: {len(kept):,} of {count_text(len({*kept.patient_ids}), 'patient')}, {positive:,} positive"
                )
            if verbose:
                options["begin"] = lambda seconds: tell(f"At most {time_text(seconds)} on this machine")
            fitted = fit_model(
                kept,
                out,
                test=test,
                plan=plan,
                watch=lambda share: update(Shown("fitting", share, f"{share:.0%}")),
                **options,
            )
            models, bundle = {"fit": fitted}, fitted.bundle
            tell(f"Model: {len(fitted.fit.ensemble)} members, fitted in {time_text(time.monotonic() - begin)}\n")
            document = _model_json(out, fitted)
            lines = fitted.sentences()
            if verbose:
                lines += [*describe(bundle.operation), *fitted.intervals.sentences()]
    if verbose and not as_json:
        for name, model in models.items():
            print_grid(console, replace(leaderboard(model), title=name if len(names) > 1 else ""))
    print_result(as_json, document, [*lines, f"Report: {out / PAGE}", next_line(out, bundle)])
    track_fits(track, out, models, asked, as_json)


def _findings_result(out: Path, fitted: FittedFindings) -> tuple[dict[str, Any], list[str]]:
    """Return the document and the sentences about the model of each finding."""
    from normal_guidance.fit.fit_page import PAGE

    lines = []
    for name, model in fitted.models.items():
        notes = [fitted.notes[name]] if name in fitted.notes else []
        about = (*model.sentences(), *model.intervals.sentences(), *notes)
        lines += [f"{name}: {line}" for line in about]
    lines += [f"{name}: skipped: {reason}" for name, reason in fitted.skipped.items()]
    document = {
        "folder": out,
        "report": out / PAGE,
        "findings": [{"name": name, **_model_json(out / name, model)} for name, model in fitted.models.items()],
        "skipped": [{"name": name, "reason": reason} for name, reason in fitted.skipped.items()],
    }
    return document, lines


def _model_json(out: Path, fitted: ModelFit) -> dict[str, Any]:
    from normal_guidance.fit.fit_page import PAGE

    return {
        "folder": out,
        "report": out / PAGE,
        "members": len(fitted.fit.ensemble),
        "leaderboard": [asdict(row) for row in fitted.leaderboard],
        "plan": asdict(fitted.fit.plan),
        "sentences": fitted.sentences(),
        "intervals": fitted.intervals.as_json(),
        "out_of_fold": asdict(fitted.out_of_fold),
        "test": None if fitted.test is None else asdict(fitted.test),
    }


def next_line(folder: Path, bundle: Bundle) -> str:
    return f"Next: nguide predict {'SCAN' if bundle.encoder else 'FEATURES'} --model {folder} -o OUT"


def bundle(run: Path, out: Out, sensitivity: float | None = None, group: str = "", as_json: AsJson = False) -> None:
    """Make a bundle of a run: weights, encoder's name, window, normalisation, calibration, threshold; no patient data.

    Without --sensitivity, the threshold maximises sensitivity + specificity on the validation scans.

    Args:
        run: Folder of a run on a store, or of nguide fit.
        out: Folder for the bundle.
        sensitivity: Set the threshold to find this share of the positive validation scans, such as 0.95.
        group: Name of the winner, where the run has several.
    """
    from normal_guidance.base.files import read_json
    from normal_guidance.fit.bundle import BUNDLE, bundle_run, write_bundle
    from normal_guidance.scans.index.manifest import FINDINGS
    from normal_guidance.statistics.calibration import describe
    from normal_guidance.statistics.conformal import promise

    made = bundle_run(run, group=group, sensitivity=sensitivity)
    write_bundle(made, out)
    if made.encoder is None:
        lines = [f"{out}: {made.method} on {made.features} features a slice that nguide encode did not make"]
    else:
        lines = [f"{out}: {made.method} on {made.encoder.name}, made for {made.expects}"]
    for model in made.each:
        promised = [] if model.intervals is None else [f"An interval {promise(model.intervals.coverage)}."]
        of_finding = f"{model.finding.name}: " if model.finding else ""
        lines += [f"{of_finding}{line}" for line in (*describe(model.operation), *promised)]
    document = read_json(out / (FINDINGS if made.further else BUNDLE))
    print_result(as_json, document, [*lines, next_line(out, made)])


def export(model: Model, out: Out, as_json: AsJson = False) -> None:
    """Write a model as one ONNX file, or as PyTorch's exported program, that runs without this package.

    It takes the features of one scan, (slices, features) in float32 with any number of slices, and gives probability,
    logit and attention as nguide predict does; the metadata names encoder, preprocessing and thresholds. What was
    written is compared with the model before the file appears.

    Args:
        out: File that ends in .onnx or .pt2 (torch.export).
    """
    from normal_guidance.fit.bundle import load_bundle
    from normal_guidance.fit.export import TOLERANCE, export_bundle, read_metadata

    export_bundle(load_bundle(model), out)
    about = read_metadata(out)
    encoder = about["encoder"] or "features that nguide encode did not make"
    lines = [
        f"{out}: {about['method']} on {about['features']} features a slice ({encoder})",
        f"Its outputs {about['outputs']} are those of {model} within {TOLERANCE:g} of their size.",
    ]
    document = {"file": out, "bytes": out.stat().st_size, "tolerance": TOLERANCE, "metadata": about}
    print_result(as_json, document, lines)


Repository = Annotated[str, typer.Argument(help="Repository on the Hub.", metavar="OWNER/NAME")]


def push(
    model: Model,
    repository: Repository,
    private: bool = False,
    dry_run: Annotated[Path | None, typer.Option("--dry-run", metavar="DIR")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a model with a model card: weights (safetensors), bundle.json, README.md; no code, no patient data.

    Args:
        private: Make a new repository private.
        dry_run: Write the files to this new folder, and upload nothing.
    """
    from normal_guidance.fit.hub import push_to_hub

    files = push_to_hub(model, repository, private=private, dry_run=dry_run)
    where = repository if dry_run is None else f"{dry_run}; nothing was uploaded"
    document = {"repository": repository, "uploaded": dry_run is None, "folder": dry_run, "files": files}
    print_result(as_json, document, [f"{', '.join(files)}: written to {where}"])


def pull(repository: Repository, out: Out, revision: str | None = None, as_json: AsJson = False) -> None:
    """Download a model that nguide hub push uploaded, and check it; no code is taken.

    Args:
        out: Folder for the model; it must be new or empty.
        revision: Commit, branch or tag. Default: the newest.
    """
    from normal_guidance.fit.hub import pull_from_hub

    bundle = pull_from_hub(repository, out, revision)
    lines = [f"{out}: {bundle.identity}, made for {bundle.expects}", next_line(out, bundle)]
    print_result(as_json, {"folder": out, "model": asdict(bundle.identity)}, lines)


hub_app = make_group("Share models on the Hugging Face Hub, and fetch them.")
for command in (push, pull):
    add_command(hub_app, command)
