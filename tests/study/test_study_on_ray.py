"""Studies on a real cluster: the same weights and histories as here, and mistakes told as mistakes."""

import socket
from dataclasses import replace
from functools import partial

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.study.experiment import Listener, TrainingJob, jobs_of, train_on_cluster, train_study
from normal_guidance.sweep.config import Execution, grid
from small_cluster import quiet, started
from small_study import make_study, small_grid

pytest.importorskip("ray", reason="RAY IS NOT INSTALLED: training on a cluster is not tested")

pytestmark = quiet


@pytest.fixture(scope="module")
def cluster():
    with started(nodes=2) as (small, _):
        yield small


@pytest.fixture
def set_threads():
    """The bits depend on how many there are, and a task asks for as many cores."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_cluster_gives_the_same_bytes(cluster, tmp_path, monkeypatch, set_threads):
    set_threads(1)
    here = make_study(tmp_path, ["ng"])
    here = replace(here, seeds=(1001,))
    train_study(here, make_grid=small_grid)
    monkeypatch.chdir(tmp_path)  # its processes start in another folder
    there = replace(here, folder=(tmp_path / "there").relative_to(tmp_path))
    finished = []
    train = partial(train_on_cluster, cluster.address)
    listener = Listener(finished=lambda title, run: finished.append((title, len(run.winners))), train=train)
    train_study(there, make_grid=small_grid, listener=listener)
    for run in ("ng/1001", "slice_reference/1001", "scan_reference/1001"):
        for file in ("best.safetensors", "best.json", "history.parquet", "predictions.parquet", "config.json"):
            assert (tmp_path / "there" / run / file).read_bytes() == (here.folder / run / file).read_bytes(), run
    titles = ["ng, seed 1001", "scan reference, seed 1001", "slice reference, seed 1001"]
    assert sorted(finished) == [(title, 1) for title in titles]
    # Started again there is nothing to do, and nobody is asked for a cluster.
    train_study(there, make_grid=small_grid, listener=Listener(train=partial(train_on_cluster, "nowhere:1")))


@pytest.mark.slow
def test_mistakes_in_a_task_are_the_user_s_own(cluster, copied, set_threads):
    """What only the process over there sees: the store is gone from its disk."""
    set_threads(1)
    job = TrainingJob(
        "mean", copied.folder / "mean" / "7", replace(copied.protocol, method="mean", seed=1001), grid, "mean"
    )
    gone = {1001: (copied.folder / "gone", None)}
    lost = replace(copied, dataset=replace(copied.dataset, draw=replace(copied.dataset.draw, sources=gone)))
    with pytest.raises(UserError, match=r"^\S+/gone is not a feature store: store.json is missing; give a folder made"):
        train_on_cluster(cluster.address, lost, [job], Listener())
    # What is nobody's mistake but ours does not pass for done either.
    broken = replace(copied, dataset=replace(copied.dataset, draw=replace(copied.dataset.draw, sources={})))
    with pytest.raises(UserError, match=r"(?s)a task failed \(.*KeyError.*\); run the same command again to continue"):
        train_on_cluster(cluster.address, broken, [job], Listener())


def test_needs_that_do_not_fit_are_refused(cluster, copied, set_threads):
    jobs = jobs_of(copied, ["mean"], small_grid)
    set_threads(2)
    message = r"none of the cluster's 2 machines has 2 CPU; use fewer threads \(OMP_NUM_THREADS\), or add machines"
    with pytest.raises(UserError, match=message):
        train_on_cluster(cluster.address, copied, jobs, Listener())
    on_gpu = replace(copied, execution=Execution("cuda:1", "tf32"))
    with pytest.raises(UserError, match="none of the cluster's 2 machines has 1 GPU; "):
        train_on_cluster(cluster.address, on_gpu, jobs, Listener())


def test_a_port_where_nobody_listens_is_told_at_once_unless_there_is_nothing_to_do(copied):
    """Ray itself tries such an address for minutes."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # held, but not listening
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"--ray {address}: no cluster answers \(.*refused\); start one: ray"):
            train_on_cluster(address, copied, jobs_of(copied, ["mean"], small_grid), Listener())
        train_on_cluster(address, copied, [], Listener())
