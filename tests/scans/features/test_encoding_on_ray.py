"""A real cluster of three nodes on this machine gives the store of one machine, byte for byte, also if a node dies."""

import os
import sys
from functools import partial

import fake_scans
import pytest
from fake_scans import contents, make_manifest, make_parts
from test_encoding import StopError, run, stop_at

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features.encoding import EncodingOptions
from small_cluster import quiet, started

ray = pytest.importorskip("ray", reason="RAY IS NOT INSTALLED: encoding on a cluster is not tested")

pytestmark = quiet

LENGTHS = [5, 3, 8, 1, 6, 4, 9, 2, 7, 3] * 3


@pytest.fixture(scope="module")
def cluster():
    with started(nodes=3) as small:
        yield small


@pytest.mark.slow
def test_a_cluster_gives_the_same_bytes_and_survives_a_node(cluster, tmp_path):
    cluster, (victim, _) = cluster
    manifest = make_manifest(tmp_path / "data", LENGTHS, {4: "unreadable", 13: "strange"})
    job = {"parts": make_parts(manifest), "statistics": None, "read": fake_scans.read_slowly}
    run(manifest, tmp_path / "local", **job)
    seen = []

    def watch(now):
        seen.append(now)
        if now.stage == "encoding" and now.slices >= sum(LENGTHS) // 4 and victim in cluster.worker_nodes:
            cluster.remove_node(victim, allow_graceful=False)

    outcome = run(manifest, tmp_path / "ray", ray=cluster.address, watch=watch, **job)
    assert victim not in cluster.worker_nodes, "it was to die midway"
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert (outcome.failed, outcome.slices) == ({"failed": 1, "unreadable": 1}, sum(LENGTHS))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data", "local", "ray"]
    assert seen[-1].slices == seen[-1].of

    # What one machine began, the cluster ends.
    with pytest.raises(StopError):
        run(manifest, tmp_path / "both", watch=stop_at("encoding", 41), **job)
    run(manifest, tmp_path / "both", ray=cluster.address, **job)
    assert contents(tmp_path / "both") == contents(tmp_path / "local")


@pytest.mark.slow
def test_machines_that_differ_are_refused(cluster, tmp_path):
    cluster, _ = cluster
    manifest = make_manifest(tmp_path / "data", [3, 4])
    at = {"ray": cluster.address, "parts": dict.fromkeys(manifest.scan_ids, "train"), "statistics": None}
    with pytest.raises(UserError, match=r"^machine \S+ of the Ray cluster has other weights of tiny; copy the same f"):
        run(manifest, tmp_path / "weights", load=partial(fake_scans.load_by_process, os.getpid()), **at)
    with pytest.raises(UserError, match=r"none of the cluster's \d machines has 64 CPU; ask for less \(--threads"):
        run(manifest, tmp_path / "cores", options=EncodingOptions(threads=64), **at)


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    manifest = make_manifest(tmp_path / "data", [3])
    with pytest.raises(UserError, match=r"ray is not installed; pip install 'normal-guidance\[ray\]'"):
        run(manifest, tmp_path / "store", parts={"s000": "train"}, ray="auto")
