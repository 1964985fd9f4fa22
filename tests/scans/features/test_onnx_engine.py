"""ONNX Runtime gives torch's features, for any batch and threads; else torch does, and the store says so."""

import sys
from dataclasses import replace

import onnxruntime
import pytest
import torch
from fake_scans import PREPROCESSING, contents, load, make_manifest, make_parts, read
from test_encoding import OPTIONS, StopError, run, stop_at

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import MARK
from normal_guidance.base.workers import Pool
from normal_guidance.scans.features import encoding_machine, onnx_engine
from normal_guidance.scans.features.encoders import load_encoder
from normal_guidance.scans.features.encoding_job import job_folder
from normal_guidance.scans.features.encoding_machine import Inputs, Machine, Setup
from normal_guidance.scans.features.onnx_engine import CHECKED, IMAGES, TOLERANCE, TORCH, OnnxNetwork, by_onnx
from normal_guidance.scans.features.windows import Decoding

LENGTHS = [5, 3, 8, 1, 6, 4, 9, 2, 7, 3]
EXAMPLE = torch.zeros(1, 1, 9, 9)
ENGINE = f"onnxruntime {onnxruntime.__version__}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NGUIDE_CACHE", str(tmp_path / "cache"))
    onnx_engine._say.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def small_network() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        parts = (torch.nn.Conv2d(1, 6, 3, 2), torch.nn.ReLU6(), torch.nn.Flatten(), torch.nn.Linear(96, 5))
        return torch.nn.Sequential(*parts).eval().requires_grad_(False)


def made(network, name="small", fingerprint="f"):
    return by_onnx(network, name, fingerprint, EXAMPLE)


@pytest.mark.parametrize("channels", [1, 3])
def test_lite0_gives_torchs_features_the_same_bits_for_any_batch_and_threads(threads, channels):
    encoder = load_encoder("efficientnet-lite0", channels=channels, offline=True)
    assert encoder.engine == encoder.module.engine == ENGINE
    images = torch.rand(IMAGES + 2, channels, 224, 224).mul_(6).sub_(2)
    images[0] = -0.7  # a blank slice
    together = encoder.encode(images)
    with torch.inference_mode():
        expected = encoder.module.network(images)
    assert encoder.engine == ENGINE, "the first batch is like torch's"
    assert (together - expected).abs().max() <= TOLERANCE * expected.abs().max()
    for number, size in ((1, 1), (2, 5), (3, IMAGES)):
        threads(number)
        assert torch.equal(torch.cat([encoder.encode(batch) for batch in images.split(size)]), together)


def test_a_network_is_exported_once_and_anew_where_the_file_is_damaged(cache, monkeypatch, capsys):
    network, images = small_network(), torch.randn(7, 1, 9, 9)
    first = made(network)(images)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    assert content.count(MARK.encode()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(onnx_engine, "_exported", lambda *_: pytest.fail("it is in the cache"))
        assert torch.equal(made(network)(images), first)
    unsealed = content.replace(MARK.encode(), b"x" * len(MARK))
    for damaged in (content[:-1], b"", content[:200] + bytes([content[200] ^ 1]) + content[201:], unsealed):
        file.write_bytes(damaged)
        assert torch.equal(made(network)(images), first)
        assert file.read_bytes() == content, "the export is the same, byte for byte"
    made(network, fingerprint="other")
    assert len(list(cache.iterdir())) == 2
    assert capsys.readouterr().err == ""


def test_a_cache_that_cannot_be_written_costs_only_time(cache, capsys):
    cache.write_text("a file")
    assert made(small_network()).engine == ENGINE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_without_the_packages_torch_encodes_and_says_so_once(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    network = small_network()
    assert made(network) is made(network) is network
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: onnxruntime or onnx is not installed (pip install 'normal-guidance[encoders]'); torch encodes "
        "instead, in more than twice the time"
    ]
    assert load_encoder("efficientnet-lite0", offline=True).engine == TORCH


def test_where_a_session_cannot_be_made_torch_encodes(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr(onnxruntime, "InferenceSession", broken)
    network = small_network()
    assert made(network) is network
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ONNX Runtime cannot run small (no such operator); torch encodes")


class Session:
    """Computes by torch, and errs by a share of the largest feature."""

    def __init__(self, network, error):
        self.network, self.error = network, error

    def run(self, _, given):
        features = self.network(torch.from_numpy(given["images"]))
        return [(features + self.error * features.abs().max()).numpy()]


@pytest.mark.parametrize(("error", "engine"), [(0.0, "other 1"), (TOLERANCE / 3, "other 1"), (3 * TOLERANCE, TORCH)])
def test_the_first_images_decide(capsys, error, engine):
    network, images = small_network(), torch.randn(2 * CHECKED, 1, 9, 9)
    encoder = OnnxNetwork(network, Session(network, error), "other 1")
    features = encoder(images)
    assert encoder.engine == engine
    assert torch.equal(features, network(images)) == (engine == TORCH)
    torch.testing.assert_close(features, network(images), rtol=0, atol=float(TOLERANCE * features.abs().max()))
    encoder.session.error = 1.0  # later batches are not compared
    assert torch.equal(encoder(images), network(images)) == (engine == TORCH)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" by ")[0] for line in lines] == ["warning: features"] * (engine == TORCH)


@pytest.mark.parametrize("value", [0.0, torch.nan, 1e38])
def test_what_is_zero_or_not_finite_in_both_does_not_differ(capsys, value):
    network = small_network()
    network[-1].bias.zero_()
    encoder = OnnxNetwork(network[-1], Session(network[-1], 0.0), "other 1")
    encoder(torch.full((1, 96), value))
    assert (encoder.engine, capsys.readouterr().err) == ("other 1", "")


def loading(error=0.0, engine="other 1"):
    """Loads the tiny encoder for a session that errs."""

    def load_it(**options):
        encoder = load(**options)
        return replace(encoder, module=OnnxNetwork(encoder.module, Session(encoder.module, error), engine))

    return load_it


def engine_of(store):
    return store.provenance["identity"]["execution"]["engine"]


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    return make_manifest(tmp_path_factory.mktemp("scans"), LENGTHS)


def test_the_store_names_the_engine_and_is_the_same_for_any_workers_and_threads(scans, tmp_path):
    stores = [run(scans, tmp_path / f"{n}", load=loading(), workers=n).store for n in (0, 1, 2)]
    assert {engine_of(store) for store in stores} == {"other 1"}
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "2")
    three = run(scans, tmp_path / "three", load=loading(), options=replace(OPTIONS, threads=3)).store
    assert torch.equal(three.bags().features, stores[0].bags().features)
    assert engine_of(run(scans, tmp_path / "torch").store) == TORCH


@pytest.mark.parametrize("job", [{}, {"statistics": None}], ids=["given", "measured"])
def test_a_store_whose_first_batch_needed_torch_says_torch(scans, tmp_path, capsys, job):
    job = {**job, "parts": make_parts(scans)}
    store = run(scans, tmp_path / "store", load=loading(3 * TOLERANCE), **job).store
    assert engine_of(store) == TORCH
    run(scans, tmp_path / "torch", **job)
    assert contents(tmp_path / "store") == contents(tmp_path / "torch")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_job_goes_on_with_its_engine_only(scans, tmp_path):
    out = tmp_path / "store"
    with pytest.raises(StopError):
        run(scans, out, load=loading(), watch=stop_at("encoding", 20))
    before = contents(job_folder(out))
    for other in (load, loading(engine="other 2"), loading(3 * TOLERANCE)):  # the last is known from the first batch on
        with pytest.raises(UserError, match=r"execution.engine was 'other 1', now it is '(torch|other 2)'; give anoth"):
            run(scans, out, load=other)
        assert contents(job_folder(out)) == before
    run(scans, out, load=loading())
    run(scans, tmp_path / "whole", load=loading())
    assert contents(out) == contents(tmp_path / "whole")


def test_a_machine_of_a_cluster_with_another_engine_is_refused(scans, monkeypatch):
    setup = Setup(load, "tiny-1.0", TORCH, torch.__version__, OPTIONS, workers=0, timeout=60.0)
    machine = Machine(setup, load(), Pool(0))
    monkeypatch.setattr(encoding_machine, "_machine", lambda *_: machine)
    inputs = Inputs(Decoding(read, scans.root, True), PREPROCESSING)
    unit = (inputs, 0, [next(iter(scans))])
    assert encoding_machine._encode("job", setup, *unit)[0] == 0
    with pytest.raises(UserError, match="of the Ray cluster encodes by torch, not by other 1; install the same"):
        encoding_machine._encode("job", replace(setup, engine="other 1"), *unit)
