"""`nguide node`: a DICOM node that predicts what it receives and sends the results on."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli import endings
from normal_guidance.cli.training_options import COMPUTING, Device, choose_execution, choose_precision

if TYPE_CHECKING:
    import ssl

RECEIVING, SENDING, LIMITS = "Receiving", "Sending", "Limits"


def read_settings(context: Any, given: Path | None) -> Path | None:  # Any: the class differs between releases of typer
    """Take the names and values of a TOML file for options that are not given; an unknown name is an error."""
    if given is None:
        return None
    try:
        values = tomllib.loads(given.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{given} cannot be read ({error.strerror}); give --settings a TOML file") from error
    except ValueError as error:
        raise UserError(f"{given} is not TOML: {error}; write for example port = 11112") from error
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
    state: Annotated[Path, typer.Argument(metavar="STATE", help="Folder of the node's queue, files and audit log.")],
    model: Annotated[
        Path, typer.Option("--model", "-m", help="Folder of a run, or one that nguide fit or bundle made.")
    ],
    settings: Annotated[
        Path | None,
        typer.Option(
            "--settings",
            help="TOML file with the names of these options, without dashes. The command line goes first.",
            callback=read_settings,
            is_eager=True,
        ),
    ] = None,
    aet: Annotated[str, typer.Option(help="AE title of the node.", rich_help_panel=RECEIVING)] = "NGUIDE",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for DICOM; 0 chooses a free one.", rich_help_panel=RECEIVING)
    ] = 11112,
    address: Annotated[
        str,
        typer.Option(
            help="Address of this machine to listen on; 0.0.0.0 is all. The default hears this machine only.",
            rich_help_panel=RECEIVING,
        ),
    ] = "127.0.0.1",
    senders: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="AET@HOST[:PORT]",
            help="Who may send; repeat it. Storage commitment is reported to the port.",
            rich_help_panel=RECEIVING,
        ),
    ] = None,
    watch: Annotated[
        Path | None,
        typer.Option(help="Take files from this folder, and delete them there.", rich_help_panel=RECEIVING),
    ] = None,
    pull: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask this DICOMweb server for new series, every --settle seconds. The token is taken from "
            "NGUIDE_DICOMWEB_TOKEN.",
            rich_help_panel=RECEIVING,
        ),
    ] = None,
    take: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help='Take series that fit, such as "modality=CT body=HEAD description=*axial* thickness=2-6"; repeat it. '
            "Default: all that the model accepts.",
            rich_help_panel=RECEIVING,
        ),
    ] = None,
    settle: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds without a new slice after which a series is complete; ten times as many after an abort.",
            rich_help_panel=RECEIVING,
        ),
    ] = 60.0,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AET@HOST:PORT",
            help="Where results go by C-STORE; repeat it. https://SERVER stores them by DICOMweb, folder:PATH copies "
            "them, hl7:APP@HOST:PORT and fhir:https://SERVER tell a reading list the score.",
            rich_help_panel=SENDING,
        ),
    ] = None,
    commit: Annotated[
        bool,
        typer.Option(
            "--commit",
            help="Ask for storage commitment; files are kept until the archive confirms.",
            rich_help_panel=SENDING,
        ),
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(help="This node's certificate (PEM): all DICOM and HL7 connections use TLS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM), without a password.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Certificates (PEM) of the authority that signed those of all partners.")
    ] = None,
    status: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the status page, /status.json and /health.")
    ] = "127.0.0.1:8112",
    keep: Annotated[
        float,
        typer.Option(min=0, help="Days for which files of finished series are kept.", rich_help_panel=LIMITS),
    ] = 1.0,
    max_series: Annotated[
        int,
        typer.Option(
            min=1, help="Series that may wait; then senders are told to come back later.", rich_help_panel=LIMITS
        ),
    ] = 1000,
    max_gb: Annotated[
        float, typer.Option(min=0.001, help="Size of the files that may wait, in GB.", rich_help_panel=LIMITS)
    ] = 100.0,
    encoder: Annotated[
        str | None, typer.Option(help="Name, id or folder of the encoder, if other than in training.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="File of the encoder's weights, if training used your own.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that decode. Default: one for each core.", rich_help_panel=COMPUTING),
    ] = None,
    device: Device = None,
) -> None:
    """Run a DICOM node: receive series, predict them, send key objects, reports and pictures to an archive.

    A killed node goes on where it was: what it has confirmed to a sender is not lost. SIGTERM and Ctrl-C end it.
    Research software, not a medical device.
    """
    from normal_guidance.clinic.node.destination import Identity, parse_destination
    from normal_guidance.clinic.node.incoming import parse_rule
    from normal_guidance.clinic.node.node import NodeSettings, run_node
    from normal_guidance.clinic.node.partners import check_title, parse_peer, parse_place
    from normal_guidance.clinic.node.receiver import Listening
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
    peers = tuple(parse_peer(one) for one in senders or ())
    identity = Identity(title, commit, client_tls)
    chosen = NodeSettings(
        state=state,
        listening=Listening(title, address, port, server_tls) if peers else None,
        senders=peers,
        destinations=tuple(parse_destination(one, identity) for one in to or ()),
        watch=watch,
        pull=None if pull is None else parse_server(pull).url,
        taking=Taking(tuple(map(parse_rule, take or ())), settle),
        limits=Limits(max_series, int(max_gb * 1e9)),
        keep=keep,
        tls=client_tls,
    )
    place = parse_place(status)
    bundle = load_bundle(model)
    execution = choose_execution(device, "auto")
    loaded = bundle.load_encoder(
        encoder,
        weights=weights,
        device=execution.device,
        precision=choose_precision("auto", execution.device),
        offline=True,
    )
    options = PredictOptions(workers=(os.cpu_count() or 1) if workers is None else workers)
    with (
        run_node(chosen, Predictor(bundle, loaded, options)) as (running, number),
        endings.until_stopped(),
        serving_status(running, *place) as url,
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
            context.load_cert_chain(certificate, key, password=_no_password)
            context.load_verify_locations(authority)
        except (OSError, ssl.SSLError, ValueError) as error:
            names = f"{certificate}, {key} or {authority}"
            raise UserError(f"{names} cannot be used ({error}); give PEM files that belong together") from error
        contexts.append(context)
    return contexts[0], contexts[1]


def _no_password() -> str:
    """Refuse a key that has a password: nobody is there to type it."""
    raise ValueError("the key has a password")
