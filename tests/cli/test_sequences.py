"""docs/howto/sequences.md, from beats to a study: its Python block and its commands, on a few drawn records."""

from pathlib import Path

import numpy as np
import pytest

from documents import ROOT, blocks_of, run_python
from normal_guidance.scans.features.store import open_store
from pages import check_page
from small_bundle import few_settings
from small_command import nguide
from test_documents import shell_commands

PAGE = ROOT / "docs" / "howto" / "sequences.md"
RECORDS = (*map(str, range(100, 110)), "201", "202")
BAGS, REST = 2, 5  # in each record: whole bags, and beats that fill none


def draw_beats(file: Path) -> None:
    """The arrays of the page; every second record has two ventricular beats, of another shape, in each bag.

    Beats are shuffled, because a file need not have them in order.
    """
    random = np.random.default_rng(1)
    beats = BAGS * 64 + REST
    record = np.repeat(RECORDS, beats)
    position = np.tile(np.arange(beats), len(RECORDS))
    ventricular = (np.repeat(np.arange(len(RECORDS)) % 2, beats) == 1) & np.isin(position % 64, (9, 40))
    X = random.normal(size=(len(record), 76))
    X[:, 20:40] += 3 * ventricular[:, None]
    X[:, 75] = position  # to know a beat again
    order = random.permutation(len(record))
    np.savez(
        file,
        X=X[order].astype(np.float16),
        record=record[order],
        position=position[order],
        ventricular=ventricular[order].astype(np.uint8),
    )


@pytest.mark.usefixtures("unrendered")
def test_the_page_leads_from_beats_to_a_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few_settings(monkeypatch)
    draw_beats(tmp_path / "beats.npz")
    (block,) = blocks_of(PAGE, "python")
    run_python(PAGE, block, {})

    said = {}
    for _, (program, *words) in shell_commands(PAGE):
        assert program == "nguide"
        words = [name for word in words for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
        result = nguide(*words)
        assert "warning" not in result.stderr
        said[" ".join(word for word in words[:2] if word.isalpha())] = result.output

    store = open_store("store")
    assert store.scan_ids == tuple(f"{record}-{number:03d}" for record in RECORDS for number in range(BAGS))
    bags = store.bags()
    assert bags.lengths.tolist() == [64] * len(store)
    assert bags.labels.tolist() == [number % 2 for number in range(len(RECORDS)) for _ in range(BAGS)]
    np.testing.assert_array_equal(bags.features[:, 75].reshape(-1, BAGS * 64), [range(BAGS * 64)] * len(RECORDS))
    found = bags.slice_labels.reshape(-1, 64)
    assert set(map(tuple, found.nonzero()[:, 1:].tolist())) == {(9,), (40,)}
    assert (found.sum(1) == 2 * bags.labels).all()
    assert set(store.patient_ids) == {*RECORDS} - {"202"}

    assert "It tells scans apart: AUROC " in said["fit store"]
    assert "by patient" in (tmp_path / "model" / "report.html").read_text()
    for folder in ("model", "study"):
        check_page((tmp_path / folder / "report.html").read_text())
    table = (tmp_path / "study" / "tables.md").read_text()
    assert all(method in table for method in ("Max pooling", "ACMIL", "Normal Guidance"))
