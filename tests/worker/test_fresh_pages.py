"""The first answers to write somewhere in the pool do not wait for the kernel to clear it."""

import resource
import sys
import threading

import pytest

from policies.settings import Engine
from tests.worker.tiny import checkpoint
from worker.inputs import Span
from worker.runner import Runner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages come as they are written to")


def num_faults(do):
    """Pages that were not there when this thread came to them."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    do()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_blocks_behind_those_that_are_written_have_their_pages(tmp_path, kv_dtype):
    checkpoint(tmp_path, "LlamaForCausalLM", head_dim=64)
    engine = Engine(device="cpu", dtype="float32", block_size=32, max_kv_bytes=200 << 20, kv_dtype=kv_dtype)
    runner = Runner.load(str(tmp_path), engine)
    runner.forward([Span([1, 2], 0, [0], 0)])
    runner.have_pages_ready()
    assert runner.fresh_pages is not None
    logits = runner.forward([Span([3], 2, [0], 1)]).clone()
    runner.fresh_pages.wait()
    if not runner.fresh_pages.is_able:
        pytest.skip("a kernel before 5.14")
    # Twelve without; one or two may be the interpreter's own.
    assert num_faults(lambda: [runner.copy_block(0, target) for target in range(9, 1200, 9)]) < 6
    assert runner.forward([Span([3], 2, [0], 1)]).equal(logits), "what was written is as it was"


def test_where_no_thread_can_be_had_a_step_is_computed_all_the_same(tmp_path):
    checkpoint(tmp_path, "LlamaForCausalLM")
    runner = Runner.load(str(tmp_path), Engine(device="cpu", dtype="float32", max_kv_bytes=8 << 20))
    spans = [Span([1, 2], 0, [0], 1)]
    logits = runner.forward(spans).clone()
    runner.have_pages_ready()
    assert runner.fresh_pages is not None
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        assert runner.forward(spans).equal(logits)
    finally:
        threading.stack_size(before)
    assert not runner.fresh_pages.is_able
    assert runner.forward(spans).equal(logits)
