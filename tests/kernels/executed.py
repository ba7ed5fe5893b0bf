"""What the compiler makes of the kernel that draws, run instruction by instruction: it ends, whoever is faster, and
draws what the CPU draws. Needs no device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from policies.terms import Sampling
from tests.kernels.compiled import OnPaper
from tests.kernels.ptx import Program
from worker.sampler import Row, Sampler
from worker.sampling.on_device import draw
from worker.sampling.tiles import WIDTH
from worker.sampling.wishes import Wishes

CPU = torch.device("cpu")
BASE = 1 << 40
ASKED = (
    (0.5, {"temperature": 1.0, "top_p": 0.3}),
    (0.5, {"temperature": 2.0, "top_k": 40, "top_p": 0.4}),
    (3.0, {"temperature": 1.0, "top_k": 7, "top_p": 0.9}),
    (3.0, {"temperature": 0.3, "top_k": 3}),
    (12.0, {"temperature": 1e-40, "top_p": 0.5, "min_p": 0.05}),
    (3.0, {"temperature": 2.0, "top_k": 100_000, "min_p": 0.2}),
)
"""How far apart logits are, and what is asked for. Where they are near each other a nucleus leaves many out, and more
than one token is drawn before one is in it."""


@pytest.fixture
def launched(monkeypatch):
    """(kernel, arguments) of each launch, by name."""
    launches, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        launches[self.__name__] = run(self, *args, grid=grid, warmup=True, **kwargs), args

    monkeypatch.setattr(JITFunction, "run", compile_only)
    triton.runtime.driver.set_active(OnPaper(90))
    return launches


def executed(kernel, arguments, seed):
    """The arguments as they are after a launch: tensors are copied to a device's memory and back."""
    arrays = [each.numpy().copy() for each in arguments if isinstance(each, torch.Tensor)]
    places = np.cumsum([0, *(-(-each.nbytes // 256) * 256 for each in arrays)])
    memory = np.concatenate([np.pad(each.view(np.uint8).ravel(), (0, -each.nbytes % 256)) for each in arrays])
    addresses = iter(BASE + int(place) for place in places)
    numbers = [next(addresses) if isinstance(each, torch.Tensor) else each for each in arguments]
    Program(kernel.asm["ptx"]).run([*numbers, 0, 0], memory, BASE, seed)
    return [
        memory[place : place + each.nbytes].view(each.dtype).reshape(each.shape)
        for place, each in zip(places, arrays, strict=False)
    ]


@pytest.mark.parametrize("vocab_size", [64, 1000, 5000])
def test_the_same_token_is_drawn_as_on_the_cpu(launched, vocab_size):
    for case, (spread, wish) in enumerate(ASKED):
        generator = torch.Generator().manual_seed(case)
        logits = torch.randn(1, vocab_size, generator=generator) * spread
        logits = logits.round() if case % 2 else logits
        logits[:, ::7] = -torch.inf
        logits[:, 1] = 0.5
        row = Row(Sampling(max_tokens=9, **wish), case, [1, 2], [])
        expected = Sampler(vocab_size, ()).sample(logits.clone(), [row]).token_ids
        draw(logits, Wishes.of([row.sampling], [(case, 2)], CPU))
        kernel, arguments = launched["draw"]
        tiles = torch.nn.functional.pad(logits, (0, -vocab_size % WIDTH), value=-torch.inf).view(-1, WIDTH)
        maxima = tiles.amax(1)
        level = maxima.where(maxima.isfinite(), torch.zeros(()))
        masses = ((tiles - level[:, None]) / wish["temperature"]).exp().sum(1)
        # What ``survey`` would have found, and scratch that holds anything.
        arguments[1].copy_(maxima[None])
        arguments[2].copy_(masses[None])
        arguments[8].fill_(-559_038_737)
        chosen = executed(kernel, arguments, seed=case)[9]
        assert chosen.tolist() == expected, wish
