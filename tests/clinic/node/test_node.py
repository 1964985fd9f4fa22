"""A node from end to end, in this process: what is sent comes out as results in an archive, once."""

import json
import stat
from pathlib import Path

import pytest
from pydicom import dcmread
from pydicom.uid import UID

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.node import destination as destinations
from normal_guidance.clinic.node import receiver, sending
from normal_guidance.clinic.node import serving as predicting
from normal_guidance.clinic.node.incoming import parse_rule
from normal_guidance.clinic.node.series_queue import Limits
from orthanc import free_port
from small_node import RESULTS, associate, running_node, send, small_archive, wait_until

# pynetdicom does not close the socket of a connection that was refused.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SR, KO, SC = ("1.2.840.10008.5.1.4.1.1.88.34", "1.2.840.10008.5.1.4.1.1.88.59", "1.2.840.10008.5.1.4.1.1.7")
STUDY = "1.2.826.0.1.3680043.9.7.1"


@pytest.fixture
def state(tmp_path) -> Path:
    return tmp_path / "state"


def to(port: int) -> list[str]:
    return [f"ARCHIVE@127.0.0.1:{port}"]


def test_a_series_comes_out_as_results_of_the_same_patient_and_study(bundle, series, state):
    files = series()
    with small_archive() as (port, got), running_node(state, bundle, to=to(port)) as run:
        assert set(send(run.port, files)) == {0}
        assert run.wait_finished() == {"done": 1}
        modes = {stat.S_IMODE(path.stat().st_mode) for path in state.rglob("*") if path.is_file()}
        folders = {stat.S_IMODE(path.stat().st_mode) for path in (state, *state.rglob("*")) if path.is_dir()}
    assert sorted(one.SOPClassUID for one in got) == sorted(map(UID, (SR, KO, SC)))
    assert {one.StudyInstanceUID for one in got} == {STUDY}
    assert {one.PatientID for one in got} == {dcmread(files[0]).PatientID}
    assert modes == {0o600}
    assert folders == {0o700}


def test_what_is_stored_is_what_was_sent_once_and_other_content_is_refused(bundle, series, state):
    files = series()
    changed = dcmread(files[0])
    changed.PixelData = bytes(len(changed.PixelData))
    with running_node(state, bundle, settle=1000) as run:
        assert set(send(run.port, [*files, *files])) == {0}
        assert send(run.port, [changed]) == [receiver.DUPLICATE]
        (one,) = run.wait("receiving")
        assert one.files == len(files) == len(list(state.glob("incoming/*/*.dcm")))
        assert run.node.receiver.counts["refused objects"] == 1
        stored = [dcmread(file) for file in state.glob("incoming/*/*.dcm")]
    by_uid = {sent.SOPInstanceUID: sent for sent in map(dcmread, files)}
    assert {kept.SOPInstanceUID for kept in stored} == set(by_uid)
    assert all(kept == by_uid[kept.SOPInstanceUID] for kept in stored)  # byte for byte, pixels too


def test_the_same_series_sent_again_gives_no_second_result_and_files_are_kept_for_their_days(bundle, series, state):
    with small_archive() as (port, got), running_node(state, bundle, to=to(port), keep=1.0) as run:
        for _ in range(2):
            assert set(send(run.port, series())) == {0}
            assert run.wait_finished() == {"done": 1}
        assert run.node.queue.in_state("done")[0].round == 1
        run.node.clean()
        assert len(list(state.glob("incoming/*/*.dcm"))) == len(series())
    assert len(got) == RESULTS


def test_late_slices_give_a_new_result_that_says_so(bundle, series, state):
    files = series()
    with small_archive() as (port, got), running_node(state, bundle, to=to(port)) as run:
        send(run.port, files[:-2])
        run.wait_finished()
        first = list(got)
        send(run.port, files[-2:])
        run.wait_finished()
        (one,) = run.wait("done")
        (folder,) = (state / "results").iterdir()
        assert "late_slices" in next(folder.rglob("prediction.json")).read_text()
    assert (one.round, one.files) == (2, len(files))
    assert len(first) == RESULTS
    assert len(got) == 2 * RESULTS
    assert len({one.SOPInstanceUID for one in got}) == 2 * RESULTS
    early, late = (next(one for one in some if one.SOPClassUID == KO) for some in (first, got[RESULTS:]))
    assert "Slices arrived after an earlier result" not in early.to_json()
    assert "Slices arrived after an earlier result" in late.to_json()


def test_slices_that_come_while_a_series_is_predicted_are_not_left_out(bundle, series, state, monkeypatch):
    """The result of the incomplete series is thrown away; the archive gets the one of all slices."""
    files = series()
    real = predicting.write_scan

    def late(*arguments, **options):
        monkeypatch.setattr(predicting, "write_scan", real)
        send(run.port, files[-1:])
        return real(*arguments, **options)

    monkeypatch.setattr(predicting, "write_scan", late)
    with small_archive() as (port, got), running_node(state, bundle, to=to(port)) as run:
        send(run.port, files[:-1])
        run.wait_finished()
        (one,) = run.wait("done")
    assert (one.round, one.predicted_files) == (1, len(files))
    assert len(got) == RESULTS


def test_files_are_deleted_after_they_are_kept_and_the_series_is_still_known(bundle, series, state):
    files = series()
    with small_archive() as (port, got), running_node(state, bundle, to=to(port), keep=0.0) as run:
        send(run.port, files)
        run.wait_finished()
        run.node.clean()
        assert list(state.glob("incoming/*")) == list(state.glob("results/*")) == []
        send(run.port, files)  # the whole series: nothing new
        assert run.wait_finished() == {"done": 1}
        run.node.clean()
        send(run.port, series(slices=len(files) + 1)[-1:])  # a late slice alone
        assert run.wait_finished() == {"failed": 1}
        assert "send the whole series again" in run.node.queue.in_state("failed")[0].reason
    assert len(got) == RESULTS


def test_a_full_queue_tells_senders_to_come_back(bundle, series, state, monkeypatch):
    first, second = series(1), series(2, scan=1)
    with small_archive() as (port, _):
        with running_node(state, bundle, to=to(port), settle=1000, limits=Limits(series=1)) as run:
            assert set(send(run.port, first)) == {0}
            assert set(send(run.port, second)) == {receiver.NO_RESOURCES}
            assert set(send(run.port, series(1, slices=len(first) + 1)[-1:])) == {0}  # a series that is begun goes on
        with running_node(state, bundle, to=to(port), limits=Limits(series=1)) as run:
            run.wait_finished()
            assert set(send(run.port, second)) == {0}
            assert run.wait_finished() == {"done": 2}
    with running_node(state.with_name("small"), bundle, limits=Limits(bytes=1000)) as run:
        assert set(send(run.port, first)) == {receiver.NO_RESOURCES}
        monkeypatch.setattr(receiver, "FREE_BYTES", 2**60)
        assert set(send(run.port, first)) == {receiver.NO_RESOURCES}
        assert list(run.node.incoming.path.iterdir()) == []


def test_series_that_no_rule_takes_or_the_model_refuses_are_told(bundle, series, state):
    body, odd, few = series(1, BodyPartExamined="CHEST"), series(2, scan=1), series(3, scan=2, slices=2)
    for file in (*odd, *few):
        dataset = dcmread(file)
        dataset.BodyPartExamined = "HEAD"
        if file in odd:
            del dataset.RescaleSlope, dataset.RescaleIntercept
        dataset.save_as(file)
    with running_node(state, bundle, rules=[parse_rule("body=HEAD")]) as run:
        for files in (body, odd, few):
            assert set(send(run.port, files)) == {0}
        assert run.wait_finished() == {"ignored": 1, "refused": 2}
        reasons = {one.reason for one in run.node.queue.in_state("refused", "ignored")}
    assert "no rule takes it: body does not fit HEAD" in reasons
    assert any("it has 2 slices" in reason for reason in reasons)
    assert any("not HU" in reason for reason in reasons)


def test_a_series_that_cannot_be_decoded_fails_alone(bundle, series, state):
    broken, good = series(1), series(2, scan=1)
    for file in broken:
        dataset = dcmread(file)
        dataset.BitsAllocated = 16
        dataset.PixelData = dataset.PixelData[: len(dataset.PixelData) // 2]
        dataset.save_as(file)
    with small_archive() as (port, got), running_node(state, bundle, to=to(port)) as run:
        send(run.port, broken)
        send(run.port, good)
        assert run.wait_finished() == {"done": 1, "failed": 1}
        assert run.node.queue.in_state("failed")[0].detail
        assert run.node.problems() == []
    assert len(got) == RESULTS


def test_an_error_of_ours_fails_its_series_and_a_full_disk_is_tried_again(bundle, series, state, monkeypatch):
    errors = [OSError(28, "No space left on device")] * 4 + [KeyError("a bug")]
    monkeypatch.setattr("normal_guidance.clinic.node.node.ERROR_SECONDS", 0.01)

    def find(*arguments, **options):
        raise errors.pop(0)

    monkeypatch.setattr(predicting, "find_scans", find)
    with running_node(state, bundle) as run:
        send(run.port, series())
        assert run.wait_finished() == {"failed": 1}
        assert run.node.queue.in_state("failed")[0].reason == "predicting failed with KeyError"
    assert errors == []


def test_a_series_that_ends_the_program_is_tried_three_times(bundle, series, state):
    with running_node(state, bundle, settle=1000) as run:
        send(run.port, series())
        (one,) = run.wait("receiving")
        run.node.queue.move(one, "ready")
        for _ in range(predicting.ATTEMPTS):
            run.node.queue.count_attempt(one)
    with running_node(state, bundle) as run:
        assert run.wait_finished() == {"failed": 1}
        assert "ended 3 times" in run.node.queue.in_state("failed")[0].reason


def test_a_series_is_complete_when_nothing_has_come_for_a_while_longer_after_an_abort(bundle, series, state):
    with running_node(state, bundle, settle=1000) as run:
        now = [0.0]
        run.node.loops[0].step.__self__.arrivals = clock = predicting.Arrivals(lambda: now[0])
        run.node.receiver.touched = clock.touch
        send(run.port, series(1))
        association = associate(run.port)
        for file in series(2, scan=1):
            association.send_c_store(dcmread(file))
        association.abort()
        wait_until(lambda: {one.association for one in run.node.queue.in_state("receiving")} == {"released", "aborted"})
        step = run.node.loops[0].step.__self__
        waiting = {one.association: one for one in run.node.queue.in_state("receiving")}
        for moment, complete in ((999.0, (False, False)), (1001.0, (True, False)), (10_001.0, (True, True))):
            now[0] = moment
            assert (step._is_complete(waiting["released"]), step._is_complete(waiting["aborted"])) == complete


def test_an_association_that_was_open_at_a_kill_counts_as_aborted(bundle, series, state):
    with running_node(state, bundle, settle=1000) as run:
        send(run.port, series())
        (one,) = run.wait("receiving")
        wait_until(lambda: run.node.queue.in_state("receiving")[0].association == "released")
        run.node.queue.set_association([one.key], "open")
        run.node.queue.abort_open()
        assert run.node.queue.in_state("receiving")[0].association == "aborted"


def test_an_archive_that_is_down_gets_everything_once_it_is_up(bundle, series, state):
    port = free_port()
    with running_node(state, bundle, to=to(port)) as run:
        send(run.port, series())
        late = wait_until(lambda: [one for one in run.node.queue.late_dispatches() if one.attempts >= 5])
        assert "cannot be reached" in late[0].reason
        assert any("results wait for ARCHIVE" in problem for problem in run.node.problems())
        with small_archive(port=port) as (_, got):
            assert run.wait_finished() == {"done": 1}
            assert run.node.problems() == []
            assert len(got) == RESULTS


def test_every_destination_gets_the_results_and_only_what_was_refused_is_sent_again(bundle, series, state, tmp_path):
    refusals, seen, out = [0xA700], [], tmp_path / "out"

    def status(dataset):
        seen.append(dataset.SOPInstanceUID)
        return refusals.pop() if dataset.SOPClassUID == SR and refusals else 0

    with small_archive(status) as (port, got), running_node(state, bundle, to=[*to(port), f"folder:{out}"]) as run:
        send(run.port, series())
        assert run.wait_finished() == {"done": 1}
    assert len(got) == RESULTS == len(set(seen))
    assert len(seen) == RESULTS + 1
    copied = [dcmread(file) for file in out.rglob("*.dcm")]
    assert {one.SOPInstanceUID for one in copied} == {one.SOPInstanceUID for one in got}


def test_another_kind_of_destination_is_a_row_and_a_class(bundle, series, state, monkeypatch):
    """The seam for messages and DICOMweb: which files, and what to do with them; a failure is tried again."""
    sent = []

    class Messages(destinations.Destination):
        name = "messages:ward"

        def files(self, folder):
            return sorted(folder.rglob("prediction.json"))

        def send(self, files, about, accepted):
            sent.append((about.study_uid, about.round, [json.loads(file.read_text())["slices"] for file in files]))
            if len(sent) == 1:
                raise destinations.NotSentError("the ward is asleep")
            for file in files:
                accepted(file)

    kinds = {"messages:": lambda text, identity: Messages(), **sending.KINDS}
    monkeypatch.setattr(sending, "KINDS", kinds)
    with running_node(state, bundle, to=["messages:ward"]) as run:
        send(run.port, series())
        assert run.wait_finished() == {"done": 1}
    assert sent == [(STUDY, 1, [len(series())])] * 2


def test_a_watched_folder_is_emptied_and_predicted(bundle, series, state, tmp_path, monkeypatch):
    monkeypatch.setattr("normal_guidance.clinic.node.node.QUIET_SECONDS", 0.0)
    watch, out = tmp_path / "watch", tmp_path / "out"
    files = series()
    (watch / "patient").mkdir(parents=True)
    for file in files:
        file.rename(watch / "patient" / file.name)
    (watch / "Smith John.txt").write_text("not DICOM")
    with running_node(state, bundle, senders=(), watch=watch, to=[f"folder:{out}"]) as run:
        run.wait("done")
        wait_until(lambda: len(list((watch / "not-taken").iterdir())) == 1)
    assert len(list(out.rglob("*.dcm"))) == RESULTS
    assert [path.name for path in watch.iterdir()] == ["not-taken"]
    assert "Smith" not in (state / "audit.jsonl").read_text()


def test_a_file_that_is_being_written_to_the_folder_is_left_alone(bundle, series, state, tmp_path):
    watch = tmp_path / "watch"
    watch.mkdir()
    series()[0].rename(watch / "slice.dcm")
    with running_node(state, bundle, senders=(), watch=watch) as run:
        step = next(loop for loop in run.node.loops if loop.name == "watching").step
        (watch / "slice.dcm").touch()
        assert step() is False
        assert (watch / "slice.dcm").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"senders": ()}, "nobody may send: give --from"),
        ({"senders": ["A@10.1.2.3"]}, r"cannot reach 127\.0\.0\.1"),
        ({"to": to(1) * 2}, "names a destination twice"),
    ],
)
def test_settings_that_cannot_work_are_refused(bundle, state, settings, message):
    with pytest.raises(UserError, match=message), running_node(state, bundle, **settings):
        pass


def test_two_nodes_on_one_folder_are_refused(bundle, state):
    second = running_node(state, bundle)
    with running_node(state, bundle), pytest.raises(UserError, match="is being written by process"), second:
        pass


def test_an_object_whose_row_was_lost_is_taken_up_at_the_next_start(bundle, series, state):
    """A kill between the file and its row: the sender got no answer, and nothing is there twice when it comes back."""
    files = series()
    with small_archive() as (port, got):
        with running_node(state, bundle, settle=1000) as run:
            send(run.port, files)
            run.node.queue._database.execute("DELETE FROM objects WHERE rowid IN (SELECT rowid FROM objects LIMIT 3)")
            run.node.queue._database.execute("UPDATE series SET files = files - 3")
        (state / "incoming" / "0" / "x").parent.mkdir()
        (state / "incoming" / "0" / "x.dcm").write_text("no DICOM")
        with running_node(state, bundle, to=to(port), settle=1000) as run:
            assert run.wait("receiving")[0].files == len(files)
            assert not (state / "incoming" / "0" / "x.dcm").exists()
            assert set(send(run.port, files)) == {0}
            assert run.wait("receiving")[0].files == len(files)
    assert got == []


def test_nothing_is_predicted_twice_when_only_the_queue_was_behind(bundle, series, state, monkeypatch):
    """Results that are complete on the disk are taken up, not made again."""
    files = series()
    with running_node(state, bundle) as run:
        send(run.port, files)
        run.wait_finished()
        (one,) = run.node.queue.in_state("done")
        assert run.node.queue.move(one, "ready")
    monkeypatch.setattr(predicting, "find_scans", lambda *_, **__: pytest.fail("predicted again"))
    with small_archive() as (port, got), running_node(state, bundle, to=to(port)) as run:
        assert run.wait_finished() == {"done": 1}
    assert len(got) == RESULTS


def test_a_node_that_was_ended_goes_on_with_what_was_arriving(bundle, series, state):
    with small_archive() as (port, got):
        with running_node(state, bundle, to=to(port), settle=1000) as run:
            send(run.port, series())
        assert got == []
        with running_node(state, bundle, to=to(port)) as run:
            assert run.wait_finished() == {"done": 1}
    assert len(got) == RESULTS
