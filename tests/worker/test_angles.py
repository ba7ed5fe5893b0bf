"""Tables of angles, filled as positions are met."""

import pytest
import torch

from worker.models.architecture import Rope
from worker.models.rope import PAGE, Rotary

ROPES = (
    Rope("default", 10_000.0, 32, max_positions=200),
    Rope("dynamic", 10_000.0, 32, max_positions=100, factor=2.0),
)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_a_table_has_of_each_position_that_it_learned_what_the_position_turns_by(rope):
    rotary = Rotary(rope, 200, torch.device("cpu"))
    angles = rotary.angles()
    for positions in ([0], [PAGE - 1, PAGE], [150, 199], [3, 199]):
        angles.learn(positions)
        cos, sin = rotary.at(torch.tensor(positions))
        torch.testing.assert_close(angles.cos[positions], cos)
        torch.testing.assert_close(angles.sin[positions], sin)


def test_a_position_that_no_text_reaches_is_refused():
    angles = Rotary(ROPES[0], 200, torch.device("cpu")).angles()
    with pytest.raises(IndexError):
        angles.learn([4 * PAGE])


@pytest.mark.parametrize("rope", ROPES)
def test_what_is_looked_up_is_what_would_be_computed(rope, monkeypatch):
    computed, looked_up = (Rotary(rope, 200, torch.device("cpu")) for _ in "ab")
    looked_up.look_up()
    positions = torch.tensor([0, 199, 7, 7, 200, 64])
    for one, other in zip(computed.at(positions), looked_up.at(positions), strict=True):
        assert torch.equal(one, other)
        assert one.shape == (6, rope.rotary_dim)
    monkeypatch.setattr(looked_up, "_computed", None)
    assert looked_up.at(positions)[0].shape == (6, rope.rotary_dim)


def test_a_table_that_would_be_too_large_is_none():
    rotary = Rotary(ROPES[0], 1 << 31, torch.device("cpu"))
    rotary.look_up()
    assert rotary.at(torch.tensor([1 << 30]))[0].shape == (1, ROPES[0].rotary_dim)
