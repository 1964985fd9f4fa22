"""The status of a node: what people and monitoring see, and that no patient is in it."""

import json
import urllib.error
import urllib.request

import pytest
from pydicom import dcmread

from normal_guidance.clinic.node.status import serving_status
from orthanc import free_port
from small_node import running_node, send, small_archive, wait_until

# pynetdicom does not close the socket of a connection that was refused.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def read(url: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_status_tells_of_the_queue_and_of_no_patient(bundle, series, tmp_path):
    good = series(1, PatientName="Smith^John", SeriesDescription="SECRET AXIAL")
    few = series(2, scan=1, slices=2, PatientName="Smith^John", SeriesDescription="SECRET AXIAL")
    state = tmp_path / "state"
    with (
        small_archive() as (port, _),
        running_node(state, bundle, to=[f"ARCHIVE@127.0.0.1:{port}"]) as run,
        serving_status(run.node, "127.0.0.1", 0) as url,
    ):
        send(run.port, good)
        send(run.port, few)
        run.wait_finished()
        code, page = read(url)
        told = json.loads(read(f"{url}status.json")[1])
        assert (code, read(f"{url}health")) == (200, (200, '{"ok": true, "problems": []}'))
        assert read(f"{url}other")[0] == 404
        assert read(url, method="POST")[0] == 405
        assert read(url, host="evil.example")[0] == 403
    assert {name: count for name, count in told["queue"].items() if count} == {"done": 1, "refused": 1}
    assert told["sent_last_hour"] == 1
    assert told["seconds_from_last_slice_to_sent"]["median"] > 0
    assert told["memory_bytes"] > 2**20
    (failure,) = told["failures"]
    assert "it has 2 slices" in failure["reason"]
    assert "it has 2 slices" in page
    patient = dcmread(good[0])
    secrets = ("Smith", "SECRET", str(patient.PatientID), str(patient.SeriesInstanceUID), str(patient.StudyDate or "-"))
    audit = (state / "audit.jsonl").read_text()
    for secret in secrets[:4]:
        assert secret not in page + json.dumps(told) + audit
    events = [json.loads(line)["event"] for line in audit.splitlines()]
    assert {"started", "association ended", "ready", "predicted", "sent", "refused", "stopped"} <= set(events)


def test_health_fails_with_a_reason_while_an_archive_is_down(bundle, series, tmp_path):
    with (
        running_node(tmp_path / "state", bundle, to=[f"ARCHIVE@127.0.0.1:{free_port()}"]) as run,
        serving_status(run.node, "127.0.0.1", 0) as url,
    ):
        send(run.port, series())
        wait_until(lambda: read(f"{url}health")[0] == 503)
        assert "cannot be reached" in read(f"{url}health")[1]
        assert "needs attention" in read(url)[1]


def test_health_names_a_thread_that_fails(bundle, tmp_path, monkeypatch):
    with running_node(tmp_path / "state", bundle) as run:

        def fail():
            raise OSError(28, "No space left on device")

        run.node.loops[0].step = fail
        assert wait_until(run.node.problems) == ["predicting: OSError"]
