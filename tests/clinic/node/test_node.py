"""A node from end to end, in this process: what is sent comes out as results in an archive, once."""

import stat

import pytest
from pydicom import dcmread
from pydicom.uid import UID

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.node import node as nodes
from normal_guidance.clinic.node import receiver
from normal_guidance.clinic.node import serving as predicting
from normal_guidance.clinic.node.incoming import parse_rule
from normal_guidance.clinic.node.series_queue import Limits
from small_node import RESULTS, associate, running_node, send, small_archive, wait_until

SR, KO, SC = ("1.2.840.10008.5.1.4.1.1.88.34", "1.2.840.10008.5.1.4.1.1.88.59", "1.2.840.10008.5.1.4.1.1.7")


def test_a_series_that_is_sent_twice_comes_out_once_as_results_of_its_patient(node, archive, series, state):
    """Its files are kept for their days, and nobody but the owner may read what is on the disk."""
    files = series()
    with node(to=archive.to, keep=1.0) as run:
        for _ in range(2):
            assert run.take(files) == {"done": 1}
        assert run.node.queue.in_state("done")[0].round == 1
        run.node.clean()
        assert len(list(state.glob("incoming/*/*.dcm"))) == len(files)
        modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (state, *state.rglob("*"))}
    assert sorted(result.SOPClassUID for result in archive.got) == sorted(map(UID, (SR, KO, SC)))
    assert {result.StudyInstanceUID for result in archive.got} == {"1.2.826.0.1.3680043.9.7.1"}
    assert {result.PatientID for result in archive.got} == {dcmread(files[0]).PatientID}
    assert modes == {(False, 0o600), (True, 0o700)}


def test_what_is_stored_is_what_was_sent_once_and_other_content_is_refused(node, series, state):
    files = series()
    changed = dcmread(files[0])
    changed.PixelData = bytes(len(changed.PixelData))
    with node(settle=1000) as run:
        assert set(send(run.port, [*files, *files])) == {0}
        assert send(run.port, [changed]) == [receiver.DUPLICATE]
        (queued,) = run.wait("receiving")
        assert queued.files == len(files) == len(list(state.glob("incoming/*/*.dcm")))
        assert run.node.receiver.counts["refused objects"] == 1
        stored = [dcmread(file) for file in state.glob("incoming/*/*.dcm")]
    by_uid = {sent.SOPInstanceUID: sent for sent in map(dcmread, files)}
    assert {kept.SOPInstanceUID for kept in stored} == set(by_uid)
    assert all(kept == by_uid[kept.SOPInstanceUID] for kept in stored)  # byte for byte, pixels too


def test_late_slices_give_a_new_result_that_says_so(node, archive, series, state):
    files, got = series(), archive.got
    with node(to=archive.to) as run:
        run.take(files[:-2])
        assert len(got) == RESULTS
        run.take(files[-2:])
        (queued,) = run.wait("done")
        (folder,) = (state / "results").iterdir()
        assert "late_slices" in next(folder.rglob("prediction.json")).read_text()
    assert (queued.round, queued.files) == (2, len(files))
    assert len({result.SOPInstanceUID for result in got}) == len(got) == 2 * RESULTS
    early, late = (result.to_json() for result in got if result.SOPClassUID == KO)
    assert "Slices arrived after an earlier result" not in early
    assert "Slices arrived after an earlier result" in late


def test_slices_that_come_while_a_series_is_predicted_are_not_left_out(node, archive, series, monkeypatch):
    """The result of the incomplete series is thrown away; the archive gets the one of all slices."""
    files = series()
    real = predicting.write_scan

    def late(*arguments, **options):
        monkeypatch.setattr(predicting, "write_scan", real)
        send(run.port, files[-1:])
        return real(*arguments, **options)

    monkeypatch.setattr(predicting, "write_scan", late)
    with node(to=archive.to) as run:
        run.take(files[:-1])
        (queued,) = run.wait("done")
    assert (queued.round, queued.predicted_files) == (1, len(files))
    assert len(archive.got) == RESULTS


def test_files_are_deleted_after_they_are_kept_and_the_series_is_still_known(node, archive, series, state):
    files = series()
    with node(to=archive.to, keep=0.0) as run:
        run.take(files)
        run.node.clean()
        assert list(state.glob("incoming/*")) == list(state.glob("results/*")) == []
        send(run.port, files)  # the whole series: nothing new
        assert run.wait_finished() == {"done": 1}
        run.node.clean()
        send(run.port, series(slices=len(files) + 1)[-1:])  # a late slice alone
        assert run.wait_finished() == {"failed": 1}
        assert "send the whole series again" in run.node.queue.in_state("failed")[0].reason
    assert len(archive.got) == RESULTS


def test_a_full_queue_tells_senders_to_come_back(node, bundle, archive, series, state, monkeypatch):
    first, second, limits = series(1), series(2, scan=1), Limits(series=1)
    with node(to=archive.to, settle=1000, limits=limits) as run:
        assert set(send(run.port, first)) == {0}
        assert set(send(run.port, second)) == {receiver.NO_RESOURCES}
        assert set(send(run.port, series(1, slices=len(first) + 1)[-1:])) == {0}  # a series that is begun goes on
    with node(to=archive.to, limits=limits) as run:
        run.wait_finished()
        assert run.take(second) == {"done": 2}
    with running_node(state.with_name("small"), bundle, limits=Limits(bytes=1000)) as run:
        assert set(send(run.port, first)) == {receiver.NO_RESOURCES}
        monkeypatch.setattr(receiver, "FREE_BYTES", 2**60)
        assert set(send(run.port, first)) == {receiver.NO_RESOURCES}
        assert list(run.node.incoming.path.iterdir()) == []


def test_series_that_no_rule_takes_the_model_refuses_or_no_decoder_reads_are_told_and_cost_no_other(
    node, archive, series
):
    head = {"BodyPartExamined": "HEAD"}
    good, body, few = series(1, **head), series(2, BodyPartExamined="CHEST"), series(3, slices=2, **head)
    odd, broken = series(4, **head), series(5, **head)
    for file in (*odd, *broken):
        dataset = dcmread(file)
        if file in odd:
            del dataset.RescaleSlope, dataset.RescaleIntercept
        else:
            dataset.PixelData = dataset.PixelData[: len(dataset.PixelData) // 2]
        dataset.save_as(file)
    with node(rules=[parse_rule("body=HEAD")], to=archive.to) as run:
        assert run.take([*broken, *body, *odd, *few, *good]) == {"done": 1, "failed": 1, "ignored": 1, "refused": 2}
        reasons = {queued.reason for queued in run.node.queue.in_state("refused", "ignored")}
        assert run.node.queue.in_state("failed")[0].detail
        assert run.node.problems() == []
    assert "no rule takes it: body does not fit HEAD" in reasons
    assert any("it has 2 slices" in reason for reason in reasons)
    assert any("not HU" in reason for reason in reasons)
    assert len(archive.got) == RESULTS


def test_an_error_of_ours_fails_its_series_and_a_full_disk_is_tried_again(node, series, monkeypatch):
    errors = [OSError(28, "No space left on device")] * 4 + [KeyError("a bug")]
    monkeypatch.setattr(nodes, "ERROR_SECONDS", 0.01)

    def find(*arguments, **options):
        raise errors.pop(0)

    monkeypatch.setattr(predicting, "find_scans", find)
    with node() as run:
        assert run.take(series()) == {"failed": 1}
        assert run.node.queue.in_state("failed")[0].reason == "predicting failed with KeyError"
    assert errors == []


def test_a_series_that_ends_the_program_is_tried_three_times_and_wrong_settings_are_refused(node, series):
    with pytest.raises(UserError, match="names a destination twice"), node(to=["ARCHIVE@127.0.0.1:1"] * 2):
        pass
    with node(settle=1000) as run:
        with pytest.raises(UserError, match="is being written by process"), node():
            pass
        send(run.port, series())
        (queued,) = run.wait("receiving")
        run.node.queue.move(queued, "ready")
        for _ in range(predicting.ATTEMPTS):
            run.node.queue.count_attempt(queued)
    with node() as run:
        assert run.wait_finished() == {"failed": 1}
        assert "ended 3 times" in run.node.queue.in_state("failed")[0].reason


def test_a_series_is_complete_when_nothing_has_come_for_a_while_longer_after_an_abort(node, series):
    with node(settle=1000) as run:
        now, queue, step = [0.0], run.node.queue, run.node.loops[0].step.__self__
        step.arrivals = clock = predicting.Arrivals(lambda: now[0])
        run.node.receiver.touched = clock.touch
        send(run.port, series(1))
        association = associate(run.port)
        for file in series(2, scan=1):
            association.send_c_store(dcmread(file))
        association.abort()
        wait_until(lambda: {queued.association for queued in queue.in_state("receiving")} == {"released", "aborted"})
        waiting = {queued.association: queued for queued in queue.in_state("receiving")}
        for moment, complete in ((999.0, (False, False)), (1001.0, (True, False)), (10_001.0, (True, True))):
            now[0] = moment
            assert (step._is_complete(waiting["released"]), step._is_complete(waiting["aborted"])) == complete
        queue.set_association([waiting["released"].key], "open")  # as at a kill
        run.node.recover()
        assert {queued.association for queued in queue.in_state("receiving")} == {"aborted"}


def test_every_destination_gets_the_results_and_only_what_was_refused_is_sent_again(node, series, tmp_path):
    refusals, seen, out = [0xA700], [], tmp_path / "out"

    def status(dataset):
        seen.append(dataset.SOPInstanceUID)
        return refusals.pop() if dataset.SOPClassUID == SR and refusals else 0

    with small_archive(status) as (port, got), node(to=[f"ARCHIVE@127.0.0.1:{port}", f"folder:{out}"]) as run:
        assert run.take(series()) == {"done": 1}
    assert len(got) == RESULTS == len(set(seen))
    assert len(seen) == RESULTS + 1
    copied = [dcmread(file) for file in out.rglob("*.dcm")]
    assert {result.SOPInstanceUID for result in copied} == {result.SOPInstanceUID for result in got}


def test_a_watched_folder_is_emptied_when_its_files_are_whole_and_predicted(node, series, state, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "QUIET_SECONDS", 1000.0)
    watch, out = tmp_path / "watch", tmp_path / "out"
    (watch / "patient").mkdir(parents=True)
    moved = [file.rename(watch / "patient" / file.name) for file in series()]
    (watch / "Smith John.txt").write_text("not DICOM")
    with node(senders=(), watch=watch, to=[f"folder:{out}"]) as run:
        assert next(loop for loop in run.node.loops if loop.name == "watching").step() is False
        assert all(file.exists() for file in moved)  # each may still be written
        monkeypatch.setattr(nodes, "QUIET_SECONDS", 0.0)
        run.wait("done")
        wait_until(lambda: len(list((watch / "not-taken").iterdir())) == 1)
    assert len(list(out.rglob("*.dcm"))) == RESULTS
    assert [path.name for path in watch.iterdir()] == ["not-taken"]
    assert "Smith" not in (state / "audit.jsonl").read_text()


def test_a_node_that_was_ended_goes_on_with_what_was_arriving_and_with_files_without_a_row(
    node, archive, series, state
):
    """A kill between a file and its row: the sender got no answer, and nothing is there twice when it comes back."""
    files = series()
    with node(to=archive.to, settle=1000) as run:
        send(run.port, files)
        run.node.queue._database.execute("DELETE FROM objects WHERE rowid IN (SELECT rowid FROM objects LIMIT 3)")
        run.node.queue._database.execute("UPDATE series SET files = files - 3")
    (state / "incoming" / "0").mkdir()
    (state / "incoming" / "0" / "x.dcm").write_text("no DICOM")
    with node(to=archive.to, settle=1000) as run:
        assert run.wait("receiving")[0].files == len(files)
        assert not (state / "incoming" / "0" / "x.dcm").exists()
        assert set(send(run.port, files)) == {0}
        assert run.wait("receiving")[0].files == len(files)
    assert archive.got == []
    with node(to=archive.to) as run:
        assert run.wait_finished() == {"done": 1}
    assert len(archive.got) == RESULTS


def test_nothing_is_predicted_twice_when_only_the_queue_was_behind(node, archive, series, monkeypatch):
    """Results that are complete on the disk are taken up, not made again."""
    with node() as run:
        run.take(series())
        (queued,) = run.node.queue.in_state("done")
        assert run.node.queue.move(queued, "ready")
    monkeypatch.setattr(predicting, "find_scans", lambda *_, **__: pytest.fail("predicted again"))
    with node(to=archive.to) as run:
        assert run.wait_finished() == {"done": 1}
    assert len(archive.got) == RESULTS
