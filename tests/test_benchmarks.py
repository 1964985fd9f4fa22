"""The benchmarks run and report, and their textbook models equal ours: values, attention and every gradient."""

import importlib
import importlib.util
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

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FEATURES = 24
LENGTHS = (1, 2, 11, 40, 3)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def load(name):
    """A module of benchmarks/, which is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


textbook = load("textbook")

# ----------------------------------------------------------------------------------------------------
# Textbook models are independent references
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bags():
    return [torch.randn(length, FEATURES, dtype=torch.float64) for length in LENGTHS]


@pytest.fixture
def labels():
    return torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)


def model_and_textbook(method):
    """Ours and the textbook's with the same weights, none of which sits at a special value such as 0 or 1."""
    ours = build_model(method, FEATURES).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    reference = textbook.MODELS[method](FEATURES).double()
    reference.load_state_dict(ours.state_dict())
    return ours, reference


def test_every_trained_method_has_a_textbook_form():
    assert set(textbook.MODELS) == {name for name, method in METHODS.items() if method.scores_scans}


@pytest.mark.parametrize("method", textbook.MODELS)
def test_logits_and_attention_equal_the_textbook(method, bags):
    ours, reference = model_and_textbook(method)
    prediction = ours(torch.cat(bags), torch.tensor(LENGTHS))
    logits, attention = zip(*(reference(bag) for bag in bags), strict=True)
    attention = torch.cat(attention, dim=1)
    torch.testing.assert_close(prediction.logit, torch.stack(logits), **TOLERANCE)
    torch.testing.assert_close(prediction.attention, attention.mean(0), **TOLERANCE)
    torch.testing.assert_close(prediction.log_attention.exp(), attention, **TOLERANCE)


@pytest.mark.parametrize("method", textbook.MODELS)
def test_loss_and_gradients_equal_the_textbook(method, bags, labels):
    ours, reference = model_and_textbook(method)
    guided, lengths = METHODS[method].guided, torch.tensor(LENGTHS)
    prediction = ours(torch.cat(bags), lengths)
    loss = F.binary_cross_entropy_with_logits(prediction.logit, labels)
    if guided:
        loss = loss + NormalGuidance()(prediction.log_attention, lengths=lengths, from_logits=True)
    loss.backward()
    expected = textbook.loss(reference, bags, labels, guided)
    expected.backward()
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


# ----------------------------------------------------------------------------------------------------
# One step of every model
# ----------------------------------------------------------------------------------------------------


def run_benchmark(options, script="bench_core.py"):
    command = [sys.executable, str(BENCHMARKS / script), *shlex.split(options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_benchmark_ends_with_one_json_line():
    run = run_benchmark("--repeats 1 --models abmil --shapes head --no-memory --features 32 --bags 4")
    assert run.returncode == 0, run.stderr
    *table, last = run.stdout.splitlines()
    report = json.loads(last)
    assert report.keys() == {"benchmark", "machine", "options", "seconds", "rows", "goals"}
    assert report["machine"].keys() >= {"cpu", "cores", "threads", "torch", "python", "commit", "load", "date"}
    (row,) = report["rows"]
    assert (row["shape"], row["model"], row["counterpart"]) == ("head", "abmil", "ABMIL")
    assert row["ms"].keys() == row["min_ms"].keys() == {"ours", "floor", "torchmil", "loop"}
    assert all(value > 0 for value in row["ms"].values())
    assert {goal["goal"] for goal in report["goals"]} == {
        "ours / floor at most",
        "torchmil / ours at least",
        "loop / ours at least",
    }
    assert sum(line.startswith("{") for line in table) == 0


@pytest.mark.slow
def test_the_benchmark_refuses_unknown_models():
    run = run_benchmark("--models abmil,nosuch")
    assert run.returncode == 2
    assert "nosuch unknown; choose from" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_floor_counts_multiplications():
    """By hand: 3 slices and 768 features are 2 * 3 * 768 * 128 operations forward, as many back, and two GEMVs."""
    floor = load("floor")
    products = floor.attention_pooling([1, 2], 768)
    assert sum(product.flop for product in products) == 2 * (2 * 3 * 768 * 128) + 2 * (2 * 3 * 768)
    floor.runner(floor.transformer([1, 2], 16))()


# ----------------------------------------------------------------------------------------------------
# The sweep
# ----------------------------------------------------------------------------------------------------

TINY = "--configs 2 --features 16 --bags 4 --epochs 2"


def run_sweep_benchmark(options):
    """Its report, and the lines above it."""
    run = run_benchmark(f"{options} {TINY}", "bench_sweep.py")
    assert run.returncode == 0, run.stderr
    *lines, last = run.stdout.splitlines()
    assert not any(line.startswith("{") for line in lines)
    report = json.loads(last)
    assert report["benchmark"] == "sweep"
    assert {"cpu", "gpu", "torch", "python", "commit", "date"} <= report["machine"].keys()
    return report, lines


def test_the_cost_of_the_field_stands_beside_abmils():
    run = run_benchmark(f"--scans 8 --methods clam,abmil_clusters {TINY}", "bench_field.py")
    assert run.returncode == 0, run.stderr
    *lines, last = run.stdout.splitlines()
    assert list(json.loads(last)["step_ms"]) == ["abmil", "clam", "abmil_clusters"]
    assert [line.split()[0] for line in lines] == ["method", "abmil", "clam", "abmil_clusters"]
    assert lines[1].endswith("1.00x")


@pytest.mark.slow
def test_the_benchmark_of_lengths_stands_beside_another_commit(tmp_path):
    run = run_benchmark("--methods committee,whole_bells --features 8 --slices 50,3000", "bench_length.py")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert [(row["method"], row["slices"]) for row in report["rows"]] == [
        ("committee", 50),
        ("committee", 3000),
        ("whole_bells", 50),
        ("whole_bells", 3000),
    ]
    assert all(row["step_s"] > 0 and row["predict_s"] > 0 and 0 < row["peak_gib"] < 4 for row in report["rows"])
    assert set(report["goals"].values()) == {True}
    report["rows"][-1]["step_s"] = None
    (tmp_path / "report").write_text(json.dumps(report))
    options = f"--methods whole_bells --features 8 --slices 3000 --beside {tmp_path / 'report'}"
    beside = run_benchmark(options, "bench_length.py")
    assert beside.returncode == 0, beside.stderr
    _, before, after, _ = beside.stdout.splitlines()
    assert before.endswith(f"does not fit 24 GiB   {report['machine']['commit']}")
    assert after.startswith("whole_bells         3,000 ")


def test_a_length_that_memory_does_not_hold_is_a_row_without_figures(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_length")
    monkeypatch.setattr(bench.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(bench.torch, "set_num_threads", lambda _: None)

    def fail(error):
        def draw(*_):
            raise error

        monkeypatch.setattr(bench, "draw", draw)
        return bench.measure_here("abmil", 50, 8, 1.0)

    assert fail(RuntimeError("DefaultCPUAllocator: not enough memory")) == dict.fromkeys(
        ("step_s", "predict_s", "peak_gib")
    )
    with pytest.raises(RuntimeError, match="shapes differ"):
        fail(RuntimeError("shapes differ"))


@pytest.mark.slow
def test_the_sweep_benchmark_times_steps():
    report, lines = run_sweep_benchmark("--steps --methods ng,smtp --shapes head --batches 3 --val-scans 8")
    assert report["failed"] == []
    assert [(row["method"], row["shape"], row["precision"]) for row in report["rows"]] == [
        ("ng", "head", "float32"),
        ("smtp", "head", "float32"),
    ]
    for row in report["rows"]:
        assert row["finite"]
        assert row["steps"] == 3
        assert 0 < row["slots_filled"] <= 1
        assert 0 < row["evaluation_share"] < 1
        assert row["epoch_ms"] > 0
        assert row["replay_ms"] > 0
        assert len(row["epoch_ms_all"]) == 2
        assert row["gflop"] > 0
    assert sum(line.startswith(("ng ", "smtp ")) for line in lines) == 2
    assert report["goals"] == []  # they are for a GPU and the full size


@pytest.mark.slow
def test_the_sweep_benchmark_runs_beside_torchmil_and_compares_precisions():
    report, lines = run_sweep_benchmark(
        "--torchmil --accuracy --methods abmil --train-scans 32 --repeats 2 --commit abc1234"
    )
    assert report["machine"]["commit"] == "abc1234"
    (compared,) = report["torchmil"]
    assert (compared["method"], compared["configs"], compared["epochs"]) == ("abmil", 2, 2)
    assert {name: len(seconds) for name, seconds in compared["seconds_all"].items()} == {"ours": 2, "torchmil": 2}
    assert compared["ratio"] == pytest.approx(compared["seconds"]["torchmil"] / compared["seconds"]["ours"])
    float32, noise, float64 = report["accuracy"]
    assert [entry["run"] for entry in (float32, noise, float64)] == ["float32", "noise", "float64"]
    assert float32["differences"]["last"]["max_abs"] == 0
    assert noise["differences"]["last"]["max_abs"] > 0
    assert len(float64["best_val_auroc"]) == 2
    assert {goal["about"] for goal in report["goals"]} == {"abmil float64 last epoch", "abmil float64 best epoch"}
    assert sum(line.startswith(("met  ", "MISSED")) for line in lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--methods nosuch", "nosuch unknown; choose from"),
        ("--steps --precision bf16", "bf16 is for CUDA"),
        ("--torchmil --methods smap", "not smap"),
    ],
)
def test_the_sweep_benchmark_refuses_what_it_cannot_do(options, complaint):
    run = run_benchmark(options, "bench_sweep.py")
    assert run.returncode == 2
    assert complaint in run.stderr
    assert "Traceback" not in run.stderr


def test_the_goals_of_the_sweep_can_be_met_and_missed(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_sweep")
    blank = dict.fromkeys(bench.Row.__dataclass_fields__, 0.0) | {
        "method": "ng",
        "precision": "tf32",
        "engine": "recorded",
    }
    head = bench.Row(
        **blank | {"shape": "head", "epoch_ms": 0.19, "first_s": 16.0, "grid_minutes": 2.1, "ns_per_slice": 1.0}
    )
    chest = bench.Row(**blank | {"shape": "chest", "ns_per_slice": 1.4, "evaluation_share": 0.05})
    goals = bench.step_goals([head, chest])
    assert [(goal["about"], goal["met"]) for goal in goals] == [
        ("ng head tf32 recorded", True),
        ("ng head tf32 recorded", False),
        ("ng head tf32 recorded", False),
        ("ng head tf32 recorded", True),
        ("ng chest tf32 recorded", True),
        ("ng chest tf32 recorded", False),
        ("ng chest tf32 recorded", True),
    ]
    assert [text.startswith("met") for text in bench.verdicts(goals)] == [goal["met"] for goal in goals]


def test_chest_lengths_are_as_the_goal_has_them(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_sweep")
    lengths = bench.chest_lengths(100_000, torch.Generator().manual_seed(0))
    assert (lengths.min(), lengths.max()) == (63, 1083)
    assert lengths.double().mean() == pytest.approx(246, abs=1)


def test_the_check_of_cuda_finds_no_difference_on_the_cpu():
    run = run_benchmark(
        "--device cpu --widths 64,1001 --lengths 1-5 --methods ng,mhng --precisions float32 --jobs 2", "check_cuda.py"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert (report["cases"], report["failed"], report["took_over"]) == (4, [], 0)
    assert "refused" in run.stdout


def test_the_check_of_cuda_names_what_fails(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    check = importlib.import_module("check_cuda")
    options = check.parse_arguments(["--methods", "ng", "--device", "nowhere"])
    assert all("device 'nowhere' is unknown" in one.failed for one in check.run_group("1-5", "64", (), options))
    (died,) = check.run_group("of no such length", "64", (), options)
    assert died.failed == "the process ended with 1: KeyError: 'of no such length'"


# ----------------------------------------------------------------------------------------------------
# The index
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_index_benchmark_reports_every_step():
    run = run_benchmark("--slices 3000", "bench_index.py")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert [step["step"] for step in report["steps"]] == ["write", "open", "walk", "split", "audit", "describe"]
    assert set(report["goals"].values()) == {True}


# ----------------------------------------------------------------------------------------------------
# Encoding
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_encoding_benchmark_reports_rates_and_the_first_batch():
    options = "--encoder efficientnet-lite0 --scans 1 --batch-size 8 --repeats 1 --workers 1 --busy 1 --commit abc1234"
    run = run_benchmark(options, "bench_encode.py")
    assert run.returncode == 0, run.stderr
    assert "first batch within 2.0 s" in run.stdout
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["options"]["busy"] == 1
    assert report["slices_per_s"].keys() == {
        "bare encoder",
        "whole stage",
        "once workers run",
        "read, one process",
    }
    assert min(report["slices_per_s"].values()) > 0
    assert 0 < report["first_batch_s"][0] < report["stage_s"][0] + report["loading_s"][0]


# ----------------------------------------------------------------------------------------------------
# Localization metrics
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_metrics_benchmark_runs_beside_scikit_learn():
    options = "--slices 4000 --configurations 3 --sklearn-configurations 2 --repeats 2 --commit abc1234"
    run = run_benchmark(options, "bench_metrics.py")
    assert run.returncode == 0, run.stderr
    *lines, last = run.stdout.splitlines()
    assert not any(line.startswith("{") for line in lines)
    report = json.loads(last)
    assert (report["benchmark"], report["machine"]["commit"]) == ("metrics", "abc1234")
    some, every = report["rows"]
    assert (some["case"], every["case"]) == ("rsna-pe", "all")
    assert some["positive_scans"] < every["positive_scans"] == every["scans"]
    assert some["ranked_slices"] < every["ranked_slices"] == every["slices"] <= 4000
    for row in report["rows"]:
        assert row["differ"] < 1e-12
        assert 0.55 < row["mean_auroc"] < 0.75  # half a standard deviation is .64
        assert len(row["seconds_all"]) == 2
        assert row["sklearn_extrapolated_s"] == pytest.approx(row["sklearn_s"] * 3 / 2)
        assert min(row["best_s"], row["measures_s"]) > 0
    assert sum(line.startswith(("rsna-pe ", "all ")) for line in lines) == 2
    assert report["goals"] == []  # they are for the full size


def test_the_goals_of_the_metrics_can_be_met_and_missed(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench = importlib.import_module("bench_metrics")
    blank = dict.fromkeys(bench.Row.__dataclass_fields__, 0.0) | {"case": "all", "configurations": 32}
    fast, slow = (
        bench.Row(**blank | {"slices": 1_799_500, "seconds_all": seconds}) for seconds in ((1.9, 0.1), (2.1, 0.1))
    )
    small = bench.Row(**blank | {"slices": 4000, "seconds_all": (0.1,)})
    assert [goal["met"] for goal in bench.goals([fast, slow, small], "cuda")] == [True, False]
    assert [goal["limit"] for goal in bench.goals([fast], "cpu")] == [60]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "complaint"),
    [("--slices 500", "the longest scan alone has 1083"), ("--repeats 0", "--repeats 0: it must be 1 or more")],
)
def test_the_metrics_benchmark_refuses_what_it_cannot_do(options, complaint):
    run = run_benchmark(options, "bench_metrics.py")
    assert run.returncode == 2
    assert complaint in run.stderr
    assert "Traceback" not in run.stderr


# ----------------------------------------------------------------------------------------------------
# The viewer
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_viewer_benchmark_reads_and_browses():
    page = BENCHMARKS.parent / "src" / "normal_guidance" / "clinic" / "viewer" / "static" / "index.html"
    if not page.exists():
        pytest.skip("the viewer's page has not been built: make viewer")
    run = run_benchmark("--readers 3 --seconds 1 --scans 4 --size 32 --slices 12", "bench_viewer.py")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert [step["step"] for step in report["steps"]][:2] == [
        "crowd",
        "browse",
    ]  # and the page, where there is Chromium
    assert all(step["requests"] > 4 and step["errors"] == 0 for step in report["steps"])
    assert report["goals"]["no error: 3 readers for 1 s, 4 scans"] is True


# ----------------------------------------------------------------------------------------------------
# The node
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(ORTHANC is None, reason=MISSING)
def test_the_node_benchmark_finds_one_result_of_each_series():
    small = "--series 4 --kills 1 --down 1 --associations 20 --repeats 1"
    run = run_benchmark(f"--parts kills,hostile,latency {small}", "bench_node.py")
    assert run.returncode == 0, run.stderr + run.stdout
    report = json.loads(run.stdout.splitlines()[-1])
    assert (report["kills"]["exactly_one_result"], report["kills"]["more_than_one"]) == (4, 0)
    assert sum(report["hostile"]["by_kind"].values()) >= 20
    assert report["latency"]["last_slice_to_archive_s"]["median"] > report["latency"]["settle_s"]
    assert set(report["goals"].values()) == {True}
