"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017; Switch, Fedus et al. 2021): a router chooses a
few experts for each token, and what they say is summed by its weights.

Tokens are sorted by expert, so each expert multiplies its own at once, and reads its matrices once a step. Ranks that
share the experts have the same sums before them, so that all choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.models.architecture import Activation, Mixture
from worker.models.linear import Linear
from worker.models.ops import Ops


@dataclass(frozen=True, slots=True)
class Experts:
    """Of one layer."""

    mixture: Mixture
    router: Linear
    """Rows: experts."""
    gate_up: list[Linear]
    down: list[Linear]

    def __call__(self, x: Tensor, ops: Ops, activation: Activation) -> Tensor:
        """[num_tokens, hidden_size] -> the same."""
        mixture = self.mixture
        weights, chosen = self.router.wide(x).softmax(-1).topk(mixture.num_chosen, dim=-1)
        if mixture.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // mixture.num_chosen
        counts = torch.bincount(chosen.flatten(), minlength=mixture.num_experts).tolist()
        outs = []
        for expert, own in enumerate(torch.split(tokens, counts)):
            if len(own):
                outs.append(self.down[expert](ops.gate(self.gate_up[expert](x[own]), activation)))
        weighted = torch.cat(outs).float() * weights.flatten()[by_expert][:, None]
        # Back in the order of the tokens, so that a token's sum does not depend on who was beside it.
        sums = torch.empty_like(weighted).index_copy_(0, by_expert, weighted)
        return sums.view(len(x), mixture.num_chosen, -1).sum(1).to(x.dtype)
