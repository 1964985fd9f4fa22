"""The status of a node: what people and monitoring see, and that no patient is in it."""

import json
import urllib.error
import urllib.request

from pydicom import dcmread

from normal_guidance.clinic.node.status import serving_status
from orthanc import free_port
from small_node import RESULTS, send, small_archive, wait_until


def read(url: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_status_tells_of_the_queue_and_of_no_patient(node, archive, series, state):
    tags = {"PatientName": "Smith^John", "SeriesDescription": "SECRET AXIAL"}
    good, few = series(1, **tags), series(2, scan=1, slices=2, **tags)
    with node(to=archive.to) as run, serving_status(run.node, "127.0.0.1", 0) as url:
        run.take([*good, *few])
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
    header, audit = dcmread(good[0]), (state / "audit.jsonl").read_text()
    for secret in ("Smith", "SECRET", header.PatientID, header.SeriesInstanceUID):
        assert secret not in page + json.dumps(told) + audit
    events = [json.loads(line)["event"] for line in audit.splitlines()]
    assert {"started", "association ended", "ready", "predicted", "sent", "refused", "stopped"} <= set(events)


def test_health_names_an_archive_that_is_down_and_gets_everything_once_it_is_up_and_a_thread_that_fails(node, series):
    def fail():
        raise OSError(28, "No space left on device")

    port = free_port()
    with node(to=[f"ARCHIVE@127.0.0.1:{port}"]) as run, serving_status(run.node, "127.0.0.1", 0) as url:
        send(run.port, series())
        wait_until(lambda: read(f"{url}health")[0] == 503)
        (problem,) = json.loads(read(f"{url}health")[1])["problems"]
        assert problem == f"1 results wait for ARCHIVE@127.0.0.1:{port}: ARCHIVE@127.0.0.1:{port} cannot be reached"
        assert "needs attention" in read(url)[1]
        with small_archive(port=port) as (_, got):
            assert run.wait_finished() == {"done": 1}
            assert run.node.problems() == []
            assert len(got) == RESULTS
        run.node.loops[0].step = fail
        assert wait_until(run.node.problems) == ["predicting: OSError"]
