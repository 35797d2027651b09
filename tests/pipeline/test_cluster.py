"""Promises of the cluster as the driver has it: shares, sizes of groups, what does not fit, nodes that differ; refusals in one sentence."""

from __future__ import annotations

import pytest

from pipeline import cluster
from pipeline.config import ClusterSettings
from tests.pipeline.nodes import nodes_of
from workers.errors import UserError

THREE = [{"CPU": 4.0, "GPU": 2.0, "memory": 64 * 2.0**30}] * 3


def sizes(around, width=100, name="01-a", **own):
    return cluster.sizes_of_groups(around, ClusterSettings(**own), name, width)


def test_groups_are_as_many_as_there_is_room_for_and_stages_side_by_side():
    alone = nodes_of(THREE, **{"01": ("01-a",)})
    assert sizes(alone, workers=1) == [1] * 12
    assert sizes(alone, width=2, workers=1) == [1, 1]
    assert sizes(alone, workers=1, groups=5) == [1] * 5
    assert sizes(alone, workers=4) == [4] * 3
    assert sizes(alone, workers=1, gpus_per_worker=1) == [1] * 6
    assert sizes(alone, workers=1, gpus_per_worker=0.1, cpus_per_worker=4) == [1] * 3
    assert sizes(alone, workers=1, memory_gb_per_worker=40) == [1] * 3
    assert sizes(alone, workers=1, resources={"fast_disk": 1}) == [1], "none fits, and one is asked for"


def test_a_tenth_of_a_gpu_fits_ten_times():
    assert sizes(nodes_of([{"CPU": 99.0, "GPU": 1.0}]), workers=1, gpus_per_worker=0.1) == [1] * 10


def test_a_worker_is_on_one_node_and_not_on_parts_of_two():
    assert sizes(nodes_of([{"CPU": 3.0}] * 2), workers=1, cpus_per_worker=2) == [1, 1]


def test_nodes_that_are_lost_or_leave_are_no_room():
    assert sizes(nodes_of(THREE, lost=[0], leaving=[2]), workers=1) == [1] * 4


def test_an_elastic_group_has_as_many_ranks_as_there_is_room_for():
    own = {"workers": 4, "min_workers": 1}
    assert sizes(nodes_of([{"CPU": 1.0}] * 3), width=1, **own) == [3]
    assert sizes(nodes_of([{"CPU": 1.0}] * 3, lost=[1, 2]), width=1, **own) == [1]
    assert sizes(nodes_of([{"CPU": 1.0}] * 9), width=1, **own) == [4]
    assert sizes(nodes_of([{"CPU": 1.0}] * 9), width=3, **own) == [3] * 3
    assert sizes(nodes_of([{"CPU": 1.0}] * 2), width=7, **own) == [1, 1], "many small groups before few large ones: a star has no sums to wait for"


def test_drivers_on_a_cluster_have_equal_shares_of_it():
    around = nodes_of(THREE, **{"01": ("01-a",), "02": ("02-b",)})
    assert sizes(around, workers=1) == sizes(around, name="02-b", workers=1) == [1] * 6
    three = nodes_of([{"CPU": 1.0}] * 4, **{"01": ("01-a",), "02": ("02-b",), "03": ("03-c",)})
    assert [len(sizes(three, name=name, workers=1)) for name in ("01-a", "02-b", "03-c")] == [2, 1, 1], "nothing is left unused"
    crowd = nodes_of([{"CPU": 1.0}], **{f"0{i}": (f"0{i}-a",) for i in range(5)})
    assert all(sizes(crowd, name=f"0{i}-a", workers=1) == [1] for i in range(5)), "each has a group, which waits for its turn"


def test_trials_of_a_search_share_what_the_search_has():
    around = nodes_of([{"CPU": 8.0}], **{"01": ("01-a", "01-b", "01-search"), "02": ("02-c",)})
    assert len(sizes(around, workers=1)) == 2
    assert len(sizes(around, name="02-c", workers=1)) == 4


def test_what_does_not_fit_is_said_with_what_there_is():
    around = nodes_of([{"CPU": 2.0}] * 2)
    with pytest.raises(UserError, match="2 workers that take 1 CPUs, 1 GPUs each do not fit into this cluster \\(4 CPUs, 0 GPUs\\)"):
        cluster.check_fits(around, ClusterSettings(workers=2, gpus_per_worker=1))
    cluster.check_fits(around, ClusterSettings(workers=2, gpus_per_worker=1, groups=1))  # nodes may be started on demand
    cluster.check_fits(around, ClusterSettings(workers=9, min_workers=4))
    with pytest.raises(UserError, match="5 workers"):
        cluster.check_fits(around, ClusterSettings(workers=9, min_workers=5))


@pytest.mark.parametrize(("theirs", "said"), [({"torch": "1.0"}, "has torch 1.0"), ({"torch": ""}, "has no torch"), ({"Python": "3.9"}, "has Python 3.9")])
def test_a_node_with_other_versions_is_named_with_what_to_do(theirs, said):
    node, ours = nodes_of(THREE).nodes["1"], cluster.versions()
    cluster.compare(node, ours, ours)
    with pytest.raises(UserError, match=f"node 10.0.0.1 .* {said}, this machine .*constraints.txt"):
        cluster.compare(node, ours | theirs, ours)


def test_builds_of_one_version_are_one_version():
    assert all("+" not in version for version in cluster.versions().values())
    assert cluster.versions()["torch"]


def test_a_node_says_whether_it_sees_the_storage(tmp_path):
    (tmp_path / "probe").write_text("x")
    assert cluster.facts(str(tmp_path / "probe"))[1] == ""
    assert cluster.facts(str(tmp_path / "other"))[1] == "it is not there"
    assert "nothing://" in cluster.facts("nothing://there/x")[1]


@pytest.mark.parametrize(("raised", "said"), [
    ("Authentication failed: Authentication token is missing", "get-auth-token"),
    ("this node has an IP address of 1.2.3.4, but we cannot find a local Raylet with the same address", "ray://"),
    ("Version mismatch: The cluster was started with: Ray 1.0", "Version mismatch")])
def test_why_a_cluster_lets_nobody_in_is_one_line(raised, said):
    assert said in cluster.refusal(RuntimeError(raised))
    assert "\n" not in cluster.refusal(RuntimeError(raised + "\n at line 3"))


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "ray://127.0.0.1:1", "ray://x"])
def test_an_address_where_nothing_answers_is_told_at_once(address):
    with pytest.raises(UserError, match=r"cluster\.address=local"):
        cluster.check_reachable(address)
