"""A node that is killed at any step goes on: every series has exactly one result in the archive."""

import signal
import subprocess
import threading

import pytest
from pydicom import dcmread

from orthanc import free_port
from small_node import HANGS, RESULTS, associate, read_status, small_archive, start_program, wait_until

QUEUE = "normal_guidance.clinic.node.series_queue:SeriesQueue"
STEPS = {
    "the fifth file is written": "normal_guidance.clinic.node.incoming:Incoming.write:5:after",
    "the fifth file is recorded": f"{QUEUE}.add:5:after",
    "the series is complete": f"{QUEUE}.move:1:before",
    "the series is ready": f"{QUEUE}.move:1:after",
    "predicting begins": f"{QUEUE}.count_attempt:1:after",
    "results are written": f"{QUEUE}.predicted:1:before",
    "results are recorded": f"{QUEUE}.predicted:1:after",
    "a file is sent": f"{QUEUE}.accept:1:before",
    "a file is accepted": f"{QUEUE}.accept:2:after",
    "all files are sent": f"{QUEUE}.sent:1:before",
    "the series is done": f"{QUEUE}.sent:1:after",
    "its files are forgotten": f"{QUEUE}.purge:1:after",
}


class Program:
    def __init__(self, folder, bundle, archive: int, *more: object, settle: float = 0.5) -> None:
        self.port, self.status_port, self.log = free_port(), free_port(), folder / "log"
        self.words = [folder / "state", "--model", bundle, "--port", self.port, "--from", "SENDER@127.0.0.1"]
        self.words += ["--to", f"ARCHIVE@127.0.0.1:{archive}", "--status", f"127.0.0.1:{self.status_port}"]
        self.words += ["--workers", 0, *more]
        self.settle = settle

    def start(self, die: str = "") -> subprocess.Popen[str]:
        process = start_program([*self.words, "--settle", self.settle], die, self.log)
        wait_until(lambda: read_status(self.status_port) or process.poll() is not None, "the node starts")
        return process

    def queue(self) -> dict[str, int]:
        status = read_status(self.status_port)
        return {} if status is None else {name: count for name, count in status["queue"].items() if count}


def send_until_accepted(port: int, files) -> None:
    """As modalities do: the whole series again, until each slice is accepted."""
    slices = [dcmread(file) for file in files]

    def accepted() -> bool:
        try:
            association = associate(port)
            good = association.is_established and all(
                association.send_c_store(one).get("Status") == 0 for one in slices
            )
            association.release()
        except (OSError, RuntimeError, ValueError):
            return False
        return good

    wait_until(accepted, "the series is accepted")


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_loses_nothing_and_doubles_nothing(step, trained, series, tmp_path):
    with small_archive() as (archive, got):
        node = Program(tmp_path, trained.bundle, archive, *(["--keep", 0] if "forgotten" in step else []))
        first = node.start(STEPS[step])
        # The node dies while the series is sent, or later; the sender comes back to whichever start answers.
        sender = threading.Thread(target=send_until_accepted, args=(node.port, series()))
        sender.start()
        assert first.wait(HANGS) == -signal.SIGKILL, node.log.read_text()
        second = node.start()
        sender.join(HANGS)
        wait_until(lambda: node.queue() == {"done": 1}, "done")
        second.terminate()
        assert second.wait(HANGS) == 0
    assert len({one.SOPInstanceUID for one in got}) == RESULTS
    assert len(got) <= RESULTS + 1  # a file that was sent and not yet recorded is sent again, with the same UID


@pytest.mark.slow
def test_sigterm_ends_a_node_in_the_middle_of_an_association_and_the_state_is_kept(trained, series, tmp_path):
    files = series()
    with small_archive() as (archive, got):
        node = Program(tmp_path, trained.bundle, archive, settle=1000)
        first = node.start()
        association = associate(node.port)
        statuses = [association.send_c_store(dcmread(file)).get("Status") for file in files[:5]]
        first.terminate()
        assert first.wait(HANGS) == 0
        assert statuses == [0] * 5
        wait_until(lambda: not association.is_established)
        second = node.start()
        assert node.queue() == {"receiving": 1}
        second.send_signal(signal.SIGINT)
        assert second.wait(HANGS) == 0
        node.settle = 0.5
        third = node.start()
        send_until_accepted(node.port, files)
        wait_until(lambda: node.queue() == {"done": 1})
        third.terminate()
        assert third.wait(HANGS) == 0
    assert len(got) == RESULTS
    assert "Traceback" not in node.log.read_text()
