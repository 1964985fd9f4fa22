"""`nguide sweep` on a small store: what it prints, what it writes, and what it says to mistakes."""

from dataclasses import replace
from pathlib import Path

import pytest

from normal_guidance.base.files import read_json
from normal_guidance.cli.options import TrainingOptions
from normal_guidance.cli.train import make_grids, parse_methods
from normal_guidance.core.methods import BEYOND, METHODS
from normal_guidance.scans.features.store import open_store, write_store
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.run import load_run
from small_command import document, nguide, refusal

OPTIONS = ("--batch-size", "16", "--lr", "0.1,0.01", "--l1", "0", "--device", "cpu")
QUICK = (*OPTIONS, "--epochs", "2")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "store"
    sets = (shifted_mean(n, seed, features=8, shift=3.0) for seed, n in ((1, 48), (2, 24), (3, 24)))
    write_store(folder, zip(("train", "val", "test"), sets, strict=True), provenance={})
    return folder


def sweep(*words: object, code: int = 0) -> str:
    return nguide("sweep", *words, code=code).output


def rows(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]


def test_a_dry_run_estimates_and_writes_nothing(store: Path, tmp_path: Path) -> None:
    arguments = (store, "-o", tmp_path / "out", "--methods", "mean,ng", "--seeds", "0,3", *QUICK, "--dry-run")
    output = sweep(*arguments)
    assert "72 scans, " in output
    assert "3 batches x 2 epochs" in output
    found = rows(output)
    assert [row[:4] for row in found] == [["mean", "2", "2", "packed"], ["ng", "2", "2", "packed"]]
    assert "Nothing was written." in output
    told = document("sweep", *arguments)
    assert [method["method"] for method in told["methods"]] == ["mean", "ng"]
    assert told["total_s"] == pytest.approx(sum(method["runs"] * method["total_s"] for method in told["methods"]))
    assert not (tmp_path / "out").exists()


def test_methods_and_seeds_have_their_runs(store: Path, tmp_path: Path) -> None:
    arguments = (store, "--methods", "abmil,ng", "--seeds", "0,3", "--out", tmp_path, "--no-train-above-val", *OPTIONS)
    arguments = (*arguments, "--epochs")
    output = sweep(*arguments, "2")
    runs = {(m, s): load_run(tmp_path / m / s) for m in ("abmil", "ng") for s in ("0", "3")}
    assert [row[:2] for row in rows(output)] == [list(key) for key in runs]
    for row, ((_, seed), run) in zip(rows(output), runs.items(), strict=True):
        (winner,) = run.winners
        assert winner.config.seed == int(seed)
        assert winner.test is not None
        scores = (winner.test.localization_auroc, winner.test.localization_auprc)
        scores += (winner.test.scan_auroc, winner.test.scan_auprc)
        assert row[3:] == [f"{number:.3f}" for number in (winner.val_auroc, *scores)]
    assert "ng, seed 3: begins\n" in output
    assert "ng, seed 3: lr 0." in output
    report = read_json(tmp_path / "ng" / "3" / "report.json")
    assert report["options"]["seeds"] == "0,3"
    own = {"store", "methods", "seeds", "out", "save_epochs", "save_minutes"}
    training = {"lr", "l1", "renormalize", "modes", "negatives", "warmup", "least_width", "epochs", "batch_size"}
    training |= {"train_above_val"}
    assert report["options"].keys() == own | training | {"device", "precision", "engine"}  # those that were given
    assert report["departures"]["train_above_val"] is False
    before = (tmp_path / "ng" / "3" / "report.json").stat().st_mtime_ns
    assert rows(sweep(*arguments, "2")) == rows(output)
    for told, run in zip(document("sweep", *arguments, "2")["runs"], runs.values(), strict=True):
        assert (told["folder"], told["winners"]) == (str(run.folder), run.report["winners"])
    assert (tmp_path / "ng" / "3" / "report.json").stat().st_mtime_ns == before
    message = sweep(*arguments, "3", code=2)
    assert "holds another run: configs.0.epochs was 2, now it is 3" in message
    assert message.count("\n") == 1  # nothing has begun


def test_all_runs_are_looked_at_before_the_first(store: Path, tmp_path: Path) -> None:
    sweep(store, "--methods", "ng", "--seeds", "1", "--out", tmp_path, *QUICK)
    other = ("--seeds", "0,1", *OPTIONS, "--epochs", "3")
    message = sweep(store, "--methods", "abmil,ng", "--out", tmp_path, *other, code=2)
    assert "ng/1 holds another run: configs.0.epochs was 2, now it is 3" in message
    parts = ((part, shifted_mean(20, seed, features=12)) for seed, part in enumerate(("train", "val")))
    narrow = write_store(tmp_path / "narrow", parts, provenance={})
    message = sweep(narrow.folder, "--methods", "abmil,transmil", "--out", tmp_path / "b", *QUICK, code=2)
    assert message.startswith("error: TransMIL: 12 features cannot be divided among 8 heads; use an encoder with")
    assert message.endswith("as 8 or 16\n")
    assert {path.name for path in tmp_path.iterdir()} == {"ng", "narrow"}
    assert [path.name for path in (tmp_path / "ng").iterdir()] == ["1"]


def test_a_run_without_a_winner_is_no_error(tmp_path: Path) -> None:
    train, val = (shifted_mean(n, seed, features=8, shift=3.0) for seed, n in ((1, 48), (2, 24)))
    flipped = replace(val, labels=1 - val.labels, slice_labels=None)
    write_store(tmp_path / "store", {"train": train, "val": flipped}.items(), provenance={})
    quick = ("--epochs", "2", "--batch-size", "48", "--l1", "0", "--device", "cpu", "--lr")
    filtered = (*quick, "0", "--train-above-val")
    output = sweep(tmp_path / "store", "--methods", "abmil", "--out", tmp_path / "out", *filtered)
    assert "abmil, seed 0: no configuration had an epoch whose training AUROC was above" in output
    assert "; leave out --train-above-val\n" in output
    assert rows(output)[0][:4] == ["abmil", "0", "", "none selected"]
    output = sweep(tmp_path / "store", "--methods", "abmil", "--out", tmp_path / "b", *quick, "1e39")
    assert "abmil, seed 0: 1 of 1 configurations diverged: none was selected (" in output
    assert "; use lower learning rates\n" in output
    assert "train-above-val" not in output


def test_a_choice_among_few_configurations_is_said(tmp_path: Path) -> None:
    """Those that diverge cannot be selected; by the paper's rule, neither can those whose validation is easier."""
    train, val = (shifted_mean(n, seed, features=8, shift=3.0) for seed, n in ((1, 48), (2, 24)))
    write_store(tmp_path / "store", {"train": train, "val": val}.items(), provenance={})
    quick = ("--epochs", "2", "--l1", "0", "--device", "cpu", "--methods", "abmil")
    output = sweep(tmp_path / "store", "--out", tmp_path / "a", *quick, "--lr", "0.1,1e38,1e39")
    assert "warning: only 1 of 3 configurations could be selected: the others diverged; use lower" in output
    output = sweep(tmp_path / "store", "--out", tmp_path / "b", *quick, "--lr", "0.1,0.01")
    assert "warning" not in output


def test_a_split_decides_the_parts(store: Path, tmp_path: Path) -> None:
    scans = open_store(store).scans
    parts = scans.assign(part=scans["part"].replace({"test": "train"}))[["scan_id", "part"]]
    parts.to_csv(tmp_path / "split.csv", index=False)
    arguments = ("--split", tmp_path / "split.csv", "--methods", "mean", "--no-train-above-val", *QUICK)
    output = sweep(store, *arguments, "--out", tmp_path / "out")
    assert load_run(tmp_path / "out" / "mean" / "0").report["data"]["train"]["scans"] == 72
    assert "Selected; there is no test part" in output
    assert "Scores on the test part" not in output
    assert len(rows(output)[0]) == 4  # no test part, no columns for its scores
    parts.assign(part="val").to_csv(tmp_path / "split.csv", index=False)
    line = refusal("sweep", store, *arguments, "--out", tmp_path / "b")
    assert "split.csv has no scan in part 'train'; give --split" in line


def test_a_regularizer_gives_methods_that_attend_another_name(store: Path, tmp_path: Path) -> None:
    sweep(store, "--methods", "mean,abmil,dsmil", "--regularizer", "entropy", "--out", tmp_path, *QUICK)
    assert {path.name for path in tmp_path.iterdir()} == {"mean", "abmil_entropy", "dsmil_entropy"}
    config = read_json(tmp_path / "dsmil_entropy/0/report.json")["winners"][0]["config"]
    assert config["method"] == "dsmil_entropy"


def test_a_least_width_in_mm_is_that_of_the_stores_spacing(tmp_path: Path) -> None:
    bags = {part: shifted_mean(16, seed, features=4) for seed, part in enumerate(("train", "val"))}
    inputs = {
        "source": None,
        "scans": 32,
        "modalities": {},
        "planes": {},
        "slices": {"fewest": 1, "median": 1, "most": 1},
        "slice_spacing": {"low": 4.0, "median": 5.0, "high": 6.0},
    }
    write_store(tmp_path / "store", bags.items(), provenance={"identity": {}, "preprocessing": {}, "inputs": inputs})
    sweep(tmp_path / "store", "--methods", "ng", "--least-width", "8mm", "--out", tmp_path / "out", *QUICK)
    configs = read_json(tmp_path / "out/ng/0/config.json")["configs"]
    assert {one["least_width"] for one in configs} == {1.6}


def test_several_groups_have_a_row_each(store: Path, tmp_path: Path) -> None:
    options = ("--divergence", "forward_kl,reverse_kl", "--guidance-weight", "0.1,1")
    output = sweep(store, "--methods", "ng", "--no-train-above-val", "--out", tmp_path, *options, *QUICK)
    groups = [f"{name}-lambda{weight}-seed0" for name in ("forward_kl", "reverse_kl") for weight in (0.1, 1.0)]
    assert [row[2] for row in rows(output)] == groups


def test_grids_are_the_papers_unless_told() -> None:
    every = make_grids(parse_methods("all"), [0, 1], TrainingOptions(), 99)
    assert {len(configs) for configs in every.values()} == {32}
    assert parse_methods("beyond") == list(BEYOND)
    assert parse_methods("whole_bells,beyond,ng") == ["whole_bells", "evidence", "evidence_ng", "whole_bells_ng", "ng"]
    assert parse_methods("all") == [name for name in METHODS if name != "centered_gaussian"]
    options = TrainingOptions(l1="0", guidance_weight="0.1,1", divergence="forward_kl", patience=3)
    grids = make_grids(["abmil", "ng"], [5], options, 99)
    assert {key: len(configs) for key, configs in grids.items()} == {("abmil", 5): 4, ("ng", 5): 8}
    assert {(config.seed, config.patience) for configs in grids.values() for config in configs} == {(5, 3)}
