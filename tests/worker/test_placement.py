"""Threads and nodes, on machines that are folders of what the kernel would say of them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers import claims_of
from policies import settings
from policies.devices import ALONE, Claim, Turn, turn_of
from tests.builders import ROOT
from tests.worker.peer import WorkerProcess
from worker import placement
from worker.cgroups import cpu_quota
from worker.grammar.masks import MaskMaker
from worker.placement import SYSTEM, Part, choices, cores, nodes, numbers, part_of


def machine(path, siblings, cpulists):
    for cpu, text in enumerate(siblings):
        topology = path / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
    for node, text in enumerate(cpulists):
        (path / f"node/node{node}").mkdir(parents=True)
        (path / f"node/node{node}/cpulist").write_text(f"{text}\n")
    return path


def test_two_threads_of_a_core_are_one_core(tmp_path):
    at = machine(tmp_path, ["0,2", "1,3", "0,2", "1,3"], [])
    assert cores({0, 1, 2, 3}, at) == [{0, 2}, {1, 3}]
    assert cores({0, 3}, at) == [{0}, {3}]
    assert cores({7, 8}, at) == [{7}, {8}]


def test_a_node_has_the_cpus_that_this_process_may_use(tmp_path):
    at = machine(tmp_path, [], ["0-3,8-11", "4-7,12-15", ""])
    assert nodes(set(range(16)), at) == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    assert nodes({2, 5}, at) == [{2}, {5}]
    assert nodes({2, 3}, at) == [{2, 3}]
    assert nodes({2}, tmp_path / "elsewhere") == []


def test_nodes_are_in_the_order_of_their_numbers(tmp_path):
    at = machine(tmp_path, [], [str(node) for node in range(11)])
    assert nodes(set(range(11)), at) == [{node} for node in range(11)]


@pytest.mark.parametrize(("text", "expected"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set())])
def test_lists_of_the_kernel(text, expected):
    assert numbers(text) == expected


@pytest.mark.parametrize(("num", "expected"), [(1, 1), (2, 2), (3, 3), (4, 3), (64, 63)])
def test_from_four_cores_up_one_is_left_to_the_gateway(tmp_path, num, expected):
    """Alone, each has all; by a quota as by what there is."""
    assert part_of(ALONE, [set(range(num))], None, tmp_path) == (num, expected)
    assert part_of(ALONE, [set(range(64))], float(num), tmp_path) == (num, expected)


def test_there_is_a_thread_for_each_physical_core(tmp_path):
    at = machine(tmp_path, [f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)], [])
    assert part_of(ALONE, [set(range(16))], None, at) == (8, 7)


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.9, 1), (2.5, 2), (4.7, 3), (7.0, 6), (100.0, 7)])
def test_a_quota_rounds_down_and_the_least_counts(tmp_path, quota, expected):
    assert part_of(ALONE, [set(range(8))], quota, tmp_path).num_threads == expected


def test_processes_of_one_model_divide_the_cores_that_they_share(tmp_path):
    for num_own, expected in ((2, (4, 3)), (3, (2, 2)), (8, (1, 1)), (20, (1, 1))):
        for number in range(num_own):
            assert part_of(Turn(number, 0, num_own), [set(range(8))], None, tmp_path) == expected


def test_different_models_have_all_cores_each(tmp_path):
    for number in range(3):
        assert part_of(Turn(number, number, 1), [{0, 1}], None, tmp_path) == (2, 2)


def test_a_node_is_divided_among_those_of_the_model_that_are_there(tmp_path):
    choice = [set(range(8)), set(range(8, 24))]
    assert part_of(ALONE, choice, None, tmp_path) == (8, 7)
    of_three = [part_of(Turn(number, 0, 3), choice, None, tmp_path).num_threads for number in range(3)]
    assert of_three == [3, 15, 3]
    behind_another = [part_of(Turn(number, 1, 3), choice, None, tmp_path).num_threads for number in range(1, 4)]
    assert behind_another == [7, 7, 7]


def test_a_quota_is_divided_among_all_of_the_model_whichever_node_they_are_on(tmp_path):
    choice = [set(range(8)), set(range(8, 16))]
    assert part_of(Turn(1, 0, 2), choice, 8.0, tmp_path) == (4, 3)
    assert part_of(Turn(1, 1, 1), choice, 8.0, tmp_path) == (8, 7)
    assert part_of(Turn(3, 0, 4), choice, 2.0, tmp_path) == (1, 1)


seats = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=5)


@given(seats, st.integers(1, 4), st.integers(1, 12), st.none() | st.floats(0.1, 60.0))
def test_no_model_has_more_threads_than_cores_and_no_node_two_turns_more_than_another(
    models, num_nodes, num_cores, quota
):
    choice = [set(range(node * num_cores, (node + 1) * num_cores)) for node in range(num_nodes)]
    claims = [
        Claim(model=str(name), replica=replica, num_ranks=num_ranks)
        for name, (num_replicas, num_ranks) in enumerate(models)
        for replica in range(num_replicas)
    ]
    taken = Counter[int]()
    for name, (num_replicas, num_ranks) in enumerate(models):
        threads, there = Counter[int](), Counter[int]()
        for replica, rank in itertools.product(range(num_replicas), range(num_ranks)):
            turn = turn_of(claims, str(name), replica, rank)
            node = turn.number % num_nodes
            part = part_of(turn, choice, quota, SYSTEM / "nowhere")
            assert 1 <= part.num_threads <= part.num_cores
            threads[node] += part.num_threads
            there[node] += 1
        assert all(threads[node] <= max(num_cores, there[node]) for node in there)
        assert quota is None or threads.total() <= max(int(quota), there.total())
        taken += there
    assert max(taken.values()) - min(taken[node] for node in range(num_nodes)) <= 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_processes_take_nodes_in_turn(tmp_path):
    """Each in a process of its own, which it binds if it computes there."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    machine(tmp_path, [], [str(first), str(second)])
    script = (
        "import os, pathlib, sys\n"
        "from policies.devices import Turn\n"
        "from worker import placement\n"
        "real = placement.nodes\n"
        "placement.nodes = lambda cpus: real(cpus, pathlib.Path(sys.argv[1]))\n"
        "before = os.sched_getaffinity(0)\n"
        "part = placement.take(Turn(int(sys.argv[2]), int(sys.argv[2]), 1), sys.argv[3] == 'binds')\n"
        "after = os.sched_getaffinity(0)\n"
        "print(part == placement.taken(), part.num_threads, *(['all'] if after == before else after))\n"
    )
    for number, binds, cpu in ((0, "binds", first), (1, "binds", second), (2, "binds", first), (1, "", "all")):
        command = [sys.executable, "-c", script, str(tmp_path), str(number), binds]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        has_taken, num_threads, *cpus = done.stdout.split()
        assert (has_taken, cpus) == ("True", [str(cpu)])
        assert cpu == "all" or num_threads == "1"


def test_masks_are_made_beside_a_step_only_on_cores_of_the_process_itself(monkeypatch):
    num_threads = torch.get_num_threads()
    for num_spare in (0, 2):
        monkeypatch.setattr(placement, "_taken", Part(num_threads + num_spare, num_threads))
        assert MaskMaker(is_for_device=False)._num_spare == num_spare


def num_threads_of(num_replicas: int, **engine: object) -> int:
    """As the first of them says when it is ready; it is the only one that is started."""
    models = {"tiny": settings.Model(replicas=num_replicas, engine=settings.Engine(device="cpu", **engine))}
    claims = msgspec.to_builtins(claims_of(models))
    with WorkerProcess("demo", claims=claims, num_threads=0, max_kv_bytes=32 << 20, **engine) as worker:
        (said,) = [line.partition("CPU threads: ")[2] for line in worker.lines if "serving" in line]
        return int(said)


def test_replicas_and_ranks_say_that_they_have_divided_the_cores():
    """Real processes; the draft model beside the demo's, which comes later, leaves things as they are."""
    assert num_threads_of(1) == part_of(ALONE, choices(), cpu_quota()).num_threads
    crowd = 2 * len(choices())
    divided = part_of(Turn(0, 0, crowd), choices(), cpu_quota()).num_threads
    assert num_threads_of(crowd) == num_threads_of(crowd // 2, tensor_parallel=2) == divided
