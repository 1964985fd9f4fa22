"""The stage as a whole: what lies in the store is what a plain loop over the scans gives, whatever goes wrong."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_scans import PREPROCESSING, SIZE, WIDTH, contents, load, make_manifest, make_parts, read

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.workers import Pool
from normal_guidance.core.bags import UNKNOWN
from normal_guidance.scans.features import encoding, encoding_machine
from normal_guidance.scans.features.encoding import EncodingOptions, fingerprint_manifest
from normal_guidance.scans.features.encoding_job import job_folder, open_job
from normal_guidance.scans.features.preprocessing import Statistics
from normal_guidance.scans.features.store import LACKING, open_store
from normal_guidance.scans.index.manifest import Finding, Labels, Manifest, read_manifest, write_manifest
from normal_guidance.scans.index.problems import read_problems

LENGTHS = [5, 3, 8, 1, 6, 4, 9, 2, 7, 3]
OPTIONS = EncodingOptions(batch_size=4, unit=10, threads=1)
STATISTICS = Statistics((20.0,), (80.0,))
SLOW = pytest.mark.slow


def run(manifest, out, *, work=encoding.encode, **changes):
    usual = {"load": load, "preprocessing": PREPROCESSING, "read": read, "statistics": STATISTICS, "options": OPTIONS}
    on_the_way = {name: changes.pop(name) for name in ("ray", "watch") if name in changes}
    return work(encoding.EncodingTask(manifest, **{**usual, **changes}), out, **on_the_way)


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> Manifest:
    return make_manifest(tmp_path_factory.mktemp("scans"), LENGTHS)


WORDS = {1: "unreadable", 4: "short", 5: "strange", 8: "nan"}
SAYS = {
    "s001": ("unreadable", "s001: no image"),
    "s004": ("failed", "5 slices were read, but the manifest has 6"),
    "s005": ("failed", "RuntimeError: line one line two of strange"),
    "s008": ("failed", "pixels that are not finite"),
}


@pytest.fixture(scope="module")
def odd_scans(tmp_path_factory) -> Manifest:
    return make_manifest(tmp_path_factory.mktemp("odd"), LENGTHS, WORDS)


@pytest.fixture(scope="module")
def whole(scans, tmp_path_factory):
    return run(scans, tmp_path_factory.mktemp("whole") / "store")


@pytest.fixture(scope="module")
def begun_once(scans, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    with pytest.raises(StopError):
        run(scans, folder / "store", watch=stop_at("encoding", 20))
    return folder


@pytest.fixture
def begun(begun_once, tmp_path) -> Path:
    shutil.copytree(begun_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


class StopError(Exception):
    pass


def stop_at(stage, slices):
    def watch(now):
        if now.stage == stage and now.slices >= slices:
            raise StopError

    return watch


def small(manifest, row, inner=..., margins=(0, 0, 1, 1)):
    """By hand, before normalising: rows and columns of a field or all, windowed, padded to a square, resized."""
    clipped = torch.from_numpy(np.clip(read(row, manifest.root)[0][inner], -100, 300))[:, None]
    square = torch.nn.functional.pad(clipped, margins, value=float(clipped.min()))
    return torch.nn.functional.interpolate(square, (SIZE, SIZE), mode="bilinear", antialias=True)


def expected(manifest, row, statistics=STATISTICS):
    return load().module((small(manifest, row) - statistics.mean[0]) / statistics.sd[0])


def measured(images):
    """The mean of the scans' means and that of their sds."""
    images = [image.double() for image in images]
    return (float(np.mean(values)) for values in zip(*((i.mean(), i.std(correction=0)) for i in images), strict=True))


def test_the_store_holds_every_scan(scans, tmp_path):
    parts = make_parts(scans)
    outcome = run(scans, tmp_path / "store", parts=parts)
    store = open_store(tmp_path / "store")
    assert (store.width, store.scan_ids, store.patient_ids) == (WIDTH, tuple(scans.scan_ids), tuple(scans.patient_ids))
    assert store.scans["part"].tolist() == [parts[scan] for scan in scans.scan_ids]
    labels = []
    for number, row in enumerate(scans):
        torch.testing.assert_close(store.rows(torch.tensor([number])), expected(scans, row))
        labels += [UNKNOWN] * len(row) if row.slice_labels is None else row.slice_labels.tolist()
        assert store.scans["label"][number] == row.label
    assert store.slice_labels.tolist() == labels
    assert (outcome.failed, outcome.slices, outcome.complete_before) == ({}, sum(LENGTHS), False)
    assert not job_folder(tmp_path / "store").exists()
    report = json.loads((tmp_path / "store" / "report.json").read_text())
    assert report["scans"] == {"manifest": 10, "encoded": 10, "failed": 0}
    assert report["slices"] == {"manifest": sum(LENGTHS), "encoded": sum(LENGTHS)}
    assert report["recipe"] == store.recipe
    assert report["identity"]["encoder"] == {"name": "tiny", "fingerprint": "tiny-1.0"}


def test_findings_travel_from_the_manifest_to_the_store(scans, tmp_path):
    findings = [Finding("any", "1386000"), Finding("epidural")]
    labels = [Labels(row.label if number else None, row.slice_labels) for number, row in enumerate(scans)]
    rows = [replace(row, further={"epidural": given}) for row, given in zip(scans, labels, strict=True)]
    about = {**scans.about, "findings": [finding.as_json() for finding in findings]}
    manifest = write_manifest(tmp_path / "manifest.parquet", rows, about)
    assert fingerprint_manifest(manifest) != fingerprint_manifest(scans)
    for given in (manifest, read_manifest(tmp_path / "manifest.parquet")):
        store = run(given, tmp_path / "store").store
        assert store.findings == tuple(findings)
        epidural = store.of_finding("epidural")
        assert epidural.scan_ids == tuple(scans.scan_ids[1:])
        assert epidural.labels.tolist() == scans.labels[1:].tolist()
        assert epidural.slice_labels.tolist() == store.slice_labels.tolist()[LENGTHS[0] :]
    wrong = replace(rows[1], further={"epidural": Labels(1, np.zeros(99, np.int8))})
    manifest = write_manifest(tmp_path / "wrong.parquet", [rows[0], wrong], about)
    with pytest.raises(UserError, match="scan 's001': 99 slice labels for 3 slices; run nguide index again"):
        run(manifest, tmp_path / "other")


def test_an_encoder_that_normalises_gets_its_range(scans, tmp_path):
    store = run(scans, tmp_path / "store", load=partial(load, unit_range=True), statistics=None).store
    about = store.provenance
    assert (about["preprocessing"]["mean"], about["identity"]["normalized_by"]) == ([-100.0], "the encoder's range")
    assert store.scans["part"][0] is None
    features = expected(scans, scans[2], Statistics((-100.0,), (400.0,)))
    torch.testing.assert_close(store.select(["s002"]).bags().features, features)


def test_without_training_scans_some_are_measured_the_same_ones_in_any_order(scans, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "MEASURED", 3)
    some = encoding.to_measure(scans, None)
    assert len(some) == 3
    assert sorted(some.scan_ids) == sorted(
        encoding.to_measure(scans.take(range(len(scans) - 1, -1, -1)), None).scan_ids
    )
    about = run(scans, tmp_path / "store", statistics=None).store.provenance
    alone = run(some, tmp_path / "alone", statistics=None).store.provenance
    assert about["preprocessing"] == alone["preprocessing"]
    assert about["identity"]["normalized_by"] == "some scans"


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            {"windows": ((2000.0, 3000.0),)},
            r"first \d scans are nearly the same .* -\d.*, the window is 2000:3000: give another",
        ),
        ({"windows": (None,)}, r"--normalize 20,1e\+06 does not fit the window none, which leaves values from -\d"),
    ],
)
def test_features_that_are_alike_are_refused_at_once_and_the_next_start_may_differ(scans, tmp_path, way, message):
    statistics = Statistics((20.0,), (1e6,)) if way["windows"] == (None,) else None
    parts = make_parts(scans)
    with pytest.raises(UserError, match=message):
        run(scans, tmp_path / "store", preprocessing=replace(PREPROCESSING, **way), statistics=statistics, parts=parts)
    assert list(tmp_path.iterdir()) == []
    assert len(run(scans, tmp_path / "store", parts=parts, statistics=None).store) == len(scans)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=SLOW)])
def test_a_field_is_all_that_the_encoder_sees(scans, whole, tmp_path, workers):
    """Rows 1 mm apart, columns 2 mm: 6 x 3 pixels of 10 x 12; two scans say nothing of their spacing."""
    rows = [replace(row, pixel_spacing=None if n in (1, 6) else (1.0, 2.0)) for n, row in enumerate(scans)]
    manifest = write_manifest(tmp_path / "manifest.parquet", rows, scans.about)
    parts = make_parts(scans)
    field = replace(PREPROCESSING, field=6)
    outcome = run(manifest, tmp_path / "store", preprocessing=field, workers=workers, parts=parts, statistics=None)
    good = {row.scan_id: row for row in manifest if row.pixel_spacing is not None}
    by_hand = {scan: small(scans, row, np.s_[:, 2:8, 4:7], (1, 2)) for scan, row in good.items()}
    mean, sd = measured(images for scan, images in by_hand.items() if parts[scan] == "train")
    used = outcome.store.provenance["preprocessing"]
    assert (used["field"], used["mean"], used["sd"]) == (6.0, [pytest.approx(mean)], [pytest.approx(sd)])
    expected = torch.cat([load().module((images - mean) / sd) for images in by_hand.values()])
    torch.testing.assert_close(outcome.store.bags().features, expected)
    assert outcome.failed == {"no_spacing": 2}
    lines = [line for line in read_problems(tmp_path / "store" / "problems.csv") if line.kind == "no_spacing"]
    assert {line.scan_id: line.action for line in lines} == dict.fromkeys(("s001", "s006"), "left out of the store")
    assert {line.detail for line in lines} == {"a field of 6 mm needs the pixel spacing, which is unknown"}
    assert outcome.store.recipe != whole.store.recipe
    assert "field" not in whole.store.provenance["preprocessing"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA: encoding on a card is not tested")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_card_gives_the_cpus_features(odd_scans, tmp_path, workers):
    parts = make_parts(odd_scans)
    expected = run(odd_scans, tmp_path / "cpu", parts=parts, statistics=None).store
    card = replace(OPTIONS, device="cuda")
    job = {"parts": parts, "statistics": None, "options": card, "workers": workers}
    stores = [run(odd_scans, tmp_path / name, **job).store for name in ("one", "two")]
    assert stores[0].scan_ids == expected.scan_ids
    torch.testing.assert_close(stores[0].bags().features, expected.bags().features, rtol=1e-3, atol=1e-3)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=SLOW)])
def test_scans_that_fail_are_recorded_and_left_out(whole, odd_scans, tmp_path, workers):
    outcome = run(odd_scans, tmp_path / "odd", workers=workers)
    good = [scan for scan in odd_scans.scan_ids if scan not in SAYS]
    assert outcome.store.scan_ids == tuple(good)
    lines = [line for line in read_problems(tmp_path / "odd" / "problems.csv") if line.scan_id in SAYS]
    assert {line.scan_id: (line.kind, line.detail) for line in lines} == SAYS
    assert {line.action for line in lines} == {"left out of the store"}
    assert outcome.failed == {"failed": 3, "unreadable": 1}
    behind = outcome.store.provenance["inputs"]  # the scans that are in the store, and not s008 of 7 slices
    assert (behind["scans"], behind["slices"]) == (6, {"fewest": 1, "median": 4, "most": 9})
    assert (behind["slice_spacing"], behind["planes"]) == (None, {})
    report = json.loads((tmp_path / "odd" / "report.json").read_text())
    assert report["failed"] == {"failed": 3, "unreadable": 1}
    # Their absence does not move a bit of the others.
    assert torch.equal(outcome.store.bags().features, whole.store.select(good).bags().features)


def test_what_was_odd_is_recorded(scans, whole, tmp_path):
    odd = [row.scan_id for row in scans if read(row, scans.root)[1]]
    assert odd, "the test is about some"
    assert [line.scan_id for line in read_problems(whole.store.folder / "problems.csv")] == odd
    assert whole.problems == {"intercept": len(odd)}
    unrepaired = run(scans, tmp_path / "other", options=replace(OPTIONS, repair=False))
    assert unrepaired.problems == {}
    assert unrepaired.store.recipe != whole.store.recipe


@pytest.mark.slow
def test_a_crash_and_a_hang_cost_their_scans_only(tmp_path):
    manifest = make_manifest(tmp_path / "scans", [4, 3, 5, 2, 4, 6], {1: "crash", 3: "hang"})
    outcome = run(manifest, tmp_path / "store", workers=2, timeout=5.0)
    assert outcome.store.scan_ids == ("s000", "s002", "s004", "s005")
    lines = {line.scan_id: line.detail for line in read_problems(tmp_path / "store" / "problems.csv")}
    assert lines["s001"] == "the process that read it was killed by SIGSEGV (2 attempts)"
    assert lines["s003"] == "the process that read it gave no answer within 5 s (2 attempts)"


def test_if_all_scans_fail_there_is_no_store(tmp_path):
    manifest = make_manifest(tmp_path / "scans", [2, 3], {0: "unreadable", 1: "strange"})
    with pytest.raises(UserError, match=r"none of the 2 scans could be encoded; read .*store.job/problems.csv, corr"):
        run(manifest, tmp_path / "store")
    assert len(read_problems(tmp_path / "store.job" / "problems.csv")) == 2
    with pytest.raises(UserError, match=r"none of 2 scans to measure could be read.*, and encode again"):
        run(manifest, tmp_path / "other", parts=TRAIN, statistics=None)


def test_features_that_are_no_numbers_fail_their_scan(scans, whole, tmp_path):
    class Poisoned(torch.nn.Module):
        def forward(self, images):
            features = load().module(images)
            return torch.where(features[:, :1] > 12, torch.nan, features)

    def poisoned(device="cpu", precision="float32"):
        return replace(load(), module=Poisoned())

    bad = [bag.scan_id for bag in whole.store.bags() if (bag.features[:, 0] > 12).any()]
    assert 0 < len(bad) < len(scans), "the test is about some"
    outcome = run(scans, tmp_path / "store", load=poisoned)
    assert set(scans.scan_ids) - set(outcome.store.scan_ids) == set(bad)


def test_a_feature_too_large_for_float16_names_its_scan_and_costs_nothing(scans, tmp_path):
    large = partial(load, scale=3e4)
    with pytest.raises(UserError, match=r"scan 's00\d' has a feature of size .* too large for float16; .* float32, w"):
        run(scans, tmp_path / "store", load=large, dtype=torch.float16)
    run(scans, tmp_path / "store", load=large)
    run(scans, tmp_path / "whole", load=large)
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("stage", "slices", "workers"),
    [("statistics", 8, 0), ("encoding", 20, 0), ("encoding", 48, 0), pytest.param("encoding", 20, 1, marks=SLOW)],
)
def test_a_job_goes_on_where_it_was(odd_scans, tmp_path, stage, slices, workers):
    job = {"parts": make_parts(odd_scans), "statistics": None}
    run(odd_scans, tmp_path / "whole", **job)
    with pytest.raises(StopError):
        run(odd_scans, tmp_path / "store", watch=stop_at(stage, slices), workers=workers, **job)
    assert not (tmp_path / "store").exists()
    seen = []
    outcome = run(odd_scans, tmp_path / "store", watch=seen.append, workers=workers, **job)
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    measured = [now for now in seen if now.stage == "statistics"]
    encoded = [now for now in seen if now.stage == "encoding"]
    assert measured[0].slices == measured[0].begun_with > 0
    if stage == "encoding":
        assert measured[0].slices == measured[0].of, "nothing is measured twice"
        assert 0 < encoded[0].begun_with <= slices
        assert outcome.slices == sum(LENGTHS) - encoded[0].begun_with
    assert encoded[-1].slices == encoded[-1].of == sum(LENGTHS)
    assert [now.slices for now in encoded] == sorted(now.slices for now in encoded)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["store", "whole"]


def test_a_complete_store_is_only_shown(scans, whole, tmp_path):
    def never(row, root, *, repair):
        raise AssertionError("nothing is to be read")

    shutil.copytree(whole.store.folder, tmp_path / "store")
    job_folder(tmp_path / "store").mkdir()  # as a process leaves it that is killed in its last act
    outcome = run(scans, tmp_path / "store", read=never)
    assert (outcome.complete_before, outcome.slices, outcome.failed) == (True, 0, {})
    assert contents(tmp_path / "store") == contents(whole.store.folder)
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


CHANGES = {
    "encoder.fingerprint": {"load": partial(load, scale=2.0)},
    "preprocessing.windows.0.0": {"preprocessing": replace(PREPROCESSING, windows=(None,))},
    "preprocessing.field": {"preprocessing": replace(PREPROCESSING, field=5)},
    "preprocessing.mean.0": {"statistics": Statistics((21.0,), (80.0,))},
    "execution.batch_size": {"options": replace(OPTIONS, batch_size=5)},
    "execution.repair": {"options": replace(OPTIONS, repair=False)},
    "execution.unit": {"options": replace(OPTIONS, unit=11)},
    "execution.threads": {"options": replace(OPTIONS, threads=2)},
}


@pytest.mark.parametrize("name", [*CHANGES, "manifest", "split"])
def test_another_job_is_refused_and_nothing_is_touched(scans, whole, begun, name):
    """A job in its midst; sometimes the store is there, too."""
    if len(name) % 2:
        shutil.copytree(whole.store.folder, begun / "store")
    before = contents(begun)
    others = {"manifest": scans.take(range(9)), "split": scans}
    change = CHANGES.get(name) or ({"parts": make_parts(scans)} if name == "split" else {})
    message = rf"was begun with other data or options: {name} was .*now it is .*; give anoth"
    with pytest.raises(UserError, match=message):
        run(others.get(name, scans), begun / "store", **change)
    lock = "store.job/lock"
    assert {**contents(begun), lock: b""} == {**before, lock: b""}


def test_what_does_not_change_features_may_change(scans, whole, begun):
    moved, threads = begun / "moved", replace(OPTIONS, threads=None)  # those that it was begun with
    shutil.copytree(scans.root, moved)
    run(scans, begun / "store", root=moved, workers=1, timeout=30.0, options=threads)
    assert contents(begun / "store") == contents(whole.store.folder)


def test_a_job_that_did_nothing_may_become_another(scans, tmp_path):
    with pytest.raises(StopError):
        run(scans, tmp_path / "store", watch=stop_at("encoding", 0), options=replace(OPTIONS, threads=2))
    assert [file.name for file in tmp_path.iterdir()] == ["store.job"]
    run(scans, tmp_path / "store", options=replace(OPTIONS, threads=None, batch_size=5))
    report = json.loads((tmp_path / "store" / "report.json").read_text())
    assert report["identity"]["execution"]["batch_size"] == 5


def test_two_processes_do_not_write_one_store_nor_is_something_else_overwritten(scans, tmp_path):
    message = r"store.job is being written by process \d+ on .*; wait until it ends"
    with open_job(tmp_path / "store", {"any": 1}), pytest.raises(UserError, match=message):
        run(scans, tmp_path / "store")
    shutil.rmtree(tmp_path / "store.job")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(UserError, match=f"{name} exists and is not a store made by nguide encode; choose another"):
            run(scans, tmp_path / name)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]


def test_damage_to_a_unit_is_named(scans, whole, begun):
    unit = begun / "store.job" / "unit-00000.safetensors"
    unit.write_bytes(unit.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"unit-00000.safetensors is damaged.*; delete it and encode again"):
        run(scans, begun / "store")
    unit.unlink()
    run(scans, begun / "store")
    assert contents(begun / "store") == contents(whole.store.folder)


GONE = ("s001", "s002", "s006")
"""Two of one unit and one of another; s001 and s006 are training scans."""


class Shelf:
    """The scans in a folder of their own, from which some are taken away and put back; notes what is read."""

    def __init__(self, scans, tmp_path):
        self.root, self.away, self.seen = tmp_path / "shelf", tmp_path / "away", []
        self.job = {"read": self.read, "root": self.root}
        shutil.copytree(scans.root, self.root)
        self.away.mkdir()

    def move(self, scans, there: bool):
        for scan in scans:
            shutil.move(*(place / scan for place in ((self.away, self.root) if there else (self.root, self.away))))

    def read(self, row, root, *, repair=True):
        self.seen.append(row.scan_id)
        if not (self.root / row.files[0]).exists():
            raise UnreadableError("unreadable", f"{row.files[0]} is not there")
        return read(row, root, repair=repair)


@pytest.fixture
def shelf(scans, tmp_path) -> Shelf:
    return Shelf(scans, tmp_path)


def test_scans_that_are_back_are_taken_up(scans, shelf, tmp_path):
    job = {**shelf.job, "dtype": torch.float16}
    run(scans, tmp_path / "whole", **job)
    shelf.move(GONE, there=False)
    lacking = run(scans, tmp_path / "store", **job)
    report = json.loads((tmp_path / "store" / "report.json").read_text())
    assert report["lacks"] == {scan: f"unreadable: {scan} is not there" for scan in GONE}
    assert (lacking.store.provenance[LACKING], lacking.complete_before) == (len(GONE), False)
    assert run(scans, tmp_path / "store", **job).complete_before, "nothing is back"
    shelf.move(GONE[:2], there=True)
    assert run(scans, tmp_path / "store", **job).store.provenance[LACKING] == 1
    shelf.move(GONE[2:], there=True)
    shelf.seen.clear()
    whole = run(scans, tmp_path / "store", **job)
    assert shelf.seen == [*GONE[2:]], "nothing else is read"
    assert (LACKING in whole.store.provenance, whole.slices) == (False, LENGTHS[6])
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["away", "shelf", "store", "whole"]


@pytest.mark.parametrize("gone", [GONE, ("s002",)])
def test_training_scans_that_are_back_change_the_mean(scans, shelf, tmp_path, gone):
    job = {**shelf.job, "parts": make_parts(scans), "statistics": None}
    run(scans, tmp_path / "whole", **job)
    shelf.move(gone, there=False)
    run(scans, tmp_path / "store", **job)
    shelf.move(gone, there=True)
    shelf.seen.clear()
    run(scans, tmp_path / "store", **job)
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    assert len(set(shelf.seen)) == (len(LENGTHS) if len(gone) > 1 else 1), "s002 is no training scan"


def test_a_killed_job_takes_up_what_came_back_meanwhile(scans, whole, shelf, tmp_path):
    shelf.move(GONE, there=False)
    with pytest.raises(StopError):
        run(scans, tmp_path / "store", watch=stop_at("encoding", 20), **shelf.job)
    shelf.move(GONE, there=True)
    run(scans, tmp_path / "store", **shelf.job)
    assert contents(tmp_path / "store") == contents(whole.store.folder)


@pytest.mark.parametrize("moment", ["unit", "moved away", "moved in"])
def test_taking_up_goes_on_where_it_was(scans, whole, shelf, tmp_path, monkeypatch, moment):
    shelf.move(GONE, there=False)
    run(scans, tmp_path / "store", **shelf.job)
    shelf.move(GONE, there=True)
    replace_folder = Path.replace

    def stopped(path, target):
        mine = path == tmp_path / "store" if moment == "moved away" else Path(target) == tmp_path / "store"
        result = replace_folder(path, target)
        if moment != "unit" and mine:
            monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process deletes nothing
            raise StopError
        return result

    watch = stop_at("taking up", 1) if moment == "unit" else lambda now: None
    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(StopError):
        run(scans, tmp_path / "store", watch=watch, **shelf.job)
    monkeypatch.undo()
    run(scans, tmp_path / "store", **shelf.job)
    assert contents(tmp_path / "store") == contents(whole.store.folder)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["away", "shelf", "store"]


def test_scans_of_another_dtype_are_not_taken_up(odd_scans, tmp_path):
    run(odd_scans, tmp_path / "store", dtype=torch.float16)
    with pytest.raises(UserError, match=r"store lacks 4 scans and holds float16; encode them with --dtype float16"):
        run(odd_scans, tmp_path / "store")


ALL_VAL = {f"s{number:03d}": "val" for number in range(len(LENGTHS))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root": Path("nowhere")}, r"the scans' folder nowhere does not exist; give the folder .* \(--root FOLDER\)"),
        ({"preprocessing": replace(PREPROCESSING, windows=(None, None))}, "tiny takes 1 channels, but .* windows is 2"),
        ({"statistics": Statistics((1100.0,), (820.0,))}, "--normalize 1100,820 does not fit the window -100:300, whi"),
        ({"statistics": None, "parts": ALL_VAL}, "no scan of the split is of part 'train'"),
        ({"parts": {"other": "train"}}, r"scan 'other' is not in the manifest \(1 such scans\); make the split again"),
        ({"parts": {"s000": "train"}}, r"scan 's001' is not in the split \(9 such scans\)"),
        ({"parts": {"s001": "test"}}, "patient 'p0' is in part 'train' and in part 'test'"),
    ],
)
def test_what_does_not_fit_is_refused(scans, tmp_path, changes, message):
    if changes.get("parts") == {"s001": "test"}:  # of whom s000 is in training
        changes = {"parts": make_parts(scans) | changes["parts"]}
    for work in (encoding.encode, encoding.estimate_encoding):
        with pytest.raises(UserError, match=message):
            run(scans, tmp_path / "store", work=work, **changes)
    assert list(tmp_path.iterdir()) == []


def test_workers_start_while_the_encoder_is_loaded(scans, tmp_path, monkeypatch):
    """As many as scans want, and none for a store that is there."""
    pools, started = [], []

    def told_pool(*options):
        pools.append(Pool(*options))
        return pools[-1]

    def told_load(**options):
        started.append(len(pools[-1]._started))
        return load(**options)

    monkeypatch.setattr(encoding_machine, "Pool", told_pool)
    for _ in range(2):
        run(scans.take([0, 1]), tmp_path / "store", workers=1, load=told_load)
    assert started == [1, 0]
    with pytest.raises(TypeError):
        run(scans, tmp_path / "other", workers=1, load=partial(load, no_such_option=1))
    assert not any(pool._started for pool in pools), "all are ended"


def test_labels_that_the_store_would_refuse_are_refused_at_once(scans, tmp_path):
    table = scans.table.set_column(2, "label", [[0] * len(scans)]).cast(scans.table.schema)
    with pytest.raises(UserError, match="scan 's001' is labelled negative but has 1 positive slices"):
        run(Manifest(table, scans.about), tmp_path / "store")
    short = [row.slice_labels if row.scan_id != "s003" else row.slice_labels[:0] for row in scans]
    number = scans.table.column_names.index("slice_labels")
    table = scans.table.set_column(number, "slice_labels", [short]).cast(scans.table.schema)
    with pytest.raises(UserError, match="scan 's003': 0 slice labels for 1 slices; run nguide index again"):
        run(Manifest(table, scans.about), tmp_path / "store")
    with pytest.raises(UserError, match="the manifest has no scan"):
        run(scans.take([]), tmp_path / "store")


# A dry run: counts are those of the job, some scans are really encoded, times add up, and nothing is written


@pytest.fixture
def estimate(monkeypatch):
    monkeypatch.setattr(encoding, "SECONDS", 3600.0)
    return partial(run, work=encoding.estimate_encoding)


def load_counted(sizes, **options):
    encoder = load(**options)
    encoder.module.register_forward_hook(lambda module, inputs, features: sizes.append(len(features)))
    return encoder


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=SLOW)])
def test_counts_are_those_of_the_job(scans, tmp_path, estimate, workers):
    estimated = estimate(scans, tmp_path / "store", workers=workers, dtype=torch.float16)
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    sizes = []
    store = run(scans, tmp_path / "store", load=partial(load_counted, sizes), dtype=torch.float16).store
    assert (estimated.scans, estimated.slices, estimated.batches) == (len(LENGTHS), sum(LENGTHS), len(sizes))
    assert estimated.store_bytes == store.bags().features.half().nbytes == sum(LENGTHS) * WIDTH * 2
    assert estimated.job_bytes == sum(LENGTHS) * WIDTH * 4
    assert (estimated.measured_scans, estimated.measured_slices) == (len(LENGTHS), sum(LENGTHS)), "so few are encoded"
    assert (estimated.failed, estimated.statistics_s, estimated.batch_size, estimated.device) == ({}, 0.0, 4, "cpu")
    assert min(estimated.device_bytes, estimated.free_bytes) > 2**20
    assert estimated.total_s == pytest.approx(estimated.first_batch_s + sum(LENGTHS) / estimated.slices_per_s)


def test_some_scans_of_many_are_encoded_and_fewer_by_a_slow_machine(tmp_path, estimate, monkeypatch):
    manifest, sizes = make_manifest(tmp_path / "data", [8] * 50), []
    estimated = estimate(manifest, tmp_path / "store", load=partial(load_counted, sizes))
    assert (estimated.slices, estimated.measured_scans) == (400, 16)
    assert estimated.measured_slices == sum(sizes) == encoding.BATCHES * OPTIONS.batch_size
    places = [int(row.scan_id[1:]) for row in encoding._draw(manifest, 128)]
    assert max(np.diff(sorted(places))) < 15, "they are from everywhere"
    monkeypatch.setattr(encoding, "SECONDS", -1.0)
    estimated = estimate(manifest, tmp_path / "store")
    assert (estimated.measured_scans, estimated.measured_slices) == (2, 16)


TRAIN = {"s000": "train", "s001": "train"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"none of 2 scans could be encoded, for instance 's00\d' \(unreadable: .*check that they lie in .*--root"),
        ({"parts": TRAIN, "statistics": None}, r"none of 2 scans could be read, for instance 's00\d', so there is no"),
    ],
)
def test_what_cannot_be_estimated_is_refused(tmp_path, estimate, changes, message):
    estimated = estimate(make_manifest(tmp_path / "some", [4, 5, 6], {1: "unreadable"}), tmp_path / "store")
    assert (estimated.failed, estimated.measured_scans) == ({"s001": "unreadable: s001: no image"}, 3)
    manifest = make_manifest(tmp_path / "data", [2, 3], {0: "unreadable", 1: "unreadable"})
    with pytest.raises(UserError, match=message):
        estimate(manifest, tmp_path / "store", **changes)
