"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017; Switch, Fedus et al. 2021): a router chooses a
few experts for each token, and what they say is summed by its weights.

Tokens are sorted by expert, so each expert multiplies its own at once, and reads its matrices once a step. Ranks that
share the experts have the same sums before them, so that all choose alike. On CUDA devices all of it is a few launches
that the host does not wait for, see ``worker.models.experts_on_cuda``; here the host reads how many tokens each has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.models.additions import Additions
from worker.models.architecture import Activation, Mixture
from worker.models.linear import Linear
from worker.models.mlp import Places, feed
from worker.models.ops import Ops, sigmoids
from worker.models.stacks import Stack
from worker.triton import has_triton

LEAST_SUM = 1e-20
"""Is added to what weights are divided by, as in transformers: sigmoids may all be nothing."""


class Together(Protocol):
    """All experts of a layer at once, those that every token goes through apart."""

    def __call__(self, x: Tensor, logits: Tensor, activation: Activation) -> Tensor:
        """x [num_tokens, hidden_size], and the router's logits [num_tokens, num_experts] f32 -> as x. The host waits
        for nothing."""
        ...


def goes_together(device: torch.device) -> bool:
    """Whether there are kernels for all experts at once, who want their matrices stacked."""
    return has_triton(device)


def together_of(
    mixture: Mixture, gate_up: Stack | None, down: Stack | None, correction: Tensor | None, is_repeatable: bool
) -> Together | None:
    """None where their matrices are not alike."""
    if gate_up is None or down is None:
        return None
    from worker.models.experts_on_cuda import CudaExperts

    return CudaExperts(mixture, gate_up, down, correction, is_repeatable)


@dataclass(frozen=True, slots=True)
class Experts:
    """Of one layer."""

    mixture: Mixture
    router: Linear
    """Rows: experts."""
    gate_up: list[Linear]
    down: list[Linear]
    correction: Tensor | None = None
    """[num_experts] f32, added to scores for choosing alone."""
    shared_gate_up: Linear | None = None
    """Of what every token goes through."""
    shared_down: Linear | None = None
    shared_router: Linear | None = None
    """One row, where what every token goes through is weighed."""
    together: Together | None = None
    """In place of ``gate_up`` and ``down``, which then are views of the same memory, for rows whose experts have
    nothing added to what they multiply."""

    def __call__(
        self, x: Tensor, ops: Ops, activation: Activation, layer: int, additions: Additions | None = None
    ) -> Tensor:
        """[num_tokens, hidden_size] -> the same."""
        logits = self.router.wide(x)
        if additions is not None:
            additions.add(layer, "router", x, logits)
        own = None if additions is None or self.together is None else additions.rows_of_experts(layer)
        if self.together is None or (own is not None and len(own) == len(x)):
            mixed = self._apart(x, logits, ops, activation, layer, additions)
        else:
            mixed = self.together(x, logits, activation)
            if own is not None and additions is not None:
                # The others stay as they are: what a row is told must not depend on who is beside it.
                left = additions.only(own, len(x))
                mixed[own] = self._apart(x[own], logits[own], ops, activation, layer, left)
        if self.shared_gate_up is not None and self.shared_down is not None:
            places: Places = "shared_gate_up", "shared_down"
            shared = feed(x, self.shared_gate_up, self.shared_down, ops, activation, layer, additions, places)
            if self.shared_router is not None:
                shared = shared * sigmoids(self.shared_router.wide(x)).to(shared.dtype)
            mixed += shared
        return mixed

    def _apart(
        self, x: Tensor, logits: Tensor, ops: Ops, activation: Activation, layer: int, additions: Additions | None
    ) -> Tensor:
        """As Together, one expert after another."""
        mixture = self.mixture
        weights, chosen = self._choose(logits)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // mixture.num_chosen
        counts = torch.bincount(chosen.flatten(), minlength=mixture.num_experts).tolist()
        outs = []
        for expert, own in enumerate(torch.split(tokens, counts)):
            if len(own):
                added = None if additions is None else additions.only(own, len(x))
                places: Places = ("gate_up", expert), ("down", expert)
                gate_up, down = self.gate_up[expert], self.down[expert]
                outs.append(feed(x[own], gate_up, down, ops, activation, layer, added, places))
        weighted = torch.cat(outs).float() * weights.flatten()[by_expert][:, None]
        # Back in the order of the tokens, so that a token's sum does not depend on who was beside it.
        sums = torch.empty_like(weighted).index_copy_(0, by_expert, weighted)
        return sums.view(len(x), mixture.num_chosen, -1).sum(1).to(x.dtype)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, num_experts] f32 -> weights and experts, [num_tokens, num_chosen]."""
        mixture = self.mixture
        scores = sigmoids(logits) if mixture.scores == "sigmoid" else logits.softmax(-1)
        ranked = scores if self.correction is None else scores + self.correction
        if mixture.num_groups > 1:
            groups = ranked.view(len(ranked), mixture.num_groups, -1)
            # As they were trained: DeepSeek-V3 adds up the best two of a group, V2 takes the best.
            best = groups.topk(2, -1).values.sum(-1) if mixture.scores == "sigmoid" else groups.amax(-1)
            others = torch.ones_like(best, dtype=torch.bool)
            others.scatter_(1, best.topk(mixture.num_chosen_groups).indices, False)
            ranked = groups.masked_fill(others[..., None], -torch.inf).flatten(1)
        chosen = ranked.topk(mixture.num_chosen).indices
        weights = scores.gather(1, chosen)
        if mixture.is_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        return weights * mixture.scale, chosen
