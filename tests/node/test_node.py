"""A node from end to end: what is sent comes out as results in an archive, once."""

from pydicom.uid import UID

from small_node import RESULTS, running_node, send, small_archive

SR, KO, SC = ("1.2.840.10008.5.1.4.1.1.88.33", "1.2.840.10008.5.1.4.1.1.88.59", "1.2.840.10008.5.1.4.1.1.7")


def test_a_series_comes_out_as_results_of_the_same_patient_and_study(bundle, series, tmp_path):
    files = series()
    with (
        small_archive() as (port, got),
        running_node(tmp_path / "state", bundle, to=[f"ARCHIVE@127.0.0.1:{port}"]) as run,
    ):
        assert set(send(run.port, files)) == {0}
        assert run.wait_finished() == {"done": 1}
    assert sorted(one.SOPClassUID for one in got) == sorted(map(UID, (SR, KO, SC)))
    assert {one.StudyInstanceUID for one in got} == {"1.2.826.0.1.3680043.9.7.1"}
    assert len({one.PatientID for one in got}) == 1
    assert len(got) == RESULTS
