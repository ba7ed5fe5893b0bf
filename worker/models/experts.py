"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017; Switch, Fedus et al. 2021): a router chooses a
few experts for each token, and what they say is summed by its weights.

Tokens are sorted by expert, so each expert multiplies its own at once, and reads its matrices once a step. Ranks that
share the experts have the same sums before them, so that all choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.models.additions import Additions
from worker.models.architecture import Activation, Mixture
from worker.models.linear import Linear
from worker.models.mlp import Places, feed
from worker.models.ops import Ops, sigmoids


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

    def __call__(
        self, x: Tensor, ops: Ops, activation: Activation, layer: int, additions: Additions | None = None
    ) -> Tensor:
        """[num_tokens, hidden_size] -> the same."""
        mixture = self.mixture
        logits = self.router.wide(x)
        if additions is not None:
            additions.add(layer, "router", x, logits)
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
        mixed = sums.view(len(x), mixture.num_chosen, -1).sum(1).to(x.dtype)
        if self.shared_gate_up is not None and self.shared_down is not None:
            places = "shared_gate_up", "shared_down"
            mixed += feed(x, self.shared_gate_up, self.shared_down, ops, activation, layer, additions, places)
        return mixed

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
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * mixture.scale, chosen
