"""Indexing: the same bytes with any number of workers, also if workers die or hang, and all or nothing."""

import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from drawn_dicom import write_slice
from test_manifest import ABOUT, row

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index import header_reading
from normal_guidance.scans.index.containers import Refusal
from normal_guidance.scans.index.dicom_slices import Header
from normal_guidance.scans.index.header_reading import CHUNK, HeaderRequest, read_all, read_one
from normal_guidance.scans.index.indexing import (
    BINS,
    PACKAGES,
    describe,
    describe_scans,
    index,
    positive_density,
)
from normal_guidance.scans.index.manifest import parse_findings, read_manifest, write_manifest
from normal_guidance.scans.index.problems import Problem, read_problems
from normal_guidance.study.study_tables import description_tables

SCANS, SLICES = 5, 30


def put(path: Path, series: str, z: float, number: int) -> None:
    write_slice(path, f"{series}.{number}", series, z=z, number=number, PatientID=f"patient of {series}")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Five scans of 30 slices, 2.3 chunks, with a gap, a broken file and a duplicate; labels.csv beside them."""
    root = tmp_path_factory.mktemp("data") / "root"
    for scan in range(SCANS):
        for place in range(SLICES):
            put(root / f"scan{scan}" / f"{place:02d}.dcm", f"1.2.{scan}", 2.0 * place, SLICES - place)
    (root / "scan1/07.dcm").write_bytes(b"\0" * 1000)
    put(root / "scan2/zz.dcm", "1.2.2", 4.0, 99)
    rows = [{"scan_id": f"s{scan}", "path": f"scan{scan}", "label": scan % 2} for scan in range(SCANS)]
    pd.DataFrame(rows).to_csv(root.parent / "labels.csv", index=False)
    return root


def make(root: Path, out: Path, workers: int = 0, **options):
    return index("folder", root, out, table=root.parent / "labels.csv", workers=workers, **options)


def test_the_folder_holds_manifest_problems_and_report(root, tmp_path):
    made = make(root, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"manifest.parquet", "problems.csv", "report.json"}
    manifest = read_manifest(tmp_path / "out")
    assert manifest.scan_ids == [f"s{scan}" for scan in range(SCANS)]
    assert manifest.lengths.tolist() == [30, 29, 30, 30, 30]
    assert manifest.root == root
    assert list(manifest[0].files) == [f"scan0/{place:02d}.dcm" for place in range(SLICES)]
    assert manifest[0].instance_numbers == tuple(range(SLICES, 0, -1))
    assert [manifest[0].slice_name(position) for position in (0, SLICES - 1)] == [
        f"1 (image {SLICES})",
        f"{SLICES} (image 1)",
    ]
    assert {manifest[0].series_uid, manifest[0].study_uid} == {None}  # nothing that leads back to a patient
    problems = read_problems(tmp_path / "out/problems.csv")
    assert sorted(made.problems) == problems
    assert [(problem.scan_id, problem.file, problem.kind) for problem in problems] == [
        ("s1", "scan1/07.dcm", "no_image"),
        ("s1", "scan1/08.dcm", "gap"),
        ("s2", "scan2/zz.dcm", "duplicate"),
    ]
    report = read_json(tmp_path / "out/report.json")
    assert report == made.report
    assert (report["source"], report["root"]) == ("folder", str(root))
    assert report["options"] == {"table": str(root.parent / "labels.csv")}
    assert report["counts"] == {
        "files": 151,
        "scans": 5,
        "slices": 149,
        "positive": 2,
        "with_slice_labels": 0,
        "patients": 5,
        "problems": {"no_image": 1, "gap": 1, "duplicate": 1},
    }
    assert report["versions"].keys() == {"normal_guidance", "python", *PACKAGES}
    assert report["versions"]["normal_guidance"] == __version__
    assert report["seconds"] >= 0


def test_nothing_usable_is_an_error_that_says_why(tmp_path):
    (tmp_path / "root/a").mkdir(parents=True)
    (tmp_path / "root/a/1.dcm").write_text("no image")
    (tmp_path / "labels.csv").write_text("scan_id,path,label\na,a,1\n")
    with pytest.raises(UserError, match=r"root has no usable scan; problems: .*no_image 1.* a"):
        make(tmp_path / "root", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for folder, message in (("x/", "has no usable scan; problems: label_without_image 1"), ("", "no scan of .*is in")):
        (tmp_path / "labels.csv").write_text(f"scan_id,path,label\n{'a' * 10_000},{folder}{'b' * 10_000},1\n")
        with pytest.raises(UserError, match=message) as caught:
            make(tmp_path / "root", tmp_path / "out")
        assert len(str(caught.value)) < 1000
    (tmp_path / "root/stage_2_train").mkdir()
    (tmp_path / "root/stage_2_train.csv").write_text("ID,Label\n")
    with pytest.raises(UserError, match=r"root has no usable scan; no file was found"):
        index("rsna-ich", tmp_path / "root", tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("rsna-ct", {}, "source 'rsna-ct' is unknown; choose one of rsna-ich, rsna-pe, rsna-at, prostatex, folder"),
        (
            "rsna-ich",
            {"findings": parse_findings("any")},
            r"rsna-ich has no option --findings \(given: any\); leave it",
        ),
        ("folder", {"labels": "patient"}, r"folder has no option --labels \(given: patient\)"),
        ("rsna-at", {"labels": "organ"}, "labels 'organ' are unknown; choose one of image, patient"),
        ("folder", {}, "full is a folder that is not empty; choose another name"),
    ],
)
def test_what_cannot_be_indexed_is_refused(tmp_path, source, options, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/note.txt").write_text("mine")
    with pytest.raises(UserError, match=message):
        index(source, tmp_path, tmp_path / message.partition(" ")[0], **options)
    assert [file.name for file in tmp_path.rglob("*")] == ["full", "note.txt"]


HOOK = """
import os, signal, sys, time
if "import serve;" in sys.orig_argv[-1]:
    def watch(event, arguments):
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            name, marker = os.fspath(arguments[0]), {marker!r}
            {action}
    sys.addaudithook(watch)
"""
"""Code that workers run at their start: it acts when they open a certain file, like a broken parser in C."""


@pytest.fixture
def hook(tmp_path, monkeypatch):
    def install(action: str) -> None:
        folder = tmp_path / "hook"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HOOK.format(marker=str(tmp_path / "marker"), action=action))
        monkeypatch.syspath_prepend(folder)  # which workers have from this process

    return install


def counted(out: Path) -> dict[str, int]:
    manifest = read_manifest(out)
    return dict(zip(manifest.scan_ids, manifest.lengths.tolist(), strict=True))


def test_a_file_that_kills_its_worker_costs_itself_only(root, tmp_path, hook):
    hook('if name.endswith(("scan0/11.dcm", "scan2/zz.dcm")): os.kill(os.getpid(), signal.SIGSEGV)')
    make(root, tmp_path / "out", workers=2)
    assert counted(tmp_path / "out") == {"s0": 29, "s1": 29, "s2": 30, "s3": 30, "s4": 30}
    killed = [problem for problem in read_problems(tmp_path / "out/problems.csv") if "SIGSEGV" in problem.detail]
    said = "unreadable", "the process that read it died (SIGSEGV)", "left out"
    assert killed == [Problem("s0", "scan0/11.dcm", *said), Problem("s2", "scan2/zz.dcm", *said)]


def test_the_bytes_do_not_depend_on_workers_nor_on_one_that_is_killed_once(root, tmp_path, hook):
    once = 'name.endswith("11.dcm") and not os.path.exists(marker)'
    hook(f"if {once}: os.mkdir(marker); os.kill(os.getpid(), signal.SIGKILL)")
    for workers in (3, 1, 0):  # the first one of three is killed
        make(root, tmp_path / str(workers), workers)
        assert (tmp_path / "marker").exists()
    for name in ("manifest.parquet", "problems.csv"):
        assert len({(tmp_path / str(workers) / name).read_bytes() for workers in (3, 1, 0)}) == 1


@pytest.mark.slow
def test_a_file_that_hangs_costs_itself_only(root, tmp_path, hook, monkeypatch):
    hook('if name.endswith("zz.dcm"): time.sleep(1000)')
    monkeypatch.setattr(header_reading, "PATIENCE", 10.0)
    begin = time.monotonic()
    make(root, tmp_path / "out", workers=2)
    assert time.monotonic() - begin < 900, "it waited for the hang"
    problems = read_problems(tmp_path / "out/problems.csv")
    detail = "the process that read it did not answer within 10 s"
    assert Problem("s2", "scan2/zz.dcm", "unreadable", detail, "left out") in problems
    assert counted(tmp_path / "out") == {"s0": 30, "s1": 29, "s2": 30, "s3": 30, "s4": 30}


def test_workers_that_cannot_start_are_an_error(root, tmp_path, hook):
    hook("pass\n    os._exit(3)")
    with pytest.raises(UserError, match=r"worker processes cannot start: one died \(exit code 3\); use --workers 0"):
        make(root, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_an_index_that_is_given_up_ends_its_workers(root):
    wanted = (HeaderRequest(f"scan0/{number % SLICES:02d}.dcm") for number in range(10 * CHUNK))
    stream = read_all(root, wanted, workers=2)
    assert isinstance(next(stream), Header)
    processes = [worker.process for worker in stream.gi_frame.f_locals["pool"]._started]
    assert processes
    assert all(process.poll() is None for process in processes)
    stream.close()
    assert all(process.poll() is not None for process in processes)


def test_whatever_a_parser_raises_is_a_refusal_but_a_missing_package_is_no_fault_of_the_file(root, monkeypatch):
    def fail(content, file):
        raise error

    monkeypatch.setattr(header_reading, "read_header", fail)
    for error in (MemoryError("4 TB"), RecursionError("deep"), KeyError("tag")):
        refusal = Refusal("scan0/00.dcm", "unreadable", f"{type(error).__name__}: {error}")
        assert read_one(root, HeaderRequest("scan0/00.dcm")) == refusal
    error = UserError("pip install it")
    with pytest.raises(UserError, match="pip install it"):
        read_one(root, HeaderRequest("scan0/00.dcm"))


def test_a_small_set_described_by_hand(tmp_path: Path) -> None:
    labels = [np.array(values, np.int8) for values in ([0, 1, 1, 0, 0, 0, 0, 1, 0, 0], [0, 0, 1, 1])]
    rows = [row(1, slices=10, slice_labels=labels[0]), row(3, slices=4, slice_labels=labels[1])]
    rows += [row(4, slices=6), row(6, slices=8, slice_labels=None)]
    made = describe(write_manifest(tmp_path / "m.parquet", rows, ABOUT))
    assert (made.scans, made.positive, made.patients, made.slices, made.lengths["mean"]) == (4, 2, 4, 28, 7)
    assert (made.labelled, made.positive_slices) == (3, 5)
    assert made.blocks.bags_by_blocks == {1: 1, 2: 1}
    assert sorted(made.blocks.lengths.tolist()) == [1, 2, 2]
    tables = description_tables("folder", {"all": made})
    titles = ["Blocks in a positive scan", "Slices in a block", "Share of the scan in a block"]
    assert [table.title for table in tables][2:] == titles
    assert tables[2].rows == [["all", "1/2", "1/2"]]
    assert made.to_dict()["bags_by_blocks"] == {"1": 1, "2": 1}


def test_density_counts_the_slices_of_each_twentieth() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 70, 50)
    labels = generator.integers(0, 2, lengths.sum())
    want, start = np.zeros(BINS), 0
    for length in lengths:
        for j in range(1, length + 1):
            if labels[start + j - 1]:
                # The bin k with k/20 < j/S <= (k+1)/20, in whole numbers.
                want[next(k for k in range(BINS) if k * length < BINS * j <= (k + 1) * length)] += 1
        start += length
    got = positive_density(labels, lengths)
    np.testing.assert_allclose(got, want / want.sum() * BINS)
    assert got.mean() == pytest.approx(1)


def test_no_scans_and_no_slice_labels(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no scans"):
        describe(write_manifest(tmp_path / "m.parquet", [], ABOUT))
    bare = describe(write_manifest(tmp_path / "m.parquet", [row(1, slice_labels=None)], ABOUT))
    assert (bare.labelled, bare.blocks, bare.density.sum()) == (0, None, 0)
    assert len(description_tables("folder", {"all": bare})) == 2


def test_scans_with_features_are_described_as_their_manifest_is(phantom: Path) -> None:
    store = open_store(phantom / "store")
    assert describe_scans(store).to_dict() == describe(read_manifest(phantom / "index")).to_dict()
    assert describe_scans(store.bags()).to_dict() == describe_scans(store).to_dict()
