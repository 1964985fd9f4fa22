"""The node beside software of others: DCMTK's tools, Orthanc as sender and archive, and TLS."""

import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from pydicom import dcmread

from normal_guidance.cli.clinic import _tls
from normal_guidance.clinic.node.send_dicom import DicomDestination
from normal_guidance.clinic.predict.dicomweb import DicomWeb
from orthanc import DICOMWEB, MISSING, ORTHANC, free_port, running_orthanc
from small_node import RESULTS, associate, send, small_archive, wait_until

needs_orthanc = pytest.mark.skipif(ORTHANC is None, reason=MISSING)


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(
    shutil.which("storescu") is None,
    reason="DCMTK IS NOT INSTALLED: NO FOREIGN SENDER IS TESTED (apt install dcmtk)",
)
def test_dcmtk_sends_a_compressed_series_that_is_stored_as_it_is_and_receives_results(node, series, tmp_path):
    files, out, port = series(), tmp_path / "out", free_port()
    for file in files:
        assert call("dcmcjpeg", file, file).returncode == 0  # JPEG lossless
    out.mkdir()
    scp = subprocess.Popen(["storescp", "--output-directory", str(out), "-aet", "ARCHIVE", str(port)])
    try:
        with node(to=[f"ARCHIVE@127.0.0.1:{port}"]) as run:
            peer = ("-aet", "SENDER", "-aec", "NGUIDE", "127.0.0.1", run.port)
            assert call("echoscu", *peer).returncode == 0
            assert call("echoscu", "-aet", "NOBODY", *peer[2:]).returncode != 0
            sent = call("storescu", "-xs", *peer, *files)
            assert sent.returncode == 0, sent.stderr
            stored = {dcmread(file).file_meta.TransferSyntaxUID for file in run.node.incoming.path.rglob("*.dcm")}
            assert stored == {"1.2.840.10008.1.2.4.70"}
            assert run.wait_finished() == {"done": 1}
    finally:
        scp.terminate()
        scp.wait()
    assert len([dcmread(file) for file in out.iterdir()]) == RESULTS


@pytest.fixture
def orthanc(tmp_path):
    port = free_port()
    with running_orthanc(tmp_path / "archive", {"NGUIDE": ["127.0.0.1", port]}) as running:
        yield running, port


@needs_orthanc
def test_orthanc_sends_a_series_and_gets_its_results_in_the_same_study(node, series, orthanc):
    running, port = orthanc
    with node(senders=["ARCHIVE@127.0.0.1"], to=[running.to], port=port) as run:
        assert set(send(running.dicom_port, series(), called="ARCHIVE")) == {0}
        (study,) = running.get("/studies")
        running.post("/modalities/NGUIDE/store", [study])
        assert wait_until(lambda: run.node.queue.by_state()["done"]) == 1
    assert len(running.get("/studies")) == 1
    assert modalities_of(running) == ["CT", "KO", "OT", "SR"]


def modalities_of(running) -> list[str]:
    return sorted(stored["MainDicomTags"]["Modality"] for stored in running.series())


@needs_orthanc
def test_orthanc_confirms_what_it_has_stored_and_gets_again_what_it_lost(node, series, state, orthanc, monkeypatch):
    """Storage commitment: the report comes in a new association, which Orthanc opens to the node."""
    (running, port), real, deleted = orthanc, DicomDestination.ask_commitment, []

    def lose_first(self, files, transaction, reports):
        if not deleted:
            deleted.append(running.get("/instances")[0])
            address = f"http://127.0.0.1:{running.http_port}/instances/{deleted[0]}"
            urllib.request.urlopen(urllib.request.Request(address, method="DELETE")).close()
        real(self, files, transaction, reports)

    monkeypatch.setattr(DicomDestination, "ask_commitment", lose_first)
    with node(to=[running.to], port=port, commit=True) as run:
        assert run.take(series()) == {"done": 1}
    assert len(running.get("/instances")) == RESULTS
    events = [json.loads(line) for line in (state / "audit.jsonl").read_text().splitlines()]
    reports = [event["missing"] for event in events if event["event"] == "commitment"]
    assert reports == [1, 0]


@pytest.fixture
def certificates(tmp_path) -> Path:
    """An authority, a certificate of it for this host, and one of another authority."""
    folder = tmp_path / "certificates"
    folder.mkdir()
    for authority in ("ca", "other-ca"):
        new = ("-newkey", "rsa:2048", "-nodes", "-keyout", folder / f"{authority}.key", "-days", 2)
        call("openssl", "req", "-x509", *new, "-subj", f"/CN={authority}", "-out", folder / f"{authority}.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name, authority in (("node", "ca"), ("stranger", "other-ca")):
        key, asked, ours = (folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        call("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-subj", f"/CN={name}", "-out", asked)
        by = ("-CA", folder / f"{authority}.pem", "-CAkey", folder / f"{authority}.key", "-CAcreateserial")
        call("openssl", "x509", "-req", "-in", asked, *by, "-days", 2, "-extfile", folder / "names", "-out", ours)
    return folder


@pytest.mark.skipif(shutil.which("openssl") is None, reason="OPENSSL IS MISSING: TLS IS NOT TESTED")
def test_with_tls_both_sides_show_certificates(node, series, certificates):
    secure = _tls(certificates / "node.pem", certificates / "node.key", certificates / "ca.pem")
    stranger, nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    foreign = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (stranger, foreign):
        context.load_cert_chain(certificates / "stranger.pem", certificates / "stranger.key")
    for context in (stranger, nameless):
        context.load_verify_locations(certificates / "ca.pem")
    with (
        small_archive(tls=secure[0]) as (port, got),
        small_archive(tls=foreign) as (foreign_port, nothing),
        node(to=[f"ARCHIVE@127.0.0.1:{port}", f"ARCHIVE@127.0.0.1:{foreign_port}"], tls=secure) as run,
        socket.create_connection(("127.0.0.1", run.port)),  # a handshake that never comes holds up nobody
    ):
        assert set(send(run.port, series(), tls_args=(secure[1], "127.0.0.1"))) == {0}
        assert not associate(run.port, tls_args=(stranger, "127.0.0.1")).is_established
        assert not associate(run.port, tls_args=(nameless, "127.0.0.1")).is_established
        late = wait_until(lambda: [each for each in run.node.queue.late_dispatches() if each.attempts >= 2])
        assert "cannot be reached" in late[0].reason
        wait_until(lambda: len(got) == RESULTS)
    assert nothing == []


@pytest.mark.skipif(ORTHANC is None or not DICOMWEB.exists(), reason=MISSING)
def test_series_are_pulled_from_a_dicomweb_server_and_results_stored_there_once(node, series, tmp_path):
    today = time.strftime("%Y%m%d")
    with running_orthanc(tmp_path / "orthanc") as archive:
        web = DicomWeb(archive.dicomweb)
        for number in (1, 2):
            web.store(series(number, StudyDate=today))
        web.store(series(3, StudyDate="20200101"))
        more = {"pull": archive.dicomweb, "senders": (), "to": [archive.dicomweb]}
        with node(**more) as run:
            run.wait("done", 2)
            assert run.wait_finished() == {"done": 2}
        with node(**more) as run:  # it knows what it has done
            time.sleep(1)
            assert run.wait_finished() == {"done": 2}
        kinds = modalities_of(archive)
        assert (kinds.count("SR"), kinds.count("CT")) == (2, 3)
