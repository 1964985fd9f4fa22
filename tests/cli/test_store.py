"""`nguide store`: what is shown, verified and converted, and what a damaged store says."""

import json

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from normal_guidance.cli.commands import Commands
from normal_guidance.cli.features import store_app
from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.convert import EXPORT_FORMATS
from normal_guidance.scans.features.store import FeatureStore, write_store

app = typer.Typer(cls=Commands)
app.add_typer(store_app, name="store")


@pytest.fixture
def store(tmp_path) -> FeatureStore:
    bags = Bags(torch.randn(9, 4), torch.tensor([2, 3, 4]), torch.tensor([0, 1, 1]), scan_ids=("A", "B", "C"))
    return write_store(tmp_path / "store", [("train", bags)], provenance={"encoder": "tiny"}, recipe="8e1f")


def run(*arguments, code=0) -> str:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_show(store):
    said = run("show", store.folder)
    head, recipe, fingerprint, *rest = said.splitlines()
    assert head == repr(store)
    assert recipe == "recipe: 8e1f"
    assert fingerprint == f"fingerprint: {store.fingerprint}"
    assert json.loads("\n".join(rest)) == {"encoder": "tiny"}


def test_verify(store):
    assert "3 scans, 144 bytes of features; all are as they were written" in run("verify", store.folder)
    shard = store.folder / "features-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-40] ^= 1  # within the last scan, 64 bytes
    shard.write_bytes(content)
    said = " ".join(run("verify", store.folder, code=2).split())
    assert "1 of 3 scans are damaged: C; copy the store again, or encode it again" in said


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_export_and_import(store, tmp_path, form):
    assert f"3 scans as {form}" in run("export", store.folder, "--format", form, "-o", tmp_path / "exported")
    assert repr(store) in run("import", tmp_path / "exported", "-f", form, "-o", tmp_path / "again")
    for file in store.folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_mistakes_are_named(store, tmp_path):
    assert "is not a feature store" in run("show", tmp_path, code=2)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "manifest.parquet").touch()
    encode = f"encode its scans: nguide encode {tmp_path / 'index'} --encoder efficientnet-lite0 --window WINDOW -o"
    assert encode in run("show", tmp_path / "index", code=2)
    np.savez(tmp_path / "all.npz", x=np.ones((2, 3)))
    assert f"import it: nguide store import {tmp_path / 'all.npz'} -o STORE" in run(
        "show", tmp_path / "all.npz", code=2
    )
    assert "format 'xls' is unknown" in run("export", store.folder, "-f", "xls", "-o", tmp_path / "x", code=2)
    assert "does not exist" in run("import", tmp_path / "nowhere", "-f", "npz", "-o", tmp_path / "x", code=2)
