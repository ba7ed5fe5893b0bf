"""A gated MLP: of a layer, of one of its experts, or beside them."""

from __future__ import annotations

from torch import Tensor

from worker.models.additions import Additions, Place
from worker.models.architecture import Activation
from worker.models.linear import Linear
from worker.models.ops import Ops

Places = tuple[Place, Place]
"""By which additions know the two products."""


def feed(
    x: Tensor,
    gate_up: Linear,
    down: Linear,
    ops: Ops,
    activation: Activation,
    layer: int,
    additions: Additions | None,
    places: Places = ("gate_up", "down"),
) -> Tensor:
    """[num_tokens, hidden_size] -> the same."""
    opened = gate_up(x)
    if additions is not None:
        additions.add(layer, places[0], x, opened)
    gated = ops.gate(opened, activation)
    y = down(gated)
    if additions is not None:
        additions.add(layer, places[1], gated, y)
    return y
