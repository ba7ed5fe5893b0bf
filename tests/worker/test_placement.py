"""Threads and nodes, on machines that are folders of what the kernel would say of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.builders import ROOT
from worker.placement import cores, nodes, numbers


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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_replicas_take_nodes_in_turn(tmp_path):
    """In a process of its own, which it binds."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    machine(tmp_path, [], [str(first), str(second)])
    script = (
        "import os, pathlib, sys\n"
        "from worker import placement\n"
        "real = placement.nodes\n"
        "placement.nodes = lambda cpus: real(cpus, pathlib.Path(sys.argv[1]))\n"
        "print(placement.keep_to_a_node(int(sys.argv[2])) == os.sched_getaffinity(0), *os.sched_getaffinity(0))\n"
    )
    for index, cpu in ((0, first), (1, second), (2, first)):
        command = [sys.executable, "-c", script, str(tmp_path), str(index)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["True", str(cpu)]
