"""The benchmarks run and report, and their textbook models equal ours: values, attention and every gradient."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.methods import METHODS, build_model
from orthanc import MISSING, ORTHANC

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "src" / "normal_guidance" / "clinic" / "viewer" / "static" / "index.html"
sys.path.append(str(BENCHMARKS))
textbook = importlib.import_module("textbook")
FEATURES = 24
LENGTHS = (1, 2, 11, 40, 3)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def test_every_trained_method_has_a_textbook_form():
    assert set(textbook.MODELS) == {name for name, method in METHODS.items() if method.scores_scans}


@pytest.mark.parametrize("method", textbook.MODELS)
def test_values_and_gradients_equal_the_textbook(method):
    """With the same weights, none of which sits at a special value such as 0 or 1."""
    bags = [torch.randn(length, FEATURES, dtype=torch.float64) for length in LENGTHS]
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    ours = build_model(method, FEATURES).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    reference = textbook.MODELS[method](FEATURES).double()
    reference.load_state_dict(ours.state_dict())

    lengths, guided = torch.tensor(LENGTHS), METHODS[method].guided
    prediction = ours(torch.cat(bags), lengths)
    logits, attention = zip(*(reference(bag) for bag in bags), strict=True)
    torch.testing.assert_close(prediction.logit, torch.stack(logits), **TOLERANCE)
    torch.testing.assert_close(prediction.attention, torch.cat(attention, dim=1).mean(0), **TOLERANCE)
    torch.testing.assert_close(prediction.log_attention.exp(), torch.cat(attention, dim=1), **TOLERANCE)

    loss = F.binary_cross_entropy_with_logits(prediction.logit, labels)
    if guided:
        loss = loss + NormalGuidance()(prediction.log_attention, lengths=lengths, from_logits=True)
    loss.backward()
    expected = textbook.loss(reference, bags, labels, guided)
    expected.backward()
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    torch.testing.assert_close({name: one.grad for name, one in ours.named_parameters()}, gradients, **TOLERANCE)


def run_benchmark(script: str, options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *shlex.split(options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def report_of(script: str, options: str) -> tuple[dict, list[str]]:
    """The report, which is the last line alone, and the lines above it."""
    run = run_benchmark(script, options)
    assert run.returncode == 0, run.stdout + run.stderr
    *lines, last = run.stdout.splitlines()
    assert not any(line.startswith("{") for line in lines)
    return json.loads(last), lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "complaint"),
    [
        ("bench_core", "--models abmil,nosuch", "nosuch unknown; choose from"),
        ("bench_sweep", "--methods nosuch", "nosuch unknown; choose from"),
        ("bench_sweep", "--steps --precision bf16", "bf16 is for CUDA"),
        ("bench_sweep", "--torchmil --methods smap", "not smap"),
        ("bench_metrics", "--slices 500", "the longest scan alone has 1083"),
        ("bench_metrics", "--repeats 0", "--repeats 0: it must be 1 or more"),
    ],
)
def test_a_benchmark_refuses_what_it_cannot_do(script, options, complaint):
    run = run_benchmark(script, options)
    assert run.returncode == 2
    assert complaint in run.stderr
    assert "Traceback" not in run.stderr


def test_a_training_step_stands_beside_the_floor_torchmil_and_a_loop():
    small = "--repeats 1 --models abmil --shapes head --no-memory --features 32 --bags 4"
    report, _ = report_of("bench_core", small)
    assert report["machine"].keys() >= {"cpu", "cores", "threads", "torch", "python", "commit", "load", "date"}
    (row,) = report["rows"]
    assert (row["shape"], row["model"], row["counterpart"]) == ("head", "abmil", "ABMIL")
    assert row["ms"].keys() == row["min_ms"].keys() == {"ours", "floor", "torchmil", "loop"}
    assert all(value > 0 for value in row["ms"].values())
    assert len({goal["goal"] for goal in report["goals"]}) == 3


def test_the_floor_counts_multiplications():
    """By hand: 3 slices and 768 features are 2 * 3 * 768 * 128 operations forward, as many back, and two GEMVs."""
    floor = importlib.import_module("floor")
    products = floor.attention_pooling([1, 2], 768)
    assert sum(product.flop for product in products) == 2 * (2 * 3 * 768 * 128) + 2 * (2 * 3 * 768)
    floor.runner(floor.transformer([1, 2], 16))()


TINY = "--configs 2 --features 16 --bags 4 --epochs 2"


@pytest.mark.slow
def test_the_cost_of_the_field_stands_beside_abmils():
    report, lines = report_of("bench_field", f"--scans 8 --methods clam,abmil_clusters {TINY}")
    assert list(report["step_ms"]) == ["abmil", "clam", "abmil_clusters"]
    assert lines[1].endswith("1.00x")


@pytest.mark.slow
def test_the_benchmark_of_lengths_stands_beside_another_commit(tmp_path):
    report, _ = report_of("bench_length", "--methods ensemble,whole_bells --features 8 --slices 50,3000")
    assert [(row["method"], row["slices"]) for row in report["rows"]] == [
        (method, slices) for method in ("ensemble", "whole_bells") for slices in (50, 3000)
    ]
    assert all(row["step_s"] > 0 and row["predict_s"] > 0 and 0 < row["peak_gib"] < 4 for row in report["rows"])
    assert set(report["goals"].values()) == {True}
    report["rows"][-1]["step_s"] = None
    (tmp_path / "report").write_text(json.dumps(report))
    options = f"--methods whole_bells --features 8 --slices 3000 --beside {tmp_path / 'report'}"
    _, (_, before, after) = report_of("bench_length", options)
    assert before.endswith(f"does not fit 24 GiB   {report['machine']['commit']}")
    assert after.startswith("whole_bells         3,000 ")


@pytest.mark.slow
def test_a_fit_is_timed_part_by_part():
    report, (head, *lines) = report_of("bench_fit", "--scans 8 --slices 6 --features 8")
    (row,) = report["rows"]
    *parts, whole, _ = (row["seconds"][name] for name in head.split()[1:-3])
    assert 0 < sum(parts) < whole
    assert row["bundle_bytes"] > 0 < row["peak_gib"]
    assert lines[0].split()[0] == "8"


def test_a_length_that_memory_does_not_hold_is_a_row_without_figures(monkeypatch):
    bench = importlib.import_module("bench_length")
    monkeypatch.setattr(bench.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(bench.torch, "set_num_threads", lambda _: None)

    def fail(error):
        def draw(*_):
            raise error

        monkeypatch.setattr(bench, "draw", draw)
        return bench.measure_here("abmil", 50, 8, 1.0)

    nothing = dict.fromkeys(("step_s", "predict_s", "peak_gib"))
    assert fail(RuntimeError("DefaultCPUAllocator: not enough memory")) == nothing
    with pytest.raises(RuntimeError, match="shapes differ"):
        fail(RuntimeError("shapes differ"))


@pytest.mark.slow
def test_the_sweep_benchmark_times_steps():
    report, _ = report_of("bench_sweep", f"--steps --methods ng,smtp --shapes head --batches 3 --val-scans 8 {TINY}")
    assert report["failed"] == report["goals"] == []  # goals are for a GPU and the full size
    assert [row["method"] for row in report["rows"]] == ["ng", "smtp"]
    for row in report["rows"]:
        assert (row["shape"], row["precision"], row["finite"]) == ("head", "float32", True)
        assert (row["steps"], len(row["epoch_ms_all"])) == (3, 2)
        assert 0 < row["slots_filled"] <= 1
        assert 0 < row["evaluation_share"] < 1
        assert min(row["epoch_ms"], row["replay_ms"], row["gflop"]) > 0


@pytest.mark.slow
def test_the_sweep_benchmark_runs_beside_torchmil_and_compares_precisions():
    options = f"--torchmil --accuracy --methods abmil --train-scans 32 --repeats 2 --commit abc1234 {TINY}"
    report, lines = report_of("bench_sweep", options)
    assert report["machine"]["commit"] == "abc1234"
    (compared,) = report["torchmil"]
    assert (compared["method"], compared["configs"], compared["epochs"]) == ("abmil", 2, 2)
    assert {name: len(seconds) for name, seconds in compared["seconds_all"].items()} == {"ours": 2, "torchmil": 2}
    assert compared["ratio"] == pytest.approx(compared["seconds"]["torchmil"] / compared["seconds"]["ours"])
    differences = {entry["run"]: entry["differences"]["last"]["max_abs"] for entry in report["accuracy"]}
    assert list(differences) == ["float32", "noise", "float64"]
    assert differences["float32"] == 0 < differences["noise"]
    assert sum(line.startswith(("met  ", "MISSED")) for line in lines) == 2


def test_goals_can_be_met_and_missed():
    sweep, metrics = (importlib.import_module(name) for name in ("bench_sweep", "bench_metrics"))
    names = {"method": "ng", "precision": "tf32", "engine": "recorded"}
    blank = dict.fromkeys(sweep.Row.__dataclass_fields__, 0.0) | names
    head = {"shape": "head", "epoch_ms": 0.19, "first_s": 16.0, "grid_minutes": 2.1, "ns_per_slice": 1.0}
    chest = {"shape": "chest", "ns_per_slice": 1.4, "evaluation_share": 0.05}
    goals = sweep.step_goals([sweep.Row(**blank | head), sweep.Row(**blank | chest)])
    assert [goal["met"] for goal in goals] == [True, False, False, True, True, False, True]
    assert [text.startswith("met") for text in sweep.verdicts(goals)] == [goal["met"] for goal in goals]

    blank = dict.fromkeys(metrics.Row.__dataclass_fields__, 0.0) | {"case": "all", "configurations": 32}
    rows = [
        metrics.Row(**blank | {"slices": slices, "seconds_all": (seconds, 0.1)})
        for slices, seconds in ((1_799_500, 1.9), (1_799_500, 2.1), (4000, 0.1))
    ]
    assert [goal["met"] for goal in metrics.goals(rows, "cuda")] == [True, False]
    assert [goal["limit"] for goal in metrics.goals(rows[:1], "cpu")] == [60]


def test_chest_lengths_are_as_the_goal_has_them():
    lengths = importlib.import_module("bench_sweep").chest_lengths(100_000, torch.Generator().manual_seed(0))
    assert (lengths.min(), lengths.max()) == (63, 1083)
    assert lengths.double().mean() == pytest.approx(246, abs=1)


@pytest.mark.slow
def test_the_check_of_cuda_finds_no_difference_on_the_cpu():
    options = "--device cpu --widths 64,1001 --lengths 1-5 --methods ng,mhng --precisions float32 --jobs 2"
    report, lines = report_of("check_cuda", options)
    assert (report["cases"], report["failed"], report["took_over"]) == (4, [], 0)
    assert "refused" in "\n".join(lines)


def test_the_check_of_cuda_names_what_fails():
    check = importlib.import_module("check_cuda")
    options = check.parse_arguments(["--methods", "ng", "--device", "nowhere"])
    assert all("device 'nowhere' is unknown" in case.failed for case in check.run_group("1-5", "64", (), options))
    (died,) = check.run_group("of no such length", "64", (), options)
    assert died.failed == "the process ended with 1: KeyError: 'of no such length'"


@pytest.mark.slow
def test_the_index_benchmark_reports_every_step():
    report, _ = report_of("bench_index", "--slices 3000")
    assert [step["step"] for step in report["steps"]] == ["write", "open", "walk", "split", "audit", "describe"]
    assert set(report["goals"].values()) == {True}


@pytest.mark.slow
def test_the_encoding_benchmark_reports_rates_and_the_first_batch():
    options = "--encoder efficientnet-lite0 --scans 1 --batch-size 8 --repeats 1 --workers 1 --busy 1 --commit abc1234"
    report, _ = report_of("bench_encode", options)
    rates = report["slices_per_s"]
    assert rates.keys() == {"bare encoder", "whole stage", "once workers run", "read, one process"}
    assert min(rates.values()) > 0
    assert 0 < report["first_batch_s"][0] < report["stage_s"][0] + report["loading_s"][0]
    by_onnx, by_torch = report["command_s"]["onnxruntime"], report["command_s"]["torch"]
    assert report["times_as_fast"] == [by_torch[0] / by_onnx[0]]


@pytest.mark.slow
def test_the_metrics_benchmark_runs_beside_scikit_learn():
    options = "--slices 4000 --configurations 3 --sklearn-configurations 2 --repeats 2 --commit abc1234"
    report, _ = report_of("bench_metrics", options)
    some, every = report["rows"]
    assert some["positive_scans"] < every["positive_scans"] == every["scans"]
    assert some["ranked_slices"] < every["ranked_slices"] == every["slices"] <= 4000
    for row in report["rows"]:
        assert row["differ"] < 1e-12
        assert 0.55 < row["mean_auroc"] < 0.75  # half a standard deviation is .64
        assert row["sklearn_extrapolated_s"] == pytest.approx(row["sklearn_s"] * 3 / 2)
        assert min(row["best_s"], row["measures_s"]) > 0


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.exists(), reason="the viewer's page has not been built: make viewer")
def test_the_viewer_benchmark_reads_and_browses():
    report, _ = report_of("bench_viewer", "--readers 3 --seconds 1 --scans 4 --size 32 --slices 12")
    assert [step["step"] for step in report["steps"]][:2] == ["crowd", "browse"]  # and the page, if there is Chromium
    assert all(step["requests"] > 4 and step["errors"] == 0 for step in report["steps"])
    assert report["goals"]["no error: 3 readers for 1 s, 4 scans"] is True


@pytest.mark.slow
@pytest.mark.skipif(ORTHANC is None, reason=MISSING)
def test_the_node_benchmark_finds_one_result_of_each_series():
    small = "--series 4 --kills 1 --down 1 --associations 20 --repeats 1"
    report, _ = report_of("bench_node", f"--parts kills,hostile,latency {small}")
    assert (report["kills"]["exactly_one_result"], report["kills"]["more_than_one"]) == (4, 0)
    assert sum(report["hostile"]["by_kind"].values()) >= 20
    assert report["latency"]["last_slice_to_archive_s"]["median"] > report["latency"]["settle_s"]
    assert set(report["goals"].values()) == {True}
