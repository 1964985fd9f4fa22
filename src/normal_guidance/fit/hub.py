"""Models to and from the Hugging Face Hub: the two files of a bundle and a model card, nothing else.

A folder of `nguide fit` also holds predictions that name scans and patients.  They are read for the card's intervals,
and never copied: what is uploaded is written anew from the bundle and checked for ids and paths.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from normal_guidance import __version__
from normal_guidance.base.errors import UserError, reason
from normal_guidance.base.files import folder_atomically, write_atomically
from normal_guidance.base.system import importing
from normal_guidance.core.methods import method_title
from normal_guidance.fit.bundle import BUNDLE, WEIGHTS, Bundle, fill_folder, load_bundle
from normal_guidance.fit.measured import OUT_OF_FOLD
from normal_guidance.scans.index.manifest import FINDINGS
from normal_guidance.show.html import CAUTION
from normal_guidance.show.text_tables import digits, interval
from normal_guidance.statistics.calibration import wilson
from normal_guidance.statistics.differences import ScanAuroc, scan_auroc
from normal_guidance.sweep.predictions import read_predictions
from normal_guidance.sweep.run import PREDICTION_TABLE

CARD = "README.md"
HOME = "https://github.com/normal-guidance/normal-guidance"
HEAD = """---
library_name: normal-guidance
pipeline_tag: image-classification
tags:
  - medical-imaging
  - multiple-instance-learning
  - localization
---
"""

Aurocs = Mapping[str, ScanAuroc]  # by part, where the predictions that they come from were at hand


def model_card(bundle: Bundle, repository: str, aurocs: Mapping[str, Aurocs] | None = None) -> str:
    """The card as Markdown; `aurocs` are by the name of the finding ("" where it has none), then by part."""
    sought = ", ".join(str(model.finding) for model in bundle.each if model.finding)
    identity, scans = bundle.identity, bundle.training.get("scans", {})
    counts = ", ".join(f"{count} ({part})" for part, count in scans.items()) or "not recorded"
    encoder = "that are not made by `nguide encode`"
    if bundle.encoder is not None:
        encoder = f"of the encoder `{bundle.encoder.name}` (fingerprint `{bundle.encoder.fingerprint[:16]}`)"
    training = [
        f"Scans: {counts}{f', from {identity.dataset}' if identity.dataset else ''}.",
        f"Kind of scans: {bundle.expects}.",
        f"Features: {bundle.features} a slice {encoder}.",
        f"Trained with normal-guidance {identity.version or 'of an unknown version'}"
        f"{f' on {identity.date[:10]}' if identity.date else ''}; model fingerprint `{identity.short}`.",
        "Labels of scans trained it. It holds no images, names, ids or predictions of its training scans.",
    ]
    cautions = [text for model in bundle.each for text in model.cautions]
    notes = [f"{note[:1].upper()}{note[1:]}." for model in bundle.each for note in model.operation.notes]
    limits = [
        "It may not have been tested on scans of other hospitals: test it on your own before use.",
        "Scans of another kind than those above are refused by `nguide predict`; other programs do not check.",
        *dict.fromkeys((*cautions, *notes)),
    ]
    sections = [
        f"# {repository.partition('/')[2]}",
        f"**{CAUTION}**",
        f"A {method_title(bundle.method)} of [Normal Guidance]({HOME}): from the slices of a scan to the probability "
        f"of a positive scan and the slices that matter.{sought and f' It looks for: {sought}.'}",
        "## What it was trained on",
        "\n".join(f"- {line}" for line in training),
        "## Measured",
        *(_measured(model, (aurocs or {}).get(_name(model), {})) for model in bundle.each),
        "## Limits",
        "\n".join(f"- {line}" for line in limits),
        "## Use",
        f"```bash\npip install 'normal-guidance[all]'  # version {__version__} or later\n"
        f"nguide hub pull {repository} -o model\n"
        f"nguide predict {'SCAN' if bundle.encoder else 'FEATURES'} --model model -o out\n```\n\n"
        "`model.safetensors` holds numbers and `bundle.json` text: there is no code and no pickle in this repository.",
    ]
    return HEAD + "\n" + "\n\n".join(sections) + "\n"


def _name(bundle: Bundle) -> str:
    return "" if bundle.finding is None else bundle.finding.name


def _measured(bundle: Bundle, aurocs: Aurocs) -> str:
    """A table of what the bundle knows; a number without an interval says so."""
    tested, unsure = bundle.training.get("test") or {}, "(interval not recorded)"
    known = {
        "out-of-fold": bundle.training.get("out_of_fold_auroc"),
        "validation": bundle.training.get("validation_auroc"),
        "test": tested.get("scan_auroc"),
    }
    recorded = {part: f"{digits(value)} {unsure}" for part, value in known.items() if value is not None}
    rows = [(f"scan AUROC, {part}", str(auroc)) for part, auroc in {**recorded, **aurocs}.items()]
    localized = tested.get("localization_auroc")
    if localized is not None and math.isfinite(localized):
        rows.append(("localization AUROC, test (chance: .5)", f"{digits(localized)} {unsure}"))
    point = bundle.operation.point
    if point is not None:
        for part, counts in ((bundle.operation.scans, point.validation), ("test", point.test)):
            if counts is None:
                continue
            shares = (("sensitivity", counts.found, counts.positive), ("specificity", counts.spared, counts.negative))
            for name, right, of in shares:
                if of:  # with the interval of Wilson, 1927
                    share = f"{digits(right / of)} {interval(*wilson(right, of))} ({right} of {of})"
                    rows.append((f"{name} at {point.threshold:.3f}, {part}", share))
    title = [] if bundle.finding is None else [f"### {bundle.finding.name}", ""]
    table = ["| | value [95 % interval] |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    note = "Numbers of the scans that chose the threshold flatter; those of test scans do not."
    return "\n".join([*title, *(table if rows else ["Nothing was measured."]), "", note])


PULLED = (CARD, FINDINGS, BUNDLE, WEIGHTS, f"*/{BUNDLE}", f"*/{WEIGHTS}")  # the files that are taken from a repository
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
PATH = re.compile(r"^(/|~|\.{1,2}/|\\|[A-Za-z]:[\\/])")  # the beginning of a text that is a path on some machine
LEAST_ID = 3  # shorter ids are not looked for: numbers such as 12 stand for something else


def push_to_hub(
    model: str | Path, repository: str, *, private: bool = False, dry_run: str | Path | None = None
) -> list[str]:
    """Upload a model with its card, and return the names of the files.

    Args:
        model: the folder of `nguide fit`, of a bundle, or of a run.
        repository: OWNER/NAME; created if it does not exist.
        private: whether a new repository is private.
        dry_run: a new folder that gets the files instead; nothing is uploaded.

    Example:
        >>> push_to_hub("model", "just-a-name")
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: repository 'just-a-name' is not OWNER/NAME, such as mylab/head-ct
    """
    if not isinstance(model, str | Path):
        raise UserError(
            f"model: got {type(model).__name__}; give the folder of a model, which fit or nguide fit writes"
        )
    _check_name(repository)
    if dry_run is not None:
        if not isinstance(dry_run, str | Path):
            raise UserError(f"dry_run: got {dry_run!r}; give the name of a new folder for the files, such as 'card'")
        with folder_atomically(dry_run) as draft:
            return _fill(Path(model), repository, draft)
    hub = _hub()
    with tempfile.TemporaryDirectory() as draft:
        files = _fill(Path(model), repository, Path(draft))
        login = "check the connection, and log in with a token that may write: hf auth login"
        with _refused(hub, f"{repository} could not be written", login):
            api = hub.HfApi(library_name="normal-guidance")
            api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository, folder_path=draft, allow_patterns=files, commit_message="Upload the model"
            )
    return files


def pull_from_hub(repository: str, out: str | Path, revision: str | None = None) -> Bundle:
    """Download a model into a new folder, check it and load it; files that are not part of a bundle are not taken."""
    _check_name(repository)
    hub = _hub()
    with folder_atomically(out) as draft:
        login = "check its name and the connection, and log in if it is private: hf auth login"
        with _refused(hub, f"{repository} could not be read", login):
            hub.snapshot_download(repository, revision=revision, local_dir=draft, allow_patterns=list(PULLED))
        shutil.rmtree(draft / ".cache", ignore_errors=True)  # the Hub's own notes
        try:
            return load_bundle(draft)
        except UserError as error:
            raise UserError(f"{repository} is not a model of nguide: {error}") from error


def _check_name(repository: str) -> None:
    if not isinstance(repository, str):
        raise UserError(f"repository: got {type(repository).__name__}; give OWNER/NAME, such as 'mylab/head-ct'")
    if re.match(r"\w+://", repository):
        name = "/".join(repository.split("/")[3:5])
        raise UserError(f"repository {repository!r} is an address; give OWNER/NAME alone: {name!r}")
    if not REPOSITORY.fullmatch(repository):
        raise UserError(f"repository {repository!r} is not OWNER/NAME, such as mylab/head-ct")
    with suppress(ImportError):  # a dry run needs no Hub
        names = import_module("huggingface_hub.utils")
        try:
            names.validate_repo_id(repository)
        except names.HFValidationError as error:
            raise UserError(
                f"repository {repository!r} is not a name that the Hub takes ({reason(error)}); choose another"
            ) from error


@contextmanager
def _refused(hub: Any, failed: str, next_step: str) -> Iterator[None]:
    """The Hub's errors say what failed and what to do; those of its HTTP library, which differs by version, too."""
    errors = hub.errors
    known = (OSError, *errors.HfHubHTTPError.__bases__, errors.LocalTokenNotFoundError, errors.HFValidationError)
    try:
        yield
    except known as error:
        raise UserError(f"{failed} ({reason(error)}); {next_step}") from error


def _hub() -> Any:
    with importing("hub", "the Hub needs the package huggingface_hub"):
        import huggingface_hub
        import huggingface_hub.errors
    return huggingface_hub


def _fill(folder: Path, repository: str, draft: Path) -> list[str]:
    """Write the bundle and its card, check them, and name the files."""
    bundle = load_bundle(folder)
    shared = replace(without_paths(bundle), further=tuple(map(without_paths, bundle.further)))
    fill_folder(shared, draft)
    card = model_card(shared, repository, aurocs_of(folder, bundle))
    write_atomically(draft / CARD, card.encode())
    # The words that people chose: the names of the data, the encoder and the findings.
    names = (shared.identity.dataset, shared.encoder and shared.encoder.name, *(each.finding for each in shared.each))
    tables = [read_predictions(path, ("scan_id", "patient_id")) for _, path in _tables(folder, bundle)]
    ids = {name for table in tables for column in table.columns for name in column.to_pylist()}
    private = {name for name in ids if name and len(name) >= LEAST_ID}
    refuse_private(draft, private, {word for name in names if name for word in _words(str(name))})
    return sorted(path.relative_to(draft).as_posix() for path in draft.rglob("*") if path.is_file())


def without_paths(bundle: Bundle) -> Bundle:
    """The bundle with the last part of the encoder's name alone, where it is a folder of this machine."""
    if bundle.encoder is None:
        return bundle
    name = bundle.encoder.name
    if not (PATH.match(name) or Path(name.partition("+")[0]).exists() or name.count("/") > 1):
        return bundle
    return replace(bundle, encoder=replace(bundle.encoder, name=re.split(r"[\\/]", name.rstrip("\\/"))[-1]))


def _words(text: str) -> set[str]:
    """The words of a text, also without the marks at their ends."""
    words = re.findall(r"[\w.\-]+", text)
    return {*words, *(word.strip(".-") for word in words)}


def refuse_private(folder: Path, ids: set[str], names: set[str]) -> None:
    """Refuse files that hold a path, or the id of a scan or patient that the model was measured on."""
    # An id such as 100 is looked for among the names that people chose alone: elsewhere the card's numbers are its own.
    for path in sorted(folder.rglob("*.json")):
        for member, text in _texts(json.loads(path.read_text())):
            if PATH.match(text) or text in ids:
                raise UserError(f"{path.name} holds {text!r} ({member}), which looks private; nothing was uploaded")
    card = folder / CARD
    words = _words(card.read_text()) if card.is_file() else set()
    private = sorted(word for word in words & ids if word in names or not word.isdecimal())
    if private:
        raise UserError(
            f"{CARD} holds {private[0]!r}, the id of a scan or patient; nothing was uploaded. If the word means "
            "something else in the card, push a copy without predictions, which nguide bundle makes"
        )


def _texts(value: Any, member: str = "") -> Iterator[tuple[str, str]]:
    """The member and the text of every text in a JSON value."""
    if isinstance(value, str):
        yield member, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(str(name), member)
            yield from _texts(inner, f"{member}.{name}" if member else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, member)


def _tables(folder: Path, bundle: Bundle) -> Iterator[tuple[Bundle, Path]]:
    """The predictions beside the bundles of a folder, where there are any."""
    for model in bundle.each:
        path = (folder / _name(model) if bundle.further else folder) / PREDICTION_TABLE
        if path.is_file():
            yield model, path


def aurocs_of(folder: Path, bundle: Bundle) -> dict[str, Aurocs]:
    """Scan AUROCs with intervals, from a folder's predictions; empty for a bundle alone."""
    aurocs: dict[str, Aurocs] = {}
    for model, path in _tables(folder, bundle):
        by_part = {}
        for part in (OUT_OF_FOLD, "val", "test"):
            rows = read_predictions(path, ("patient_id", "label", "logit"), part=part)
            labels = torch.tensor(rows["label"].to_numpy()).long()
            if len(labels.unique()) == 2:
                logits = torch.tensor(rows["logit"].to_numpy()).double()
                auroc = scan_auroc(labels, rows["patient_id"].to_pylist(), logits)
                by_part["validation" if part == "val" else part] = auroc
        aurocs[_name(model)] = by_part
    return aurocs
