"""Commands on new scans: `nguide predict`, `node` and `view`."""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError, reading
from normal_guidance.base.system import count_text
from normal_guidance.cli import endings
from normal_guidance.cli.command import ENCODERS, Out, json_text, need_extras, one_of
from normal_guidance.cli.options import Device, choose_execution, choose_precision
from normal_guidance.show.progress_bar import make_console, say

if TYPE_CHECKING:
    import ssl

    from normal_guidance.clinic.predict.dicomweb import DicomWeb
    from normal_guidance.clinic.results.result_folder import Written
    from normal_guidance.fit.bundle import Bundle
    from normal_guidance.scans.features.encoders import Encoder
    from normal_guidance.scans.index.problems import Problem


def predict(
    scans: Annotated[list[Path], typer.Argument(metavar="SCAN")],
    model: Annotated[Path, typer.Option("--model", "-m")],
    out: Out,
    force: bool = False,
    keys: Annotated[int, typer.Option(min=1)] = 5,
    share: float | None = None,
    dicom: bool = False,
    store: Annotated[str | None, typer.Option(metavar="URL")] = None,
    anonymize: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    encoder: Annotated[str | None, one_of(ENCODERS)] = None,
    weights: Path | None = None,
    offline: bool = False,
    workers: Annotated[int | None, typer.Option(min=0)] = None,
    device: Device = None,
) -> None:
    """Predict scans: probability, attention along the slices, key slices; as JSON, CSV, pictures and pages.

    The model refuses scans that it was not made for, unless --force is given. A refused or damaged scan does not stop
    the others. A model of imported features predicts from features, without pictures and DICOM. Start a killed command
    again to resume it. Exit code 0: all scans were predicted; 1: at least one was not, or lacks results; 2: a mistake
    in the command.

    Args:
        scans: DICOM folder, .zip, .nii, .nii.gz, or a folder of such; https://SERVER/studies/UID, or .../series/UID, of
            a DICOMweb server; for a model of your own features, a feature store or what nguide store import takes.
            Several may be given.
        model: Folder of a run, or one that nguide fit or bundle made.
        out: Folder for the results; new, or of the same command.
        force: Also predict scans that the model was not made for, or with missing files.
        keys: Number of key slices, at most.
        share: Report the shortest interval with this share of the attention, which promises nothing. Default: the
            interval that the model promises to contain the finding; without one, half of the attention.
        dicom: Write DICOM results as well: key objects, structured report, picture.
        store: Store the DICOM results on this DICOMweb server; implies --dicom. Tokens are taken from
            NGUIDE_DICOMWEB_TOKEN.
        anonymize: Number the scans, and keep patient ids, paths and UIDs out of all results.
        as_json: Print one JSON object for each scan and nothing else to standard output.
        encoder: Name, id or folder of the encoder, if other than in training.
        weights: File of the encoder's weights, if training used your own.
        offline: Make no network call.

    Computing:
        workers: Processes that read and decode. Default: one for each core.
    """
    from normal_guidance.clinic.predict.job import COMMAND, completed, identity_of, open_prediction_job
    from normal_guidance.clinic.predict.new_scans import find_scans
    from normal_guidance.clinic.predict.predicting import PredictOptions, is_features, predict_features, predict_found
    from normal_guidance.clinic.results.result_folder import outcome_json, summary_line, write_predictions
    from normal_guidance.clinic.results.scan_pages import count_sentence, is_all, model_cautions
    from normal_guidance.fit.bundle import load_bundle

    count = (os.cpu_count() or 1) if workers is None else workers
    options = PredictOptions(force=force, keys=keys, share=share, workers=count, anonymize=anonymize)
    execution = choose_execution(device, "auto")
    bundle = load_bundle(model)
    dicom = dicom or store is not None
    about = {"force": force, "keys": keys, "share": share, "dicom": dicom, "anonymize": anonymize}
    archive = None
    if store is not None:  # refused before hours of work
        from normal_guidance.clinic.predict.dicomweb import parse_server

        archive = parse_server(store)
        if anonymize:
            raise UserError(
                "--store puts results into the patient's study, which --anonymize hides; leave one of them out"
            )
    given = [re.sub(r"^(https?):/+", r"\1://", str(scan)) for scan in scans]  # a Path loses a slash of https://
    identity = identity_of(bundle, given, about)
    before = completed(out, identity)
    if before is not None:
        _store(archive, out)
        _print_completed(before, out, as_json)
        return
    begin = time.monotonic()
    others: Sequence[Problem] = ()
    loaded: Encoder | None = None
    paths = _fetched(given, out, bundle)
    if bundle.encoder is None or any(map(is_features, paths)):
        for name, value in {"dicom": dicom, "encoder": encoder, "weights": weights}.items():
            if value:
                raise UserError(f"--{name} is for scans, but features are given, which have no images; leave it out")
        outcomes = predict_features(paths, bundle, options)
    else:
        need_extras("nguide predict of scans", "dicom", "encoders")
        accepted = bundle.expects.modalities
        found = find_scans(paths, workers=count, any_modality=force, modalities=accepted, anonymize=anonymize)
        others = found.problems.get("", ())
        if found.rows:
            loaded = _load_encoder(bundle, encoder, weights, execution.device, offline)
        outcomes = predict_found(found, bundle, loaded, options, lambda row, root: job.finished(row, root))

    record: dict[str, Any] = {"options": about, COMMAND: identity}

    def show(outcome: Written) -> None:
        if loaded is not None:
            record["engine"] = loaded.engine  # known for sure after the first batch
        if as_json:
            typer.echo(json_text(outcome_json(outcome, anonymize=anonymize), indent=None))
        else:
            for line in scan_lines(outcome, bundle):
                typer.echo(line, err=not outcome.complete)

    with open_prediction_job(out, identity) as job:
        written = write_predictions(
            outcomes,
            bundle,
            out,
            dicom=dicom,
            anonymize=anonymize,
            others=others,
            about=record,
            watch=show,
            job=job,
        )
    _store(archive, out)
    lines = [summary_line(outcome, anonymize=anonymize) for outcome in written]
    if not as_json:
        seconds = time.monotonic() - begin
        typer.echo(f"{count_sentence(lines)}; {seconds:.1f} s; open {out / 'index.html'}")
        for text in model_cautions(bundle):  # once, since it is of no scan in particular
            typer.echo(f"CAUTION: {text}")
        if others:
            files = "1 file belongs" if len(others) == 1 else f"{len(others)} files belong"
            typer.echo(f"{files} to no scan ({_kinds(others)}); see {out / 'problems.csv'}")
    if not is_all(lines):
        raise typer.Exit(endings.NOT_ALL.code)


def _load_encoder(bundle: Bundle, encoder: str | None, weights: Path | None, device: str, offline: bool) -> Encoder:
    precision = choose_precision("auto", device)
    return bundle.load_encoder(encoder, weights=weights, device=device, precision=precision, offline=offline)


def _fetched(scans: Sequence[str], out: Path, bundle: Bundle) -> list[Path]:
    """Return the paths of the scans, after fetching those on servers into a folder beside the results."""
    from normal_guidance.clinic.predict.new_scans import is_url

    if not any(map(is_url, scans)):
        return list(map(Path, scans))
    from normal_guidance.clinic.predict.dicomweb import fetch_all, parse_place

    folder, paths = out.with_name(f"{out.name}.scans"), list[Path]()
    for scan in scans:
        paths += fetch_all(parse_place(scan), folder, bundle.expects.modalities) if is_url(scan) else [Path(scan)]
    typer.echo(f"scans from DICOMweb lie in {folder}; nguide view needs them", err=True)
    return paths


def _store(archive: DicomWeb | None, out: Path) -> None:
    """Store the DICOM results on a server; what it has already stays as it is."""
    from normal_guidance.clinic.results.result_folder import dicom_results

    files = dicom_results(out) if archive is not None else []
    if archive is not None and files:
        archive.store(files)
        typer.echo(f"{len(files)} DICOM results stored on {archive.url}", err=True)


def _print_completed(summary: Mapping[str, Any], out: Path, as_json: bool) -> None:
    """Say that there is nothing to do, and end as the command did that did it."""
    from normal_guidance.clinic.results.result_folder import summary_json
    from normal_guidance.clinic.results.scan_pages import is_all

    if as_json:
        for scan in summary_json(out, summary):
            typer.echo(json_text(scan, indent=None))
    else:
        typer.echo(f"{out} is complete already; nothing was done; open {out / 'index.html'}")
    if not is_all(summary["scans"]):
        raise typer.Exit(endings.NOT_ALL.code)


def scan_lines(outcome: Written, bundle: Bundle) -> list[str]:
    """Return the lines to print about one scan: one for each finding, and what it lacks."""
    from normal_guidance.clinic.results.result_folder import problems_of, summary_lines

    findings = summary_lines(outcome, bundle)
    first = findings[0]
    scan = f"scan {first['scan_id']}: "
    if first["state"] != "predicted":
        return [f"{scan}{first['state']}: {first['reason']}"]
    lines = []
    for finding in findings:
        named = f"{finding['finding']}: " if finding.get("finding") else ""
        side = {None: "", 0: ", negative", 1: ", positive"}[finding["positive"]]
        keys = f"key slices {finding['key_slices']}"
        if finding["key_instance_numbers"]:
            keys += f" (images {finding['key_instance_numbers']})"
        lines.append(f"{scan}{named}probability {finding['probability']:.3f}{side}, {keys}")
    if first["cautions"]:
        lines[-1] += f"; CAUTION: {first['cautions']}".rstrip(".")
    if first["problems"]:
        lines[-1] += f"; problems: {_kinds(problems_of(outcome))}, see {outcome.folder}"
    return [*lines, *(f"{scan}{problem.action}: {problem.detail}" for problem in outcome.lacking)]


def _kinds(problems: Iterable[Problem]) -> str:
    from normal_guidance.scans.index.problems import summarize

    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in summarize(problems).items())


def read_settings(context: Any, given: Path | None) -> Path | None:  # Any: the class differs between releases of typer
    """Take the names and values of a TOML file for options that are not given; an unknown name is an error."""
    if given is None:
        return None
    with reading(given, "give --settings a TOML file, such as one with the line port = 11112"):
        values = tomllib.loads(given.read_text(encoding="utf-8"))
    known = {word.removeprefix("--"): option.name for option in context.command.params for word in option.opts}
    known = {word: name for word, name in known.items() if word not in ("settings", "help") and word[0] != "-"}
    defaults: dict[str, Any] = dict(context.default_map or {})
    for word, value in values.items():
        if word not in known:
            raise UserError(f"{given}: there is no option {word!r}; the names are {', '.join(sorted(known))}")
        defaults[known[word] or word] = value
    context.default_map = defaults
    return given


def node(
    state: Path,
    model: Annotated[Path, typer.Option("--model", "-m")],
    settings: Annotated[Path | None, typer.Option("--settings", callback=read_settings, is_eager=True)] = None,
    aet: str = "NGUIDE",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 11112,
    address: str = "127.0.0.1",
    senders: Annotated[list[str] | None, typer.Option("--from", metavar="AET@HOST[:PORT]")] = None,
    watch: Path | None = None,
    pull: Annotated[str | None, typer.Option(metavar="URL")] = None,
    take: Annotated[list[str] | None, typer.Option(metavar="RULE")] = None,
    settle: Annotated[float, typer.Option(min=0.1)] = 60.0,
    to: Annotated[list[str] | None, typer.Option(metavar="AET@HOST:PORT")] = None,
    commit: bool = False,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    tls_ca: Path | None = None,
    status: Annotated[str, typer.Option(metavar="HOST:PORT")] = "127.0.0.1:8112",
    keep: Annotated[float, typer.Option(min=0)] = 1.0,
    max_series: Annotated[int, typer.Option(min=1)] = 1000,
    max_gb: Annotated[float, typer.Option(min=0.001)] = 100.0,
    encoder: str | None = None,
    weights: Path | None = None,
    workers: Annotated[int | None, typer.Option(min=0)] = None,
    device: Device = None,
) -> None:
    """Run a DICOM node: receive series, predict them, send key objects, reports and pictures to an archive.

    A killed node goes on where it was: what it has confirmed to a sender is not lost. SIGTERM and Ctrl-C end it.
    Research software, not a medical device.

    Args:
        state: Folder of the node's queue, files and audit log.
        model: Folder of a run, or one that nguide fit or bundle made.
        settings: TOML file with the names of these options, without dashes. The command line goes first.
        tls_cert: This node's certificate (PEM): all DICOM and HL7 connections use TLS.
        tls_key: The certificate's key (PEM), without a password.
        tls_ca: Certificates (PEM) of the authority that signed those of all partners.
        status: Address of the status page, /status.json and /health.
        encoder: Name, id or folder of the encoder, if other than in training.
        weights: File of the encoder's weights, if training used your own.

    Receiving:
        aet: AE title of the node.
        port: Port for DICOM; 0 chooses a free one.
        address: Address of this machine to listen on; 0.0.0.0 is all. The default hears this machine only.
        senders: Who may send; repeat it. Storage commitment is reported to the port.
        watch: Take files from this folder, and delete them there.
        pull: Ask this DICOMweb server for new series, every --settle seconds. The token is taken from
            NGUIDE_DICOMWEB_TOKEN.
        take: Take series that fit, such as "modality=CT body=HEAD description=*axial* thickness=2-6"; repeat it.
            Default: all that the model accepts.
        settle: Seconds without a new slice after which a series is complete; ten times as many after an abort.

    Sending:
        to: Where results go by C-STORE; repeat it. https://SERVER stores them by DICOMweb, folder:PATH copies them,
            hl7:APP@HOST:PORT and fhir:https://SERVER tell a reading list the score.
        commit: Ask for storage commitment; files are kept until the archive confirms.

    Limits:
        keep: Days for which files of finished series are kept.
        max_series: Series that may wait; then senders are told to come back later.
        max_gb: Size of the files that may wait, in GB.

    Computing:
        workers: Processes that decode. Default: one for each core.
    """
    from normal_guidance.clinic.node.destination import Identity
    from normal_guidance.clinic.node.incoming import parse_rule
    from normal_guidance.clinic.node.node import NodeSettings, run_node
    from normal_guidance.clinic.node.partners import check_title, parse_peer, parse_place
    from normal_guidance.clinic.node.receiver import Listening
    from normal_guidance.clinic.node.sending import parse_destination
    from normal_guidance.clinic.node.series_queue import Limits
    from normal_guidance.clinic.node.serving import Taking
    from normal_guidance.clinic.node.status import serving_status
    from normal_guidance.clinic.predict.dicomweb import parse_server
    from normal_guidance.clinic.predict.predicting import PredictOptions, Predictor
    from normal_guidance.fit.bundle import load_bundle

    if watch is not None and not watch.is_dir():
        raise UserError(f"--watch {watch} is not a folder; make it first")
    server_tls, client_tls = _tls(tls_cert, tls_key, tls_ca)
    title = check_title(aet)
    peers = tuple(parse_peer(sender) for sender in senders or ())
    identity = Identity(title, commit, client_tls)
    chosen = NodeSettings(
        state=state,
        listening=Listening(title, address, port, server_tls) if peers else None,
        senders=peers,
        destinations=tuple(parse_destination(destination, identity) for destination in to or ()),
        watch=watch,
        pull=None if pull is None else parse_server(pull).url,
        taking=Taking(tuple(map(parse_rule, take or ())), settle),
        limits=Limits(max_series, int(max_gb * 1e9)),
        keep=keep,
        tls=client_tls,
    )
    status_host, status_port = parse_place(status)
    bundle = load_bundle(model)
    loaded = _load_encoder(bundle, encoder, weights, choose_execution(device, "auto").device, offline=True)
    options = PredictOptions(workers=(os.cpu_count() or 1) if workers is None else workers)
    with (
        run_node(chosen, Predictor(bundle, loaded, options)) as (running, number),
        endings.until("SIGINT", "SIGTERM"),
        serving_status(running, status_host, status_port) as url,
    ):
        where = f"listens on {address}:{number} as {title}" if number is not None else f"watches {watch or pull}"
        typer.echo(f"nguide node {where}; status: {url}")
        while True:
            time.sleep(3600)


def _tls(
    certificate: Path | None, key: Path | None, authority: Path | None
) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Make the contexts for those who call us and for those whom we call; both sides must show certificates."""
    import ssl

    def refuse_password() -> str:  # nobody is there to type it
        raise ValueError("the key has a password")

    given = (certificate, key, authority)
    if not any(given):
        return None, None
    if certificate is None or key is None or authority is None:
        raise UserError("TLS needs all of --tls-cert, --tls-key and --tls-ca; give the missing ones, or none")
    contexts = []
    for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(certificate, key, password=refuse_password)
            context.load_verify_locations(authority)
        except (OSError, ssl.SSLError, ValueError) as error:
            names = f"{certificate}, {key} or {authority}"
            raise UserError(f"{names} cannot be used ({error}); give PEM files that belong together") from error
        contexts.append(context)
    return contexts[0], contexts[1]


def view(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    index: Path | None = None,
    store: Path | None = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535)] = None,
) -> None:
    """Look at a model's report, then at scans: slices, the attention of each method along them, and slice labels.

    The page is served to this machine only, and opens with the printed address only. Nothing is written.

    Args:
        folder: Folder that nguide experiment, sweep, fit or predict wrote.
        index: Folder that nguide index made: adds images and slice labels. Default: MODEL.index, beside the
            model. Predicted scans need none.
        store: Folder of a feature store: adds the window that the encoder saw. A model knows it.
        port: Port on this machine. Default: 8765, or a free one.
    """
    from normal_guidance.clinic.viewer.gallery import open_gallery
    from normal_guidance.clinic.viewer.server import serve

    console = make_console()
    gallery = open_gallery(folder, index, store)
    if not len(gallery):
        raise UserError(f"{folder}: no scan in it was predicted; its summary.csv says why")
    images = f"yes, from {gallery.manifest.root}" if gallery.manifest else ""
    if gallery.manifest is None:
        images = "no, give --index INDEX to see them"
        if gallery.summary is not None and gallery.summary.anonymous:
            images = "no, anonymous results do not record where the scans are; predict without --anonymize to see them"
    say(console, f"{folder}: {len(gallery)} scans, {count_text(len(gallery.splits), 'split')}; images: {images}")

    def announce(url: str) -> None:
        say(console, f"Open {url}")
        say(console, "Press Ctrl-C to stop.")

    with endings.until("SIGINT"):
        serve(gallery, port, announce)
