"""The node beside software of others: DCMTK's tools, Orthanc as sender and archive, and TLS."""

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
from orthanc import DICOMWEB, MISSING, ORTHANC, free_port, running_orthanc
from small_node import RESULTS, associate, running_node, send, small_archive, wait_until

# pynetdicom does not close the socket of a connection that was refused.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

needs_orthanc = pytest.mark.skipif(ORTHANC is None, reason=MISSING)
needs_dcmtk = pytest.mark.skipif(
    shutil.which("storescu") is None,
    reason="DCMTK IS NOT INSTALLED: NO FOREIGN SENDER IS TESTED (apt install dcmtk)",
)
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="OPENSSL IS MISSING: TLS IS NOT TESTED")


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300)


@needs_dcmtk
def test_dcmtk_sends_and_receives(bundle, series, tmp_path):
    files, out, port = series(), tmp_path / "out", free_port()
    out.mkdir()
    scp = subprocess.Popen(["storescp", "--output-directory", str(out), "-aet", "ARCHIVE", str(port)])
    try:
        with running_node(tmp_path / "state", bundle, to=[f"ARCHIVE@127.0.0.1:{port}"]) as run:
            peer = ("-aet", "SENDER", "-aec", "NGUIDE", "127.0.0.1", run.port)
            assert call("echoscu", *peer).returncode == 0
            assert call("echoscu", "-aet", "NOBODY", *peer[2:]).returncode != 0
            sent = call("storescu", *peer, *files)
            assert sent.returncode == 0, sent.stderr
            assert run.wait_finished() == {"done": 1}
    finally:
        scp.terminate()
        scp.wait()
    assert len([dcmread(file) for file in out.iterdir()]) == RESULTS


@needs_dcmtk
def test_a_compressed_series_is_stored_as_it_is(bundle, series, tmp_path):
    """JPEG lossless by DCMTK: what the node stores is compressed, and is predicted."""
    files = series()
    for file in files:
        assert call("dcmcjpeg", file, file).returncode == 0
    with running_node(tmp_path / "state", bundle) as run:
        sent = call("storescu", "-xs", "-aet", "SENDER", "-aec", "NGUIDE", "127.0.0.1", run.port, *files)
        assert sent.returncode == 0, sent.stderr
        stored = {dcmread(file).file_meta.TransferSyntaxUID for file in run.node.incoming.path.rglob("*.dcm")}
        assert stored == {"1.2.840.10008.1.2.4.70"}
        assert run.wait_finished() == {"done": 1}


@needs_orthanc
def test_orthanc_sends_a_series_and_gets_its_results_in_the_same_study(bundle, series, tmp_path):
    port, files = free_port(), series()
    with running_orthanc(tmp_path / "archive", {"NGUIDE": ["127.0.0.1", port]}) as archive:
        with running_node(tmp_path / "s", bundle, senders=["ARCHIVE@127.0.0.1"], to=[archive.to], port=port) as run:
            send_to = associate(archive.dicom_port, called="ARCHIVE")
            for file in files:
                assert send_to.send_c_store(dcmread(file)).Status == 0
            send_to.release()
            (study,) = archive.get("/studies")
            archive.post("/modalities/NGUIDE/store", [study])
            assert wait_until(lambda: run.node.queue.by_state()["done"]) == 1
        assert len(archive.get("/studies")) == 1
        kinds = sorted(one["MainDicomTags"]["Modality"] for one in archive.series())
    assert kinds == ["CT", "KO", "OT", "SR"]


@needs_orthanc
def test_orthanc_confirms_what_it_has_stored(bundle, series, tmp_path):
    """Storage commitment: the report comes in a new association, which Orthanc opens to the node."""
    port = free_port()
    with running_orthanc(tmp_path / "archive", {"NGUIDE": ["127.0.0.1", port]}) as archive:
        with running_node(tmp_path / "state", bundle, to=[archive.to], port=port, commit=True) as run:
            send(run.port, series())
            assert run.wait_finished() == {"done": 1}
            audit = (tmp_path / "state" / "audit.jsonl").read_text()
            assert '"event": "commitment"' in audit
        assert len(archive.get("/instances")) == RESULTS


@needs_orthanc
def test_results_that_the_archive_lost_are_sent_again(bundle, series, tmp_path, monkeypatch):
    """The archive deletes a result before it is asked: it reports that, and gets the result again."""
    real, lost = DicomDestination.ask_commitment, []
    port = free_port()
    with running_orthanc(tmp_path / "archive", {"NGUIDE": ["127.0.0.1", port]}) as archive:

        def lose_first(self, files, transaction, reports):
            if not lost:
                lost.append(archive.get("/instances")[0])
                address = f"http://127.0.0.1:{archive.http_port}/instances/{lost[0]}"
                urllib.request.urlopen(urllib.request.Request(address, method="DELETE")).close()
            real(self, files, transaction, reports)

        monkeypatch.setattr(DicomDestination, "ask_commitment", lose_first)
        with running_node(tmp_path / "state", bundle, to=[archive.to], port=port, commit=True) as run:
            send(run.port, series())
            assert run.wait_finished() == {"done": 1}
        assert len(archive.get("/instances")) == RESULTS
    assert '"missing": 1' in (tmp_path / "state" / "audit.jsonl").read_text()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """An authority, a certificate of it for this host, and one of another authority."""
    folder = tmp_path_factory.mktemp("certificates")
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


@pytest.fixture
def secure(certificates) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a node: for those who call it, and for those whom it calls."""
    return _tls(certificates / "node.pem", certificates / "node.key", certificates / "ca.pem")


@needs_openssl
def test_with_tls_both_sides_show_certificates(bundle, series, tmp_path, certificates, secure):
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.load_cert_chain(certificates / "stranger.pem", certificates / "stranger.key")
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (stranger, nameless):
        context.load_verify_locations(certificates / "ca.pem")
    with (
        small_archive(tls=secure[0]) as (port, got),
        running_node(tmp_path / "state", bundle, to=[f"ARCHIVE@127.0.0.1:{port}"], tls=secure) as run,
        socket.create_connection(("127.0.0.1", run.port)),  # a handshake that never comes holds up nobody
    ):
        assert set(send(run.port, series(), tls_args=(secure[1], "127.0.0.1"))) == {0}
        assert not associate(run.port, tls_args=(stranger, "127.0.0.1")).is_established
        assert not associate(run.port, tls_args=(nameless, "127.0.0.1")).is_established
        assert run.wait_finished() == {"done": 1}
    assert len(got) == RESULTS


@needs_openssl
def test_an_archive_with_a_foreign_certificate_gets_nothing(bundle, series, tmp_path, certificates, secure):
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    stranger.load_cert_chain(certificates / "stranger.pem", certificates / "stranger.key")
    with (
        small_archive(tls=stranger) as (port, got),
        running_node(tmp_path / "state", bundle, to=[f"ARCHIVE@127.0.0.1:{port}"], tls=secure) as run,
    ):
        send(run.port, series(), tls_args=(secure[1], "127.0.0.1"))
        late = wait_until(lambda: [one for one in run.node.queue.late_dispatches() if one.attempts >= 2])
        assert "cannot be reached" in late[0].reason
    assert got == []


@pytest.mark.skipif(ORTHANC is None or not DICOMWEB.exists(), reason=MISSING)
def test_series_are_pulled_from_a_dicomweb_server_and_results_stored_there_once(bundle, series, tmp_path):
    from normal_guidance.clinic.predict.dicomweb import DicomWeb

    today = time.strftime("%Y%m%d")
    with running_orthanc(tmp_path / "orthanc") as archive:
        web = DicomWeb(archive.dicomweb)
        for number in (1, 2):
            web.store(series(number, StudyDate=today))
        web.store(series(3, StudyDate="20200101"))
        more = {"pull": archive.dicomweb, "senders": (), "to": [archive.dicomweb]}
        with running_node(tmp_path / "state", bundle, **more) as run:
            run.wait("done", 2)
            assert run.wait_finished() == {"done": 2}
        with running_node(tmp_path / "state", bundle, **more) as run:  # it knows what it has done
            time.sleep(1)
            assert run.wait_finished() == {"done": 2}
        kinds = sorted(one["MainDicomTags"]["Modality"] for one in archive.series())
        assert kinds.count("SR") == 2
        assert kinds.count("CT") == 3
