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
