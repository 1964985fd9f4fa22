"""`nguide fit`: from a store to a model, with nothing to choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.system import LARGEST_SEED
from normal_guidance.cli.command import AsJson, Command, Group, print_json
from normal_guidance.cli.options import (
    Device,
    Track,
    choose_execution,
    parse_list,
)
from normal_guidance.cli.train import check_track, track_fits

if TYPE_CHECKING:
    from normal_guidance.fit.fitting import FittedModel
    from normal_guidance.scans.features.store import FeatureStore


def fit(
    store: Path,
    out: Out,
    split: Path | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    finding: str | None = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED)] = 0,
    device: Device = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Fit a model to stored features and scan labels: folds, penalties and a committee are chosen by themselves.

    The folder is a bundle with a report for people, report.html: nguide predict takes it as it is, nguide bundle makes
    a copy without the training scans' predictions. Labels of slices measure the result and calibrate intervals; they
    never train. A store with several findings gives a folder with a model for each, which nguide predict takes as a
    whole.

    Args:
        store: Folder of a feature store.
        out: Folder for the model; it must be new or empty.
        split: Table (.csv, .parquet) with scan_id and part: all but the part test is trained on. Default: the parts
            that the store records, if any.
        sensitivity: Set the threshold to find this share of the positive scans, such as 0.95.
        coverage: Probability with which an interval shall contain the whole finding of a positive scan; it needs slice
            labels. Default: 0.9, if enough scans have them.
        finding: Findings to fit, of a store that has several: any,epidural. Default: all of them.
        seed: Seed of the folds.
    """
    from normal_guidance.scans.features.store import check_store

    check_store(store)  # before the imports below, which take seconds
    from normal_guidance.cli.progress import (
        Shown,
        make_console,
        say,
        watch,
    )
    from normal_guidance.fit.fit_committee import make_plan
    from normal_guidance.fit.fitting import fit_model, training_scans
    from normal_guidance.scans.features.store import open_store

    check_track(track)
    asked = {"store": store, "split": split, "sensitivity": sensitivity, "coverage": coverage, "seed": seed}
    opened = open_store(store)
    if split is not None:
        opened = opened.with_parts(split)
    names = [one.name for one in opened.findings] if finding is None else parse_list("--finding", finding, str)
    where = choose_execution(device, "auto").device
    if len(names) > 1:
        options = {"sensitivity": sensitivity, "coverage": coverage, "seed": seed, "device": where}
        models = _fit_findings(opened, out, names, as_json, **options)
        track_fits(track, out, models, asked, as_json)
        return
    scans, test = training_scans(opened.of_finding(names[0]) if names else opened)
    plan = make_plan(scans.labels.tolist(), scans.patient_ids, seed=seed)
    console = make_console(stderr=as_json)
    say(console, f"{len(scans)} scans of {len({*scans.patient_ids})} patients, {int(scans.labels.sum())} positive")

    def show(share: float) -> Shown:
        return Shown("fit", share, f"{share:.0%}")

    with watch(console, "fit", show) as tell:
        made = fit_model(
            scans,
            out,
            test=test,
            plan=plan,
            sensitivity=sensitivity,
            coverage=coverage,
            device=where,
            watch=tell,
        )
    _print_model(out, made, as_json)
    track_fits(track, out, {"fit": made}, asked, as_json)


def _print_model(out: Path, made: FittedModel, as_json: bool) -> None:
    from normal_guidance.cli.progress import make_console, say
    from normal_guidance.fit.fit_page import PAGE
    from normal_guidance.statistics.calibration import describe

    if as_json:
        print_json(_as_json(out, made))
        return
    console = make_console()
    for line in (*made.sentences(), *describe(made.bundle.operation), *made.measured.intervals.sentences()):
        say(console, line)
    say(console, f"Report: {out / PAGE}")
    what = "SCAN" if made.bundle.encoder else "FEATURES"
    say(console, f"Next: nguide predict {what} --model {out} -o OUT")


def _as_json(out: Path, made: FittedModel) -> dict[str, Any]:
    """Return what is printed about one model, as JSON."""
    from normal_guidance.fit.fit_page import PAGE

    measured = {"out_of_fold": made.out_of_fold, "test": made.test}
    return {
        "folder": out,
        "report": out / PAGE,
        "members": len(made.fit.committee),
        "plan": asdict(made.fit.plan),
        "sentences": made.sentences(),
        "intervals": made.measured.intervals.as_json(),
        **{name: None if found is None else asdict(found) for name, found in measured.items()},
    }


def _fit_findings(
    store: FeatureStore, out: Path, names: list[str], as_json: bool, **options: Any
) -> Mapping[str, FittedModel]:
    """Fit a model of each finding, and print the sentences about each."""
    from normal_guidance.cli.progress import (
        Shown,
        make_console,
        say,
        watch,
    )
    from normal_guidance.fit.fit_page import PAGE
    from normal_guidance.fit.fitting import fit_findings

    console = make_console(stderr=as_json)
    say(console, f"{len(store)} scans of {len({*store.patient_ids})} patients, findings {', '.join(names)}")

    def show(now: tuple[str, float]) -> Shown:
        return Shown(f"fit {now[0]}", now[1], f"{now[1]:.0%}")

    with watch(console, "fit", show) as tell:
        made = fit_findings(store, out, names, watch=lambda name, share: tell((name, share)), **options)
    if as_json:
        print_json(
            {
                "folder": out,
                "report": out / PAGE,
                "findings": [{"name": name, **_as_json(out / name, one)} for name, one in made.models.items()],
                "skipped": [{"name": name, "reason": reason} for name, reason in made.skipped.items()],
            }
        )
        return made.models
    for name, one in made.models.items():
        intervals = one.measured.intervals.sentences()
        for line in (*one.sentences(), *intervals, *([made.notes[name]] if name in made.notes else [])):
            say(console, f"{name}: {line}")
    for name, reason in made.skipped.items():
        say(console, f"{name}: skipped: {reason}")
    say(console, f"Report: {out / PAGE}")
    what = "SCAN" if made.bundle.encoder else "FEATURES"
    say(console, f"Next: nguide predict {what} --model {out} -o OUT")
    return made.models


# `nguide bundle`: make a folder of a trained model that others can use.


def bundle(
    run: Path,
    out: Out,
    sensitivity: float | None = None,
    group: str = "",
    as_json: AsJson = False,
) -> None:
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
    if as_json:
        print_json(read_json(out / (FINDINGS if made.further else BUNDLE)))
        return
    if made.encoder is None:
        typer.echo(f"{out}: {made.method} on {made.features} features a slice that nguide encode did not make")
    else:
        typer.echo(f"{out}: {made.method} on {made.encoder.name}, made for {made.expects}")
    for one in made.each:
        promised = [] if one.intervals is None else [f"An interval {promise(one.intervals.coverage)}."]
        for line in (*describe(one.operation), *promised):
            typer.echo(f"{one.finding.name}: {line}" if one.finding else line)
    typer.echo(f"Next: nguide predict {'SCAN' if made.encoder else 'FEATURES'} --model {out} -o OUT")


# `nguide export`: a trained model as one file for other programs.


def export(
    model: Path,
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Write a model as one ONNX file, or as PyTorch's exported program, that runs without this package.

    It takes the features of one scan, (slices, features) in float32 with any number of slices, and gives probability,
    logit and attention as nguide predict does; the metadata names encoder, preprocessing and thresholds. What was
    written is compared with the model before the file appears.

    Args:
        model: Folder of nguide fit, of a bundle, or of a run.
        out: File that ends in .onnx or .pt2 (torch.export).
    """
    from normal_guidance.fit.bundle import load_bundle
    from normal_guidance.fit.export import TOLERANCE, export_bundle, read_metadata

    export_bundle(load_bundle(model), out)
    about = read_metadata(out)
    if as_json:
        print_json({"file": out, "bytes": out.stat().st_size, "tolerance": TOLERANCE, "metadata": about})
        return
    encoder = about["encoder"] or "features that nguide encode did not make"
    typer.echo(f"{out}: {about['method']} on {about['features']} features a slice ({encoder})")
    typer.echo(f"Its outputs {about['outputs']} are those of {model} within {TOLERANCE:g} of their size.")


# `nguide hub`: models to and from the Hugging Face Hub.


hub_app = typer.Typer(
    help="Share models on the Hugging Face Hub, and fetch them.",
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Repository = Annotated[str, typer.Argument(help="Repository on the Hub.", metavar="OWNER/NAME")]


@hub_app.command(cls=Command)
def push(
    model: Path,
    repository: Repository,
    private: bool = False,
    dry_run: Annotated[Path | None, typer.Option("--dry-run", metavar="DIR")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a model with a model card: weights (safetensors), bundle.json, README.md; no code, no patient data.

    Args:
        model: Folder of nguide fit, of a bundle, or of a run.
        private: Make a new repository private.
        dry_run: Write the files to this new folder, and upload nothing.
    """
    from normal_guidance.fit.hub import push_to_hub

    files = push_to_hub(model, repository, private=private, dry_run=dry_run)
    if as_json:
        print_json({"repository": repository, "uploaded": dry_run is None, "folder": dry_run, "files": files})
        return
    where = repository if dry_run is None else f"{dry_run}; nothing was uploaded"
    typer.echo(f"{', '.join(files)}: written to {where}")


@hub_app.command(cls=Command)
def pull(
    repository: Repository,
    out: Out,
    revision: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Download a model that nguide hub push uploaded, and check it; no code is taken.

    Args:
        out: Folder for the model; it must be new or empty.
        revision: Commit, branch or tag. Default: the newest.
    """
    from normal_guidance.fit.hub import pull_from_hub

    bundle = pull_from_hub(repository, out, revision)
    if as_json:
        print_json({"folder": out, "model": bundle.identity.as_json()})
        return
    typer.echo(f"{out}: {bundle.identity}, made for {bundle.expects}")
    typer.echo(f"Next: nguide predict {'SCAN' if bundle.encoder else 'FEATURES'} --model {out} -o OUT")
