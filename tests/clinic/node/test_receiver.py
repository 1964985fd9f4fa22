"""Who may send and what: hostile and broken senders cost themselves only."""

import socket
import struct
import threading
from contextlib import closing

import pytest
from pydicom import dcmread
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, generate_uid
from pynetdicom import AE, evt
from pynetdicom.sop_class import CTImageStorage, EncapsulatedPDFStorage, Verification

from normal_guidance.clinic.node import receiver
from normal_guidance.clinic.node.send_dicom import ALL_STORED, COMMITMENT, INSTANCE, SOME_MISSING, request_dataset
from small_node import RESULTS, associate, send, wait_until


@pytest.fixture
def run(node, monkeypatch):
    """A node that only receives, and that does not wait long for a hello."""
    monkeypatch.setattr(receiver, "HELLO_SECONDS", 3.0)
    with node(settle=1000.0) as running:
        yield running


def rejection(association) -> tuple[int, int]:
    assert association.is_rejected
    answer = association.acceptor.primitive
    return answer.result_source, answer.diagnostic


def test_whoever_is_not_known_is_rejected(run):
    for calling, called, reason in (("NOBODY", "NGUIDE", 3), ("SENDER", "OTHER", 7), ("sender", "NGUIDE", 3)):
        assert rejection(associate(run.port, calling=calling, called=called)) == (1, reason)
    wait_until(lambda: run.node.receiver.counts["rejected calls"] == 3)
    assert '"peer": "NOBODY"' in run.node.audit.path.read_text()


def test_another_address_is_turned_away_and_a_destination_may_call_but_not_store(node, archive, series):
    with node(senders=["SENDER@127.0.0.2"]) as run:
        with closing(socket.create_connection(("127.0.0.1", run.port))) as connection:
            connection.settimeout(60)
            assert connection.recv(1) == b""
        assert run.node.receiver.counts["rejected calls"] == 1
        good = associate(run.port, bind_address=("127.0.0.2", 0))
        assert good.is_established
        good.release()
    with node(to=archive.to) as run:
        assert send(run.port, series()[:1], calling="ARCHIVE") == [receiver.NOT_ALLOWED]
        assert list(run.node.incoming.path.iterdir()) == []


def test_images_are_taken_in_every_transfer_syntax_that_is_decoded_and_other_objects_are_not(run):
    association = associate(run.port, classes=[Verification, EncapsulatedPDFStorage])
    assert [str(context.abstract_syntax) for context in association.accepted_contexts] == [Verification]
    assert association.send_c_echo().Status == 0
    association.release()
    entity = AE("SENDER")
    for syntax in receiver.SYNTAXES:
        entity.add_requested_context(CTImageStorage, [syntax])
    entity.add_requested_context(CTImageStorage, ["1.2.840.10008.1.2.4.100"])  # a video
    association = entity.associate("127.0.0.1", run.port, ae_title="NGUIDE")
    taken = {context.transfer_syntax[0] for context in association.accepted_contexts}
    association.release()
    assert taken == set(receiver.SYNTAXES) >= {ExplicitVRLittleEndian, JPEG2000Lossless}


REQUEST = b"\x01\x00" + struct.pack(">L", 68 + 200) + b"\x00\x01\x00\x00" + b"NGUIDE".ljust(16) + b"SENDER".ljust(16)


@pytest.mark.slow(but=("truncated", "http", "huge"))
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        REQUEST,  # truncated
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x04\x00\xff\xff\xff\xff" + bytes(100),  # 4 GB are stated
        b"\x01\x00\x00\x00\x00\x10" + bytes(16),  # an empty request
        bytes(range(256)),
    ],
    ids=["nothing", "one-byte", "truncated", "http", "huge", "empty", "noise"],
)
def test_broken_messages_end_and_the_next_sender_is_served(run, content, monkeypatch):
    monkeypatch.setattr(receiver, "SILENCE_SECONDS", 0.2)
    with closing(socket.create_connection(("127.0.0.1", run.port))) as connection:
        connection.settimeout(120)
        connection.sendall(content)
        while connection.recv(4096):  # the node closes the connection
            pass
    wait_until(lambda: run.node.receiver.associations == 0)
    association = associate(run.port)
    assert association.send_c_echo().Status == 0
    association.release()


def test_a_slice_that_is_cut_off_is_not_stored_and_a_message_that_never_ends_is_cut(run, series, monkeypatch):
    """The connection breaks within a C-STORE: no file, no row."""
    large, association, sent = dcmread(series()[0]), associate(run.port), []
    large.PixelData, large.Rows, large.Columns = bytes(200_000), 200, 500  # more than a sender's first message holds
    real = association.dul.socket.send

    def cut(content):
        sent.append(content)
        if len(sent) == 3:  # the command and the first piece of the object have gone
            association.dul.socket.socket.shutdown(socket.SHUT_RDWR)
        real(content)

    association.dul.socket.send = cut
    association.send_c_store(large)
    wait_until(lambda: run.node.receiver.associations == 0)
    assert run.node.queue.by_state()["receiving"] == 0
    assert list(run.node.incoming.path.rglob("*.dcm")) == []
    monkeypatch.setattr(receiver, "LARGEST_OBJECT", 50_000)
    assert associate(run.port).send_c_store(large).get("Status") is None
    assert send(run.port, series()) == [0] * len(series())  # each alone is small: the count begins anew
    assert run.node.queue.in_state("receiving")[0].files == len(series())


def test_an_object_that_is_not_what_the_message_says_is_refused(run, series):
    association, statuses = associate(run.port), []
    for name, value in (
        ("SeriesInstanceUID", "../../../etc/passwd"),
        ("StudyInstanceUID", ""),
        ("SeriesInstanceUID", "1" * 65),
        ("StudyInstanceUID", "1.2\\3.4"),
    ):
        changed = dcmread(series()[0])
        changed[name]._value = value
        statuses.append(association.send_c_store(changed).Status)
    assert set(statuses) == {receiver.NOT_UNDERSTOOD}
    real = association.dimse.send_msg

    def rename(message, context):
        message.AffectedSOPInstanceUID = generate_uid()
        real(message, context)

    association.dimse.send_msg = rename
    assert association.send_c_store(dcmread(series()[0])).Status == receiver.MISMATCH
    association.release()
    assert run.node.receiver.counts["refused objects"] == 5
    assert list(run.node.incoming.path.iterdir()) == []


def test_associations_are_bounded_and_connections_that_say_nothing_do_not_keep_others_out(run, monkeypatch):
    held = [associate(run.port) for _ in range(receiver.MOST_ASSOCIATIONS)]
    assert all(association.is_established for association in held)
    assert rejection(associate(run.port)) == (3, 2)  # local limit exceeded: come back later
    for association in held:
        association.release()
    wait_until(lambda: run.node.receiver.associations == 0)
    monkeypatch.setattr(receiver, "MOST_WAITING", 5)
    silent = [socket.create_connection(("127.0.0.1", run.port)) for _ in range(12)]
    try:
        good = associate(run.port)
        assert good.is_established
        wait_until(lambda: run.node.receiver.associations <= 5 + 1)
        assert good.send_c_echo().Status == 0  # what is established stays
        good.release()
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.slow
def test_good_series_go_through_while_others_attack(node, archive, series):
    ended = threading.Event()

    def attack():
        while not ended.is_set():
            for content in (REQUEST, b"\x04\x00\xff\xff\xff\xff", bytes(40)):
                with closing(socket.create_connection(("127.0.0.1", run.port))) as connection:
                    connection.sendall(content)

    with node(to=archive.to) as run:
        attacker = threading.Thread(target=attack)
        attacker.start()
        try:
            association = wait_until(lambda: (one := associate(run.port)).is_established and one)
            assert {association.send_c_store(dcmread(file)).Status for file in series()} == {0}
            association.release()
            assert run.wait_finished() == {"done": 1}
            assert attacker.is_alive(), "it attacked to the end"
        finally:
            ended.set()
            attacker.join()
    assert len(archive.got) == RESULTS


def collect(reports):
    def report(event):
        reports.append((event.event_type, event.event_information))
        return 0, None

    return [(evt.EVT_N_EVENT_REPORT, report)]


def ask(port, objects, reports):
    association = associate(port, classes=[COMMITMENT], evt_handlers=collect(reports))
    status, _ = association.send_n_action(request_dataset("1.2.3", objects), 1, COMMITMENT, INSTANCE)
    assert status.Status == 0
    return association


def test_a_sender_is_told_what_is_safely_stored(run, series):
    files = series()
    send(run.port, files)
    objects = [(str(sent.SOPClassUID), str(sent.SOPInstanceUID)) for sent in map(dcmread, files)]
    for asked, kind in ((objects, ALL_STORED), ([*objects, (CTImageStorage, "1.9.9")], SOME_MISSING)):
        reports = []
        association = ask(run.port, asked, reports)
        wait_until(lambda: reports)  # noqa: B023
        association.release()
        ((event_type, report),) = reports
        assert event_type == kind
        assert report.TransactionUID == "1.2.3"
        assert len(report.ReferencedSOPSequence) == len(objects)
        missing = [item.ReferencedSOPInstanceUID for item in report.get("FailedSOPSequence", [])]
        assert missing == ([] if kind == ALL_STORED else ["1.9.9"])


def test_a_sender_that_has_left_gets_its_report_in_a_new_association(node, series):
    reports, entity = [], AE("SENDER")
    entity.add_supported_context(COMMITMENT, scu_role=True, scp_role=True)
    server = entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=collect(reports))
    senders = [f"SENDER@127.0.0.1:{server.server_address[1]}"]
    try:
        with node(senders=senders, settle=1000.0) as run:
            sent = dcmread(series()[0])
            send(run.port, [sent])
            ask(run.port, [(str(sent.SOPClassUID), str(sent.SOPInstanceUID))], []).abort()
            wait_until(lambda: reports)
    finally:
        server.shutdown()
    assert [kind for kind, _ in reports] == [ALL_STORED]
