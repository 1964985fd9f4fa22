"""`nguide fit`: from a store to a model, with nothing to choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.system import LARGEST_SEED
from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.tracking import check_track, track_fits
from normal_guidance.cli.training_options import Device, Track, choose_execution, parse_list

if TYPE_CHECKING:
    from normal_guidance.fit.fitting import FittedModel
    from normal_guidance.scans.features.store import FeatureStore


def fit(
    store: Annotated[Path, typer.Argument(help="Folder of a feature store.", metavar="STORE")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model; it must be new or empty.")],
    split: Annotated[
        Path | None,
        typer.Option(
            help="Table (.csv, .parquet) with scan_id and part: all but the part test is trained on. Default: the "
            "parts that the store records, if any."
        ),
    ] = None,
    sensitivity: Annotated[
        float | None,
        typer.Option(help="Set the threshold to find this share of the positive scans, such as 0.95."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="Probability with which an interval shall contain the whole finding of a positive scan; it needs "
            "slice labels. Default: 0.9, if enough scans have them."
        ),
    ] = None,
    finding: Annotated[
        str | None,
        typer.Option(help="Findings to fit, of a store that has several: any,epidural. Default: all of them."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the folds.")] = 0,
    device: Device = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Fit a model to stored features and scan labels: folds, penalties and a committee are chosen by themselves.

    The folder is a bundle with a report for people, report.html: nguide predict takes it as it is, nguide bundle makes
    a copy without the training scans' predictions. Labels of slices measure the result and calibrate intervals; they
    never train. A store with several findings gives a folder with a model for each, which nguide predict takes as a
    whole.
    """
    from normal_guidance.scans.features.store import check_store

    check_store(store)  # before the imports below, which take seconds
    from normal_guidance.cli.progress_bar import Shown, make_console, say, watch
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
    from normal_guidance.cli.progress_bar import make_console, say
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
    from normal_guidance.cli.progress_bar import Shown, make_console, say, watch
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
