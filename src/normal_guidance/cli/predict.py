"""`nguide predict`: apply a trained model to new scans."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.command import need_extras
from normal_guidance.cli.completion import ENCODERS, one_of
from normal_guidance.cli.json_output import print_json
from normal_guidance.cli.training_options import COMPUTING, Device, choose_execution, choose_precision

if TYPE_CHECKING:
    from normal_guidance.clinic.predict.dicomweb import DicomWeb
    from normal_guidance.clinic.results.result_folder import Written
    from normal_guidance.fit.bundle import Bundle
    from normal_guidance.scans.index.problems import Problem

FAILED_EXIT_CODE = 1
"""At least one scan was not predicted, or its results could not all be written."""


def predict(
    scans: Annotated[
        list[Path],
        typer.Argument(
            metavar="SCAN",
            help="DICOM folder, .zip, .nii, .nii.gz, or a folder of such; https://SERVER/studies/UID, or "
            ".../series/UID, of a DICOMweb server; for a model of your own features, a feature store or what nguide "
            "store import takes. Several may be given.",
        ),
    ],
    model: Annotated[
        Path, typer.Option("--model", "-m", help="Folder of a run, or one that nguide fit or bundle made.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results; new, or of the same command.")],
    force: Annotated[
        bool,
        typer.Option("--force", help="Also predict scans that the model was not made for, or with missing files."),
    ] = False,
    keys: Annotated[int, typer.Option(min=1, help="Number of key slices, at most.")] = 5,
    share: Annotated[
        float | None,
        typer.Option(
            help="Report the shortest interval with this share of the attention, which promises nothing. Default: the "
            "interval that the model promises to contain the finding; without one, half of the attention."
        ),
    ] = None,
    dicom: Annotated[
        bool, typer.Option("--dicom", help="Write DICOM results as well: key objects, structured report, picture.")
    ] = False,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Store the DICOM results on this DICOMweb server; implies --dicom. Tokens are taken from "
            "NGUIDE_DICOMWEB_TOKEN.",
        ),
    ] = None,
    anonymize: Annotated[
        bool,
        typer.Option("--anonymize", help="Number the scans, and keep patient ids, paths and UIDs out of all results."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each scan and nothing else to standard output.")
    ] = False,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Name, id or folder of the encoder, if other than in training.", autocompletion=one_of(ENCODERS)
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="File of the encoder's weights, if training used your own.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network call.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Processes that read and decode. Default: one for each core.", rich_help_panel=COMPUTING
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Predict scans: probability, attention along the slices, key slices; as JSON, CSV, pictures and pages.

    The model refuses scans that it was not made for, unless --force is given. A refused or damaged scan does not stop
    the others. A model of imported features predicts from features, without pictures and DICOM. Start a killed command
    again to resume it. Exit code 0: all scans were predicted; 1: at least one was not, or lacks results; 2: a mistake
    in the command.
    """
    from normal_guidance.clinic.predict.job import (
        COMMAND,
        completed,
        identity_of,
        open_prediction_job,
    )
    from normal_guidance.clinic.predict.new_scans import find_scans
    from normal_guidance.clinic.predict.predicting import PredictOptions, is_features, predict_features, predict_found
    from normal_guidance.clinic.results.result_folder import outcome_json, summary_line, write_predictions
    from normal_guidance.clinic.results.scan_pages import count_sentence, is_all
    from normal_guidance.fit.bundle import load_bundle

    count = (os.cpu_count() or 1) if workers is None else workers
    options = PredictOptions(force=force, keys=keys, share=share, workers=count, anonymize=anonymize)
    chosen = choose_execution(device, "auto")
    bundle = load_bundle(model)
    dicom = dicom or store is not None
    about = {"force": force, "keys": keys, "share": share, "dicom": dicom, "anonymize": anonymize}
    archive = _archive(store, anonymize)
    given = [re.sub(r"^(https?):/+", r"\1://", str(one)) for one in scans]  # a Path loses a slash of https://
    identity = identity_of(bundle, given, about)
    before = completed(out, identity)
    if before is not None:
        _store(archive, out)
        _tell_completed(before, out, as_json)
        return
    begin = time.monotonic()
    others: Sequence[Problem] = ()
    places = _fetched(given, out, bundle)
    if bundle.encoder is None or any(map(is_features, places)):
        _refuse_for_features(dicom=dicom, encoder=encoder, weights=weights)
        outcomes = predict_features(places, bundle, options)
    else:
        need_extras("nguide predict of scans", "dicom", "encoders")
        accepted = bundle.expects.modalities
        found = find_scans(places, workers=count, any_modality=force, modalities=accepted, anonymize=anonymize)
        others = found.problems.get("", ())
        loaded = None
        if found.rows:
            loaded = bundle.load_encoder(
                encoder,
                weights=weights,
                device=chosen.device,
                precision=choose_precision("auto", chosen.device),
                offline=offline,
            )
        outcomes = predict_found(found, bundle, loaded, options, lambda row, root: job.finished(row, root))

    def tell(one: Written) -> None:
        if as_json:
            print_json(outcome_json(one, bundle, anonymize=anonymize), indent=None)
        else:
            for line in describe(one, bundle):
                typer.echo(line, err=not one.complete)

    with open_prediction_job(out, identity) as job:
        written = write_predictions(
            outcomes,
            bundle,
            out,
            dicom=dicom,
            anonymize=anonymize,
            others=others,
            about={"options": about, COMMAND: identity},
            watch=tell,
            job=job,
        )
    _store(archive, out)
    lines = [summary_line(one, anonymize=anonymize) for one in written]
    if not as_json:
        seconds = time.monotonic() - begin
        typer.echo(f"{count_sentence(lines)}; {seconds:.1f} s; open {out / 'index.html'}")
        if others:
            files = "1 file belongs" if len(others) == 1 else f"{len(others)} files belong"
            typer.echo(f"{files} to no scan ({_kinds(others)}); see {out / 'problems.csv'}")
    if not is_all(lines):
        raise typer.Exit(FAILED_EXIT_CODE)


def _fetched(scans: Sequence[str], out: Path, bundle: Bundle) -> list[Path]:
    """Return the paths of the scans, after fetching those on servers into a folder beside the results."""
    from normal_guidance.clinic.predict.new_scans import is_url

    if not any(map(is_url, scans)):
        return list(map(Path, scans))
    from normal_guidance.clinic.predict.dicomweb import fetch_all, fetched_folder, parse_place

    folder, places = fetched_folder(out), list[Path]()
    for one in scans:
        places += fetch_all(parse_place(one), folder, bundle.expects.modalities) if is_url(one) else [Path(one)]
    typer.echo(f"scans from DICOMweb lie in {folder}; nguide view needs them", err=True)
    return places


def _archive(url: str | None, anonymize: bool) -> DicomWeb | None:
    """Return the server that results are stored on; a wrong address is refused before hours of work."""
    if url is None:
        return None
    from normal_guidance.clinic.predict.dicomweb import parse_server

    if anonymize:
        raise UserError("--store puts results into the patient's study, which --anonymize hides; leave one of them out")
    return parse_server(url)


def _store(archive: DicomWeb | None, out: Path) -> None:
    """Store the DICOM results on a server; what it has already stays as it is."""
    from normal_guidance.clinic.results.result_folder import dicom_results

    files = dicom_results(out) if archive is not None else []
    if archive is not None and files:
        archive.store(files)
        typer.echo(f"{len(files)} DICOM results stored on {archive.url}", err=True)


def _tell_completed(summary: Mapping[str, Any], out: Path, as_json: bool) -> None:
    """Say that there is nothing to do, and end as the command did that did it."""
    from normal_guidance.clinic.results.result_folder import summary_json
    from normal_guidance.clinic.results.scan_pages import is_all

    if as_json:
        for one in summary_json(out, summary):
            print_json(one, indent=None)
    else:
        typer.echo(f"{out} is complete already; nothing was done; open {out / 'index.html'}")
    if not is_all(summary["scans"]):
        raise typer.Exit(FAILED_EXIT_CODE)


def _refuse_for_features(**given: object) -> None:
    """Refuse options that need images."""
    wrong = next((name for name, value in given.items() if value), None)
    if wrong is not None:
        raise UserError(f"--{wrong} is for scans, but features are given, which have no images; leave it out")


def describe(one: Written, bundle: Bundle) -> list[str]:
    """Return the lines to print about one scan."""
    from normal_guidance.clinic.results.result_folder import problems_of, summary_lines

    lines = summary_lines(one, bundle)
    line = lines[0]
    if line["state"] != "predicted":
        return [f"scan {line['scan_id']}: {line['state']}: {line['reason']}"]
    caution = f"; CAUTION: {line['cautions']}" if line["cautions"] else ""
    odd = f"; problems: {_kinds(problems_of(one))}, see {one.folder}" if line["problems"] else ""
    results = [_result(own) for own in lines]
    results[-1] += caution.rstrip(".") + odd
    return [*results, *(f"scan {line['scan_id']}: {problem.action}: {problem.detail}" for problem in one.lacking)]


def _result(line: Mapping[str, Any]) -> str:
    """Return the line to print about one scan and finding."""
    side = {None: "", 0: ", negative", 1: ", positive"}[line["positive"]]
    named = f"{line['finding']}: " if line.get("finding") else ""
    return (
        f"scan {line['scan_id']}: {named}probability {line['probability']:.3f}{side}, key slices {line['key_slices']}"
    )


def _kinds(problems: Iterable[Problem]) -> str:
    """Return the number of problems of each kind."""
    from normal_guidance.scans.index.problems import summarize

    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in summarize(problems).items())
